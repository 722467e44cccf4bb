"""The expected gradient of a whole training step as a run would take it, on problems that can be
enumerated.

Where `Oracle.expected_gradient` is about an algorithm, this is about all that a batch goes through:
several groups and environments, filters, the processing of scores and advantages, masks of old
tokens, parts of episodes, and a policy that has moved since the episodes were played. All batches
are enumerated; each is weighted by its probability, and goes through the code that trains.

Dimension suffixes: as in `agentrl/oracles/estimators.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, product
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algorithms.batch_processing import BatchProcessing
from agentrl.algorithms.policy_loss import PolicyAlgorithm
from agentrl.algorithms.samples import traced_batch_of
from agentrl.batch import TrainBatch
from agentrl.errors import TrainingError
from agentrl.oracles.estimators import START, Oracle, Path, with_advantages
from agentrl.oracles.problems import Action, Decision, Result, all_decisions
from agentrl.protocols import ActorCritic, Algorithm, LossTokens, uses_entropy
from agentrl.tokens.arrays import ints
from agentrl.trajectory import SEGMENT, Group, Score, Task, Trajectory, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExactShare:
    """An environment's part of a batch: groups of members that play this problem."""

    env: str
    root: Decision
    groups: int
    members: int


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules by which a step uses played groups, before and beside its algorithm."""

    trains: Callable[[Group], bool] = lambda group: True
    """True if a group is trained on, and not replaced by another one of its environment."""
    oldest: int = 0
    """The oldest version whose tokens carry loss."""
    versions: tuple[int, ...] = (0,)
    """The version that each turn was sampled under; the last one also samples all later turns."""
    cut: int | None = None
    """The number of turns after which an episode is trained on in two parts."""
    engine_is_old: bool = False
    """The old logprobs are the engine's."""


@dataclass(frozen=True, slots=True)
class ExactBatch:
    """A batch that may be trained on: its probability, its groups, and what is trained on after all
    preparation.
    """

    chance: float
    groups: Sequence[Group]
    batch: TrainBatch
    divisor: float


@dataclass(slots=True)
class ExactStep:
    """A step of a run whose batches have these shares. The policy has one vector of logits for all
    problems.

    `by_env`: the algorithm of some environments' advantages. `gamma`: the discount of what the
    critic says.
    """

    shares: Sequence[ExactShare]
    algorithm: Algorithm
    processing: BatchProcessing
    rules: StepRules = StepRules()
    by_env: Mapping[str, Algorithm] = field(default_factory=dict)
    gamma: float = 1.0
    oracle: Oracle = field(init=False)
    """The problems of all shares as one, whose paths are those of each."""
    paths: dict[str, range] = field(init=False)
    """The numbers of the paths of each environment."""

    def __post_init__(self) -> None:
        whole = Action(
            "play", tuple(Result(0.0, share.root, 1 / len(self.shares)) for share in self.shares)
        )
        bootstraps = isinstance(self.algorithm, ActorCritic) and self.algorithm.bootstraps
        self.oracle = Oracle(
            Decision("which environment", (whole,)), self.gamma, past_limits=bootstraps
        )
        self.paths = {}
        found: list[Path] = []
        for share in self.shares:
            first = self.oracle.number(share.root)
            own = [path for path in self.oracle.paths if path.turns[1][0] == first]
            self.paths[share.env] = range(len(found), len(found) + len(own))
            found += [
                Path(path.turns[1:], path.chance * len(self.shares), path.end) for path in own
            ]
        self.oracle.paths = found

    def states_of(self, share: ExactShare) -> Tensor:
        """A mask of the logits of states in a share's problem; booleans, shape P."""
        own = {decision.state for decision in all_decisions(share.root)}
        mask_P: list[bool] = []
        for state, num_actions in self.oracle.sizes.items():
            mask_P += [state in own] * num_actions
        return torch.tensor(mask_P)

    def gradient(self, batches: Sequence[ExactBatch], logits_P: Tensor) -> Tensor:
        """The expected gradient that the step ascends, in the first minibatch; shape P."""
        if not batches:
            return torch.zeros_like(logits_P)
        own_P = logits_P.detach().requires_grad_()
        logprobs_W, entropies_W = self.oracle.logprobs(own_P), self.oracle.entropies(own_P)
        tokens_N = _concatenate(
            batches, lambda one: one.batch.tokens_S[one.batch.loss_mask_S].astype(np.int64)
        )
        logprobs_N = logprobs_W[tokens_N]
        rollout_N = _concatenate(
            batches, lambda one: one.batch.rollout_logprobs_N.astype(np.float64)
        )
        firsts = np.cumsum([0, *(one.batch.num_samples for one in batches)])
        segments = [
            first + np.repeat(np.arange(one.batch.num_samples), one.batch.loss_tokens_M)
            for first, one in zip(firsts, batches, strict=False)
        ]
        tokens = LossTokens(
            rollout_N if self.rules.engine_is_old else logprobs_N.detach(),
            rollout_N,
            _concatenate(batches, lambda one: one.batch.reference_logprobs_N.astype(np.float64)),
            _concatenate(batches, lambda one: one.batch.advantages_N.astype(np.float64)),
            torch.from_numpy(np.concatenate(segments)),
            entropies_W[tokens_N] if uses_entropy(self.algorithm.loss) else None,
        )
        # A token's loss depends on those of its own sample only, so the batches go through it
        # together.
        weights_N = _concatenate(
            batches, lambda one: one.batch.weights_N.astype(np.float64) * (one.chance / one.divisor)
        )
        ascended = -(self.algorithm.loss(logprobs_N, tokens).loss_N * weights_N).sum()
        (gradient_P,) = torch.autograd.grad(ascended, own_P)
        return gradient_P

    def batches(
        self, logits_P: Tensor, played_P: Tensor, reference_P: Tensor
    ) -> Iterator[ExactBatch]:
        """All batches of a step, played by the policy with the logits `played_P`, and trained on
        with `logits_P`. A batch that a run refuses, because nothing of it carries loss, is left
        out.
        """
        critic = self.oracle.critic(logits_P, self.costs(played_P, reference_P))
        played = self._play_paths(played_P)
        chances = self.oracle.probabilities(played_P).tolist()
        for of_shares in product(*(self._draws(share, played, chances) for share in self.shares)):
            chance = math.prod(chance for chance, _ in of_shares)
            groups = [group for _, of_share in of_shares for group in of_share]
            for part in self._parts(groups):
                try:
                    batch = traced_batch_of(
                        part, self.algorithm, self.processing, self.rules.oldest, self.by_env
                    ).batch
                except TrainingError:
                    continue
                batch = with_advantages(
                    self.algorithm, self.oracle.with_reference(batch, reference_P), critic
                )
                yield ExactBatch(chance, part, batch, self.algorithm.normalizer(batch))

    def costs(self, played_P: Tensor, reference_P: Tensor) -> Tensor:
        """The cost of each token in the reward (`kl_reward`), shape W: the KL of the policy that
        sampled it.
        """
        weight = 0.0
        if isinstance(self.algorithm, PolicyAlgorithm):
            weight = self.algorithm.config.kl_reward
        moved_W = self.oracle.logprobs(played_P) - self.oracle.logprobs(reference_P)
        return weight * moved_W.detach().nan_to_num()

    def kept(self, share: ExactShare, played_P: Tensor) -> float:
        """The probability that a group of this share is trained on."""
        chances = self.oracle.probabilities(played_P).tolist()
        return sum(chance for chance, _ in self._groups(share, self._play_paths(played_P), chances))

    def _draws(
        self, share: ExactShare, played: Sequence[Trajectory], chances: Sequence[float]
    ) -> list[tuple[float, list[Group]]]:
        """All that a share may have in a batch: its groups, of those that are trained on."""
        groups = self._groups(share, played, chances)
        kept = sum(chance for chance, _ in groups)
        draws = []
        for ways, chosen in _multisets(groups, share.groups):
            probability = math.prod(chance / kept for chance, _ in chosen) * ways
            draws.append((probability, [group for _, group in chosen]))
        return draws

    def _groups(
        self, share: ExactShare, played: Sequence[Trajectory], chances: Sequence[float]
    ) -> list[tuple[float, Group]]:
        """The groups of a share that are trained on, each with its probability."""
        task, found = Task(share.env, 0, {}, share.env), []
        for ways, numbers in _multisets(self.paths[share.env], share.members):
            chance = ways * math.prod(chances[number] for number in numbers)
            members = tuple(replace(played[number], task=task) for number in numbers)
            group = Group(task, members, tuple(map(_score_of_env, members)))
            if chance > 0 and self.rules.trains(group):
                found.append((chance, group))
        return found

    def _play_paths(self, played_P: Tensor) -> list[Trajectory]:
        """The trajectory of each path, as a policy with these logits plays it."""
        everything = self.oracle.group(range(len(self.oracle.paths)), played_P).trajectories
        best = {share.env: Oracle(share.root).best_return() for share in self.shares}
        found = []
        for env, numbers in self.paths.items():
            for trajectory in (everything[number] for number in numbers):
                turns = [
                    self._stamp_version(turn, number)
                    for number, turn in enumerate(trajectory.turns)
                ]
                # As the environment `oracle` says.
                info = {"success": trajectory.env_return >= best[env] - 1e-9}
                found.append(
                    replace(trajectory, turns=(*turns[:-1], replace(turns[-1], info=info)))
                )
        return found

    def _stamp_version(self, turn: Turn, number: int) -> Turn:
        versions = self.rules.versions
        version = versions[min(number, len(versions) - 1)]
        completion = turn.completion
        stamps = ints(np.full(len(completion.token_ids), version))
        return replace(turn, completion=replace(completion, policy_versions=stamps))

    def _parts(self, groups: Sequence[Group]) -> list[list[Group]]:
        """The parts trained on in one step after another: the groups, or their beginnings and then
        the rest.
        """
        cut = self.rules.cut
        if cut is None:
            return [list(groups)]
        begun, ended = [], []
        for group in groups:
            pairs = [
                (self._cut_after(one, cut), replace(one, trained_turns=cut))
                for one in group.trajectories
            ]
            going = [len(one.turns) > cut for one in group.trajectories]
            first = tuple(part for part, _ in pairs)
            begun.append(
                replace(
                    group,
                    trajectories=first,
                    scores=tuple(map(_score_of_env, first)),
                    partial=any(going),
                )
            )
            rest = tuple(part for (_, part), goes in zip(pairs, going, strict=True) if goes)
            if rest:
                ended.append(
                    replace(group, trajectories=rest, scores=tuple(map(_score_of_env, rest)))
                )
        return [begun, ended] if ended else [begun]

    def _cut_after(self, trajectory: Trajectory, cut: int) -> Trajectory:
        if len(trajectory.turns) <= cut:
            return trajectory
        first_token = int(trajectory.turns[cut].completion.token_ids[0])
        # As at the end of a truncated episode.
        tail = ints((START, self.oracle.decision_of(first_token) + 1))
        return replace(trajectory, turns=trajectory.turns[:cut], status=SEGMENT, tail_ids=tail)


def _score_of_env(trajectory: Trajectory) -> Score:
    """The environment's own rewards."""
    return Score(trajectory.env_return, turns=tuple(turn.reward for turn in trajectory.turns))


def _multisets(of: Sequence[T], size: int) -> Iterator[tuple[int, tuple[T, ...]]]:
    """Each choice of so many with repetitions, and in how many orders it can be drawn."""
    for numbers in combinations_with_replacement(range(len(of)), size):
        repeated = math.prod(math.factorial(numbers.count(number)) for number in set(numbers))
        yield math.factorial(size) // repeated, tuple(of[number] for number in numbers)


def _concatenate(
    batches: Sequence[ExactBatch], values: Callable[[ExactBatch], npt.NDArray[Any]]
) -> Tensor:
    return torch.from_numpy(np.concatenate([values(one) for one in batches]))


__all__ = ["ExactBatch", "ExactShare", "ExactStep", "StepRules"]
