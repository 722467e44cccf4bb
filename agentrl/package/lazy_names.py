"""Public names of a package that are imported when they are first used (PEP 562)."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def home_of(homes: Mapping[str, str]) -> dict[str, str]:
    """The module of each name.

    Args:
        homes: by module, its names with spaces between them
    """
    return {name: home for home, names in homes.items() for name in names.split()}


def lazy_names(
    package: dict[str, Any], homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` for a package whose globals are `package`.

    Args:
        homes: the module of each public name
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in homes:
            close = get_close_matches(name, homes, n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}{hint}")
        value = getattr(import_module(homes[name]), name)
        package[name] = value  # the next use finds it without this function
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*package, *homes})

    return __getattr__, __dir__
