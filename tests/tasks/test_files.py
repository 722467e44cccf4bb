"""People's files are taken, or refused in one line with the true reason and a remedy."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.errors import ConfigError
from agentrl.tasks.dataset import DatasetTasks
from agentrl.trajectory import Task
from tests.tasks.files import FILES, DataFile, table

_SETTING = re.compile(r'tasks\.(\w+)=("[^"]*"|\{[^}]*\})')


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def first_task(path: Path, settings: dict[str, Any]) -> Task:
    split = settings | {"held_out": settings.get("held_out", 0.0)}
    return DatasetTasks(DatasetTasks.Config(data=str(path), **split), "qa", 0).task(0)


@pytest.mark.parametrize("file", FILES, ids=[file.shape for file in FILES])
def test_each_file_is_taken_or_refused_in_one_line_that_says_what_to_write(
    file: DataFile, tmp_path: Path
) -> None:
    path = tmp_path / file.name
    file.save(path)
    settings = dict(file.settings)
    if file.line:
        with pytest.raises(ConfigError) as refused:
            first_task(path, settings)
        assert str(refused.value).endswith(file.line)
        assert "\n" not in str(refused.value)
        settings = {name: yaml.safe_load(value) for name, value in _SETTING.findall(file.line)}
        if not settings or "COLUMN" in file.line:
            return
    options = first_task(path, settings).options
    assert (options["prompt"], options.get("answer")) == (file.prompt, file.answer)


def test_the_page_about_tasks_has_the_table_of_these_files() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
