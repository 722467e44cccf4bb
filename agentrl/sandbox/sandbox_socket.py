"""A socket of the file system on which a server of this process answers a sandbox.

Each has a folder of its own, which the sandbox is shown. All are in one folder that is named by the
process, so that the next run finds those of processes that have ended.
"""

import os
import shutil
import socket
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.sandbox.owner import is_dead, this_process

NAME = "server.sock"
"""Its name in its folder."""
_PREFIX = "agentrl-sockets-"


class SandboxSocket:
    """A listening socket, for any user of the sandbox, and for no other one of this machine.

    Raises:
        SandboxError: another user has taken its place.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir(), _PREFIX + this_process().replace("/", "+"))
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.stat(follow_symlinks=False).st_uid != os.geteuid():
            raise SandboxError(f"{str(parent)!r} belongs to another user")
        self.folder = parent / uuid.uuid4().hex
        """What the sandbox is shown."""
        self.folder.mkdir()
        self.folder.chmod(0o755)
        self.listener = socket.socket(socket.AF_UNIX)
        inside = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # An address has at most 107 bytes, and folders of temporary files can be deep.
            self.listener.bind(f"/proc/self/fd/{inside}/{NAME}")
        finally:
            os.close(inside)
        (self.folder / NAME).chmod(0o666)
        self.listener.listen(128)

    def close(self) -> None:
        """Close it, and remove its folder."""
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # there are others
            self.folder.parent.rmdir()


def remove_dead_sockets() -> None:
    """Remove what processes have left that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if is_dead(folder.name.removeprefix(_PREFIX).replace("+", "/")):
            shutil.rmtree(folder, ignore_errors=True)
