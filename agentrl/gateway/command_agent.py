"""`env: "agent:command ..."`: any program, in any language, in processes of its own for each
episode.

It finds the model in the variables that OpenAI's, Anthropic's and Google's clients read, and its
task in others:

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY
    GOOGLE_GEMINI_BASE_URL, GEMINI_API_KEY, GOOGLE_API_KEY
    AGENTRL_TASK          the task as JSON: {"env", "seed", "options", "id"}
    AGENTRL_REWARD_FILE   a file for its reward: a number, or JSON with `reward` and `success`
    AGENTRL_URL           where it may post rewards: POST $AGENTRL_URL/v1/rewards

With `gateway.network: gateway` the command runs in a network of its own
(`agentrl/sandbox/network.py`), in which the gateway is at the same port of 127.0.0.1, and nothing
else can be reached.

A process between the run and the command (`agentrl/gateway/command_leader.py`) ends all that the
command has started when the command has ended, when its episode has, or when the run is gone,
whatever the cause.
"""

import asyncio
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.errors import EnvError
from agentrl.flow import Flow, made_in_thread, run_to_completion
from agentrl.gateway.outcome import LONGEST_REWARD, AgentOutcome, written_outcome
from agentrl.gateway.program import ProgramAssignment, agent_variables
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.sandbox import network

_LEADER = str(Path(__file__).with_name("command_leader.py"))
_END_SECONDS = 15.0
"""Time for the leader to end what the command has started, in seconds."""
_TAIL_BYTES = 2000
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """`AgentProgram` of a shell command. `more`: further environment variables.

    `contained_by`: the registry whose server is the only one that it can reach by network; by
    default it can reach what you can.
    """

    command: str
    more: Mapping[str, str] | None = None
    contained_by: SessionRegistry | None = None

    async def run(self, assignment: ProgramAssignment) -> AgentOutcome:
        """Run the command for one task. When it ends, so do all processes that it has started."""
        if self.contained_by is not None:
            assignment = replace(assignment, url=f"http://127.0.0.1:{assignment.port}")
        make = partial(tempfile.mkdtemp, prefix="agentrl-agent-")
        folder = Path(await made_in_thread(make, undo=os.rmdir))
        try:
            status = await self._run_command(assignment, folder)
            if status:
                raise EnvError(
                    f"the command {self.command!r:.200} ended with status {status}:"
                    f" {_output_end(folder)}"
                )
            return _read_outcome(folder / "reward", self.command)
        finally:
            await run_to_completion(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def _run_command(self, assignment: ProgramAssignment, folder: Path) -> int:
        """Run the command to its end. Returns its exit status."""
        if self.contained_by is None:
            return await self._run_leader(self.command, assignment, folder)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = network.contained_command(self.command, theirs.fileno(), assignment.port)
            async with Flow("command") as flow:
                running = flow.start(
                    self._run_leader(command, assignment, folder, theirs), name="process"
                )
                with await self._receive_listener(ours, folder) as listener:
                    async with self.contained_by.accepting(listener):
                        return await running

    async def _receive_listener(self, channel: socket.socket, folder: Path) -> socket.socket:
        """The socket that listens in the command's network.

        Raises:
            EnvError: there is none, and the command does not run.
        """
        channel.settimeout(_START_SECONDS)
        receive = partial(socket.recv_fds, channel, 4096, 1)
        try:
            said, sockets, *_ = await made_in_thread(receive, undo=_close_received)
        except asyncio.CancelledError:
            channel.shutdown(socket.SHUT_RDWR)  # which ends the thread; closing it would not
            raise
        if said != network.READY:
            raise EnvError(
                f"the command {self.command!r:.200} was not started:"
                f" {said.decode() or _output_end(folder)}"
            )
        return socket.socket(fileno=sockets[0])

    async def _run_leader(
        self,
        command: str,
        assignment: ProgramAssignment,
        folder: Path,
        channel: socket.socket | None = None,
    ) -> int:
        variables = _make_environment(assignment, folder) | dict(self.more or {})
        if channel is not None:  # a contained command reaches no proxy
            variables = {
                name: value
                for name, value in variables.items()
                if not name.lower().endswith("_proxy")
            }
        leader = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            _LEADER,
            command,
            str(folder / "output"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=variables,
            start_new_session=True,
            pass_fds=() if channel is None else (channel.fileno(),),
        )
        if channel is not None:
            channel.close()  # else the other end would not notice when the command is gone
        assert leader.stdout is not None
        try:
            return int(await leader.stdout.readline() or b"255")
        finally:
            await run_to_completion(_end_started_processes(leader, assignment.api_key))


def _close_received(received: tuple[bytes, list[int], int, Any]) -> None:
    for descriptor in received[1]:
        os.close(descriptor)


async def _end_started_processes(leader: asyncio.subprocess.Process, key: str) -> None:
    """Let the leader end all that it has started, or kill the processes with the episode's key in
    their environment if it cannot.
    """
    assert leader.stdin is not None
    leader.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await leader.wait()
    if leader.returncode != 0:
        await asyncio.to_thread(_kill_by_key, key)
    with suppress(ProcessLookupError):
        leader.kill()
    await leader.communicate()


def _make_environment(assignment: ProgramAssignment, folder: Path) -> dict[str, str]:
    dropped = {
        "ANTHROPIC_AUTH_TOKEN",
        "GOOGLE_GENAI_USE_ENTERPRISE",
        "GOOGLE_GENAI_USE_VERTEXAI",
        "OPENAI_ORG_ID",
        "OPENAI_PROJECT_ID",
    }
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | agent_variables(assignment, folder)


def _read_outcome(file: Path, command: str) -> AgentOutcome:
    """The text that the command has written for its reward; nothing if it wrote nothing."""
    try:
        # A program may have made anything of it: a pipe, on which reading waits, or a link to a
        # file without an end.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is no file")
            written = opened.read(LONGEST_REWARD)
    except FileNotFoundError:
        return AgentOutcome()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"the reward of {command!r:.200} cannot be read: {error}") from error
    return written_outcome(written, command)


def _output_end(folder: Path) -> str:
    """The end of what the command printed."""
    try:
        with (folder / "output").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "it printed nothing"
    except OSError:
        return "it printed nothing"


def _kill_by_key(key: str) -> None:
    """Kill the processes whose environment has the episode's key."""
    mark = key.encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or belongs to another user
