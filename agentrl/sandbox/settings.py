"""Settings of a sandbox."""

import os
from typing import Literal

from pydantic import Field

from agentrl.settings.base import PathText, Settings


class SandboxLimits(Settings):
    """The limits of one run. Beyond a limit, the run is ended or the kernel refuses more, as each
    limit says.
    """

    wall: float = Field(10.0, gt=0)
    """Seconds from start to end."""
    cpu: float = Field(5.0, gt=0)
    """Seconds of CPU time of all processes together; more end the run."""
    memory: int = Field(512 << 20, ge=32 << 20)
    """Bytes: of address space of each process, beyond which it gets a MemoryError; and of memory of
    all processes together, beyond which the run is ended."""
    processes: int = Field(32, ge=1)
    """Processes and threads at a time; more are refused. With the backend `landlock`, threads of
    one process.
    """
    disk: int = Field(64 << 20, ge=1 << 12)
    """Bytes of files, which `namespaces` keeps in memory. More are refused; with `landlock` they
    end the run.
    """
    output: int = Field(1 << 20, ge=1, le=16 << 20)
    """Bytes of stdout and stderr together; more end the run."""


class SandboxConfig(Settings):
    """Settings of a sandbox."""

    size: int = Field(default_factory=lambda: len(os.sched_getaffinity(0)), ge=1)
    """The number of programs that run at a time; by default one for each CPU."""
    limits: SandboxLimits = SandboxLimits()
    """The limits of one run."""
    preload: tuple[str, ...] = (
        "collections",
        "heapq",
        "itertools",
        "json",
        "math",
        "random",
        "re",
        "string",
        "typing",
    )
    """Modules that are imported before a program starts, so that importing them costs it nothing.
    """
    paths: tuple[PathText, ...] = ()
    """Folders of Python packages that programs may read and import from, such as a site-packages.
    """
    backend: Literal["auto", "namespaces", "landlock"] = "auto"
    """`namespaces`, `landlock`, or `auto`, the stronger of them that this machine supports."""
    allow_unsafe: bool = False
    """Run programs without isolation if the machine supports none. They can then do everything that
    you can.
    """
