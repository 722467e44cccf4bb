"""The versions that `make install` installs: of every dependency one that is allowed, wherever
packages come from.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agentrl
from agentrl.package.distribution import installed_version

ROOT = Path(__file__).parents[1]
EXTRAS = re.search(r"^EXTRAS \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
LOCKED = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()


def wanted() -> list[str]:
    """What pyproject.toml asks for with the extras of `make install`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS is not None
    extras = [
        one for extra in EXTRAS[1].split(",") for one in project["optional-dependencies"][extra]
    ]
    return [*project["dependencies"], *extras]


def test_it_names_versions_and_no_index_path_or_build() -> None:
    assert [
        line for line in LOCKED if not re.fullmatch(r"[a-z0-9._-]+==[0-9][0-9a-z.]*", line)
    ] == []
    assert len({line.partition("==")[0] for line in LOCKED}) == len(LOCKED)


@pytest.mark.parametrize("requirement", wanted())
def test_a_dependency_has_a_version_that_is_allowed(requirement: str) -> None:
    one = Requirement(requirement)
    versions = dict(line.split("==") for line in LOCKED)
    found = versions.get(canonicalize_name(one.name))
    assert found is not None, "run `make lock`"
    assert one.specifier.contains(found, prereleases=True), (
        f"{found} is not allowed any more; run `make lock`"
    )


def test_a_release_has_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]  # setuptools reads that of agentrl/__init__.py
    assert installed_version() == agentrl.__version__, "run `make install` again"
    assert f"\nversion: {agentrl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {agentrl.__version__}" in (ROOT / "CHANGELOG.md").read_text()
