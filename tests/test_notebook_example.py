"""The notebook of the examples runs from top to bottom, as a user's Jupyter runs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SMALLER = {"steps: 16": "steps: 2", "episodes: 1024": "episodes: 64", "tasks: 100": "tasks: 8"}


@pytest.mark.long
@pytest.mark.parametrize("smaller", [SMALLER, {}], ids=["two steps", "as it is"])
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, smaller: dict[str, str]) -> None:
    text = NOTEBOOK.read_text()
    for whole, part in smaller.items():
        assert whole in text
        text = text.replace(whole, part)
    path = tmp_path / "notebook.ipynb"
    path.write_text(text)
    execute = Path(sys.executable).with_name("jupyter-execute")
    ended = subprocess.run(
        [execute, "--inplace", path.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    cells = json.loads(path.read_text())["cells"]
    shown = "".join(str(output) for cell in cells for output in cell.get("outputs", ()))
    assert "trainer.lrr: no such setting" in shown
    assert "image/png" in shown or "image/svg+xml" in shown
    assert re.search(r"held-out success \d+% -> \d+%", shown)
    assert "assistant: " in shown
    run = tmp_path / "runs" / "find_number"
    assert json.loads((run / "summary.json").read_text())["steps"] == (2 if smaller else 16)
