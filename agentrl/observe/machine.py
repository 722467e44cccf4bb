"""`MachineLog`: how busy the machine of a run's controller is: a line of `machine.jsonl` every few
seconds.
"""

import json
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil
from pydantic import TypeAdapter, ValidationError

from agentrl.files.durable import append_line
from agentrl.flow import PeriodicThread
from agentrl.observe.usage import gpu_readers

logger = logging.getLogger(__name__)

FILE = "machine.jsonl"
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 10.0
_AGES = 600.0
"""A sample comes after this part of the run's age, so that a short run has many and a long one few.
"""


@dataclass(frozen=True, slots=True)
class MachineState:
    """The machine at a Unix time. Loads are shares from 0 to 1, of all cores and of the last
    moments; memory is in bytes; the disks' traffic is in bytes a second since the sample before;
    `disk_free` is of the run's own disk.
    """

    at: float
    cpu: float
    memory: int
    memory_total: int
    disk_read: float
    disk_written: float
    disk_free: int
    gpus: Mapping[str, float] = field(default_factory=dict)
    gpu_memory: Mapping[str, float] = field(default_factory=dict)


_FORMAT = TypeAdapter(MachineState)


class MachineLog(AbstractContextManager["MachineLog"]):
    """Samples from its beginning to its end, in a thread. If the file cannot be written, this is
    logged, and the run goes on without it.
    """

    def __init__(self, run: Path, *, every: float | None = None) -> None:
        self._run, self._every = run, every
        self._began = time.monotonic()
        self._sampler: _Sampler | None = None
        self._thread = PeriodicThread(self._log, name="machine log")

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.__exit__(*exc)

    def _log(self) -> float | None:
        try:
            if self._sampler is None:
                self._sampler = _Sampler(self._run)  # the first sample is of what has passed since
            else:
                append_line(self._run / FILE, json.dumps(asdict(self._sampler.sample())))
        except (OSError, psutil.Error) as error:
            logger.warning(
                "%s ends here, as the machine cannot be sampled: %s", self._run / FILE, error
            )
            return None
        return self._every or period(time.monotonic() - self._began)


def period(age: float) -> float:
    """Seconds until the next sample of a run that began `age` seconds ago."""
    return min(_MOST_SECONDS, max(_FIRST_SECONDS, age / _AGES))


def read_machine(text: bytes) -> list[MachineState]:
    """The lines of such a file that can be read."""
    found = []
    for line in text.splitlines():
        try:
            found.append(_FORMAT.validate_json(line))
        except ValidationError:
            continue
    return found


class _Sampler:
    def __init__(self, run: Path) -> None:
        self._run = run
        self._gpus = gpu_readers()
        self._before, self._at = _traffic(), time.monotonic()
        psutil.cpu_percent()  # the next call is about the time since this one

    def sample(self) -> MachineState:
        memory, traffic, at = psutil.virtual_memory(), _traffic(), time.monotonic()
        seconds = max(at - self._at, 1e-9)
        read, written = (
            (now - before) / seconds for now, before in zip(traffic, self._before, strict=True)
        )
        self._before, self._at = traffic, at
        gpus = {name: reader() for name, reader in self._gpus.items()}
        return MachineState(
            at=datetime.now(UTC).timestamp(),
            cpu=round(psutil.cpu_percent() / 100, 3),
            memory=memory.total - memory.available,
            memory_total=memory.total,
            disk_read=round(read),
            disk_written=round(written),
            disk_free=shutil.disk_usage(self._run).free,
            gpus={name: load for name, (load, _) in gpus.items()},
            gpu_memory={name: share for name, (_, share) in gpus.items()},
        )


def _traffic() -> tuple[int, int]:
    """The bytes that all disks have read and written so far; zeros where unknown."""
    try:
        counters: Any = psutil.disk_io_counters()
    except (NotImplementedError, OSError):  # such as a container that sees no disk
        return 0, 0
    return (0, 0) if counters is None else (counters.read_bytes, counters.write_bytes)
