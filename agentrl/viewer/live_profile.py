"""`agentrl profile RUN --live SECONDS`: requests a trace from a running process, by a file in its
folder.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.files.durable import write_whole
from agentrl.observe.profiler import FAILED, FOLDER, REQUEST, SUFFIX
from agentrl.viewer.folders import RunFolder

_LOOK_SECONDS = 0.25


async def record_live(folder: Path, seconds: float) -> Path:
    """Let a run record a trace for so many seconds, or until it ends, and return its path.

    Raises:
        ConfigError: the run does not go on here, records a trace already, or cannot record one.
    """
    run = RunFolder(folder.name, folder)
    if not run.status()["live"]:
        raise ConfigError(
            f"{folder} does not run on this machine, so --live has nothing to record. `agentrl"
            f" profile {folder}` shows what it has recorded; with observe.profile=true, a run is"
            " recorded from its beginning"
        )
    place = folder / FOLDER / f"live-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    request, failed, trace = (place.with_suffix(suffix) for suffix in (REQUEST, FAILED, SUFFIX))
    place.parent.mkdir(exist_ok=True)
    write_whole(request, f"{seconds}\n")
    try:
        while not trace.exists():
            if failed.exists():
                why = failed.read_text().strip()
                failed.unlink()
                raise ConfigError(f"the run in {folder} cannot record a trace: {why}")
            if not run.status()["live"] and not trace.exists():
                raise ConfigError(f"the run in {folder} ended before it had recorded a trace")
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        request.unlink(missing_ok=True)  # no one waits for it any more
    return trace
