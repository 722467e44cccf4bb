"""A small program with a planted bug: the model finds it and mends it, in a sandbox.

The seed draws the program, the bug and the numbers that it is tested with. The tests that the model
sees are a few of them. The judge runs the program in a fresh sandbox with all of them, and compares
what it prints outside of the sandbox: what is expected is never where a program could read it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from agentrl.envs.base import plays
from agentrl.envs.languages import LANGUAGES, Language
from agentrl.envs.shell import ImageOptions, ShellTaskEnv
from agentrl.envs.small_programs import (
    BASICS,
    OF_OTHERS,
    OPERATORS,
    SERIES,
    Function,
    Functions,
    broken,
    drawn_function,
    evaluate,
    needed,
)
from agentrl.errors import ConfigError
from agentrl.protocols import Command, Sandbox, shell
from agentrl.sandbox.shell_task import ShellTask
from agentrl.trajectory import ToolCall

LanguageName = Literal["python", "sh", "awk", "perl", "javascript"]
_SHOWN_CALLS, _HIDDEN_CALLS = 3, 6
"""Calls of each function that the model is shown, and those that only the judge makes."""
_Calls = list[tuple[str, tuple[int, ...]]]
_Expected = Mapping[tuple[str, tuple[int, ...]], int]


@dataclass(frozen=True, slots=True)
class Repository:
    """A program with bugs."""

    language: Language
    files: Mapping[str, str]
    """With the bugs."""
    correct: Mapping[str, str]
    """The same files without them."""
    modules: Sequence[str]
    """The names of the files that hold functions, without suffixes."""
    shown: _Calls
    hidden: _Calls
    expected: _Expected
    """What each call must return."""

    @property
    def task(self) -> ShellTask:
        """The task of mending it."""
        calls = [*self.shown, *self.hidden]
        return ShellTask(
            "",
            self.files,
            f"{self.language.run(self.modules)} < calls",
            {"calls": as_lines(calls)},
            printed="".join(f"{self.expected[call]}\n" for call in calls),
        )

    @property
    def mends(self) -> Sequence[str]:
        """Commands of which each mends one line."""
        found = []
        for path, text in self.files.items():
            lines = zip(text.split("\n"), self.correct[path].split("\n"), strict=True)
            for number, (wrong, right) in enumerate(lines, 1):
                if wrong != right:
                    found.append(f"sed -i {_sed_argument(wrong, right, number)} {path}")
        return found


class Repair(ShellTaskEnv):
    """Find the bug of a small program and mend it; `submit` ends the episode, with reward 1 if the
    program is right for numbers that it has not been shown with.
    """

    options: "Repair.Options"

    class Options(ImageOptions):
        """The options of `reset`."""

        level: int = Field(1, ge=1, le=4)
        """1: a function with one operator, which is wrong. 2: three functions. 3: six functions in
        two files, which call each other. 4: all functions, with two bugs."""
        languages: tuple[LanguageName, ...] = Field(("python",), min_length=1)
        """The seed chooses one of them: `python`, `sh`, `awk`, `perl`, `javascript`. The sandbox
        needs its interpreter."""
        brief: bool = False
        """The instruction is the program's text, and nothing else: for small models."""

    def __init__(self) -> None:
        super().__init__()
        self._interpreters: set[str] = set()

    async def _begin(self, seed: int) -> tuple[str, Sandbox]:
        instruction, sandbox = await super()._begin(seed)
        try:
            await self._check_interpreter(sandbox, self.repository.language.interpreter)
        except BaseException:
            await sandbox.close()
            raise
        return instruction, sandbox

    async def _check_interpreter(self, sandbox: Sandbox, interpreter: str) -> None:
        if interpreter in self._interpreters:
            return
        done = await sandbox.run(Command(shell(f"command -v {interpreter}")))
        if done.exit:
            raise ConfigError(
                f"env.options.languages: the sandbox has no {interpreter!r}: choose other languages"
                f" of {', '.join(LANGUAGES)}, or an image that has it"
            )
        self._interpreters.add(interpreter)

    def _task_of(self, seed: int) -> ShellTask:
        chosen = self.options
        rng = random.Random(seed)
        language = LANGUAGES[rng.choice(chosen.languages)]
        self.repository = made = drawn_repository(rng, language, chosen.level)
        names = [f"{module}{language.suffix}" for module in made.modules]
        if chosen.brief:
            return replace(made.task, instruction="\n".join(made.files[name] for name in names))
        instruction = (
            f"`sh test.sh` fails: {' and '.join(names)} should compute what the comments say, and"
            " does not. Find the mistake and correct it. The program will also be tested with"
            " numbers that you do not see."
        )
        return replace(made.task, instruction=instruction)


def drawn_repository(rng: random.Random, language: Language, level: int) -> Repository:
    """A program with bugs that its tests find, and that one half of a repair leaves to be found."""
    while True:
        modules = _draw_modules(rng, level)
        functions = {one.name: one for part in modules.values() for one in part}
        shown, hidden = _draw_calls(rng, functions)
        calls = [*shown, *hidden]
        expected = {call: evaluate(functions, *call) for call in calls}
        for _ in range(20):
            bugs = [_plant_bug(rng, functions, level) for _ in range(2 if level == 4 else 1)]
            if len({bug.name for bug in bugs}) < len(bugs):
                continue
            wrong = {**functions, **{bug.name: bug for bug in bugs}}
            mended = [{**wrong, bug.name: functions[bug.name]} for bug in bugs]
            half_mended = [wrong, *(mended if len(bugs) > 1 else [])]
            # The shown tests must find the bugs, and the hidden ones each bug alone.
            if _fails(wrong, shown, expected) and all(
                _fails(half, hidden, expected) for half in half_mended
            ):
                return Repository(
                    language,
                    _files(language, modules, wrong, shown, expected),
                    _files(language, modules, functions, shown, expected),
                    list(modules),
                    shown,
                    hidden,
                    expected,
                )


def _draw_modules(rng: random.Random, level: int) -> dict[str, list[Function]]:
    match level:
        case 1:
            return {"basics": [drawn_function(rng)]}
        case 2:
            return {"basics": rng.sample((*BASICS, *SERIES), 3)}
        case 3:
            others = rng.sample(OF_OTHERS, 2)
            names = needed(others)
            called = [one for one in (*BASICS, *SERIES) if one.name in names]
            more = rng.sample([one for one in BASICS if one.name not in names], 4 - len(called))
            return {"basics": [*called, *more], "series": others}
    return {"basics": list(BASICS), "series": list(SERIES), "sums": list(OF_OTHERS)}


def _draw_calls(rng: random.Random, functions: Functions) -> tuple[_Calls, _Calls]:
    shown, hidden = [], []
    for name, function in functions.items():
        calls = [(name, case) for case in function.cases(rng, _SHOWN_CALLS + _HIDDEN_CALLS)]
        shown += calls[:_SHOWN_CALLS]
        hidden += calls[_SHOWN_CALLS:]
    return shown, hidden


def _plant_bug(rng: random.Random, functions: Functions, level: int) -> Function:
    function = functions[rng.choice(list(functions))]
    bodies = list(broken(function.body))
    return replace(function, body=rng.choice(bodies[:2] if level == 1 else bodies))


def _fails(functions: Functions, calls: _Calls, expected: _Expected) -> bool:
    """True if these functions return something wrong in one of the calls."""
    return any(evaluate(functions, *call) != expected[call] for call in calls)


def _files(
    language: Language,
    modules: Mapping[str, Sequence[Function]],
    functions: Functions,
    shown: _Calls,
    expected: _Expected,
) -> dict[str, str]:
    files, before = {}, list[str]()
    for module, part in modules.items():
        texts = [language.write_function(functions[one.name]) for one in part]
        files[f"{module}{language.suffix}"] = language.write_module(texts, tuple(before))
        before.append(module)
    files[f"main{language.suffix}"] = language.write_main(modules)
    files["examples"] = as_lines(shown)
    files["expected"] = "".join(f"{expected[call]}\n" for call in shown)
    run = language.run(list(modules))
    files["test.sh"] = f"{run} < examples | diff expected - && echo passed\n"
    return files


def as_lines(calls: _Calls) -> str:
    """The input of the program that makes these calls."""
    return "".join(f"{name} {' '.join(map(str, case))}\n" for name, case in calls)


def _sed_argument(wrong: str, right: str, number: int) -> str:
    """The argument of `sed` that turns one line into another: it replaces the operator alone where
    that is enough, else the whole line.
    """
    for old in OPERATORS:
        for new in OPERATORS:
            if old in wrong and wrong.replace(old, new, 1) == right:
                return f"{number}s/{old}/{new}/"
    # In a replacement, \\, & and / are special to sed, and ' ends the shell's word.
    plain = right.replace("\\", "\\\\").replace("&", "\\&").replace("/", "\\/")
    return "'" + f"{number}s/.*/{plain}/".replace("'", "'\\''") + "'"


@plays(Repair)
def strong_player(env: Repair, rng: random.Random) -> str:
    """Mends each line, and submits. A `ScriptedPlayer`."""
    mends = env.repository.mends
    if env.commands == len(mends):
        return env.written(ToolCall("submit", {}))
    return env.written(ToolCall("run", {"command": mends[env.commands]}))


@plays(Repair)
def hasty_player(env: Repair, rng: random.Random, skill: float = 0.5) -> str:
    """As `strong_player`, but it guesses an operator with the probability 1 - `skill`. For warm
    starts.
    """
    mends = env.repository.mends
    if env.commands == len(mends):
        return env.written(ToolCall("submit", {}))
    command = mends[env.commands]
    if rng.random() >= skill:
        sed, path = command.rsplit(" ", 1)
        command = f"{sed[:-2]}{rng.choice(OPERATORS)}/ {path}"
    return env.written(ToolCall("run", {"command": command}))
