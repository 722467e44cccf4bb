"""Episodes that leave others: a token is in one row, an episode has one fate and a known parent."""

import json
import pickle
from collections import Counter
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.samples import samples_of
from agentrl.errors import ConfigError, TrainingError
from agentrl.rollout.branches import EXPLORED, BranchesConfig, chances
from agentrl.rollout.disagreement import Disagreement
from agentrl.testing import ScriptedEngine
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import BranchPoint, Completion, Group, Trajectory, Turn, staleness
from tests.rollout.test_scheduler import SlowEnv, World, config

BRANCHES = {"at": "every", "width": 2, "budget": 4}


class Lake(SlowEnv):
    """Three to six turns. What it shows is drawn, and its states can be gone back to."""

    async def step(self, action):
        _, *rest = await super().step(action)
        return f"on {self.rng.random()}", *rest

    async def snapshot(self) -> bytes:
        return pickle.dumps((self.left, self.rng.getstate()))

    async def restore(self, state: bytes) -> None:
        self.bad = self.trouble(-1, self.attempts)
        self.attempts[-1] += 1
        self.left, drawn = pickle.loads(state)
        self.rng = Random()
        self.rng.setstate(drawn)


class Stumbles(Lake):
    """Every third branch crashes."""

    trouble = staticmethod(
        lambda seed, attempts: "crash" if seed == -1 and attempts[-1] % 3 == 0 else ""
    )


class Falls(Lake):
    """Cannot be gone back to."""

    snapshot = None  # type: ignore[assignment]


def played(env: type = Lake, steps: int = 3, **settings) -> World:
    given = {"max_staleness": 1, "branches": BRANCHES, **settings}
    return World(config(**given), steps=steps, env=env, teaches=lambda group: True).run()


def groups(world: World) -> list[Group]:
    return [group for batch in world.batches for group in batch]


def families(group: Group) -> list[tuple[Trajectory, Trajectory, BranchPoint]]:
    """Each branch of a group, with the episode that it has left, and where."""
    by_id = {t.id: t for t in group.trajectories}
    left = [(t, t.branch) for t in group.trajectories if t.branch is not None]
    return [(by_id[place.parent], t, place) for t, place in left]


def test_a_branch_has_the_turns_of_the_other_episode_until_it_leaves_it():
    world = played()
    for group in groups(world):
        assert sum(t.branch is None for t in group.trajectories) == 3
        assert len(families(group)) == 3 * 4  # two turns of each member, and two branches at each
        for parent, branch, place in families(group):
            turn = place.turn
            assert branch.turns[:turn] == parent.turns[:turn]
            assert branch.trained_turns == turn
            # It answers the same prompt, and what it is shown there is not drawn again.
            assert branch.turns[turn].prompt_ids.tolist() == parent.turns[turn].prompt_ids.tolist()
            shown = [m.content for m in branch.messages[: 2 * turn + 1]]
            assert shown == [m.content for m in parent.messages[: 2 * turn + 1]]
            assert place.share == 1 / 5
            assert len(branch.turns) == len(parent.turns)  # as many as the lake's state says


def test_each_sampled_token_is_in_one_row_and_every_token_is_young_enough():
    world = played()
    algorithm = Grpo(Grpo.Config(advantage="branch"))
    trained = 0
    for step, batch in enumerate(world.batches):
        for group in batch:
            assert staleness(group, step) <= 1
        rows = list(samples_of(batch, algorithm))
        trained += sum(int(row.loss_mask.sum()) for row in rows)
    new = [turn for group in groups(world) for t in group.trajectories for turn in t.new_turns]
    assert trained == sum(len(turn.completion.token_ids) for turn in new)


def test_every_episode_has_one_fate_and_the_ledger_knows_whom_it_has_left():
    world = played()
    fates = world.ledger.episode_fates()
    assert fates.settled
    assert fates.trained == sum(len(group.trajectories) for group in groups(world))
    assert world.metrics["live_episodes"] == 0
    for number, group in enumerate(sorted(groups(world), key=lambda group: group.task.id)):
        left = {t.id: (place.parent, place.turn) for _, t, place in families(group)}
        recorded = world.ledger.branches(number)
        found = {f"{group.task.id}/{m}/{a}": told for (m, a, _), told in recorded.items()}
        assert found == left


def test_a_branch_that_fails_is_played_again_from_the_same_state():
    world = played(Stumbles, retries={"environment": 8})
    fates = world.ledger.episode_fates()
    assert fates.settled
    assert fates.failed > 0
    again = [t for group in groups(world) for _, t, _ in families(group) if t.id[-1] != "0"]
    assert again
    assert all(len(families(group)) == 12 for group in groups(world))


def test_a_run_that_ends_in_the_middle_of_a_tree_plays_the_task_again():
    """As a killed one does: what was in flight is cancelled, and whole trees are played."""
    for step in range(2):
        world = World(
            config(max_staleness=1, branches=BRANCHES),
            steps=4,
            env=Lake,
            fails_at=step,
            teaches=lambda group: True,
        )
        with pytest.raises(TrainingError):
            world.run()
        open_before = world.ledger.episode_fates().open
        assert open_before > 0
        pending = world.ledger.rewind(0)
        assert pending
        fates = world.ledger.episode_fates()
        assert fates.settled
        assert fates.cancelled == fates.total


def test_an_environment_that_cannot_go_back_is_refused_before_anything_is_sampled():
    engine = ScriptedEngine.replying(lambda request: b"go")
    world = World(config(branches=BRANCHES), steps=1, env=Falls, engine=engine)
    with pytest.raises(ConfigError, match="the environment cannot go back to a state"):
        world.run()
    assert engine.stats().generated_tokens == 0


@pytest.mark.parametrize(
    ("settings", "turns"),
    [
        ({"at": "every", "budget": 3}, [1, 2, 3]),
        ({"at": "level", "budget": 3}, [2, 4, 6]),
        ({"at": "level", "budget": 3, "before": 4}, [1, 2, 3]),
        ({"at": "every", "budget": 9, "before": 3}, [1, 2]),
        ({"at": "every", "width": 2, "budget": 5}, [1, 2]),
    ],
)
def test_where_a_member_branches_is_planned_before_it_is_played(settings, turns):
    plan = BranchesConfig(**settings).plan(8, Random(0))
    assert sorted(plan.turns) == turns
    assert [n for n in range(9) if plan.has([answered(0.0)] * n, 0)] == turns


def test_turns_are_drawn_equally_often():
    drawn: Counter[int] = Counter()
    for seed in range(700):
        drawn.update(BranchesConfig().plan(8, Random(seed)).turns)
    assert drawn.keys() == set(range(1, 8))
    assert max(drawn.values()) < 2 * min(drawn.values())


# By disagreement of values


def test_a_turn_decides_by_what_siblings_differ_less_after_it():
    # The first turn decides 0.1, the second 0.3, the third nothing, the fourth the rest.
    spreads = {1: 0.6, 2: 0.5, 3: 0.2, 4: 0.2}
    found = chances(spreads, range(1, 5), end=5)
    explored = EXPLORED / 4
    assert found == pytest.approx(
        [explored + (1 - EXPLORED) * decided / 0.6 for decided in (0.1, 0.3, 0.0, 0.2)]
    )


def test_what_is_left_at_the_last_known_turn_falls_evenly_to_the_limit():
    # Branches leave before turn 3, and episodes have eight: turn 2 decides a sixth of the rest.
    first, second = chances({1: 0.7, 2: 0.6}, [1, 2], end=8)
    assert first == pytest.approx(second)


@pytest.mark.parametrize("spreads", [{}, {1: 0.0, 2: 0.0}, {9: 1.0}])
def test_turns_of_which_nothing_is_known_are_equally_probable(spreads):
    assert chances(spreads, [1, 2, 3], end=4) == [1 / 3] * 3


@given(
    spreads=st.dictionaries(st.integers(1, 9), st.floats(0, 1e6)),
    turns=st.integers(2, 9),
    end=st.integers(1, 12),
)
@example(spreads={1: 5e-324}, turns=2, end=2)
def test_every_turn_can_be_chosen_whatever_earlier_trees_have_shown(spreads, turns, end):
    found = chances(spreads, range(1, turns), end)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= EXPLORED / len(found) - 1e-12


def test_branches_by_disagreement_leave_where_it_decides_and_never_twice():
    drawn: Counter[int] = Counter()
    settings = BranchesConfig(at="disagreement", budget=2)
    for seed in range(400):
        plan = settings.plan(6, Random(seed), {1: 0.9, 2: 0.9, 3: 0.9, 4: 0.0, 5: 0.0})
        assert len(plan.turns) == 2
        assert settings.plan(6, Random(seed), {1: 0.9, 2: 0.9, 3: 0.9, 4: 0.0, 5: 0.0}) == plan
        drawn.update(plan.turns)
    assert drawn[3] > 300
    assert min(drawn[turn] for turn in (1, 2, 4, 5)) > 30


class Door(Lake):
    """Six turns. What is answered in the fourth decides alone."""

    async def reset(self, *, seed, options):
        found = await super().reset(seed=seed, options=options)
        self.left, self.earned = 6, 0.0
        return found

    async def step(self, action):
        self.left -= 1
        if self.left == 2:
            self.earned = float("1" in action)
        return f"{self.left} left", self.earned * (self.left == 0), self.left == 0, False, {}

    async def snapshot(self) -> bytes:
        return pickle.dumps((self.left, self.earned))

    async def restore(self, state: bytes) -> None:
        self.left, self.earned = pickle.loads(state)


DISAGREEMENT = {"at": "disagreement", "budget": 1}


def at_the_door(
    steps: int, seed: int = 0, first: int = 0, known: Disagreement | None = None
) -> World:
    """Some steps of a policy that opens the door by chance."""
    return World(
        config(branches=DISAGREEMENT, budget={"turns": 6}, groups_per_step=8),
        steps=steps,
        env=Door,
        engine=ScriptedEngine.replying(lambda r: b"01"[r.seed % 2 :][:1], max_batch=64),
        seed=seed,
        teaches=lambda group: True,
        first=first,
        known=known,
    ).run()


def turns_left_at(batch: list[Group]) -> list[int]:
    return [place.turn for group in batch for _, _, place in families(group)]


def test_branches_come_to_leave_at_the_turn_that_decides():
    first, later = [], []
    for seed in range(4):  # of one run, a third to nine tenths leave there
        world = at_the_door(8, seed)
        first += turns_left_at(world.batches[0])
        later += [turn for batch in world.batches[4:] for turn in turns_left_at(batch)]
    assert set(first) == {1, 2, 3, 4, 5}  # drawn equally, as nothing is known
    assert later.count(3) > len(later) / 2


@given(seed=st.integers(0, 10**6))
@settings(max_examples=3, deadline=None)
def test_branches_at_turns_that_decide_keep_the_budget_the_rows_and_the_fates(seed):
    world = at_the_door(8, seed)
    for group in groups(world):
        assert len(families(group)) == 3
    rows = [
        row
        for batch in world.batches
        for row in samples_of(batch, Grpo(Grpo.Config(advantage="branch")))
    ]
    new = [turn for group in groups(world) for t in group.trajectories for turn in t.new_turns]
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(
        len(turn.completion.token_ids) for turn in new
    )
    assert world.ledger.episode_fates().settled


def test_where_it_branches_is_decided_by_the_seed():
    found = [[turns_left_at(batch) for batch in at_the_door(4, seed).batches] for seed in (7, 7, 8)]
    assert found[0] == found[1] != found[2]


def test_a_resumed_run_knows_what_earlier_trees_have_shown():
    """Its steps are those of a run that was never stopped."""
    whole = [turns_left_at(batch) for batch in at_the_door(6).batches]
    known, again = Disagreement(), Disagreement()
    first = [turns_left_at(batch) for batch in at_the_door(3, known=known).batches]
    again.restore(json.loads(json.dumps(known.state())))
    second = [turns_left_at(batch) for batch in at_the_door(3, first=24, known=again).batches]
    assert first + second == whole
    unknowing = at_the_door(3, first=24)
    assert [turns_left_at(batch) for batch in unknowing.batches] != second


def test_by_entropy_a_branch_leaves_after_an_unsure_answer_while_there_is_budget():
    plan = BranchesConfig(at="entropy", budget=2, nats=0.5).plan(8, Random(0))
    sure, unsure = answered(-0.1), answered(-2.0)
    assert not plan.has([], 0)
    assert not plan.has([unsure, sure], 0)
    assert plan.has([sure, unsure], 1)
    assert not plan.has([sure, unsure], 2)


def answered(logprob: float) -> Turn:
    said = Completion(ints([5]), floats([logprob]), ints([0]), "stop")
    return Turn(ints([1]), said, 0.0, {})


def test_the_place_of_a_branch_can_be_sent():
    branch = BranchPoint("train-000003/0/0", 2, 0.5)
    assert pickle.loads(pickle.dumps(branch)) == branch
