"""The header of a file of tensors, in the format of safetensors
(https://huggingface.co/docs/safetensors#format).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FORMATS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of torch's number formats in such a file."""


def tensor_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes before those of these tensors: the length of the JSON in 8 bytes, and the JSON,
    filled up to a multiple of 8 bytes.

    `tensors`: of each its name, torch's name of its number format, its shape and its bytes, in the
    order of the file. `("norm", "float32", (2, 3), 24)` becomes
    `{"norm":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}`.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, number_format, shape, size in tensors:
        begin, end = end, end + size
        entries[name] = {
            "dtype": FORMATS[number_format],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
