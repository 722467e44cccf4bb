"""The process of a Ray actor, and its end.

Ray first asks an actor to exit, and kills one that does not answer some seconds later. Until then
it keeps its devices' memory, which its replacement needs. So an actor that has not exited after
`_EXIT_SECONDS` is killed here. (Killing it at once would make Ray print "A worker died or was
killed" at the end of a healthy run.)
"""

import asyncio
import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.flow import run_to_completion
from agentrl.net.interfaces import meet_other_machines
from agentrl.weights.machines import machines_of_cluster

_EXIT_SECONDS = 1.0
"""How long an actor may take to exit by itself once Ray has asked it to."""


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A process on a node of the cluster."""

    pid: int
    node: str

    @classmethod
    def own(cls) -> "RayProcess":
        """The current process."""
        import ray

        return cls(os.getpid(), ray.get_runtime_context().get_node_id())

    def end(self) -> None:
        """Wait for the process to exit, and kill it if it does not.

        On another node, a task does this, and is not waited for.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.node == ray.get_runtime_context().get_node_id():
            _end(self.pid)
            return
        there = NodeAffinitySchedulingStrategy(self.node, soft=False)
        remote: Any = ray.remote
        task = remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_end)
        task.remote(self.pid)  # if the node is gone, so is the process


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The working folder and network that a process of Ray takes over from the controller."""

    folder: Path
    spans_machines: bool

    @staticmethod
    def own() -> "Surroundings":
        """Those of the controller, in whose process this is called."""
        return Surroundings(Path.cwd(), machines_of_cluster() is not None)

    def settle(self) -> None:
        """Go to the controller's folder, where this machine has it: relative paths of a config then
        mean the same. If there are other machines, choose the network on which to meet them: NCCL
        never changes its own once it has one.
        """
        with suppress(OSError):
            os.chdir(self.folder)
        if self.spans_machines:
            meet_other_machines()


async def end(actor: Any, process: RayProcess | None) -> None:
    """Have Ray kill an actor, and make sure that its process, if known, ends."""
    import ray

    if not ray.is_initialized():
        return
    ray.kill(actor, no_restart=True)
    if process is not None:
        await run_to_completion(asyncio.to_thread(process.end))


def _end(pid: int) -> None:
    with suppress(OSError):  # it is gone
        process = os.pidfd_open(pid)
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                return  # another process has this id now
            exited = select.poll()
            exited.register(process, select.POLLIN)
            if not exited.poll(_EXIT_SECONDS * 1000):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
