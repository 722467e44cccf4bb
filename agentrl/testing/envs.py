"""`check_env`: tests an environment against the contract of `agentrl.Env`, for authors of
plug-ins.

    def test_my_env_keeps_the_contract() -> None:
        check_env(MyEnv, options={"level": 3})

The environment runs in its own thread with a deadline for every call, so a hang is reported instead
of blocking the test. While a call runs, the global `random` and `numpy.random` are seeded from the
turn, so that only the check of global randomness reports an environment that uses them. Their
states are restored afterwards.

An environment that can go back to its states (`snapshot`, `restore`, or `deterministic`) has to do
it: the same actions give the same replies from there, in another instance and in the same one, and
taking a state changes nothing. A remark says what that costs.

At the end the first episode is played again wherever a run may play it (`env.isolation`): on an
event loop and, if the environment's address is given, as `agentrl check-env` does, in a process of
its own.
"""

import asyncio
import copy
import gc
import inspect
import json
import os
import queue
import random
import re
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from agentrl.errors import (
    RAISED_BY_CODE,
    ConfigError,
    ConformanceError,
    EnvError,
    OutageError,
    describe,
)
from agentrl.hosting.observations import IMAGES, as_result
from agentrl.hosting.process_env import ProcessEnv
from agentrl.hosting.replies import checked_reset, checked_step
from agentrl.hosting.snapshots import ReplaysActions, rewindable
from agentrl.protocols import (
    Env,
    ScriptedPlayer,
    isolation_of,
    reward_range_of,
    system_prompt_of,
    tools_of,
    unwrapped_env,
)
from agentrl.protocols.env import call_restore, call_snapshot, can_restore
from agentrl.rollout.agents import (
    SINGLE_AGENT,
    agents_in,
    earnings,
    next_agent,
    success_of,
    system_prompt_in,
)
from agentrl.trajectory import ToolCall

INLINE_STEP = 0.05
"""Seconds that the median step of an inline environment may take: all other episodes wait
meanwhile.
"""
START_SECONDS = 60.0
"""Seconds that a reset may take in a process of its own, which first imports the environment's
packages.
"""

Actions = Sequence[str] | Callable[[Env, random.Random], str] | None
"""Messages in order, or a scripted player, or `None`: the checker calls the environment's tools, or
sends words that the environment itself has written."""

GARBAGE = (
    "",
    " \n\t\r\n ",
    "x" * 100_000,
    "é 漢字 🦆 \u202e\u0000 \uffff",
    '<tool_call>{"name": "',
    '<tool_call>{"name": "no_such_tool", "arguments": {"no_such_argument": null}}</tool_call>',
    '{"name": 5, "arguments": []}',
)
"""Messages that an untrained model may well write."""


def check_env(
    make_env: Callable[[], Env],
    *,
    seeds: Iterable[int] = (0, 1, 2),
    actions: Actions = None,
    options: Mapping[str, Any] | None = None,
    deadline: float = 5.0,
    max_turns: int = 32,
    gold: ScriptedPlayer | None = None,
    address: str | None = None,
) -> tuple[str, ...]:
    """Play episodes and check them against the contract.

    `make_env` is the class, or a function that makes a new instance; `deadline` is in seconds per
    call. If the environment has a `reward_range`, (lowest, highest) of a single step, rewards are
    checked against it. `gold` is a player that has to succeed on every seed within `max_turns`.
    Without one, if an episode of one message gives the right answer as `info["answer"]`, that
    answer has to succeed. `address` is the registered name or `package.module:Name` by which a
    process of its own finds the environment, to play it there too.

    Returns remarks on what keeps the contract but is worth knowing.

    Raises:
        ConformanceError: lists everything found, each with what to write instead.
        ConfigError: the environment does not accept the options.
        OutageError: the environment's server cannot be reached, or is full.
    """
    if not callable(make_env):
        raise ConformanceError(
            "check_env needs a class or a function that makes an environment, got"
            f" {make_env!r:.100}"
        )
    seeds = _listed(seeds)
    _check_played(seeds, actions, max_turns)
    check = _Check(
        make_env, seeds, actions, dict(options or {}), deadline, max_turns, gold, address
    )
    with _keep_global_rng():
        check.run()
    if check.findings:
        listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(check.findings, 1))
        note = f"\n{check.not_run}" if check.not_run else ""
        name = getattr(make_env, "__qualname__", repr(make_env))
        raise ConformanceError(f"{name} breaks the contract of an environment:\n{listed}{note}")
    return tuple(check.remarks)


def _listed(seeds: object) -> list[int]:
    """The seeds as a list, whatever gives them.

    Raises:
        ConformanceError: it is a single one.
    """
    if not isinstance(seeds, Iterable):
        raise ConformanceError(
            f"check_env needs a list of seeds, got {seeds!r:.100}: a single seed is a list too"
        )
    return list(seeds)


def _check_played(seeds: Sequence[int], actions: Actions, max_turns: int) -> None:
    """Check that episodes will be played, as nothing is wrong with those that are not.

    Raises:
        ConformanceError: none would be, or with other messages than meant.
    """
    if not seeds or max_turns < 1:
        raise ConformanceError(
            f"check_env needs at least one seed and one turn, got seeds={seeds!r:.100} and"
            f" max_turns={max_turns}"
        )
    if isinstance(actions, str) or (actions is not None and not callable(actions) and not actions):
        raise ConformanceError(
            f"check_env needs a list of messages or a player as actions, got {actions!r:.100}: a"
            " single message is a list too; without actions, it chooses messages itself"
        )


class _Broken(Exception):  # noqa: N818 (control flow of this module; never leaves it)
    """A finding after which this episode cannot go on."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"[{check}] {text}")
        self.text = text


class _Hung(_Broken):
    """A finding after which nothing can go on."""


_UNTOLD = object()


@dataclass(frozen=True, slots=True)
class _Seen:
    """The visible result of a reset or a step."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: object = None
    answer: object = _UNTOLD
    agent: str = ""
    rewards: tuple[tuple[str, float], ...] = ()
    images: Sequence[str] = ()

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class _Script:
    """One episode as it was first played: the actions, and what was seen (one more than actions:
    the reset).
    """

    seed: int
    actions: tuple[str, ...]
    seen: tuple[_Seen, ...]


class _Worker:
    """A daemon thread with an event loop, which runs one call at a time.

    `blocked_seconds`: how long the last call kept its event loop from serving others. What it
    awaited does not count. `inline`: calls are made on the running loop, as those of an inline
    environment are.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.blocked_seconds = 0.0
        self._inline = inline
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], float, Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, name="check_env", daemon=True).start()

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                self._run_call(runner, *call)
                del call  # with what the call has raised, and that holds

    def _run_call(
        self, runner: asyncio.Runner, work: Callable[[], Any], seconds: float, future: "Future[Any]"
    ) -> None:
        """Make a call, and set its result or what it raises."""
        try:
            began = time.perf_counter()
            result = runner.run(_await_call(work)) if self._inline else work()
            self.blocked_seconds = time.perf_counter() - began
            if inspect.isawaitable(result):
                # What the thread computes between its waits; other episodes go on in these.
                computed = time.thread_time()
                result = runner.run(_await_within(seconds, result))
                self.blocked_seconds += time.thread_time() - computed
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)

    def call(self, phase: str, work: Callable[[], Any], seconds: float) -> Any:
        """The result of `work`, which may be awaitable; raises what it raises, or `_Hung`."""
        future: Future[Any] = Future()
        self._calls.put((work, seconds, future))
        text = (
            f"{phase} did not answer within {seconds:g} s. Set a timeout for what it waits for, or"
            " pass a larger deadline to check_env"
        )
        try:
            # The thread itself cancels an awaitable a little earlier.
            error = future.exception(timeout=seconds + min(0.5, seconds))
        except TimeoutError:
            raise _Hung("deadline", text) from None
        if isinstance(error, _Hung):
            raise _Hung("deadline", text)
        return future.result()

    def stop(self) -> None:
        """End the thread when its call returns, if ever."""
        self._calls.put(None)


async def _await_call(work: Callable[[], Any]) -> Any:
    """The result of a call that is made on the running loop."""
    return work()


async def _await_within(seconds: float, awaitable: Any) -> Any:
    """What it awaits; raises `_Hung` after so many seconds."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():  # else the environment has raised its own
            raise _Hung("deadline", "") from None
        raise


@dataclass
class _Check:
    """One run of `check_env`."""

    make_env: Callable[[], Env]
    seeds: list[int]
    actions: Actions
    options: dict[str, Any]
    deadline: float
    max_turns: int
    gold: ScriptedPlayer | None
    address: str | None = None
    findings: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    not_run: str = ""

    def run(self) -> None:
        """Fill `findings`."""
        self.worker = _Worker()
        try:
            with _keep_folder() as self.home:
                self.folder = os.fstat(self.home)
                self._run()
        except _Hung as hung:
            self.note(hung)
            self.not_run = "The checks after this one were not run."
        except _Broken as broken:
            self.note(broken)
            self.not_run = "The other checks were not run."
        finally:
            self.worker.stop()

    def note(self, finding: Exception | str) -> None:
        """Record a finding, once."""
        if str(finding) not in self.findings:
            self.findings.append(str(finding))

    def _run(self) -> None:
        if self.address is not None:
            self._check_survival(ProcessEnv(self.address))
        with _Subject(self) as subject:
            _check_attributes(subject.env, self.note)
        with _Subject(self) as subject:
            subject.close("before the first reset")
        try:
            scripts = [self._first_play(seed) for seed in self.seeds]
        except _Hung:
            raise
        except _Broken as broken:
            self.note(broken)
            self.not_run = "The checks that play episodes were not run; repair this first."
            return
        self._check_blocking()
        self._check_garbage()
        self._check_gold(scripts)
        if self._check_determinism(scripts):
            self._check_global_seed(scripts)
            self._check_state(scripts)
            self._check_interleaving(scripts)
            self._check_snapshot(scripts[0])
            self._check_inline(scripts[0])
            if self.address is not None:
                self._check_process(scripts[0], self.address)

    def _check_survival(self, process: ProcessEnv) -> None:
        """Play first where it cannot do harm: what ends its process would end this one, and nothing
        would be said.

        What else is wrong is found, and told better, in this process.
        """
        died = None
        with _Elsewhere(self, lambda: process) as subject:
            try:
                self._play(subject, self.seeds[0])
            except _Hung:
                process.kill()
            except _Broken as broken:
                died = broken if process.pid is None else None
        if died is not None:
            raise _Broken(
                "exit",
                f"{died.text}. It must not end its process: raise an exception instead, or call"
                " what exits in a process of its own",
            )

    def _check_snapshot(self, script: _Script) -> None:
        """Go back to the beginning and the middle of an episode, in a fresh instance and in the one
        that has gone on.
        """
        lines: list[str] = []
        last = len(script.actions) - 1
        for cut in sorted({0, max(0, last) // 2, max(0, last)}):
            with _Subject(self) as first, _Subject(self) as second:
                first.env, second.env = rewindable(first.env), rewindable(second.env)
                try:
                    second.reset(script.seed)
                    different = first.replay(script, cut)
                    if not can_restore(first.env):
                        return
                    different = different or self._check_way_back(script, cut, first, second, lines)
                except _Hung:
                    raise
                except _Broken as broken:
                    different = str(broken)
            if different:
                self.note(
                    f"[snapshot] after {cut} steps: {different}. The state is all that decides the"
                    " next replies, the random state included, and shares nothing with the instance"
                )
                return
        self.remarks.append(f"[snapshot] {lines[-1]}")

    def _check_way_back(
        self,
        script: _Script,
        cut: int,
        first: "_Subject",
        second: "_Subject",
        lines: list[str],
    ) -> str:
        began = time.perf_counter()
        state = first.snapshot()
        taken = time.perf_counter() - began
        if difference := first.go_on(script, cut):
            return f"the episode went on differently once its state had been taken: {difference}"
        for subject, where in ((second, "in another instance"), (first, "in the same instance")):
            began = time.perf_counter()
            subject.restore(state, first)
            back = time.perf_counter() - began
            if difference := subject.go_on(script, cut):
                return f"{where}, a restored state went on differently: {difference}"
        lines.append(
            f"a state after {cut} steps has {len(state):,} bytes; it took {1e3 * taken:.2f} ms to"
            f" take, and {1e3 * back:.2f} ms to go back to"
            + (", by playing its actions again" if isinstance(first.env, ReplaysActions) else "")
        )
        return ""

    def _check_inline(self, script: _Script) -> None:
        """A run may play it on the event loop, which is what it declares, or what `env.isolation`
        chooses.
        """
        with _Subject(self) as subject:
            declared = isolation_of(subject.env)
            is_inline = declared == "inline" or inspect.iscoroutinefunction(subject.env.step)
        with warnings.catch_warnings():
            # Of a coroutine that could not be run there.
            warnings.simplefilter("ignore", RuntimeWarning)
            wrong = self._replay_problem(script, _Elsewhere(self, self.make_env, inline=True))
            if wrong:
                gc.collect()
        if wrong and is_inline:
            self.note(
                f"[isolation] on the event loop, where a run plays it, {wrong}. Leave `isolation`"
                " out and declare step with `def`, and it runs in a thread"
            )
        elif wrong:
            self.remarks.append(
                f"[isolation] with env.isolation=inline it cannot be played: {wrong}. Without that"
                f" setting, {declared} is what a run takes"
            )

    def _check_process(self, script: _Script, address: str) -> None:
        if wrong := self._replay_problem(script, _Elsewhere(self, lambda: ProcessEnv(address))):
            self.note(
                "[isolation] in a process of its own (env.isolation=process, env.python,"
                f" env.requires) {wrong}. Its process has another current folder, another hash seed"
                " and nothing that was set in this one; replies leave it as JSON"
            )

    def _replay_problem(self, script: _Script, subject: "_Subject") -> str:
        """The problem with a replay of the script there; "" for none."""
        try:
            with subject:
                difference = subject.replay(script)
        except _Broken as broken:
            return broken.text
        return difference and f"the same seed and actions gave another episode: {difference}"

    def _first_play(self, seed: int) -> _Script:
        with _Subject(self) as subject:
            script = self._play(subject, seed)
            subject.check_options()
        return script

    def _play(self, subject: "_Subject", seed: int) -> _Script:
        seen = [subject.reset(seed)]
        actions: list[str] = []
        rng = random.Random(seed)
        while len(actions) < self.max_turns and not seen[-1].over:
            action = self._next_action(subject.env, seen[-1].observation, len(actions), rng)
            if action is None:
                break
            actions.append(action)
            seen.append(subject.step(action))
        return _Script(seed, tuple(actions), tuple(seen))

    def _next_action(self, env: Env, observation: str, turn: int, rng: random.Random) -> str | None:
        """The message of a turn; None if the given ones are used up."""
        if self.actions is None or (callable(self.actions) and isinstance(env, ProcessEnv)):
            # A player could not look into the environment's own process.
            return _plausible_message(env, observation, rng)
        if callable(self.actions):
            return self._ask_player("actions", self.actions, env, rng)
        return self.actions[turn] if turn < len(self.actions) else None

    def _ask_player(
        self, argument: str, player: ScriptedPlayer, env: Env, rng: random.Random
    ) -> str:
        """A message of a scripted player, which may hang or fail as an environment may."""
        what = f"the player given as {argument}"

        def work() -> Any:
            return player(unwrapped_env(env), rng)

        try:
            return str(self.worker.call(what, work, self.deadline))
        except _Broken:
            raise
        except RAISED_BY_CODE as error:
            raise _Broken(argument, f"{what} raised {type(error).__name__}: {error}") from error

    def _check_blocking(self) -> None:
        with _Subject(self) as subject:
            inline = isolation_of(subject.env) == "inline"
        if inline and self.step_seconds and statistics.median(self.step_seconds) > INLINE_STEP:
            self.note(
                "[blocking] isolation is inline, and the median step takes"
                f" {statistics.median(self.step_seconds):.2f} s, which all other episodes wait for."
                " Leave `isolation` out, and it runs in a thread"
            )

    def _check_garbage(self) -> None:
        for text in GARBAGE:
            with _Subject(self) as subject:
                subject.reset(self.seeds[0])
                try:
                    seen = subject.step(text)
                    if seen.terminated and seen.success and seen.reward > 0:
                        self.note(
                            f"[garbage] the message {text!r:.60} succeeds and earns"
                            f" {seen.reward:g}. Read answers strictly, and pay nothing for one that"
                            " cannot be read"
                        )
                except _Hung:
                    raise
                except _Broken as broken:
                    self.note(
                        f"[garbage] the message {text!r:.60} is not answered: {broken}. Answer a"
                        " message that cannot be used with an observation that says what is"
                        " expected, and reward 0"
                    )

    def _check_gold(self, scripts: Sequence[_Script]) -> None:
        for script in scripts:
            player = self.gold or self._player_of_answer(script)
            if player is not None:
                self._check_golden_play(script.seed, player)

    def _player_of_answer(self, script: _Script) -> ScriptedPlayer | None:
        """A player that gives the environment's own right answer, if it has one and the episode is
        one message.
        """
        answer = script.seen[-1].answer
        if answer is None and not self.remarks:
            self.remarks.append(
                f'[gold] info["answer"] of seed {script.seed} is None: no answer is known to be'
                " right, and nothing here shows that the task can be solved"
            )
        if answer is None or answer is _UNTOLD or len(script.actions) != 1:
            return None
        return lambda env, rng: str(answer)

    def _check_golden_play(self, seed: int, player: ScriptedPlayer) -> None:
        rng, action, seen = random.Random(seed), "", []
        with _Subject(self) as subject:
            seen.append(subject.reset(seed))
            while len(seen) <= self.max_turns and not seen[-1].over:
                action = self._ask_player("gold", player, subject.env, rng)
                seen.append(subject.step(action))
        last, earned = seen[-1], sum(step.reward for step in seen)
        succeeded = earned > 0 if last.success is None else last.success
        if not (last.over and succeeded):
            end = (
                f"its last message was {action!r:.80}"
                if last.over
                else f"it was not over after {self.max_turns} turns"
            )
            self.note(
                f"[gold] what should succeed on seed {seed} does not: reward {earned:g}, success"
                f" {last.success}; {end}. Correct the answer or how it is scored, or the player; a"
                " long game needs a larger max_turns"
            )

    def _check_determinism(self, scripts: Sequence[_Script]) -> bool:
        for script in scripts:
            with _Subject(self) as subject:
                difference = subject.replay(script)
            if difference:
                self.note(
                    f"[determinism] the same seed ({script.seed}) and actions gave another episode:"
                    f" {difference}. Take all randomness from `random.Random(seed)`, made in reset,"
                    " and none from the clock, sets or ids"
                )
                return False
        return True

    def _check_global_seed(self, scripts: Sequence[_Script]) -> None:
        for script in scripts:
            with _Subject(self, world=1) as subject:
                difference = subject.replay(script)
            if difference:
                self.note(
                    f"[global_rng] another global seed gives another episode: {difference}."
                    f" {_OWN_RNG}"
                )
                return

    def _check_state(self, scripts: Sequence[_Script]) -> None:
        with _Subject(self) as subject:
            for script in [*scripts, *scripts]:
                difference = subject.replay(script)
                if difference:
                    self.note(
                        "[state] an episode on a used instance differs from the same on a fresh"
                        f" one: {difference}. Set everything that an episode changes in reset"
                    )
                    return
                # The next reset comes in the middle of an episode, as after a cancelled one.
                subject.replay(script, turns=len(script.actions) // 2)

    def _check_interleaving(self, scripts: Sequence[_Script]) -> None:
        one, other = scripts[0], scripts[-1]
        with _Subject(self) as first, _Subject(self) as second:
            plays = [(one, first.steps(one)), (other, second.steps(other))]
            for turn in range(1 + max(len(one.actions), len(other.actions))):
                for script, play in plays:
                    seen = next(play, None)
                    if seen is not None and seen != script.seen[turn]:
                        self.note(
                            "[interleaving] two instances played in turns influence each other:"
                            f" {_difference(script, turn, seen)}. Keep state on the instance, not"
                            " on the class or module"
                        )
                        return


_OWN_RNG = (
    "Use a `random.Random(seed)` or `numpy.random.default_rng(seed)` of the instance, made in reset"
)


_MAKING = "the constructor, called with no arguments,"


class _Subject:
    """One instance under test. Leaving closes it twice; `world` chooses how the global RNGs are
    seeded.
    """

    def __init__(self, check: _Check, world: int = 0) -> None:
        self._check = check
        self._world = world
        self._make = check.make_env
        self._worker = check.worker
        self._reset_seconds = check.deadline
        self._turn = 0
        self._options: dict[str, Any] = {}

    def __enter__(self) -> "_Subject":
        self.env: Env = self._call(_MAKING, self._make)
        if not isinstance(self.env, Env):
            raise _Broken(
                "shape", f"{type(self.env).__name__} lacks one of the methods reset, step and close"
            )
        self._check_folder("the constructor")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # A thread that hangs takes no more calls.
        if kind is not _Hung:
            self.close("after an episode" if kind is None else "after a failure")
        # Addresses of environments may be relative.
        os.fchdir(self._check.home)
        self._check.folder = os.fstat(self._check.home)

    def reset(self, seed: int) -> _Seen:
        self._turn = 0
        self._options = copy.deepcopy(self._check.options)
        result = self._call("reset", lambda: self.env.reset(seed=seed, options=self._options))
        seen, info = _check_reset(result), result[1]
        with _as_finding("agents"):
            self._agents = agents_in(info)
            self._actor = next_agent(info, self._agents)
            for agent in self._agents:
                system_prompt_in(info, agent, "")
        return replace(seen, agent=self._actor)

    def step(self, action: str) -> _Seen:
        self._turn += 1
        result = self._call("step", lambda: self.env.step(action))
        self._check.step_seconds.append(self._check.worker.blocked_seconds)
        seen = self._add_agents(_check_step(result), result[4])
        low, high = reward_range_of(self.env)
        if not low <= seen.reward <= high:
            self._check.note(
                f"[reward] step returned the reward {seen.reward:g} outside of its reward_range,"
                f" {low:g} to {high:g}"
            )
        return seen

    def _add_agents(self, seen: _Seen, info: Mapping[str, Any]) -> _Seen:
        """Add what the info says of the acting agent, of the others' rewards, and of the next
        agent.
        """
        actor, rewards = self._actor, {}
        with _as_finding("agents"):
            if self._agents is not SINGLE_AGENT:
                rewards = dict(earnings(info, actor, seen.reward, self._agents))
            if not (seen.terminated or seen.truncated):
                self._actor = next_agent(info, self._agents)
        own = tuple(sorted(rewards.items()))
        return replace(seen, success=success_of(info, actor), agent=self._actor, rewards=own)

    def close(self, when: str) -> None:
        for again in ("", ", a second time"):
            try:
                self._call("close", self.env.close)
            except _Hung:
                raise
            except _Broken as broken:
                self._check.note(
                    f"[close] close {when}{again}: {broken}. It may be called at any time, more"
                    " than once: release what is held and forget it"
                )
                return

    def steps(self, script: _Script, turns: int | None = None) -> Iterator[_Seen]:
        """Replay the script's actions; yields what is seen."""
        yield self.reset(script.seed)
        for action in script.actions[:turns]:
            yield self.step(action)

    def snapshot(self) -> bytes:
        """The state of the episode."""
        state = self._call("snapshot", lambda: call_snapshot(self.env))
        if not isinstance(state, bytes):
            raise _Broken("snapshot", f"snapshot returned {type(state).__name__}: return bytes")
        return state

    def restore(self, state: bytes, taken_of: "_Subject") -> None:
        """Go back to a state of another subject, whose agents these are."""
        self._call("restore", lambda: call_restore(self.env, state))
        self._agents, self._actor = taken_of.agents_then
        self._turn = taken_of.turn_then

    def go_on(self, script: _Script, cut: int) -> str:
        """Play a script from its step `cut` on; returns the first difference, or an empty
        string.
        """
        self.agents_then, self.turn_then = (self._agents, self._actor), self._turn
        for turn, action in enumerate(script.actions[cut:], cut + 1):
            if (seen := self.step(action)) != script.seen[turn]:
                return _difference(script, turn, seen)
        return ""

    def replay(self, script: _Script, turns: int | None = None) -> str:
        """Replay the script; returns the first difference, or an empty string."""
        for turn, seen in enumerate(self.steps(script, turns)):
            if seen != script.seen[turn]:
                return _difference(script, turn, seen)
        return ""

    def _check_folder(self, phase: str) -> None:
        """Every other part of the process has the same current folder."""
        if os.path.samestat(here := os.stat("."), self._check.folder):
            return
        self._check.folder = here
        if isolation_of(self.env) != "process":
            self._check.note(
                f"[folder] {phase} changes the current folder, which a run's relative paths begin"
                ' at. Leave it and write whole paths, or state `isolation = "process"`'
            )

    def check_options(self) -> None:
        if self._options != self._check.options:
            self._check.note(
                f"[options] the options were changed to {self._options!r:.200}. Copy what you want"
                " to change: whoever calls reset may use the mapping again"
            )

    def _describe_error(self, call: str, error: BaseException) -> str:
        return f"{call} raised {describe(error)}"

    def _call(self, phase: str, work: Callable[[], Any]) -> Any:
        seconds = self._reset_seconds if phase == "reset" else self._check.deadline
        seed = 10_000 * self._world + self._turn
        random.seed(seed)
        np.random.seed(seed)
        try:
            return self._worker.call(phase, work, seconds)
        except (_Broken, OutageError, ConfigError):
            raise  # the last two are about the server or the options, and not about the environment
        except RAISED_BY_CODE as error:
            where = "" if phase != "step" else f" (turn {self._turn})"
            raise _Broken("raises", self._describe_error(f"{phase}{where}", error)) from error
        finally:
            if phase != _MAKING:
                self._check_folder(phase)
            if (random.getrandbits(64), np.random.bytes(8)) != _first_draws(seed):
                self._check.note(
                    f"[global_rng] {phase} uses the global random or numpy.random. {_OWN_RNG}"
                )


class _Elsewhere(_Subject):
    """An instance that is played as a run can play it: on the event loop (`inline`), or in a
    process of its own.
    """

    def __init__(self, check: _Check, make: Callable[[], Env], *, inline: bool = False) -> None:
        super().__init__(check)
        self._make = make
        self._worker = _Worker(inline=inline)
        self._reset_seconds = check.deadline if inline else max(check.deadline, START_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(kind, *rest)
        self._worker.stop()

    def _describe_error(self, call: str, error: BaseException) -> str:
        # The text of a process's error already has the call, what was raised there, and where.
        return str(error) if isinstance(error, EnvError) else super()._describe_error(call, error)


@contextmanager
def _as_finding(check: str, caught: type[Exception] = EnvError) -> Iterator[None]:
    """An error of what reads the replies is a finding of this check."""
    try:
        yield
    except caught as error:
        raise _Broken(check, str(error)) from error


def _difference(script: _Script, turn: int, seen: _Seen) -> str:
    where = "reset" if turn == 0 else f"turn {turn}, action {script.actions[turn - 1]!r:.40},"
    expected = script.seen[turn]
    for name in (
        "observation",
        "images",
        "reward",
        "terminated",
        "truncated",
        "success",
        "answer",
        "agent",
        "rewards",
    ):
        was, now = getattr(expected, name), getattr(seen, name)
        if was != now:
            return f"{where} gave {name} {was!r:.80} first and then {now!r:.80}"
    return where


def _check_reset(result: Any) -> _Seen:
    if not isinstance(result, tuple) or len(result) != 2:
        raise _Broken("shape", f"reset returned {result!r:.100}; return (observation, info)")
    with _as_finding("shape"):
        result = as_result(result)
    observation, info = result
    _check_observation("reset", observation)
    _check_info("reset", info)
    with _as_finding("shape", Exception):  # what training refuses
        checked_reset("the environment", result)
    return _Seen(observation, images=tuple(info.get(IMAGES) or ()))


def _check_step(result: Any) -> _Seen:
    if not isinstance(result, tuple) or len(result) != 5:
        raise _Broken(
            "shape",
            f"step returned {result!r:.100}; return (observation, reward, terminated, truncated,"
            " info)",
        )
    with _as_finding("shape"):
        result = as_result(result)
    observation, reward, terminated, truncated, info = result
    _check_observation("step", observation)
    if (
        isinstance(reward, bool)
        or not isinstance(reward, int | float)
        or not abs(reward) <= sys.float_info.max
    ):
        raise _Broken(
            "shape", f"step returned the reward {reward!r:.80}; return a finite float: `float(...)`"
        )
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool):
            raise _Broken(
                "shape",
                f"step returned {name}={flag!r:.80} ({type(flag).__name__}); return a bool:"
                " `bool(...)`",
            )
    _check_info("step", info)
    with _as_finding("shape", Exception):  # what training refuses
        checked_step("the environment", result)
    return _Seen(
        observation,
        float(reward),
        terminated,
        truncated,
        info.get("success"),
        info.get("answer", _UNTOLD),
        images=tuple(info.get(IMAGES) or ()),
    )


def _check_observation(phase: str, observation: Any) -> None:
    if not isinstance(observation, str):
        raise _Broken(
            "shape", f"{phase} returned the observation {observation!r:.80}; return text: a str"
        )


def _check_info(phase: str, info: Any) -> None:
    if not isinstance(info, dict) or not all(isinstance(key, str) for key in info):
        raise _Broken(
            "shape",
            f"{phase} returned the info {info!r:.80}; return a dict with text keys, `{{}}` for"
            " nothing",
        )
    success = info.get("success", False)
    by_agent = isinstance(success, Mapping) and all(
        isinstance(told, bool) for told in success.values()
    )
    if not isinstance(success, bool | None) and not by_agent:
        raise _Broken(
            "shape",
            f'{phase} returned info["success"]={info["success"]!r:.80}; write `bool(...)`, or leave'
            " it (None: the reward decides)",
        )


def _check_attributes(env: Env, note: Callable[[str], None]) -> None:
    _check_reward_range(reward_range_of(env))
    prompt = system_prompt_of(env)
    if not isinstance(prompt, str):
        note(
            f"[attributes] system_prompt is {prompt!r:.80}; it is the text of the system message:"
            " a str"
        )
    isolation = isolation_of(env)
    if isolation not in ("inline", "thread", "process"):
        note(
            f'[attributes] isolation is {isolation!r:.80}; write "thread", or "inline" if every'
            ' call takes microseconds, or "process" if it may hang or crash'
        )
    tools = tools_of(env)
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        note(f"[tools] tools is {tools!r:.80}; it is a sequence of JSON schemas")
        return
    names: set[str] = set()
    for tool in tools:
        problem = _tool_problem(tool, names)
        if problem:
            note(
                f"[tools] {problem} in {tool!r:.150}. agentrl.conversation.tools.tools_of writes"
                " schemas from typed methods"
            )


def _check_reward_range(declared: Any) -> None:
    match declared:
        case (int() | float() as low, int() | float() as high) if low < high:
            return
    raise _Broken(
        "attributes", f"reward_range is {declared!r:.80}; write (lowest, highest), of a single step"
    )


def _tool_problem(tool: Any, names: set[str]) -> str:
    """The problem with one schema, or nothing; adds its name to `names`."""
    match tool:
        case {
            "type": "function",
            "function": {
                "name": str(name),
                "description": str(),
                "parameters": {"type": "object", "properties": Mapping() as properties, **rest},
            },
        }:
            pass
        case _:
            return (
                'a tool is {"type": "function", "function": {"name": ..., "description": ...,'
                ' "parameters": {"type": "object", "properties": {...}}}}, unlike the one'
            )
    required: Any = rest.get("required", ())
    problem = ""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        problem = "a name is up to 64 letters, digits, _ and -, unlike the one"
    elif name in names:
        problem = f"the name {name!r} is used a second time"
    elif not set(required) <= set(properties):
        problem = '"required" names what is not in "properties"'
    elif not _is_json(tool):
        problem = "there is something that JSON cannot express"
    names.add(name)
    return problem


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _plausible_message(env: Env, observation: str, rng: random.Random) -> str:
    """A message that may mean something: a call of one of the tools, or a word the environment has
    written.
    """
    tools = [tool for tool in tools_of(env) if not _tool_problem(tool, set())]
    if tools:
        function = rng.choice(tools)["function"]
        properties = function["parameters"].get("properties", {})
        return ToolCall(
            function["name"],
            {name: _example_value(shape, rng) for name, shape in properties.items()},
        ).render()
    words = re.findall(r"\w+", f"{system_prompt_of(env)} {observation}")
    return rng.choice(words) if words else "yes"


def _example_value(shape: Any, rng: random.Random) -> Any:
    """A value that fits a simple schema. If it does not fit, the environment has to cope with that
    anyway.
    """
    match shape:
        case {"enum": [*values]}:
            return rng.choice(values)
        case {"anyOf": [*shapes]}:
            return _example_value(rng.choice(shapes), rng)
        case {"type": "array", "items": items}:
            return [_example_value(items, rng)]
        case {"type": str(kind)}:
            simple = {
                "integer": rng.randint(0, 20),
                "number": 0.5,
                "boolean": True,
                "string": "a",
                "object": {},
            }
            return simple.get(kind)
    return None


@lru_cache(maxsize=1024)
def _first_draws(seed: int) -> tuple[int, bytes]:
    """The first draws of the global generators after this seed. (Comparing their states takes ten
    times as long.)
    """
    return random.Random(seed).getrandbits(64), np.random.RandomState(seed).bytes(8)


@contextmanager
def _keep_folder() -> Iterator[int]:
    """Go back to the current folder at the end; yields its descriptor."""
    here = os.open(".", os.O_RDONLY)
    try:
        yield here
    finally:
        os.fchdir(here)
        os.close(here)


@contextmanager
def _keep_global_rng() -> Iterator[None]:
    """Restore the states of both global generators afterwards."""
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
