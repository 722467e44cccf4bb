"""`check_env`: each check has an environment that is broken in that one way, and only that check
finds it.
"""

import asyncio
import os
import pickle
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from agentrl import plugins
from agentrl.envs.guess_number import GuessNumber
from agentrl.errors import ConfigError, ConformanceError, OutageError
from agentrl.protocols import ResetResult, StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.testing import check_env
from agentrl.testing import envs as testing_envs


class Sound:
    """Keeps the contract: five turns, a random number as observation. The broken ones below change
    one thing.
    """

    system_prompt = "Say yes."

    def __init__(self) -> None:
        self.turns = 0
        self.rng = random.Random(0)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        self.turns = 0
        self.rng = random.Random(seed)
        return f"start {self.draw()}", {}

    def step(self, action: str) -> StepResult:
        self.turns += 1
        return (
            f"turn {self.turns}: {self.draw()}",
            float(action == "yes"),
            self.turns >= 5,
            False,
            {"success": True},
        )

    def draw(self) -> int:
        return self.rng.randrange(100)

    def close(self) -> None:
        pass


class Changed(Sound):
    """A sound environment whose `step` returns something else in the third turn."""

    index = 0
    value: Any = None

    def step(self, action: str) -> Any:
        result: list[Any] = [*super().step(action)]
        if self.turns == 3:
            result[self.index] = self.value
        return tuple(result)


def changed(at: int, to: Any) -> type[Sound]:
    return type("Broken", (Changed,), {"index": at, "value": to})


def tool(**changes: Any) -> dict[str, Any]:
    function = {
        "name": "go",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
        **changes,
    }
    return {"type": "function", "function": function}


def with_attribute(name: str, value: Any) -> type[Sound]:
    return type("Broken", (Sound,), {name: value})


class NoClose:
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        return "", {}

    def step(self, action: str) -> StepResult:
        return "", 0.0, True, False, {}


class WrongReset(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Any:
        return "start"


class FourValues(Sound):
    def step(self, action: str) -> Any:
        return super().step(action)[:4]


class RaisesLate(Sound):
    def step(self, action: str) -> StepResult:
        if self.turns == 3:
            raise KeyError("the door")
        return super().step(action)


class NeedsArguments(Sound):
    def __init__(self, size: int) -> None:
        super().__init__()


class Exits(Sound):
    def step(self, action: str) -> StepResult:
        raise SystemExit(3)


class ExitsAsync(Sound):
    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        raise SystemExit(3)


class RaisesAtLength(Sound):
    def step(self, action: str) -> StepResult:
        raise KeyError("x" * 2000 + " at the end")


class LetsACancellationOut(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        raise asyncio.CancelledError


class ExitsWhenMade(Sound):
    def __init__(self) -> None:
        raise SystemExit("usage: game.py")


class RunsALoopInline(Sound):
    isolation = "inline"

    def step(self, action: str) -> StepResult:
        asyncio.run(asyncio.sleep(0))
        return super().step(action)


class HangsInStep(Sound):
    def step(self, action: str) -> StepResult:
        if self.turns == 2:
            threading.Event().wait(30)
        return super().step(action)


class HangsAsync(Sound):
    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        if self.turns == 2:
            await asyncio.sleep(30)
        return super().step(action)


class HangsInReset(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        threading.Event().wait(30)
        return super().reset(seed=seed, options=options)


class Unseeded(Sound):
    def draw(self) -> int:
        return int.from_bytes(os.urandom(4))


class UsesClock(Sound):
    def draw(self) -> int:
        return time.monotonic_ns()


class GlobalRandom(Sound):
    def draw(self) -> int:
        return random.randrange(100)


class GlobalNumpy(Sound):
    def draw(self) -> int:
        return int(np.random.randint(100))


class SeedsGlobal(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        random.seed(seed)
        return super().reset(seed=seed, options=options)


class PeeksAtGlobal(Sound):
    """Changes no global state, and yet depends on it."""

    def draw(self) -> int:
        return hash(random.getstate())


class KeepsTurns(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        self.rng = random.Random(seed)
        return "start", {}

    def step(self, action: str) -> StepResult:
        self.turns += 1
        return f"turn {self.turns}", 0.0, self.turns % 5 == 0, False, {}


class SharesTurns(Sound):
    turns_of_all: ClassVar[list[int]] = [0]

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        self.turns_of_all[0] = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> StepResult:
        self.turns_of_all[0] += 1
        return f"turn {self.turns_of_all[0]}", *super().step(action)[1:]


class ChangesOptions(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        options["list"].append(1)
        return super().reset(seed=seed, options=options)


class ClosesOnce(Sound):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


class ClosesOnlyAfterReset(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        self.file = seed
        return super().reset(seed=seed, options=options)

    def close(self) -> None:
        assert self.file is not None


class ChokesOnGarbage(Sound):
    def step(self, action: str) -> StepResult:
        if not re.fullmatch(r"\w{1,20}", action):
            raise ValueError("what?")
        return super().step(action)


class AnswersGarbageWithNone(Sound):
    def step(self, action: str) -> Any:
        return super().step(action) if action.strip() else None


class PaysGarbage(Sound):
    def step(self, action: str) -> StepResult:
        over = not action.strip()
        return f"turn {self.draw()}", float(over), over, False, {"success": over}


class PaysTooMuch(Sound):
    reward_range = (-1.0, 0.5)


class Moves(Sound):
    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:
        os.chdir("/")
        return super().reset(seed=seed, options=options)


class MovesApart(Moves):
    isolation = "process"


MOVING = """
import os

from agentrl.envs.guess_number import GuessNumber


class Moving(GuessNumber):
    def reset(self, *, seed, options):
        os.chdir("/")
        return super().reset(seed=seed, options=options)
"""


class Quiz(Sound):
    """One question, whose answer is told afterwards, as it is and then as it is believed to be."""

    answer, told = "7", "7"

    def step(self, action: str) -> StepResult:
        right = action == self.answer
        return f"{self.draw()}", float(right), True, False, {"success": right, "answer": self.told}


class WrongGold(Quiz):
    told = "8"


class BlocksInline(Sound):
    isolation = "inline"

    def step(self, action: str) -> StepResult:
        time.sleep(0.006)
        return super().step(action)


class GoesBack(Sound):
    """Can go back to its states."""

    def snapshot(self) -> bytes:
        return pickle.dumps((self.turns, self.rng))

    def restore(self, state: bytes) -> None:
        self.turns, self.rng = pickle.loads(state)


class ForgetsItsDraws(GoesBack):
    def restore(self, state: bytes) -> None:
        self.turns, _ = pickle.loads(state)


class DrawsForAState(GoesBack):
    def snapshot(self) -> bytes:
        self.draw()
        return super().snapshot()


class GivesNoBytes(GoesBack):
    def snapshot(self) -> Any:
        return self.turns, self.rng


BROKEN: list[tuple[str, Callable[[], Any], str]] = [
    ("shape", NoClose, "lacks one of the methods"),
    ("shape", WrongReset, "return (observation, info)"),
    ("shape", FourValues, "return (observation, reward, terminated, truncated, info)"),
    ("shape", changed(0, b"bytes"), "return text: a str"),
    ("shape", changed(1, "1"), "return a finite float"),
    ("shape", changed(1, float("nan")), "return a finite float"),
    ("shape", changed(1, True), "return a finite float"),
    ("shape", changed(1, np.float32(1)), "return a finite float"),
    ("shape", changed(2, np.bool_(False)), "`bool(...)`"),
    ("shape", changed(3, 0), "`bool(...)`"),
    ("shape", changed(4, None), "return a dict with text keys"),
    ("shape", changed(4, {1: 2}), "return a dict with text keys"),
    ("shape", changed(4, {"success": 1.0}), '"success"'),
    ("attributes", with_attribute("system_prompt", None), "system_prompt is None"),
    ("attributes", with_attribute("isolation", "fork"), 'write "thread"'),
    ("tools", with_attribute("tools", "go"), "sequence of JSON schemas"),
    ("tools", with_attribute("tools", ["go"]), "a tool is"),
    ("tools", with_attribute("tools", [tool(name="go there")]), "a name is"),
    ("tools", with_attribute("tools", [tool(), tool()]), "is used a second time"),
    ("tools", with_attribute("tools", [tool(parameters={"properties": {}})]), "a tool is"),
    (
        "tools",
        with_attribute(
            "tools", [tool(parameters={"type": "object", "properties": {}, "required": ["x"]})]
        ),
        '"required" names',
    ),
    ("tools", with_attribute("tools", [tool(default=object())]), "JSON cannot express"),
    ("raises", RaisesLate, "step (turn 4) raised KeyError: 'the door'"),
    ("raises", Exits, "step (turn 1) raised SystemExit: 3 ("),
    ("raises", ExitsAsync, "step (turn 1) raised SystemExit: 3 ("),
    ("raises", RaisesAtLength, "x at the end' ("),
    ("raises", LetsACancellationOut, "reset raised CancelledError ("),
    ("raises", ExitsWhenMade, "raised SystemExit: usage: game.py ("),
    (
        "isolation",
        RunsALoopInline,
        "on the event loop, where a run plays it, step (turn 1) raised RuntimeError",
    ),
    ("raises", NeedsArguments, "constructor, called with no arguments, raised TypeError"),
    ("deadline", HangsInStep, "step did not answer within 0.3 s"),
    ("deadline", HangsAsync, "step did not answer within 0.3 s"),
    ("deadline", HangsInReset, "reset did not answer within 0.3 s"),
    ("determinism", Unseeded, "Take all randomness from `random.Random(seed)`"),
    ("determinism", UsesClock, "reset gave observation"),
    ("global_rng", GlobalRandom, "step uses the global random"),
    ("global_rng", GlobalNumpy, "reset uses the global random or numpy.random"),
    ("global_rng", SeedsGlobal, "reset uses the global random"),
    ("global_rng", PeeksAtGlobal, "another global seed gives another episode"),
    ("state", KeepsTurns, "Set everything that an episode changes in reset"),
    ("interleaving", SharesTurns, "Keep state on the instance"),
    ("options", ChangesOptions, "{'list': [1]}"),
    ("close", ClosesOnce, "a second time"),
    ("close", ClosesOnlyAfterReset, "before the first reset"),
    ("garbage", ChokesOnGarbage, "the message '' is not answered"),
    ("garbage", AnswersGarbageWithNone, "step returned None"),
    ("garbage", PaysGarbage, "the message '' succeeds and earns 1"),
    ("gold", WrongGold, "seed 0 does not: reward 0, success False; its last message was '8'"),
    ("reward", PaysTooMuch, "the reward 1 outside of its reward_range, -1 to 0.5"),
    ("attributes", with_attribute("reward_range", 1), "write (lowest, highest)"),
    ("folder", Moves, "reset changes the current folder"),
    ("snapshot", ForgetsItsDraws, "a restored state went on differently"),
    ("snapshot", DrawsForAState, "went on differently once its state had been taken"),
    ("snapshot", GivesNoBytes, "snapshot returned tuple: return bytes"),
]


@pytest.mark.parametrize(
    ("check", "env", "said"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_environment_is_found_by_the_check_for_it_and_no_other(
    check: str, env: Callable[[], Any], said: str
) -> None:
    with pytest.raises(ConformanceError) as error:
        # Short only where something hangs: these cores are shared.
        check_env(env, options={"list": []}, deadline=0.3 if check == "deadline" else 10.0)
    text = str(error.value)
    assert set(re.findall(r"^  \d+\. \[(\w+)\]", text, re.MULTILINE)) == {check}, text
    assert said in text


def test_an_inline_environment_that_blocks_is_found_and_the_same_in_a_thread_is_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing_envs, "INLINE_STEP", 0.005)
    with pytest.raises(
        ConformanceError, match=r"1\. \[blocking\] .* the median step takes 0\."
    ) as error:
        check_env(BlocksInline, seeds=(0,), actions=["yes", "no"])
    assert "2. " not in str(error.value)

    class InThread(BlocksInline):
        isolation = "thread"

    check_env(InThread, seeds=(0,), actions=["yes"])


def test_an_inline_environment_that_awaits_something_slow_blocks_nothing() -> None:
    class Waits(Sound):
        isolation = "inline"

        async def step(self, action: str) -> StepResult:  # type: ignore[override]
            await asyncio.sleep(2 * testing_envs.INLINE_STEP)
            return super().step(action)

    check_env(Waits, seeds=(0,), actions=["yes"])


@pytest.mark.parametrize(
    "actions", [None, ["yes", "no", "yes"], lambda env, rng: rng.choice(["yes", "no"])]
)
def test_a_sound_environment_passes_with_any_kind_of_actions(actions: Any) -> None:
    check_env(Sound, actions=actions, options={"level": 1})


def test_an_async_environment_passes() -> None:
    class Async(Sound):
        async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult:  # type: ignore[override]
            self.lock = asyncio.Lock()
            return super().reset(seed=seed, options=options)

        async def step(self, action: str) -> StepResult:  # type: ignore[override]
            async with self.lock:
                await asyncio.sleep(0)
                return super().step(action)

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0)

    check_env(Async)
    asyncio.run(asyncio.to_thread(check_env, Async))


def test_everything_wrong_is_listed_at_once() -> None:
    class Many(ClosesOnce, ChokesOnGarbage, ChangesOptions):
        isolation = "fork"

    with pytest.raises(ConformanceError) as error:
        check_env(Many, options={"list": []})
    assert "Many breaks the contract" in str(error.value)
    assert set(re.findall(r"\[(\w+)\]", str(error.value))) >= {
        "attributes",
        "close",
        "garbage",
        "options",
    }


def test_a_hang_costs_its_deadline_and_no_more() -> None:
    started = time.monotonic()
    with pytest.raises(ConformanceError, match="The checks after this one were not run"):
        check_env(HangsInStep, deadline=0.2)
    assert time.monotonic() - started < 5


def test_the_global_generators_are_left_as_they_were() -> None:
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    check_env(Sound)
    with pytest.raises(ConformanceError):
        check_env(GlobalNumpy)
    with pytest.raises(ConformanceError):
        check_env(HangsInReset, deadline=0.05)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


@pytest.mark.parametrize("env", [Moves, MovesApart])
def test_the_current_folder_is_left_as_it_was_and_one_in_a_process_may_change_it(
    env: type[Sound],
) -> None:
    here = Path.cwd()
    with nullcontext() if env is MovesApart else pytest.raises(ConformanceError, match="folder"):
        check_env(env)
    assert Path.cwd() == here


def test_an_environment_that_moves_is_found_where_its_address_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("moving.py").write_text(MOVING)
    address = "file:moving.py:Moving"
    with pytest.raises(ConformanceError, match="reset changes the current folder"):
        check_env(plugins.load("envs", address), address=address, deadline=10.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seeds": ()}, "at least one seed"),
        ({"seeds": iter(())}, "at least one seed"),
        ({"seeds": 3}, "needs a list of seeds, got 3"),
        ({"max_turns": 0}, "at least one seed and one turn"),
        ({"actions": []}, "a list of messages or a player"),
        ({"actions": "yes"}, "got 'yes': a single message is a list too"),
    ],
)
def test_a_check_that_would_play_nothing_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConformanceError, match=said):
        check_env(Sound, **arguments)


def test_an_instance_instead_of_a_class_is_refused() -> None:
    with pytest.raises(ConformanceError, match="a class or a function that makes"):
        check_env(Sound())  # type: ignore[arg-type]


def test_the_deadline_of_an_environment_of_its_own_is_no_hang() -> None:
    class TimesOut(Sound):
        async def step(self, action: str) -> StepResult:  # type: ignore[override]
            raise TimeoutError("the service")

    with pytest.raises(
        ConformanceError, match=r"\[raises\] step \(turn 1\) raised TimeoutError: the service"
    ):
        check_env(TimesOut)


def test_an_answer_that_is_told_is_tried_and_one_that_nobody_knows_is_remarked_on() -> None:
    assert check_env(Quiz) == ()
    assert check_env(type("Unknown", (Quiz,), {"told": None}))[0].startswith(
        '[gold] info["answer"] of seed 0 is None'
    )


def test_a_player_that_should_succeed_has_to() -> None:
    class Door(Sound):
        def step(self, action: str) -> StepResult:
            opened = action == f"key {self.turns}"
            self.turns += opened
            return f"{self.draw()}", -1.0, self.turns == 3, False, {"success": self.turns == 3}

    def fits(env: Any, rng: random.Random) -> str:
        return f"key {env.turns}"

    assert check_env(Door, gold=fits) == ()
    for player, turns, said in (
        (lambda env, rng: "key 0", 32, "reward -32, success False; it was not over after 32 turns"),
        (fits, 2, "it was not over after 2 turns"),
    ):
        with pytest.raises(ConformanceError, match=said) as error:
            check_env(Door, gold=player, max_turns=turns)
        assert set(re.findall(r"\d+\. \[(\w+)\]", str(error.value))) == {"gold"}


def test_wrong_options_and_servers_that_cannot_be_used_are_no_fault_of_the_environment() -> None:
    with pytest.raises(ConfigError, match="did you mean 'high'"):
        check_env(GuessNumber, options={"hihg": 9})
    with pytest.raises(OutageError, match="cannot be used"):
        check_env(partial(RemoteEnv, ["http://127.0.0.1:9"]))


IN_A_FILE = '''
import asyncio, os
from pathlib import Path

class Free:
    """Its parameters have names of its own."""
    def reset(self, *, seed, options): return "say yes", {}
    def step(self, message):
        right = message == "yes"
        return "done", float(right), True, False, {"success": right}
    def close(self): pass

class Dies(Free):
    def step(self, message): os._exit(4)

class Reads(Free):
    def reset(self, *, seed, options): return Path("here.txt").read_text(), {}

class Hashes(Free):
    def reset(self, *, seed, options): return str(os.getpid()), {}

class Runs(Free):
    def step(self, message):
        asyncio.run(asyncio.sleep(0))
        return super().step(message)
'''


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Free", ""),
        (
            "Dies",
            (
                r"\[exit\] .*Dies\.step: the process of the environment ended with exit status 4\."
                r" It must not end"
            ),
        ),
        (
            "Reads",
            (
                r"1\. \[isolation\] in a process of its own \(env.isolation=process.*Reads\.reset"
                r" raised FileNotFound"
            ),
        ),
        (
            "Hashes",
            (
                r"1\. \[isolation\] in a process of its own .* gave another episode: reset gave"
                r" observation"
            ),
        ),
    ],
)
def test_with_an_address_it_is_played_in_a_process_of_its_own_too(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("say yes")
    (tmp_path / "game.py").write_text(IN_A_FILE)
    address = f"file:{tmp_path / 'game.py'}:{name}"
    make = plugins.load("envs", address)
    if said:
        with pytest.raises(ConformanceError, match=said) as error:
            check_env(make, address=address)
        assert "2. " not in str(error.value)
    else:
        assert check_env(make, address=address) == ()


def test_what_it_costs_to_go_back_to_a_state_is_remarked_on() -> None:
    (remark,) = check_env(GoesBack)
    assert re.match(r"\[snapshot\] a state after 4 steps has [\d,]+ bytes; it took", remark)
    (remark,) = check_env(with_attribute("deterministic", True))
    assert remark.endswith("by playing its actions again")


def test_what_cannot_play_on_the_event_loop_and_does_not_say_it_can_is_only_told() -> None:
    class Runs(RunsALoopInline):
        isolation = "thread"

    (remark,) = check_env(Runs)
    assert re.match(
        r"\[isolation\] with env.isolation=inline it cannot be played: .* Without that setting,"
        r" thread",
        remark,
    )
