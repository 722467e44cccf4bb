"""The expected gradient of every algorithm against the true one, on problems that can be
enumerated.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algorithms.advantages import compared_by_state, group_std, returns_to_go
from agentrl.algorithms.archer import Archer
from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.config import BatchProcessingConfig
from agentrl.algorithms.dpo import OnlineDpo
from agentrl.algorithms.gigpo import Gigpo
from agentrl.algorithms.grpo import Grpo, Rloo
from agentrl.algorithms.named import CISPO, GSPO, SAPO
from agentrl.algorithms.policy_loss import PolicyAlgorithm
from agentrl.algorithms.ppo import Ppo, TurnPpo
from agentrl.algorithms.rae import RoleAdvantage
from agentrl.algorithms.reinforce import Reinforce, ReinforcePlusPlus, ReturnBatchNorm
from agentrl.algorithms.samples import samples_of
from agentrl.algorithms.sft import RejectionSampling
from agentrl.algorithms.surrogates import SURROGATES
from agentrl.batch import TrainBatch, collate
from agentrl.oracles.estimators import (
    START,
    Oracle,
    bandit,
    chain,
    corridor,
    cosine,
    dialogue,
    residual,
    stopping,
    t_maze,
)
from agentrl.protocols import MemberAdvantage
from agentrl.tokens.arrays import ints
from agentrl.trajectory import SEGMENT, Group, Score
from tests.tiers import evenly_crossed

PROBLEMS = {
    "bandit": bandit(),
    "stopping": stopping(),
    "corridor": corridor(),
    "chain": chain(2),
    "dialogue": dialogue(),
}
MANY_PATHS = ("corridor", "dialogue")
"""Problems with hundreds of groups of three members, whose batches take a second."""
ONE = {"normalizer": 1.0}
GROUP = {"normalizer": 1.0, "advantage": "leave_one_out"}
CRITIC = {"normalizer": 1.0, "whiten": False, "truncated": "terminal"}
Row = tuple[PolicyAlgorithm, int]

UNBIASED: dict[str, Row] = {
    "reinforce": (Reinforce(Reinforce.Config(**ONE)), 1),
    "reinforce, whole returns": (Reinforce(Reinforce.Config(**ONE, reward_to_go=False)), 1),
    "rloo": (Rloo(Rloo.Config(**ONE)), 2),
    "rloo, reward-to-go": (Rloo(Rloo.Config(**ONE, reward_to_go=True)), 2),
    "rloo, reward-to-go, baseline of the turn": (
        Rloo(Rloo.Config(**ONE, reward_to_go=True, baseline="turn")),
        3,
    ),
    "grpo as Dr. GRPO": (Grpo(Grpo.Config(**ONE, advantage="group_mean")), 3),
    "grpo as Dr. GRPO, reward-to-go": (
        Grpo(Grpo.Config(**ONE, advantage="group_mean", reward_to_go=True)),
        3,
    ),
    "gspo": (GSPO(GSPO.Config(**GROUP)), 2),
    "gspo, reward-to-go": (GSPO(GSPO.Config(**GROUP, reward_to_go=True)), 2),
    "cispo": (CISPO(CISPO.Config(**GROUP)), 2),
    "sapo": (SAPO(SAPO.Config(**GROUP)), 2),
    "gigpo without its states": (Gigpo(Gigpo.Config(**GROUP, step_weight=0)), 2),
    "ppo": (Ppo(Ppo.Config(**CRITIC)), 1),
    "ppo, lambda 0.5": (Ppo(Ppo.Config(**CRITIC, lam=0.5)), 1),
    "turn_ppo": (TurnPpo(TurnPpo.Config(**CRITIC)), 1),
    "turn_ppo, lambda 0": (TurnPpo(TurnPpo.Config(**CRITIC, lam=0.0)), 1),
    "archer": (Archer(Archer.Config(**ONE)), 1),
}
"""Algorithms with the terms switched off that bias them, and how many members their groups have."""


class NamedTerm(ReinforcePlusPlus):
    """REINFORCE++ and ReBN without normalising: what is left is REINFORCE."""

    def normalized(
        self, advantages: Sequence[Sequence[MemberAdvantage]]
    ) -> Sequence[Sequence[MemberAdvantage]]:
        return advantages


UNBIASED["reinforce_pp and rebn, not normalised"] = (NamedTerm(NamedTerm.Config(**ONE)), 2)


def with_baseline(algorithm: RoleAdvantage, baseline: float) -> RoleAdvantage:
    algorithm.restore({"baselines": {"oracle": baseline}})
    return algorithm


UNBIASED["rae, with a baseline of earlier steps"] = (
    with_baseline(RoleAdvantage(RoleAdvantage.Config(**ONE)), 0.7),
    1,
)
UNBIASED["rae, reward-to-go"] = (
    with_baseline(RoleAdvantage(RoleAdvantage.Config(**ONE, reward_to_go=True)), -0.4),
    2,
)
BIASED: dict[str, Row] = {
    "`grpo`, `advantage=group_std`": (Grpo(Grpo.Config(**ONE)), 3),
    "`grpo`, `advantage=group_std`, `reward_to_go=true`": (
        Grpo(Grpo.Config(**ONE, reward_to_go=True)),
        3,
    ),
    "the same, `baseline=turn`": (Grpo(Grpo.Config(**ONE, reward_to_go=True, baseline="turn")), 3),
    "`gigpo`, `advantage=group_std`": (Gigpo(Gigpo.Config(**ONE, step_gamma=1.0)), 3),
    "`reinforce_pp`, `gamma=1`": (ReinforcePlusPlus(ReinforcePlusPlus.Config(**ONE)), 3),
    "`rebn`, `gamma=1`": (ReturnBatchNorm(ReturnBatchNorm.Config(**ONE, gamma=1.0)), 3),
    "`gigpo`, `advantage=group_mean`": (
        Gigpo(Gigpo.Config(**ONE, advantage="group_mean", step_gamma=1.0)),
        3,
    ),
    "`ppo`, `whiten=true`": (Ppo(Ppo.Config(normalizer=1.0, truncated="terminal")), 3),
    "`ppo`, `truncated=bootstrap`": (Ppo(Ppo.Config(normalizer=1.0, whiten=False)), 1),
    "`ppo`, `lam_length=0.5`": (Ppo(Ppo.Config(**CRITIC, lam_length=0.5)), 1),
    "`rloo`, `normalizer=tokens`": (Rloo(), 3),
    "`rloo`, `normalizer=trajectories`": (Rloo(Rloo.Config(normalizer="trajectories")), 3),
    "`reinforce`, `gamma=0.5`": (Reinforce(Reinforce.Config(**ONE, gamma=0.5)), 1),
}


def measured(row: Row, problem: str) -> tuple[float, float]:
    """The residual and the cosine of an algorithm's expected gradient."""
    algorithm, members = row
    oracle = Oracle(PROBLEMS[problem])
    logits = oracle.logits(seed=1)
    found, wanted = (
        oracle.expected_gradient(algorithm, logits, members=members),
        oracle.gradient(logits),
    )
    return residual(found, wanted), cosine(found, wanted)


ADVANTAGES: dict[str, tuple[Callable[..., PolicyAlgorithm], int]] = {
    "grpo": (lambda **own: Grpo(Grpo.Config(**GROUP, **own)), 2),
    "rloo": (lambda **own: Rloo(Rloo.Config(**ONE, **own)), 2),
    "reinforce": (lambda **own: Reinforce(Reinforce.Config(**ONE, **own)), 1),
    "rae": (lambda **own: RoleAdvantage(RoleAdvantage.Config(**ONE, **own)), 1),
    "ppo": (lambda **own: Ppo(Ppo.Config(**CRITIC, **own)), 1),
}


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_with_every_surrogate_follows_the_gradient(
    advantage: str, surrogate: str
) -> None:
    """On the policy's own episodes, where each surrogate has the gradient of the ratio."""
    make, members = ADVANTAGES[advantage]
    off, direction = measured((make(surrogate=surrogate), members), "stopping")
    assert off < 1e-5
    assert direction == pytest.approx(1)


@pytest.mark.parametrize(("name", "problem"), evenly_crossed(43, UNBIASED, PROBLEMS))
def test_the_expected_gradient_is_that_of_the_mean_return(name: str, problem: str) -> None:
    off, direction = measured(UNBIASED[name], problem)
    assert off < 1e-5
    assert direction > 0.999


@pytest.mark.parametrize(
    "problem",
    [pytest.param(name, marks=pytest.mark.long if name in MANY_PATHS else ()) for name in PROBLEMS],
)
@pytest.mark.parametrize("name", BIASED)
def test_the_docs_say_how_biased_an_algorithm_is_by_design(name: str, problem: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", page, re.MULTILINE)
    cells = dict(zip(PROBLEMS, row.split("|"), strict=False))  # another column follows
    stated = tuple(map(float, cells[problem].split(", ")))
    assert stated == pytest.approx(measured(BIASED[name], problem), abs=6e-3)


TOLD_BY_GROUPS: dict[str, Row] = {
    "grpo": (Grpo(Grpo.Config(**ONE)), 2),
    "grpo, reward-to-go": (Grpo(Grpo.Config(**ONE, reward_to_go=True)), 2),
    "rloo, reward-to-go, baseline of the turn": (
        Rloo(Rloo.Config(**ONE, reward_to_go=True, baseline="turn")),
        2,
    ),
    "rloo, discounted": (Rloo(Rloo.Config(**ONE, gamma=0.5)), 2),
    "gigpo": (Gigpo(Gigpo.Config(**ONE)), 2),
    "reinforce": (Reinforce(Reinforce.Config(**ONE)), 2),
    "reinforce, whole returns": (Reinforce(Reinforce.Config(**ONE, reward_to_go=False)), 2),
    "rejection": (RejectionSampling(RejectionSampling.Config(keep="above_mean")), 2),
    "dpo": (OnlineDpo(OnlineDpo.Config(**ONE)), 2),
}
"""Algorithms that `rollout.filter_zero_variance` is allowed with."""


@pytest.mark.parametrize(("name", "problem"), evenly_crossed(19, TOLD_BY_GROUPS, PROBLEMS))
def test_filtering_groups_that_teach_nothing_turns_no_gradient(name: str, problem: str) -> None:
    """With the filter by whole rewards, reinforce's turned round on the bandit (cosine -0.78)."""
    algorithm, members = TOLD_BY_GROUPS[name]
    if isinstance(algorithm, RejectionSampling):
        algorithm.normalizer = lambda batch: 1.0
    oracle = Oracle(PROBLEMS[problem])
    logits = oracle.logits(seed=0)
    teaches = BatchProcessing(BatchProcessingConfig(), algorithm=algorithm).teaches
    kept = oracle.expected_gradient(algorithm, logits, members=members, keeps=teaches)
    every = oracle.expected_gradient(algorithm, logits, members=members)
    assert residual(kept, every) < 1e-6
    assert cosine(kept, every) > 0.999
    assert not teaches(oracle.group([], logits))


@pytest.mark.parametrize(
    "name", ["reinforce", "rloo, reward-to-go, baseline of the turn", "rloo, discounted"]
)
def test_filtering_by_whole_rewards_would_turn_them(name: str) -> None:
    algorithm, members = TOLD_BY_GROUPS[name]
    off = []
    for problem in ("bandit", "stopping", "chain"):
        oracle = Oracle(PROBLEMS[problem])
        logits = oracle.logits(seed=0)
        every = oracle.expected_gradient(algorithm, logits, members=members)
        kept = oracle.expected_gradient(
            algorithm, logits, members=members, keeps=lambda group: group.has_signal
        )
        off.append(residual(kept, every))
    assert max(off) > 0.02


@pytest.mark.parametrize("problem", ["stopping", "chain"])
@pytest.mark.parametrize("where", ["kl", "kl_reward"])
@pytest.mark.parametrize(
    "name",
    [
        "reinforce",
        "reinforce, whole returns",
        "rloo",
        "rloo, reward-to-go",
        "rloo, reward-to-go, baseline of the turn",
        "grpo as Dr. GRPO",
        "grpo as Dr. GRPO, reward-to-go",
        "gspo",
        "cispo",
        "sapo",
        "gigpo without its states",
        "rae, reward-to-go",
        "ppo",
        "turn_ppo",
    ],
)
def test_the_kl_to_a_reference_has_its_own_gradient_in_the_loss_and_in_the_reward(
    name: str, where: str, problem: str
) -> None:
    """In the loss, each token answers for its own KL; in the reward, also for that of the tokens
    after it.
    """
    algorithm, members = UNBIASED[name]
    settings = algorithm.config.model_dump() | ({"lam": 1.0} if isinstance(algorithm, Ppo) else {})
    plain, held = (
        type(algorithm)(algorithm.config.model_validate(settings | {where: beta}))
        for beta in (0.0, 0.3)
    )
    oracle = Oracle(PROBLEMS[problem])
    logits, reference = oracle.logits(1), oracle.logits(2)
    found = oracle.expected_gradient(held, logits, members=members, reference_P=reference)
    without = oracle.expected_gradient(plain, logits, members=members, reference_P=reference)
    own = logits.clone().requires_grad_()
    chances, moved_W = oracle.probabilities(own), oracle.logprobs(own) - oracle.logprobs(reference)
    played = oracle.group(range(len(oracle.paths)), logits).trajectories
    moved = [
        moved_W[[int(i) for turn in t.turns for i in turn.completion.token_ids]] for t in played
    ]
    if where == "kl_reward":
        cost = sum(chance * of_path.sum() for chance, of_path in zip(chances, moved, strict=True))
    else:
        cost = sum(
            chance * of_path.square().sum() / 2
            for chance, of_path in zip(chances.detach(), moved, strict=True)
        )
    (expected,) = torch.autograd.grad(-0.3 * cost, own)
    # A group's mean contains the member itself: a factor (n - 1) / n on all that is in the reward.
    own_share = where == "kl_reward" and getattr(algorithm.config, "advantage", "") == "group_mean"
    times = members - 1 if own_share else members
    torch.testing.assert_close(found - without, times * expected, rtol=1e-4, atol=1e-6)


def charged(
    algorithm: PolicyAlgorithm, group: Group, oracle: Oracle, members: int
) -> tuple[list[float], list[float]]:
    """The first and the last advantage of each member, with the KL of `oracle.logits(1)` to
    `oracle.logits(2)`.
    """
    batch = oracle.with_reference(batch_of(algorithm, group), oracle.logits(2))
    prepared = algorithm.prepared(batch)
    assert prepared.credits is None
    of_each = [
        prepared.advantages_N[prepared.trajectories_N == number].tolist()
        for number in range(members)
    ]
    return [own[0] for own in of_each], [own[-1] for own in of_each]


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("forked", [False, True])
def test_the_kl_is_taken_off_the_reward_before_rewards_are_compared(
    forked: bool, scale: float
) -> None:
    """By hand: group_std of R - 0.3 KL, and of RLOO the difference to the others' mean of it, as in
    TRL.
    """
    oracle = Oracle(PROBLEMS["chain"])
    logits = oracle.logits(1)
    group = oracle.group([0, 1, 3, 2], logits)
    moved_W = oracle.logprobs(logits) - oracle.logprobs(oracle.logits(2))
    kl_G = [
        sum(float(moved_W[turn.completion.token_ids[0]]) for turn in t.turns)
        for t in group.trajectories
    ]
    scores = [
        replace(s, value=scale * s.value, turns=tuple(scale * r for r in s.turns))
        for s in group.scores
    ]
    left_G = [score.value - 0.3 * kl for score, kl in zip(scores, kl_G, strict=True)]
    trajectories = [
        replace(t, turns=(t.turns[0], *(replace(turn, forked=forked) for turn in t.turns[1:])))
        for t in group.trajectories
    ]
    group = replace(group, scores=tuple(scores), trajectories=tuple(trajectories))
    wanted = {
        Grpo(Grpo.Config(**ONE, kl_reward=0.3)): group_std(left_G),
        Rloo(Rloo.Config(**ONE, kl_reward=0.3)): [4 / 3 * (r - sum(left_G) / 4) for r in left_G],
        ReinforcePlusPlus(ReinforcePlusPlus.Config(**ONE, kl_reward=0.3)): group_std(left_G),
        Reinforce(Reinforce.Config(**ONE, kl_reward=0.3, reward_to_go=False)): left_G,
    }
    for algorithm, advantages in wanted.items():
        first, last = charged(algorithm, group, oracle, 4)
        assert first == last == pytest.approx(advantages, rel=1e-5, abs=1e-6)


def test_a_turn_pays_its_own_kl_and_not_that_of_turns_before_it() -> None:
    oracle = Oracle(PROBLEMS["chain"])
    logits = oracle.logits(1)
    group = oracle.group([0, 3], logits)
    moved_W = oracle.logprobs(logits) - oracle.logprobs(oracle.logits(2))
    _, last = charged(Reinforce(Reinforce.Config(**ONE, kl_reward=0.3)), group, oracle, 2)
    kl_G = [float(moved_W[t.turns[-1].completion.token_ids[0]]) for t in group.trajectories]
    rewards = [t.turns[-1].reward for t in group.trajectories]
    assert last == pytest.approx(
        [r - 0.3 * kl for r, kl in zip(rewards, kl_G, strict=True)], abs=1e-6
    )


def test_a_batch_that_does_not_know_its_groups_cannot_be_charged() -> None:
    oracle, algorithm = Oracle(PROBLEMS["bandit"]), Rloo(Rloo.Config(**ONE, kl_reward=0.3))
    batch = batch_of(Rloo(), oracle.group([0, 1], oracle.logits(1)))
    with pytest.raises(ValueError, match="made without its groups"):
        algorithm.prepared(batch)
    whole = batch_of(algorithm, oracle.group([0, 1], oracle.logits(1)))
    assert all(part.credits is None for part in whole.split([1, 1]))


class ReachedBaseline(Grpo):
    """The baseline of a turn is the mean over the members that came so far: what is often written
    (verl issue 7244).
    """

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        rewards_G = group.turn_rewards_G
        numbers_G = [list(range(len(rewards))) for rewards in rewards_G]
        return compared_by_state(rewards_G, numbers_G, 1.0, by_std=False)


def test_a_baseline_over_those_who_came_so_far_is_biased_when_the_policy_stops_itself() -> None:
    naive = (ReachedBaseline(Grpo.Config(**ONE)), 3)
    assert measured(naive, "stopping")[0] > 0.05
    assert measured(naive, "chain")[0] < 1e-5  # all episodes have two turns


@pytest.mark.parametrize("name", ["ppo", "turn_ppo", "archer", "rloo, reward-to-go", "reinforce"])
def test_with_a_discount_what_a_turn_is_worth_is_what_is_left_of_it(name: str) -> None:
    algorithm = UNBIASED[name][0]
    discounted = type(algorithm)(algorithm.config.model_copy(update={"gamma": 0.5}))
    oracle = Oracle(PROBLEMS["stopping"], gamma=0.5)
    logits = oracle.logits(seed=2)
    group = oracle.group([0, 1], logits)
    ((first, *_), (second, *_)) = [returns_to_go(rewards, 0.5) for rewards in group.turn_rewards_G]
    assert (first, second) == (0.8, 0.5 + 0.5 * 2.0)
    assert (
        residual(
            oracle.ascent(discounted, batch_of(discounted, group), logits), oracle.gradient(logits)
        )
        < 1
    )


def batch_of(algorithm: PolicyAlgorithm, group: Group) -> TrainBatch:
    return collate(samples_of([group], algorithm))


def test_exact_returns_are_those_by_hand() -> None:
    maze = Oracle(t_maze())
    assert maze.best_return() == 1.0
    assert float(maze.mean_return(0 * maze.logits())) == pytest.approx(0.5)
    forgets = Oracle(t_maze(remembers=False))
    assert all(
        float(forgets.mean_return(forgets.logits(seed))) == pytest.approx(0.5) for seed in range(5)
    )
    arms = Oracle(bandit((1.0, 0.0), (1, 1)))
    odds = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64)
    assert float(arms.mean_return(odds)) == pytest.approx(0.75)
    assert arms.gradient(odds).tolist() == pytest.approx([0.1875, -0.1875])
    patient, hasty = Oracle(corridor(), gamma=1.0), Oracle(corridor(), gamma=0.3)
    assert patient.best_return() > 0.8
    assert hasty.best_return() == 0.3  # now rather than later


def test_what_is_enumerated_is_what_a_policy_plays() -> None:
    oracle = Oracle(corridor())
    logits = oracle.logits(3)
    probabilities = oracle.probabilities(logits)
    assert float(probabilities.sum()) == pytest.approx(1)
    values_W, at_decisions = oracle.values(logits)
    assert float(at_decisions[0]) == pytest.approx(float(oracle.mean_return(logits)))
    assert any(path.end is not None for path in oracle.paths)
    assert len(values_W) == len(oracle.logprobs(logits))


@pytest.mark.parametrize("name", [*UNBIASED, *BIASED])
def test_a_fork_changes_no_gradient(name: str) -> None:
    """The same turns, with the second as a sample of its own: an episode never counts twice."""
    algorithm, members = {**UNBIASED, **BIASED}[name]
    if algorithm.config.surrogate == "gspo":
        pytest.skip("its ratio is one for each sample")
    oracle = Oracle(PROBLEMS["chain"])
    logits = oracle.logits(1)
    group = oracle.group(list(range(members)), logits)
    forked = [
        replace(t, turns=(t.turns[0], *(replace(turn, forked=True) for turn in t.turns[1:])))
        for t in group.trajectories
    ]
    whole, split = (
        batch_of(algorithm, group),
        batch_of(algorithm, replace(group, trajectories=tuple(forked))),
    )
    assert split.num_samples == 2 * whole.num_samples
    torch.testing.assert_close(
        oracle.ascent(algorithm, split, logits), oracle.ascent(algorithm, whole, logits)
    )


@pytest.mark.parametrize("name", [*UNBIASED, *BIASED])
def test_what_is_under_a_mask_changes_nothing(name: str) -> None:
    algorithm, members = {**UNBIASED, **BIASED}[name]
    oracle = Oracle(PROBLEMS["stopping"])
    logits = oracle.logits(1)
    samples = list(samples_of([oracle.group(list(range(members)), logits)], algorithm))
    noisy = [
        replace(
            sample,
            token_ids=np.where(sample.loss_mask, sample.token_ids, 1),
            rollout_logprobs=np.where(sample.loss_mask, sample.rollout_logprobs, np.nan),
            advantages=np.where(sample.loss_mask, sample.advantages, np.nan),
            policy_versions=np.where(sample.loss_mask, sample.policy_versions, 7),
        )
        for sample in samples
    ]
    clean = oracle.ascent(algorithm, collate(samples), logits)
    assert torch.equal(oracle.ascent(algorithm, collate(noisy), logits), clean)


@pytest.mark.parametrize("name", ["ppo", "ppo, lambda 0.5", "turn_ppo", "turn_ppo, lambda 0"])
@pytest.mark.parametrize("cut", [1, 2])
def test_training_on_an_episode_in_parts_is_unbiased_with_an_exact_critic(
    name: str, cut: int
) -> None:
    algorithm, _ = UNBIASED[name]
    settings = algorithm.config.model_dump() | {"truncated": "bootstrap"}
    algorithm = type(algorithm)(algorithm.config.model_validate(settings))
    oracle = Oracle(chain(3))
    logits = oracle.logits(seed=1)
    whole = oracle.group(range(len(oracle.paths)), logits)
    found = torch.zeros_like(logits)
    for probability, path, trajectory in zip(
        oracle.probabilities(logits).tolist(), oracle.paths, whole.trajectories, strict=True
    ):
        tail = ints([START, path.turns[cut][0] + 1])
        part = replace(trajectory, turns=trajectory.turns[:cut], status=SEGMENT, tail_ids=tail)
        for piece in (part, replace(trajectory, trained_turns=cut)):
            turns = tuple(turn.reward for turn in piece.turns)
            group = Group(
                whole.task, (piece,), (Score(sum(turns), turns=turns),), partial=piece is part
            )
            found += probability * oracle.ascent(
                algorithm, collate(samples_of([group], algorithm)), logits
            )
    wanted = oracle.gradient(logits)
    assert residual(found, wanted) < 1e-5
    assert cosine(found, wanted) > 0.999
    assert torch.allclose(found, wanted, atol=1e-6)
