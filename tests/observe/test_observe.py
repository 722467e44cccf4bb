"""What a run writes: metrics that survive a kill, curves, trajectories."""

import json
import os
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe.curve import draw_curve
from agentrl.observe.intervals import wilson_interval
from agentrl.observe.metrics import MetricsFile, rollout_metrics
from agentrl.observe.trajectories import write_trajectories
from agentrl.trajectory import (
    SEGMENT,
    BranchPoint,
    Completion,
    Group,
    Message,
    Score,
    Task,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)
from tests.properties import examples


def trajectory(
    reward: float, versions: tuple[int, ...], *, forked: bool = False, success: bool = False
) -> Trajectory:
    completion = Completion((5,) * len(versions), (-0.5,) * len(versions), versions, "stop")
    turn = Turn((1, 2, 3), completion, reward, {"success": success, "odd": {1, 2}}, forked=forked)
    messages = (Message("user", "P . O"), Message("assistant", "left"))
    return Trajectory("t/0/0", Task("lake", 7, id="t"), (turn,), Terminated(), messages)


def test_metrics_of_a_batch_are_those_of_its_trajectories():
    members = (trajectory(1.0, (4, 5), success=True), trajectory(0.0, (5, 5), forked=True))
    group = Group(
        members[0].task,
        members,
        (Score(1.0, {"env": 1.0}), Score(0.0, {"env": 0.0, "extra": 2.0})),
        4,
    )
    metrics = rollout_metrics([group], step=6)
    assert metrics["reward"] == 0.5
    assert metrics["reward/extra"] == 2.0  # a part that a member does not have is not a zero
    assert metrics["success"] == 0.5
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (2, 1.25)
    assert (metrics["sampled_tokens"], metrics["prompt_tokens"], metrics["forked_turns"]) == (
        4,
        6,
        1,
    )


def test_what_a_branch_shares_with_the_episode_that_it_has_left_is_counted_once():
    first, second, other = (trajectory(1.0, (5,) * tokens) for tokens in (3, 2, 4))
    whole = replace(first, turns=(*first.turns, *second.turns))
    left = BranchPoint(whole.id, turn=1, share=0.5)
    branch = replace(
        whole, id="t/0/0+1", turns=(*first.turns, *other.turns), trained_turns=1, branch=left
    )
    group = Group(whole.task, (whole, branch), (Score(1.0), Score(0.0)))
    metrics = rollout_metrics([group], step=5, envs=["lake"])
    assert metrics["sampled_tokens"] == metrics["envs/lake/tokens"] == 3 + 2 + 4
    assert metrics["prompt_tokens"] == 2 * 3
    assert metrics["turns"] == 2


def test_tokens_without_loss_and_turns_trained_on_before_have_no_part_in_staleness():
    old, young = trajectory(1.0, (1, 4)), trajectory(1.0, (5, 5))
    whole = replace(old, turns=(*old.turns, *young.turns), trained_turns=1)
    segment = replace(old, status=SEGMENT)
    groups = [
        Group(old.task, (whole,), (Score(2.0),)),
        Group(old.task, (segment,), (Score(1.0),), partial=True),
    ]
    metrics = rollout_metrics(groups, step=6, oldest_version=3)
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (2, pytest.approx(4 / 3))
    assert (metrics["staleness/groups/1"], metrics["staleness/groups/2"]) == (0.5, 0.5)
    assert (metrics["stale_tokens"], metrics["segments"]) == (0.25, 1)
    assert (metrics["reward"], metrics["turns"], metrics["sampled_tokens"]) == (2.0, 2, 4)


def test_rows_half_written_by_a_killed_process_are_no_rows_and_rewinding_forgets_later_steps(
    tmp_path,
):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 0, "eval/success": 0.1})
    for step in range(4):
        file.append({"step": step, "reward": 0.0})
    file.append({"step": 4, "eval/success": 0.2})
    with (tmp_path / "metrics.jsonl").open("a") as half:
        half.write('{"step": 4, "rew')
    assert len(file.rows()) == 6
    file.rewind(2)
    assert [row["step"] for row in file.rows()] == [0, 0, 1]
    file.append({"step": 2, "reward": 1.0})
    assert [row["step"] for row in file.rows()] == [0, 0, 1, 2]


def test_trajectories_keep_exact_tokens_beside_readable_text(tmp_path):
    cut = Trajectory("t/1/0", Task("lake", 7, id="t"), (), Truncated("turns"))
    write_trajectories(
        tmp_path / "step.parquet", [(trajectory(1.0, (4, 5)), Score(1.0)), (cut, Score(0.0))]
    )
    first, second = pq.read_table(tmp_path / "step.parquet").to_pylist()
    assert first["turns"][0]["token_ids"] == [5, 5]
    assert first["turns"][0]["prompt_ids"] == [1, 2, 3]
    assert first["turns"][0]["policy_versions"] == [4, 5]
    assert first["messages"][1] == {
        "role": "assistant",
        "content": "left",
        "reasoning": "",
        "tool_calls": "",
        "tool_call_id": "",
        "given": False,
        "images": [],
    }
    assert json.loads(first["turns"][0]["info"])["success"] is False
    assert (second["status"], second["detail"]) == ("truncated", "turns")


def test_a_curve_is_drawn_with_and_without_evaluations(tmp_path):
    rows = [{"step": i, "reward": i / 4, "success": i / 5} for i in range(4)]
    draw_curve(rows, tmp_path / "a.png", "a")
    draw_curve(
        [{"step": 0, "eval/success": 0.2}, *rows, {"step": 4, "eval/success": 0.9}],
        tmp_path / "b.png",
        "b",
    )
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


@pytest.mark.parametrize("name", ["cost_$5_$6", "$", os.fsdecode(b"run\xff")])
def test_a_curve_is_drawn_whatever_the_names_of_the_run_and_its_environments(tmp_path, name):
    row = {"step": 0, "reward": 0.5, "success": 0.5, f"envs/{name}/success": 0.5}
    draw_curve([{**row, f"eval/{name}/success": 0.5}], tmp_path / "curve.png", name)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_environments_and_suites_have_panels_of_their_own_in_the_curve(tmp_path):
    def height(*extra):
        rows = [{"step": i, "reward": i / 4, "success": i / 5} for i in range(4)]
        draw_curve([*rows, *extra], tmp_path / "curve.png", "a")
        return int.from_bytes((tmp_path / "curve.png").read_bytes()[20:24], "big")

    alone = height({"step": 4, "eval/success": 0.9, "eval/agents/white/success": 0.5})
    with_envs = height(
        {
            "step": 4,
            "envs/gymnasium:ale/Pong/success": 0.5,
            "eval/envs/gymnasium:ale/Pong/success": 0.5,
        }
    )
    with_suite = height({"step": 4, "eval/hard/success": 0.5, "eval/hard/success_low": 0.4})
    with_both = height({"step": 4, "envs/qa/success": 0.5}, {"step": 4, "eval/hard/success": 0.5})
    assert alone < with_envs == with_suite < with_both


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (174, 200, 0.8163, 0.9097)],
)
def test_the_interval_of_a_rate_is_wilson_s(
    successes: int, episodes: int, low: float, high: float
) -> None:
    assert wilson_interval(successes, episodes) == pytest.approx((low, high), abs=1e-4)


@examples(100)
@given(episodes=st.integers(1, 1000), share=st.floats(0, 1))
def test_the_interval_holds_the_rate_stays_within_zero_and_one_and_narrows(
    episodes: int, share: float
) -> None:
    successes = round(share * episodes)
    low, high = wilson_interval(successes, episodes)
    assert 0 <= low <= successes / episodes <= high <= 1
    narrower = wilson_interval(4 * successes, 4 * episodes)
    assert narrower[1] - narrower[0] < high - low
    assert wilson_interval(episodes - successes, episodes) == pytest.approx((1 - high, 1 - low))
