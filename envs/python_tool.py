"""Problems that need computing, and a `python` tool that computes: the model's programs run in the
sandbox.

Each seed gives another problem of its level. A function of this module computes the answer; the
strong player sends that function's source to the tool.
"""

import ast
import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from agentrl.envs.base import ToolEnv, ToolResult, plays, read_options
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import OwnerOnly
from agentrl.sandbox.outcome import LimitHit, Ran, SandboxLost
from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits
from agentrl.sandbox.shared import borrow, give_back
from agentrl.settings.base import Settings
from agentrl.trajectory import ToolCall

MAX_OUTPUT_CHARACTERS = 2000
"""Characters of a program's output that the model is shown."""


@dataclass(frozen=True, slots=True)
class PythonProblem:
    """A question, and the function and arguments that answer it."""

    question: str
    solve: Callable[..., int]
    arguments: tuple[Any, ...]

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.solve(*self.arguments)

    @property
    def program(self) -> str:
        """A program that prints the right answer."""
        return f"{inspect.getsource(self.solve)}\nprint({self.solve.__name__}{self.arguments!r})\n"

    @property
    def expression(self) -> str | None:
        """The program as one expression, with the arguments in their places; None if the function
        has more lines.
        """
        (function,) = ast.parse(inspect.getsource(self.solve)).body
        returned = function.body[0] if isinstance(function, ast.FunctionDef) else None
        if not isinstance(returned, ast.Return) or returned.value is None:
            return None
        values = dict(zip(inspect.signature(self.solve).parameters, self.arguments, strict=True))
        return ast.unparse(_Substitution(values).visit(returned.value))


class _Substitution(ast.NodeTransformer):
    """Puts values in the places of names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name that has a value."""
        return ast.Constant(self.values[node.id]) if node.id in self.values else node


class Programs:
    """The programs that a model runs in an episode, in a sandbox that it borrows. `printed`: by the
    last one.
    """

    def __init__(self) -> None:
        self._sandbox: ProgramSandbox | None = None
        self._limits = SandboxLimits()
        self._kept: list[str] = []
        self._config: SandboxConfig | None = None
        self.printed = ""

    def __getstate__(self) -> dict[str, Any]:
        """The state without the sandbox, which is borrowed again for the next program."""
        return {**self.__dict__, "_sandbox": None}

    async def start(self, limits: SandboxLimits, config: SandboxConfig) -> None:
        """Begin an episode, and borrow the sandbox."""
        self._limits, self._kept, self.printed = limits, [], ""
        if self._sandbox is None or self._sandbox.config != config:
            await self.close()
            self._sandbox = await borrow(config)
        self._config = config

    async def close(self) -> None:
        """Return the sandbox."""
        self._config = None
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await give_back(sandbox)

    async def run(self, code: str) -> str:
        """Run a program, after those of this episode that succeeded, and return what the model is
        shown of it.

        Raises:
            EnvError: the sandbox was lost twice.
        """
        outcome = await self._run_program(_HARNESS.format(earlier=self._kept, code=code))
        if isinstance(outcome, LimitHit):
            stopped = f"Error: the program was stopped, it used more {_EXCEEDED[outcome.which]}"
            return f"{_shorten_output(outcome.stdout).rstrip()}\n{stopped}"
        if outcome.exit == 0:
            self._kept.append(code)
            self.printed = outcome.stdout
        ended = f"\nError: it ended with exit status {outcome.exit}" if outcome.exit else ""
        return f"{_shorten_output(outcome.stdout + outcome.stderr).rstrip()}{ended}"

    async def _run_program(self, program: str) -> Ran | LimitHit:
        """Run a program, and once more if the sandbox was lost, for which the program may not be to
        blame.
        """
        if self._config is None:
            raise EnvError("no episode is being played; call reset first")
        if self._sandbox is None:
            self._sandbox = await borrow(self._config)
        outcome = await self._sandbox.run(program, limits=self._limits)
        if isinstance(outcome, SandboxLost):
            outcome = await self._sandbox.run(program, limits=self._limits)
        if isinstance(outcome, SandboxLost):
            raise EnvError(f"the sandbox was lost twice: {outcome.error}")
        return outcome


class PythonTool(ToolEnv):
    """Answer a question with the help of programs: reward 1 for the right number. Any answer ends
    the episode.

    A program can use the names that earlier programs of the episode have set. To provide them, each
    run starts a fresh process and silently repeats the earlier programs that succeeded. So no
    process waits while the model thinks, and a broken sandbox loses nothing. But a repeated program
    must give the same result, and its time counts again.
    """

    system_prompt = (
        "Answer the question. Compute with Python; what you do not print you do not see."
    )
    # Its calls wait for the sandbox on the event loop.
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        level: int = Field(1, ge=1, le=5)
        """Difficulty of the question."""
        kind: str | None = None
        """Only problems of this kind, of the two that the level has: the name of the function, such
        as `multiples`.
        """
        largest_base: int = Field(99, ge=3, le=99_999)
        """Of the powers in problems of the kind `digit_sum`: a large one makes many more tasks."""
        short_calls: bool = False
        """If true, tools are called in words (`answer 42`) instead of JSON, for very small
        models."""
        limits: Annotated[SandboxLimits, OwnerOnly()] = SandboxLimits(wall=10.0, cpu=5.0)
        """Limits of a run: the program and the earlier ones that it repeats."""
        allow_unsafe: Annotated[bool, OwnerOnly()] = False
        """Run programs without isolation if the machine offers none. They can then do everything
        that you can.
        """

    def __init__(self) -> None:
        self.programs = Programs()

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw a problem, and borrow the sandbox."""
        chosen = read_options(self.Options, options)
        self.call_shortly(chosen.short_calls)
        self.problem = make_problem(chosen.level, seed, chosen.kind, chosen.largest_base)
        await self.programs.start(chosen.limits, SandboxConfig(allow_unsafe=chosen.allow_unsafe))
        return self.problem.question

    async def close(self) -> None:
        """Return the sandbox, which all environments of this process share."""
        await self.programs.close()

    async def restore(self, state: bytes) -> None:
        """Go back to a state; the next program borrows a sandbox."""
        await self.programs.close()
        super().restore(state)

    async def python(self, code: str) -> str:
        """Run a Python program. Names that it sets can be used by the next one.

        Args:
            code: the program; it prints what it has found out
        """
        return await self.programs.run(code)

    def answer(self, number: int) -> ToolResult:
        """Give the answer. There is only one try.

        Args:
            number: the number that was asked for
        """
        right = number == self.problem.answer
        return ToolResult(
            "right" if right else "wrong", reward=float(right), terminated=True, success=right
        )


_EXCEEDED = {
    "wall": "time than it may",
    "cpu": "processor time than it may",
    "memory": "memory than it may",
    "disk": "disk than it may",
    "output": "output than it may",
}

_HARNESS = """
import ast, contextlib, io, linecache, sys, traceback, types

def run(code, scope):
    linecache.cache["code.py"] = (len(code), None, code.splitlines(keepends=True), "code.py")
    body = ast.parse(code, "code.py").body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "code.py", "exec"), scope)
    shown = eval(compile(last, "code.py", "eval"), scope) if last else None
    if shown is not None:
        print(repr(shown))

# Python looks the module of a class up by its name, as pickle does.
harness, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
scope = sys.modules["__main__"].__dict__
try:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for earlier in {earlier!r}:
            run(earlier, scope)
    run({code!r}, scope)
except Exception as error:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "code.py"]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    print("".join(lines), end="", file=sys.stderr)
    sys.exit(1)
"""


def _shorten_output(text: str) -> str:
    """The output as the model sees it: if it is too long, only its beginning and its end."""
    if not text.strip():
        return "(nothing was printed)"
    half = MAX_OUTPUT_CHARACTERS // 2
    omitted = len(text) - MAX_OUTPUT_CHARACTERS
    if omitted <= 0:
        return text
    return f"{text[:half]}\n... {omitted} characters ...\n{text[-half:]}"


@plays(PythonTool)
def strong_player(env: PythonTool, rng: random.Random) -> str:
    """Sends the right program, then answers what it printed. A `ScriptedPlayer`."""
    return weak_player(env, rng, skill=1.0)


@plays(PythonTool)
def weak_player(env: PythonTool, rng: random.Random, skill: float = 0.7) -> str:
    """With probability `skill` the call of `strong_player`, else a hasty one. For warm starts."""
    if rng.random() < skill:
        found = env.programs.printed.split()
        call = (
            ToolCall("answer", {"number": int(found[-1])})
            if found
            else _program(env.problem.program)
        )
    else:
        hasty = ToolCall("answer", {"number": rng.randrange(1000)})
        call = rng.choice(
            [
                hasty,
                _program(env.problem.program.replace("return", "return 1 +")),
                _program("1 / 0"),
            ]
        )
    return env.written(call)


@plays(PythonTool)
def hasty_player(env: PythonTool, rng: random.Random, skill: float = 0.5) -> str:
    """Sends a program of one expression, where one suffices, and answers what it prints. For warm
    starts in few tokens.

    With probability `skill` the program is right. Else it demands all conditions instead of any, or
    it answers at once, with the first number of the question.
    """
    if found := env.programs.printed.split():
        return env.written(ToolCall("answer", {"number": int(found[-1])}))
    program = env.problem.expression or env.problem.program
    if rng.random() < skill:
        return env.written(_program(program))
    if rng.random() < 0.5 and " or " in program:
        return env.written(_program(program.replace(" or ", " and ")))
    seen = re.findall(r"\d+", env.problem.question)
    return env.written(ToolCall("answer", {"number": int(seen[0])}))


def _program(code: str) -> ToolCall:
    return ToolCall("python", {"code": code})


# The strong player sends the source of these functions, so they use only builtins.


def multiples(low: int, high: int, one: int, other: int) -> int:
    return sum(n for n in range(low, high + 1) if n % one == 0 or n % other == 0)


def digit_sum(base: int, exponent: int) -> int:
    return sum(map(int, str(base**exponent)))


def primes(low: int, high: int) -> int:
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(max(low, 2), high + 1))


def change(amount: int, coins: list[int]) -> int:
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    return ways[amount]


def recurrence(begin: tuple[int, int], factors: tuple[int, int], n: int, modulus: int) -> int:
    last, new = begin
    for _ in range(n - 1):
        last, new = new, (factors[0] * new + factors[1] * last) % modulus
    return last


def common(one: str, other: str) -> int:
    row = [0] * (len(other) + 1)
    for x in one:
        before = row[:]
        for j, y in enumerate(other):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


def knapsack(room: int, weights: list[int], values: list[int]) -> int:
    best = [0] * (room + 1)
    for weight, value in zip(weights, values, strict=True):
        for left in range(room, weight - 1, -1):
            best[left] = max(best[left], best[left - weight] + value)
    return best[room]


def shortest(towns: int, roads: list[tuple[int, int, int]]) -> int:
    far = [0] + [10**9] * (towns - 1)
    for _ in range(towns):
        for a, b, length in roads:
            far[a], far[b] = min(far[a], far[b] + length), min(far[b], far[a] + length)
    return far[-1]


def paths(size: int, walls: list[tuple[int, int]]) -> int:
    ways = {(0, 0): 1}
    for row in range(size):
        for column in range(size):
            if (row, column) in walls:
                ways[row, column] = 0
            elif row or column:
                ways[row, column] = ways.get((row - 1, column), 0) + ways.get((row, column - 1), 0)
    return ways[size - 1, size - 1]


def subsets(numbers: list[int], total: int) -> int:
    ways = {0: 1}
    for number in numbers:
        for reached, many in list(ways.items()):
            ways[reached + number] = ways.get(reached + number, 0) + many
    return ways.get(total, 0)


def make_problem(
    level: int, seed: int, kind: str | None = None, largest_base: int = 99
) -> PythonProblem:
    """The problem of a seed: one of two kinds for each level from 1 to 5, or of the one that is
    named.

    Raises:
        ConfigError: the level has no such kind.
    """
    rng = random.Random(seed)
    names = [make.__name__.removeprefix("_") for make in _KINDS[level]]
    if kind is not None and kind not in names:
        raise ConfigError(
            f"options: 'kind': level {level} has no problems of the kind {kind!r}, but:"
            f" {', '.join(names)}"
        )
    make = _KINDS[level][names.index(kind)] if kind else rng.choice(_KINDS[level])
    return make(rng) if make is not _digit_sum else _digit_sum(rng, largest_base)


def _multiples(rng: random.Random) -> PythonProblem:
    low, high = rng.randint(1, 500), rng.randint(1000, 9999)
    one, other = rng.sample(range(3, 20), 2)
    return PythonProblem(
        f"What is the sum of all numbers from {low} to {high} that are divisible by {one} or by "
        f"{other}?",
        multiples,
        (low, high, one, other),
    )


def _digit_sum(rng: random.Random, largest_base: int = 99) -> PythonProblem:
    base, exponent = rng.randint(3, largest_base), rng.randint(30, 300)
    return PythonProblem(
        f"What is the sum of the decimal digits of {base}**{exponent}?", digit_sum, (base, exponent)
    )


def _primes(rng: random.Random) -> PythonProblem:
    low, high = rng.randint(1, 5000), rng.randint(6000, 20_000)
    return PythonProblem(f"How many primes are there from {low} to {high}?", primes, (low, high))


def _change(rng: random.Random) -> PythonProblem:
    amount, coins = rng.randint(100, 500), sorted(rng.sample(range(2, 60), rng.randint(4, 6)))
    return PythonProblem(
        f"In how many ways can {amount} cents be paid with coins of {_join(coins)} cents? The "
        "order does not count.",
        change,
        (amount, coins),
    )


def _recurrence(rng: random.Random) -> PythonProblem:
    first, second, a, b = (rng.randint(2, 9) for _ in range(4))
    n, modulus = rng.randint(1000, 9999), rng.randint(10**5, 10**6)
    return PythonProblem(
        f"x(1) = {first}, x(2) = {second}, and x(n) = ({a} * x(n-1) + {b} * x(n-2)) mod "
        f"{modulus}. What is x({n})?",
        recurrence,
        ((first, second), (a, b), n, modulus),
    )


def _common(rng: random.Random) -> PythonProblem:
    one, other = ("".join(rng.choices("abcd", k=rng.randint(25, 40))) for _ in range(2))
    return PythonProblem(
        f"How long is the longest common subsequence (with gaps) of {one} and {other}?",
        common,
        (one, other),
    )


def _knapsack(rng: random.Random) -> PythonProblem:
    many = rng.randint(10, 15)
    weights, values = ([rng.randint(3, 40) for _ in range(many)] for _ in range(2))
    room = sum(weights) // 2
    things = _join([f"({weight}, {value})" for weight, value in zip(weights, values, strict=True)])
    return PythonProblem(
        f"A bag holds a weight of {room}. Of these things, as (weight, value): {things}, what is "
        "the greatest total value that fits? There is one of each.",
        knapsack,
        (room, weights, values),
    )


def _shortest(rng: random.Random) -> PythonProblem:
    towns = rng.randint(9, 12)
    pairs = [(town, rng.randrange(town)) for town in range(1, towns)]
    for _ in range(towns):
        low, high = sorted(rng.sample(range(towns), 2))
        pairs.append((high, low))
    roads = [(a, b, rng.randint(5, 99)) for a, b in dict.fromkeys(pairs)]
    lines = _join([f"{a} to {b}: {length}" for a, b, length in roads])
    return PythonProblem(
        f"Roads between towns 0 to {towns - 1}, both ways, with their lengths: {lines}. "
        f"How long is the shortest way from town 0 to town {towns - 1}?",
        shortest,
        (towns, roads),
    )


def _paths(rng: random.Random) -> PythonProblem:
    size = rng.randint(7, 10)
    cells = [(row, column) for row in range(size) for column in range(size)][1:-1]
    walls = rng.sample(cells, size)
    return PythonProblem(
        f"A grid of {size} x {size} cells, rows and columns from 0. These cells (row, column) are "
        f"blocked: {_join(walls)}. How many ways lead from (0, 0) to ({size - 1}, {size - 1}), "
        "going only right and down?",
        paths,
        (size, walls),
    )


def _subsets(rng: random.Random) -> PythonProblem:
    numbers = [rng.randint(10, 60) for _ in range(rng.randint(18, 24))]
    total = sum(rng.sample(numbers, len(numbers) // 2))
    return PythonProblem(
        f"In how many ways can some of these numbers be chosen, so that they sum to {total}: "
        f"{_join(numbers)}? Equal numbers at different places are different choices.",
        subsets,
        (numbers, total),
    )


def _join(things: Sequence[object]) -> str:
    return ", ".join(map(str, things))


_KINDS: Mapping[int, Sequence[Callable[[random.Random], PythonProblem]]] = {
    1: (_multiples, _digit_sum),
    2: (_primes, _change),
    3: (_recurrence, _common),
    4: (_knapsack, _shortest),
    5: (_paths, _subsets),
}
