"""Settings of a sandbox."""

import os
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.protocols import OwnerOnly, Resources
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


class SandboxChoice(Settings):
    """The sandboxes of tasks: who provides them, and their limits."""

    test_seconds: float = Field(120.0, gt=0)
    """Seconds after which the test, or the setup, is killed; the test has then failed."""
    lease: float = Field(3600.0, gt=0)
    """Seconds after which a sandbox ends by itself: longer than any episode takes."""
    memory: Annotated[int, OwnerOnly()] = Field(1 << 30, ge=32 << 20)
    """Bytes of memory of a sandbox."""
    cpus: Annotated[float, OwnerOnly()] = Field(1.0, gt=0)
    """CPUs of a sandbox."""
    processes: Annotated[int, OwnerOnly()] = Field(128, ge=1)
    """Processes and threads of a sandbox at a time."""
    disk: Annotated[int, OwnerOnly()] = Field(256 << 20, ge=1 << 20)
    """Bytes of files in a sandbox, as far as its provider limits them."""
    sandbox: Annotated[dict[str, Any], OwnerOnly()] = Field(
        default_factory=lambda: {"name": "jail"}
    )
    """The provider and its settings: `{name: docker, image: python:3.12}` (docs/sandboxes.md)."""

    @property
    def resources(self) -> Resources:
        """The limits of a sandbox."""
        return Resources(self.memory, self.cpus, self.processes, self.disk)


class AgentPlace(SandboxChoice):
    """Where a program runs that calls the policy."""

    where: Literal["outside", "inside"] = "outside"
    """`outside`: beside the run, as its user. `inside`: in a sandbox for each episode, which
    reaches nothing but the gateway. The other settings are of those sandboxes."""
