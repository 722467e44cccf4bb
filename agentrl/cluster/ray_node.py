"""Ray's node on this machine, through which the controller reaches all workers.

If its raylet dies, calls to actors may wait for ever; if Ray's head is gone, Ray ends this process
after a minute, without a word of agentrl's. So both are watched, and end the run with a sentence.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, NodeDiedError
from agentrl.flow import Flow

RESUME = "resume with `agentrl train --resume RUN`"
"""What a user can do about it."""
_SOCKETS = Path("/proc/net/unix")
"""Linux: the sockets of this machine. Elsewhere only Ray's head tells."""
_LOOK_SECONDS = 0.5
_HEAD_SECONDS = 20.0
"""How long Ray's head may not answer. Ray gives it a minute, and then ends this process."""


@asynccontextmanager
async def watched(death: Callable[[], str | None]) -> AsyncIterator[None]:
    """While the block lasts, look whether the node died. `death` returns how, or None if it lives.

    Raises:
        NodeDiedError: it did. Errors of the block that came with it are its cause.
    """
    try:
        async with Flow("ray") as flow:
            flow.start(_watch(death), name="node")
            yield
            flow.cancel()
    except (AgentRLError, BaseExceptionGroup) as error:
        if isinstance(error, NodeDiedError) or (why := death()) is None:
            raise
        raise _died(why) from error


async def _watch(death: Callable[[], str | None]) -> None:
    while True:
        if (why := death()) is not None:
            raise _died(why)
        await asyncio.sleep(_LOOK_SECONDS)


def _died(why: str) -> NodeDiedError:
    return NodeDiedError(f"Ray's node died; {RESUME}: {why}")


class RayNode:
    """The node of Ray that this process has joined. A daemon thread asks Ray's head about it, since
    such a question cannot be cancelled.
    """

    def __init__(self) -> None:
        import ray

        self._id = ray.get_runtime_context().get_node_id()
        self._address = ""
        self._alive = True
        self._answered = time.monotonic()
        threading.Thread(target=self._ask, name="ray-node", daemon=True).start()

    def death(self) -> str | None:
        """How it died; None if it lives."""
        if self._address and not _listens(self._address):
            return "its raylet on this machine has ended, and with it the workers that it started"
        if not self._alive:
            return "Ray has given up this machine, which did not answer for some time"
        silent = time.monotonic() - self._answered
        if silent > _HEAD_SECONDS:
            return f"Ray's head (its process gcs_server) has not answered for {silent:.0f} s"
        return None

    def _ask(self) -> None:
        import ray

        all_nodes: Any = ray.nodes  # it has no types
        pause = threading.Event()
        while ray.is_initialized():
            try:
                own = [node for node in all_nodes() if node["NodeID"] == self._id]
            except (ray.exceptions.RayError, RuntimeError):
                pass  # the head did not answer, which `death` counts
            else:
                self._answered = time.monotonic()
                self._alive = any(node["Alive"] for node in own)
                if not self._address and own and _listens(own[0]["RayletSocketName"]):
                    self._address = own[0]["RayletSocketName"]
            pause.wait(1.0)


def _listens(address: str) -> bool:
    """Whether a process of this machine has the socket open. To connect to it would make it log that."""
    if not _SOCKETS.exists():
        return False
    return any(line.endswith(f" {address}") for line in _SOCKETS.read_text().splitlines())
