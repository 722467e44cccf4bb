"""The base of every component's settings, and what numbers, texts and paths may be in them."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from agentrl.errors import RAISED_BY_CODE, AgentRLError, describe
from agentrl.settings.faults import DEEPEST

LARGEST = 1e30
"""Largest number of a setting, and of a score. Beyond it, what is computed in float32 becomes
infinite or NaN.
"""


COLDEST = 1e-6
"""Lowest temperature above 0. Below it, logits that are divided by it become infinite."""


class Settings(BaseModel):
    """Base of every component's `Config`: frozen, and an unknown key is an error.

    Numbers are finite and not larger than `LARGEST`, also in mappings and lists. A field of which
    infinity is a sensible value says so: `Field(math.inf, allow_inf_nan=True)`. "No limit" is
    better written as `float | None`. In paths (`Path`, `PathText`), also in mappings and lists, `~`
    is the user's home folder, and an empty text is an error, as it is in names (`NameText`).
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # null, the default, would not be read back as the same setting.
        ser_json_inf_nan="constants",
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Around all validators of a class, also those of its subclasses: what one raises by
        mistake is a fault of the settings too, with its own line.
        """
        return core_schema.no_info_wrap_validator_function(cls._validate, handler(source))

    @classmethod
    def _validate(cls, data: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(data)
        except (ValueError, AssertionError, AgentRLError):
            raise
        except RAISED_BY_CODE as error:
            raise ValueError(f"a check of {cls.__qualname__} raised {describe(error)}") from error

    def needs(self) -> Mapping[str, str]:
        """The modules that the component imports where it works, beyond what agentrl requires; each
        with what to write if it is not installed. A run looks for them before it begins.
        """
        return {}

    def check_installed(self) -> None:
        """Check what only the modules of `needs` can tell; called where they are installed.

        Raises:
            ConfigError: a setting is wrong.
        """

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sections(cls, data: Any) -> Any:
        """A section without settings (`rollout:`, all of whose lines are comments) is as one that
        is left out.
        """
        if isinstance(data, Mapping):
            return {
                key: cls._unmistaken(key, value)
                for key, value in data.items()
                if value is not None or not cls._is_section(key)
            }
        return {} if data is None else data

    @classmethod
    def _unmistaken(cls, key: str, value: Any) -> Any:
        """The value, or one that is refused in place of what Pydantic would take for another: true
        for the number 1 (`steps: yes`), an empty text for the path of the current folder.
        """
        field = cls.model_fields.get(key)
        if field is None:
            return value
        if isinstance(value, bool) and _is_number(field.annotation):
            return str(value)
        return _no_empty_paths(value) if _is_path(field.annotation) else value

    @classmethod
    def _is_section(cls, key: str) -> bool:
        """True if a setting is a mapping of others, and cannot be null."""
        field = cls.model_fields.get(key)
        kind = None if field is None else get_origin(field.annotation) or field.annotation
        return isinstance(kind, type) and issubclass(kind, Settings | Mapping)

    @field_validator("*")
    @classmethod
    def _check_computable(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if field is not None and _is_free(field.annotation):
            for one in (
                value if isinstance(value, tuple) and field.annotation is not Any else [value]
            ):
                check_plain(one)
        if field is not None and not _may_be_infinite(field):
            check_numbers(value)
        return value

    @field_validator("*")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        return in_home(value)

    @model_validator(mode="after")
    def _check_default_numbers(self) -> Self:
        for name, field in type(self).model_fields.items():
            if name not in self.model_fields_set and not _may_be_infinite(field):
                try:
                    check_numbers(getattr(self, name))
                except ValueError as error:
                    raise ValueError(f"the default of {name} will not do: {error}") from error
        return self


def _is_free(annotation: Any) -> bool:
    """True if a setting of this type may hold values of any kind."""
    return annotation is Any or any(map(_is_free, get_args(annotation)))


def _is_path(annotation: Any) -> bool:
    """True if a setting of this type holds paths, which texts are read as."""
    kind = get_origin(annotation) or annotation
    return kind is Path or any(map(_is_path, get_args(annotation)))


class _EmptyPath:
    """An empty text where a path belongs, which is none."""

    def __repr__(self) -> str:
        return "''"


def _no_empty_paths(value: Any) -> Any:
    if isinstance(value, str) and not value:
        return _EmptyPath()
    if type(value) is dict:
        return {key: _no_empty_paths(one) for key, one in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(_no_empty_paths, value))
    return value


def _is_number(annotation: Any) -> bool:
    """True if a setting of this type may be a number, and neither true nor false nor a text."""
    kinds, open_kinds = set[Any](), [annotation]
    while open_kinds:
        kind = open_kinds.pop()
        if get_origin(kind) is Annotated:
            open_kinds.append(get_args(kind)[0])
        elif get_origin(kind) in {Union, UnionType}:
            open_kinds += get_args(kind)
        else:
            kinds.add(kind)
    return bool(kinds & {int, float}) and kinds.isdisjoint({bool, str, Any})


def _may_be_infinite(field: FieldInfo) -> bool:
    return any(getattr(one, "allow_inf_nan", None) is True for one in field.metadata)


def in_home(value: Any) -> Any:
    """The value with `~` of its paths, also in mappings and lists, replaced by the user's home
    folder.
    """
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    if type(value) is dict:
        return {key: in_home(one) for key, one in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(in_home, value))
    return value


NameText = Annotated[str, Field(min_length=1)]
"""The name of something that is looked up elsewhere, where an empty text would mean none, any, or
whatever comes first.
"""
PathText = Annotated[NameText, AfterValidator(os.path.expanduser)]
"""A path as text: where something else may be written too, such as the name of a model on the hub.
"""


def check_temperature(temperature: float | None) -> float | None:
    """A sampling temperature that logits can be divided by, if there is one; 0 is greedy.

    Raises:
        ValueError: it is too low.
    """
    if temperature is not None and 0 < temperature < COLDEST:
        raise ValueError(
            f"logits cannot be divided by so little: write at least {COLDEST:g}, or 0 for greedy"
        )
    return temperature


def check_numbers(value: object) -> None:
    """Check all numbers in a value: a number, or a mapping or sequence with more of them.

    Raises:
        ValueError: one is not finite, or too large to compute with.
    """
    if isinstance(value, float):
        _check_finite(value)
        if abs(value) > LARGEST:
            raise ValueError(
                f"{value:g} is too large to compute with: write a number of at most {LARGEST:g}"
            )
    elif isinstance(value, Mapping):
        for one in value.values():
            check_numbers(one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            check_numbers(one)


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(
            f"{value} is not a finite number: where there is no limit, leave the setting out, write"
            " null if it takes that, or a large number such as 1e9"
        )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{text!r:.80} has {half!r}, half of a surrogate pair, which is no character"
        ) from error


def check_plain(value: object, deepest: int = DEEPEST) -> None:
    """Check that a value means the same wherever it goes: in a YAML file, in JSON, in another
    process.

    Raises:
        ValueError: it, or a value in it, is not text, a finite number, true, false, null, a list or
            a mapping with texts as keys.
    """
    if deepest < 0:
        raise ValueError(
            f"more than {DEEPEST} levels of lists and mappings in each other: write less nesting"
        )
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        _check_finite(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{key!r:.80} ({type(key).__name__}) is a key: write text")
            _check_text(key)
            check_plain(one, deepest - 1)
    elif isinstance(value, list):
        for one in value:
            check_plain(one, deepest - 1)
    else:
        raise ValueError(
            f"{value!r:.80} is a {type(value).__name__}, which would come back from a file or a"
            " process as something else: write text, a number, true, false, null, a list or a"
            " mapping"
        )
