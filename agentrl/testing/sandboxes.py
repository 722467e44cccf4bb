"""A provider of sandboxes in memory, for tests of environments: it runs under the virtual clock."""

import asyncio
import posixpath
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agentrl.errors import ConfigError, SandboxError
from agentrl.flow import now
from agentrl.protocols import Command, Executed, Folder, SandboxOffers, SandboxSnapshot, SandboxSpec
from agentrl.sandbox.archive import archive_of, archive_of_folder, files_of
from agentrl.sandbox.cut_output import CutOutput
from agentrl.settings.base import Settings

Answer = Callable[[Command, dict[str, bytes]], Executed | None]
"""The result of a command, given the files by their absolute paths, which it may change; None for
what the fake shell makes of it."""


class FakeSandboxes:
    """A `SandboxProvider` whose sandboxes are mappings of paths to contents.

    Their shell knows `echo`, `cat`, `pwd`, `printenv`, `sleep`, `true`, `false`, `exit`,
    `head -c N /dev/zero`, `;`, and what `echo` writes with `>` and `>&2`. `fail_next` makes calls
    fail as if the sandbox were lost.
    """

    class Config(Settings):
        """It has no settings."""

    offers = SandboxOffers(limits_disk=False)

    def __init__(
        self,
        settings: Config = Config(),  # noqa: B008
        answer: Answer | None = None,
    ) -> None:
        self.answer = answer
        self.live: list[FakeSandbox] = []
        """The sandboxes that are not closed."""
        self.started = 0
        self._snapshots: dict[str, dict[str, bytes]] = {}
        self._failures = 0

    @classmethod
    async def open(cls, settings: Config) -> "FakeSandboxes":
        """See `SandboxProvider`."""
        return cls(settings)

    def fail_next(self, calls: int = 1) -> None:
        """Raise `SandboxError` in so many of the next calls."""
        self._failures += calls

    async def start(self, spec: SandboxSpec) -> "FakeSandbox":
        """See `SandboxProvider`."""
        self.may_fail("start")
        if spec.port:
            raise ConfigError("the fake sandbox has no port that is served from outside")
        sandbox = FakeSandbox(self, spec)
        match spec.origin:
            case Folder(path=path):
                await sandbox.upload(archive_of_folder(path))
            case SandboxSnapshot(name=name):
                sandbox.files = dict(self._snapshots[name])
        self.started += 1
        self.live.append(sandbox)
        return sandbox

    async def remove(self, snapshot: SandboxSnapshot) -> None:
        """See `SandboxProvider`."""
        self._snapshots.pop(snapshot.name, None)

    async def close(self) -> None:
        """See `SandboxProvider`."""
        for sandbox in list(self.live):
            await sandbox.close()
        self._snapshots.clear()

    def keep(self, files: Mapping[str, bytes], folder: str) -> SandboxSnapshot:
        """Keep the files of a sandbox."""
        name = f"snapshot-{len(self._snapshots)}"
        self._snapshots[name] = dict(files)
        return SandboxSnapshot(name, folder)

    def may_fail(self, what: str) -> None:
        """Raise the failure that was asked for."""
        if self._failures:
            self._failures -= 1
            raise SandboxError(f"the fake sandbox was told to fail: {what}")


class FakeSandbox:
    """A `Sandbox` in memory."""

    listener = None

    def __init__(self, provider: FakeSandboxes, spec: SandboxSpec) -> None:
        self.folder = spec.folder or "/work"
        self.files: dict[str, bytes] = {}
        self._provider, self._spec = provider, spec
        self._closed = False

    async def run(self, command: Command) -> Executed:
        """See `Sandbox`."""
        self._check("run")
        command = replace(command, folder=self._path(command.folder))
        own = self._provider.answer
        if own is not None and (answer := own(command, self.files)) is not None:
            return answer
        began = now()
        shell = _Shell(self, command, {**self._spec.environment, **command.environment})
        try:
            async with asyncio.timeout(command.deadline):
                status = await shell.run()
        except TimeoutError:
            # It may have been closed, or told to fail, while the command ran.
            self._check("run")
            return shell.executed(137, now() - began, late=True)
        self._check("run")
        return shell.executed(status, now() - began)

    async def read(self, path: str, most: int = 1 << 20) -> bytes:
        """See `Sandbox`."""
        self._check("read")
        if self._path(path) not in self.files:
            raise FileNotFoundError(f"{path!r} does not exist")
        content = self.files[self._path(path)]
        if len(content) > most:
            raise OSError(f"{path!r} has more than {most} bytes")
        return content

    async def write(self, path: str, content: bytes) -> None:
        """See `Sandbox`."""
        self._check("write")
        self.files[self._path(path)] = content

    async def upload(self, archive: bytes, folder: str = ".") -> None:
        """See `Sandbox`."""
        self._check("upload")
        for name, content in files_of(archive).items():
            self.files[self._path(posixpath.join(folder, name))] = content

    async def download(self, folder: str = ".", most: int = 32 << 20) -> bytes:
        """See `Sandbox`."""
        self._check("download")
        below = f"{self._path(folder)}/"
        inside = {path.removeprefix(below): content for path, content in self.files.items()
                  if path.startswith(below)}  # fmt: skip
        if not inside and self._path(folder) != self.folder:
            raise FileNotFoundError(f"{folder!r} does not exist")
        archive = archive_of(inside)
        if len(archive) > most:
            raise OSError(f"{folder!r} has more than {most} bytes")
        return archive

    async def snapshot(self) -> SandboxSnapshot:
        """See `Sandbox`."""
        self._check("snapshot")
        return self._provider.keep(self.files, self.folder)

    async def close(self) -> None:
        """See `Sandbox`."""
        self._closed = True
        if self in self._provider.live:
            self._provider.live.remove(self)

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, path))

    def _check(self, what: str) -> None:
        self._provider.may_fail(what)
        if self._closed:
            raise SandboxError("the sandbox is closed")


@dataclass
class _Shell:
    """One command line of the fake shell."""

    sandbox: FakeSandbox
    command: Command
    environment: Mapping[str, str]
    out: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)

    async def run(self) -> int:
        """Run it, and return its exit status."""
        argv = list(self.command.argv)
        lines = argv[2].split(";") if argv[:2] == ["/bin/sh", "-c"] else [shlex.join(argv)]
        status = 0
        for line in lines:
            words = shlex.split(line)
            if words[:1] == ["exit"]:
                return int(words[1])
            status = await self._run_program(words) if words else status
        return status

    async def _run_program(self, words: list[str]) -> int:
        """Run one of the programs that the fake shell knows, and return its exit status."""
        match words:
            case ["echo", *rest]:
                self._echo(rest)
            case ["cat"]:
                self.out += self.command.stdin
            case ["cat", path]:
                content = self.sandbox.files.get(posixpath.join(self.command.folder, path))
                if content is None:
                    self.errors += f"cat: {path}: No such file or directory\n".encode()
                    return 1
                self.out += content
            case ["pwd"]:
                self.out += f"{self.command.folder}\n".encode()
            case ["printenv", name]:
                self.out += f"{self.environment.get(name, '')}\n".encode()
                return int(name not in self.environment)
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
            case ["head", "-c", size, "/dev/zero"]:
                self.out += bytes(int(size))
            case ["true"] | ["false"]:
                return int(words == ["false"])
            case _:
                self.errors += f"sh: {words[0]}: not found\n".encode()
                return 127
        return 0

    def _echo(self, words: list[str]) -> None:
        match words:
            case [*rest, ">&2"]:
                self.errors += f"{' '.join(rest)}\n".encode()
            case [*rest, ">", path]:
                path = posixpath.join(self.command.folder, path)
                self.sandbox.files[path] = f"{' '.join(rest)}\n".encode()
            case _:
                self.out += f"{' '.join(words)}\n".encode()

    def executed(self, status: int, seconds: float, late: bool = False) -> Executed:
        """What has become of it."""
        texts = []
        for written in (self.out, self.errors):
            output = CutOutput(self.command.output)
            output.add(bytes(written))
            texts.append(output.kept().text())
        stdout, stderr = texts
        return Executed(status, stdout, stderr, "deadline" if late else "itself", seconds)
