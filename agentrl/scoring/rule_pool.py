"""`RulePool`: runs pure functions in processes that can be killed, and caches their results.

A rule that hangs (a regular expression that backtracks for ever, a number of a billion digits)
blocks its process, and often holds the interpreter's lock, so that no handler or thread can end it.
Each call therefore has limits:

- CPU time and memory. Only what is judged can use them up, so that is a verdict: `RuleLimitError`,
  and the content is wrong. The kernel ends a process that has computed for too long; it is replaced
  (pebble's `ProcessPool`).
- A deadline on the clock, counted from when a process begins it. One that is missed without the CPU
  time having been used is the machine's fault, and a failure: the rule is asked again, so that a
  busy machine never makes a zero.
"""

import asyncio
import importlib
import math
import multiprocessing
import pickle
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from agentrl.errors import (
    RAISED_BY_CODE,
    AgentRLError,
    ConfigError,
    LethalContentError,
    RewardError,
    RuleLimitError,
    describe,
)
from agentrl.flow.suspicion import Suspicion
from agentrl.scoring.config import RulePoolConfig


class RuleDiedError(RewardError):
    """The process of a rule died while it judged."""


class RulePool:
    """Runs pure functions in killable processes. An async context manager; leaving it ends the
    processes.

    Each process imports the modules `imports` before its first deadline begins.
    """

    def __init__(self, config: RulePoolConfig | None = None, imports: Iterable[str] = ()) -> None:
        self._config = config or RulePoolConfig()
        self.imports = list(imports)
        self._pool: ProcessPool | None = None
        self._known: OrderedDict[bytes, Any] = OrderedDict()
        self.suspicion = Suspicion(LethalContentError, "the processes of rules")
        self.died = 0
        """The number of processes that died while they judged."""
        self.hits = 0
        """Verdicts that came from the cache."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.stop()  # type: ignore[no-untyped-call]  # pebble's own
            await asyncio.to_thread(pool.join)

    def forget(self) -> None:
        """Drop all cached verdicts."""
        self._known.clear()

    async def run(
        self, function: Callable[[Any], Any], argument: Any, *, cached: bool = True
    ) -> Any:
        """`function(argument)`, both of which must pickle; if `cached`, a repeated call is answered
        from the cache.

        Raises:
            RuleLimitError: the function used up its CPU time or memory.
            RewardError: the function raised, missed its deadline or took its process down; or
            pickling failed.
            LethalContentError: it has taken two processes down with this argument.
            ConfigError: the function raised it.
        """
        name = getattr(function, "__qualname__", repr(function))
        try:
            call = pickle.dumps((function, argument))
        except Exception as error:  # pickle raises whatever the object's own code raises
            raise RewardError(
                f"{name} cannot run in a process: {type(error).__name__}: {error}. Its argument and"
                " its own state must pickle; or run it in this process with isolation: inline (or"
                ' "thread")'
            ) from error
        key = blake2b(call, digest_size=16).digest()
        if cached and key in self._known:
            self.hits += 1
            self._known.move_to_end(key)
            return self._known[key]
        verdict = await self._judge(name, call, key)
        if cached:
            self._known[key] = verdict
            while len(self._known) > self._config.cache:
                self._known.popitem(last=False)
        return verdict

    async def _judge(self, name: str, call: bytes, key: bytes) -> Any:
        suspect = self.suspicion.suspect(f"{name} (with the same content)", lambda: key)
        self.suspicion.check(suspect)
        try:
            verdict = await self.ask(name, call)
        except RuleDiedError as error:
            self.died += 1
            self.suspicion.died([suspect], error)
            self.suspicion.check(suspect)
            raise
        self.suspicion.ended(suspect)
        return verdict

    async def ask(self, name: str, call: bytes) -> Any:
        """The result of a pickled (function, argument) from a process, without the cache; `name` is
        for errors.

        Raises:
            RewardError, ConfigError: as `run`.
        """
        pool = self._pool = self._pool or self._start()
        try:
            return await asyncio.wrap_future(
                pool.schedule(_call, args=[call], timeout=self._config.deadline)
            )
        except FutureTimeoutError as error:
            raise RewardError(
                f"{name} did not answer within {self._config.deadline:g} s"
                " (rollout.rules.deadline): its process was killed"
            ) from error
        except BrokenProcessPool as error:
            if self._pool is pool:
                self._pool = None  # the next call starts another
            raise RewardError(
                f"{name}: the processes of rules died in their start, in which they import "
                f"{', '.join(self.imports) or 'nothing'}"
            ) from error
        except ProcessExpired as error:
            if -error.exitcode in (signal.SIGPROF, signal.SIGXCPU):
                raise RuleLimitError(
                    f"{name} computed for more than {self._config.cpu_seconds:g} s"
                    " (rollout.rules.cpu_seconds)"
                ) from error
            raise RuleDiedError(
                f"{name} took its process down (exit status {error.exitcode})"
            ) from error
        except MemoryError as error:
            raise RuleLimitError(
                f"{name} needed more than {self._config.memory_mb} MB (rollout.rules.memory_mb)"
            ) from error
        except (ConfigError, RewardError):
            raise
        except _RuleRaisedError as error:
            raise RewardError(f"{name}: {error}") from error
        except Exception as error:  # what the rule raised or returned does not pickle
            raise RewardError(f"{name}: {type(error).__name__}: {error}") from error

    def _start(self) -> ProcessPool:
        # A fork of a driver with threads could hang.
        context = multiprocessing.get_context("forkserver")
        # If this starts the fork server, it imports them once for all of its processes.
        context.set_forkserver_preload(self.imports)
        return ProcessPool(
            max_workers=self._config.workers,
            initializer=_prepare,
            initargs=[
                self._config.memory_mb << 20,
                self._config.cpu_seconds,
                list(sys.path),
                self.imports,
            ],
            context=context,
        )


class _RuleRaisedError(Exception):
    """A rule raised something: its text says what, and where."""


_cpu_seconds = 0.0
"""In a pool process: the CPU seconds that each call may use."""


def _prepare(memory: int, cpu_seconds: float, path: list[str], imports: list[str]) -> None:
    """Set up a pool process, once."""
    global _cpu_seconds  # noqa: PLW0603  pebble's initializer has no other place to store something
    _cpu_seconds = cpu_seconds
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver, not the terminal, ends the processes
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CORE, 0)
    for module in imports:
        with suppress(ImportError):  # the rule that needs it raises this again
            importlib.import_module(module)


def _call(call: bytes) -> Any:
    """Make one call. The kernel ends this process once it has computed too long, also if the driver
    is gone.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + _cpu_seconds) + 1
    _limit(resource.RLIMIT_CPU, most)  # in case that a rule handles the timer's signal
    function, argument = pickle.loads(call)
    # SIGPROF, whose default action ends the process.
    signal.setitimer(signal.ITIMER_PROF, _cpu_seconds)
    try:
        return function(argument)
    except (AgentRLError, MemoryError):
        raise
    except RAISED_BY_CODE as error:
        # Described here, because a traceback does not pickle.
        raise _RuleRaisedError(describe(error)) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(what: int, value: int) -> None:
    """Set a soft limit, as far as this process may."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
