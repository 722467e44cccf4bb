"""`env: "agent:command ..."`: any program, in any language, as a process group of its own for each episode.

It finds the model in the variables that OpenAI's and Anthropic's clients read, and its task in others:

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY
    AGENTRL_TASK          the task as JSON: {"env", "seed", "options", "id"}
    AGENTRL_REWARD_FILE   where it may write its reward: a number, or JSON with `reward` and `success`
    AGENTRL_URL           where it may post rewards: POST $AGENTRL_URL/v1/rewards

A shell leads the group. It stays until the group is killed, so its number cannot be another process's by then; and it
kills the group itself when the run is gone, whatever the cause.
"""

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.errors import EnvError
from agentrl.flow import run_to_completion
from agentrl.gateway.outcome import AgentOutcome, outcome_of
from agentrl.gateway.program import Assignment

# $1: the command, $2: the file of its output. Standard input is the lifeline, standard output tells the exit status.
_LEADER = """
exec 3<&0
( read -r _ <&3; kill -KILL 0 ) &
sh -c "$1" </dev/null >"$2" 2>&1 3<&-
echo $?
wait
"""
_LAST_BYTES = 2000


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """`AgentProgram` of a command, which a shell reads. `more`: variables that it gets beside the usual ones."""

    command: str
    more: Mapping[str, str] | None = None

    async def run(self, assignment: Assignment) -> AgentOutcome:
        """Run the command for one task. When it ends, so do all processes that it has started."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agentrl-agent-"))
        try:
            status = await self._status(assignment, folder)
            if status:
                raise EnvError(f"the command {self.command!r:.200} ended with status {status}: {_tail(folder)}")
            return _outcome(folder / "reward", self.command)
        finally:
            await run_to_completion(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def _status(self, assignment: Assignment, folder: Path) -> int:
        leader = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            _LEADER,
            "sh",
            self.command,
            str(folder / "output"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_variables(assignment, folder) | dict(self.more or {}),
            start_new_session=True,
        )
        assert leader.stdout is not None
        try:
            return int(await leader.stdout.readline() or b"255")
        finally:
            _kill_group(leader.pid)
            await run_to_completion(_reaped(leader))
            await run_to_completion(asyncio.to_thread(_kill_all_with, assignment.api_key))


async def _reaped(leader: asyncio.subprocess.Process) -> None:
    assert leader.stdin is not None
    leader.stdin.close()
    await leader.communicate()


def _variables(assignment: Assignment, folder: Path) -> dict[str, str]:
    own = {
        "OPENAI_BASE_URL": assignment.base_url,
        "OPENAI_API_BASE": assignment.base_url,
        "OPENAI_API_KEY": assignment.api_key,
        "ANTHROPIC_BASE_URL": assignment.url,
        "ANTHROPIC_API_KEY": assignment.api_key,
        "AGENTRL_URL": assignment.url,
        "AGENTRL_TASK": json.dumps(asdict(assignment.task)),
        "AGENTRL_REWARD_FILE": str(folder / "reward"),
        "TMPDIR": str(folder),
    }
    dropped = {"ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"}
    return {name: value for name, value in os.environ.items() if name not in dropped} | own


def _outcome(file: Path, command: str) -> AgentOutcome:
    """What the command has written for its reward; nothing if it wrote nothing."""
    try:
        written = file.read_text()
    except FileNotFoundError:
        return AgentOutcome()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"the reward of {command!r:.200} cannot be read: {error}") from error
    try:
        return outcome_of(json.loads(written), f"the command {command!r:.200}")
    except ValueError as error:
        raise EnvError(
            f"the command {command!r:.200} wrote {written!r:.80} for its reward: write a number, or JSON with "
            "`reward` and `success`"
        ) from error


def _tail(folder: Path) -> str:
    """The end of what the command printed."""
    try:
        with (folder / "output").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            return file.read().decode(errors="replace").strip() or "it printed nothing"
    except OSError:
        return "it printed nothing"


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _kill_all_with(key: str) -> None:
    """Kill processes that left the group: those whose environment has the episode's key."""
    mark = key.encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or belongs to another user
