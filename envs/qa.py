"""Questions with known answers: each task is a row of a file (`tasks: questions.jsonl`), and one
answer ends it.

    env: qa
    tasks: questions.jsonl          # rows of {"prompt": ..., "answer": ...}
    reward: {name: math, tag: answer}

With `tool: python` the model may run programs before it answers, and with `tool: calculator`
compute. Its answer is then the first message without a call, and `rollout.budget` limits how long
it may take.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, InstanceOf

from agentrl.conversation.chats import as_json, question_of, read_chat
from agentrl.conversation.right_answers import check_it_is_no_solution
from agentrl.envs.base import ToolEnv, ToolError, ToolResult, read_options
from agentrl.envs.python_tool import Programs
from agentrl.errors import ConfigError, ImageError
from agentrl.protocols import Observation, OwnerOnly, ResetReply, StepReply
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits
from agentrl.settings.base import Settings
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message

_MAX_NUMBER = 10**60
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


def _as_images(given: Any) -> tuple[EncodedImage, ...]:
    """The pictures of a question."""
    listed = given if isinstance(given, list | tuple) else [given]
    try:
        return tuple(
            one if isinstance(one, EncodedImage) else EncodedImage.from_address(str(one))
            for one in listed
        )
    except ImageError as error:
        raise ValueError(str(error)) from error


def _as_chat(prompt: Any) -> list[Message]:
    """The messages of a prompt; the last one is the question."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("it is empty")
        return [Message("user", prompt)]
    if not isinstance(prompt, list | tuple):
        given = "null" if prompt is None else f"{prompt!r:.80}"
        raise ValueError(f"write a text, or the messages of a chat, not {given}")
    if not prompt:
        raise ValueError("it is a chat without messages")
    chat = read_chat(prompt, pictures=True)
    asked, _ = question_of(chat)
    if len(asked) < len(chat):
        raise ValueError(
            "a chat has a message of the user at its end, and this one ends with the"
            f" {chat[-1].role}'s"
        )
    return [*asked]


class QuestionAnswer(ToolEnv):
    """Ask one question. Pays 1 where the last message is a right answer as text, ignoring case and
    spaces, else 0.

    The verdict on success is left to the run's reward, whatever it is: an episode with a score
    above zero succeeded, unless `success_at` beside a part of the reward says more.
    """

    system_prompt = ""
    # Its own code answers in microseconds, and the programs of the model are waited for on the
    # event loop.
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """A row of questions. Other columns are allowed: rewards may read them."""

        model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

        prompt: Annotated[tuple[InstanceOf[Message], ...], BeforeValidator(_as_chat)]
        """The question: a text, or the messages of a chat that ends with it. Examples and earlier
        turns may come before it: the model sees them as its own, and learns nothing from them."""
        images: Annotated[tuple[InstanceOf[EncodedImage], ...], BeforeValidator(_as_images)] = ()
        """Pictures of the question, which stand before it: addresses with the bytes
        (`data:image/png;base64,...`). Those of rows may be files beside the data, or bytes
        (`agentrl/tasks/pictures.py`). The model has to be one that sees."""
        answer: Any = None
        """The right answer, or a list of right ones."""
        tool: Literal["none", "calculator", "python"] = "none"
        """The tool that the model may use before it answers."""
        system_prompt: str = ""
        """The system message, where the prompt has none."""
        limits: Annotated[SandboxLimits, OwnerOnly()] = SandboxLimits(wall=10.0, cpu=5.0)
        """Limits of a program, with `tool: python`."""
        allow_unsafe: Annotated[bool, OwnerOnly()] = False
        """Run programs without isolation if the machine offers none. They can then do everything
        that you can.
        """

        def check_paid(self) -> None:
            """Check that the environment's own reward pays for some message.

            Raises:
                ConfigError: it cannot, as there is no right answer, or one that is compared in
                vain.
            """
            if not self.golds:
                raise ConfigError(
                    "there is no right answer, for which env=qa pays: name its column in"
                    " tasks.columns, or write a reward that needs none, such as a judge"
                )
            for gold in self.golds:
                if isinstance(gold, Mapping):
                    raise ConfigError(
                        f"the right answer is an object of {', '.join(gold)}: name one of its parts"
                    )
                try:
                    check_it_is_no_solution("answer", gold)
                except ValueError as error:
                    raise ConfigError(f"the right answer is {gold!r:.80}: {error}") from error

        @property
        def shows_images(self) -> bool:
            """True if the question, or what comes before it, has pictures."""
            return bool(self.images) or any(message.images for message in self.prompt)

        @property
        def golds(self) -> list[Any]:
            """The right answers."""
            golds = self.answer if isinstance(self.answer, list | tuple) else [self.answer]
            return [gold for gold in golds if gold is not None]

        @property
        def opening(self) -> tuple[str, list[Message], str]:
            """(system message, messages before the question, question)"""
            systems = [*takewhile(lambda message: message.role == "system", self.prompt)]
            system = "\n\n".join(message.content for message in systems) or self.system_prompt
            return system, [*self.prompt[len(systems) : -1]], self.prompt[-1].content

    def __init__(self) -> None:
        self._programs = Programs()
        self._golds: tuple[str, ...] = ()
        self._history: list[dict[str, Any]] = []
        self._images: tuple[EncodedImage, ...] = ()

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetReply:
        """Ask the question of a row, after the messages before it."""
        question = await self.start(seed, options)
        history = {"history": self._history} if self._history else {}
        return Observation(question, self._images) if self._images else question, history

    async def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Ask the question of a row.

        Raises:
            ConfigError: there is none, or it is written wrongly.
        """
        if "prompt" not in options:
            raise ConfigError(
                "env=qa asks what the rows of a file say, and this task has no prompt: write"
                " tasks=questions.jsonl, with rows of prompt and answer (tasks.columns says which"
                " columns are these)"
            )
        chosen = read_options(self.Options, options)
        self._golds = tuple(_normalise(str(gold)) for gold in chosen.golds)
        self._specs = tuple(
            spec for spec in type(self)._specs if spec.name == _TOOL_OF[chosen.tool]
        )
        self.tools = tuple(spec.schema for spec in self._specs)
        if chosen.tool == "python":
            await self._programs.start(
                chosen.limits, SandboxConfig(allow_unsafe=chosen.allow_unsafe)
            )
        self.system_prompt, history, question = chosen.opening
        self._history = [as_json(message) for message in history]
        self._images = (*chosen.images, *chosen.prompt[-1].images)
        return question

    async def close(self) -> None:
        """Return the sandbox, if it was needed."""
        await self._programs.close()

    def __getstate__(self) -> dict[str, Any]:
        """The state without the tools' classes of arguments, which pickle does not find."""
        return {name: value for name, value in self.__dict__.items() if name != "_specs"}

    async def restore(self, state: bytes) -> None:
        """Go back to a state; the next program borrows a sandbox."""
        await self._programs.close()
        super().restore(state)
        self._specs = tuple(spec for spec in type(self)._specs if spec.schema in self.tools)

    async def step(self, action: str) -> StepReply:
        """Run the calls of a message, or take it as the answer."""
        result = await self._play(action) if self.tools else self.reply(action).step
        observation, reward, terminated, truncated, info = result
        return observation, reward, terminated, truncated, {**info, "success": None}

    def reply(self, text: str) -> ToolResult:
        """Take a message without calls as the answer."""
        return ToolResult("", reward=float(_normalise(text) in self._golds), terminated=True)

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
            return str(_evaluate(ast.parse(expression.strip(), mode="eval").body))
        except (
            SyntaxError,
            ValueError,
            ZeroDivisionError,
            OverflowError,
            RecursionError,
            MemoryError,
        ) as error:
            raise ToolError(f"{expression!r:.80} cannot be computed: {error}") from error


_TOOL_OF = {"none": "", "calculator": "calculate", "python": "python"}


def _normalise(text: str) -> str:
    return " ".join(text.casefold().split())


def _evaluate(node: ast.expr) -> int | float:
    """The value of an expression.

    Raises:
        ValueError: it has something else than arithmetic, or a value too large to be written out.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("use numbers, + - * / // % and parentheses")
    if abs(value) > _MAX_NUMBER:
        raise ValueError("its value is too large")
    return value
