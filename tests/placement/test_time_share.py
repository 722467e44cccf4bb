"""Roles that share devices: never both awake, every switch ends in a state that has a name, and
sleep loses nothing.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.engines.local import LocalEngine
from agentrl.errors import DeadlineError, TimeShareError
from agentrl.flow import now, run_virtual
from agentrl.placement.time_share import (
    DeviceSharing,
    NoSharing,
    Sleeper,
    State,
    Tenant,
    TimeSharing,
    free_on_cpu,
)
from agentrl.protocols import Engine, GenerateRequest
from agentrl.rollout.config import RolloutConfig
from agentrl.settings.sampling import SamplingParams
from agentrl.simulate.config import SimulatedEngineConfig, SimulationConfig
from agentrl.simulate.engine import SimulatedEngine
from agentrl.simulate.latency import Constant
from agentrl.simulate.world import World
from agentrl.testing.trainers import LOSS
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trajectory import Completion

GIB = 2**30
DEADLINE = 10.0


@dataclass
class Device:
    """Memory that two roles share, and the most that was ever taken of it."""

    total: int
    taken: dict[str, int] = field(default_factory=dict)
    most: int = 0

    @property
    def of_roles(self) -> int:
        """What engine and trainer take of it."""
        return sum(size for name, size in self.taken.items() if name in ("engine", "trainer"))

    async def free(self) -> int:
        return self.total - sum(self.taken.values())


@dataclass
class Fake:
    """A side that takes memory of a device while it is awake, and keeps some asleep; `wrong` says
    what goes wrong at which call. It measures itself unless it is `silent`.

    Of an engine's `size`, `weights` can wake alone; of a trainer's, a step needs `step`.
    """

    name: str
    device: Device
    size: int
    wrong: dict[tuple[str, int], str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    seconds: float = 1
    kept: int = 0
    silent: bool = True
    weights: int = 0
    step: int = 0
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device.taken[f"{self.name} asleep"] = self.kept
        if self.name == "engine":
            self.device.taken[self.name] = self.size

    @property
    def sleeper(self) -> Sleeper:
        return Sleeper(self.sleep, self.wake, self.wake_weights, self.free_step_memory)

    @property
    def awake(self) -> bool:
        return self.name in self.device.taken and not self.weights_alone

    @property
    def weights_alone(self) -> bool:
        return 0 < self.device.taken.get(self.name, 0) == self.weights

    async def sleep(self) -> int | None:
        await self._called("sleep")
        freed = self.device.taken.pop(self.name, None)
        return None if self.silent else freed

    async def wake(self) -> None:
        await self._called("wake")
        if not self.awake:  # else it has the memory that it needs now
            self._take(self.size)

    async def wake_weights(self) -> int | None:
        await self._called("wake_weights")
        self._take(max(self.weights, self.device.taken.get(self.name, 0)))
        return None if self.silent else self.weights

    async def free_step_memory(self) -> int | None:
        await self._called("free_step_memory")
        freed = max(0, self.device.taken[self.name] - (self.size - self.step))
        self.device.taken[self.name] -= freed
        return None if self.silent else freed

    def _take(self, size: int) -> None:
        self.device.taken[self.name] = size
        self.device.most = max(self.device.most, self.device.of_roles)

    async def _called(self, method: str) -> None:
        number = self.calls[method] = self.calls.get(method, 0) + 1
        self.log.append(f"{self.name}.{method}")
        await asyncio.sleep(self.seconds)
        trouble = self.wrong.get((method, number))
        if trouble == "fails":
            raise RuntimeError(f"{self.name} cannot {method}")
        if trouble == "hangs":
            await asyncio.get_running_loop().create_future()


def shared(
    *,
    total: int = 10,
    engine: Mapping[tuple[str, int], str] | None = None,
    trainer: Any = None,
    needs: int = 8,
    weights_fit: bool = True,
    silent: bool = True,
) -> tuple[TimeSharing, Fake, Fake]:
    """An engine of 8 GiB, of which 4 are weights, and a trainer of 8, of which a step takes 3."""
    device = Device(total * GIB)
    log: list[str] = []
    parts: Any = {"weights": 4 * GIB, "step": 3 * GIB, "silent": silent, "log": log}
    one, other = (
        Fake("engine", device, 8 * GIB, dict(engine or {}), **parts),
        Fake("trainer", device, 8 * GIB, trainer or {}, **parts),
    )
    share = TimeSharing(
        Tenant("engine", [one.sleeper], 8 * GIB, 4 * GIB),
        Tenant("trainer", [other.sleeper], needs * GIB),
        device.free,
        DEADLINE,
        weights_fit=weights_fit,
    )
    return share, one, other


def test_the_trainer_is_awake_inside_and_the_engine_outside() -> None:
    share, engine, trainer = shared()

    async def main() -> None:
        for _ in range(3):
            assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")
            async with share.training():
                assert (engine.awake, trainer.awake, share.state) == (False, True, "training")
        with pytest.raises(ZeroDivisionError):  # what goes wrong inside leaves the engine awake too
            async with share.training():
                raise ZeroDivisionError
        assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")

    run_virtual(main)
    assert engine.device.most == 8 * GIB


def test_a_switch_whose_memory_is_taken_by_another_is_refused_and_undone() -> None:
    share, engine, trainer = shared(needs=8)
    engine.device.taken["somebody else"] = 3 * GIB  # 7 of 10 are free when the engine sleeps

    async def main() -> None:
        with pytest.raises(
            TimeShareError,
            match=r"trainer needs 8.00 GiB to wake, and 7.00 are free.*generating now",
        ):
            async with share.training():
                pytest.fail("it began")
        assert (engine.awake, trainer.awake) == (True, False)

    run_virtual(main)


DRIVER, TRAINER_ASLEEP = 0.5, 2.0
"""GiB that an idle GPU's driver takes, and a sleeping trainer."""


def on_an_h100(engine_keeps: float, trainer_asleep: float) -> tuple[TimeSharing, Fake, Fake]:
    """An engine with 0.9 of 79.1 GiB, of which it keeps some while it sleeps, and a trainer of
    Qwen3-8B; both measure what their sleep frees. The plan knows of no such figure.
    """
    device = Device(round(79.1 * GIB), {"driver": round(DRIVER * GIB)})
    kept = round(engine_keeps * GIB)
    weights_and_kv = round(0.9 * 79.1 * GIB) - kept
    engine = Fake("engine", device, weights_and_kv, kept=kept, silent=False)
    trainer = Fake("trainer", device, 32 * GIB, kept=round(trainer_asleep * GIB), silent=False)
    nothing_planned = 100 * GIB
    share = TimeSharing(
        Tenant("engine", [engine.sleeper], nothing_planned),
        Tenant("trainer", [trainer.sleeper], 32 * GIB),
        device.free,
        DEADLINE,
    )
    return share, engine, trainer


@pytest.mark.parametrize("engine_keeps", [2.0, 3.5, 5.0, 7.0])
def test_an_engine_wakes_if_what_its_sleep_freed_is_free(engine_keeps: float) -> None:
    share, engine, trainer = on_an_h100(engine_keeps, TRAINER_ASLEEP)

    async def main() -> None:
        async with share.starting():
            assert not engine.awake
            await trainer.wake()  # as it starts
            await trainer.sleep()
        for _ in range(2):
            async with share.training():
                assert (engine.awake, trainer.awake) == (False, True)
            assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")

    run_virtual(main)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("at_start", [True, False])
def test_an_engine_stays_asleep_if_a_byte_of_its_weights_or_kv_is_taken(
    missing: int, at_start: bool
) -> None:
    share, engine, trainer = on_an_h100(3.5, TRAINER_ASLEEP)
    device = engine.device

    def take_the_rest() -> None:
        left = device.total - sum(device.taken.values()) - engine.size
        device.taken["somebody else"] = left + missing

    async def main() -> None:
        async with share.starting():
            await trainer.sleep()
            if at_start:
                take_the_rest()
        async with share.training():
            if not at_start:
                device.taken.pop("trainer")
                take_the_rest()
        assert engine.awake

    if missing:
        with pytest.raises(
            TimeShareError, match=r"engine needs 67.69 GiB to wake, and .* \(its need was measured"
        ):
            run_virtual(main)
        assert not engine.awake or not at_start
    else:
        run_virtual(main)


def test_the_parts_of_a_side_that_share_devices_need_the_sum_of_what_they_freed() -> None:
    device = Device(20 * GIB)
    policy = Fake("engine", device, 6 * GIB, silent=False)
    teacher = Fake("engine of the teacher", device, 5 * GIB, silent=False)
    trainer = Fake("trainer", device, 8 * GIB)
    device.taken[teacher.name] = teacher.size
    share = TimeSharing(
        Tenant("engine", [policy.sleeper, teacher.sleeper], 0),
        Tenant("trainer", [trainer.sleeper], 0),
        device.free,
        60,
    )

    async def main() -> None:
        async with share.training():
            device.taken["somebody else"] = 10 * GIB

    with pytest.raises(TimeShareError, match=r"engine needs 11.00 GiB to wake, and 10.00 are free"):
        run_virtual(main)


ORDER = [
    *("engine.sleep", "trainer.wake", "trains"),
    *("trainer.free_step_memory", "engine.wake_weights", "new weights"),
    *("trainer.sleep", "engine.wake"),
]
ORDER_WITHOUT_ROOM = [
    *("engine.sleep", "trainer.wake", "trains"),
    *("trainer.sleep", "engine.wake", "new weights"),
]
"""Where the weights of both sides do not fit beside each other."""


async def take_a_step(share: TimeSharing, log: list[str]) -> None:
    """As a recipe does it."""
    async with share.training():
        log.append("trains")
        async with share.updating():
            log.append("new weights")


@pytest.mark.parametrize("silent", [True, False])
def test_new_weights_go_from_an_awake_trainer_to_the_weights_of_an_engine(silent: bool) -> None:
    share, engine, trainer = shared(silent=silent)

    async def main() -> None:
        for _ in range(3):
            engine.log.clear()
            async with share.training():
                engine.log.append("trains")
                async with share.updating():
                    engine.log.append("new weights")
                    assert share.state == "updating"
                    assert (engine.weights_alone, trainer.awake) == (True, True)
                    assert engine.device.of_roles == (4 + 5) * GIB
                # The end of the update ends the turn.
                assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")
            assert engine.log == ORDER
            assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")

    run_virtual(main)
    assert engine.device.most == 9 * GIB


def test_an_update_without_a_turn_takes_one_of_its_own() -> None:
    share, engine, trainer = shared()

    async def main() -> None:
        async with share.updating():
            engine.log.append("new weights")
            assert (engine.weights_alone, trainer.awake) == (True, True)
        assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")

    run_virtual(main)
    assert engine.log == [step for step in ORDER if step != "trains"]


def test_an_update_that_fails_leaves_the_engine_awake() -> None:
    share, engine, trainer = shared()

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with share.training(), share.updating():
                raise ZeroDivisionError
        assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")
        await take_a_step(share, engine.log)

    run_virtual(main)


def test_weights_that_the_plan_has_no_room_for_wait_until_the_trainer_sleeps() -> None:
    share, engine, trainer = shared(total=8, weights_fit=False)

    async def main() -> None:
        await take_a_step(share, engine.log)
        assert engine.log == ORDER_WITHOUT_ROOM
        engine.log.clear()
        async with share.updating():  # as when a run is resumed
            assert (engine.awake, trainer.awake) == (True, False)
        assert engine.log == []

    run_virtual(main)
    assert engine.device.most == 8 * GIB


def test_weights_that_find_no_room_wait_from_then_on_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    share, engine, _ = shared(total=8)

    async def main() -> None:
        for _ in range(2):
            await take_a_step(share, engine.log)

    run_virtual(main)
    tried = [*ORDER_WITHOUT_ROOM[:3], "trainer.free_step_memory", *ORDER_WITHOUT_ROOM[3:]]
    assert engine.log == tried + ORDER_WITHOUT_ROOM
    assert [record.message for record in caplog.records] == [
        "from now on, the trainer sleeps and the engine wakes before new weights are sent: the"
        " engine's weights have no room beside the trainer: the engine needs 4.00 GiB to wake, and"
        " 3.00 are free on a device that it shares"
    ]


@pytest.mark.parametrize("missing", [0, 1])
def test_an_engine_whose_weights_are_awake_needs_room_for_the_rest(missing: int) -> None:
    share, engine, _ = shared(total=12, silent=False)

    async def main() -> None:
        async with share.updating():
            # Of 12, its weights have 4, and the trainer will have none: the rest of it needs 4.
            engine.device.taken["somebody else"] = 4 * GIB + missing
        assert engine.awake

    if missing:
        with pytest.raises(TimeShareError, match=r"engine needs 4.00 GiB to wake, and 4.00 are"):
            run_virtual(main)
    else:
        run_virtual(main)


def test_a_trainer_needs_what_a_step_has_freed_before_the_update_too() -> None:
    share, engine, _ = shared(needs=0, silent=False)

    async def main() -> None:
        await take_a_step(share, engine.log)
        engine.device.taken["somebody else"] = 3 * GIB
        async with share.training():
            pytest.fail("it began")

    with pytest.raises(TimeShareError, match=r"trainer needs 8.00 GiB to wake, and 7.00 are free"):
        run_virtual(main)


@pytest.mark.parametrize("inside", ["training", "updating"])
def test_a_trainer_that_needs_a_turn_during_an_update_has_the_devices_alone(inside: str) -> None:
    """As ranks do that are started again."""
    share, engine, trainer = shared()

    async def another_turn() -> None:
        async with share.training():
            assert (engine.awake, engine.weights_alone, trainer.awake) == (False, False, True)
            assert share.state == "training"

    async def main() -> None:
        async with share.training():
            if inside == "training":
                await another_turn()
            async with share.updating():
                engine.log.clear()
                if inside == "updating":
                    await another_turn()
                    assert engine.log == [
                        *("engine.sleep", "trainer.wake"),
                        *("trainer.free_step_memory", "engine.wake_weights"),
                    ]
                assert (engine.weights_alone, trainer.awake) == (True, True)
        assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")

    run_virtual(main)


FAILING = [call.split(".") for call in ORDER if "." in call]


@pytest.mark.parametrize(("side", "method"), FAILING)
@pytest.mark.parametrize("trouble", ["fails", "hangs", "has no memory"])
def test_each_step_that_fails_is_undone_and_one_that_hangs_is_lost(
    side: str, method: str, trouble: str
) -> None:
    wrong = {} if trouble == "has no memory" else {(method, 1): trouble}
    share, engine, trainer = shared(**{side: wrong})  # type: ignore[arg-type]
    device = engine.device

    async def take_memory() -> None:
        """Another process takes all, right before the step."""
        before = ORDER[ORDER.index(f"{side}.{method}") - 1]
        while before not in engine.log:  # noqa: ASYNC110  it says so to nobody
            await asyncio.sleep(0.1)
        device.taken["somebody else"] = device.total

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            if trouble == "has no memory":
                taking = tasks.create_task(take_memory())
            with (
                suppress(TimeShareError)
                if trouble == "has no memory"
                else pytest.raises(
                    TimeShareError, match=rf"the {side} (could|did) not {method.replace('_', ' ')}"
                )
            ):
                await take_a_step(share, engine.log)
            if trouble == "has no memory":
                taking.cancel()
        device.taken.pop("somebody else", None)
        if trouble == "hangs":
            assert share.state == "lost"
            return
        truth = {
            "generating": (True, False, False),
            "training": (False, False, True),
            "updating": (False, True, True),
        }
        assert truth[share.state] == (engine.awake, engine.weights_alone, trainer.awake)
        # What has failed once works at the next attempt.
        engine.log.clear()
        await take_a_step(share, engine.log)
        assert (engine.awake, trainer.awake, share.state) == (True, False, "generating")

    run_virtual(main)


METHODS = ["sleep", "wake", "wake_weights", "free_step_memory"]
WRONG = st.dictionaries(
    st.tuples(st.sampled_from(METHODS), st.integers(1, 3)),
    st.sampled_from(["fails", "hangs"]),
    max_size=3,
)


@given(WRONG, WRONG, st.booleans(), st.booleans(), st.booleans())
def test_whatever_goes_wrong_both_are_never_awake_and_the_state_is_what_is_so(
    engine_wrong: dict[tuple[str, int], str],
    trainer_wrong: dict[tuple[str, int], str],
    tight: bool,
    updates: bool,
    weights_fit: bool,
) -> None:
    share, engine, trainer = shared(
        engine=engine_wrong, trainer=trainer_wrong, weights_fit=weights_fit
    )
    if tight:
        engine.device.taken["somebody else"] = 3 * GIB
    seen: list[State] = []
    updated: list[State] = []

    async def main() -> None:
        for _ in range(3):
            started = now()
            with suppress(TimeShareError):
                async with share.training():
                    seen.append(share.state)
                    if updates:
                        async with share.updating():
                            updated.append(share.state)
            assert now() - started <= 16 * DEADLINE
            truth = {
                "generating": (True, False, False),
                "training": (False, False, True),
                "updating": (False, True, True),
                "lost": (engine.awake, engine.weights_alone, trainer.awake),
            }
            assert truth[share.state] == (engine.awake, engine.weights_alone, trainer.awake)

    run_virtual(main)
    assert engine.device.most <= (9 if updates and weights_fit else 8) * GIB
    assert set(seen) <= {"training"}
    assert set(updated) <= {"updating" if weights_fit else "generating", "generating"}
    troubles = [*engine_wrong.values(), *trainer_wrong.values()]
    # One failure alone is undone.
    assert share.state != "lost" or tight or troubles not in ([], ["fails"])


def test_what_misses_its_deadline_is_lost_and_nothing_is_switched_after_it() -> None:
    share, _, trainer = shared(trainer={("wake", 1): "hangs"})

    async def main() -> None:
        with pytest.raises(TimeShareError, match="trainer did not wake within 10 s") as caught:
            async with share.training():
                pytest.fail("it began")
        assert isinstance(
            caught.value.__cause__.__cause__ if caught.value.__cause__ else None, DeadlineError
        )
        assert now() <= DEADLINE + 2
        with pytest.raises(TimeShareError, match="the state is lost"):
            async with share.training():
                pytest.fail("it began")
        assert trainer.calls == {"wake": 1}

    run_virtual(main)


def test_roles_with_devices_of_their_own_change_nothing() -> None:
    async def main() -> None:
        async with NoSharing().training():
            assert now() == 0

    run_virtual(main)


# Engines


def request(number: int, tokens: int = 24) -> GenerateRequest:
    prompt = tuple(10 + number + i for i in range(6))
    return GenerateRequest(
        f"r{number}", prompt, SamplingParams(max_tokens=tokens, temperature=1.0), seed=number
    )


async def answers(engine: Engine, numbers: Sequence[int]) -> list[Completion]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(engine.generate(request(number))) for number in numbers]
    return [task.result() for task in asked]


async def napping(engine: Any, work: Callable[[], Awaitable[None]] | None = None) -> None:
    """Put it to sleep in the middle of what it does, twice; nobody is answered meanwhile."""
    while engine.stats().generated_tokens < 8:  # noqa: ASYNC110  it says so to nobody
        await asyncio.sleep(0)
    await engine.sleep()
    await engine.sleep()
    before = engine.stats().generated_tokens
    for _ in range(200):
        await asyncio.sleep(0)
    assert engine.stats().generated_tokens == before
    if work is not None:
        await work()
    await engine.wake()


Made = Callable[[], AbstractAsyncContextManager[Any]]


@pytest.mark.slow
def test_an_engine_that_slept_goes_on_with_the_same_tokens_and_logprobs(
    shallow_model_dir: Path,
) -> None:
    async def main() -> None:
        make: Made = partial(
            LocalEngine, LocalEngine.Config(device="cpu", max_batch=4), shallow_model_dir
        )
        async with make() as engine:
            undisturbed = await answers(engine, range(6))
        async with make() as engine, asyncio.TaskGroup() as tasks:
            # Four at once: two still wait when it sleeps.
            asked = tasks.create_task(answers(engine, range(6)))
            await napping(engine)
            slept = await asked
            again = await answers(engine, range(6))
        for one, other in zip(undisturbed + undisturbed, slept + again, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)

    asyncio.run(main())


def test_new_weights_that_come_while_an_engine_sleeps_take_effect(shallow_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shallow_model_dir, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: p.detach() + 0.3 * p.std(correction=0) * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }

    async def main() -> None:
        config = LocalEngine.Config(device="cpu", max_batch=4)
        async with LocalEngine(config, shallow_model_dir) as engine:
            await engine.update_weights(weights, 1)
            expected = await answers(engine, range(3))
        async with LocalEngine(config, shallow_model_dir) as engine:
            await engine.sleep()
            await engine.update_weights(weights, 1)
            await engine.wake()
            assert [c.token_ids.tolist() for c in await answers(engine, range(3))] == [
                c.token_ids.tolist() for c in expected
            ]
        async with LocalEngine(config, shallow_model_dir) as engine, asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(answers(engine, range(3)))
            await napping(engine, lambda: engine.update_weights(weights, 1))
            assert all({0, 1} == set(completion.policy_versions) for completion in await asked)

    asyncio.run(main())


def test_a_local_engine_that_sleeps_has_given_its_cache_back(shallow_model_dir: Path) -> None:
    async def main() -> None:
        async with LocalEngine(
            LocalEngine.Config(device="cpu", max_batch=8), shallow_model_dir
        ) as engine:
            await answers(engine, range(8))
            model: Any = engine._model
            assert model.kv_bytes > 0
            caches = [layer.keys_SKLD.untyped_storage()._weak_ref() for layer in model._layers]
            await engine.sleep()
            gc.collect()
            assert model.kv_bytes == 0
            assert all(torch.UntypedStorage._expired(cache) for cache in caches)
            await engine.wake()
            assert len(await answers(engine, [1])) == 1

    asyncio.run(main())


def test_a_simulated_engine_that_sleeps_makes_no_token_and_loses_none() -> None:
    config = SimulatedEngineConfig(seconds_per_token=1.0, prefill_seconds_per_token=0.0)

    async def main() -> None:
        async with (
            SimulatedEngine(config, length_of=lambda request: 10) as engine,
            asyncio.TaskGroup() as tasks,
        ):
            asked = tasks.create_task(engine.generate(request(1)))
            await asyncio.sleep(4)
            await engine.sleep()
            late = tasks.create_task(engine.generate(request(2)))
            await asyncio.sleep(100)
            assert engine.stats().generated_tokens == 4
            await engine.wake()
            assert (len((await asked).token_ids), now()) == (10, pytest.approx(110))
            await late
            assert now() == pytest.approx(114)

    run_virtual(main)


def test_in_the_simulator_an_engine_in_turns_computes_a_context_once_an_update() -> None:
    config = SimulatedEngineConfig(seconds_per_token=1.0, prefill_seconds_per_token=0.0)

    async def main() -> None:
        async with (
            SimulatedEngine(config, length_of=lambda request: 10) as engine,
            asyncio.TaskGroup() as tasks,
        ):
            asked = tasks.create_task(engine.generate(request(1)))
            await asyncio.sleep(4)
            prompt = engine.stats().prefilled_tokens
            await engine.sleep()
            await engine.wake_weights()
            await engine.update_weights({}, 1)
            assert engine.stats().prefilled_tokens == prompt
            await engine.wake()
            assert engine.stats().prefilled_tokens == prompt + prompt + 4
            assert (await asked).policy_versions.tolist() == [0] * 4 + [1] * 6

    run_virtual(main)


def test_in_the_simulator_turns_cost_the_overlap_that_own_devices_have() -> None:
    rollout = RolloutConfig.model_validate(
        {"groups_per_step": 4, "group_size": 4, "max_staleness": 1}
    )

    def seconds(time_shared: bool) -> float:
        simulation = SimulationConfig(
            engine=SimulatedEngineConfig(
                slots=64, seconds_per_token=0.05, answer_tokens=Constant(value=50)
            ),
            train_seconds=Constant(value=20.0),
            time_shared=time_shared,
            switch_seconds=2.0 if time_shared else 0.0,
        )
        report = World(rollout, simulation, steps=6).run()
        assert report.task_fates.trained == report.task_fates.total
        return report.seconds

    generating = 8 * 50 * 0.05  # of an episode: eight turns
    # Generated beside training, but for the first batch.
    assert seconds(False) == pytest.approx(7 * 20, rel=0.05)
    # In turns, two batches are generated side by side, as a staleness of one allows, and then
    # trained on.
    assert seconds(True) == pytest.approx(3 * generating + 6 * (20 + 2), rel=0.05)


# Trainers


def batch() -> TrainBatch:
    size = 16
    sample = TrainingSample(
        tuple(range(size)),
        (0,) + (1,) * (size - 1),
        (0.0,) * size,
        (1.0,) * size,
        (0,) * size,
        (0,) * size,
    )
    return collate([sample, sample])


async def trained(
    trainer: GroupTrainer,
    share: Callable[[GroupTrainer], DeviceSharing] | None = None,
    *,
    updates: bool = True,
) -> dict[str, Tensor]:
    """The weights after three steps, asked for after each: as a driver does, which `updates` an
    engine, or of a trainer that sleeps.
    """
    turns = share(trainer) if share else NoSharing()
    async with trainer:
        if share:
            await trainer.sleep()
        for _ in range(3):
            async with turns.training():
                await trainer.step(batch(), LOSS, 1.0)
                if updates:
                    async with turns.updating():
                        weights = await trainer.weights()
            if not updates:
                weights = await trainer.weights()
        return {name: weight.detach().clone() for name, weight in weights.items()}


def taking_turns(trainer: GroupTrainer) -> DeviceSharing:
    device = Device(8 * GIB)
    return TimeSharing(
        Tenant("engine", [Fake("engine", device, GIB, seconds=0).sleeper], GIB),
        Tenant("trainer", [Sleeper.of_trainer(trainer)], 0),
        device.free,
        60,
    )


@pytest.mark.parametrize(
    "make",
    [
        partial(LocalTrainer, LocalTrainer.Config(device="cpu")),
        pytest.param(
            partial(FsdpTrainer, FsdpTrainer.Config(world_size=2)), marks=pytest.mark.long
        ),
    ],
    ids=["local", "fsdp"],
)
def test_a_trainer_that_takes_turns_ends_with_the_same_weights(
    make: Any, shallow_model_dir: Path
) -> None:
    async def main() -> None:
        alone = await trained(make(shallow_model_dir, total_steps=3))
        for updates in (True, False):
            made = make(shallow_model_dir, total_steps=3)
            shared = await trained(made, taking_turns, updates=updates)
            assert alone.keys() == shared.keys()
            assert all(torch.equal(alone[name], shared[name]) for name in alone)

    asyncio.run(main())


def test_a_trainer_that_sleeps_holds_no_gradients(shallow_model_dir: Path) -> None:
    async def main() -> None:
        async with LocalTrainer(
            LocalTrainer.Config(device="cpu"), shallow_model_dir, total_steps=1
        ) as trainer:
            await trainer.step(batch(), LOSS, 1.0)
            assert trainer._ranks is not None
            worker: Any = trainer._ranks.workers[0]
            weights = list(worker.made.sharding.model.parameters())
            assert any(weight.grad is not None for weight in weights)
            await trainer.sleep()
            assert all(weight.grad is None for weight in weights)

    asyncio.run(main())


def test_a_trainer_that_frees_a_step_s_memory_holds_no_gradients_and_goes_on(
    shallow_model_dir: Path,
) -> None:
    async def main() -> None:
        async with LocalTrainer(
            LocalTrainer.Config(device="cpu"), shallow_model_dir, total_steps=2
        ) as trainer:
            await trainer.step(batch(), LOSS, 1.0)
            assert trainer._ranks is not None
            worker: Any = trainer._ranks.workers[0]
            weights = list(worker.made.sharding.model.parameters())
            assert await trainer.free_step_memory() is None  # a CPU's cannot be told apart
            assert all(weight.grad is None for weight in weights)
            await trainer.wake()
            assert (await trainer.step(batch(), LOSS, 1.0))["grad_norm"] > 0

    asyncio.run(main())


@pytest.mark.slow
def test_an_engine_and_a_trainer_take_turns_through_whole_steps(shallow_model_dir: Path) -> None:
    """Generate, train, publish, thrice: the same tokens at every version as where nobody sleeps."""

    async def steps(time_shared: bool) -> list[tuple[int, ...]]:
        engine = LocalEngine(LocalEngine.Config(device="cpu", max_batch=4), shallow_model_dir)
        trainer = LocalTrainer(
            LocalTrainer.Config(device="cpu", lr=1e-2), shallow_model_dir, total_steps=3
        )
        seen = []
        async with engine, trainer:
            share: DeviceSharing = NoSharing()
            if time_shared:
                await trainer.sleep()
                free = free_on_cpu
                share = TimeSharing(
                    Tenant("engine", [Sleeper.of_engine(engine)], 1),
                    Tenant("trainer", [Sleeper.of_trainer(trainer)], 1),
                    free,
                    60,
                )
            for version in (1, 2, 3):
                seen += [
                    tuple(completion.token_ids.tolist())
                    for completion in await answers(engine, range(2))
                ]
                async with share.training():
                    await trainer.step(batch(), LOSS, 1.0)
                    async with share.updating():
                        await engine.update_weights(await trainer.weights(), version)
        return seen

    async def main() -> None:
        apart, shared = await steps(False), await steps(True)
        assert apart == shared
        assert len(set(apart)) > 2  # the weights did change what is said

    asyncio.run(main())


@pytest.mark.parametrize("weights_fit", [True, False])
def test_requests_that_wait_over_an_update_are_computed_once_and_under_the_new_weights(
    weights_fit: bool, shallow_model_dir: Path
) -> None:
    """Unless there is no room for the weights: then the engine works before the update."""
    before, prompts = [0], [len(request(number).prompt_ids) for number in range(3)]

    async def main() -> None:
        engine = LocalEngine(LocalEngine.Config(device="cpu", max_batch=4), shallow_model_dir)
        trainer = LocalTrainer(
            LocalTrainer.Config(device="cpu", lr=1e-2), shallow_model_dir, total_steps=1
        )
        async with engine, trainer:
            await trainer.sleep()
            share = TimeSharing(
                Tenant("engine", [Sleeper.of_engine(engine)], 1),
                Tenant("trainer", [Sleeper.of_trainer(trainer)], 1),
                free_on_cpu,
                60,
                weights_fit=weights_fit,
            )
            async with asyncio.TaskGroup() as tasks:
                live = tasks.create_task(answers(engine, range(2)))
                while engine.stats().generated_tokens < 8:  # noqa: ASYNC110  it says so to nobody
                    await asyncio.sleep(0)
                async with share.training():
                    sampled = engine.stats().generated_tokens
                    before[0] = engine.stats().prefilled_tokens
                    late = tasks.create_task(engine.generate(request(2)))
                    await trainer.step(batch(), LOSS, 1.0)
                    async with share.updating():
                        weights = await trainer.weights()
                        # Whatever it would do before the update, it has time for it.
                        begun = engine.stats().generated_tokens
                        while not weights_fit and engine.stats().generated_tokens < begun + 3:  # noqa: ASYNC110
                            await asyncio.sleep(0)
                        await asyncio.sleep(0.05)
                        await engine.update_weights(weights, 1)
            whole = [*await live, await late]
            prefilled = engine.stats().prefilled_tokens - before[0]
            old = [(completion.policy_versions == 0).sum() for completion in whole]
            if weights_fit:
                # A frozen request computes its prompt and what it had sampled.
                assert prefilled == sum(prompts) + sampled
                assert (sum(old), old[2]) == (sampled, 0)
                assert {version for c in whole for version in c.policy_versions} == {0, 1}
            else:
                assert sum(old) > sampled

    asyncio.run(main())
