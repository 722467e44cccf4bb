"""The answer is JSON that fits a schema."""

import json
import math
from typing import Any, Self

from pydantic import model_validator

from agentrl.conversation.tool_calls import refuse_constant
from agentrl.errors import ConfigError
from agentrl.package.distribution import install_command
from agentrl.rewards.rules.answer import AnswerRule, AnswerSettings, checked
from agentrl.settings.base import NameText
from agentrl.trajectory import Task


class JsonSchema(AnswerRule):
    """1 where the answer, or the last ```json block in it, is JSON of the schema, without a key
    that stands twice.

    Schemas hold patterns, so this runs in a process.

    Needs the package jsonschema (`pip install "agentrl-train[rewards]"`).
    """

    isolation = "process"
    imports = ("jsonschema",)

    class Config(AnswerSettings):
        """The schema."""

        gold: NameText = "schema"
        """The task's option that holds the schema, where `json_schema` is not given."""
        json_schema: dict[str, Any] | None = None
        """A JSON schema (draft 2020-12) for all tasks."""

        @model_validator(mode="after")
        def _is_a_schema(self) -> Self:
            if self.json_schema is not None:
                _check_schema(self.json_schema)
            return self

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config

    def golds(self, task: Task) -> tuple[Any, ...]:
        """The schema.

        Raises:
            ConfigError: the task has no schema, or what it has is none.
        """
        schemas = (
            super().golds(task) if self._config.json_schema is None else (self._config.json_schema,)
        )
        for schema in schemas:
            checked(self._config.gold, schema, _check_schema)
        return schemas

    def right(self, answer: str, gold: Any) -> bool:
        """True if the answer is JSON of this schema."""
        from jsonschema import Draft202012Validator

        _, opened, rest = answer.rpartition("```json")
        try:
            value = json.loads(
                rest.partition("```")[0] if opened else answer,
                parse_constant=refuse_constant,
                parse_float=_parse_float,
                object_pairs_hook=_parse_object,
            )
        except (ValueError, RecursionError):
            return False
        return bool(Draft202012Validator(gold).is_valid(value))


def _parse_float(text: str) -> float:
    """A number of JSON.

    Raises:
        ValueError: it is too large: Python reads 1e999 as infinity.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is larger than any number of JSON's readers")
    return value


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        ValueError: it names a key twice, and so says two things, of which a reader sees only one.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return value


def _check_schema(schema: Any) -> None:
    """Check that this is a JSON schema.

    Raises:
        ValueError: it is none.
        ConfigError: jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator, SchemaError
    except ImportError as error:
        raise ConfigError(
            f"reward=json_schema needs jsonschema ({error}): {install_command('rewards')}"
        ) from error
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
