"""What the weights of a step owe is evaluated, also by a resumed run, and no more than that."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from agentrl.assembly import RolloutAssembly, TrainingAssembly
from agentrl.config import load_config
from agentrl.observe.metrics import MetricsFile
from agentrl.placement.time_share import NoSharing
from agentrl.protocols import Trainer
from agentrl.recipes import evaluate as evaluating
from agentrl.recipes.evaluations import evaluations
from agentrl.runs.evaluation_log import LOG_FILE, EvaluationLog
from agentrl.runs.run import Run


class KilledError(Exception):
    """The process ends here."""


class Engine:
    """Says which version it serves."""

    policy_version = 0

    async def update_weights(self, weights: object, version: int) -> None:
        self.policy_version = version


class Still(Trainer):
    async def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(2)}


class Launches:
    """The launches of a run, whose evaluations are of the versions `played`; those in `hangs` never
    end.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> None:
        self.config = folder / "run.yaml"
        self.config.write_text("env: frozen_lake\ntrackers: []\nsteps: 8\ncheckpoint: {every: 2}\n")
        self.settings = [f"run_dir={folder / 'run'}", "evaluation.tasks=2", *settings]
        self.folder = folder / "run"
        self.played: list[int] = []
        self.hangs: set[int] = set()
        self.step = 0
        monkeypatch.setattr(evaluating, "evaluate", self._evaluate)

    async def _evaluate(self, rollouts: RolloutAssembly, name: str) -> evaluating.Evaluation:
        version = (
            self.step if rollouts.engine is None else cast(Engine, rollouts.engine).policy_version
        )
        if version in self.hangs and rollouts.engine is None:
            raise asyncio.CancelledError  # training waits for it, and is killed here
        if version in self.hangs:
            await asyncio.sleep(3600)
        self.played.append(version)
        return evaluating.Evaluation((), (), name)

    def launch(
        self, start: int, steps: Sequence[int], *, settings: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Go on after `start` steps to each of `steps`, and be killed if an evaluation hangs.
        Returns the summary.
        """
        loaded = load_config(self.config, [*self.settings, *settings])
        own = cast(Any, Engine() if loaded.config.evaluation.engines else None)
        names = {
            "config": loaded.config,
            "runner": None,
            "reward": None,
            "frozen": {},
            "engine": None,
            "model": None,
        }
        parts = SimpleNamespace(
            trainer=Still(), evaluation_engine=own, sharing=NoSharing(), **names
        )

        async def trains(run: Run) -> None:
            async with evaluations(run, cast(TrainingAssembly, parts), start) as evaluated:
                self.step = start
                await evaluated.evaluate(start, due=start > 0)
                run.metrics.rewind(start)
                for step in steps:
                    await evaluated.before_update()
                    self.step = step
                    await evaluated.evaluate(self.step, due=True)
                await asyncio.sleep(0.01)
                if steps:
                    await evaluated.evaluate(steps[-1])
                await asyncio.sleep(0.01 if self.hangs else 0)
                if self.hangs:
                    raise KilledError  # what is in the files then is what a killed run leaves

        with Run(
            loaded, Console(file=StringIO()), resume=(self.folder / "config.yaml").exists()
        ) as run:
            with suppress(KilledError, asyncio.CancelledError):
                asyncio.run(asyncio.wait_for(trains(run), 300))
            return dict(run.summarise())


def test_the_first_version_is_evaluated_on_engines_of_its_own_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Launches(tmp_path, monkeypatch, "evaluation.engines=1", "evaluation.every=2")
    run.hangs = {0}
    summary = run.launch(0, [2, 4])
    assert run.played == []
    assert summary["success_before_interval"] is None
    log = json.loads((run.folder / LOG_FILE).read_text())
    assert log["pending"] == {step: ["held_out"] for step in ("0", "2", "4")}
    run.hangs = set()
    run.launch(4, [6])
    assert run.played == [0, 2, 4, 6]
    run.launch(6, [8])
    assert run.played == [0, 2, 4, 6, 8], "nothing is evaluated twice"
    log = json.loads((run.folder / LOG_FILE).read_text())
    assert (log["pending"], list(log["finished"])) == ({}, ["0", "2", "4", "6", "8"])
    assert not any((run.folder / "evaluation_weights").iterdir())


@pytest.mark.parametrize("settings", [(), ("evaluation.engines=1",), ("evaluation.overlap=true",)])
def test_the_last_version_is_owed_its_evaluation_when_a_resume_adds_steps_and_none_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    run = Launches(tmp_path, monkeypatch, *settings)
    run.hangs = {4}
    run.launch(0, [2, 4])  # killed while it evaluates the last weights, which no `every` asks for
    assert run.played == [0]
    run.hangs = set()
    run.launch(4, [6])
    assert run.played == [0, 4, 6]
    for start in (6, 6):
        run.launch(start, [])
    assert run.played == [0, 4, 6]


def test_an_evaluation_that_ends_while_its_weights_are_taken_again_is_no_longer_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Launches(tmp_path, monkeypatch, "evaluation.engines=1", "evaluation.every=2")
    evaluate = evaluating.evaluate
    asked, calls = asyncio.Event(), [0]

    def log() -> dict[str, Any]:
        return cast(dict[str, Any], json.loads((run.folder / LOG_FILE).read_text()))

    async def when_asked(*args: Any) -> evaluating.Evaluation:
        await asked.wait()
        return await evaluate(*args)

    async def taken(self: Still) -> dict[str, torch.Tensor]:
        calls[0] += 1
        if calls[0] == 2:
            asked.set()
            while "2" not in log()["finished"]:  # noqa: ASYNC110  it says so to nobody
                await asyncio.sleep(0)
        return {"weight": torch.zeros(2)}

    monkeypatch.setattr(evaluating, "evaluate", when_asked)
    monkeypatch.setattr(Still, "weights", taken)
    run.launch(0, [2])
    assert calls == [2]
    assert (run.played, log()["pending"]) == ([0, 2], {})
    assert not any((run.folder / "evaluation_weights").iterdir())


def test_a_result_after_training_is_not_taken_for_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Launches(tmp_path, monkeypatch).launch(4, [6])
    assert (summary["success_before"], summary["success_before_interval"]) == (None, None)
    assert summary["success_after_interval"] is not None


def test_evaluations_stay_finished_when_every_metric_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Launches(tmp_path, monkeypatch, "evaluation.every=2")
    run.launch(0, [2, 4])
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("eval/", "renamed/"))
    run.launch(4, [6])
    assert run.played == [0, 2, 4, 6]
    log = EvaluationLog.of_run(run.folder)
    assert list(log.values("eval/failed")) == [0, 2, 4, 6]
    log.go_back_to(4)
    assert list(EvaluationLog.of_run(run.folder).values("eval/failed")) == [0, 2, 4]


def test_an_evaluation_whose_row_was_written_before_a_kill_has_one_row_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Launches(tmp_path, monkeypatch, "evaluation.every=2")
    with monkeypatch.context() as patch:
        patch.setattr(EvaluationLog, "finish", killed)
        run.launch(0, [2])
    run.launch(0, [2])
    rows = MetricsFile(run.folder / "metrics.jsonl").rows()
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 2]


def killed(*args: object) -> None:
    raise KilledError


@pytest.mark.parametrize(
    ("name", "written"),
    [
        *[("owed_evaluations.json", text) for text in ("[]", "null", "{", '{"1": 3}')],
        *[(LOG_FILE, text) for text in ("[]", "{", "{}", '{"pending": {"a": []}, "finished": {}}')],
        (LOG_FILE, '{"pending": {"1": 3}, "finished": {}}'),
    ],
)
def test_a_broken_log_of_evaluations_is_reported_and_taken_for_an_empty_one(
    tmp_path: Path, name: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_text(written)
    log = EvaluationLog.of_run(tmp_path)
    assert (log.pending_steps(), log.values("eval/success")) == ([], {})
    assert len(caplog.messages) == 1
