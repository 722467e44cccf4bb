"""Distributions as pip would have left them, in a folder that a test makes importable."""

from pathlib import Path


def write_distribution(folder: Path, name: str, entry_points: str = "", **modules: str) -> None:
    """Write version 1.0 of a distribution with these modules, by their names."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)
