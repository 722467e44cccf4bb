"""Online DPO: its gradient is that of the paper's loss on the pairs that were played."""

import pytest
import torch

from agentrl.algorithms.dpo import OnlineDpo
from agentrl.algorithms.samples import samples_of
from agentrl.batch import collate
from agentrl.testing.oracles import Oracle, bandit, chain


@pytest.mark.parametrize("problem", [bandit(), chain(2)])
def test_the_gradient_is_that_of_the_loss_on_pairs(problem) -> None:
    oracle, algorithm = Oracle(problem), OnlineDpo(OnlineDpo.Config(beta=0.7))
    logits = oracle.logits(1)
    reference_W = oracle.logprobs(oracle.logits(2))
    groups = [oracle.group([0, 1, 2], logits), oracle.group([2, 1], logits), oracle.group([1, 1], logits)]
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
                (logprobs_W[token] - reference_W[token] for turn in t.turns for token in turn.completion.token_ids),
                start=torch.zeros((), dtype=torch.float64),
            )
            for t in group.trajectories
        ]
        margin = moved[rewards.index(max(rewards))] - moved[rewards.index(min(rewards))]
        losses.append(-torch.nn.functional.logsigmoid(0.7 * margin))
    (expected,) = torch.autograd.grad(torch.stack(losses).mean(), own)
    torch.testing.assert_close(oracle.ascent(algorithm, batch, logits), -expected, rtol=1e-5, atol=1e-7)


def test_a_pair_with_a_half_that_is_not_trained_on_has_no_weight() -> None:
    oracle, algorithm = Oracle(bandit()), OnlineDpo()
    logits = oracle.logits(1)
    samples = list(samples_of([oracle.group([0, 1], logits), oracle.group([2, 1], logits)], algorithm))
    batch = algorithm.prepared(collate(samples[1:]))
    by_trajectory = [float(batch.advantages_N[batch.trajectories_N == number][0]) for number in range(3)]
    assert by_trajectory[0] == 0  # its better half is missing; not paired with the other group's
    assert by_trajectory[1] == -by_trajectory[2] != 0
