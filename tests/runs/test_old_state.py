"""Runs that were begun before checkpoints had `state.json`: their state is read from metrics, once.

`old_metrics.jsonl` has rows that such a version wrote, for `examples/kuhn_self_play.yaml` with four
steps (without the metrics that no state is in).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig, Constraint
from agentrl.algorithms.rae import RoleAdvantage
from agentrl.rollout.results import Results
from agentrl.runs.evaluation_log import LOG_FILE, EvaluationLog
from agentrl.runs.old_state import state_in_metrics
from agentrl.runs.state import RunState, read_state, write_state

OLD = Path(__file__).parent / "old_metrics.jsonl"


def old_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OLD.read_text().splitlines()]


@pytest.mark.parametrize("steps", [2, 4])
def test_a_run_of_an_earlier_version_goes_on_with_its_baselines_and_opponents(steps: int) -> None:
    rows = old_rows()
    state = RunState()
    state.load(state_in_metrics(rows, steps))
    algorithm, results = RoleAdvantage(), Results()
    state.add("batch_processing", BatchProcessing(BatchProcessingConfig(), algorithm))
    state.add("opponents", results)
    (last,) = [row for row in rows if row["step"] == steps - 1 and "reward" in row]
    assert algorithm.baselines == {
        f"kuhn_poker/{seat}": last[f"baseline/kuhn_poker/{seat}"] for seat in ("north", "south")
    }
    # Worked out by hand: 34 + 7 of 80 games in step 1, then 15 + 14 and 12 + 17 of 56 each.
    won, games = {2: (41.0, 80.0), 4: (41 / 4 + 29 / 2 + 29, 80 / 4 + 56 / 2 + 56)}[steps]
    assert results.tallies == {0: (pytest.approx(won), games)}


def test_multipliers_and_tokens_of_an_earlier_version_are_those_of_its_last_step() -> None:
    rows = [
        {"step": 0, "constraints/multiplier/m/violated": 0.4, "envs/a/tokens": 7.0},
        {"step": 1, "constraints/multiplier/m/violated": 0.6, "envs/a/tokens": 5.0},
        {"step": 1, "envs/b/baseline/b/north": 0.25, "baseline/a": 0.5},
        {"step": 2, "eval/success": 0.5, "constraints/multiplier/m/violated": 9.0},
    ]
    states = state_in_metrics(rows, 2)
    assert states["tasks"] == {"tokens": {"a": 12.0}}
    config = BatchProcessingConfig(constraints=(Constraint(part="m/violated", at_most=0.0),))
    shared, own = RoleAdvantage(), RoleAdvantage()
    processing = BatchProcessing(config, shared, {"b": own})
    processing.restore(states["batch_processing"])
    assert processing.multipliers == {"m/violated": 0.6}
    assert (shared.baselines, own.baselines) == ({"a": 0.5}, {"b/north": 0.25})


def test_evaluations_of_an_earlier_version_are_not_made_again(tmp_path: Path) -> None:
    shutil.copy(OLD, tmp_path / "metrics.jsonl")
    (tmp_path / "owed_evaluations.json").write_text('{"4": ["wide"]}')
    log = EvaluationLog.of_run(tmp_path)
    assert log.values("eval/agents/north/success") == {0: 0.5, 4: 0.51}
    assert log.is_finished(4, "held_out")
    assert not log.is_finished(4, "wide")
    assert log.pending(4) == ["wide"]
    log.finish(4, "wide", {"eval/wide/success": 0.25})
    assert (tmp_path / LOG_FILE).exists()
    (tmp_path / "metrics.jsonl").unlink()
    again = EvaluationLog.of_run(tmp_path)
    assert again.values("eval/success") == {0: 0.5, 4: 0.5}
    assert (again.pending_steps(), again.is_finished(4, "wide")) == ([], True)


def test_a_checkpoint_has_the_state_of_every_part_and_one_without_is_of_an_earlier_version(
    tmp_path: Path,
) -> None:
    assert read_state(tmp_path) is None
    kept = RunState()
    results = kept.add("opponents", Results({3: (0.1 + 0.2, 1 / 3)}))
    write_state(tmp_path / "step_000001", kept.snapshot())
    results.add({3: (1.0, 1.0)})
    resumed = RunState()
    states = read_state(tmp_path / "step_000001")
    assert states is not None
    resumed.load(states)
    assert resumed.add("opponents", Results()).tallies == {3: (0.1 + 0.2, 1 / 3)}
    with pytest.raises(ValueError, match="'opponents' is kept already"):
        resumed.add("opponents", Results())
