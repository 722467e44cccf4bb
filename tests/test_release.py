"""What `make release` prints and checks."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "release", Path(__file__).parents[1] / ".ci" / "release.py"
)
assert spec is not None
assert spec.loader is not None
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)

CHANGELOG = """# Changelog

## 1.2.0 (2026-12-01)

### Added

- A thing.

### Removed

- Another thing: write `this` instead.

## 1.1.0

### Fixed

- An old bug.
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of version 1.2.0, of which nothing else was made ready, without git."""
    (tmp_path / "agentrl").mkdir()
    (tmp_path / "agentrl" / "__init__.py").write_text('"""It."""\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text("title: it\nversion: 1.2.0\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "releases.json").write_text('{"1.2.0": {}}')
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "_git", lambda *asked: "v1.2.0" if asked[0] == "tag" else "")
    return tmp_path


def test_the_notes_are_the_section_of_the_version_with_what_breaks_first(repository: Path) -> None:
    said = release.notes()
    assert said.startswith("# agentrl 1.2.0 (2026-12-01)\n\n## Removed\n\n- Another thing")
    assert said.endswith("## Added\n\n- A thing.")


def test_what_is_left_to_do_is_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(release.problems()) == []
    (repository / "CITATION.cff").write_text("title: it\nversion: 1.1.0\n")
    (repository / "CHANGELOG.md").write_text(CHANGELOG.replace("2026-12-01", "unreleased"))
    monkeypatch.setattr(release, "_git", lambda *asked: "" if asked[0] == "tag" else " M a.py")
    (repository / "benchmarks" / "releases.json").write_text('{"1.1.0": {}}')
    citation, changelog, figures, changed, tag = release.problems()
    assert "there are no figures of 1.2.0" in figures
    assert "CITATION.cff has another version than 1.2.0" in citation
    assert "## 1.2.0 (YYYY-MM-DD)" in changelog
    assert "not committed" in changed
    assert "git tag -a v1.2.0" in tag
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## 1.1.0\n")
    with pytest.raises(SystemExit, match=r"no section `## 1\.2\.0`"):
        release.notes()


def test_all_that_is_installed_with_agentrl_has_a_licence_that_goes_with_its_own() -> None:
    found = release.licences()
    assert {"torch", "transformers", "pyarrow"} <= set(found)
    assert {
        name: said for name, said in found.items() if not release.GO_WITH_APACHE.search(said)
    } == {}
    for wrong in ("GPL-3.0-only", "AGPL-3.0-or-later", "Proprietary", ""):
        assert not release.GO_WITH_APACHE.search(wrong)
