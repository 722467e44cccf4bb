"""The process of a Ray actor, and its end.

Ray first asks an actor to go, and kills one that cannot answer some seconds later. Until then it keeps its devices'
memory, which the one in its place needs. So who started it kills it at once.
"""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A process on a node of the cluster."""

    pid: int
    node: str

    @classmethod
    def own(cls) -> "RayProcess":
        """The one that asks."""
        import ray

        return cls(os.getpid(), ray.get_runtime_context().get_node_id())

    def kill(self) -> None:
        """Kill it, where it still is an actor's: from here, or by whoever Ray has on its node."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.node == ray.get_runtime_context().get_node_id():
            _kill(self.pid)
            return
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        remote: Any = ray.remote
        task = remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_kill)
        task.remote(self.pid)  # nobody waits: with the node, the process is gone too


def end(actor: Any, process: RayProcess | None) -> None:
    """Have Ray kill an actor, and see that its process ends, where it is known."""
    import ray

    if not ray.is_initialized():
        return
    ray.kill(actor, no_restart=True)
    if process is not None:
        process.kill()


def _kill(pid: int) -> None:
    with suppress(OSError):  # it is gone
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):  # and no other has its number
            os.kill(pid, signal.SIGKILL)
