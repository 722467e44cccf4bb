"""Sandboxes: machines of their own, in which an episode runs commands and has files.

A provider starts sandboxes. What fails in one is either a result of the command, which is a value
(`Executed`), or a failure of what the sandbox stands on, which raises `SandboxError`: that says
nothing about the command, so it becomes an episode's failure, and never a reward.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agentrl.protocols.offers import Offers

Network = Literal["none", "open"]
"""What a sandbox reaches: nothing, not even its host; or whatever the provider's host reaches."""
EndedBy = Literal["itself", "deadline", "cpu", "memory", "processes", "disk"]
"""Why a command ended: by itself, or because it used up a limit."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the provider has, or can pull, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A folder with a `Dockerfile`, from which an image is built once for all its sandboxes."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder whose files are copied into the working folder, in the provider's own image."""

    path: Path


@dataclass(frozen=True, slots=True)
class SandboxSnapshot:
    """The files of a sandbox at a moment, kept by its provider until it is removed there."""

    name: str
    """Known to the provider only."""
    folder: str
    """The working folder of the sandbox."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The most that all processes of a sandbox may use together."""

    memory: int = 1 << 30
    """Bytes."""
    cpus: float = 1.0
    """CPUs, of which a part is a share of the time of one."""
    processes: int = 256
    """Processes and threads at a time."""
    disk: int = 1 << 30
    """Bytes of files (see the provider's `SandboxOffers.limits_disk`); also of each single file."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to start."""

    origin: Image | Dockerfile | Folder | SandboxSnapshot | None = None
    """Where its files come from; None for an empty working folder in the provider's own image."""
    resources: Resources = Resources()
    """Its limits."""
    network: Network = "none"
    """What it reaches."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all commands, beside those of the image."""
    folder: str = ""
    """The working folder, an absolute path; by default the image's, or the provider's."""
    user: str = ""
    """The user of commands and files; by default the image's, or the provider's."""
    port: int = 0
    """A port of its own 127.0.0.1 at which its commands reach `Sandbox.listener`, whatever its
    network; 0 for none."""
    lease: float = 3600.0
    """Seconds after its start at which it ends by itself, whatever has become of the run."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run in a sandbox."""

    argv: Sequence[str]
    """The program and its arguments; `shell` makes those of a line for the shell."""
    stdin: bytes = b""
    """Its input."""
    deadline: float = 60.0
    """Seconds until it is killed."""
    output: int = 64 << 10
    """Bytes that are kept of each of stdout and stderr: the beginning and the end. What is cut
    out in between is replaced by a notice, and the command goes on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the sandbox."""
    folder: str = ""
    """Where it runs; a relative path begins at the working folder, which is the default."""
    user: str = ""
    """Who runs it; by default the user of the sandbox."""


def shell(line: str) -> Sequence[str]:
    """The arguments that make a shell run a line."""
    return ("/bin/sh", "-c", line)


@dataclass(frozen=True, slots=True)
class Executed:
    """A command has ended."""

    exit: int
    """Its exit status; 128 and the signal, as shells count, where one has killed it."""
    stdout: str
    """What it wrote, cut at the command's limit."""
    stderr: str
    """Its messages, cut likewise."""
    ended_by: EndedBy = "itself"
    """Why it ended."""
    seconds: float = 0.0
    """Wall time."""


class Sandbox(Protocol):
    """A machine of its own. Calls may run at the same time.

    Every method but `close` raises `SandboxError` where the sandbox is lost, closed, or cannot
    answer. Paths are those inside; a relative one begins at the working folder.
    """

    @property
    def folder(self) -> str:
        """The working folder, an absolute path."""
        ...

    @property
    def listener(self) -> socket.socket | None:
        """The listening socket behind `SandboxSpec.port`, on which a server of this process accepts
        what connects to that port inside; None without a port. It is closed with the sandbox.
        """
        ...

    async def run(self, command: Command) -> Executed:
        """Run a command to its end or its deadline. What it leaves in the background ends with the
        sandbox, or with the command (`SandboxOffers.keeps_processes`).
        """
        ...

    async def read(self, path: str, most: int = 1 << 20) -> bytes:
        """The content of a file.

        Raises:
            OSError: there is no such file, it cannot be read, or has more than `most` bytes.
        """
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Replace the content of a file, after making its folders.

        Raises:
            OSError: it cannot be written.
        """
        ...

    async def upload(self, archive: bytes, folder: str = ".") -> None:
        """Unpack a tar into a folder, which is made where it is missing. Nothing is written
        elsewhere, whatever the archive says.

        Raises:
            OSError: its files cannot be written.
            ValueError: the archive names a path outside of the folder, or is none.
        """
        ...

    async def download(self, folder: str = ".", most: int = 32 << 20) -> bytes:
        """A tar of a folder's files. It may hold anything, such as links that lead out of the
        folder: unpack it as `upload` does (`agentrl.sandbox.archive`).

        Raises:
            OSError: there is no such folder, or the archive has more than `most` bytes.
        """
        ...

    async def snapshot(self) -> SandboxSnapshot:
        """Keep its files as they are now; `SandboxSpec.origin` starts from them again."""
        ...

    async def close(self) -> None:
        """End every process in it, and remove its files. May be repeated, and is not interrupted
        by a failure.
        """
        ...


@dataclass(frozen=True, slots=True)
class SandboxOffers(Offers):
    """What a provider can do beyond folders and commands."""

    images: bool = False
    """True if it starts from images and Dockerfiles."""
    networks: tuple[Network, ...] = ("none",)
    """What its sandboxes can reach."""
    users: bool = False
    """True if commands can have users of their own."""
    keeps_processes: bool = False
    """True if what a command leaves in the background goes on after it."""
    limits_disk: bool = False
    """True if `Resources.disk` limits all files together."""
    serves_port: bool = False
    """True if a server of this process can answer at a port inside (`SandboxSpec.port`)."""
    root: str = ""
    """The folder in which all files of a sandbox are, where it has no images."""


class SandboxProvider(Protocol):
    """Starts sandboxes. Made by `await Provider.open(settings)`, which ends what dead runs have
    left behind on the machine (`agentrl.sandboxes` in the entry points).
    """

    @property
    def offers(self) -> SandboxOffers:
        """What it can do."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox.

        Raises:
            ConfigError: this provider cannot do what `spec` asks for; says what it can.
            SandboxError: it did not start.
        """
        ...

    async def remove(self, snapshot: SandboxSnapshot) -> None:
        """Remove a snapshot; nothing happens if it is gone."""
        ...

    async def close(self) -> None:
        """Close every sandbox, and remove every snapshot and image that this provider has made."""
        ...
