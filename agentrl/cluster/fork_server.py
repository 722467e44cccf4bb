"""Processes that are forked from one that has imported what they need.

Importing transformers and torch takes ten CPU-seconds and more. A fork server imports them once,
and each process that is forked from it begins with them, and shares their memory. The server starts
nothing else: it has one thread of Python and no event loop, so it can be forked at any time.
"""

import io
import os
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from typing import Any


@cache  # one server for the life of this process, which ends it
def forking_context(imports: Sequence[str]) -> "ForkingContext":
    """A context of multiprocessing whose processes have imported these modules when they begin."""
    return ForkingContext(imports)


class ForkingContext(ForkServerContext):
    """Forks processes from a server of its own: that of the standard library is one for the whole
    process, and rules are forked from it, with what they import.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        super().__init__()
        server = ForkServer()
        server.set_forkserver_preload(["agentrl.cluster.heed_no_stop", *imports])
        self._server = server

    def Process(self, *args: Any, **kwargs: Any) -> "_Process":  # type: ignore[override]
        """A process that is not started yet: multiprocessing's name, and its arguments."""
        process = _Process(*args, **kwargs)
        process.server = self._server
        return process

    def begin(self) -> None:
        """Start the server, which begins to import. Does not wait for it."""
        self._server.ensure_running()


def leave_server() -> None:
    """In a process that was forked: no longer keep its server alive, which then ends with the
    process that started it, although this one lives.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class _Process(ForkServerProcess):
    """A process of a server, which stays here when it is sent there."""

    server: ForkServer | None = None

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        assert isinstance(process_obj, _Process)
        assert process_obj.server is not None
        return _Popen(process_obj.server, process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}


class _Popen(popen_forkserver.Popen):
    """A process that is forked from this server."""

    def __init__(self, server: ForkServer, process_obj: BaseProcess) -> None:
        self._server = server
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        """The method of the standard library, with this server."""
        pickled = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), pickled)
            reduction.dump(process_obj, pickled)
        finally:
            set_spawning_popen(None)
        descriptors: Sequence[int] = self._fds  # type: ignore[attr-defined]
        self.sentinel, writable = self._server.connect_to_new_process(descriptors)
        # The process sees by this copy whether its parent lives.
        parent = os.dup(writable)
        self.finalizer = util.Finalize(self, _close, (parent, self.sentinel))
        with open(writable, "wb", closefd=True) as pipe:
            pipe.write(pickled.getbuffer())
        self.pid = read_signed(self.sentinel)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
