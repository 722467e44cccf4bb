"""Where in the user's code an error came from."""

import sysconfig
from pathlib import Path
from traceback import walk_tb

_FOLDERS = [Path(__file__).parent, *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))]
_LIBRARIES = tuple(f"{folder}/" for path in _FOLDERS for folder in (path, path.resolve()))


def with_frame(error: BaseException) -> str:
    """`KeyError: 'x' (game.py:31 in move)`: the error and the innermost frame of the user's own code that it came from.

    If there is none, because libraries called each other, it is the innermost frame of all.
    """
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    if not frames:
        return f"{type(error).__name__}: {error}"
    own = [(code, line) for code, line in frames if not code.co_filename.startswith((*_LIBRARIES, "<"))]
    code, line = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({code.co_filename}:{line} in {code.co_name})"
