"""Advantages and losses against numbers worked out by hand, against autograd of the plain formula,
and invariances.
"""

import math
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl import plugins
from agentrl.algorithms.advantages import group_mean, group_std, leave_one_out
from agentrl.algorithms.grpo import Grpo, Rloo
from agentrl.algorithms.losses import cross_entropy, negative_entropy, reference_penalty
from agentrl.algorithms.named import CISPO, GSPO, SAPO, NamedPair
from agentrl.algorithms.reinforce import Reinforce
from agentrl.algorithms.sft import RejectionSampling, Sft
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.protocols import LossOutput, LossTokens, uses_entropy
from agentrl.trajectory import Group, Score, Task, Terminated, Trajectory

ALL = [group_std, group_mean, leave_one_out]
Advantage = Callable[[Sequence[float]], list[float]]
rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def group_of(scores: Sequence[Score]) -> Group:
    task = Task("env", 0)
    return Group(
        task,
        tuple(Trajectory(f"t{i}", task, (), Terminated()) for i in range(len(scores))),
        tuple(scores),
    )


def batch_of(loss_tokens: int) -> TrainBatch:
    n = loss_tokens
    sample = TrainingSample(
        (1,) * (n + 1),
        (0,) + (1,) * n,
        (0.0,) * (n + 1),
        (0.0,) * (n + 1),
        (0,) * (n + 1),
        (0,) * (n + 1),
    )
    return collate([sample])


def tokens_of(old: list[float], rollout: list[float], advantages: list[float]) -> LossTokens:
    return LossTokens(
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(rollout, dtype=torch.float64),
        torch.tensor(rollout, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones(len(old), dtype=torch.int64),
    )


def test_advantages_of_two_wins_in_four_by_hand() -> None:
    assert group_std([1, 0, 0, 1]) == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert group_mean([1, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]
    assert leave_one_out([1, 0, 0, 1]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_advantages_of_one_win_in_four_by_hand() -> None:
    assert group_std([4, 0, 0, 0]) == pytest.approx(
        [math.sqrt(3), *[-1 / math.sqrt(3)] * 3], abs=1e-5
    )
    assert group_mean([4, 0, 0, 0]) == [3, -1, -1, -1]
    assert leave_one_out([4, 0, 0, 0]) == pytest.approx([4, -4 / 3, -4 / 3, -4 / 3])


@pytest.mark.parametrize("advantage", ALL)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(0, 12))
def test_equal_rewards_give_exact_zeros(advantage: Advantage, reward: float, size: int) -> None:
    assert advantage([reward] * size) == [0.0] * size


def test_rewards_that_differ_by_rounding_alone_give_no_signal() -> None:
    assert max(map(abs, group_std([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]))) < 1e-9


@pytest.mark.parametrize("advantage", ALL)
def test_rewards_that_are_equal_but_for_rounding_have_no_advantage_at_any_scale(
    advantage: Advantage,
) -> None:
    """And true differences of a billionth do."""
    for power in (-12, 0, 6, 12):
        noisy = [10.0**power * reward for reward in (0.1 + 0.2, 0.3, sum([0.1] * 3), 0.3)]
        assert advantage(noisy) == [0.0] * 4
        true = advantage([10.0**power * reward for reward in (1.0, 1.0, 1.0 + 1e-9, 1.0)])
        assert true[2] > 0 > true[0]


@pytest.mark.parametrize("advantage", ALL)
@given(rewards=rewards, shift=st.integers(-50, 50))
def test_advantages_ignore_a_shift_and_sum_to_zero(
    advantage: Advantage, rewards: list[float], shift: int
) -> None:
    base = advantage(rewards)
    assume(max(rewards) - min(rewards) > 1e-3 or len(set(rewards)) == 1)
    assert advantage([r + shift for r in rewards]) == pytest.approx(base, abs=1e-5, rel=1e-6)
    assert sum(base) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("advantage", ALL)
@given(rewards=rewards, seed=st.integers(0, 99))
def test_advantages_move_with_their_members(
    advantage: Advantage, rewards: list[float], seed: int
) -> None:
    order = list(range(len(rewards)))
    random.Random(seed).shuffle(order)
    base = advantage(rewards)
    assert advantage([rewards[i] for i in order]) == pytest.approx(
        [base[i] for i in order], rel=1e-9, abs=1e-9
    )


@given(rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=8, unique=True))
def test_leave_one_out_is_the_mean_difference_rescaled(rewards: list[float]) -> None:
    scale = len(rewards) / (len(rewards) - 1)
    assert leave_one_out(rewards) == pytest.approx(
        [a * scale for a in group_mean(rewards)], abs=1e-9
    )


@given(
    rewards=st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=8),
    scale=st.floats(0.1, 100),
)
def test_group_std_ignores_the_scale_of_rewards(rewards: list[float], scale: float) -> None:
    assert group_std([r * scale for r in rewards]) == pytest.approx(group_std(rewards), abs=1e-4)


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_has_no_advantage(advantage: Advantage, wrong: float) -> None:
    with pytest.raises(ValueError, match="member 1 of the group"):
        advantage([1.0, wrong, 0.0])


@pytest.mark.parametrize("name", ["group_std", "group_mean", "leave_one_out"])
def test_a_failed_score_has_no_advantage(name: str) -> None:
    algorithm = Grpo(Grpo.Config.model_validate({"advantage": name}))
    with pytest.raises(ValueError, match=r"'t1' has no score .*judge fell asleep"):
        algorithm.advantages(group_of([Score(1.0), Score.failed("judge fell asleep"), Score(0.0)]))
    assert algorithm.advantages(group_of([Score(1.0), Score(1.0)])) == [0.0, 0.0]


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def policy_gradient(
    logprobs: torch.Tensor, tokens: LossTokens, importance_cap: float | None = None, **settings: Any
) -> LossOutput:
    return Grpo(Grpo.Config(importance_cap=importance_cap, **settings)).loss(logprobs, tokens)


def test_the_policy_gradient_by_hand() -> None:
    log = math.log
    # ratio:              1       1.5 high   0.5 low    1.5, A<0   0.5, A>0    4, A<0
    logprobs = torch.tensor(
        [-1.0, log(1.5), log(0.5), log(1.5), log(0.5), log(4.0)], dtype=torch.float64
    )
    old = [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    advantages = [2.0, 2.0, -2.0, -2.0, 2.0, -1.0]
    output = policy_gradient(logprobs, tokens_of(old, old, advantages), **CLIP)
    assert output.loss_N.tolist() == pytest.approx([-2.0, -2.56, 1.6, 3.0, -1.0, 4.0])
    assert output.metrics["clipped_high"].tolist() == [0, 1, 0, 0, 0, 0]
    assert output.metrics["clipped_low"].tolist() == [0, 0, 1, 0, 0, 0]
    assert output.metrics["ratio"].tolist() == pytest.approx([1, 1.5, 0.5, 1.5, 0.5, 4])
    assert output.metrics["entropy"].tolist() == pytest.approx((-logprobs).tolist())
    assert output.metrics["kl"].tolist()[:2] == pytest.approx([0.0, 0.5 - log(1.5)])
    dual = policy_gradient(logprobs, tokens_of(old, old, advantages), **CLIP, dual_clip=3.0)
    assert dual.loss_N.tolist() == pytest.approx([-2.0, -2.56, 1.6, 3.0, -1.0, 3.0])
    assert dual.metrics["clipped_dual"].tolist() == [0, 0, 0, 0, 0, 1]
    assert output.metrics["clipped_dual"].tolist() == [0] * 6


def test_the_importance_weight_is_truncated_and_carries_no_gradient() -> None:
    log = math.log
    logprobs = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of([0.0, 0.0, 0.0], [log(0.5), log(0.2), log(2.0)], [1.0, 1.0, 1.0])
    output = policy_gradient(logprobs, tokens, **CLIP, importance_cap=3.0)
    assert output.metrics["importance_weight"].tolist() == pytest.approx([2.0, 5.0, 0.5])
    assert output.metrics["importance_truncated"].tolist() == [0, 1, 0]
    assert output.loss_N.tolist() == pytest.approx([-2.0, -3.0, -0.5])
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-2.0, -3.0, -0.5])
    uncorrected = policy_gradient(logprobs, tokens, **CLIP)
    assert uncorrected.loss_N.tolist() == pytest.approx([-1.0, -1.0, -1.0])
    assert uncorrected.metrics["importance_truncated"].tolist() == [0, 0, 0]


def test_importance_weights_may_be_masked_or_shared_by_a_sample() -> None:
    log = math.log
    rollout = [log(0.5), log(0.2), log(0.25)]
    tokens = replace(tokens_of([0.0] * 3, rollout, [1.0] * 3), segments_N=torch.tensor([4, 4, 7]))
    logprobs = torch.zeros(3, dtype=torch.float64)

    def weights(**settings: Any) -> list[float]:
        return (-policy_gradient(logprobs, tokens, **CLIP, **settings).loss_N).tolist()

    assert weights(importance_cap=4.5) == pytest.approx([2.0, 4.5, 4.0])
    assert weights(importance_cap=4.5, importance="mask") == pytest.approx([2.0, 0.0, 4.0])
    assert weights(importance_cap=20.0, importance_level="sequence") == pytest.approx(
        [10.0, 10.0, 4.0]
    )
    assert weights(
        importance_cap=9.0, importance_level="sequence", importance="mask"
    ) == pytest.approx([0.0, 0.0, 4.0])


@pytest.mark.parametrize("algorithm", [Grpo, GSPO, CISPO, SAPO])
@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.sampled_from([-1.0, 0.0, 0.5, 2.0])), min_size=1, max_size=8
    ),
    st.sampled_from([None, 1.5]),
)
def test_what_is_called_clipped_has_no_gradient_and_nothing_else_has_none(
    algorithm, rows, dual
) -> None:
    """Of gspo, samples of one token; with several it is whole samples (below)."""
    log_ratios, advantages = (list(column) for column in zip(*rows, strict=True))
    assume(
        all(min(abs(math.exp(r) - edge) for edge in (0.8, 1.28, 1.5)) > 1e-6 for r in log_ratios)
    )
    zeros = [0.0] * len(rows)
    tokens = replace(tokens_of(zeros, zeros, advantages), segments_N=torch.arange(len(rows)))
    logprobs = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    output = algorithm(algorithm.Config.model_validate({**CLIP, "dual_clip": dual})).loss(
        logprobs, tokens
    )
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), logprobs)
    cut = [output.metrics[f"clipped_{kind}"] for kind in ("low", "high", "dual")]
    silent = (gradient == 0) & (tokens.advantages_N != 0)
    assert torch.stack(cut).sum(0).tolist() == silent.float().tolist()
    assert all(
        ratio < 0 for ratio, is_cut in zip(log_ratios, cut[0].tolist(), strict=True) if is_cut
    )
    assert all(
        ratio > 0
        for ratio, is_cut in zip(log_ratios, (cut[1] + cut[2]).tolist(), strict=True)
        if is_cut
    )
    assert algorithm in (Grpo, GSPO) or not silent.any()


def test_the_clip_of_a_sample_counts_its_tokens_by_their_common_ratio() -> None:
    log = math.log
    # Two tokens of ratios 2 and 1/2, whose mean is 1: nothing is cut. Two of ratio 2: both are;
    # with A < 0 neither.
    tokens = tokens_of([0.0] * 6, [0.0] * 6, [1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    tokens = replace(tokens, segments_N=torch.tensor([0, 0, 1, 1, 2, 2]))
    logprobs = torch.tensor([log(2), log(0.5), log(2), log(2), log(2), log(2)], dtype=torch.float64)
    metrics = GSPO(GSPO.Config()).loss(logprobs, tokens).metrics
    assert metrics["clipped_high"].tolist() == [0, 0, 1, 1, 0, 0]
    assert metrics["clipped_low"].tolist() == metrics["clipped_dual"].tolist() == [0] * 6
    metrics = CISPO(CISPO.Config(clip_high=0.5)).loss(logprobs, tokens).metrics
    assert metrics["clipped_high"].tolist() == metrics["clipped_low"].tolist() == [0] * 6
    assert metrics["weight_clipped_high"].tolist() == [1, 0, 1, 1, 1, 1]
    assert metrics["weight_clipped_low"].tolist() == [0] * 6


def test_importance_that_a_sample_shares_is_reported_as_it_is_capped() -> None:
    log = math.log
    tokens = replace(
        tokens_of([0.0] * 3, [log(0.5), log(0.2), log(0.25)], [1.0] * 3),
        segments_N=torch.tensor([4, 4, 7]),
    )
    output = policy_gradient(
        torch.zeros(3), tokens, importance_cap=6.0, importance_level="sequence"
    )
    assert output.metrics["importance_weight"].tolist() == pytest.approx([10.0, 10.0, 4.0])
    assert output.metrics["importance_truncated"].tolist() == [1, 1, 0]


def test_surrogates_off_policy_by_hand() -> None:
    log = math.log
    logprobs = torch.tensor([log(3.0), log(0.5)], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of([0.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    # CISPO: the weight is cut at 2, and the gradient stays.
    loss = CISPO(CISPO.Config(clip_high=1.0)).loss(logprobs, tokens).loss_N
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == pytest.approx([-2.0, -0.5])
    # GSPO: one ratio, sqrt(1.5), for both tokens of the sample; beyond the clip neither has a
    # gradient.
    for clip_high, gradient in ((0.3, -math.sqrt(1.5) / 2 * 2), (0.2, 0.0)):
        loss = GSPO(GSPO.Config(clip_high=clip_high)).loss(logprobs, tokens).loss_N
        assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == pytest.approx(
            [gradient] * 2
        )
    # SAPO: the gradient is that of the ratio, times sech^2 of half its distance from 1.
    loss = SAPO(SAPO.Config()).loss(logprobs, tokens).loss_N
    expected = [-ratio / math.cosh((ratio - 1) / 2) ** 2 for ratio in (3.0, 0.5)]
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == pytest.approx(expected)


def naive(new: torch.Tensor, old: float, rollout: float, advantage: float) -> torch.Tensor:
    """The papers' formula for one token, with the cases written out: clips 0.8 and 1.28, dual clip
    3, cap 2.
    """
    ratio = torch.exp(new - old)
    weight = min(math.exp(old - rollout), 2.0)
    if advantage >= 0:
        value = advantage * (ratio if ratio < 1.28 else torch.tensor(1.28))
    else:
        value = advantage * (ratio if ratio > 0.8 else torch.tensor(0.8))
        value = value if value > 3.0 * advantage else torch.tensor(3.0 * advantage)
    return -weight * value


@given(
    st.lists(
        st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)),
        min_size=1,
        max_size=8,
    )
)
def test_gradients_are_those_of_the_formula_written_out(
    rows: list[tuple[float, float, float, float]],
) -> None:
    new, old, rollout, advantages = (list(column) for column in zip(*rows, strict=True))
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
    assume(all(min(abs(r - 1.28), abs(r - 0.8), abs(r - 3.0)) > 1e-6 for r in ratios))
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    output = policy_gradient(
        logprobs, tokens_of(old, rollout, advantages), **CLIP, dual_clip=3.0, importance_cap=2.0
    )
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), logprobs)
    plain = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    losses = [naive(plain[i], old[i], rollout[i], advantages[i]) for i in range(len(new))]
    total = torch.stack(losses).sum() + 0.0 * plain.sum()
    (expected,) = torch.autograd.grad(total, plain)
    assert output.loss_N.tolist() == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert not any(metric.requires_grad for metric in output.metrics.values())


@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=8))
def test_on_policy_the_gradient_is_reinforce(rows: list[tuple[float, float]]) -> None:
    old, advantages = (list(column) for column in zip(*rows, strict=True))
    logprobs = torch.tensor(old, dtype=torch.float64, requires_grad=True)
    output = policy_gradient(logprobs, tokens_of(old, old, advantages), **CLIP, importance_cap=2.0)
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-a for a in advantages])


@given(
    st.lists(st.tuples(*[st.floats(-3, 0)] * 3, st.floats(-2, 2)), min_size=2, max_size=8),
    st.integers(0, 99),
)
def test_a_tokens_loss_depends_on_that_token_alone(
    rows: list[tuple[float, ...]], seed: int
) -> None:
    def losses(listed: list[tuple[float, ...]]) -> list[float]:
        new, old, rollout, advantages = (list(column) for column in zip(*listed, strict=True))
        return (
            Grpo()
            .loss(torch.tensor(new, dtype=torch.float64), tokens_of(old, rollout, advantages))
            .loss_N.tolist()
        )

    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    base = losses(rows)
    assert losses([rows[i] for i in order]) == [base[i] for i in order]


def test_cross_entropy_is_the_weighted_negative_logprob() -> None:
    output = cross_entropy(torch.tensor([-1.0, -2.0]), tokens_of([0, 0], [0, 0], [1.0, 0.5]))
    assert output.loss_N.tolist() == [1.0, 1.0]
    assert output.metrics["nll"].tolist() == [1.0, 2.0]


def test_normalizers_are_the_loss_tokens_or_the_constant() -> None:
    assert Grpo().normalizer(batch_of(7)) == 7.0
    assert Grpo(Grpo.Config(normalizer=512)).normalizer(batch_of(7)) == 512.0
    assert Sft().normalizer(batch_of(7)) == 7.0


def test_sft_imitates_every_trajectory() -> None:
    assert Sft().advantages(group_of([Score(0.0), Score(1.0)])) == [1.0, 1.0]


def test_rejection_sampling_imitates_the_best_and_counts_their_tokens_only() -> None:
    group = group_of([Score(0.0), Score(1.0), Score(1.0), Score(0.6)])
    of = {
        keep: RejectionSampling(RejectionSampling.Config(keep=keep))
        for keep in ("best", "above_mean", "success")
    }
    assert of["best"].advantages(group) == [0, 1, 1, 0]
    assert of["above_mean"].advantages(group) == [0, 1, 1, 0]
    # Nothing else tells, so scores above zero do.
    assert of["success"].advantages(group) == [
        0,
        1,
        1,
        1,
    ]
    batch = replace(batch_of(4), advantages_N=np.array([0, 1, 1, 0], np.float32))
    assert of["best"].normalizer(batch) == 2
    assert of["best"].normalizer(batch_of(4)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"advantage": "median"},
        {"normalizer": 0},
        {"normalizer": "rows"},
        {"dual_clip": 0.5},
        {"clip": 0.2},
        {"clip_low": 2},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Grpo.Config.model_validate(wrong)


def test_grpo_passes_its_settings_to_the_loss() -> None:
    logprobs = torch.tensor([math.log(4.0)], dtype=torch.float64)
    tokens = tokens_of([0.0], [-math.log(8.0)], [-1.0])
    for settings, expected in [
        (Grpo.Config(), 8.0),
        (Grpo.Config(importance_cap=None), 4.0),
        (Grpo.Config(importance_cap=4.0, dual_clip=3.0), 12.0),
    ]:
        assert Grpo(settings).loss(logprobs, tokens).loss_N.item() == pytest.approx(expected)
    gain = replace(tokens, advantages_N=-tokens.advantages_N)
    assert Grpo(Grpo.Config(clip_high=1.0)).loss(logprobs, gain).loss_N.item() == pytest.approx(
        -4.0
    )
    lower = Grpo(Grpo.Config(clip_low=0.5)).loss(-logprobs, tokens).loss_N.item()
    assert lower == pytest.approx(2.0 * 0.5)


def test_the_entropy_term_has_the_gradient_of_negative_entropy_in_expectation() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    probabilities = logprobs.exp().detach()
    (expected,) = torch.autograd.grad((logprobs.exp() * logprobs).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((probabilities * negative_entropy(logprobs)).sum(), logits)
    torch.testing.assert_close(estimated, expected)


def test_the_exact_entropy_of_a_trainer_is_the_bonus_and_a_metric() -> None:
    logprobs, zeros = torch.tensor([-1.0, -2.0]), torch.zeros(2)
    tokens = LossTokens(logprobs, logprobs, logprobs, zeros, zeros, torch.tensor([0.5, 1.5]))
    output = Grpo(Grpo.Config(entropy_bonus=0.1)).loss(logprobs, tokens)
    assert output.loss_N.tolist() == pytest.approx([-0.05, -0.15])
    assert output.metrics["policy_entropy"].tolist() == [0.5, 1.5]
    assert [uses_entropy(Grpo(Grpo.Config(entropy_bonus=b)).loss) for b in (0.0, 0.1)] == [
        False,
        True,
    ]
    assert not uses_entropy(lambda logprobs_N, tokens: output)


def test_an_entropy_bonus_raises_the_probability_of_what_is_unlikely() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    sampled = torch.multinomial(
        logprobs.exp().detach(), 20_000, True, generator=torch.Generator().manual_seed(0)
    )
    before, zeros = logprobs[sampled].detach(), torch.zeros(len(sampled))
    tokens = LossTokens(before, before, before, zeros, zeros)
    output = Grpo(Grpo.Config(entropy_bonus=0.1)).loss(logprobs[sampled], tokens)
    (gradient,) = torch.autograd.grad(output.loss_N.sum(), logits)
    assert gradient[0] > 0 > gradient[2]
    assert Grpo(Grpo.Config()).loss(logprobs[sampled], tokens).loss_N.abs().sum() == 0


@pytest.mark.parametrize("term", ["entropy_bonus", "kl"])
def test_the_extra_terms_are_right_in_expectation_for_tokens_that_an_older_policy_sampled(
    term: str,
) -> None:
    """The sum over all tokens of q * loss has the gradient of the policy's own entropy, or KL,
    whatever q is.
    """
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    # At the step's beginning.
    began = torch.log_softmax(torch.tensor([0.2, 0.4, 1.0, -0.3], dtype=torch.float64), -1)
    # Of the engine.
    sampled = torch.log_softmax(torch.tensor([0.9, -0.2, 0.5, 0.3], dtype=torch.float64), -1)
    reference = torch.log_softmax(torch.tensor([-0.5, 0.6, 0.1, 0.8], dtype=torch.float64), -1)
    tokens = LossTokens(began, sampled, reference, torch.zeros(4), torch.zeros(4))
    settings = Grpo.Config.model_validate({term: 1.0, "importance_cap": 100.0})
    losses = Grpo(settings).loss(logprobs, tokens).loss_N
    exact = logprobs if term == "entropy_bonus" else logprobs - reference
    (expected,) = torch.autograd.grad((logprobs.exp() * exact).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((sampled.exp() * losses).sum(), logits, retain_graph=True)
    torch.testing.assert_close(estimated, expected)
    # Without the weight it is another gradient.
    plain = (
        negative_entropy(logprobs)
        if term == "entropy_bonus"
        else reference_penalty(logprobs, reference)
    )
    (unweighted,) = torch.autograd.grad((sampled.exp() * plain).sum(), logits)
    assert float((unweighted - expected).norm() / expected.norm()) > 0.2


@pytest.mark.parametrize("pair", [GSPO, CISPO, SAPO])
def test_a_named_pair_is_its_advantage_with_its_surrogate(pair: NamedPair) -> None:
    spelled = Grpo(Grpo.Config.model_validate({"surrogate": pair.surrogate}))
    assert {**dict(pair.Config())} == {**dict(spelled.config)}
    logprobs = torch.tensor([0.3, -0.4, 0.01], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of([0.0] * 3, [0.1, -0.2, 0.0], [1.0, 1.0, -1.0])
    outputs = [algorithm.loss(logprobs, tokens) for algorithm in (pair(), spelled)]
    gradients = [torch.autograd.grad(output.loss_N.sum(), logprobs)[0] for output in outputs]
    assert torch.equal(*gradients)
    assert outputs[0].metrics.keys() == outputs[1].metrics.keys()


def test_a_surrogate_brings_its_defaults_and_refuses_what_is_of_another() -> None:
    assert Rloo.Config(surrogate="cispo").clip_low == 1.0
    assert Rloo.Config(surrogate="cispo", clip_low=0.5).clip_low == 0.5
    assert Reinforce.Config(surrogate="gspo").normalizer == "trajectories"
    with pytest.raises(ValidationError, match="temperature_positive is of surrogate=sapo"):
        Rloo.Config(temperature_positive=2.0)
    with pytest.raises(ValidationError, match="Input should be 'gspo'"):
        GSPO.Config.model_validate({"surrogate": "cispo"})


@pytest.mark.parametrize("name", sorted(point.name for point in plugins.installed("algorithms")))
def test_every_algorithm_can_be_sent_to_the_ranks_of_a_trainer(name: str) -> None:
    algorithm = plugins.load("algorithms", name)()
    sent = pickle.loads(pickle.dumps(algorithm.loss)).__self__.config
    assert sent == algorithm.config
    assert type(sent) is type(algorithm.config)
