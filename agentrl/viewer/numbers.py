"""Numbers that JSON has no word for."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same value, with null for each number within it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
