"""Errors of the user's code: which they are, and where they came from."""

import asyncio
import sysconfig
from pathlib import Path
from traceback import walk_tb

_FOLDERS = [
    Path(__file__).parent,
    *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")),
]
_LIBRARIES = tuple(f"{folder}/" for path in _FOLDERS for folder in (path, path.resolve()))


RAISED_BY_CODE = (Exception, SystemExit, asyncio.CancelledError)
"""What the user's code may raise as its own failure. Only `KeyboardInterrupt` is the user's own
wish.

`sys.exit()` in a game (pygame, argparse) or a `CancelledError` that a library lets out must not end
a run.
"""


def is_cancellation(error: BaseException) -> bool:
    """Whether a caught error means that this task is being cancelled, and must be raised on.

    Otherwise a `CancelledError` is one that the awaited code has raised by itself.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def as_exception(error: BaseException) -> Exception:
    """The error as one that a future can carry: what is no failure of code there, such as a
    `StopIteration`, becomes a RuntimeError with its text.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(with_frame(error))


def with_frame(error: BaseException) -> str:
    """`KeyError: 'x' (game.py:31 in move)`: the error and the innermost frame of the user's own
    code that it came from.

    If there is none, because libraries called each other, it is the innermost frame of all. Of a
    group of errors, which tells nothing itself ("unhandled errors in a TaskGroup"), it is the first
    one, and how many others there are.
    """
    if isinstance(error, BaseExceptionGroup):
        first, others = with_frame(error.exceptions[0]), len(error.exceptions) - 1
        return (
            f"{first}, and {others} other{'s' if others > 1 else ''} at once" if others else first
        )
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    if not frames:
        return said
    own = [
        (code, line) for code, line in frames if not code.co_filename.startswith((*_LIBRARIES, "<"))
    ]
    code, line = (own or frames)[-1]
    return f"{said} ({code.co_filename}:{line} in {code.co_name})"
