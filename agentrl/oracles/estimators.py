"""Oracles: decision problems so small that everything about them can be enumerated, to prove
estimators with.

A problem is a tree of decisions. The policy has a softmax over the actions of each of its states,
with free logits, so its expected return, the gradient of that return and the value of every token
are exact numbers. So is the *expectation* of an algorithm's own gradient: all groups of episodes
are enumerated, each is weighted by its probability, and each goes through the code that trains
(`samples_of`, `collate`, the algorithm's hooks and its loss).

    problem = stopping()                       # a tree of decisions
    oracle = Oracle(problem)
    found = oracle.expected_gradient(Rloo(Rloo.Config(normalizer=1.0)), oracle.logits(), members=2)
    residual(found, oracle.gradient(oracle.logits()))   # 0: unbiased up to a constant factor

Dimension suffixes: P logits of the policy, W tokens of the problem, N loss tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations_with_replacement, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.samples import samples_of
from agentrl.batch import TrainBatch, collate
from agentrl.engines.sampling import Truncation, truncated
from agentrl.estimation.value_points import Questions, questions
from agentrl.oracles.problems import (
    Action,
    Decision,
    Result,
    all_decisions,
    bandit,
    chain,
    corridor,
    dialogue,
    stopping,
    t_maze,
)
from agentrl.protocols import ActorCritic, Algorithm, AlgorithmOffers, LossTokens
from agentrl.rollout.branches import BranchPlan
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import FloatArray, floats, ints
from agentrl.trajectory import (
    BranchPoint,
    Completion,
    Group,
    Score,
    Task,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)

START = 0
"""The token that every prompt consists of."""


@dataclass(frozen=True, slots=True)
class Branching:
    """Where the trees of a group branch, if they come so far: the numbers of turns, and how many
    branches leave at each.
    """

    turns: tuple[int, ...] = ()
    width: int = 1

    @property
    def share(self) -> float:
        """That of each branch in its tree."""
        return 1 / (1 + len(self.turns) * self.width)

    def ways(self, turns: Sequence[Turn]) -> Iterator[tuple[float, list[int]]]:
        """The turns at which an episode with these turns branches, with their probabilities."""
        yield 1.0, [turn for turn in self.turns if turn < len(turns)]


@dataclass(frozen=True, slots=True)
class DrawnBranching:
    """Each tree branches by a plan that is drawn for it alone.

    `plans`: each with its probability. `share`: that of each branch in its tree.
    """

    plans: tuple[tuple[float, BranchPlan], ...]
    share: float
    width: int = 1

    def ways(self, turns: Sequence[Turn]) -> Iterator[tuple[float, list[int]]]:
        """The turns at which an episode with these turns branches, with their probabilities."""
        for chance, plan in self.plans:
            reached: list[int] = []
            for turn in range(1, len(turns)):
                if plan.has(turns[:turn], len(reached)):
                    reached.append(turn)
            yield chance, reached


@dataclass(frozen=True, slots=True)
class Path:
    """A way through the problem: (decision's number, action's number, reward) of each turn.

    `chance`: the probability of its results, given its actions. `end`: the decision after a
    truncated episode.
    """

    turns: tuple[tuple[int, int, float], ...]
    chance: float
    end: int | None


@dataclass(slots=True)
class Oracle:
    """A problem with exact answers. `gamma`: the discount of rewards in them, for each turn.

    The policy is the softmax of its logits at `temperature`, over the actions of `kept_P` (by
    default all). `past_limits`: what would have come after a limit counts in values, as for an
    algorithm that bootstraps there.
    """

    root: Decision
    gamma: float = 1.0
    temperature: float = 1.0
    kept_P: Tensor | None = None
    past_limits: bool = False
    states: list[str] = field(init=False)
    """The states of the policy, by number; the logits of their actions lie end to end."""
    paths: list[Path] = field(init=False)
    """All ways through the problem."""
    _decisions: list[Decision] = field(init=False)
    _first_tokens: list[list[int]] = field(init=False)  # of each decision's actions
    _numbers: dict[int, int] = field(init=False)  # of each decision, by its identity
    _deciding_W: Tensor = field(init=False)  # 1 + the logit that decides a token; 0: it is certain

    def __post_init__(self) -> None:
        self._decisions = list(
            {id(decision): decision for decision in all_decisions(self.root)}.values()
        )
        self._numbers = {id(decision): number for number, decision in enumerate(self._decisions)}
        self.states = list(dict.fromkeys(decision.state for decision in self._decisions))
        count = START + 1
        self._first_tokens = []
        sizes = self.sizes
        logits = dict(zip(sizes, accumulate(sizes.values(), initial=1), strict=False))
        deciding = [0] * count
        for decision in self._decisions:
            first_tokens = []
            for number, action in enumerate(decision.actions):
                first_tokens.append(count)
                count += action.tokens
                deciding += [logits[decision.state] + number, *[0] * (action.tokens - 1)]
            self._first_tokens.append(first_tokens)
        self._deciding_W = torch.tensor(deciding)
        self.paths = list(self._paths(self.root, 1.0, ()))

    def number(self, decision: Decision) -> int:
        """The number of a decision of the problem."""
        return self._numbers[id(decision)]

    def first_token(self, decision: Decision) -> int:
        """The token that begins the first action of a decision of the problem."""
        return self._first_tokens[self.number(decision)][0]

    def decision_of(self, token: int) -> int:
        """The number of the decision at which this token begins an action."""
        (number,) = (number for number, firsts in enumerate(self._first_tokens) if token in firsts)
        return number

    # The policy

    def logits(self, seed: int = 0, spread: float = 1.0) -> Tensor:
        """Random logits of a policy, float64, shape P."""
        generator = torch.Generator().manual_seed(seed)
        return spread * torch.randn(
            sum(self.sizes.values()), generator=generator, dtype=torch.float64
        )

    def logprobs(self, logits_P: Tensor) -> Tensor:
        """The logprob of each token of the problem where it is sampled, shape W; 0 for tokens that
        are certain.
        """
        own = [torch.log_softmax(own, 0) for own in self._scale_logits(logits_P).values()]
        return torch.cat([logits_P.new_zeros(1), *own])[self._deciding_W]

    def entropies(self, logits_P: Tensor) -> Tensor:
        """The entropy of the policy before each token of the problem, shape W; 0 for tokens that
        are certain.
        """
        found = [logits_P.new_zeros(1)]
        for own in self._scale_logits(logits_P).values():
            logprobs = torch.log_softmax(own, 0)
            possible = logprobs[torch.isfinite(logprobs)]
            found.append(-(possible.exp() * possible).sum().expand(len(own)))
        return torch.cat(found)[self._deciding_W]

    def left(self, logits_P: Tensor, sampling: SamplingParams) -> Tensor:
        """The actions that sampling leaves in each state, each of which is one token there;
        booleans, shape P.
        """
        rule = Truncation.of(
            [(sampling.top_k, sampling.top_p, sampling.min_p)], torch.device("cpu")
        )
        scaled = [own[None] / sampling.temperature for own in self._split(logits_P).values()]
        return torch.cat([torch.isfinite(truncated(own_RV, rule)[0]) for own_RV in scaled])

    def _scale_logits(self, logits_P: Tensor) -> dict[str, Tensor]:
        """The logits of each state at the policy's temperature, -inf for the actions that are never
        sampled.
        """
        scaled_P = logits_P / self.temperature
        return self._split(
            scaled_P if self.kept_P is None else scaled_P.masked_fill(~self.kept_P, -math.inf)
        )

    def _split(self, logits_P: Tensor) -> dict[str, Tensor]:
        sizes = self.sizes
        return dict(zip(sizes, torch.split(logits_P, list(sizes.values())), strict=True))

    def probabilities(self, logits_P: Tensor) -> Tensor:
        """The probability of each path."""
        logprobs_W = self.logprobs(logits_P)
        probabilities = []
        for path in self.paths:
            # Only the first token of an action decides; the others follow with certainty.
            chosen = [logprobs_W[self._first_tokens[d][a]] for d, a, _ in path.turns]
            probabilities.append(path.chance * torch.stack(chosen).sum().exp())
        return torch.stack(probabilities)

    # Exact answers

    def mean_return(self, logits_P: Tensor) -> Tensor:
        """The expected discounted return of the policy."""
        returns = []
        for path in self.paths:
            rewards = [reward for _, _, reward in path.turns]
            returns.append(sum(self.gamma**k * reward for k, reward in enumerate(rewards)))
        return (self.probabilities(logits_P) * torch.tensor(returns, dtype=torch.float64)).sum()

    def gradient(self, logits_P: Tensor) -> Tensor:
        """The gradient of `mean_return` with respect to the logits, shape P."""
        own_P = logits_P.detach().requires_grad_()
        (gradient_P,) = torch.autograd.grad(self.mean_return(own_P), own_P)
        return gradient_P

    def values(self, logits_P: Tensor, costs_W: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The expected return before each token (shape W), and at each decision, from there on.

        Before the first token of an action, that is the value of its decision; before the others,
        that of the action. `costs_W`: what tokens cost, of which only the first of an action may.
        """
        probabilities_W = self.logprobs(logits_P).exp()
        at: dict[int, float] = {}

        def of_action(action: Action) -> float:
            return self._expected_return(action, of)

        def of(decision: Decision) -> float:
            number = self._numbers[id(decision)]
            if number not in at:
                shares = [float(probabilities_W[first]) for first in self._first_tokens[number]]
                costs = [
                    0.0 if costs_W is None else float(costs_W[first])
                    for first in self._first_tokens[number]
                ]
                worth = [
                    of_action(action) - cost
                    for action, cost in zip(decision.actions, costs, strict=True)
                ]
                at[number] = sum(p * q for p, q in zip(shares, worth, strict=True) if p > 0)
            return at[number]

        found = [0.0]
        for decision in self._decisions:
            for action in decision.actions:
                found += [of(decision), *[of_action(action)] * (action.tokens - 1)]
        values = [of(decision) for decision in self._decisions]
        return torch.tensor(found, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)

    def answer_values(self, logits_P: Tensor) -> Tensor:
        """The expected return of the action that each token belongs to, from that action on, shape
        W.
        """
        _, at_decisions = self.values(logits_P)

        def of(decision: Decision) -> float:
            return float(at_decisions[self._numbers[id(decision)]])

        found = [0.0]
        for decision in self._decisions:
            for action in decision.actions:
                found += [self._expected_return(action, of)] * action.tokens
        return torch.tensor(found, dtype=torch.float64)

    def best_return(self) -> float:
        """The expected return of the best policy that sees the whole history."""

        def of(decision: Decision) -> float:
            return max(self._expected_return(action, of) for action in decision.actions)

        return of(self.root)

    def _expected_return(self, action: Action, value: Callable[[Decision], float]) -> float:
        """The expected return of an action, from the values of the decisions after it."""
        return sum(
            result.probability
            * (
                result.reward
                + (
                    self.gamma * value(result.then)
                    if self._goes_on(result) and result.then
                    else 0.0
                )
            )
            for result in action.results
        )

    def _goes_on(self, result: Result) -> bool:
        return result.then is not None and (self.past_limits or not result.truncated)

    # What an algorithm does

    def group(self, numbers: Sequence[int], logits_P: Tensor) -> Group:
        """The group that consists of these paths, as the policy would have played them."""
        logprobs_W = self.logprobs(logits_P).detach()
        task = Task("oracle", 0, {}, "oracle")
        played = [
            self._trajectory(f"{i}", self.paths[n], task, logprobs_W) for i, n in enumerate(numbers)
        ]
        scores = [Score(t.env_return, turns=tuple(turn.reward for turn in t.turns)) for t in played]
        return Group(task, tuple(played), tuple(scores))

    def expected_gradient(
        self,
        algorithm: Algorithm,
        logits_P: Tensor,
        *,
        members: int,
        reference_P: Tensor | None = None,
        keeps: Callable[[Group], bool] = lambda group: True,
        branching: Branching | DrawnBranching | None = None,
    ) -> Tensor:
        """The expectation of the gradient that the algorithm ascends, over all groups of so many
        members; shape P.

        On-policy, in the first minibatch, with one group in a batch, and with an exact critic.
        `reference_P`: the logits of the reference, by default the policy's own. `keeps`: which
        groups are trained on; others are replaced by the next ones, so that the expectation is that
        over the kept ones. `branching`: members are trees of episodes.
        """
        critic = self.critic(logits_P)
        total_W, kept = torch.zeros(sum(self._tokens()), dtype=torch.float64), 0.0
        for chance, group in self.groups(logits_P, members, branching):
            if not keeps(group):
                continue
            kept += chance
            batch = collate(samples_of([group], algorithm))
            if reference_P is not None:
                batch = self.with_reference(batch, reference_P)
            total_W += chance * self._ascent_of_tokens(algorithm, batch, logits_P, critic)
        return self.by_logits(total_W / kept, logits_P)

    def groups(
        self, logits_P: Tensor, members: int, branching: Branching | DrawnBranching | None = None
    ) -> Iterator[tuple[float, Group]]:
        """All groups of so many members, each with its probability; with `branching`, of so many
        trees.
        """
        trees = list(self.trees(logits_P, branching or Branching()))
        for numbers in combinations_with_replacement(range(len(trees)), members):
            counts = [numbers.count(n) for n in set(numbers)]
            ways = math.factorial(members) / math.prod(map(math.factorial, counts))
            chance = ways * math.prod(trees[n][0] for n in numbers)
            played = [one for place, n in enumerate(numbers) for one in _named(trees[n][1], place)]
            scores = [Score(t.env_return, turns=tuple(u.reward for u in t.turns)) for t in played]
            yield chance, Group(played[0].task, tuple(played), tuple(scores))

    def trees(
        self, logits_P: Tensor, branching: Branching | DrawnBranching
    ) -> Iterator[tuple[float, tuple[Trajectory, ...]]]:
        """All episodes with their branches, each with its probability."""
        probabilities = self.probabilities(logits_P).tolist()
        whole = self.group(range(len(self.paths)), logits_P).trajectories

        def branches(number: int, turn: int) -> list[tuple[float, Trajectory]]:
            """Those that can leave a path at a turn, each with its probability."""
            alike = self._alike(number, turn)
            total = sum(probabilities[n] for n in alike)
            place = BranchPoint(whole[number].id, turn, branching.share)
            return [
                (probabilities[n] / total, replace(whole[n], branch=place, trained_turns=turn))
                for n in alike
            ]

        for number, trunk in enumerate(whole):
            for drawn, reached in branching.ways(trunk.turns):
                places = (turn for turn in reached for _ in range(branching.width))
                for chosen in product(*(branches(number, turn) for turn in places)):
                    chance = drawn * math.prod(own for own, _ in chosen)
                    yield probabilities[number] * chance, (trunk, *(one for _, one in chosen))

    def spreads(self, logits_P: Tensor) -> dict[int, float]:
        """What is decided from a turn on, by turn: the expected variance of the return, given the
        state there, times the share of episodes that come so far. `at=disagreement` estimates it.
        """
        probabilities = self.probabilities(logits_P).tolist()
        returns = [sum(reward for _, _, reward in path.turns) for path in self.paths]
        found: dict[int, float] = {}
        for turn in range(1, max(len(path.turns) for path in self.paths)):
            come = [n for n, path in enumerate(self.paths) if len(path.turns) > turn]
            squares = 0.0
            for number in come:
                alike = self._alike(number, turn)
                total = sum(probabilities[n] for n in alike)
                mean = sum(probabilities[n] * returns[n] for n in alike) / total
                squares += probabilities[number] * (returns[number] - mean) ** 2
            found[turn] = squares
        return found

    def _alike(self, number: int, turn: int) -> list[int]:
        """The paths that come to the same state at this turn in the same way."""
        begun, (state, *_) = self.paths[number].turns[:turn], self.paths[number].turns[turn]
        return [
            n
            for n, path in enumerate(self.paths)
            if path.turns[:turn] == begun
            and len(path.turns) > turn
            and path.turns[turn][0] == state
        ]

    def noise(
        self,
        algorithm: Algorithm,
        logits_P: Tensor,
        *,
        members: int,
        branching: Branching | DrawnBranching | None = None,
    ) -> float:
        """The variance of the algorithm's gradient, over its squared mean, for each sampled token:
        so many tokens have to be sampled until the gradient is as large as its noise.
        """
        critic = self.critic(logits_P)
        mean_P, square, tokens = torch.zeros_like(logits_P), 0.0, 0.0
        for chance, group in self.groups(logits_P, members, branching):
            batch = collate(samples_of([group], algorithm))
            found_W = self._ascent_of_tokens(algorithm, batch, logits_P, critic)
            found_P = self.by_logits(found_W, logits_P)
            mean_P += chance * found_P
            square += chance * float(found_P @ found_P)
            sampled = (len(u.completion.token_ids) for t in group.trajectories for u in t.new_turns)
            tokens += chance * sum(sampled)
        along = float(mean_P @ mean_P)
        return (square - along) / along * tokens

    def with_reference(self, batch: TrainBatch, logits_P: Tensor) -> TrainBatch:
        """A batch of this problem's paths with the logprobs of a reference of these logits."""
        tokens_N = batch.tokens_S[batch.loss_mask_S].astype(np.int64)
        return replace(
            batch, reference_logprobs_N=floats(self.logprobs(logits_P).detach().numpy()[tokens_N])
        )

    def ascent(self, algorithm: Algorithm, batch: TrainBatch, logits_P: Tensor) -> Tensor:
        """The gradient that the algorithm ascends on a batch of this problem's paths, shape P."""
        critic = self.critic(logits_P)
        return self.by_logits(self._ascent_of_tokens(algorithm, batch, logits_P, critic), logits_P)

    def by_logits(self, gradient_W: Tensor, logits_P: Tensor) -> Tensor:
        """The gradient by the logits, from that by the logprobs of the tokens."""
        own_P = logits_P.detach().requires_grad_()
        (gradient_P,) = torch.autograd.grad(self.logprobs(own_P), own_P, gradient_W)
        return gradient_P

    def critic(self, logits_P: Tensor, costs_W: Tensor | None = None) -> "ExactCritic":
        """The critic without error of the policy with these logits. `costs_W`: as of `values`."""
        values_W, at_decisions = self.values(logits_P, costs_W)
        return ExactCritic(values_W, self.answer_values(logits_P), at_decisions)

    def _ascent_of_tokens(
        self, algorithm: Algorithm, batch: TrainBatch, logits_P: Tensor, critic: "ExactCritic"
    ) -> Tensor:
        own_W = self.logprobs(logits_P).detach().requires_grad_()
        tokens_N = torch.from_numpy(batch.tokens_S[batch.loss_mask_S].astype(np.int64))
        logprobs_N = own_W[tokens_N]
        batch = with_advantages(algorithm, batch, critic)
        old_N = logprobs_N.detach()
        reference_N = torch.from_numpy(batch.reference_logprobs_N.astype(np.float64))
        advantages_N = torch.from_numpy(batch.advantages_N.astype(np.float64))
        segments_N = torch.from_numpy(np.repeat(np.arange(batch.num_samples), batch.loss_tokens_M))
        loss_N = algorithm.loss(
            logprobs_N, LossTokens(old_N, old_N, reference_N, advantages_N, segments_N)
        ).loss_N
        weights_N = torch.from_numpy(batch.weights_N.astype(np.float64))
        (gradient_W,) = torch.autograd.grad(
            -(loss_N * weights_N).sum() / algorithm.normalizer(batch), own_W
        )
        return gradient_W

    def _trajectory(self, name: str, path: Path, task: Task, logprobs_W: Tensor) -> Trajectory:
        turns = []
        for number, chosen, reward in path.turns:
            decision = self._decisions[number]
            first = self._first_tokens[number][chosen]
            ids = list(range(first, first + decision.actions[chosen].tokens))
            completion = Completion(
                ints(ids), floats(logprobs_W[ids].numpy()), ints([0] * len(ids)), "stop"
            )
            turns.append(Turn(ints([START]), completion, reward, {}, state=decision.state))
        status: Any = Terminated() if path.end is None else Truncated("turns")
        # Its last token says where the episode was cut.
        tail = () if path.end is None else (START, path.end + 1)
        return Trajectory(name, task, tuple(turns), status, tail_ids=ints(tail))

    def _tokens(self) -> list[int]:
        """The numbers of tokens: the start, and those of each decision."""
        return [
            1,
            *(sum(action.tokens for action in decision.actions) for decision in self._decisions),
        ]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of actions in each state."""
        return {decision.state: len(decision.actions) for decision in self._decisions}

    def _paths(
        self, decision: Decision, chance: float, turns: tuple[tuple[int, int, float], ...]
    ) -> Iterator[Path]:
        number = self._numbers[id(decision)]
        for chosen, action in enumerate(decision.actions):
            for result in action.results:
                played = (*turns, (number, chosen, result.reward))
                if result.then is None or result.truncated:
                    end = None if result.then is None else self._numbers[id(result.then)]
                    yield Path(played, chance * result.probability, end)
                else:
                    yield from self._paths(result.then, chance * result.probability, played)


@dataclass(frozen=True, slots=True)
class ExactCritic:
    """The values of a critic without error: before each token of the problem, after the action that
    it belongs to, and at each decision.
    """

    values_W: Tensor
    answers_W: Tensor
    at_decisions: Tensor

    def answers_to(self, asked: Questions) -> FloatArray:
        """The exact answers to all questions about a batch of the problem's paths."""
        batch = asked.asked
        at_N = np.flatnonzero(batch.loss_mask_S)
        own_N, answer_N = np.zeros((2, len(at_N)), np.bool_)
        own_N[asked.lesson_N] = asked.own_N
        answer_N[asked.lesson_N] = ~asked.own_N
        # An answer's last token, or what says where the end is.
        before_N = batch.tokens_S[at_N - 1].astype(np.int64)
        values_N = np.where(own_N, self.values_W.numpy()[batch.tokens_S[at_N]], 0.0)
        values_N[answer_N] = self.answers_W.numpy()[before_N[answer_N]]
        values_N[asked.ends_N] = self.at_decisions.numpy()[before_N[asked.ends_N] - 1]
        return floats(values_N)


def with_advantages(algorithm: Algorithm, batch: TrainBatch, critic: ExactCritic) -> TrainBatch:
    """The batch that is trained on: prepared by the algorithm, with the advantages that it finds
    with the critic.
    """
    offers = AlgorithmOffers.of(algorithm)
    if offers.prepared is not None:
        batch = offers.prepared(batch)
    if not isinstance(algorithm, ActorCritic):
        return batch
    asked = questions(batch, answers=offers.values_answers, ends=algorithm.bootstraps)
    estimate = algorithm.estimate(*asked.answered(critic.answers_to(asked)))
    return replace(batch, advantages_N=estimate.advantages_N[asked.own_N])


def _named(tree: Sequence[Trajectory], place: int) -> list[Trajectory]:
    """The episodes of a tree under names that no other tree of the group has."""
    trunk = f"{place}"
    named = [replace(tree[0], id=trunk)]
    for number, one in enumerate(tree[1:]):
        assert one.branch is not None
        named.append(replace(one, id=f"{place}/{number}", branch=replace(one.branch, parent=trunk)))
    return named


def residual(found_P: Tensor, wanted_P: Tensor) -> float:
    """The part of the wanted gradient that is not along the found one, relative to the whole.

    0 is unbiased up to a factor (of either sign; see `cosine`), 1 is unrelated.
    """
    along_P = found_P * (found_P @ wanted_P) / (found_P @ found_P)
    return float((wanted_P - along_P).norm() / wanted_P.norm())


def cosine(found_P: Tensor, wanted_P: Tensor) -> float:
    """The cosine between two gradients."""
    return float(torch.nn.functional.cosine_similarity(found_P, wanted_P, dim=0))


__all__ = [
    "Action",
    "Branching",
    "Decision",
    "DrawnBranching",
    "ExactCritic",
    "Oracle",
    "Path",
    "Result",
    "bandit",
    "chain",
    "corridor",
    "cosine",
    "dialogue",
    "residual",
    "stopping",
    "t_maze",
]
