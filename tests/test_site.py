"""The documentation as a site: it builds without a warning, has all pages, and needs no address of
others.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_site_builds_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    pages = {
        path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")
    }
    written = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    assert written <= pages
    assert {"repository/index", "repository/envs/shop.py"} <= pages
    index = (tmp_path / "index.html").read_text()
    listed = set(re.findall(r'<a href="([\w/-]+)\.html"', index))
    assert {page for page in written if "/" not in page} <= listed | {"index"}, (
        "a page is not in mkdocs.yml's nav"
    )
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="?(https?://[^">\s]+)',
            page.read_text(),
        )
        assert loaded == [], page
