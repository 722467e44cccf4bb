"""Episodes of programs: how they end, what they earn, what is asked twice. Without HTTP, under the
virtual clock.
"""

import asyncio

import numpy as np
import pytest

from agentrl.errors import EngineError, EnvError, LethalRequestError
from agentrl.flow import Flow, run_virtual
from agentrl.gateway.call import ChatRequest, RequestOptions
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.outcome import AgentOutcome, outcome_of
from agentrl.gateway.refusal import CallRefusedError
from agentrl.rollout.assignment import Assignment
from agentrl.rollout.budget import Budget
from agentrl.testing import ScriptedEngine
from agentrl.trajectory import Failed, Message, Score, Task, Terminated, Truncated
from tests.gateway.scripted import abandoned, runner_of, said, user

EPISODE = Assignment("e", Task("agent", 0), 0)


def saying(text: str = "left", **fields) -> ScriptedEngine:
    return ScriptedEngine.replying(lambda request: list(text.encode()), **fields)


def played(play, engine=None, **fields):
    engine = engine or saying()
    runner = runner_of(play, engine, **fields)

    async def main():
        async with engine:
            return await runner.play(EPISODE)

    (trajectory,) = run_virtual(main)
    return trajectory, runner.program.sessions[0] if runner.program.sessions else None


async def two_calls(session) -> AgentOutcome:
    (first,) = await said(session, [user("begin")])
    await said(session, [user("begin"), Message("assistant", first.message.content), user("on")])
    return AgentOutcome(2.0, success=True)


def test_the_reward_is_that_of_the_last_turn():
    trajectory, _ = played(two_calls)
    assert trajectory.status == Terminated()
    assert [turn.reward for turn in trajectory.turns] == [0.0, 2.0]
    assert trajectory.success
    assert [message.role for message in trajectory.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_a_trajectory_says_when_its_episode_and_each_call_began():
    async def play(session):
        await asyncio.sleep(5)
        return await two_calls(session)

    engine = saying()
    runner = runner_of(play, engine)

    async def main():
        await asyncio.sleep(3)
        async with engine:
            return await runner.play(EPISODE)

    (trajectory,) = run_virtual(main)
    assert trajectory.started == 3.0
    first, second = trajectory.turns
    assert first.asked == 8.0
    assert second.asked == first.asked + first.generate_seconds


def test_rewards_of_calls_are_those_of_their_turns():
    async def play(session):
        (first,) = await said(session, [user("begin")])
        (second,) = await said(session, [user("begin"), Message("assistant", "left"), user("on")])
        session.call_earned(first.id, 0.25)
        with pytest.raises(CallRefusedError, match="no answer '7'"):
            session.call_earned("7", 1.0)
        with pytest.raises(CallRefusedError, match="no finite number"):
            session.call_earned(second.id, 1e308) or session.call_earned(second.id, 1e308)
        session.call_earned(second.id, -1e308)
        return AgentOutcome()

    trajectory, _ = played(play)
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0]


def test_a_crash_is_a_failure_of_the_environment():
    async def play(session):
        await said(session, [user("begin")])
        raise KeyError("lost")

    trajectory, _ = played(play)
    assert isinstance(trajectory.status, Failed)
    assert trajectory.status.layer == "environment"
    assert "lost" in trajectory.status.error


def test_a_program_that_hangs_fails_at_the_deadline_of_the_episode():
    async def play(session):
        await said(session, [user("begin")])
        await asyncio.Event().wait()

    trajectory, _ = played(play, seconds=100.0)
    assert trajectory.status == Failed(
        "environment",
        "episode did not answer within its deadline of 100 s (rollout.deadlines.episode)",
    )


def test_an_idle_program_fails():
    async def play(session):
        await said(session, [user("begin")])
        await asyncio.sleep(1000)

    trajectory, _ = played(play, config=GatewayConfig(idle_seconds=50))
    assert isinstance(trajectory.status, Failed)
    assert trajectory.seconds == pytest.approx(50)


def test_a_slow_engine_does_not_make_a_program_idle():
    async def play(session):
        await said(session, [user("begin")])
        return AgentOutcome(1.0)

    trajectory, _ = played(
        play, saying(prefill_seconds=lambda request: 500), config=GatewayConfig(idle_seconds=50)
    )
    assert trajectory.status == Terminated()


def test_a_program_that_fails_because_the_engine_did_is_a_failure_of_the_engine():
    async def play(session):
        await said(session, [user("begin")])

    trajectory, _ = played(play, saying(fail=lambda request: EngineError("no memory")))
    assert trajectory.status == Failed("engine", "no memory")


def test_a_program_may_survive_a_failure_of_the_engine():
    failures = [EngineError("no memory")]

    async def play(session):
        with pytest.raises(CallRefusedError) as refused:
            await said(session, [user("begin")])
        assert refused.value.status == 503
        await said(session, [user("begin")])
        return AgentOutcome(1.0)

    trajectory, session = played(
        play, saying(fail=lambda request: failures.pop() if failures else None)
    )
    assert trajectory.status == Terminated()
    assert len(trajectory.turns) == 1
    assert [call.kind for call in session.tree.calls] == ["start", "retry"]


def test_a_request_that_engines_die_of_is_refused_for_good_and_its_episode_is_not_played_again():
    async def play(session):
        with pytest.raises(CallRefusedError) as refused:
            await said(session, [user("begin")])
        assert refused.value.status == 400  # which clients do not send again
        raise EnvError("it got no answer")

    trajectory, _ = played(
        play, saying(fail=lambda request: LethalRequestError("engines died 2 times"))
    )
    assert trajectory.status == Failed("engine", "engines died 2 times", final=True)


def test_a_prompt_beyond_the_context_truncates_the_episode():
    async def play(session):
        (first,) = await said(session, [user("begin")])
        await said(
            session, [user("begin"), Message("assistant", first.message.content), user("x" * 200)]
        )

    trajectory, _ = played(play, saying(max_context=100))
    assert trajectory.status == Truncated("context")
    assert len(trajectory.turns) == 1


def test_a_program_that_goes_on_with_a_shorter_prompt_is_not_truncated():
    async def play(session):
        await said(session, [user("begin")])
        with pytest.raises(CallRefusedError, match="the context holds 100") as refused:
            await said(session, [user("x" * 200)])
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        await said(session, [user("shorter")])
        return AgentOutcome(1.0)

    trajectory, _ = played(play, saying(max_context=100))
    assert trajectory.status == Terminated()


def test_a_first_prompt_beyond_the_context_is_a_failure_of_the_data():
    async def play(session):
        await said(session, [user("x" * 200)])

    trajectory, _ = played(play, saying(max_context=100))
    assert isinstance(trajectory.status, Failed)
    assert trajectory.status.layer == "data"


def test_a_call_after_the_last_turn_truncates_the_episode():
    async def play(session):
        for number in range(4):
            await said(session, [user(f"{number}")])

    trajectory, _ = played(play, budget=Budget(turns=3))
    assert trajectory.status == Truncated("turns")
    assert len(trajectory.turns) == 3


def test_a_program_without_a_reward_failed_unless_the_run_has_its_own():
    async def play(session):
        await said(session, [user("begin")])
        return AgentOutcome()

    trajectory, _ = played(play)
    assert isinstance(trajectory.status, Failed)
    assert "earned no reward" in trajectory.status.error
    trajectory, _ = played(play, needs_reward=False)
    assert trajectory.status == Terminated()


def test_a_reward_may_come_after_the_program_has_ended_but_not_too_late():
    async def play(session):
        await said(session, [user("begin")])
        asyncio.get_running_loop().call_later(20, session.earned, AgentOutcome(3.0))
        return AgentOutcome()

    trajectory, _ = played(play, config=GatewayConfig(reward_seconds=30))
    assert trajectory.env_return == 3.0
    trajectory, _ = played(play, config=GatewayConfig(reward_seconds=10))
    assert isinstance(trajectory.status, Failed)
    assert trajectory.status.layer == "reward"


@pytest.mark.parametrize("survives", [True, False])
def test_a_reward_by_request_counts_in_an_episode_that_a_limit_has_cut(survives):
    async def play(session):
        await said(session, [user("begin")])
        session.earned(AgentOutcome(3.0, success=True))
        if not survives:
            await said(session, [user("more")])
        with pytest.raises(CallRefusedError):
            await said(session, [user("more")])
        return AgentOutcome()

    trajectory, _ = played(play, budget=Budget(turns=1))
    assert trajectory.status == Truncated("turns")
    assert (trajectory.env_return, trajectory.success) == (3.0, True)


def test_the_reward_of_an_episode_that_a_limit_has_cut_may_come_after_its_program_has_ended():
    async def play(session):
        await said(session, [user("begin")])
        with pytest.raises(CallRefusedError):
            await said(session, [user("more")])
        asyncio.get_running_loop().call_later(20, session.earned, AgentOutcome(3.0))
        return AgentOutcome()

    for seconds, earned in ((30, 3.0), (10, 0.0)):
        config = GatewayConfig(reward_seconds=seconds)
        trajectory, _ = played(play, budget=Budget(turns=1), config=config)
        assert (trajectory.status, trajectory.env_return) == (Truncated("turns"), earned)


def test_what_a_program_returns_without_a_reward_is_beside_the_reward_by_request():
    async def play(session):
        await said(session, [user("begin")])
        session.earned(AgentOutcome(0.5))
        return AgentOutcome(success=True, parts={"style": 0.25})

    trajectory, _ = played(play)
    assert (trajectory.env_return, trajectory.success) == (0.5, True)
    assert trajectory.turns[-1].info["reward/style"] == 0.25


def test_a_program_that_asks_nothing_has_failed():
    async def play(session):
        return AgentOutcome(1.0)

    trajectory, _ = played(play)
    assert isinstance(trajectory.status, Failed)
    assert "without an answer" in trajectory.status.error


def test_a_call_that_is_asked_again_after_its_connection_broke_is_sampled_once():
    engine = saying(prefill_seconds=lambda request: 10)

    async def play(session):
        assert not await abandoned(session, [user("begin")], 5)
        await said(session, [user("begin")])
        return AgentOutcome(1.0)

    trajectory, _ = played(play, engine)
    assert len(engine.requests) == len(trajectory.turns) == 1
    assert not trajectory.dropped


def test_an_answer_that_no_program_got_is_dropped_with_a_reason():
    async def play(session):
        assert await abandoned(session, [user("begin")], 5)
        await said(session, [user("other")])
        return AgentOutcome(1.0)

    trajectory, _ = played(play)
    assert len(trajectory.turns) == 1
    assert trajectory.dropped == {"unseen": (1, 5)}


def test_a_call_that_is_under_way_at_the_end_is_dropped_with_a_reason():
    async def play(session):
        await said(session, [user("begin")])
        await abandoned(session, [user("slow")], 5)
        return AgentOutcome(1.0)

    slow = saying(prefill_seconds=lambda request: 1000 if len(request.prompt_ids) < 21 else 0)
    trajectory, _ = played(play, slow)
    assert trajectory.status == Terminated()
    assert trajectory.dropped == {"unfinished": (1, 0)}


def test_a_call_whose_episode_ends_before_it_begins_is_refused():
    refused = []

    async def ask(session):
        with pytest.raises(CallRefusedError) as error:
            await said(session, [user("too late")])
        refused.append(error.value.code)

    async def main():
        async with saying() as engine, Flow("programs") as programs:

            async def play(session):
                await said(session, [user("begin")])
                programs.start(ask(session), name="too late")
                await asyncio.sleep(0)  # it has asked, and the episode ends in this very moment
                return AgentOutcome(1.0)

            return await runner_of(play, engine).play(EPISODE)

    (trajectory,) = run_virtual(main)
    assert trajectory.dropped == {"unfinished": (1, 0)}
    assert refused == ["episode_over"]


def test_parallel_calls_with_the_same_content_get_answers_of_their_own():
    engine = saying(prefill_seconds=lambda request: 10)

    async def play(session):
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(said(session, [user("begin")]))
        return AgentOutcome(1.0)

    trajectory, _ = played(play, engine)
    assert len(engine.requests) == len(trajectory.turns) == 3


def test_a_request_id_names_one_call_with_one_content():
    engine = saying()

    async def play(session):
        (first,) = await said(session, [user("begin")], request_id="a")
        (again,) = await said(session, [user("begin")], request_id="a")
        assert first is again
        with pytest.raises(CallRefusedError, match="came with other content") as refused:
            await said(session, [user("other")], request_id="a")
        assert refused.value.status == 409
        return AgentOutcome(1.0)

    trajectory, _ = played(play, engine)
    assert len(engine.requests) == len(trajectory.turns) == 1


def test_a_request_that_says_it_is_a_retry_gets_the_first_answer():
    engine = saying()

    async def play(session):
        (first,) = await said(session, [user("begin")])
        (again,) = await said(session, [user("begin")], repeated=True)
        assert first is again
        return AgentOutcome(1.0)

    played(play, engine)
    assert len(engine.requests) == 1


def test_other_models_cost_no_turn_and_cut_no_episode():
    async def play(session):
        await said(session, [user("title?")], model="small")
        await said(session, [user("begin")], model="mine")
        for number in range(5):
            await said(session, [user(f"{number}")], model="small")
        await said(session, [user("go on")], model="mine")
        with pytest.raises(CallRefusedError, match="the context holds"):
            await said(session, [user("x" * 5000)], model="small")
        return AgentOutcome(1.0)

    fields = {"config": GatewayConfig(model="mine"), "budget": Budget(turns=2)}
    trajectory, _ = played(play, saying(max_context=4000), **fields)
    assert trajectory.status == Terminated()
    assert len(trajectory.turns) == 2
    assert trajectory.dropped["other_model"][0] == 6


def test_a_program_that_never_says_the_policys_name_is_trained_by_any():
    async def play(session):
        for name in ("large", "small"):
            await said(session, [user(name)], model=name)
        return AgentOutcome(1.0)

    trajectory, _ = played(play)
    assert (len(trajectory.turns), trajectory.dropped) == (2, {})


def test_a_retry_gets_the_answer_of_the_newest_call_with_its_content():
    engine = saying()

    async def play(session):
        (first,) = await said(session, [user("begin")])
        (second,) = await said(session, [user("begin")])
        (again,) = await said(session, [user("begin")], repeated=True)
        assert first is not second
        assert again is second
        return AgentOutcome(1.0)

    played(play, engine)
    assert len(engine.requests) == 2


def test_a_refused_call_that_is_asked_again_gets_an_answer_of_its_own():
    engine, statuses = saying(prefill_seconds=lambda request: 10), []

    async def play(session):
        async def asked() -> object:
            try:
                (answer,) = await said(session, [user("begin")])
            except CallRefusedError as refused:
                statuses.append(refused.status)
                await asyncio.sleep(15)  # the first two have their answers by then
                (answer,) = await said(session, [user("begin")], repeated=True)
            return answer

        async with Flow("calls at once") as flow:
            tasks = [flow.start(asked(), name=str(number)) for number in range(4)]
        assert len({task.result() for task in tasks}) == 4
        (again,) = await said(session, [user("begin")], repeated=True)
        assert again in [task.result() for task in tasks]
        return AgentOutcome(1.0)

    trajectory, _ = played(play, engine, config=GatewayConfig(calls_at_once=2))
    assert statuses == [429, 429]
    assert len(engine.requests) == len(trajectory.turns) == 4


def test_a_call_that_the_engine_has_failed_is_not_answered_as_another_with_its_content():
    class FailsFirst(ScriptedEngine):
        async def generate(self, request):
            if not self.requests:
                self.requests.append(request)
                await asyncio.sleep(1)
                raise EngineError("it has no memory")
            return await super().generate(request)

    engine, statuses = FailsFirst.replying(lambda request: list(b"left")), []

    async def play(session):
        async def asked() -> object:
            try:
                (answer,) = await said(session, [user("begin")])
            except CallRefusedError as refused:
                statuses.append(refused.status)
                (answer,) = await said(session, [user("begin")], repeated=True)
            return answer

        async with Flow("calls at once") as flow:
            tasks = [flow.start(asked(), name=str(number)) for number in range(2)]
        first, second = (task.result() for task in tasks)
        assert first is not second
        return AgentOutcome(1.0)

    trajectory, _ = played(play, engine)
    assert statuses == [503]
    assert len(trajectory.turns) == 2


def test_a_marked_retry_prefers_the_call_whose_answer_was_lost():
    engine = saying(prefill_seconds=lambda request: 10)

    async def play(session):
        async with Flow("calls at once") as flow:
            flow.start(abandoned(session, [user("begin")], 2), name="lost")
            other = flow.start(said(session, [user("begin")]), name="other")
        (again,) = await said(session, [user("begin")], repeated=True)
        assert again is not other.result()[0]
        return AgentOutcome(1.0)

    played(play, engine)
    assert len(engine.requests) == 2


@pytest.mark.parametrize(("trained", "temperature"), [(True, 1.0), (False, 0.3)])
def test_in_training_the_runs_sampling_wins(trained, temperature):
    engine = ScriptedEngine.replying(lambda request: list(b"left"))

    async def play(session):
        await said(
            session, [user("begin")], options=RequestOptions(max_tokens=7, temperature=0.3, seed=5)
        )
        return AgentOutcome(1.0)

    played(play, engine, trained=trained)
    (request,) = engine.requests
    assert request.sampling.temperature == temperature
    assert request.sampling.max_tokens == 7


def test_a_key_is_of_no_use_after_its_episode():
    async def play(session):
        await said(session, [user("begin")])
        return AgentOutcome(1.0)

    engine = saying()
    runner = runner_of(play, engine)

    async def main():
        async with engine:
            await runner.play(EPISODE)
        assert len(runner.registry) == 0
        session = runner.program.sessions[0]
        with pytest.raises(CallRefusedError, match="is over"):
            async with session.asking(ChatRequest((user("late"),))):
                pass
        with pytest.raises(CallRefusedError, match="belongs to no open episode"):
            runner.registry.session("agentrl-guessed")

    run_virtual(main)


def test_what_a_program_returns_becomes_an_outcome():
    assert outcome_of(1, "run") == AgentOutcome(1.0)
    assert outcome_of(None, "run") == AgentOutcome()
    assert outcome_of({"reward": 0.5, "success": True}, "run") == AgentOutcome(0.5, True)
    assert outcome_of(Score(0.5, {"style": 0.1}), "run") == AgentOutcome(0.5, None, {"style": 0.1})
    assert (
        outcome_of(np.float32(0.5), "run") == outcome_of(np.array(0.5), "run") == AgentOutcome(0.5)
    )
    assert outcome_of({"reward": 1, "success": np.bool_(False)}, "run") == AgentOutcome(1.0, False)


class Unwilling:
    def __float__(self) -> float:
        raise RuntimeError("no")

    __repr__ = __float__


@pytest.mark.parametrize(
    "wrong",
    [
        "1",
        b"1",
        float("nan"),
        float("inf"),
        True,
        10**400,
        -(10**5000),
        [1.0],
        np.array([1.0, 0.0]),
        1j,
        Unwilling(),
        {"rewards": 1},
        {1: 1},
        {"reward": [1]},
        {"reward": 1, "parts": [1]},
        {"reward": 1, "parts": {"a": "b"}},
        {"reward": 1, "success": "false"},
        {"reward": 1, "success": 1},
        Score.failed("broken"),
        Score(float("nan")),
        Score(1.0, {"a": float("inf")}),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_is_no_reward_is_a_failure_of_the_program(wrong):
    with pytest.raises(EnvError, match="run returned"):
        outcome_of(wrong, "run")


@pytest.mark.parametrize(
    ("budget", "limit", "code"),
    [
        (Budget(tokens=7), "tokens", "token_limit_exceeded"),
        (Budget(seconds=25), "seconds", "time_limit_exceeded"),
        (Budget(turns=2), "turns", "turn_limit_exceeded"),
    ],
)
def test_a_call_beyond_the_budget_is_refused_by_its_name_and_truncates_the_episode(
    budget, limit, code
):
    refusals = []

    async def play(session):
        for number in range(9):
            try:
                await said(session, [user(f"{number}")])
            except CallRefusedError as refusal:
                refusals.append(refusal)
                break
            await asyncio.sleep(10)
        return AgentOutcome(1.0)

    trajectory, _ = played(play, saying("four"), budget=budget)
    assert trajectory.status == Truncated(limit)
    assert refusals[0].code == code
    assert f"rollout.budget.{limit}" in str(refusals[0])
    assert trajectory.num_tokens <= (budget.tokens or 99)
