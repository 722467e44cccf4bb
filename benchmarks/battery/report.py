"""The report of a battery: `report.json`, and `report.html`, which needs no other file and no
network.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.battery.piece import Figure, Piece, Result

FORMAT = 1
"""The number of the format of `report.json`."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem }
td { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
pre { background: #f5f5f5; padding: .6rem; overflow: auto }
.passed { color: #176f2c } .failed { color: #b3261e } .skipped { color: #777 }
.verdict { font-weight: 600 }
section { border-top: 1px solid #ddd; padding-top: .2rem }
"""


def report_of(
    facts: Mapping[str, Any], pieces: Sequence[Piece], results: Sequence[Result]
) -> dict[str, Any]:
    """The content of `report.json`: the facts (`source`, `device`, `machine`, `versions`), and what
    came out of each piece.
    """
    purposes = {piece.name: piece.purpose for piece in pieces}
    answered = [{"purpose": purposes[result.name], **asdict(result)} for result in results]
    return {"format": FORMAT, **facts, "pieces": answered}


def write_report(folder: Path, report: dict[str, Any]) -> Path:
    """Write both files; returns the page."""
    text = json.dumps(report, indent=1)
    (folder / "report.json").write_text(text + "\n")
    page = folder / "report.html"
    page.write_text("\n".join(_page(report, text)) + "\n")
    return page


def counts(results: Sequence[Result]) -> str:
    """How many passed, failed and were skipped."""
    found = [result.verdict for result in results]
    return ", ".join(
        f"{found.count(verdict)} {verdict}" for verdict in ("passed", "failed", "skipped")
    )


def _page(report: dict[str, Any], text: str) -> Iterator[str]:
    verdicts = [piece["verdict"] for piece in report["pieces"]]
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><title>agentrl on GPUs</title>'
    yield f"<style>{_STYLE}</style><h1>agentrl on this machine</h1><p>"
    yield ", ".join(
        f'<span class="verdict {verdict}">{verdicts.count(verdict)} {verdict}</span>'
        for verdict in ("passed", "failed", "skipped")
    )
    yield f" on {escape(report['device'])}; source {escape(report['source'])}.</p><table>"
    for piece in report["pieces"]:
        name, verdict = escape(piece["name"]), piece["verdict"]
        yield f'<tr><td><a href="#{name}">{name}</a><td class="verdict {verdict}">{verdict}'
        yield f'<td class="number">{piece["seconds"]:.0f} s<td>{escape(piece["reason"])}'
    yield "</table>"
    for piece in report["pieces"]:
        yield from _section(piece)
    yield "<section><h2>Machine</h2><table>"
    for name, value in report["machine"].items():
        yield f"<tr><td>{escape(name)}<td>{_fact(value)}"
    yield "</table><h2>Versions</h2><table>"
    for name, value in report["versions"].items():
        yield f"<tr><td>{escape(name)}<td>{escape(value)}"
    yield "</table></section>"
    within = text.replace("</", r"<\/")  # no text may end the element
    yield f'<script type="application/json" id="report">{within}</script></html>'


def _section(piece: dict[str, Any]) -> Iterator[str]:
    verdict = piece["verdict"]
    yield f'<section id="{escape(piece["name"])}"><h2>{escape(piece["name"])}'
    yield f' <span class="{verdict}">{verdict}</span></h2><p>{escape(piece["purpose"])}</p>'
    if piece["reason"]:
        yield f'<p class="{verdict}">{escape(piece["reason"])}</p>'
    if piece["figures"]:
        yield "<table>"
        for figure in piece["figures"]:
            value = format_figure(Figure(**figure))
            number = "" if isinstance(figure["value"], str) else ' class="number"'
            yield f"<tr><td>{escape(figure['name'])}<td{number}>{escape(value)}"
        yield "</table>"
    if piece["log"]:
        yield f"<details><summary>log</summary><pre>{escape(piece['log'])}</pre></details>"
    if piece["files"]:
        yield f"<p>Files: {escape(', '.join(piece['files']))}</p>"
    yield "</section>"


def format_figure(figure: Figure) -> str:
    """A figure for people, with its unit."""
    value = figure.value
    number = (
        value
        if isinstance(value, str)
        else f"{value:,.0f}"
        if abs(value) >= 1e4
        else f"{value:.4g}"
    )
    return f"{number} {figure.unit}".strip()


def _fact(value: Any) -> str:
    if isinstance(value, str):
        return f"<pre>{escape(value)}</pre>" if "\n" in value else escape(value)
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(k))}: {escape(str(v))}" for k, v in value.items())
    if isinstance(value, list):
        return "<br>".join(_fact(one).replace("<br>", "; ") for one in value)
    return escape(str(value))
