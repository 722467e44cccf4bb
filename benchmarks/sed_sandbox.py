"""Sandboxes of `repair` at level 1 without processes, for benchmarks of learning.

    env.options.sandbox={name: benchmarks.sed_sandbox:SedSandboxes}

Two sandboxes for each of some thousand episodes take an hour on two cores. Here `sed -i` with one
substitution of one line is applied to the text, and the program of one function with one operator
is computed from its text, which is matched and never run; what is written otherwise fails as it
would in a shell. Only for what a tiny model writes: it is no wall against anything.
"""

import operator
import re
from collections.abc import Callable, Mapping

from agentrl.protocols import Command, Executed
from agentrl.testing import FakeSandboxes

_SED = re.compile(r"sed -i (\d+)s/(.)/(.)/ (\S+)")
_FUNCTION = re.compile(
    r"def (\w+)\(([\w, ]*)\):\n    # [^\n]*\n    return (\w+) (\S+) (\w+)\n", re.ASCII
)
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class SedSandboxes(FakeSandboxes):
    """`FakeSandboxes` that know these commands."""

    @classmethod
    async def open(cls, settings: FakeSandboxes.Config) -> "SedSandboxes":
        """See `SandboxProvider`."""
        return cls(settings, answered)


def answered(command: Command, files: dict[str, bytes]) -> Executed | None:
    """The result of a command; None for the fake shell's own."""
    line = command.argv[-1]
    folder = command.folder
    if line.startswith("command -v "):
        return _executed(0, "/usr/bin/python3\n")
    if line.startswith("find . -mindepth 1 -delete"):
        files.clear()
        return _executed(0)
    if (edit := _SED.fullmatch(line)) is not None:
        return _edited(edit, folder, files)
    if line == "python3 main.py < calls":
        printed = _printed(files[f"{folder}/basics.py"].decode(), files[f"{folder}/calls"].decode())
        return _executed(1) if printed is None else _executed(0, printed)
    return None


def _edited(edit: re.Match[str], folder: str, files: dict[str, bytes]) -> Executed:
    number, old, new, name = edit.groups()
    path = f"{folder}/{name}"
    if path not in files:
        return _executed(2, error=f"sed: can't read {name}: No such file or directory\n")
    lines = files[path].decode().split("\n")
    if 1 <= int(number) < len(lines):
        lines[int(number) - 1] = lines[int(number) - 1].replace(old, new, 1)
    files[path] = "\n".join(lines).encode()
    return _executed(0)


def _printed(program: str, calls: str) -> str | None:
    """What the program prints; None if it is no program, or fails."""
    found = _FUNCTION.fullmatch(program)
    if found is None:
        return None
    name, arguments, left, sign, right = found.groups()
    names = [one.strip() for one in arguments.split(",")]
    compute = _OPERATORS.get(sign)
    lines = []
    for call in calls.splitlines():
        called, *numbers = call.split()
        given = dict(zip(names, map(int, numbers), strict=True))
        sides = [int(side) if side.isdecimal() else given.get(side) for side in (left, right)]
        if called != name or compute is None or sides[0] is None or sides[1] is None:
            return None
        lines.append(f"{compute(sides[0], sides[1])}\n")
    return "".join(lines)


def _executed(exit_status: int, out: str = "", error: str = "") -> Executed:
    return Executed(exit_status, out, error)
