"""Dockerfiles that a provider without images can follow: files in folders, variables and commands.

What the base image would bring along is taken from the provider's own system.
"""

import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.protocols import Dockerfile, Image

FOLDERS = ("app", "logs", "solution", "tests")
"""Folders of the root that a jail has, as links into its own folder."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`COPY`: files of the Dockerfile's folder."""

    files: dict[str, bytes]
    """Contents by absolute paths."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """`RUN`: a command line."""

    line: str
    folder: str


@dataclass(frozen=True, slots=True)
class PlainImage:
    """What a Dockerfile does."""

    folder: str
    """The working folder at its end."""
    environment: dict[str, str]
    steps: list[Copy | RunLine]


def plain_image(origin: Image | Dockerfile) -> PlainImage:
    """Read a Dockerfile.

    Raises:
        ConfigError: there is an image instead, or an instruction that needs one.
    """
    if isinstance(origin, Image):
        raise ConfigError(
            f"the task needs the image {origin.name!r}, and this provider has no images: write"
            " sandbox: {name: docker}"
        )
    path = origin.folder / "Dockerfile"
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    made = PlainImage("/", {}, [])
    for line in re.sub(r"\\\n", " ", text).split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            made = _apply_instruction(made, line.strip(), origin.folder)
    if made.folder == "/":
        raise _needs_images("no WORKDIR")
    return made


def _apply_instruction(made: PlainImage, line: str, context: Path) -> PlainImage:
    """The image after one more instruction. `context`: the Dockerfile's folder."""
    word, _, rest = line.partition(" ")
    match word.upper():
        case "FROM" if " AS " not in rest.upper() and not made.steps:
            return made
        case "WORKDIR":
            folder = posixpath.normpath(posixpath.join(made.folder, rest.strip()))
            _check_place(folder)
            return PlainImage(folder, made.environment, made.steps)
        case "ENV" if "=" in rest:
            variables = dict(part.split("=", 1) for part in shlex.split(rest) if "=" in part)
            return PlainImage(made.folder, {**made.environment, **variables}, made.steps)
        case "COPY" if not rest.startswith("-"):
            return PlainImage(
                made.folder, made.environment, [*made.steps, _copy(made, rest, context)]
            )
        case "RUN" if not rest.startswith(("-", "[")):
            step = RunLine(rest, made.folder)
            return PlainImage(made.folder, made.environment, [*made.steps, step])
        case "CMD" | "ENTRYPOINT" | "EXPOSE" | "LABEL":
            return made
    raise _needs_images(line)


def _copy(made: PlainImage, rest: str, context: Path) -> Copy:
    *sources, target = shlex.split(rest)
    place = posixpath.normpath(posixpath.join(made.folder, target))
    _check_place(place)
    into = target.endswith("/") or target in {".", ".."} or len(sources) > 1
    files = {}
    for source in sources:
        found = sorted(context.glob(source)) if source != "." else [context]
        if not found:
            raise ConfigError(f"COPY {rest}: there is no {source!r} in {str(context)!r}")
        for path in found:
            if not path.resolve().is_relative_to(context.resolve()):
                raise ConfigError(f"COPY {rest}: {source!r} is outside of {str(context)!r}")
            if path.is_dir():
                for file in sorted(path.rglob("*")):
                    if file.is_file():
                        inside = f"{file.relative_to(path)}"
                        files[posixpath.join(place, inside)] = file.read_bytes()
            else:
                name = posixpath.join(place, path.name) if into else place
                files[name] = path.read_bytes()
    return Copy(files)


def _check_place(path: str) -> None:
    if path.split("/")[1] not in FOLDERS:
        raise _needs_images(f"the folder {path!r}")


def _needs_images(what: str) -> ConfigError:
    return ConfigError(
        f"the task's Dockerfile has {what!r}, which a provider without images cannot follow: it"
        f" knows FROM, WORKDIR, ENV, COPY and RUN in the folders {', '.join(FOLDERS)}. Write"
        " sandbox: {name: docker}"
    )
