"""BatchProcessing: length penalties, normalisation, overlong filtering, and constraints kept by
multipliers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.advantages import normalised
from agentrl.algorithms.batch_processing import BatchProcessing, length_penalties, most_varying
from agentrl.algorithms.config import BatchProcessingConfig, Constraint
from agentrl.algorithms.dpo import OnlineDpo
from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.reinforce import Reinforce
from agentrl.algorithms.samples import samples_of, traced_batch_of
from agentrl.algorithms.sft import RejectionSampling
from agentrl.errors import ConfigError, TrainingError
from agentrl.observe.metrics import masked_shares
from agentrl.testing.rewards import trajectory
from agentrl.trajectory import (
    Completion,
    Group,
    Score,
    Task,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)

batches = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=5)


def group(
    values: list[float],
    *,
    env: str = "a",
    costs: list[float] | None = None,
    texts: list[str] | None = None,
) -> Group:
    task = Task(env, 0, {}, "t")
    played = [
        replace(trajectory(text, rewards=[1.0]), task=task) for text in texts or ["x"] * len(values)
    ]
    parts = [{} if costs is None else {"m/violated": cost} for cost in costs or values]
    return Group(
        task, tuple(played), tuple(Score(v, p) for v, p in zip(values, parts, strict=True))
    )


def test_the_longest_loses_to_the_shortest_and_a_wrong_answer_is_not_paid_for_being_short():
    assert length_penalties([10, 20, 30], [True, True, True]) == [0.5, 0.0, -0.5]
    assert length_penalties([10, 20, 30], [False, True, False]) == [0.0, 0.0, -0.5]
    assert length_penalties([7, 7], [True, False]) == [0.0, 0.0]
    shaped = BatchProcessing(BatchProcessingConfig(length_penalty=2.0)).scores(
        [group([1.0, 1.0], texts=["ab", "abcd"])]
    )
    assert [score.value for score in shaped[0].scores] == [2.0, 0.0]


@given(batches, st.data())
def test_normalised_advantages_of_a_scope_have_mean_zero_and_spread_one(advantages, data):
    scopes = [data.draw(st.sampled_from("ab")) for _ in advantages]
    found = normalised(advantages, scopes)
    for scope in set(scopes):
        before = [
            a
            for of_group, s in zip(advantages, scopes, strict=True)
            if s == scope
            for a in of_group
        ]
        after = [
            a for of_group, s in zip(found, scopes, strict=True) if s == scope for a in of_group
        ]
        if len(set(before)) == 1:
            assert after == [0.0] * len(after)
        elif max(before) - min(before) > 1e-2:
            assert math.fsum(after) / len(after) == pytest.approx(0, abs=1e-4)
            assert math.sqrt(math.fsum(a * a for a in after) / len(after)) == pytest.approx(
                1, rel=1e-2
            )


def test_each_environment_is_normalised_by_its_own_spread():
    groups = [group([0.0, 1.0], env="a"), group([0.0, 100.0], env="b")]
    advantages = [[-0.5, 0.5], [-50.0, 50.0]]
    by_env = BatchProcessing(BatchProcessingConfig(normalize="environment")).advantages(
        groups, advantages
    )
    by_batch = BatchProcessing(BatchProcessingConfig(normalize="batch")).advantages(
        groups, advantages
    )
    assert by_env == [pytest.approx([-1, 1], rel=1e-4)] * 2
    assert by_batch[1][1] == pytest.approx(100 * by_batch[0][1])
    assert BatchProcessing(BatchProcessingConfig()).advantages(groups, advantages) == advantages


def test_masked_overlong_episodes_carry_no_loss_and_still_count_in_the_group():
    played = group([0.0, 1.0, 0.0])
    cut = replace(played.trajectories[2], status=Truncated("turns"))
    played = replace(played, trajectories=(*played.trajectories[:2], cut))
    algorithm = Grpo(Grpo.Config(advantage="group_mean"))
    kept = list(
        samples_of([played], algorithm, 0, BatchProcessing(BatchProcessingConfig(overlong="mask")))
    )
    every = list(samples_of([played], algorithm, 0))
    assert (len(kept), len(every)) == (2, 3)
    assert kept == every[:2], "the baseline is that of all three"
    with pytest.raises(
        TrainingError,
        match=r"all 1 episodes of the step were truncated.*batch_processing.overlong=train",
    ):
        BatchProcessing(BatchProcessingConfig(overlong="mask")).trained([cut])


def test_a_constraint_costs_what_its_multiplier_says_and_the_parts_stay_as_they_were():
    constraint = Constraint(part="m/violated", at_most=0.1, rate=1.0, initial=0.5)
    processing = BatchProcessing(BatchProcessingConfig(constraints=(constraint,)))
    played = [group([1.0, 1.0], costs=[0.0, 1.0])]
    shaped = processing.scores(played)
    assert [score.value for score in shaped[0].scores] == [1.0, 0.5]
    assert [score.parts for score in shaped[0].scores] == [
        score.parts for score in played[0].scores
    ]
    metrics = processing.update(played)
    assert metrics == {
        "constraints/rate/m/violated": 0.5,
        "constraints/multiplier/m/violated": pytest.approx(0.9),
    }
    with pytest.raises(ConfigError, match="no score has a part 'm/violated'; there are none"):
        processing.scores([group([1.0])])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.floats(0, 1))
def test_a_multiplier_rises_while_the_bound_is_broken_falls_while_it_is_kept_and_stays_in_its_range(
    broken, bound
):
    constraint = Constraint(part="m/violated", at_most=bound, rate=0.7, largest=2.0)
    processing = BatchProcessing(BatchProcessingConfig(constraints=(constraint,)))
    for count in broken:
        before = processing.multipliers["m/violated"]
        processing.update([group([0.0] * 4, costs=[1.0] * count + [0.0] * (4 - count))])
        after = processing.multipliers["m/violated"]
        assert 0 <= after <= 2.0
        assert (after - before) * (count / 4 - bound) >= 0


def test_a_resumed_run_goes_on_with_the_multiplier_of_its_last_step():
    config = BatchProcessingConfig(
        constraints=(Constraint(part="m/violated", at_most=0.0, initial=0.3),)
    )
    first = BatchProcessing(config)
    first.multipliers["m/violated"] = 0.6
    resumed = BatchProcessing(config)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert resumed.multipliers == {"m/violated": 0.6}
    assert BatchProcessing(config).multipliers == {"m/violated": 0.3}


def test_a_constraint_that_a_resumed_run_adds_begins_with_its_initial_multiplier():
    added = BatchProcessing(
        BatchProcessingConfig(constraints=(Constraint(part="cost", at_most=0.0, initial=0.3),))
    )
    added.restore(BatchProcessing(BatchProcessingConfig()).state())
    assert added.multipliers == {"cost": 0.3}


def test_a_policy_gives_up_what_breaks_a_constraint_when_the_multiplier_has_grown():
    """A bandit: breaking the rule pays 1, keeping it 0.2; dual ascent has to make keeping it the
    better choice.
    """
    processing = BatchProcessing(
        BatchProcessingConfig(constraints=(Constraint(part="m/violated", at_most=0.05, rate=0.5),))
    )
    logit = 2.0
    rates = []
    for _ in range(300):
        share = 1 / (1 + math.exp(-logit))
        breaking = round(20 * share)
        played = [
            group(
                [1.0] * breaking + [0.2] * (20 - breaking),
                costs=[1.0] * breaking + [0.0] * (20 - breaking),
            )
        ]
        values = [score.value for score in processing.scores(played)[0].scores]
        gain = (values[0] if breaking else 1.0 - processing.multipliers["m/violated"]) - (
            values[-1] if breaking < 20 else 0.2
        )
        logit += 0.5 * share * (1 - share) * gain + (0.0 if share > 0.01 else 0.05)
        processing.update(played)
        rates.append(breaking / 20)
    assert rates[0] > 0.8
    assert sum(rates[-50:]) / 50 < 0.15


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.floats(0.1, 1))
def test_the_fewest_groups_that_have_the_share_of_the_variance_are_kept(variances, share):
    kept = most_varying(variances, share)
    total = math.fsum(variances)
    chosen = sorted((v for v, keep in zip(variances, kept, strict=True) if keep), reverse=True)
    assert math.fsum(chosen) >= share * total * (1 - 1e-9)
    if total:
        assert chosen
        assert sum(chosen[:-1]) <= share * total * (1 + 1e-9)
        assert all(v <= chosen[-1] for v, keep in zip(variances, kept, strict=True) if not keep)
    else:
        assert all(kept)


def by_turns(*turns_G: list[float], env: str = "a") -> Group:
    played = [
        replace(trajectory(["x"] * len(turns), rewards=turns), task=Task(env, 0, {}, "t"))
        for turns in turns_G
    ]
    return Group(
        played[0].task,
        tuple(played),
        tuple(Score(sum(turns), turns=tuple(turns)) for turns in turns_G),
    )


def test_each_environment_and_agent_varies_on_its_own_scale():
    """Of rewards of 0 to 100, the others' variance was less than the share that is left out."""
    processing = BatchProcessing(BatchProcessingConfig(keep_variance=0.9))
    groups = [group([0.0, 1.0], env="a"), group([0.0, 100.0], env="b"), group([1.0, 0.0], env="a")]
    assert processing.informative(groups) == [True, True, True]
    assert processing.informative([*groups, group([5.0, 5.0], env="c")]) == [
        True,
        True,
        True,
        False,
    ]
    assert processing.informative([group([5.0, 5.0], env="c")]) == [True]
    weak, strong = group([0.0, 1.0]), group([0.0, 100.0])
    strong = replace(
        strong, trajectories=tuple(replace(t, agent="strong") for t in strong.trajectories)
    )
    assert processing.informative([weak, strong]) == [True, True]


def test_groups_vary_in_what_their_algorithm_compares():
    late, same = by_turns([0.0, 1.0], [1.0, 0.0]), by_turns([1.0, 0.0], [1.0, 0.0])
    of = {
        "grpo": (Grpo(), [False, False]),
        "turns": (Grpo(Grpo.Config(reward_to_go=True, baseline="turn")), [True, False]),
        "discounted": (Grpo(Grpo.Config(gamma=0.5)), [True, False]),
    }
    for algorithm, varies in of.values():
        processing = BatchProcessing(BatchProcessingConfig(keep_variance=0.9), algorithm=algorithm)
        assert [algorithm.spread(one) > 0 for one in (late, same)] == varies
        assert [processing.teaches(one) for one in (late, same)] == varies
        assert processing.informative([late, same]) == (varies if any(varies) else [True, True])
        assert len(list(samples_of([late, same], algorithm, 0, processing))) == (
            2 if any(varies) else 4
        )


def test_a_spread_is_the_variance_before_anything_is_divided_by_it():
    for advantage in ("group_std", "group_mean", "leave_one_out"):
        assert Grpo(Grpo.Config(advantage=advantage)).spread(group([0.0, 100.0])) == 2500.0
    assert OnlineDpo().spread(group([0.0, 4.0, 0.3])) == pytest.approx(pvariance([0.0, 4.0, 0.3]))
    assert OnlineDpo().spread(group([0.1 + 0.2, 0.3])) == 0.0


def test_a_group_teaches_by_the_scores_that_are_trained_with():
    short = group([1.0, 1.0], texts=["ab", "abcd"])
    penalised = BatchProcessing(BatchProcessingConfig(length_penalty=0.5), algorithm=Grpo())
    assert penalised.teaches(short)
    assert not BatchProcessing(BatchProcessingConfig(), algorithm=Grpo()).teaches(short)
    constraint = Constraint(part="m/violated", at_most=0.1, initial=0.5)
    bound = BatchProcessing(BatchProcessingConfig(constraints=(constraint,)), algorithm=Grpo())
    assert bound.teaches(group([1.0, 1.0], costs=[0.0, 1.0]))
    assert not bound.teaches(group([1.0, 0.5], costs=[1.0, 0.0]))


def test_what_is_imitated_teaches_though_all_members_earned_the_same():
    rejection = BatchProcessing(BatchProcessingConfig(), algorithm=RejectionSampling())
    assert rejection.teaches(group([1.0, 1.0]))
    reinforce = BatchProcessing(BatchProcessingConfig(), algorithm=Reinforce())
    assert [reinforce.teaches(by_turns([reward], [reward])) for reward in (1.0, 0.0)] == [
        True,
        False,
    ]


def test_only_groups_that_vary_enough_are_trained_on():
    processing = BatchProcessing(BatchProcessingConfig(keep_variance=0.9))
    groups = [group([0.0, 1.0]), group([0.4, 0.6]), group([1.0, 1.0]), group([1.0, 0.0])]
    assert processing.informative(groups) == [True, False, False, True]
    assert len(list(samples_of(groups, Grpo(), 0, processing))) == 4
    assert processing.update(groups) == {"informative_groups": 0.5}


def test_an_episode_of_which_no_token_carries_a_loss_is_named_with_the_reason():
    """Of the third group, one agent's view is truncated; the fourth goes on; nothing of the last is
    fresh.
    """
    processing = BatchProcessing(BatchProcessingConfig(keep_variance=0.9, overlong="mask"))
    alike, mixed = named("alike", [1.0, 1.0]), named("mixed", [0.0, 1.0], cut=1)
    seen = named("seen", [0.0, 1.0, 1.0, 0.0], agents=("a", "a", "b", "b"), cut=3)
    part = replace(named("part", [1.0, 1.0]), partial=True)
    old = named("old", [0.0, 1.0], version=0)
    made = traced_batch_of([alike, mixed, seen, part, old], Grpo(), processing, 1)
    assert made.masked == {
        "alike/0/0": "its group's scores vary too little (batch_processing.keep_variance=0.9)",
        "alike/1/0": "its group's scores vary too little (batch_processing.keep_variance=0.9)",
        "mixed/1/0": "it was truncated (batch_processing.overlong=mask)",
        "old/0/0": "all its tokens are older than version 1 (rollout.max_staleness)",
        "old/1/0": "all its tokens are older than version 1 (rollout.max_staleness)",
    }
    assert made.masked_segments == [("part/0/0", ""), ("part/1/0", "")]
    assert {origin.episode for origin in made.origins} == {"mixed/0/0", "seen/0/0", "seen/1/0"}
    whole = [alike, mixed, seen, old]
    assert masked_shares([*whole, part], made) == {
        "masked": 5 / 8,
        "masked_tokens": pytest.approx(1 - 4 / 12),
    }


def named(
    name: str,
    rewards: list[float],
    *,
    agents: Sequence[str] = (),
    cut: int | None = None,
    version: int = 1,
) -> Group:
    """A group of episodes of one token each; the one with the number `cut` was truncated."""
    agents = agents or [""] * len(rewards)
    turn = Turn([1], Completion([5], [-1.0], [version], "stop"), 0.0, {})
    members = [
        Trajectory(
            f"{name}/{agents[:number].count(agent)}/0",
            Task("lake", 0, id=name),
            (turn,),
            Truncated("turns") if number == cut else Terminated(),
            agent=agent,
        )
        for number, agent in enumerate(agents)
    ]
    return Group(Task("lake", 0, id=name), tuple(members), tuple(map(Score, rewards)))


def test_a_step_of_which_nothing_is_trained_on_says_what_leaves_it_out():
    """All tokens are of version 0, and the oldest that is trained on is 1."""
    with pytest.raises(
        TrainingError, match=r"the step's 2 episodes is trained on: .*max_staleness.* version 1"
    ):
        traced_batch_of([group([0.0, 1.0])], Grpo(), BatchProcessing(BatchProcessingConfig()), 1)


def test_an_algorithm_that_learns_must_keep_what_it_has_learned():
    class Forgetful(Grpo):
        def learn(self, groups: Sequence[Group]) -> Mapping[str, float]:
            return {}

    with pytest.raises(ConfigError, match=r"Forgetful has the method `learn`, .*write its methods"):
        BatchProcessing(BatchProcessingConfig(), Forgetful())
