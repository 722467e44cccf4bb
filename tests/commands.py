"""The command line in processes that are forked from one that has imported what a run needs: that
takes seconds, and a run that is killed again and again needs it each time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# A process that is started goes on below the loop, and ends as one that was started by itself. It
# ignores SIGINT only if it shall be a background job of a shell. SIGUSR2 asks where it is.
FORKING = """
import faulthandler, json, os, signal, sys
import agentrl.engines.local, agentrl.recipes.policy_gradient, agentrl.trainers.local
import matplotlib.figure, pyarrow.parquet, transformers.models.qwen3.modeling_qwen3
from agentrl.cli import main
answers = os.dup(1)
for line in sys.stdin:
    asked = json.loads(line)
    if "ended" in asked:
        pid, status = os.waitpid(asked["ended"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
        answer = os.fork()
        if answer == 0:
            break
    os.write(answers, (json.dumps(answer) + "\\n").encode())
else:
    sys.exit()
os.close(answers)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)
os.close(log)
os.environ.clear()
os.environ.update(asked["environment"])
os.chdir(asked["folder"])
signal.signal(signal.SIGINT, signal.SIG_IGN if asked["background"] else signal.default_int_handler)
faulthandler.register(signal.SIGUSR2)
sys.argv = ["agentrl", *asked["arguments"]]
main()
"""


class Command:
    """`agentrl ...` in a process of its own, with the methods of a `Popen`. What it prints is added
    to a file.
    """

    def __init__(self, *arguments: str, cwd: Path, log: Path, background: bool = False) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.pid: int = _ask(
            arguments=arguments,
            folder=str(cwd),
            log=str(log),
            environment=environment,
            background=background,
        )
        self._exit: int | None = None

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def poll(self) -> int | None:
        """Its exit status, if it has ended: of a signal, its number below zero."""
        if self._exit is None:
            self._exit = _ask(ended=self.pid)
        return self._exit

    def wait(self, seconds: float) -> int:
        """Its exit status.

        Raises:
            TimeoutExpired: it has not ended.
        """
        limit = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("agentrl", seconds, self.output[-6000:])
            time.sleep(0.01)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def _forking() -> "subprocess.Popen[str]":
    """What has imported it, and ends with this process."""
    pipe = subprocess.PIPE
    # PyTorch makes a folder for temporary files when it is imported here, which is none of a test's
    # own.
    variables = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    return subprocess.Popen(
        [sys.executable, "-c", FORKING], cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=variables
    )


def _ask(**asked: Any) -> Any:
    forking = _forking()
    assert forking.stdin is not None
    assert forking.stdout is not None
    forking.stdin.write(json.dumps(asked) + "\n")
    forking.stdin.flush()
    return json.loads(forking.stdout.readline())
