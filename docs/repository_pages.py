"""A hook of MkDocs: pages of the site that are no files in docs/.

Links from a page to files outside docs/ lead to copies of them in the site: a Markdown file becomes
a page, any other file a page that shows its text. So the site can be read where the repository is
not. The page `api.md` is made from the code (docs/api_reference.py).
"""

import posixpath
import re
from pathlib import Path

from api_reference import api_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the API, and a page for every file outside docs/ that a page links to,
    directly or through another such file.
    """
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen: set[Path] = set()
    while pages:
        page = pages.pop()
        for target in _outside(page) - seen:
            seen.add(target)
            files.append(File.generated(config, _address(target), content=_content(target)))
            if target.suffix == ".md":
                pages.append(target)
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to the copies."""
    source = _source(page.file.src_uri)

    def within_site(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        path = (source.parent / target).resolve()
        if "://" in target or not path.is_file():
            return link.group()
        where = posixpath.relpath(_address(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"{before}{where}{anchor or ''}{after}"

    return _LINK.sub(within_site, markdown)


def _outside(page: Path) -> set[Path]:
    """The files of the repository outside docs/ that a page links to."""
    targets = {
        (page.parent / link[1]).resolve()
        for link in _LINK.findall(page.read_text())
        if "://" not in link[1]
    }
    return {
        path
        for path in targets
        if path.is_file() and ROOT in path.parents and DOCS not in path.parents
    }


def _address(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    inside = path.relative_to(ROOT).as_posix()
    return f"repository/{inside}" if path.suffix == ".md" else f"repository/{inside}.md"


def _source(address: str) -> Path:
    """The file of the repository behind a page of the site."""
    if not address.startswith("repository/"):
        return DOCS / address
    inside = ROOT / address.removeprefix("repository/")
    return inside if inside.is_file() else inside.with_suffix("")


def _content(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return text
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(path.suffix, "")
    return f"# {path.relative_to(ROOT).as_posix()}\n\n````{language}\n{text}````\n"
