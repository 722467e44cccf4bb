"""Which process the kernel kills first when memory is short."""

import os
from contextlib import suppress
from pathlib import Path

_OOM_SCORE = 500
"""Of processes whose loss costs less than the controller's, which ends the run, and more than that
of code in a sandbox."""


def prefer_to_kill() -> None:
    """Let the kernel kill this process, and those that it starts, before the controller when memory
    is short.
    """
    path = Path(f"/proc/{os.getpid()}/oom_score_adj")
    with suppress(OSError, ValueError):  # a container may not allow it
        path.write_text(str(max(_OOM_SCORE, int(path.read_text()))))
