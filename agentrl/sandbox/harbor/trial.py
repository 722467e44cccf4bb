"""One trial of a Harbor task: the agent's machine, and the verdict on what is in it at the end.

    environment/ -> agent's sandbox -> (artifacts -> the verifier's sandbox) -> tests/test.sh
                                                            -> /logs/verifier/reward.{json,txt}

Whatever the verifier does is a verdict, also if it gives no reward. A failure of the sandbox raises
`SandboxError`, as everywhere.
"""

import asyncio
import fnmatch
import io
import json
import math
import posixpath
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import ConfigError, EnvError
from agentrl.flow import now
from agentrl.protocols import (
    Command,
    Dockerfile,
    Executed,
    Image,
    Resources,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    shell,
)
from agentrl.sandbox.archive import archive_of, archive_of_folder, checked_archive
from agentrl.sandbox.harbor.plain_image import Copy, plain_image
from agentrl.sandbox.harbor.task import HarborTask, lacking, resolved
from agentrl.sandbox.harbor.task_file import Artifact, TaskMachine

_LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
_OUTPUT = "/logs/verifier/test-stdout.txt"
_FILE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What holds for all trials."""

    resources: Resources = field(default_factory=Resources)
    """Where a task says nothing."""
    lease: float = 3600.0
    """Seconds after which a machine ends by itself."""
    network: bool = True
    """False for no network, whatever the task says."""
    always_fresh: bool = False
    """Run the verifier of every task in a machine of its own, with the working folder."""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """The verdict of a verifier."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Empty if it gave none."""
    why: str = ""
    """Why it gave none."""
    output: str = ""
    """The end of what it wrote."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A sandbox as the machine of a task."""

    sandbox: Sandbox
    root: str
    """What stands before the paths of the machine."""
    has_users: bool

    def at(self, path: str) -> str:
        """Where a path of the machine is."""
        return self.root + path if path.startswith("/") else path

    async def run(
        self,
        line: str,
        seconds: float = _FILE_SECONDS,
        user: str | int | None = None,
        environment: Mapping[str, str] = {},
        folder: str = "",
    ) -> Executed:
        """Run a command line. Without `user`, root runs it if the machine has users."""
        who = ("root" if user is None else str(user)) if self.has_users else ""
        command = Command(
            shell(line), deadline=seconds, environment=environment, folder=folder, user=who
        )
        return await self.sandbox.run(command)

    async def run_sound(self, line: str, seconds: float = _FILE_SECONDS, **more: str) -> None:
        """Run a command of the task's, which must succeed."""
        done = await self.run(line, seconds, **more)  # type: ignore[arg-type]
        if done.exit or done.ended_by != "itself":
            raise EnvError(f"the task's command {line!r:.200} failed: {done}")


class HarborTrial:
    """A trial. `close` ends its machines.

    Raises:
        ConfigError: the task asks for what is not there.
    """

    def __init__(
        self, task: HarborTask, provider: SandboxProvider, settings: TrialSettings
    ) -> None:
        self.task = task
        self._provider, self._settings = provider, settings
        self._place: _Place | None = None
        self._until = math.inf
        if wanted := lacking(task, provider.offers, settings.network):
            raise ConfigError(
                f"the task {task.name!r} needs {', '.join(wanted)}, which is not offered"
                " (docs/harbor.md)"
            )

    async def start(self) -> Sandbox:
        """Start the agent's machine, and return its sandbox."""
        task = self.task
        self._place = place = await self._start_machine(
            task.origin, task.file.environment, str(task.file.agent.user or "")
        )
        if task.loose_files is not None:
            await place.sandbox.upload(await asyncio.to_thread(archive_of_folder, task.loose_files))
        await self._wait_until_healthy(place)
        self._until = now() + (task.file.agent.timeout_sec or self._settings.lease)
        return place.sandbox

    @property
    def is_late(self) -> bool:
        """True if the agent's time is over."""
        return now() >= self._until

    async def solve(self) -> Executed:
        """Do what the task's own solution does.

        Raises:
            ConfigError: it has none.
        """
        task, place = self.task, self._current_place
        if not (task.folder / "solution" / "solve.sh").is_file():
            raise ConfigError(f"the task {task.name!r} has no solution/solve.sh")
        await self._upload(place, task.folder / "solution", "/solution")
        await place.run_sound(f"chmod +x {place.at('/solution/solve.sh')}")
        return await place.run(
            "(/solution/solve.sh) > /logs/agent/oracle.txt 2>&1 || { status=$?;"
            " tail -c 2000 /logs/agent/oracle.txt; exit $status; }",
            task.file.agent.timeout_sec or self._settings.lease,
            task.file.agent.user,
            {"DEBIAN_FRONTEND": "noninteractive", **resolved(task.file.solution.env, task.name)},
        )

    async def judge(self) -> TrialVerdict:
        """Run the verifier. The agent's machine has ended then."""
        agents = self._current_place
        try:
            for hook in self.task.file.verifier.collect:
                await agents.run(hook.command, hook.timeout_sec, hook.user)
            if not self.task.file.verifier.is_separate and not self._settings.always_fresh:
                return await self._verdict(agents, has_tests=False)
            artifacts = [await self._collect(agents, one) for one in self._list_artifacts(agents)]
            await self.close()
            return await self._separate_verdict(artifacts)
        finally:
            await self.close()

    async def close(self) -> None:
        """End the machine."""
        place, self._place = self._place, None
        if place is not None:
            await place.sandbox.close()

    async def _separate_verdict(self, artifacts: "list[_Collected]") -> TrialVerdict:
        verifier = self.task.verifier
        place = await self._start_machine(verifier.origin, verifier.machine, "")
        try:
            for one in artifacts:
                try:
                    await one.put(place)
                except (OSError, ValueError) as error:  # the agent has made what cannot be unpacked
                    return TrialVerdict(why=f"what the agent left cannot be taken over: {error}")
            return await self._verdict(place, verifier.has_tests)
        finally:
            await place.sandbox.close()

    async def _verdict(self, place: _Place, has_tests: bool) -> TrialVerdict:
        file = self.task.file.verifier
        # The agent may have written these files itself.
        rewards = " ".join(map(place.at, _REWARD_FILES))
        if (await place.run(f"rm -rf -- {rewards}")).exit:
            return TrialVerdict(why="the reward files of before cannot be removed")
        try:
            if not has_tests:
                await place.run(f"rm -rf -- {place.at('/tests')}")
                await self._upload(place, self.task.folder / "tests", "/tests")
        except OSError as error:
            return TrialVerdict(why=f"the tests cannot be unpacked there: {error}")
        await place.run(f"chmod +x {place.at('/tests/test.sh')}")
        done = await place.run(
            f"(/tests/test.sh) > {_OUTPUT} 2>&1",
            file.timeout_sec,
            file.user,
            resolved(file.env, self.task.name),
        )
        output = await self._read(place, _OUTPUT) or b""
        verdict = await self._read_rewards(place)
        if not verdict.rewards:
            await place.run("true")  # raises if the machine has been lost, which is no verdict
        if done.ended_by != "itself":
            verdict = TrialVerdict(why=f"the verifier was killed by its limit of {done.ended_by}")
        return TrialVerdict(verdict.rewards, verdict.why, output.decode(errors="replace")[-2000:])

    async def _read_rewards(self, place: _Place) -> TrialVerdict:
        for path in _REWARD_FILES:
            content = await self._read(place, path)
            if content is not None:
                try:
                    return TrialVerdict(parsed_rewards(content.decode(), path.endswith(".json")))
                except ValueError as error:
                    return TrialVerdict(why=f"{path} cannot be read: {error}")
        return TrialVerdict(why=f"the verifier wrote neither {' nor '.join(_REWARD_FILES)}")

    async def _read(self, place: _Place, path: str) -> bytes | None:
        try:
            return await place.sandbox.read(place.at(path))
        except OSError:
            return None

    async def _upload(self, place: _Place, folder: Path, target: str) -> None:
        archive = await asyncio.to_thread(archive_of_folder, folder)
        await place.sandbox.upload(archive, place.at(target))

    def _list_artifacts(self, agents: _Place) -> list[Artifact]:
        sources = [Artifact(source="/logs/artifacts"), *self.task.file.artifacts]
        folder = agents.sandbox.folder.removeprefix(agents.root)
        if self._settings.always_fresh and not any(one.source == folder for one in sources):
            sources.append(Artifact(source=folder))
        return sources

    async def _collect(self, agents: _Place, artifact: Artifact) -> "_Collected":
        """An artifact, or nothing of it if it cannot be had."""
        at = agents.at(artifact.source)
        try:
            if (await agents.run(f'[ -d "{at}" ]')).exit == 0:
                archive = await agents.sandbox.download(at)
                if artifact.exclude:
                    archive = await asyncio.to_thread(_remove_entries, archive, artifact.exclude)
                return _Collected(artifact.source, archive, None)
            return _Collected(artifact.source, None, await agents.sandbox.read(at, 32 << 20))
        except (OSError, ValueError):
            return _Collected(artifact.source, None, None)

    async def _start_machine(
        self, origin: Image | Dockerfile, machine: TaskMachine, user: str
    ) -> _Place:
        offers, settings = self._provider.offers, self._settings
        plain = None if offers.images else await asyncio.to_thread(plain_image, origin)
        workdir = machine.workdir or (plain.folder if plain else "")
        network = settings.network and machine.network_mode == "public"
        spec = SandboxSpec(
            origin if offers.images else None,
            _resources(machine, settings.resources),
            "open" if network and "open" in offers.networks else "none",
            {**(plain.environment if plain else {}), **resolved(machine.env, self.task.name)},
            folder=f"{offers.root}{workdir}" if workdir else "",
            user=user,
            lease=settings.lease,
        )
        place = _Place(await self._provider.start(spec), offers.root, offers.users)
        try:
            logs = " ".join(map(place.at, _LOGS))
            await place.run_sound(f"mkdir -p {logs} && chmod 777 {logs}")
            for step in plain.steps if plain else ():
                if isinstance(step, Copy):
                    files = {path.lstrip("/"): content for path, content in step.files.items()}
                    await place.sandbox.upload(archive_of(files), offers.root)
                else:
                    seconds = machine.build_timeout_sec
                    await place.run_sound(step.line, seconds, folder=place.at(step.folder))
        except BaseException:
            await place.sandbox.close()
            raise
        return place

    async def _wait_until_healthy(self, place: _Place) -> None:
        check = self.task.file.environment.healthcheck
        if check is None:
            return
        grace = math.ceil(check.start_period_sec / max(check.start_interval_sec, 0.1))
        for attempt in range(grace + check.retries):
            if (await place.run(check.command, check.timeout_sec)).exit == 0:
                return
            await asyncio.sleep(check.start_interval_sec if attempt < grace else check.interval_sec)
        raise EnvError(f"the machine of {self.task.name!r} is not healthy: {check.command!r} fails")

    @property
    def _current_place(self) -> _Place:
        if self._place is None:
            raise EnvError("no trial is going on; call start first")
        return self._place


@dataclass(frozen=True, slots=True)
class _Collected:
    """What was at a path of the agent's machine: a folder, a file, or nothing."""

    source: str
    archive: bytes | None
    content: bytes | None

    async def put(self, place: _Place) -> None:
        """Put it at the same path of another machine."""
        at = place.at(self.source)
        if self.archive is not None:
            await place.run(f'mkdir -p "{at}" && find "{at}" -mindepth 1 -delete')
            await place.sandbox.upload(self.archive, at)
        elif self.content is not None:
            await place.run(f'rm -rf -- "{at}"')
            await place.sandbox.write(at, self.content)


def _remove_entries(archive: bytes, patterns: list[str]) -> bytes:
    """The archive without the entries whose names, or parts of them, fit a pattern.

    Raises:
        ValueError: as `checked_archive`.
    """
    written = io.BytesIO()
    # Checked before it is read: the agent may have made it. There a hard link is a copy, which
    # stays where the file that it named is left out.
    with (
        tarfile.open(fileobj=io.BytesIO(checked_archive(archive))) as read,
        tarfile.open(fileobj=written, mode="w") as new,
    ):
        for member in read.getmembers():
            name = posixpath.normpath(member.name)
            parts = [name, *name.split("/")]
            if not any(fnmatch.fnmatch(part, one) for part in parts for one in patterns):
                new.addfile(member, read.extractfile(member) if member.isfile() else None)
    return written.getvalue()


def parsed_rewards(text: str, is_json: bool) -> dict[str, float]:
    """The rewards in a file.

    Raises:
        ValueError: it has none.
    """
    found = json.loads(text) if is_json else {"reward": float(text)}
    if not isinstance(found, dict) or not found:
        raise ValueError("it is no mapping of names to numbers")
    for name, value in found.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name!r} is {value!r}, which is no finite number")
    return {str(name): float(value) for name, value in found.items()}


def _resources(machine: TaskMachine, default: Resources) -> Resources:
    return Resources(
        machine.memory_mb << 20 if machine.memory_mb else default.memory,
        float(machine.cpus or default.cpus),
        default.processes,
        machine.storage_mb << 20 if machine.storage_mb else default.disk,
    )
