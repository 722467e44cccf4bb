"""`agentrl.train`: a training run from Python, as `agentrl train` starts one from a shell."""

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from agentrl.config.from_file import load_config
from agentrl.flow import run_steadily
from agentrl.runs.run import Run

T = TypeVar("T")


def train(
    config: str | PathLike[str], overrides: Iterable[str] = (), *, resume: bool = False
) -> dict[str, Any]:
    """Train an agent, and wait until the run has ended.

    Example:
        >>> summary = agentrl.train("examples/frozen_lake.yaml", ["steps=20", "seed=1"])
        >>> summary["success_after"]

    Args:
        config: a YAML file, or the `config.yaml` of a run
        overrides: settings that override the file's, such as "trainer.lr=1e-3"
        resume: continue the run in `run_dir`, which must have begun

    Returns:
        What the run has written into `summary.json`; empty for recipes that write none.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
        AgentRLError: the run has failed.
    """
    loaded = load_config(Path(config), overrides)

    def run_here() -> None:
        with Run(loaded, Console(), resume=resume) as run:
            run_steadily(loaded.config.recipe.call(run))

    with _unimportable_script():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            run_here()
        else:  # a notebook runs an event loop in this thread already
            with ThreadPoolExecutor(1, thread_name_prefix="agentrl-train") as thread:
                thread.submit(run_here).result()
    summary = loaded.config.run_dir / "summary.json"
    found: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    return found


@contextmanager
def _unimportable_script() -> Iterator[None]:
    """Keep the processes that a run starts from importing the script that called it, as Python's
    multiprocessing has them do. A run needs nothing of it; it would begin again in each of them
    where no `if __name__ == "__main__"` guards the call, and from standard input it cannot be
    imported at all.
    """
    script = vars(sys.modules["__main__"])
    # As in a session without a script: there `inspect` expects no file at all.
    found = {"__spec__": script["__spec__"], "__file__": script.pop("__file__", None)}
    script["__spec__"] = None
    try:
        yield
    finally:
        script |= {name: value for name, value in found.items() if value is not None}
