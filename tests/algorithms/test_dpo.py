"""Online DPO: its gradient is that of the paper's loss on the pairs that were played, and its
minimum is known.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms.dpo import OnlineDpo, RankedPair, batch_of_pairs, ranked_pairs
from agentrl.algorithms.samples import samples_of
from agentrl.batch import TrainBatch, collate
from agentrl.oracles.estimators import Oracle, bandit, chain
from agentrl.tokens.arrays import floats
from tests.properties import examples


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("problem", [bandit(), chain(2)])
def test_the_gradient_is_that_of_the_loss_on_pairs(problem, labels) -> None:
    oracle, algorithm = Oracle(problem), OnlineDpo(OnlineDpo.Config(beta=0.7, labels=labels))
    logits = oracle.logits(1)
    reference_W = oracle.logprobs(oracle.logits(2))
    groups = [
        oracle.group([0, 1, 2], logits),
        oracle.group([2, 1], logits),
        oracle.group([1, 1], logits),
    ]
    batch = collate(samples_of(groups, algorithm))
    batch = oracle.with_reference(batch, oracle.logits(2))
    paired = [group for group in groups if len(set(group.rewards_G)) > 1]
    assert algorithm.normalizer(batch) == len(paired) > 0
    own = logits.clone().requires_grad_()
    logprobs_W = oracle.logprobs(own)
    losses = []
    for group in paired:
        rewards = list(group.rewards_G)
        moved = [
            sum(
                (
                    logprobs_W[token] - reference_W[token]
                    for turn in t.turns
                    for token in turn.completion.token_ids
                ),
                start=torch.zeros((), dtype=torch.float64),
            )
            for t in group.trajectories
        ]
        margin = 0.7 * (moved[rewards.index(max(rewards))] - moved[rewards.index(min(rewards))])
        label = 1.0 if labels == "hard" else 1 / (1 + np.exp(min(rewards) - max(rewards)))
        better, worse = (torch.nn.functional.logsigmoid(sign * margin) for sign in (1, -1))
        losses.append(-label * better - (1 - label) * worse)
    (expected,) = torch.autograd.grad(torch.stack(losses).mean(), own)
    torch.testing.assert_close(
        oracle.ascent(algorithm, batch, logits), -expected, rtol=1e-5, atol=1e-7
    )


def test_a_pair_with_a_half_that_is_not_trained_on_has_no_weight() -> None:
    oracle, algorithm = Oracle(bandit()), OnlineDpo()
    logits = oracle.logits(1)
    samples = list(
        samples_of([oracle.group([0, 1], logits), oracle.group([2, 1], logits)], algorithm)
    )
    batch = algorithm.prepared(collate(samples[1:]))
    by_trajectory = [
        float(batch.advantages_N[batch.trajectories_N == number][0]) for number in range(3)
    ]
    assert by_trajectory[0] == 0  # its better half is missing; not paired with the other group's
    assert by_trajectory[1] == -by_trajectory[2] != 0


# Others are equal by rounding.
@given(st.lists(st.floats(-3, 3).map(lambda reward: round(reward, 6)), max_size=6))
@examples(30)
def test_all_pairs_are_those_whose_rewards_differ_and_the_best_and_the_worst_are_one_of_them(
    rewards,
) -> None:
    every = ranked_pairs(rewards, "all", "soft")
    assert {(pair.better, pair.worse) for pair in every} == {
        (i, j) for i, a in enumerate(rewards) for j, b in enumerate(rewards) if a > b
    }
    for pair in every:
        assert pair.label == pytest.approx(
            1 / (1 + np.exp(rewards[pair.worse] - rewards[pair.better]))
        )
    one = ranked_pairs(rewards, "best_worst", "hard")
    assert len(one) == (len(set(rewards)) > 1)
    for pair in one:
        assert (rewards[pair.better], rewards[pair.worse], pair.label) == (
            max(rewards),
            min(rewards),
            1.0,
        )


def test_a_trajectory_of_several_pairs_stands_in_each_with_its_own_sign() -> None:
    oracle = Oracle(chain(2))
    group = oracle.group([0, 1, 3], oracle.logits(1))
    played = collate(samples_of([group], OnlineDpo()))
    batch = batch_of_pairs(played, [RankedPair(1, 0, 0.75), RankedPair(2, 1, 1.0)])
    assert batch.groups_of_trajectories.tolist() == [0, 0, 1, 1]
    by_half = [batch.advantages_N[batch.trajectories_N == half] for half in range(4)]
    assert [set(signed_N.tolist()) for signed_N in by_half] == [{0.75}, {-0.75}, {1.0}, {-1.0}]
    for half, number in enumerate([1, 0, 2, 1]):
        assert (
            batch.rollout_logprobs_N[batch.trajectories_N == half].tolist()
            == played.rollout_logprobs_N[played.trajectories_N == number].tolist()
        )


REWARDS = (1.0, 0.4, 0.0, 0.7)
BETA = 0.8


def at_the_minimum(oracle: Oracle, batch: TrainBatch, logits_P: Tensor) -> Tensor:
    """The logits at which the loss on this batch is least, found by the gradient that the algorithm
    ascends.
    """
    algorithm, own = (
        OnlineDpo(OnlineDpo.Config(beta=BETA, labels="soft")),
        logits_P.clone().requires_grad_(),
    )
    optimizer = torch.optim.LBFGS(
        [own], max_iter=200, tolerance_grad=1e-9, tolerance_change=0, history_size=10
    )
    tokens_N = batch.tokens_S[batch.loss_mask_S].astype(np.int64)

    def loss() -> float:
        now_N = floats(oracle.logprobs(own.detach()).numpy()[tokens_N])
        own.grad = -oracle.ascent(algorithm, replace(batch, rollout_logprobs_N=now_N), own.detach())
        return float(own.grad.norm())

    optimizer.step(loss)
    return own.detach()


@pytest.mark.parametrize("reference", ["last", "first"])
def test_an_iteration_on_a_bandit_with_soft_labels_multiplies_the_reference_by_exp_of_the_reward(
    reference,
) -> None:
    oracle = Oracle(bandit(REWARDS, (2, 5, 12, 1)))
    first = oracle.logits(3)
    pairs = ranked_pairs(REWARDS, "all", "soft")
    logits = first
    for iteration in range(1, 4):
        # The expected loss of a pair that the policy plays: all pairs, by their probabilities.
        arms_A = torch.softmax(logits, 0).numpy()
        chances_Q = floats([2 * arms_A[pair.better] * arms_A[pair.worse] for pair in pairs])
        played = collate(samples_of([oracle.group(range(4), logits)], OnlineDpo()))
        played = oracle.with_reference(played, logits if reference == "last" else first)
        batch = batch_of_pairs(played, pairs)
        batch = replace(batch, weights_N=floats(chances_Q[batch.trajectories_N // 2]))
        logits = at_the_minimum(oracle, batch, logits)
        times = iteration if reference == "last" else 1
        exact_A = torch.softmax(
            first + times * torch.tensor(REWARDS, dtype=torch.float64) / BETA, 0
        )
        assert 0.5 * float((torch.softmax(logits, 0) - exact_A).abs().sum()) < 1e-4
