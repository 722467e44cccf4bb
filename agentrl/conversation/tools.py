"""Tools: typed public methods of a class that a model may call.

The schema is OpenAI's ({"type": "function", "function": {"name", "description", "parameters"}}).
`agentrl/conversation/tool_calls.py` parses the calls in the model's messages.
"""

import contextlib
import difflib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from agentrl.errors import AgentRLError, ConfigError
from agentrl.protocols import StepResult
from agentrl.settings.located import Located, located
from agentrl.trajectory import ToolCall


class ToolError(AgentRLError):
    """A tool's message to the model that it cannot do as asked. It becomes an observation, never a
    failed episode.
    """


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool: its name, what it does, and the pydantic model its arguments must fit.

    `parameters` maps each Python parameter to its field in `arguments` (fields are numbered, so
    that a parameter may have any name, even `schema` or `copy`).
    """

    name: str
    description: str
    arguments: type[BaseModel]
    parameters: Mapping[str, str]

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI-style JSON schema that chat templates expect."""
        parameters = self.arguments.model_json_schema(schema_generator=_TerseJsonSchema)
        del parameters["title"]
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as keywords for the method; missing ones are left to the method's defaults.

        Strict, like JSON: a string is not converted to a number, nor a boolean to an integer.

        Raises:
            ToolError: an argument does not fit; says which, and what the tool takes.
        """
        try:
            fitted = self.arguments.model_validate_json(json.dumps(dict(arguments)), strict=True)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
            found = located(self.arguments, problems, arguments)
            raise ToolError(f"{self.name}: {_describe_faults(found)}. {self._takes()}") from error
        except (RecursionError, TypeError, ValueError) as error:
            raise ToolError(
                f"{self.name}: the arguments are not plain JSON ({error}). {self._takes()}"
            ) from error
        return {
            name: getattr(fitted, at)
            for name, at in self.parameters.items()
            if at in fitted.model_fields_set
        }

    def from_words(self, words: str) -> dict[str, Any]:
        """The arguments of a short call: its words are the value of the first parameter.

        Raises:
            ToolError: the tool takes no arguments.
        """
        if not words:
            return {}
        if not self.parameters:
            raise ToolError(f"{self.name}: nothing may follow the name. {self._takes()}")
        name, at = next(iter(self.parameters.items()))
        if self.arguments.model_fields[at].annotation is not str:
            # If it is no JSON, `validate` says what is wrong.
            with contextlib.suppress(ValueError, RecursionError):
                return {name: json.loads(words)}
        return {name: words}

    def _takes(self) -> str:
        fields = self.arguments.model_fields
        named = [
            (
                name
                if fields[at].is_required()
                else f"{name} (optional, default {fields[at].default!r:.40})"
            )
            for name, at in self.parameters.items()
        ]
        return f"{self.name} takes {', '.join(named) or 'no arguments'}"


class _TerseJsonSchema(GenerateJsonSchema):
    """Omits the titles that pydantic derives from names: they cost prompt tokens and add no
    information.
    """

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def tools_of(obj: object, *, base: type = object) -> tuple[ToolSpec, ...]:
    """The tools of a class or an instance: its public methods, in the order of their definition.

    Methods of `base` and names that start with an underscore are not tools. Google-style `Args:`
    lines of the docstring become the descriptions of the parameters.

    Raises:
        ConfigError: a public method has a parameter without a type, or one that JSON cannot
        express.
    """
    cls = obj if isinstance(obj, type) else type(obj)
    names = dict.fromkeys(name for owner in reversed(cls.__mro__) for name in vars(owner))
    return tuple(
        _make_spec(cls, name)
        for name in names
        if not name.startswith("_")
        and not hasattr(base, name)
        and isinstance(inspect.getattr_static(cls, name), types.FunctionType | staticmethod)
    )


def find_tool(specs: Sequence[ToolSpec], name: str) -> ToolSpec:
    """The tool with that name.

    Raises:
        ToolError: there is none; suggests the nearest name and lists all.
    """
    by_name = {spec.name: spec for spec in specs}
    if name not in by_name:
        raise no_such_tool(name, by_name)
    return by_name[name]


def no_such_tool(name: str, known: Collection[str]) -> ToolError:
    """The error for an unknown tool name: suggests the nearest name and lists all."""
    near = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ToolError(f"there is no tool {name[:64]!r}{hint} Tools: {', '.join(known)}")


def read_short_call(specs: Sequence[ToolSpec], text: str) -> ToolCall:
    """Read a message that is one call in words: the tool's name, a space, and the value of its
    first parameter.

    Raises:
        ToolError: there is no such tool, or it takes no arguments.
    """
    name, _, words = text.strip().partition(" ")
    return ToolCall(name, find_tool(specs, name).from_words(words.strip()))


def short_call(call: ToolCall) -> str:
    """The call in words, as `read_short_call` reads it; only its first argument is written."""
    return " ".join([call.name, *map(str, list(call.arguments.values())[:1])])


def how_to_call_shortly(specs: Sequence[ToolSpec]) -> str:
    """Tells a model which tools there are, and how to call one in words."""
    usage = [
        " ".join([spec.name, *(name.upper() for name in list(spec.parameters)[:1])])
        for spec in specs
    ]
    return f"Call one tool in each message, as one of these: {', '.join(usage)}"


def how_to_call(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tells a model that wrote no call which tools (OpenAI-style schemas) there are, and how to
    call one.
    """
    names = ", ".join(str(tool["function"]["name"]) for tool in tools)
    example = ToolCall("...", {}).render().replace("{}", "{...}")
    return f"Call a tool ({names}) like this:\n{example}"


def is_refusal(observation: str) -> bool:
    """True if the answer to a call says that it was refused."""
    return observation.startswith("Error:")


def merged(results: Sequence[tuple[str, StepResult]]) -> StepResult:
    """Combine the calls of a message, each with its tool's name, into one step; several get a line
    each, with the name.

    Rewards are added, any call can end the episode, and for each info key the last value counts.
    """
    steps = [step for _, step in results]
    many = len(results) > 1
    lines = [f"{name[:64]}: {step[0]}" if many and name else step[0] for name, step in results]
    reward = float(sum(step[1] for step in steps))
    info = {key: value for step in steps for key, value in step[4].items()}
    return (
        "\n".join(lines),
        reward,
        any(step[2] for step in steps),
        any(step[3] for step in steps),
        info,
    )


def _make_spec(cls: type, name: str) -> ToolSpec:
    where = f"{cls.__module__}.{cls.__qualname__}.{name}"
    static = inspect.getattr_static(cls, name)
    function: Callable[..., Any] = getattr(cls, name)
    parameters = list(inspect.signature(function).parameters.values())
    if not isinstance(static, staticmethod):
        parameters = parameters[1:]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"{where}: a type is not known where the class is defined: {error}"
        ) from error
    description, described = _read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{where}: {parameter} cannot be filled from JSON; a tool's parameters have names"
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"{where}: parameter {parameter.name!r} has no type. A public method is a tool:"
                f" write `{parameter.name}: int` (or another type), or name the method `_{name}` if"
                " it is no tool"
            )
        default: Any = ... if parameter.default is parameter.empty else parameter.default
        extra: dict[str, Any] = (
            {"description": described[parameter.name]} if parameter.name in described else {}
        )
        fields[f"argument_{number}"] = (
            hints[parameter.name],
            Field(default, alias=parameter.name, **extra),
        )
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        model = create_model(name, __config__=config, **fields)
        model.model_json_schema()
    except PydanticUserError as error:
        raise ConfigError(
            f"{where}: a parameter's type cannot be expressed in JSON: {error.message}"
        ) from error
    return ToolSpec(
        name, description, model, {p.name: f"argument_{n}" for n, p in enumerate(parameters)}
    )


_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and each parameter's description under `Args:`."""
    section = ""
    description: list[str] = []
    arguments: dict[str, str] = {}
    indent, name = 0, ""
    for line in doc.splitlines():
        text = line.strip()
        if heading := _SECTION.match(line):
            section, indent, name = heading[1], 0, ""
        elif not section:
            description.append(text)
        elif section in ("Args", "Arguments") and text:
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            if depth == indent and (entry := _ARGUMENT.match(text)):
                name = entry[1]
                arguments[name] = entry[2]
            elif name:
                arguments[name] = f"{arguments[name]} {text}".strip()
    return "\n".join(description).strip(), arguments


def _describe_faults(found: Sequence[Located]) -> str:
    """Up to five of pydantic's findings, in one line."""
    findings = []
    for one in found[:5]:
        item, where = one.details, ".".join(one.keys)[:80]
        if item["type"] == "missing":
            findings.append(f"{where!r} is missing")
        elif item["type"] == "extra_forbidden":
            findings.append(f"there is no argument {where!r}")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            findings.append(f"{where!r}: {message}, got {item['input']!r:.60}")
    return "; ".join(findings)
