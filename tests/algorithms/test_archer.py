"""What a critic of turns learns, and what a policy learns from it."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from agentrl.algorithms.archer import Archer
from agentrl.algorithms.samples import samples_of
from agentrl.batch import TrainBatch, collate, to_samples
from agentrl.estimation.value_points import Questions, questions
from agentrl.oracles.estimators import Oracle, chain, corridor, stopping, t_maze
from agentrl.trajectory import Completion, Task, Terminated, Trajectory, Truncated, Turn

Table = Mapping[Hashable, float]


def episode(
    *rewards: float, tail: Sequence[int] | None = None, fork: int | None = None
) -> TrainBatch:
    """A batch of an episode of turns with two tokens each; with a tail it was truncated."""
    turns = tuple(
        Turn(
            (1, 2),
            Completion((5, 6), (-1.0, -1.0), (0, 0), "stop"),
            reward,
            {},
            forked=number == fork,
        )
        for number, reward in enumerate(rewards)
    )
    status = Terminated() if tail is None else Truncated("turns")
    trajectory = Trajectory(
        "t", Task("env", 0), turns, status, tail_ids=np.array(tail or (), np.int32)
    )
    return collate(to_samples(trajectory, 0.0, turn_rewards=rewards))


@pytest.mark.parametrize("fork", [None, 1])
def test_targets_and_advantages_by_hand(fork: int | None) -> None:
    algorithm = Archer(Archer.Config(gamma=0.5))
    asked = questions(episode(1.0, 2.0, fork=fork), answers=True, ends=True)
    values = np.array([4.0, 9.0, 6.0, 3.0, 9.0, 7.0], np.float32)  # V, unused, Q of each turn
    estimate = algorithm.estimate(*asked.answered(values))
    assert (estimate.weights_N > 0).tolist() == [True, False, True, True, False, True]
    assert estimate.weights_N.sum() == 6
    # V <- Q; Q <- r + gamma V(s'), and r at the end.
    assert estimate.returns_N[[0, 2, 3, 5]].tolist() == [6.0, 1.0 + 0.5 * 3.0, 7.0, 2.0]
    assert estimate.advantages_N[asked.own_N].tolist() == [2.0, 2.0, 4.0, 4.0]


def test_after_a_truncation_the_critic_is_asked_or_nothing_is_expected_or_nothing_is_learned() -> (
    None
):
    for settings, tail, target in (
        ({"truncated": "bootstrap"}, [3, 4], 1.0 + 0.5 * 8.0),
        ({"truncated": "terminal"}, [3, 4], 1.0),
        ({"truncated": "bootstrap"}, [], None),
    ):
        algorithm = Archer(Archer.Config.model_validate({"gamma": 0.5, **settings}))
        asked = questions(episode(1.0, tail=tail), answers=True, ends=algorithm.bootstraps)
        values = np.array([4.0, 9.0, 6.0, 8.0], np.float32)[: asked.asked.num_loss_tokens]
        estimate = algorithm.estimate(*asked.answered(values))
        assert estimate.weights_N[0] > 0
        assert bool(estimate.weights_N[2]) is (target is not None)
        if target is not None:
            assert estimate.returns_N[2] == target
        assert estimate.advantages_N[asked.own_N].tolist() == [2.0, 2.0]


def test_a_turn_without_tokens_takes_no_lesson_from_other_episodes() -> None:
    nothing = Turn((1, 2), Completion((), (), (), "length"), 0.0, {})
    cut = Trajectory("cut", Task("env", 0), (nothing,), Truncated("turns"))
    batch = TrainBatch.joined([collate(to_samples(cut, 0.0)), episode(1.0), episode(2.0)])
    asked = questions(batch, answers=True, ends=True)
    values_N = np.zeros(asked.asked.num_loss_tokens, np.float32)
    estimate = Archer().estimate(*asked.answered(values_N))
    assert (estimate.weights_N > 0).tolist() == [True, False, True] * 2


def test_of_an_earlier_policys_answers_only_their_own_value_is_learned() -> None:
    new, earlier = episode(1.0), episode(2.0)
    both = TrainBatch.joined([new, replace(earlier, weights_N=0 * earlier.weights_N)])
    asked = questions(both, answers=True, ends=True)
    lesson, values_N, ends_M = asked.answered(np.zeros(6, np.float32))
    weights_N = Archer().estimate(lesson, values_N, ends_M).weights_N
    assert (weights_N > 0).tolist() == [True, False, True, False, False, True]


def test_a_cost_of_the_policy_is_no_reward_that_can_be_replayed() -> None:
    with pytest.raises(ValidationError, match="kl_reward"):
        Archer.Config.model_validate({"kl_reward": 0.1})


class Tabular:
    """A critic with a number for each decision, and for each action of each decision, which learns
    without error.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.table: defaultdict[Hashable, float] = defaultdict(float)
        decisions = oracle._decisions
        self.decision_of = {
            first + token: number
            for number, decision in enumerate(decisions)
            for first, action in zip(oracle._first_tokens[number], decision.actions, strict=True)
            for token in range(action.tokens)
        }
        self.first_of = {
            first + token: first
            for number, decision in enumerate(decisions)
            for first, action in zip(oracle._first_tokens[number], decision.actions, strict=True)
            for token in range(action.tokens)
        }

    def keys(self, asked: Questions) -> list[Hashable]:
        """What each question is about."""
        at_N = np.flatnonzero(asked.asked.loss_mask_S)
        own_N = np.zeros(len(at_N), np.bool_)
        own_N[asked.lesson_N] = asked.own_N
        tokens = asked.asked.tokens_S.tolist()
        return [
            (
                ("before", self.decision_of[tokens[at]])
                if own
                else (
                    ("before", tokens[at - 1] - 1)
                    if end
                    else ("after", self.first_of[tokens[at - 1]])
                )
            )
            for at, own, end in zip(at_N.tolist(), own_N, asked.ends_N, strict=True)
        ]


def taught(
    oracle: Oracle, played: Sequence[tuple[torch.Tensor, bool]], algorithm: Archer
) -> Tabular:
    """A critic after many rounds of lessons by enumerated policies: (logits, whether it is the
    newest).
    """
    critic = Tabular(oracle)
    parts, chances = [], list[float]()
    for logits, newest in played:
        for number, chance in enumerate(oracle.probabilities(logits).tolist()):
            batch = collate(samples_of([oracle.group([number], logits)], algorithm))
            parts.append(batch if newest else replace(batch, weights_N=0 * batch.weights_N))
            chances.append(chance)
    batch = TrainBatch.joined(parts)
    asked = questions(batch, answers=True, ends=algorithm.bootstraps)
    keys = critic.keys(asked)
    chances_N = np.array(chances)[asked.lesson.trajectories_N]
    for _ in range(12):
        estimate = algorithm.estimate(
            *asked.answered(np.array([critic.table[key] for key in keys], np.float32))
        )
        total: defaultdict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
        in_lesson = [key for key, learned in zip(keys, asked.lesson_N, strict=True) if learned]
        first_N = np.append(True, np.diff(asked.lesson.trajectories_N) != 0) | np.append(
            True, np.diff(asked.lesson.turns_N) != 0
        )
        for n, key in enumerate(in_lesson):
            weight = float(estimate.weights_N[n]) * float(chances_N[n])
            if weight and (first_N[n] or key[0] == "after"):
                total[key][0] += weight * float(estimate.returns_N[n])
                total[key][1] += weight
        critic.table.update({key: value / weight for key, (value, weight) in total.items()})
    return critic


@pytest.mark.parametrize(
    "problem", [stopping(), corridor(), chain(3), t_maze()], ids=lambda p: p.state
)
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_the_targets_have_the_exact_values_as_their_fixed_point_though_another_policy_played_too(
    problem, gamma: float
) -> None:
    oracle = Oracle(problem, gamma=gamma)
    policy, other = oracle.logits(1), oracle.logits(2, spread=2.0)
    algorithm = Archer(Archer.Config(gamma=gamma, truncated="terminal"))
    critic = taught(oracle, [(policy, True), (other, False)], algorithm)
    _, at_decisions = oracle.values(policy)
    answers_W = oracle.answer_values(policy)
    for number, decision in enumerate(oracle._decisions):
        firsts = oracle._first_tokens[number]
        reached = any(number == turn[0] for path in oracle.paths for turn in path.turns)
        if reached:  # not what lies behind a limit
            assert critic.table["before", number] == pytest.approx(
                float(at_decisions[number]), abs=1e-5
            )
            found = [critic.table["after", first] for first in firsts]
            assert found == pytest.approx([float(answers_W[first]) for first in firsts], abs=1e-5)
        assert len(firsts) == len(decision.actions)


def test_if_another_policys_answers_taught_the_value_of_a_state_it_would_be_that_policys() -> None:
    oracle = Oracle(stopping())
    policy, other = oracle.logits(1), oracle.logits(2, spread=2.0)
    algorithm = Archer(Archer.Config(gamma=1.0))
    of_both = taught(oracle, [(policy, True), (other, True)], algorithm).table["before", 0]
    assert abs(of_both - float(oracle.mean_return(policy))) > 0.05


def test_the_advantages_of_an_exact_critic_are_exact() -> None:
    oracle = Oracle(chain(2))
    logits = oracle.logits(3)
    values_W, _ = oracle.values(logits)
    answers_W = oracle.answer_values(logits)
    shares_W = oracle.logprobs(logits).exp()
    for firsts in oracle._first_tokens:
        advantages = torch.stack([answers_W[first] - values_W[first] for first in firsts])
        shares = torch.stack([shares_W[first] for first in firsts])
        assert float((shares * advantages).sum()) == pytest.approx(0, abs=1e-12)
