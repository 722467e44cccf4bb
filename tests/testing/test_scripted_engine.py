"""The scripted engine fails, hangs and dawdles as told, by the loop's clock."""

import asyncio

import pytest

from agentrl.errors import EngineError
from agentrl.flow.clock import run_virtual
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine

END = 0


def request(name: str, *, priority: int = 0, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        name,
        (5, 6),
        SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(END,)),
        priority=priority,
    )


def test_a_reply_is_given_token_by_token_and_ends_with_the_stop_token() -> None:
    async def main() -> None:
        async with ScriptedEngine.replying(lambda request: [7, 8, 9]) as engine:
            completion = await engine.generate(request("a"))
            assert completion.token_ids.tolist() == [7, 8, 9, END]
            assert completion.logprobs.tolist() == [0.0] * 4
            assert completion.finish_reason == "stop"
            assert (await engine.generate(request("b", max_tokens=2))).finish_reason == "length"
            assert [each.id for each in engine.requests] == ["a", "b"]

    asyncio.run(main())


def test_latencies_are_of_the_loop_s_clock() -> None:
    async def main() -> float:
        engine = ScriptedEngine.replying(
            lambda request: [7] * 99,
            prefill_seconds=lambda request: 20.0,
            seconds_per_token=lambda request: 4.0,
        )
        async with engine:
            await engine.generate(request("a", max_tokens=10))
            return asyncio.get_running_loop().time()

    assert run_virtual(main) == 60.0


def test_failures_are_raised_and_hangs_hang_until_cancelled() -> None:
    async def main() -> None:
        engine = ScriptedEngine.replying(
            lambda request: [7],
            max_batch=1,
            fail=lambda request: EngineError("broken on purpose") if request.id == "bad" else None,
            hang=lambda request: request.id == "hung",
        )
        async with engine:
            with pytest.raises(EngineError, match="on purpose"):
                await engine.generate(request("bad"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await engine.generate(request("hung"))
            assert (await engine.generate(request("good"))).token_ids.tolist() == [7, END]
            assert engine.stats().running == 0

    asyncio.run(main())


def test_a_cancelled_waiter_never_takes_a_place_with_it() -> None:
    async def main() -> None:
        engine = ScriptedEngine.replying(
            lambda request: [7], max_batch=1, hang=lambda request: request.id == "hung"
        )
        async with engine, asyncio.TaskGroup() as tasks:
            hung = tasks.create_task(engine.generate(request("hung")))
            await asyncio.sleep(0)
            waiters = [tasks.create_task(engine.generate(request(f"w{i}"))) for i in range(4)]
            await asyncio.sleep(0)
            assert engine.stats().waiting == 4
            waiters[1].cancel()
            hung.cancel()  # its place goes to the first waiter, who is cancelled in the same moment
            await asyncio.sleep(0)
            waiters[0].cancel()
            assert [(await waiter).token_ids.tolist() for waiter in waiters[2:4]] == [[7, END]] * 2
            assert (engine.stats().running, engine.stats().waiting) == (0, 0)

    asyncio.run(main())


def test_a_closed_engine_ends_who_still_waits() -> None:
    async def told(engine: ScriptedEngine, name: str) -> None:
        with pytest.raises(EngineError, match=r"closed|not running"):
            await engine.generate(request(name, max_tokens=10_000))

    async def main() -> None:
        engine = ScriptedEngine(lambda tokens: [-1e9, 0.0, 0.0], max_batch=1, max_context=20_000)
        async with asyncio.TaskGroup() as tasks, engine:
            for name in ("running", "waiting"):
                tasks.create_task(told(engine, name))
            await asyncio.sleep(0.01)
        await told(engine, "later")

    asyncio.run(main())
