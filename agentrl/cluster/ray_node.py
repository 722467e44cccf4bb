"""Ray's node on this machine, through which the controller reaches all workers.

If its raylet dies, calls to actors may wait for ever; if Ray's head is gone, Ray ends this process
after a minute, without a word of agentrl's. So both are watched, and end the run with a sentence.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from agentrl.errors import AgentRLError, NodeDiedError
from agentrl.flow import Flow, PeriodicThread

RESUME = "resume with `agentrl train --resume RUN`"
"""What a user can do about it."""
_SOCKETS = Path("/proc/net/unix")
"""Linux: the sockets of this machine. Elsewhere only Ray's head tells."""
_LOOK_SECONDS = 0.5
_ASK_SECONDS = 1.0
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
        raise _death_error(why) from error


async def _watch(death: Callable[[], str | None]) -> None:
    while True:
        if (why := death()) is not None:
            raise _death_error(why)
        await asyncio.sleep(_LOOK_SECONDS)


def _death_error(why: str) -> NodeDiedError:
    return NodeDiedError(f"Ray's node died; {RESUME}: {why}")


class RayNode:
    """The node of Ray that this process has joined. A context manager: inside, a daemon thread asks
    Ray's head about it, since such a question cannot be cancelled.

    `nodes` lists the nodes as `ray.nodes` does, or returns None if the head did not answer; `own`
    is the id of this one.
    """

    def __init__(self, nodes: Callable[[], list[dict[str, Any]] | None], own: str) -> None:
        self._nodes = nodes
        self._own = own
        self._address = ""
        self._alive = True
        self._answers = 0
        self._seen = 0
        self._looks = 0
        self._thread = PeriodicThread(self._ask, name="ray-node")

    @staticmethod
    def joined() -> "RayNode":
        """That of this process."""
        import ray

        def nodes() -> list[dict[str, Any]] | None:
            all_nodes: Any = ray.nodes  # it has no types
            try:
                found: list[dict[str, Any]] = all_nodes()
            except (ray.exceptions.RayError, RuntimeError):
                return None
            return found

        return RayNode(nodes, ray.get_runtime_context().get_node_id())

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.end()

    def death(self) -> str | None:
        """How it died; None if it lives. It is asked every `_LOOK_SECONDS`.

        The silence of Ray's head is counted in such questions, and not by a clock: when this
        process was stopped, or its event loop blocked, the head is not to blame.
        """
        if self._address and not _listens(self._address):
            return "its raylet on this machine has ended, and with it the workers that it started"
        if not self._alive:
            return "Ray has given up this machine, which did not answer for some time"
        self._looks = self._looks + 1 if self._answers == self._seen else 0
        self._seen = self._answers
        if self._looks * _LOOK_SECONDS > _HEAD_SECONDS:
            return f"Ray's head (its process gcs_server) has not answered for {_HEAD_SECONDS:g} s"
        return None

    def _ask(self) -> float:
        nodes = self._nodes()
        if nodes is not None:
            own = [node for node in nodes if node["NodeID"] == self._own]
            self._answers += 1
            self._alive = any(node["Alive"] for node in own)
            if not self._address and own and _listens(own[0]["RayletSocketName"]):
                self._address = own[0]["RayletSocketName"]
        return _ASK_SECONDS


def _listens(address: str) -> bool:
    """True if a process of this machine has the socket open. To connect to it would make it log
    that.
    """
    if not _SOCKETS.exists():
        return False
    return any(line.endswith(f" {address}") for line in _SOCKETS.read_text().splitlines())
