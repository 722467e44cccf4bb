"""A piece of the battery: one question about a machine with GPUs, asked in a process of its own."""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

Device = Literal["cuda", "cpu"]
Verdict = Literal["passed", "failed", "skipped"]
SECONDS = 300.0
"""How long a piece may take."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A question, and where the code is that answers it. Nothing here imports torch."""

    name: str
    """Its name on the command line and in the report."""
    purpose: str
    """The question, as a sentence that says what holds if it passes."""
    code: str
    """The "module:function" that answers it; the function takes a `Place` and `Findings`."""
    gpus: int = 1
    """GPUs that it needs."""
    on_cpu: bool = True
    """True if a CPU can answer it too, with tiny sizes."""
    needs: tuple[str, ...] = ()
    """Modules without which it cannot be asked, beside torch and transformers."""

    def obstacle(self, device: Device, gpus: int) -> str | None:
        """Why it cannot be asked on a machine with so many GPUs; None if it can."""
        missing = missing_modules(("torch", "transformers", *self.needs))
        if missing:
            return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        if device == "cpu":
            return None if self.on_cpu else "it is about a GPU, and --device is cpu"
        if gpus == 0:
            return "this machine has no GPU that torch can use"
        if gpus < self.gpus:
            return f"it needs {self.gpus} GPUs, and this machine has {gpus}"
        return None


def missing_modules(names: Sequence[str]) -> list[str]:
    """Those of these modules that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece runs."""

    device: Device
    """What it computes on."""
    folder: Path
    """An existing folder for what it leaves, which is kept."""

    @property
    def on_gpu(self) -> bool:
        """True on a GPU, where sizes are real ones."""
        return self.device == "cuda"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number, or a fact."""

    name: str
    """What was measured."""
    value: float | str
    """The number, or the fact in words."""
    unit: str = ""
    """Its unit."""


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a piece."""

    name: str
    """The piece's name."""
    verdict: Verdict
    """What came out."""
    reason: str = ""
    """Why it failed or was skipped."""
    figures: tuple[Figure, ...] = ()
    """What was measured until then, in order."""
    seconds: float = 0.0
    """How long it took, with the start of its process."""
    log: str = ""
    """The end of what it printed, if it failed."""
    files: tuple[str, ...] = ()
    """The files that it left, relative to the report."""


class SkipError(Exception):
    """The piece cannot be asked here, for this reason."""


@dataclass(slots=True)
class Findings:
    """What a piece has found so far. It is written down at once, so no crash loses it."""

    file: Path
    figures: list[Figure] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, name: str, value: float | str, unit: str = "") -> None:
        """Keep a figure."""
        self.figures.append(Figure(name, value, unit))
        self.write()

    def check(self, holds: bool, otherwise: str) -> None:
        """Unless this holds, the piece fails for the reason `otherwise`; it goes on in any case."""
        if not holds:
            self.wrong.append(otherwise)
            self.write()

    def write(self, verdict: Verdict | None = None, reason: str = "") -> None:
        """Replace the file; without a verdict, the piece has not ended yet."""
        if verdict == "passed" and self.wrong:
            verdict, reason = "failed", "; ".join(self.wrong)
        content = {
            "verdict": verdict,
            "reason": reason or "; ".join(self.wrong),
            "figures": [asdict(figure) for figure in self.figures],
        }
        written = self.file.with_suffix(".new")
        written.write_text(json.dumps(content))
        written.replace(self.file)


def answer(code: str, place: Place, findings: Findings) -> None:
    """Run a piece's code here, and write its verdict down."""
    try:
        resolve_name(code)(place, findings)
    except SkipError as reason:
        findings.write("skipped", str(reason))
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] in ("agentrl", "benchmarks"):
            raise
        findings.write("skipped", f"{error.name} is not installed")
    else:
        findings.write("passed")


def read_result(piece: Piece, file: Path, otherwise: str) -> Result:
    """What a piece has written down; if it came to no verdict, it failed for the reason
    `otherwise`.
    """
    content = json.loads(file.read_text()) if file.exists() else {}
    figures = tuple(Figure(**figure) for figure in content.get("figures", ()))
    verdict: Verdict | None = content.get("verdict")
    if verdict is None:
        found = content.get("reason", "")
        return Result(piece.name, "failed", "; ".join(filter(None, (otherwise, found))), figures)
    return Result(piece.name, verdict, content["reason"], figures)


def with_files(result: Result, folder: Path, root: Path) -> Result:
    """The same, with the files in a folder, as the report in `root` names them."""
    names = sorted(
        file.relative_to(root).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and file.name not in ("result.json", "result.new")
    )
    return replace(result, files=tuple(name for name in names if os.fspath(name)))
