"""Questions with known answers: each task is a row of a file (`tasks: questions.jsonl`), and one answer ends it.

    env: qa
    tasks: questions.jsonl          # rows of {"prompt": ..., "answer": ...}
    reward: {name: math, tag: answer}

With `tool: python` the model may run programs before it answers, and with `tool: calculator` compute. Its answer is
then the first message without a call, and `rollout.budget` limits how long it may take.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from agentrl.envs.base import ToolEnv, ToolError, ToolResult, read_options
from agentrl.envs.python_tool import Programs
from agentrl.errors import ConfigError
from agentrl.protocols import OwnerOnly, Settings, StepResult
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits

_LARGEST = 10**60
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class PromptMessage(Settings):
    """A message of a prompt that is a chat."""

    role: Literal["system", "user"]
    content: str


class QuestionAnswer(ToolEnv):
    """Ask one question. Pays 1 where the last message is a right answer as text, ignoring case and spaces, else 0.

    The verdict on success is left to the run's reward, whatever it is: an episode with a score above zero succeeded,
    unless `success_at` beside a part of the reward says more.
    """

    system_prompt = ""
    # Its own code answers in microseconds, and the programs of the model are waited for on the event loop.
    isolation = "inline"

    class Options(Settings):
        """What a row of questions is. Other columns are allowed: rewards may read them."""

        model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

        prompt: str | tuple[PromptMessage, ...] = Field(min_length=1)
        """The question: a text, or the messages of a chat, of which the last is the user's only one."""
        answer: Any = None
        """The right answer, or a list of right ones."""
        tool: Literal["none", "calculator", "python"] = "none"
        """What the model may use before it answers."""
        system_prompt: str = ""
        """The system message, where the prompt has none."""
        limits: Annotated[SandboxLimits, OwnerOnly()] = SandboxLimits(wall=10.0, cpu=5.0)
        """Limits of a program, with `tool: python`."""
        allow_unsafe: Annotated[bool, OwnerOnly()] = False
        """Run programs without isolation if the machine offers none. They can then do everything that you can."""

        @model_validator(mode="after")
        def _a_chat_is_one_question(self) -> Self:
            roles = [] if isinstance(self.prompt, str) else [message.role for message in self.prompt]
            if roles not in ([], ["user"], ["system", "user"]):
                raise ValueError(f"a chat has a message of the user, after one of the system or none, not {roles}")
            return self

        @property
        def opening(self) -> tuple[str, str]:
            """(system message, question)"""
            if isinstance(self.prompt, str):
                return self.system_prompt, self.prompt
            first, last = self.prompt[0], self.prompt[-1]
            return (first.content if first.role == "system" else self.system_prompt), last.content

    def __init__(self) -> None:
        self._programs = Programs()
        self._specs_of_all = self._specs
        self._golds: tuple[str, ...] = ()

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Ask the question of a row.

        Raises:
            ConfigError: there is none, or it is written wrongly.
        """
        if "prompt" not in options:
            raise ConfigError(
                "env=qa asks what the rows of a file say, and this task has no prompt: write tasks=questions.jsonl, "
                "with rows of prompt and answer (tasks.columns says which columns are these)"
            )
        chosen = read_options(self.Options, options)
        golds = chosen.answer if isinstance(chosen.answer, list | tuple) else [chosen.answer]
        self._golds = tuple(_plain(str(gold)) for gold in golds if gold is not None)
        self._specs = tuple(spec for spec in self._specs_of_all if spec.name == _TOOL_OF[chosen.tool])
        self.tools = tuple(spec.schema for spec in self._specs)
        if chosen.tool == "python":
            await self._programs.start(chosen.limits, SandboxConfig(allow_unsafe=chosen.allow_unsafe))
        self.system_prompt, question = chosen.opening
        return question

    async def close(self) -> None:
        """Return the sandbox, if it was needed."""
        await self._programs.close()

    async def step(self, action: str) -> StepResult:
        """Run the calls of a message, or take it as the answer."""
        played = self._play(action) if self.tools else self._answered(action)
        observation, reward, terminated, truncated, info = await played
        return observation, reward, terminated, truncated, {**info, "success": None}

    async def _answered(self, action: str) -> StepResult:
        return self.reply(action).step

    def reply(self, text: str) -> ToolResult:
        """Take a message without calls as the answer."""
        return ToolResult("", reward=float(_plain(text) in self._golds), terminated=True)

    async def python(self, code: str) -> str:
        """Run a Python program. Names that it sets can be used by the next one.

        Args:
            code: the program; it prints what it has found out
        """
        return await self._programs.run(code)

    def calculate(self, expression: str) -> str:
        """Compute an expression of numbers, + - * / // % and parentheses.

        Args:
            expression: such as (12 + 7.5) * 3
        """
        try:
            return str(_value(ast.parse(expression.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
            raise ToolError(f"{expression!r:.80} cannot be computed: {error}") from error


_TOOL_OF = {"none": "", "calculator": "calculate", "python": "python"}


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _value(node: ast.expr) -> int | float:
    """The value of an expression, which is small enough to be written out."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("use numbers, + - * / // % and parentheses")
    if abs(value) > _LARGEST:
        raise ValueError("its value is too large")
    return value
