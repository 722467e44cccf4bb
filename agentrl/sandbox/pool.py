"""The sandbox: a pool of jails that are kept warm."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Self

from agentrl.errors import ConfigError
from agentrl.flow import Flow
from agentrl.flow.suspicion import LETHAL_DEATHS
from agentrl.sandbox.jail import Jail, JailError
from agentrl.sandbox.order import Order
from agentrl.sandbox.outcome import Outcome, Ran, SandboxLost
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits

logger = logging.getLogger(__name__)

_SET_ASIDE = (
    f"{LETHAL_DEATHS} sandboxes were lost in runs of the same program, so it is set aside and not "
    "run again"
)
BACKENDS = ("namespaces", "landlock")
"""The isolation backends, strongest first (docs/sandbox.md)."""

_BREAKOUTS = """
import ctypes, os, socket

def breaks_out(attempt):
    try:
        attempt()
    except OSError:
        return False
    return True

attempts = {
    "write into the root": lambda: open("/agentrl-probe", "w"),
    "write beside its own folder": lambda: open("/usr/agentrl-probe", "w"),
    "open a socket": lambda: socket.socket(),
    "read passwords": lambda: open("/etc/shadow"),
    "list homes": lambda: os.listdir("/home"),
    "see the first process": lambda: open("/proc/1/environ").read(),
    "become root": lambda: (
        os.setuid(0) if os.getuid() else ctypes.CDLL(None).capget and os.chroot("/")
    ),
}
print(*[name for name, attempt in attempts.items() if breaks_out(attempt)], sep=", ", end="")
"""


class ProgramSandbox:
    """Runs untrusted Python programs.

    Each run is a newly forked process in a new, empty folder; when it ends, everything that it
    started is killed. An async context manager: entering chooses the strongest backend that this
    machine supports, logs its name, and tests that it isolates; leaving ends every run. It belongs
    to the event loop on which it was entered.

        async with ProgramSandbox(SandboxConfig()) as sandbox:
            outcome = await sandbox.run("print(int(input()) ** 2)", stdin="12")
            # Ran(stdout="144\\n", exit=0, ...)
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.backend = ""
        """Name of the isolation backend; known after entering."""
        self._idle: asyncio.LifoQueue[Jail | None] = asyncio.LifoQueue()
        self._jails: set[Jail] = set()
        self._losses: Counter[bytes] = Counter()
        """The number of lost jails in which each program ran."""

    async def __aenter__(self) -> Self:
        """Choose the backend and start the first jail; the others start when they are needed.

        Raises:
            ConfigError: the machine cannot isolate, and `allow_unsafe` is not set; says what each
            backend lacks.
        """
        self._idle = asyncio.LifoQueue()
        try:
            first = await self._start_first()
        except BaseException:
            await self.__aexit__()
            raise
        for jail in (*[None] * (self.config.size - 1), first):  # the last one is taken first
            self._idle.put_nowait(jail)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End every run and every jail."""
        for jail in self._jails:
            jail.kill()
        self._jails.clear()
        self.backend = ""

    async def run(
        self, program: str, stdin: str = "", limits: SandboxLimits | None = None
    ) -> Outcome:
        """Run a program as a main module with this text on its stdin. Waits until a jail is free.

        Cancelling kills the run. `limits` replace those of the config. A program in whose runs two
        jails were lost is not run again.
        """
        if not self.backend:
            raise RuntimeError(
                "the sandbox is not running: write `async with ProgramSandbox(config) as sandbox`"
            )
        chosen = (limits or self.config.limits).model_dump()
        order = Order(program, stdin.encode(errors="replace"), **chosen)
        if self._losses and self._losses[_digest(order)] >= LETHAL_DEATHS:
            return SandboxLost(_SET_ASIDE, final=True)
        jail = await self._idle.get()
        try:
            if jail is None or jail.dead:
                jail = await self._start()
            outcome = await jail.run(order)
            return self._count_loss(order, outcome) if isinstance(outcome, SandboxLost) else outcome
        except JailError as error:
            return SandboxLost(f"a new jail did not start: {error}")
        finally:
            if jail is not None and jail.dead:
                self._jails.discard(jail)
                jail = None  # the next run starts a new one
            self._idle.put_nowait(jail)

    async def run_all(
        self, programs: Sequence[tuple[str, str]], limits: SandboxLimits | None = None
    ) -> list[Outcome]:
        """The outcomes of all (program, stdin) pairs; as many run at a time as there are jails."""
        async with Flow("sandbox") as flow:
            runs = [
                flow.start(self.run(*each, limits), name=f"run-{at}")
                for at, each in enumerate(programs)
            ]
        return [run.result() for run in runs]

    @property
    def lost(self) -> int:
        """The number of jails lost in runs, and replaced."""
        return self._losses.total()

    def _count_loss(self, order: Order, outcome: SandboxLost) -> SandboxLost:
        """Count a jail that was lost in a run. Losses while the sandbox closes do not count."""
        if not self.backend:
            return outcome
        digest = _digest(order)
        self._losses[digest] += 1
        if self._losses[digest] < LETHAL_DEATHS:
            return outcome
        logger.warning("%s; the last time: %s", _SET_ASIDE, outcome.error)
        return SandboxLost(f"{_SET_ASIDE}; the last time: {outcome.error}", final=True)

    async def _start(self) -> Jail:
        jail = await Jail.start(self.backend, self.config)
        self._jails.add(jail)
        return jail

    async def _start_first(self) -> Jail:
        """Start the first jail, with the strongest backend that starts, and test its isolation."""
        wanted = BACKENDS if self.config.backend == "auto" else (self.config.backend,)
        lacks = []
        for self.backend in wanted:
            try:
                jail = await self._start()
            except JailError as error:
                lacks.append(f"{self.backend}: {error}")
                continue
            await self._test_isolation(jail)
            weaker = f"; stronger backends do not work here: {'; '.join(lacks)}" if lacks else ""
            counted = (
                "a control group"
                if jail.metered
                else "looking at its processes (no control group can be made)"
            )
            level = logging.WARNING if lacks else logging.INFO
            logger.log(
                level,
                "the sandbox isolates by %s, and counts by %s%s",
                self.backend,
                counted,
                weaker,
            )
            return jail
        self.backend = "unsafe" if self.config.allow_unsafe else ""
        if not self.backend:
            raise ConfigError(
                f"this machine cannot isolate programs ({'; '.join(lacks)}). Allow user namespaces"
                " or Landlock there (docs/sandbox.md), or write allow_unsafe: true, which lets"
                " programs do everything that you can"
            )
        logger.warning("the sandbox does NOT isolate (allow_unsafe): %s", "; ".join(lacks))
        return await self._start()

    async def _test_isolation(self, jail: Jail) -> None:
        """Test the isolation: attempt everything that must fail."""
        outcome = await jail.run(Order(_BREAKOUTS, b"", **SandboxLimits().model_dump()))
        if not isinstance(outcome, Ran) or outcome.exit != 0 or outcome.stdout:
            raise ConfigError(
                f"the sandbox backend {self.backend} does not hold on this machine: {outcome}"
            )


def _digest(order: Order) -> bytes:
    """The digest of a program and its input."""
    return blake2b(order.head + order.stdin, digest_size=16).digest()
