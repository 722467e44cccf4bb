"""Values that JSON cannot represent."""

import json
import math
from typing import Any

from pydantic_core import PydanticSerializationError, to_json


def json_of(value: Any) -> bytes:
    """JSON in which numbers that are not finite are null, and lone surrogates, which UTF-8 cannot
    encode, are "?".
    """
    try:
        return to_json(value, inf_nan_mode="null")  # some ten times as fast as what follows
    except PydanticSerializationError:
        written = json.dumps(
            finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False
        )
        return written.encode("utf-8", "replace")


def finite(value: Any) -> Any:
    """The same value, with null for each number within it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
