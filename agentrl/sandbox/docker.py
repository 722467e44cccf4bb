"""Sandboxes that are containers of a Docker engine, or of Podman, which speaks the same API.

    run -- API over a socket or TCP --> engine -- starts --> container: its first process waits for
                                                             the end of the lease
                                               -- exec ----> one process tree for each command

A container removes itself when its first process ends. That one waits until the lease is over, and
no command can end it: the kernel protects the first process from those of its own namespace. What
a killed run leaves behind thus ends by itself, and sooner if another run starts on that machine:
containers and images carry the process that they belong to as a label.
"""

import asyncio
import hashlib
import io
import json
import logging
import math
import os
import tarfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from pydantic import Field

from agentrl.errors import ConfigError, SandboxError, SandboxOutageError
from agentrl.flow import Flow, run_to_completion
from agentrl.protocols import (
    Command,
    Dockerfile,
    EndedBy,
    Folder,
    Image,
    Resources,
    SandboxOffers,
    SandboxSnapshot,
    SandboxSpec,
)
from agentrl.sandbox.archive import archive_of_folder
from agentrl.sandbox.by_commands import CommandSandbox, Output
from agentrl.sandbox.cut_output import CutOutput
from agentrl.sandbox.owner import is_dead, this_process
from agentrl.sandbox.sandbox_socket import NAME, SandboxSocket, remove_dead_sockets
from agentrl.settings.base import Settings

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.stream import Stream

logger = logging.getLogger(__name__)

_AWAY_STATUSES = (503, 900)
"""503: the engine is not ready. 900 is aiodocker's, where it cannot connect."""
_OWNER, _PROVIDER = "agentrl.owner", "agentrl.provider"
_FOLDER = "/work"
"""The working folder where an image has none."""
_REMOVED_SECONDS = 60.0
"""Seconds within which a container must be gone."""
_KILLED, _NOT_FOUND, _NOT_STARTED = 137, 127, 126
_FORWARDER = Path(__file__).with_name("forwarder.py").read_text()
_ROOT_USERS = {"", "0", "root", "0:0", "root:root"}
_PIECE_BYTES = 1 << 16
_LONGEST_GROUP = 32  # characters of the number of a process group
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
_COUNT_KILLS = (
    "cd /sys/fs/cgroup; cat memory.events memory/memory.oom_control 2> /dev/null"
    " | grep '^oom_kill '"
)
_FIRST_PROCESS = (
    'end=$(($(date +%s) + {lease})); while [ "$(date +%s)" -lt "$end" ]; do'
    ' sleep $((end - $(date +%s))) & wait "$!"; done'
)
"""Waits for the end of the lease again if a command kills its `sleep`, and reaps what is orphaned.
"""
_COMMAND = 'echo "$$"; cd "$1" || exit 126; shift; exec "$@"'
_COMMAND_WITH_INPUT = (
    'echo "$$"; cd "$1" || exit 126; shift; size="$1"; shift; head -c "$size" | "$@"'
)
"""The API has no way to say that an input has ended, so its size is said before it. The first line
of the output is the process group that a deadline kills; without it, no command has started."""
_SOCKET_FOLDER = "/run/agentrl"
"""Where a container finds the socket of a server outside."""
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What root may do in a container, so that it can install packages and change owners."""


class DockerSandboxes:
    """A `SandboxProvider`: containers of a Docker engine."""

    class Config(Settings):
        """Settings of `sandbox: {name: docker}`."""

        host: str = ""
        """Where the engine listens: `unix:///run/docker.sock`, `tcp://machine:2375`. By default
        the variable DOCKER_HOST, else the engine's or Podman's usual socket."""
        image: str = ""
        """The image of tasks that name none."""
        keep_images: bool = False
        """Keep the images that were built from Dockerfiles, so that the next run does not build
        them again."""
        seconds: float = Field(120.0, gt=0)
        """Seconds in which the engine must answer; a build has ten times as many."""
        runtime: str = ""
        """The container runtime, if not the engine's default: `runsc` for gVisor."""

        def needs(self) -> Mapping[str, str]:
            """The client of the engine's API."""
            return {"aiodocker": 'pip install "agentrl-train[docker]"'}

    offers = SandboxOffers(
        images=True,
        networks=("none", "open"),
        users=True,
        keeps_processes=True,
        limits_disk=False,
        serves_port=True,
    )

    def __init__(self, settings: Config, client: "Docker") -> None:
        self.settings = settings
        self.client = client
        self.labels = {_OWNER: this_process(), _PROVIDER: uuid.uuid4().hex}
        """The labels of all that this provider makes."""
        self._building: dict[str, asyncio.Lock] = {}
        self._served: set[SandboxSocket] = set()
        self._closed = False

    @classmethod
    async def open(cls, settings: Config) -> Self:
        """Connect to the engine, and remove what dead runs have left there.

        Raises:
            ConfigError: no engine answers.
        """
        provider = cls(settings, _connect(settings))
        try:
            async with provider.calling("reach the Docker engine"):
                await provider.client.version()
                await provider._reap()
            await asyncio.to_thread(remove_dead_sockets)
        except SandboxError as error:
            await _disconnect(provider.client)
            raise ConfigError(
                f"{error}. Start one and say where it listens: sandbox.host, or the variable"
                " DOCKER_HOST (docs/sandboxes.md)"
            ) from error
        except BaseException:
            await _disconnect(provider.client)
            raise
        return provider

    async def start(self, spec: SandboxSpec) -> "DockerSandbox":
        """See `SandboxProvider`."""
        self._check_open()
        image = await self._choose_image(spec)
        config = await self._image_config(image)
        folder = spec.folder or config.get("WorkingDir") or _FOLDER
        user = spec.user or config.get("User") or ""
        name = f"agentrl-{uuid.uuid4().hex}"
        served = self.served_socket() if spec.port else None
        try:
            # Not interrupted: the engine would create the container after `discard` has found none.
            container = await run_to_completion(self._create(name, spec, image, folder, served))
        except BaseException:
            await self.discard(name)
            self.end_serving(served)
            raise
        sandbox = DockerSandbox(self, container, spec.resources, folder, user, served=served)
        try:
            if spec.port:
                await sandbox.forward(spec.port)
            if user not in _ROOT_USERS:
                await sandbox.give_folder()
            if isinstance(spec.origin, Folder):
                await sandbox.upload(await asyncio.to_thread(archive_of_folder, spec.origin.path))
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def served_socket(self) -> SandboxSocket:
        """A socket that a container can be shown.

        Raises:
            ConfigError: the engine may be on another machine.
        """
        if not str(self.client.docker_host).startswith("unix://"):
            raise ConfigError(
                f"the engine at {self.client.docker_host} may be on another machine, where"
                " containers cannot reach a socket of this one: use an engine that listens on a"
                " socket here (sandbox.host=unix:///run/docker.sock)"
            )
        served = SandboxSocket()
        self._served.add(served)
        return served

    def end_serving(self, served: SandboxSocket | None) -> None:
        """Close the socket of a container, if it has one."""
        if served is not None:
            served.close()
            self._served.discard(served)

    async def _create(
        self, name: str, spec: SandboxSpec, image: str, folder: str, served: SandboxSocket | None
    ) -> "DockerContainer":
        config = self._container_config(spec, image, folder)
        if served is not None:
            config["HostConfig"]["Binds"] = [f"{served.folder}:{_SOCKET_FOLDER}:ro"]
        async with self.calling("start a container"):
            container = await self.client.containers.create(config, name=name)
            await container.start()
            return container

    async def remove(self, snapshot: SandboxSnapshot) -> None:
        """See `SandboxProvider`."""
        with suppress(SandboxError):
            await self._remove_image(snapshot.name)

    async def close(self) -> None:
        """See `SandboxProvider`."""
        if self._closed:
            return
        self._closed = True
        try:
            async with self.calling("close the sandboxes"):
                ours = f"{_PROVIDER}={self.labels[_PROVIDER]}"
                await self._remove_all(ours)
        except SandboxError as error:
            logger.warning("containers may be left until their leases end: %s", error)
        finally:
            for served in list(self._served):
                self.end_serving(served)
            await _disconnect(self.client)

    async def discard(self, name: str) -> None:
        """Remove a container, and wait until it is gone; a failure is logged."""
        from aiodocker.exceptions import DockerError

        container = self.client.containers.container(name)
        try:
            async with asyncio.timeout(_REMOVED_SECONDS):
                while True:
                    try:
                        await container.delete(force=True, v=True)
                    except DockerError as error:
                        if error.status == 404:
                            return
                    await asyncio.sleep(0.05)  # it is being removed
        except (aiohttp.ClientError, OSError) as error:
            logger.warning("container %s is left until its lease ends: %r", name, error)

    @asynccontextmanager
    async def calling(self, what: str) -> AsyncIterator[None]:
        """One call of the engine, with a deadline; see `translated`."""
        with translated(what):
            async with asyncio.timeout(self.settings.seconds):
                yield

    def _container_config(self, spec: SandboxSpec, image: str, folder: str) -> dict[str, Any]:
        limits: Resources = spec.resources
        host: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": "none" if spec.network == "none" else "default",
            "Memory": limits.memory,
            "MemorySwap": limits.memory,
            "NanoCpus": int(limits.cpus * 1e9),
            "PidsLimit": limits.processes,
            "CapDrop": ["ALL"],
            "CapAdd": list(_CAPABILITIES),
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "none"},
            "Ulimits": [
                {"Name": "core", "Soft": 0, "Hard": 0},
                {"Name": "fsize", "Soft": limits.disk, "Hard": limits.disk},
            ],
        }
        if self.settings.runtime:
            host["Runtime"] = self.settings.runtime
        return {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", _FIRST_PROCESS.format(lease=math.ceil(spec.lease))],
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in spec.environment.items()],
            "User": "0",
            "WorkingDir": folder,
            "Labels": self.labels,
            "HostConfig": host,
        }

    async def _choose_image(self, spec: SandboxSpec) -> str:
        match spec.origin:
            case SandboxSnapshot(name=name) | Image(name=name):
                return name
            case Dockerfile():
                return await self._built_image(spec.origin)
        if not self.settings.image:
            raise ConfigError(
                "the task names no image, and there is no other: write an image or a Dockerfile"
                " into the task, or sandbox.image"
            )
        return self.settings.image

    async def _built_image(self, origin: Dockerfile) -> str:
        """The image of a Dockerfile and the files beside it, built if no equal one exists."""
        if not (origin.folder / "Dockerfile").is_file():
            raise ConfigError(f"there is no file {str(origin.folder / 'Dockerfile')!r}")
        context = await asyncio.to_thread(archive_of_folder, origin.folder)
        tag = f"agentrl-built:{await asyncio.to_thread(_digest, context)}"
        async with self._building.setdefault(tag, asyncio.Lock()):
            if not await self._has_image(tag):
                began = time.perf_counter()
                await self._build(tag, context)
                logger.info("built %s in %.1f s", origin.folder, time.perf_counter() - began)
        return tag

    async def _build(self, tag: str, context: bytes) -> None:
        with translated("build an image"):
            async with asyncio.timeout(10 * self.settings.seconds):
                await self.client.images.build(
                    fileobj=io.BytesIO(context),
                    encoding="identity",
                    tag=tag,
                    labels={} if self.settings.keep_images else self.labels,
                    rm=True,
                    forcerm=True,
                )

    async def _image_config(self, image: str) -> Mapping[str, Any]:
        """The configuration of an image, which is pulled if the engine lacks it."""
        if not await self._has_image(image):
            try:
                with translated(f"pull the image {image!r}"):
                    async with asyncio.timeout(10 * self.settings.seconds):
                        await self.client.images.pull(image)
            except SandboxError as error:
                raise SandboxError(f"the engine has no image {image!r}: {error}") from error
        async with self.calling("look at an image"):
            return (await self.client.images.inspect(image))["Config"] or {}

    async def _has_image(self, name: str) -> bool:
        from aiodocker.exceptions import DockerError

        async with self.calling("look for an image"):
            try:
                await self.client.images.inspect(name)
            except DockerError as error:
                if error.status != 404:
                    raise
                return False
        return True

    async def _remove_image(self, name: str) -> None:
        from aiodocker.exceptions import DockerError

        async with self.calling("remove an image"):
            try:
                await self.client.images.delete(name, force=True)
            except DockerError as error:
                if error.status not in {404, 409}:  # gone, or another image is based on it
                    raise

    async def _remove_all(self, label: str) -> None:
        """Remove the containers and then the images with a label."""
        for container in await self.client.containers.list(all=True, filters=_label_filter(label)):
            await self.discard(container.id)
        for image in await self.client.images.list(filters={"label": [label]}):
            await self._remove_image(str(image["Id"]))

    async def _reap(self) -> None:
        """Remove what belongs to processes that have ended."""
        owners = set()
        for container in await self.client.containers.list(all=True, filters=_label_filter(_OWNER)):
            owners.add(str(container["Labels"][_OWNER]))
        for image in await self.client.images.list(filters={"label": [_OWNER]}):
            owners.add(str(image["Labels"][_OWNER]))
        for owner in filter(is_dead, owners):
            logger.info("removing the sandboxes of a run that ended without closing them")
            await self._remove_all(f"{_OWNER}={owner}")

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the provider of sandboxes is closed")


class DockerSandbox(CommandSandbox):
    """A container."""

    def __init__(
        self,
        provider: DockerSandboxes,
        container: "DockerContainer",
        resources: Resources,
        folder: str,
        user: str,
        *,
        served: SandboxSocket | None,
    ) -> None:
        self.folder = folder
        self.listener = None if served is None else served.listener
        self._served = served
        self._provider, self._container = provider, container
        self._resources, self._user = resources, user
        self._kills = 0
        self._closed = False

    @property
    def container_id(self) -> str:
        """The id of the container."""
        return self._container.id

    async def give_folder(self) -> None:
        """Make the working folder that of the user."""
        line = ["chown", self._user, self.folder]
        output = await self._execute(Command(line, folder="/", user="0"))
        if output.exit:
            raise SandboxError(
                f"cannot give {self.folder!r} to {self._user!r}: {output.stderr.text()}"
            )

    async def forward(self, port: int) -> None:
        """Connect a port with the socket of the server outside.

        Raises:
            ConfigError: the image has no Python, or the container does not see the socket.
        """
        line = ["python3", "-c", _FORWARDER, f"{_SOCKET_FOLDER}/{NAME}", str(port)]
        output = await self._execute(Command(line, folder="/", user="0"))
        if output.exit == _NOT_FOUND:
            raise ConfigError(
                f"the image has no `python3`, which connects its port {port} with the server"
                " outside: install it in the image"
            )
        if output.exit or output.ended_by != "itself":
            raise ConfigError(
                f"port {port} of a container cannot be served from here:"
                f" {output.stderr.text().strip()[-500:] or output.ended_by}. The engine must run on"
                " this machine and see its folder of temporary files"
            )

    async def snapshot(self) -> SandboxSnapshot:
        """See `Sandbox`."""
        self._check_open()
        labels = [f'LABEL {name}="{value}"' for name, value in self._provider.labels.items()]
        user = [f"USER {self._user}"] if self._user else []
        made = await run_to_completion(self._commit([*labels, *user]))
        return SandboxSnapshot(str(made["Id"]), self.folder)

    async def _commit(self, changes: list[str]) -> Mapping[str, Any]:
        async with self._provider.calling("keep a container's files"):
            return await self._container.commit(changes=changes)

    async def close(self) -> None:
        """See `Sandbox`."""
        if not self._closed:
            self._closed = True
            await run_to_completion(self._provider.discard(self.container_id))
            self._provider.end_serving(self._served)

    async def _execute(self, command: Command) -> Output:
        self._check_open()
        running = _Running(command)
        began = time.perf_counter()
        async with self._provider.calling("start a command"):
            run = await self._container.exec(
                running.arguments,
                stdin=bool(command.stdin),
                user=command.user or self._user,
                environment=dict(command.environment),
            )
        ended_by: EndedBy = "itself"
        try:
            async with asyncio.timeout(command.deadline):
                with translated("follow a command"):
                    await running.run_to_end(run.start(timeout=_NO_TIMEOUT))
        except TimeoutError:
            ended_by = "deadline"
            await self._kill(running.group)
        status: int | None = _KILLED
        if ended_by == "itself":
            async with self._provider.calling("learn how a command ended"):
                status = (await run.inspect())["ExitCode"]
            if not running.group:
                ended_by, status = await self._find_exhausted_limit(running), _NOT_STARTED
            elif status in {None, _KILLED}:
                ended_by, status = await self._find_killer(), _KILLED
        return Output(
            status or 0,
            running.stdout.kept(),
            running.stderr.kept(),
            ended_by,
            time.perf_counter() - began,
        )

    async def _kill(self, group: str) -> None:
        """Kill a command and its children. Those that have left its group end with the sandbox."""
        if group:
            async with self._provider.calling("kill a command"):
                kill = await self._container.exec(["/bin/sh", "-c", f"kill -9 -{group}"], user="0")
                await kill.start(detach=True)

    async def _find_killer(self) -> EndedBy:
        """The limit by which a command was killed: memory if the kernel has killed since the last
        look, else its own signal.

        Raises:
            SandboxError: its container is not there any longer.
        """
        await self._check_running()
        counts = _Running(Command(["/bin/sh", "-c", _COUNT_KILLS]))
        with translated("count what the kernel has killed"):
            async with asyncio.timeout(self._provider.settings.seconds):
                run = await self._container.exec(counts.arguments, user="0")
                await counts.run_to_end(run.start(timeout=_NO_TIMEOUT))
        if not counts.group:  # it could not start: what killed the command has killed all
            return await self._find_exhausted_limit(counts)
        words = counts.stdout.kept().text().split()
        before, self._kills = self._kills, sum(map(int, filter(str.isdigit, words)))
        return "memory" if self._kills > before else "itself"

    async def _find_exhausted_limit(self, running: "_Running") -> EndedBy:
        """The limit that left no room for one more process.

        Raises:
            SandboxError: it was no limit.
        """
        await self._check_running()
        async with self._provider.calling("see what a container uses"):
            found = await self._container.stats(stream=False)
        if not found:  # it ended since
            raise SandboxError("the container ended while a command ran in it")
        stats = found[0]
        if stats["pids_stats"].get("current", 0) >= 0.9 * self._resources.processes:
            return "processes"
        if stats["memory_stats"].get("usage", 0) >= 0.9 * self._resources.memory:
            return "memory"
        said = f"{running.stdout.kept().text()} {running.stderr.kept().text()}".strip()
        raise SandboxError(f"a command did not start: {said[-500:]}")

    async def _check_running(self) -> None:
        from aiodocker.exceptions import DockerError

        async with self._provider.calling("look at a container"):
            try:
                running = (await self._container.show())["State"]["Running"]
            except DockerError as error:
                if error.status != 404:
                    raise
                running = False
        if not running:
            raise SandboxError("the container ended while a command ran in it")

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")


class _Running:
    """A running command: its input, and its output so far."""

    def __init__(self, command: Command) -> None:
        self._stdin = command.stdin
        script, sizes = _COMMAND, []
        if command.stdin:
            script, sizes = _COMMAND_WITH_INPUT, [str(len(command.stdin))]
        self.arguments = [
            "/bin/sh",
            "-c",
            script,
            "sh",
            command.folder or "/",
            *sizes,
            *command.argv,
        ]
        self.stdout, self.stderr = CutOutput(command.output), CutOutput(command.output)
        self.group = ""
        """The process group, once it is known."""
        self._begun = b""

    async def run_to_end(self, stream: "Stream") -> None:
        """Write its input and read its output until it has ended."""
        try:
            async with stream, Flow("command") as flow:
                if self._stdin:
                    flow.start(self._feed(stream), name="stdin")
                while (message := await stream.read_out()) is not None:
                    self._take_output(message.stream, message.data)
                flow.cancel()
        finally:
            with suppress(AssertionError):  # there is no connection left to close
                await stream.close()

    async def _feed(self, stream: "Stream") -> None:
        with suppress(ConnectionError, RuntimeError, AssertionError):  # it reads no further
            for at in range(0, len(self._stdin), _PIECE_BYTES):
                await stream.write_in(self._stdin[at : at + _PIECE_BYTES])

    def _take_output(self, stream: int, part: bytes) -> None:
        if stream == 1 and not self.group:
            # The first line is the process group (`_COMMAND`), and may come in several parts.
            line, newline, part = (self._begun + part).partition(b"\n")
            if not newline or not line.isdigit():
                # A container whose shell was replaced may never end the line.
                self._begun = (line + newline + part)[:_LONGEST_GROUP]
                return
            self.group = line.decode()
        (self.stderr if stream == 2 else self.stdout).add(part)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise errors of the engine and of the connection as `SandboxError`, or as
    `SandboxOutageError` if the engine is away.
    """
    from aiodocker.exceptions import DockerError

    try:
        yield
    # Its client asserts that there is a connection, where an engine has gone away.
    except (DockerError, aiohttp.ClientError, OSError, AssertionError) as error:
        kind = SandboxOutageError if _is_away(error) else SandboxError
        raise kind(f"could not {what}: {type(error).__name__}: {error}") from error


def _is_away(error: Exception) -> bool:
    """True if the engine does not listen, or ended the connection. After a missed deadline, it may
    only be slow.
    """
    from aiodocker.exceptions import DockerError

    if isinstance(error, TimeoutError):
        return False
    if isinstance(error, DockerError | aiohttp.ClientResponseError):
        return error.status in _AWAY_STATUSES
    return isinstance(error, aiohttp.ClientConnectionError | OSError | AssertionError)


def _connect(settings: DockerSandboxes.Config) -> "Docker":
    """The client of the engine. Each command that runs has a connection, so there is no limit."""
    from aiodocker import Docker

    host = settings.host or os.environ.get("DOCKER_HOST", "")
    if not host:
        host = next((f"unix://{path}" for path in _sockets() if path.is_socket()), "")
    if host.startswith("unix://"):
        connector = aiohttp.UnixConnector(host.removeprefix("unix://"), limit=0)
        return Docker("unix://localhost", connector=connector)
    if host.startswith("tcp://") and not os.environ.get("DOCKER_TLS_VERIFY"):
        return Docker(host, connector=aiohttp.TCPConnector(limit=0))
    if not host:
        raise ConfigError(
            "no Docker engine was found: none of "
            + ", ".join(map(str, _sockets()))
            + " exists. Start one, and say where it listens: sandbox.host, or the variable"
            " DOCKER_HOST (docs/sandboxes.md)"
        )
    return Docker(host)


async def _disconnect(client: "Docker") -> None:
    await client.close()
    await client.connector.close()  # which may be ours


def _sockets() -> tuple[Path, ...]:
    user = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"))
    return (
        Path("/run/docker.sock"),
        Path("/var/run/docker.sock"),
        user / "docker.sock",
        user / "podman" / "podman.sock",
        Path("/run/podman/podman.sock"),
    )


def _label_filter(label: str) -> str:
    return json.dumps({"label": [label]})


def _digest(context: bytes) -> str:
    """The digest of an archive's files: their paths, modes and contents, but not their times."""
    digest = hashlib.blake2b(digest_size=16)
    with tarfile.open(fileobj=io.BytesIO(context)) as tar:
        for entry in tar.getmembers():
            digest.update(f"{entry.name!r} {entry.mode} {entry.type!r} {entry.linkname!r}".encode())
            if entry.isfile() and (content := tar.extractfile(entry)) is not None:
                digest.update(f"{entry.size}\n".encode() + content.read())
    return digest.hexdigest()
