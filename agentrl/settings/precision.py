"""The number format that an engine computes in, which is the trainer's unless a user says so."""

from typing import Literal

EngineDtype = Literal["auto", "float32", "bfloat16"]
"""The data type of an engine's weights, as a user writes it."""


def resolve_dtype(
    dtype: EngineDtype, trainer: str | None, *, gpu: bool
) -> Literal["float32", "bfloat16"]:
    """The data type that `dtype` stands for on a device.

    `auto` is that of the trainer, which learns from the logprobs of what the engine samples. A
    trainer without one computes in bfloat16 on GPUs that have it, and in float32 elsewhere.

    Args:
        dtype: The engine's setting.
        trainer: The trainer's setting; None if it says nothing.
        gpu: The device is a GPU that computes in bfloat16.
    """
    if dtype != "auto":
        return dtype
    if trainer in ("float32", "bfloat16"):
        return "bfloat16" if trainer == "bfloat16" else "float32"
    return "bfloat16" if gpu else "float32"
