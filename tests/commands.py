"""The command line in processes that are forked from one that has imported what it needs: importing it takes seconds,
and a run that is killed again and again needs it each time.
"""

import faulthandler
import os
import signal
import sys
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path


class Command:
    """`agentrl ...` in a process of its own, which begins at once. What it prints goes to a file."""

    def __init__(self, *arguments: str, cwd: Path, log: Path) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["agentrl.cli", "agentrl.recipes.policy_gradient", "torch", "transformers"])
        self._log = log
        self._process: ForkServerProcess = context.Process(target=_main, args=(arguments, cwd, log))
        self._process.start()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def ended(self) -> bool:
        """Whether it has."""
        return self._process.exitcode is not None

    def signal(self, number: signal.Signals) -> None:
        """Send one, if it lives."""
        if not self.ended():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def wait(self, seconds: float) -> int:
        """Its exit status: of a signal, its number below zero."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"it has not ended after {seconds:g} s:\n{self.output[-6000:]}"
        return self._process.exitcode


def _main(arguments: tuple[str, ...], cwd: Path, log: Path) -> None:
    from agentrl.cli import main

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a background job has started all this
    faulthandler.register(signal.SIGUSR1)
    os.chdir(cwd)
    sys.argv = ["agentrl", *arguments]
    main()
