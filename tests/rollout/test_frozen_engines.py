"""Deadlines stand still while an engine can answer nothing: while it sleeps, takes new weights, or
is restarted. Those of environments do not.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from torch import Tensor

from agentrl.batch import TrainingSample, collate
from agentrl.engines.router import Router
from agentrl.errors import DeadlineError, EngineDeadError
from agentrl.estimation.teacher import Teacher
from agentrl.flow import Flow, now, run_virtual
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.session import AgentSession
from agentrl.hosting.pool import EnvPool
from agentrl.protocols import Prompt, ScoreRequest, Scores
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import CONTEXT_STEP, Deadlines, RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.runner import Episode
from agentrl.settings.sampling import SamplingParams
from agentrl.simulate.config import SimulatedEngineConfig, SimulationConfig
from agentrl.simulate.engine import SimulatedEngine
from agentrl.simulate.latency import Constant
from agentrl.simulate.renderer import SimulatedRenderer
from agentrl.simulate.world import World
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion, Failed, Status, Task, Terminated, Trajectory, Truncated
from agentrl.weights.config import WeightUpdate
from tests.gateway.scripted import runner_of, said, user

ANSWER_SECONDS = 20.0
DEADLINE = 30.0
FREEZE_SECONDS = 100.0
ENGINE = SimulatedEngineConfig(
    seconds_per_token=1.0, prefill_seconds_per_token=0.0, kv_on_update="keep"
)


class Core(SimulatedEngine):
    """An engine like vLLM's: while it stages or commits weights, it samples nothing. Answers are of
    twenty tokens, one a second.
    """

    def __init__(self, tokens: int = int(ANSWER_SECONDS)) -> None:
        super().__init__(ENGINE, length_of=lambda request: tokens - request.resumed)

    async def stage_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._freeze()

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._freeze()
        await super().update_weights(weights, version)

    async def _freeze(self) -> None:
        if self._state == "asleep":
            return
        await super().sleep()
        await asyncio.sleep(FREEZE_SECONDS)
        await super().wake()


async def nap(router: Router) -> None:
    await router.sleep()
    await router.sleep()  # repeating it changes nothing
    await asyncio.sleep(FREEZE_SECONDS)
    await router.wake()
    await router.wake()


async def stage(router: Router) -> None:
    await router.stage_weights({}, 1)


async def commit(router: Router) -> None:
    await router.update_weights({}, 1)


async def die(router: Router) -> None:
    """All replicas die, and their replacements take long to start."""
    for replica in router._replicas:
        router._evict(replica, EngineDeadError("killed"))


class LateCore(Core):
    async def __aenter__(self) -> Any:
        await asyncio.sleep(FREEZE_SECONDS)
        return await super().__aenter__()


Freeze = Callable[[Router], Coroutine[Any, Any, None]]
FREEZES: list[Any] = [
    pytest.param(nap, "keep", id="sleep"),
    pytest.param(stage, "keep", id="stage"),
    pytest.param(commit, "keep", id="commit"),
    pytest.param(commit, "abort_resume", id="abort_resume"),
]


def policy_of(router: Router, seconds: float = DEADLINE, **more: Any) -> EnginePolicy:
    sampling = SamplingParams(max_tokens=10_000, stop_token_ids=RENDERER.stop_token_ids)
    return EnginePolicy(router, sampling, seconds, **more)


RENDERER = SimulatedRenderer(8, 8)


async def sample(policy: EnginePolicy, name: str = "e", tokens: int = 8) -> Completion:
    ids = ints(np.zeros(tokens, np.int32))
    return await policy.sample(
        Episode(name, Task("t", 0, {}), 0), 0, Prompt(ids, ids, forked=False)
    )


@pytest.mark.parametrize(("freeze", "update"), FREEZES)
def test_an_answer_that_a_freeze_holds_up_is_not_late(freeze: Freeze, update: WeightUpdate) -> None:
    async def main() -> None:
        async with Router([Core()], update=update) as router, Flow("asked") as flow:
            before = flow.start(sample(policy_of(router), "before"), name="before")
            await asyncio.sleep(5)
            frozen = flow.start(freeze(router), name="freeze")
            await asyncio.sleep(5)
            # It comes while nobody can answer.
            inside = flow.start(sample(policy_of(router), "inside"), name="inside")
            await frozen
            assert now() == 5 + FREEZE_SECONDS
            assert len((await before).token_ids) == ANSWER_SECONDS
            await inside

    run_virtual(main)


@pytest.mark.parametrize(("freeze", "update"), FREEZES)
def test_an_answer_that_does_not_come_after_a_freeze_has_the_time_that_was_left(
    freeze: Freeze, update: WeightUpdate
) -> None:
    async def main() -> None:
        async with Router([Core(tokens=9_999)], update=update) as router, Flow("asked") as flow:
            asked = flow.start(limited(sample(policy_of(router))), name="asked")
            await asyncio.sleep(5)
            await freeze(router)
            await asked
            assert now() == pytest.approx(DEADLINE + FREEZE_SECONDS)

    run_virtual(main)


async def limited(answer: Coroutine[Any, Any, Completion]) -> None:
    with pytest.raises(DeadlineError):
        await answer


def test_with_drain_only_those_that_wait_for_the_others_stand_still() -> None:
    async def main() -> None:
        async with Router([Core(tokens=9_999)], update="drain") as router, Flow("asked") as flow:
            hangs = flow.start(limited(sample(policy_of(router), "hangs")), name="hangs")
            await asyncio.sleep(5)
            update = flow.start(commit(router), name="commit")
            await asyncio.sleep(5)
            waits = flow.start(limited(sample(policy_of(router), "waits")), name="waits")
            await hangs
            assert now() == pytest.approx(DEADLINE)
            await update
            assert now() == pytest.approx(DEADLINE + FREEZE_SECONDS)
            await waits
            assert now() == pytest.approx(2 * DEADLINE + FREEZE_SECONDS)

    run_virtual(main)


def test_the_restart_of_all_engines_costs_no_answer_its_time() -> None:
    async def main() -> None:
        router = Router([Core(), Core()], factory=lambda number: LateCore())
        async with router, Flow("asked") as flow:
            asked = flow.start(sample(policy_of(router)), name="asked")
            await asyncio.sleep(15)
            await die(router)
            assert len((await asked).token_ids) == ANSWER_SECONDS
            assert not router.clock.is_held

    run_virtual(main)


# Episodes


class Walk:
    """Two turns; each step takes as long as `step_seconds`."""

    isolation = "inline"
    step_seconds = 0.0

    async def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        self.steps = 0
        return "begin", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(self.step_seconds)
        self.steps += 1
        return "go on", 0.0, self.steps == 2, False, {}

    async def close(self) -> None: ...


class SlowWalk(Walk):
    step_seconds = 60.0


Kind = Literal["environment", "program"]


@dataclass
class Played:
    """An episode of two turns of twenty seconds each, frozen at some second."""

    freeze_at: float
    budget: Budget = field(default_factory=Budget)
    deadline: float = 50.0
    env: type[Walk] = Walk
    deadlines: Deadlines = field(default_factory=lambda: Deadlines(step=70))
    kind: Kind = "environment"

    def status(self) -> Status:
        return run_virtual(self._main).status

    async def _main(self) -> Trajectory:
        async with Router([Core()]) as router, Flow("freeze") as flow:
            flow.start(self._freeze(router), name="freeze")
            host = EnvPool({"walk": self.env}, self.deadlines)
            runner: Any = EnvEpisodeRunner(
                policy_of(router), RENDERER, host, self.budget, self.deadline
            )
            if self.kind == "program":
                engine: Any = router
                runner = runner_of(
                    self._ask_twice, engine, budget=self.budget, seconds=self.deadline
                )
            (trajectory,) = await runner.play(Assignment("e", Task("walk", 0, {}), 0))
            await host.close()
        played: Trajectory = trajectory
        return played

    async def _freeze(self, router: Router) -> None:
        await asyncio.sleep(self.freeze_at)
        await nap(router)

    async def _ask_twice(self, session: AgentSession) -> AgentOutcome:
        for number in range(2):
            await said(session, [user(f"question {number}")])
            await asyncio.sleep(self.env.step_seconds)
        return AgentOutcome(reward=1.0)


KINDS: list[Kind] = ["environment", "program"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_deadline_of_an_episode_stands_still_while_it_waits_for_a_frozen_engine(
    kind: Kind,
) -> None:
    assert Played(freeze_at=10, kind=kind).status() == Terminated()
    late = Played(freeze_at=10, kind=kind, deadline=35).status()
    assert isinstance(late, Failed)
    assert "rollout.deadlines.episode" in late.error


@pytest.mark.parametrize("kind", KINDS)
def test_the_seconds_of_a_budget_stand_still_too(kind: Kind) -> None:
    assert Played(10, Budget(seconds=30), kind=kind).status() == Terminated()
    spent = Played(10, Budget(seconds=15), kind=kind).status()
    assert spent == Truncated("seconds")


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_episode_does_beside_a_frozen_engine_costs_it_time(kind: Kind) -> None:
    """Its environment works from the 20th to the 80th second, and the engine sleeps from the 30th
    to the 130th.
    """
    slow: Any = {"freeze_at": 30, "env": SlowWalk, "kind": kind}
    # 20 of the answer, 60 of the step, none of the rest of the sleep, 20 and 60 again
    assert Played(deadline=161, **slow).status() == Terminated()
    assert isinstance(Played(deadline=159, **slow).status(), Failed)


def test_an_environment_that_hangs_beside_a_frozen_engine_is_found_in_its_own_time() -> None:
    hung = Played(10, env=SlowWalk, deadlines=Deadlines(step=59), deadline=1e6)

    async def main() -> None:
        trajectory = await hung._main()
        assert isinstance(trajectory.status, Failed)
        assert "rollout.deadlines.step" in trajectory.status.error
        assert now() == pytest.approx(ANSWER_SECONDS + FREEZE_SECONDS + 59)

    run_virtual(main)


# Whole runs


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_in_turns_loses_no_turn_to_training_that_takes_longer_than_its_deadlines(
    max_staleness: int,
) -> None:
    deadlines = Deadlines(
        generate=150, episode=400, group=1600, stall=300, reset=10, step=10, reward=10
    )
    rollout = RolloutConfig(
        groups_per_step=2, group_size=2, max_staleness=max_staleness, deadlines=deadlines
    )
    simulation = SimulationConfig(
        engine=SimulatedEngineConfig(
            slots=64, seconds_per_token=0.5, answer_tokens=Constant(value=50)
        ),
        train_seconds=Constant(value=2000.0),
        time_shared=True,
        switch_seconds=20.0,
    )
    report = World(rollout, simulation, steps=4).run()
    assert report.episode_fates.failed == report.task_fates.failed == 0
    assert report.task_fates.trained == 8


# Teachers


def test_a_sample_that_a_frozen_teacher_has_is_not_late() -> None:
    class Scoring(Core):
        async def score(self, request: ScoreRequest) -> Scores:
            await asyncio.sleep(FREEZE_SECONDS)
            return Scores(np.zeros(1, np.float32), 0)

    sample = TrainingSample(
        ints((0, 1)),
        np.array([False, True]),
        np.zeros(2, np.float32),
        np.zeros(2, np.float32),
        np.zeros(2, np.int32),
        np.zeros(2, np.int32),
    )

    async def main() -> None:
        async with Router([Scoring()]) as router, Flow("teacher") as flow:
            teacher = Teacher(router, temperature=1.0, seconds=DEADLINE, concurrency=1)
            asked = flow.start(teacher.logprobs(collate([sample])), name="logprobs")
            await asyncio.sleep(5)
            await nap(router)
            assert (await asked).tolist() == [0.0]

    run_virtual(main)


# Long contexts


@pytest.mark.parametrize(
    ("tokens", "more"), [(CONTEXT_STEP - 1, 0.0), (CONTEXT_STEP, 81.92), (20_000, 163.84)]
)
def test_an_answer_to_a_long_prompt_has_more_time(tokens: int, more: float) -> None:
    async def main() -> None:
        async with Router([Core(tokens=9_999)]) as router:
            policy = policy_of(router, seconds_per_context_token=0.01)
            await limited(sample(policy, tokens=tokens))
            assert now() == pytest.approx(DEADLINE + more)

    run_virtual(main)


def test_the_time_for_a_context_goes_with_the_default_and_with_the_stall() -> None:
    by_default = RolloutConfig().deadlines
    assert (by_default.generate, by_default.seconds_per_context_token) == (132.8, 0.005)
    assert by_default.stall_at(8191) == by_default.stall == 1200
    assert by_default.stall_at(1 << 18) == 2 * (132.8 + 0.005 * (1 << 18))
    given = RolloutConfig(deadlines=Deadlines(generate=300)).deadlines
    assert (given.generate, given.seconds_per_context_token) == (300, 0)
    both = Deadlines(generate=300, seconds_per_context_token=0.01)
    assert RolloutConfig(deadlines=both).deadlines.seconds_per_context_token == 0.01
