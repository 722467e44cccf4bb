"""The settings of sandboxes in which tasks are done, and of where programs run."""

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.protocols.env import OwnerOnly
from agentrl.protocols.sandbox import Resources
from agentrl.settings.base import Settings


class SandboxChoice(Settings):
    """The sandboxes of tasks: who provides them, and their limits."""

    test_seconds: float = Field(120.0, gt=0)
    """Seconds after which the test, or the setup, is killed; the test has then failed."""
    lease: float = Field(3600.0, gt=0)
    """Seconds after which a sandbox ends by itself: longer than any episode takes."""
    memory: Annotated[int, OwnerOnly()] = Field(1 << 30, ge=32 << 20)
    """Bytes of memory of a sandbox. In a jail, they are also the address space of each of its
    processes, of which some programs reserve far more than they use (Node: tens of GiB)."""
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
