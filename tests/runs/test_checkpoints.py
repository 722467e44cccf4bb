"""Checkpoints: whole or absent whatever kills the process; the newest and the best kept; resumed;
exported.
"""

import asyncio
import errno
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.errors import CheckpointError, ConfigError
from agentrl.files import durable
from agentrl.files.durable import finish_folder, remove_folder, unfinished, write_whole
from agentrl.ledger.ledger import Ledger, check_ledger
from agentrl.observe.metrics import MetricsFile
from agentrl.protocols import Savable
from agentrl.runs.checkpoint import CHECKSUMS, Checkpoints, damage, export
from agentrl.runs.preflight import was_begun
from agentrl.trainers.rank.checkpoint import FORMAT, STATE_FILE, read_state, save_state
from agentrl.trajectory import Task
from tests.commands import Command
from tests.processes import PATIENCE_SECONDS
from tests.properties import examples

ROOT = Path(__file__).parents[2]
LAKE = ROOT / "examples" / "frozen_lake.yaml"
FILES = ("config.json", "optimizer/0.distcp", "trainer.pt")


@dataclass(frozen=True, slots=True)
class Files(Savable):
    """What a trainer leaves: some files, each written in two parts, that say the step."""

    step: int

    async def save(self, folder: Path) -> None:
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("w") as file:
                file.write(f"{self.step} of ")
                file.flush()
            with (folder / name).open("a") as file:
                file.write(name)


def save(checkpoints: Checkpoints, step: int, values: Mapping[int, float] | None = None) -> Path:
    return asyncio.run(checkpoints.save(step, Files(step), values))  # type: ignore[arg-type]


def whole(checkpoints: Checkpoints) -> list[int]:
    """The steps of all, each of which is as it was saved."""
    for step, path in checkpoints.all().items():
        there = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        assert there == sorted([*FILES, CHECKSUMS]), path
        assert damage(path) is None
        assert all((path / name).read_text() == f"{step} of {name}" for name in FILES)
    return sorted(checkpoints.all())


# Whole or absent.


def killed_before(
    operation: int, checkpoints: Checkpoints, step: int, values: Mapping[int, float]
) -> bool:
    """Save in a process that is killed before its so many-th change of the file system; whether it
    came to that.
    """
    child = os.fork()
    if child == 0:
        left = operation
        changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in changes or (event == "open" and arguments[1] in ("w", "a")):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            save(checkpoints, step, values)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_save_killed_at_any_moment_leaves_whole_checkpoints_and_the_best_and_can_be_repeated(
    tmp_path,
):
    values = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.4}
    before = Checkpoints(tmp_path / "before", keep=2, keep_best=1)
    for step in (1, 2, 3, 4):
        save(before, step, values)
    assert whole(before) == [2, 3, 4]
    latest = []
    for operation in range(1000):
        checkpoints = Checkpoints(
            shutil.copytree(before.folder, tmp_path / f"{operation}"), keep=2, keep_best=1
        )
        killed = killed_before(operation, checkpoints, 5, values)
        assert set(whole(checkpoints)) >= {2, 4}  # 3 goes when 5 has come
        found = checkpoints.latest()
        assert found is not None
        latest.append(found[0])
        if found[0] == 4:
            save(checkpoints, 5, values)
        save(checkpoints, 6, values)
        assert whole(checkpoints) == [2, 5, 6]
        assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
            "step_000002",
            "step_000005",
            "step_000006",
        ]
        if not killed:
            break
    assert latest == sorted(latest)
    assert latest.count(4) > 2 * len(FILES)  # it was killed in the middle of each file
    assert latest.count(5) > len(FILES)  # and of the removal of the old one


# Damaged.


def flip(path: Path, at: int = 0, size: int = 1) -> None:
    """Change some bytes of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + size] = bytes(byte ^ 0xFF for byte in data[at : at + size])
    path.write_bytes(data)


@examples(50)
@given(
    name=st.sampled_from([*FILES, CHECKSUMS]),
    at=st.integers(0, 10**6),
    way=st.sampled_from(["flip", "cut", "gone"]),
)
@example(name=CHECKSUMS, at=-1, way="cut")
def test_a_file_that_differs_by_one_byte_or_is_gone_is_damage(name: str, at: int, way: str) -> None:
    with TemporaryDirectory() as folder:
        saved = save(Checkpoints(Path(folder)), 1)
        assert damage(saved) is None
        path = saved / name
        if way == "flip":
            flip(path, at % path.stat().st_size)
        elif way == "cut":
            path.write_bytes(path.read_bytes()[: at % path.stat().st_size])
        else:
            path.unlink()
        assert name in str(damage(saved)) or name == CHECKSUMS
        assert damage(saved) is not None


def test_damaged_checkpoints_are_set_aside_and_announced_and_the_newest_sound_one_is_the_latest(
    tmp_path,
):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4, 6):
        flip(save(checkpoints, step) / FILES[1]) if step == 6 else save(checkpoints, step)
    announced: list[str] = []
    checkpoints.set_aside_damaged(announced.append)
    assert checkpoints.latest() == (4, tmp_path / "step_000004")
    (text,) = announced
    assert "step_000006 is damaged (optimizer/0.distcp is not as it was written)" in text
    assert (tmp_path / "damaged-step_000006" / FILES[0]).exists()
    flip(save(checkpoints, 6) / FILES[0])  # the run has come there again
    checkpoints.set_aside_damaged(announced.append)
    assert "damaged-step_000006-2" in announced[-1]
    for step in (2, 4):
        flip(tmp_path / f"step_{step:06d}" / FILES[0])
    with pytest.raises(
        CheckpointError, match=r"every checkpoint .* is damaged .*step_000002: .*run_dir=ANOTHER"
    ):
        checkpoints.set_aside_damaged(announced.append)


def test_a_run_goes_back_to_an_earlier_checkpoint_and_keeps_the_later_ones_under_other_names(
    tmp_path,
):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4, 6):
        save(checkpoints, step)
    with pytest.raises(ConfigError, match="no checkpoint '3'; there is 2, 4, 6"):
        checkpoints.go_back_to(3)
    checkpoints.go_back_to(4)
    assert checkpoints.latest() == (4, tmp_path / "step_000004")
    assert (tmp_path / "left-step_000006").is_dir()


def trained_through(path: Path, steps: int) -> None:
    """A ledger with a trained task for each of so many steps."""
    with Ledger(path) as ledger:
        for step in range(steps):
            ledger.admit(step, Task("lake", step, {}, f"train-{step:06d}"), step)
            ledger.trained(step, {step: [1.0]})


@pytest.mark.parametrize(
    ("steps", "content", "problem"),
    [
        (3, None, "missing or empty"),
        (3, b"", "missing or empty"),
        (
            3,
            b"not a database, and longer than a header of one would be" * 9,
            "no ledger that can be read",
        ),
        (2, "ledger", "has the tasks of 2 steps, and the run has a checkpoint after 3 steps"),
        (3, "ledger", None),
        (4, "ledger", None),
    ],
)
def test_a_missing_or_contradicting_ledger_is_refused(tmp_path, steps, content, problem):
    path = tmp_path / "ledger.sqlite"
    if content == "ledger":
        trained_through(path, steps)
    elif content is not None:
        path.write_bytes(content)
    if problem is None:
        check_ledger(path, 3)
        return
    with pytest.raises(ConfigError, match=problem):
        check_ledger(path, 3)


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced: list[Path] = []
    sync, rename = os.fsync, Path.rename

    def remembered(descriptor: int) -> None:
        sync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())

    named: list[set[Path]] = []

    def renamed(self: Path, target: Path) -> Path:
        named.append({path for path in (self, *self.rglob("*")) if path not in synced})
        synced.clear()
        return rename(self, target)

    monkeypatch.setattr(durable.os, "fsync", remembered)
    monkeypatch.setattr(Path, "rename", renamed)
    path = save(Checkpoints(tmp_path / "checkpoints"), 3)
    assert named == [set()]
    assert {path.parent, path.parent.parent} <= set(synced)  # and its name is


def test_a_step_is_saved_once(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3)
    with pytest.raises(CheckpointError, match="exists already: a run saves each step once"):
        save(checkpoints, 3)
    assert whole(checkpoints) == [3]


def test_small_files_are_replaced_whole_and_folders_that_are_there_are_not(tmp_path):
    file = tmp_path / "config.yaml"
    for text in ("old", "new"):
        write_whole(file, text)
        assert file.read_text() == text
    folder = tmp_path / "folder"
    for made in (folder, unfinished(folder)):
        made.mkdir()
        (made / "file").write_text(made.name)
    with pytest.raises(OSError, match="not empty"):
        finish_folder(folder)
    assert (folder / "file").read_text() == "folder"
    remove_folder(folder)
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_checkpoint_trusts_of_the_ledger_is_in_its_file_and_not_in_the_log_alone(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for number in range(700):
            ledger.admit(number, Task("frozen_lake", number, {}, f"train-{number}"), 0)
        ledger.sync()
        # without the log beside it
        shutil.copyfile(tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite")
    with sqlite3.connect(tmp_path / "copy.sqlite") as copy:
        assert copy.execute("SELECT COUNT(*) FROM tasks").fetchone() == (700,)
    copy.close()


# The newest and the best.


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, float("nan")]), max_size=7),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_the_newest_are_kept_and_the_best_is_never_removed(
    tmp_path_factory, measured, keep, keep_best
):
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run"), keep, keep_best)
    values: dict[int, float] = {}
    for step, value in enumerate(measured, 1):
        save(checkpoints, step, values)
        there = whole(checkpoints)
        known = sorted(((v, s) for s, v in values.items() if not math.isnan(v)), reverse=True)
        best = [s for _, s in known[:keep_best]]
        assert set(there) == {*range(max(1, step - keep + 1), step + 1), *best}
        if value is not None:
            values[step] = value  # measured when it has been saved


def test_the_values_of_a_killed_run_choose_in_the_resumed_one(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step, value in enumerate((0.1, 0.7, 0.3)):
        file.append({"step": 2 * step, "eval/success": value})
        file.append({"step": 2 * step, "reward": 9.0})
    with (tmp_path / "metrics.jsonl").open("a") as half:
        half.write('{"step": 6, "eval/succ')
    resumed = MetricsFile(tmp_path / "metrics.jsonl")
    resumed.mend()
    resumed.append({"step": 6, "eval/success": 0.2})
    resumed.rewind(6)
    assert resumed.values("eval/success") == {0: 0.1, 2: 0.7, 4: 0.3, 6: 0.2}
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, keep_best=1)
    for step in (2, 4, 6):
        save(checkpoints, step, resumed.values("eval/success"))
    assert whole(checkpoints) == [2, 6]
    assert checkpoints.find("best", resumed.values("eval/success")).name == "step_000002"
    assert checkpoints.find("latest", {}).name == checkpoints.find("6", {}).name == "step_000006"
    with pytest.raises(ConfigError, match="has no checkpoint '5'; there is 2, 6, latest, best"):
        checkpoints.find("5", {2: 0.5})
    with pytest.raises(ConfigError, match=r"has no checkpoint 'best'; there is 2, 6, latest$"):
        checkpoints.find("best", {4: 0.5})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["checkpoint.best=reward"], "checkpoint.best: write eval/success or eval/reward"),
        (
            ["checkpoint.best=eval/success", "evaluation.every=0"],
            "must divide evaluation.every (0)",
        ),
        (
            ["checkpoint.best=eval/success", "evaluation.every=15"],
            "checkpoint.every (10) must divide",
        ),
        (
            ["checkpoint.best=eval/success", "evaluation.every=10", "evaluation.tasks=0"],
            "be more than 0",
        ),
    ],
)
def test_a_best_that_is_not_measured_is_refused(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(LAKE, ["checkpoint.every=10", *given])


def test_a_best_that_is_measured_is_taken():
    for name in ("eval/success", "eval/reward", "eval/agents/north/success"):
        load_config(LAKE, ["checkpoint.every=10", "evaluation.every=20", f"checkpoint.best={name}"])


# A state of another version.


def test_a_state_of_another_version_says_so_and_what_to_do(tmp_path):
    state = {"step": 3, "moments": [], "updates": {}}
    save_state(tmp_path, {**state, "format": FORMAT + 1})
    with pytest.raises(
        CheckpointError, match=rf"newer agentrl \(format {FORMAT + 1}; this one reads {FORMAT}\)"
    ):
        read_state(tmp_path)
    torch.save({"step": 3, "optimizer": {}}, tmp_path / STATE_FILE)
    with pytest.raises(
        CheckpointError, match=rf"older agentrl \(format 1; .* start a new run .* model={tmp_path}"
    ):
        read_state(tmp_path)
    torch.save({"step": 3, "format": FORMAT}, tmp_path / STATE_FILE)
    with pytest.raises(CheckpointError, match="lacks the step or the optimizer"):
        read_state(tmp_path)
    save_state(tmp_path, state)
    assert read_state(tmp_path) == {**state, "format": FORMAT}


# `--resume auto`.


def begun(run: Path, *settings: str) -> None:
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(
        load_config(LAKE, [f"run_dir={run}", *settings]).config.to_yaml()
    )


def test_auto_begins_what_is_not_there_goes_on_with_what_is_and_lets_steps_grow(tmp_path):
    run = tmp_path / "run"
    config = load_config(LAKE, [f"run_dir={run}", "steps=20"])
    assert not was_begun(config)
    run.mkdir()
    (run / "ledger.sqlite").touch()  # killed before it began
    assert not was_begun(config)
    for steps in ("steps=20", "steps=10"):
        begun(run, steps)
        assert was_begun(config)


def test_auto_refuses_the_run_of_another_config_and_names_what_differs(agentrl, tmp_path):
    run = tmp_path / "run"
    begun(run, "trainer.lr=0.5", "steps=90", "reward=[environment, {name: exact, as: right}]")
    done = agentrl("train", str(LAKE), f"run_dir={run}", "--resume", "auto")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    lake = load_config(LAKE).config
    assert f"trainer.lr: 0.5 -> {lake.trainer.settings.lr}" in said
    assert f"steps: 90 -> {lake.steps}" in said
    assert "reward.name: (none) -> environment" in said
    assert "reward.1.name: exact -> (none)" in said
    assert "engine" not in said
    assert "Write run_dir=ANOTHER for a new run, or resume" in said
    assert f"`agentrl train --resume {run}`" in said
    assert "Give a CONFIG file" in agentrl("train", "--resume", "auto").stderr


# Export.


@pytest.mark.slow
def test_an_exported_checkpoint_is_the_same_model_without_the_optimizer_and_overwrites_nothing(
    agentrl, tmp_path, tiny_model_dir
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    begun(run)
    ids = torch.arange(8)[None]
    for step, value in ((10, 0.75), (20, 0.5)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        with torch.no_grad():
            model.lm_head.weight += torch.randn(
                model.lm_head.weight.shape, generator=torch.Generator().manual_seed(step)
            )
            expected = model(ids).logits
        folder = run / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(tiny_model_dir, folder)
        model.save_pretrained(folder)
        save_state(folder, {"step": step, "optimizer": {}})
        (folder / "optimizer").mkdir()
        MetricsFile(run / "metrics.jsonl").append({"step": step, "eval/success": value})
        torch.save(expected, tmp_path / f"{step}.pt")
    for number, (source, which, step) in enumerate(
        [
            (run, [], 20),
            (run, ["--step", "best"], 10),
            (run, ["--step", "20"], 20),
            (folder, [], 20),
        ]
    ):
        into = tmp_path / "models" / str(number)
        done = agentrl("export", str(source), str(into), *which)
        assert done.returncode == 0, done.stderr
        assert f"step_{step:06d}" in done.stdout
        assert all(path.is_file() and path.suffix != ".pt" for path in into.iterdir())
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(into)(ids).logits
        assert torch.equal(logits, torch.load(tmp_path / f"{step}.pt"))
    assert (
        AutoTokenizer.from_pretrained(into).get_vocab()
        == AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()
    )
    again = agentrl("export", str(run), str(into))
    assert (again.returncode, "exists already: name a new folder" in again.stderr) == (2, True)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["0", "1", "2", "3"]
    wrong = agentrl("export", str(run), str(tmp_path / "x"), "--step", "30")
    assert (wrong.returncode, "there is 10, 20, latest, best" in wrong.stderr) == (2, True)
    assert agentrl("export", str(folder), str(tmp_path / "x"), "--step", "10").returncode == 2
    assert agentrl("export", str(tmp_path / "nowhere"), str(tmp_path / "x")).returncode == 2
    assert not (tmp_path / "x").exists()
    (run / "config.yaml").unlink()
    with pytest.raises(
        CheckpointError, match=r"holds no model: it has metrics.jsonl, where config.json and"
    ):
        export(run, tmp_path / "x")


# All of it, on a real run.


@pytest.mark.long
def test_one_command_begins_a_run_goes_on_after_a_kill_and_keeps_its_best(tmp_path, agentrl):
    arguments = [
        "train",
        str(LAKE),
        "recipe.demonstrations=null",
        "run_dir=run",
        "steps=4",
        "trackers=[]",
        "--resume",
        "auto",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "rollout.budget.turns=4",
        "evaluation.tasks=4",
        "evaluation.every=1",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "checkpoint.best=eval/reward",
    ]
    run = tmp_path / "run"
    process = Command(*arguments, cwd=tmp_path, log=tmp_path / "killed.log")
    while not (run / "checkpoints" / "step_000002").exists():
        assert process.poll() is None, process.output
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
    assert not (run / "summary.json").exists()
    again = Command(*arguments, cwd=tmp_path, log=tmp_path / "again.log")
    assert again.wait(300) == 0, again.output
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    values = MetricsFile(run / "metrics.jsonl").values("eval/reward")
    assert sorted(values) == [0, 1, 2, 3, 4]
    checkpoints = Checkpoints(run / "checkpoints")
    # those that were measured when the last was saved
    best = max((1, 2, 3), key=lambda step: (values[step], step))
    assert set(checkpoints.all()) == {best, 4}
    assert agentrl("export", str(run), str(tmp_path / "best"), "--step", "best").returncode == 0
    assert (tmp_path / "best" / "tokenizer.json").exists()


def test_a_checkpoint_from_elsewhere_is_refused_unless_the_user_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    own = save(checkpoints, 1)
    checkpoints.check_origin()
    elsewhere = save(Checkpoints(tmp_path / "downloads"), 2)
    linked = checkpoints.folder / "step_000002"
    linked.symlink_to(elsewhere)
    with pytest.raises(
        CheckpointError, match=r"step_000002 leads to .*downloads.*checkpoint.allow_foreign=true"
    ):
        checkpoints.check_origin()
    linked.unlink()
    shutil.rmtree(own / "optimizer")
    (own / "optimizer").symlink_to(elsewhere / "optimizer")
    with pytest.raises(CheckpointError, match="optimizer leads to"):
        checkpoints.check_origin()
    (own / "optimizer").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        checkpoints.check_origin()


# What cannot be removed, or read.


@pytest.fixture
def immovable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that the file system does not let go, as with `chattr +i`, whoever asks."""
    names: list[str] = []
    remove = os.unlink

    def refuses(path: Any, *args: Any, **options: Any) -> None:
        if Path(os.fsdecode(path)).name in names:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), os.fsdecode(path))
        remove(path, *args, **options)

    monkeypatch.setattr(os, "unlink", refuses)
    return names


def test_an_old_checkpoint_that_cannot_be_removed_is_said_once_and_removed_when_it_can_be(
    tmp_path, immovable, caplog
):
    checkpoints = Checkpoints(tmp_path)
    immovable += ["config.json"]
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    assert whole(checkpoints) == [4]
    assert [text for text in caplog.messages if "step_000001" in text] == [
        f"{unfinished(tmp_path / 'step_000001')} cannot be removed (Operation not permitted): it "
        "stays for now, and is tried again later"
    ]
    shutil.rmtree(tmp_path / "step_000004", ignore_errors=True)  # a resumed run comes there again
    (tmp_path / "step_000004").rename(unfinished(tmp_path / "step_000004"))
    save(checkpoints, 4)
    assert whole(checkpoints) == [4]
    immovable.clear()
    save(checkpoints, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005"]


def test_an_old_checkpoint_that_cannot_be_renamed_stays_whole(tmp_path, monkeypatch, caplog):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    rename = Path.rename

    def refuses(self: Path, target: Path) -> Path:
        if self.name == "step_000001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuses)
    for step in (2, 3):
        save(checkpoints, step)
    assert whole(checkpoints) == [1, 3]
    assert sum("step_000001" in text for text in caplog.messages) == 1


def test_an_export_that_fails_leaves_nothing(tmp_path):
    checkpoint = tmp_path / "step_000001"
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors"):
        (checkpoint / name).write_text("{}")

    def fails(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        export(checkpoint, tmp_path / "model", fails)
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.parametrize(
    "written", ["{}", "[]", "null", '"step"', "3", '{"config.json": 1}', "{", "\xff"]
)
def test_checksums_that_say_nothing_are_damage(tmp_path, written):
    saved = save(Checkpoints(tmp_path), 1)
    (saved / CHECKSUMS).write_text(written, encoding="latin-1")
    assert CHECKSUMS in str(damage(saved)) or "config.json" in str(damage(saved))


def test_checksums_that_leave_out_weights_are_damage_and_a_note_beside_them_is_not(tmp_path):
    saved = save(Checkpoints(tmp_path), 1)
    (saved / "notes.md").write_text("the good one")
    assert damage(saved) is None
    known = json.loads((saved / CHECKSUMS).read_text())
    del known["trainer.pt"]
    (saved / CHECKSUMS).write_text(json.dumps(known))
    assert damage(saved) == f"{CHECKSUMS} does not name trainer.pt"
