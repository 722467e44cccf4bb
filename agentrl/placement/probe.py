"""What a machine says of itself: its GPUs, memory and cores, and what its environment allows.

    machine = probe_machine(os.environ)   # in a task on each node of a cluster, or here
    inventory = inventory_of([machine])

GPUs are asked in a child process, so that the asking process makes no CUDA context.
"""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.placement.devices import Gpu, host, kind_of, usable_cores, usable_memory
from agentrl.placement.inventory import Inventory, Node

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices of the drivers of GPUs: NVIDIA's, WSL's, AMD's. Without one there is nothing to ask."""
_QUESTION = Path(__file__).with_name("gpu_question.py")
_ASK_SECONDS = 120.0
"""How long a machine may take to answer: it imports torch, from a slow disk, and wakes GPUs."""
_PARTS_AT_ONCE = 8
"""Parts of GPUs that are asked at the same time."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine says of itself."""

    name: str
    """The host's name."""
    gpus: tuple[Gpu, ...]
    """The GPUs that a process there may use, in CUDA's order."""
    visible: tuple[str, ...] | None
    """`CUDA_VISIBLE_DEVICES` as the machine's environment sets it: a name for each GPU. None if it
    does not."""
    cores: int
    """CPU cores that a process may use."""
    memory: int
    """Bytes of main memory that a process may use."""
    threads: str = ""
    """`OMP_NUM_THREADS` as the machine's environment sets it; empty if it does not."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """A name for each GPU, as `CUDA_VISIBLE_DEVICES` takes it: the inherited one, else its
        UUID, else its number.
        """
        if self.visible is not None:
            return self.visible[: len(self.gpus)]
        return tuple(gpu.uuid or str(number) for number, gpu in enumerate(self.gpus))


AskGpus = Callable[[Mapping[str, str]], tuple[Gpu, ...]]
"""Returns the GPUs that are visible in an environment. Picklable."""


Probe = Callable[[Mapping[str, str]], Machine]
"""Returns what a machine says of itself to a process with such an environment. Picklable."""


def has_driver() -> bool:
    """True if a driver of GPUs is loaded on this machine."""
    return any(Path(driver).exists() for driver in _DRIVERS)


def ask_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The `AskGpus` of this machine: in a child process, with torch.

    A process sees only one part of a GPU (MIG), so each listed part is asked on its own.

    Raises:
        ConfigError: torch cannot ask; says what it printed.
    """
    if not has_driver():
        return ()
    listed = _split_list(environ.get(_VISIBLE, ""))
    if not any(entry.startswith("MIG-") for entry in listed):
        return _ask_torch(environ)
    with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
        answers = pool.map(lambda entry: _ask_torch({**environ, _VISIBLE: entry}), listed)
        return tuple(gpu for answer in answers for gpu in answer[:1])


def _split_list(listed: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in listed.split(",") if entry.strip())


def _ask_torch(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    # -P: the folder of the program has modules whose names others use too.
    command = [sys.executable, "-P", str(_QUESTION)]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the GPUs of {socket.gethostname()} did not answer torch in {_ASK_SECONDS:g} s: see"
            " whether `nvidia-smi` answers there"
        ) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"torch cannot ask the GPUs of {socket.gethostname()}: {last}. Compare its build with"
            " the driver (`nvidia-smi`)"
        ) from error
    answered: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return tuple(Gpu(**{**facts, "capability": tuple(facts["capability"])}) for facts in answered)


def probe_machine(environ: Mapping[str, str], ask: AskGpus = ask_gpus) -> Machine:
    """What this machine says of itself to a process with such an environment.

    Raises:
        ConfigError: a driver of GPUs is there, and torch cannot ask it.
    """
    listed = environ.get(_VISIBLE)
    return Machine(
        socket.gethostname(),
        ask(environ),
        None if listed is None else _split_list(listed),
        usable_cores(),
        usable_memory(),
        environ.get("OMP_NUM_THREADS", ""),
    )


def visible() -> Inventory:
    """The GPUs of this machine that this process may use, or its CPU if there are none. Where they
    differ, those that are like the first.
    """
    machine = probe_machine(os.environ)
    alike = [number for number, gpu in enumerate(machine.gpus) if gpu.name == machine.gpus[0].name]
    if not alike:
        return Inventory.uniform(host())
    gpus = tuple(machine.gpus[number] for number in alike)
    names = tuple(machine.device_names[number] for number in alike)
    return _inventory(gpus, [_node(machine, names)])


def _node(machine: Machine, devices: tuple[str, ...], node_id: str = "", name: str = "") -> Node:
    named = name or machine.name
    return Node(devices, machine.memory, machine.cores, named, node_id, machine.threads)


def _inventory(gpus: Sequence[Gpu], nodes: Sequence[Node]) -> Inventory:
    kind = kind_of(min(gpus, key=lambda gpu: gpu.memory))
    return Inventory(kind, tuple(nodes))


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node of a cluster, the GPUs that the cluster counts there, and what a probe there found."""

    id: str
    """The cluster's id of the node."""
    address: str
    """Its network address."""
    counted: int
    """GPUs that the cluster assigns there."""
    machine: Machine
    """The answer of the probe."""

    @property
    def name(self) -> str:
        """Its name for messages."""
        return f"{self.machine.name} at {self.address}"


def inventory_of(reports: Sequence[NodeReport]) -> Inventory:
    """The devices of a cluster's nodes: on each the first of those visible there, as many as the
    cluster counts.

    Raises:
        ConfigError: a node has fewer than counted, or the nodes have GPUs of different kinds.
    """
    for report in reports:
        if len(report.machine.gpus) < report.counted:
            listed = report.machine.visible
            variable = "" if listed is None else f" (CUDA_VISIBLE_DEVICES={','.join(listed)})"
            raise ConfigError(
                f"the cluster counts {report.counted} GPUs on {report.name}, and a process there"
                f" sees {len(report.machine.gpus)}{variable}: start its node again with --num-gpus="
                f"{len(report.machine.gpus)}, or see what `nvidia-smi` says there"
            )
    gpus = [gpu for report in reports for gpu in report.machine.gpus[: report.counted]]
    if len({gpu.name for gpu in gpus}) > 1:
        kinds = "; ".join(f"{report.name} has {_count_kinds(report)}" for report in reports)
        raise ConfigError(
            f"the cluster has GPUs of several kinds, but a run needs a single kind: {kinds}. Join"
            " only nodes of one kind, or start a node with CUDA_VISIBLE_DEVICES and --num-gpus of"
            " one"
        )
    nodes = [
        _node(
            report.machine,
            report.machine.device_names[: report.counted],
            report.id,
            report.name,
        )
        for report in reports
    ]
    return _inventory(gpus, nodes)


def _count_kinds(report: NodeReport) -> str:
    counts = Counter(gpu.name for gpu in report.machine.gpus[: report.counted])
    return " and ".join(f"{count} x {name}" for name, count in counts.items())
