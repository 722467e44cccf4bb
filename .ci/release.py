"""What a release needs beside building: `python .ci/release.py check`, `licences`, `notes`.

check       the version is the same in all places, the changelog has its section, the tag its commit
licences    of all that `pip install agentrl-train` brings: each is known, and goes with Apache-2.0
notes       the section of the changelog, what breaks first
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
NAME = "agentrl-train"
ORDER = ("Removed", "Changed", "Deprecated", "Security", "Added", "Fixed")
"""The categories of the notes. A reader who updates looks for what breaks."""
GO_WITH_APACHE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public|Zlib|Unlicense|0BSD"
    r"|HPND|CC0|CNRI|LGPL|Public Domain)\b",
    re.IGNORECASE,
)
BY_HAND = {
    "httpx-aiohttp": "BSD-3-Clause",
    "openai-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
    "setuptools": "MIT",
}
"""Licences of distributions whose metadata does not name them, read in their files."""


OF_TORCH = re.compile(r"(nvidia|cuda)-.+")
"""NVIDIA's libraries, which builds of torch for GPUs bring under NVIDIA's own licence. The wheel
has nothing of them."""


def version() -> str:
    """The version of the sources: `__version__`, which pyproject.toml takes too."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "agentrl/__init__.py").read_text(), re.M)
    if found is None:
        raise SystemExit("agentrl/__init__.py has no __version__")
    return found[1]


def section(of: str) -> tuple[str, dict[str, str]]:
    """The heading of a version in the changelog, and the text of each of its categories."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## ({re.escape(of)}\b[^\n]*)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section `## {of}`")
    parts = re.split(r"^### (.+)\n", found[2], flags=re.M)
    return found[1], dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


def notes() -> str:
    """The notes of the release, as Markdown."""
    heading, by_category = section(version())
    names = [name for name in ORDER if name in by_category]
    names += [name for name in by_category if name not in ORDER]
    return "\n\n".join(
        [f"# agentrl {heading}", *(f"## {name}\n\n{by_category[name]}" for name in names)]
    )


def problems() -> Iterator[str]:
    """What is not ready for a release."""
    now = version()
    if f"\nversion: {now}\n" not in (ROOT / "CITATION.cff").read_text():
        yield f"CITATION.cff has another version than {now}"
    if "unreleased" in section(now)[0]:
        yield f"CHANGELOG.md calls {now} unreleased: write its date, ## {now} (YYYY-MM-DD)"
    if now not in json.loads((ROOT / "benchmarks/releases.json").read_text()):
        yield f"there are no figures of {now}: python benchmarks/releases.py"
    if _git("status", "--porcelain", "--untracked-files=no"):
        yield "files are changed and not committed"
    if f"v{now}" not in _git("tag", "--points-at", "HEAD").split():
        yield f"this commit has no tag: git tag -a v{now}, when all else is right"


def licences() -> dict[str, str]:
    """The licence of everything that is installed with this distribution, by its name."""
    found: dict[str, str] = {}
    waiting = [NAME]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform
        found[name] = BY_HAND.get(name) or _licence(one)
        for text in one.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    del found[NAME]
    return found


def _licence(one: Distribution) -> str:
    said = [one.metadata.get("License-Expression") or ""]
    kinds = one.metadata.get_all("Classifier") or []
    said += [kind.rpartition(" :: ")[2] for kind in kinds if kind.startswith("License ::")]
    first = (one.metadata.get("License") or "").strip().splitlines()[:1]
    return " / ".join(filter(None, [*said, *first]))


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> int:
    """Print what was asked for; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["check", "licences", "notes"])
    match parser.parse_args().what:
        case "notes":
            print(notes())
            return 0
        case "licences":
            found = licences()
            wrong = [
                name
                for name, said in found.items()
                if not GO_WITH_APACHE.search(said) and not OF_TORCH.fullmatch(name)
            ]
            for name, said in sorted(found.items()):
                print(f"{'WRONG' if name in wrong else 'right':6} {name:32} {said or 'not named'}")
            return 1 if wrong else 0
    wrong = list(problems())
    print("\n".join(wrong) or f"{version()} can be released")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
