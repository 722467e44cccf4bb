"""Training that cannot succeed is not silent: each cause is named once, with what to change."""

import asyncio
import json
import re
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from agentrl.cli.training import before_and_after
from agentrl.config import load_config
from agentrl.observe.silence import IN_A_ROW, Silence, conditions
from agentrl.rollout.budget import Budget
from agentrl.runs.run import Run

GOOD = {"reward": 0.5, "cut_answers": 0.1, "truncated": 0.2, "grad_norm": 1.0, "mixed_groups": 0.6}


def silence(*, compares_groups: bool = True) -> Silence:
    return Silence(
        conditions(max_tokens=3, budget=Budget(turns=8), compares_groups=compares_groups)
    )


def warnings(reader: Silence, *rows: dict[str, Any]) -> list[str]:
    return [
        alarm.text for step, row in enumerate(rows) for alarm in reader.read({"step": step, **row})
    ]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (
            {"cut_answers": 0.998},
            "100% of the answers were cut at rollout.sampling.max_tokens=3: raise it",
        ),
        ({"truncated": 0.95}, "rollout.budget .turns=8."),
        ({"grad_norm": 0.0}, "the gradient was zero"),
        ({"mixed_groups": 0.0}, "all members of each group scored the same .*rollout.group_size"),
        (
            {"mixed_groups": 0.0, "policy_entropy": 1.2},
            (
                "scored the same .*algorithm.entropy_bonus alone moves the policy, towards chance"
                " .entropy 1.2 nats."
            ),
        ),
        (
            {"mixed_groups": 0.05},
            "all members of nine groups in ten scored the same .*little can be learned",
        ),
        ({"reasoning/cut": 0.4}, "40% of the answers are cut within their reasoning.*max_tokens"),
        (
            {"grad_norm/blocks/1": 0.0, "grad_norm/blocks/2": 1.0},
            r"blocks \(grad_norm/blocks/1 are 0\).*frozen",
        ),
        (
            {"health/effective_sample_size": 0.3},
            "only 30% of them count: lower rollout.max_staleness",
        ),
        (
            {"health/ratio_p1": 0.9, "health/ratio_p99": 4.0},
            "becomes 4 times as likely, or 0.9 times: lower trainer.lr",
        ),
        (
            {"health/logprob_gap/0": 0.2},
            r"by 0\.2 nats on average: .*adapters that are merged .* \(engine.adapters",
        ),
        ({"clipped_low": 0.2, "clipped_high": 0.2}, "40% of the tokens are clipped"),
        ({"health/repetition": 0.5}, "50% of what the model writes repeats"),
        ({"health/length_correlation": 0.9}, "rises with the length of an episode"),
        ({"health/disagreement": 0.6}, "order 60% of the members differently"),
        (
            {"entropy": 0.01, "success": 0.2},
            "hardly tries anything .* succeeds in 20%: raise algorithm.entropy_bonus",
        ),
    ],
)
def test_a_condition_that_lasts_is_named_once_and_again_when_it_has_come_back(
    bad: dict[str, float], named: str
) -> None:
    reader, row = silence(), {**GOOD, **bad}
    assert (
        warnings(reader, *[GOOD] * 5, *[row] * (IN_A_ROW - 1), GOOD, *[row] * (IN_A_ROW - 1), GOOD)
        == []
    )
    (first,) = warnings(reader, *[row] * 10)
    assert re.search(named, first)
    assert len(warnings(reader, GOOD, *[row] * 10)) == 1


def test_an_alarm_names_the_metrics_that_it_is_about() -> None:
    reader = silence()
    bad = {**GOOD, "health/ratio_p1": 0.9, "health/ratio_p99": 4.0}
    told = [
        alarm.metrics
        for step in range(6)
        for alarm in reader.read({"step": step, **bad, "grad_norm": 0.4})
    ]
    told += [alarm.metrics for alarm in reader.read({"step": 6, **GOOD, "grad_norm": 4e5})]
    told += [
        alarm.metrics
        for alarm in reader.read({"step": 7, "eval/hard/success": 0.5, "eval/hard/same_answers": 1})
    ]
    assert told == [
        ("health/ratio_p99", "health/ratio_p1"),
        ("grad_norm",),
        ("eval/hard/success", "eval/hard/same_answers"),
    ]


def test_an_environment_that_ignores_its_seed_is_named_at_once() -> None:
    rows = [{**GOOD, "different_starts": share} for share in (0.0, 0.5, 1.0, 1.0, 1.0)]
    (text,) = warnings(silence(), *rows)
    assert text.startswith("in step 1: in 50% of the groups, members began with different prompts")
    assert "ignores its seed" in text


def test_groups_of_equal_scores_are_normal_with_a_critic() -> None:
    assert warnings(silence(compares_groups=False), *[{**GOOD, "mixed_groups": 0.0}] * 10) == []


def test_conversations_that_fork_are_named_unless_they_are_meant_to() -> None:
    forks = [{**GOOD, "forked_share": 0.98}] * 10
    assert warnings(silence(), *forks) == []  # a context policy forgets messages
    (text,) = warnings(
        Silence(conditions(3, Budget(), compares_groups=True, extends=False)), *forks
    )
    assert "98% of the later turns forked" in text
    assert "model.history=extend" in text


def test_success_that_falls_below_where_training_began_is_named() -> None:
    reader = silence()
    # Within the noise.
    assert warnings(reader, evaluated(0.52, 0.45, 0.59), evaluated(0.47, 0.40, 0.54)) == []
    (text,) = warnings(reader, evaluated(0.0, 0.0, 0.02), evaluated(0.01, 0.0, 0.03))
    assert "held-out success (0.0%) is below where training began (52.0%)" in text


def evaluated(success: float, low: float, high: float) -> dict[str, float]:
    return {"eval/success": success, "eval/success_low": low, "eval/success_high": high}


@pytest.mark.parametrize(("success", "high", "warned"), [(0.01, 0.04, True), (0.08, 0.12, False)])
def test_imitation_far_below_its_player_is_named(success: float, high: float, warned: bool) -> None:
    texts = warnings(silence(), {"demonstrations/success": 0.13}, evaluated(success, 0.0, high))
    assert [bool(re.search(r"succeeds in 1.0% .*player in 13.0%", text)) for text in texts] == [
        True
    ] * warned


def test_a_run_prints_its_warnings_and_keeps_them_in_the_summary(tmp_path: Path) -> None:
    path, printed = tmp_path / "run.yaml", StringIO()
    sampling = "rollout: {sampling: {max_tokens: 3}}"
    path.write_text(f"env: frozen_lake\nrun_dir: {tmp_path / 'run'}\ntrackers: []\n{sampling}\n")
    with Run(load_config(path), Console(file=printed, width=500)) as run:
        for step in range(IN_A_ROW):
            row = {**GOOD, "cut_answers": 1.0, "success": 0.0, "seconds": 1.0, "staleness/max": 0.0}
            run.metrics.append({"step": step, **row})
            run.recorder.warn_of({"step": step, **row})
        asyncio.run(run.finish())
    assert (
        "warning: in 3 steps in a row, up to step 2: 100% of the answers were cut"
        in printed.getvalue()
    )
    (kept,) = json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]
    assert "rollout.sampling.max_tokens=3" in kept


def test_an_evaluation_whose_episodes_all_failed_has_no_success_in_the_summary(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"env: frozen_lake\nrun_dir: {tmp_path / 'run'}\ntrackers: []\n")
    with Run(load_config(path), Console(file=StringIO())) as run:
        run.metrics.append({"step": 0, **evaluated(nan, nan, nan)})
        run.metrics.append(
            {"step": 1, **GOOD, "success": 0.5, "seconds": 1.0, "staleness/max": 0.0}
        )
        run.metrics.append({"step": 1, **evaluated(0.25, 0.1, 0.5)})
        asyncio.run(run.finish())
    written = (tmp_path / "run" / "summary.json").read_text()
    assert "NaN" not in written
    summary = json.loads(written)
    assert (summary["success_before"], summary["success_after"]) == (None, 0.25)
    said = Text.from_markup(before_and_after(summary)).plain
    assert (
        said == "held-out success unknown before reinforcement learning, 25.0% after 1 steps (95 %"
        " interval 10.0% to 50.0%)"
    )
