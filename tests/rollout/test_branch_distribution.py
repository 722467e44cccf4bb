"""What branches play from a state is what independent episodes of the policy would play from it.

The whole scheduler plays a problem whose every continuation can be enumerated, on the virtual
clock.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from math import sqrt
from random import Random

import pytest

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.protocols import GenerateRequest
from agentrl.testing import ByteTokenizer, ScriptedEngine
from tests.rollout.test_scheduler import SlowEnv, World, config

RENDERER = TemplateRenderer(ByteTokenizer())
TURNS = 4
Z = 3.3
"""Of a normal variable that is exceeded once in a thousand."""


class Walk(SlowEnv):
    """Shows the answers so far; over after four, or as soon as the last two are b. It pays to say
    b after a.
    """

    async def reset(self, *, seed, options):
        self.path = ""
        return "at .", {}

    async def step(self, action):
        self.path += action
        over = is_over(self.path)
        return f"at {self.path}.", float(over and "ab" in self.path), over, False, {}

    async def snapshot(self) -> bytes:
        return self.path.encode()

    async def restore(self, state: bytes) -> None:
        self.path = state.decode()


def is_over(path: str) -> bool:
    return len(path) == TURNS or path.endswith("bb")


def chance_of_a(path: str) -> float:
    """The policy: how probable it is that a follows."""
    return (0.2, 0.5, 0.8)[(len(path) + path.count("a")) % 3]


def continuations(path: str, chance: Callable[[str], float]) -> Iterator[tuple[str, float]]:
    """All ways to the end from a state, with their probabilities."""
    if is_over(path):
        yield "", 1.0
        return
    for answer, probability in (("a", chance(path)), ("b", 1 - chance(path))):
        for rest, of_rest in continuations(path + answer, chance):
            yield answer + rest, probability * of_rest


def played(
    draw: Callable[[GenerateRequest], float], steps: int, at: str = "uniform"
) -> list[list[tuple[str, str, str]]]:
    """The branches of each place, as (state, continuation, continuation of the one it has left)."""

    def answer(request: GenerateRequest) -> bytes:
        *_, path = re.findall(r"at (\w*)\.", RENDERER.decode(request.prompt_ids))
        return b"a" if draw(request) < chance_of_a(path) else b"b"

    branches = {"at": at, "width": 2, "budget": 2, "before": TURNS}
    settings = config(max_staleness=1, branches=branches, budget={"turns": 9})
    engine = ScriptedEngine.replying(answer, max_batch=64)
    world = World(settings, steps=steps, env=Walk, engine=engine, teaches=lambda group: True)
    places = defaultdict(list)
    for group in (group for batch in world.run().batches for group in batch):
        paths = {
            one.id: "".join(m.content for m in one.messages if m.is_answer)
            for one in group.trajectories
        }
        for one in group.trajectories:
            if one.branch is not None:
                parent, turn = one.branch.parent, one.branch.turn
                path, other = paths[one.id], paths[parent]
                assert path[:turn] == other[:turn]
                places[parent, turn].append((path[:turn], path[turn:], other[turn:]))
    return list(places.values())


def misfit(found: dict[str, Counter[str]], chance: Callable[[str], float]) -> tuple[float, float]:
    """Pearson's chi-squared of all continuations that were found from each state, and the bound
    that it exceeds once in a thousand. What is expected fewer than five times is one class.
    """
    total, freedom = 0.0, 0
    for state, counts in found.items():
        number = counts.total()
        classes: dict[str, float] = defaultdict(float)
        seen: Counter[str] = Counter()
        for rest, probability in continuations(state, chance):
            label = rest if number * probability >= 5 else "rare"
            classes[label] += number * probability
            seen[label] += counts[rest]
        total += sum((seen[one] - wanted) ** 2 / wanted for one, wanted in classes.items())
        freedom += len(classes) - 1
    spread = 2 / (9 * freedom)
    return total, freedom * (1 - spread + Z * sqrt(spread)) ** 3  # Wilson and Hilferty


def agreement(places: list[list[tuple[str, str, str]]]) -> float:
    """How far the first answers of branches, of each other and of the episode that they have left
    agree more often than independent ones, in standard deviations.
    """
    excess = variance = 0.0
    for branches in places:
        (state,) = {state for state, _, _ in branches}
        first = [branches[0][2][0], *(own[0] for _, own, _ in branches)]
        chance = chance_of_a(state) ** 2 + (1 - chance_of_a(state)) ** 2
        # Of each pair by itself; pairs of one place are uncorrelated only for even chances, so the
        # others' covariance is counted too.
        pairs = list(combinations(first, 2))
        excess += sum(one == other for one, other in pairs) - len(pairs) * chance
        p = chance_of_a(state)
        shared = p**3 + (1 - p) ** 3 - chance**2
        joined = len(first) * (len(first) - 1) * (len(first) - 2)
        variance += len(pairs) * chance * (1 - chance) + joined * shared
    return excess / sqrt(variance)


@pytest.mark.parametrize("at", ["uniform", "disagreement"])
def test_branches_have_the_distribution_of_independent_episodes_from_the_same_state(at):
    places = played(lambda request: Random(request.seed).random(), steps=50, at=at)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for state, own, _ in (one for branches in places for one in branches):
        found[state][own] += 1
    assert set(found) == {"a", "b", "aa", "ab", "ba", "aaa", "aab", "aba", "baa", "bab"}
    assert sum(counts.total() for counts in found.values()) > 700
    chi_squared, bound = misfit(found, chance_of_a)
    assert chi_squared < bound
    # So many are enough to tell a policy that differs by eight points.
    chi_squared, bound = misfit(found, lambda path: chance_of_a(path) + 0.08)
    assert chi_squared > bound
    assert abs(agreement(places)) < Z


def test_the_measure_finds_branches_that_repeat_each_other():
    """As those would that sample with the seed of the episode that they leave."""
    alike = played(lambda request: Random(request.id.split("/")[0]).random(), steps=8)
    assert agreement(alike) > 2 * Z
