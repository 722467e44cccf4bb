"""A program that calls the policy from inside a sandbox: `env.agent: {where: inside}`.

    gateway <-- Sandbox.listener <-- 127.0.0.1:PORT <-- the program, in a sandbox without a network

It gets the same variables as a command outside (`agentrl/gateway/command_agent.py`), none of yours,
and a home of its own beside its working folder. With a `test` in the task's options, a fresh
sandbox tests the working folder when the program has ended, and that is the reward; else the
program writes one.
"""

import asyncio
import logging
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from agentrl.errors import ConfigError, EnvError
from agentrl.gateway.coding_agent_child import TASK_OPTIONS, filled
from agentrl.gateway.coding_agents import CodingAgent
from agentrl.gateway.outcome import LONGEST_REWARD, AgentOutcome, written_outcome
from agentrl.gateway.program import ProgramAssignment, agent_variables
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.protocols import (
    Command,
    Dockerfile,
    Executed,
    Image,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    shell,
)
from agentrl.sandbox.archive import archive_of, files_of
from agentrl.sandbox.config import AgentPlace
from agentrl.sandbox.providers import borrow_provider, give_back_provider
from agentrl.sandbox.shell_task import ShellTask, TaskSandboxes
from agentrl.tokens.arrays import at_least

logger = logging.getLogger(__name__)

PORT = 41017
"""The gateway's port inside: the same in all sandboxes, so that prompts that name it are alike."""
_OWN_FOLDER, _WORK_FOLDER = "agentrl", "work"
_TAIL_CHARACTERS = 2000
_MAX_HOME_BYTES = 256 << 20
"""Bytes of a home in which transcripts are looked for."""


@dataclass(frozen=True, slots=True)
class _Call:
    """How the program of one episode is called."""

    name: str
    argv: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    transcript: str = ""
    ends: tuple[int, ...] = (0,)


@dataclass(eq=False, slots=True)
class SandboxedAgent:
    """`AgentProgram` of a program in a sandbox of its own for each episode. An async context
    manager, which checks that this works here.
    """

    agent: CodingAgent | str
    """A preset, or a command that the sandbox's shell reads."""
    place: AgentPlace
    registry: SessionRegistry
    _lent: list[SandboxProvider] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        """Borrow the provider, and try a sandbox.

        Raises:
            ConfigError: the provider cannot do this here, or the program is not there.
        """
        self._lent.append(await borrow_provider(self.place.sandbox))
        try:
            await self._check()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await give_back_provider(self._lent.pop())

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        """Solve one task in a sandbox, which ends with this."""
        task = self._task_of(assignment.task.options)
        spec = self._sandbox_spec(assignment.task.options)
        sandboxes = TaskSandboxes(self._provider, spec, task, self.place.test_seconds)
        inside = replace(assignment, url=f"http://127.0.0.1:{PORT}")
        sandbox = await sandboxes.to_work_in()
        try:
            assert sandbox.listener is not None
            async with self.registry.accepting(sandbox.listener):
                outcome = await self._run_program(sandbox, inside)
            if not task.test:
                return outcome
            async with sandboxes.work_in(sandbox) as made:
                await sandbox.close()  # before the test, so that nothing the program left runs on
                reward = await sandboxes.verdict(made)
        finally:
            await sandbox.close()
        return AgentOutcome(reward, at_least(reward, 1))

    async def _check(self) -> None:
        """Refuse what cannot run here, before the first task."""
        offers, name = self._provider.offers, self.place.sandbox.get("name", "jail")
        if not offers.serves_port:
            raise ConfigError(
                f"env.agent.where=inside: the provider of sandboxes {name!r} cannot show the"
                " gateway to a sandbox without a network: write env.agent.sandbox={name: jail} or"
                " {name: docker, image: ...}"
            )
        if offers.images and not self.place.sandbox.get("image"):
            return  # each task names its own
        sandbox = await self._provider.start(self._sandbox_spec({}))
        try:
            if not isinstance(self.agent, CodingAgent):
                return
            agent = self.agent
            found = await sandbox.run(Command(shell(f"command -v {agent.program}")))
            if found.exit:
                raise ConfigError(
                    f"env.agent.where=inside: there is no program {agent.program!r} in the sandbox:"
                    f" install it in the image by `{agent.install}`, or show a jail the folder with"
                    " bin/ in which it is (env.agent.sandbox.paths)"
                )
        finally:
            await sandbox.close()

    async def _run_program(self, sandbox: Sandbox, inside: ProgramAssignment) -> AgentOutcome:
        """Run the program to its end, and return what it has written for its reward."""
        own = Path(self._provider.offers.root or "/tmp", _OWN_FOLDER)
        home = str(own / "home")
        call = self._prepare_call(inside, home)
        await sandbox.upload(archive_of(call.files), home)
        variables = {**agent_variables(inside, own), "HOME": home, **call.variables}
        done = await sandbox.run(
            Command(call.argv, deadline=self.place.lease, environment=variables)
        )
        if call.transcript:
            await _keep_transcripts(sandbox, call.transcript, home, inside.api_key)
        _raise_if_failed(done, call)
        return await _read_outcome(sandbox, str(own / "reward"), call.name)

    def _prepare_call(self, inside: ProgramAssignment, home: str) -> "_Call":
        if isinstance(self.agent, str):
            return _Call(self.agent, shell(self.agent))
        agent = self.agent
        values = {
            "instruction": str(inside.task.options["instruction"]),
            "base_url": inside.base_url,
            "url": inside.url,
            "api_key": inside.api_key,
            "model": self.registry.config.model,
            "home": home,
        }
        return _Call(
            agent.program,
            [agent.program, *(filled(word, values) for word in agent.arguments)],
            {name: filled(text, values) for name, text in agent.variables.items()},
            {path: filled(text, values) for path, text in agent.files.items()},
            agent.transcript,
            agent.ends,
        )

    def _task_of(self, options: Mapping[str, Any]) -> ShellTask:
        if isinstance(self.agent, CodingAgent) and not options.get("instruction"):
            raise EnvError(
                f"the task has no `instruction`; its options may be {', '.join(TASK_OPTIONS)},"
                " image, dockerfile"
            )
        return ShellTask(
            str(options.get("instruction") or ""),
            options.get("files") or {},
            str(options.get("test") or ""),
            options.get("test_files") or {},
            str(options.get("setup") or ""),
        )

    def _sandbox_spec(self, options: Mapping[str, Any]) -> SandboxSpec:
        image, dockerfile = options.get("image"), options.get("dockerfile")
        root = self._provider.offers.root
        return SandboxSpec(
            Dockerfile(Path(dockerfile)) if dockerfile else Image(image) if image else None,
            self.place.resources,
            folder=posixpath.join(root, _WORK_FOLDER) if root else "",
            port=PORT,
            lease=self.place.lease,
        )

    @property
    def _provider(self) -> SandboxProvider:
        return self._lent[0]


def _raise_if_failed(done: Executed, call: _Call) -> None:
    """Raise if the program was ended by a limit, or with a status that means failure."""
    said = f"{done.stdout}{done.stderr}".strip()[-_TAIL_CHARACTERS:] or "it printed nothing"
    if done.ended_by != "itself":
        raise EnvError(
            f"{call.name!r:.200} used up its {done.ended_by} (env.agent), and was ended: {said}"
        )
    if done.exit not in call.ends:
        raise EnvError(f"{call.name!r:.200} ended with status {done.exit}: {said}")


async def _read_outcome(sandbox: Sandbox, path: str, name: str) -> AgentOutcome:
    try:
        written = (await sandbox.read(path, most=LONGEST_REWARD)).decode()
    except FileNotFoundError:
        return AgentOutcome()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"the reward of {name!r:.200} cannot be read: {error}") from error
    return written_outcome(written, name)


async def _keep_transcripts(sandbox: Sandbox, pattern: str, home: str, key: str) -> None:
    """Copy what the program has written down to the folder AGENTRL_TRANSCRIPTS, if there is one."""
    folder = os.environ.get("AGENTRL_TRANSCRIPTS")
    if folder is None:
        return
    try:
        files = files_of(await sandbox.download(home, most=_MAX_HOME_BYTES))
    except (OSError, ValueError) as error:
        logger.warning("a transcript was not kept: %s", error)
        return
    found = {path: one for path, one in files.items() if PurePosixPath(path).match(pattern)}
    await asyncio.to_thread(_write, Path(folder, key[-8:]), found)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        kept = folder / path
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
