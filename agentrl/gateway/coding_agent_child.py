"""Plays a coding agent for one task, in folders of its own: `python coding_agent_child.py PRESET`.

The task's options are `instruction`, which the program is told, `files` in its working folder,
`setup`, a command that prepares it, and `test`, a command with whose exit status 0 the reward is 1.
The test runs in a copy of the working folder, over which `test_files` are written. Without a test,
the run's own rewards are all there is. With the variable AGENTRL_TRANSCRIPTS, the transcripts that
the program writes are copied to that folder.

This module runs in a process of its own, so it uses only the standard library.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TASK_OPTIONS = ("instruction", "files", "setup", "test", "test_files")


def main(preset: Mapping[str, Any]) -> None:
    """Play the task of AGENTRL_TASK, and write its reward. Exits with 1 if the program failed."""
    options, own = json.loads(os.environ["AGENTRL_TASK"])["options"], Path(os.environ["TMPDIR"])
    if not options.get("instruction"):
        sys.exit(f"the task has no `instruction`; its options may be {', '.join(TASK_OPTIONS)}")
    work, home = own / "work", own / "home"
    work.mkdir()
    home.mkdir()
    _write(work, options.get("files") or {})
    if setup := options.get("setup"):
        done = subprocess.run(
            ["/bin/sh", "-c", setup], cwd=work, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            sys.exit(f"the task's setup ended with status {done.returncode}")
    values = {
        "instruction": options["instruction"],
        "base_url": os.environ["OPENAI_BASE_URL"],
        "url": os.environ["AGENTRL_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "model": preset["model"],
        "home": str(home),
    }
    _write(home, {path: filled(text, values) for path, text in preset["files"].items()})
    status = _run_program(preset, values, work, home)
    _keep_transcripts(preset["transcript"], home, values["api_key"])
    if status not in preset["ends"]:
        sys.exit(f"{preset['program']} ended with status {status}")
    if test := options.get("test"):
        passes = _run_test(test, options.get("test_files") or {}, work, own / "tested")
        Path(os.environ["AGENTRL_REWARD_FILE"]).write_text(
            json.dumps({"reward": float(passes), "success": passes})
        )


def _run_program(
    preset: Mapping[str, Any], values: Mapping[str, str], work: Path, home: Path
) -> int:
    """Run the program to its end. Returns its exit status."""
    kept = {name: one for name, one in os.environ.items() if not name.startswith("XDG_")}
    own = {name: filled(text, values) for name, text in preset["variables"].items()}
    words = [filled(word, values) for word in preset["arguments"]]
    return subprocess.run(
        [preset["program"], *words],
        cwd=work,
        env={**kept, **own, "HOME": str(home), "PWD": str(work)},
        stdin=subprocess.DEVNULL,
        check=False,
    ).returncode


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with its values; other braces stay."""
    if text == "{instruction}":
        return values["instruction"]
    for name, value in values.items():
        if name != "instruction":  # which may hold any of these names
            text = text.replace("{" + name + "}", value)
    return text


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, content in files.items():
        file = folder / path
        if Path(path).is_absolute() or ".." in Path(path).parts:
            sys.exit(f"the path {path!r} leads out of the task's folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink():
            file.unlink()  # it would lead elsewhere
        file.write_text(content)


def _run_test(test: str, files: Mapping[str, str], work: Path, tested: Path) -> bool:
    """True if the test passes on a copy of the working folder, over which its files are written."""
    shutil.copytree(work, tested, symlinks=True)
    _write(tested, files)
    done = subprocess.run(
        ["/bin/sh", "-c", test], cwd=tested, stdin=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def _keep_transcripts(pattern: str, home: Path, key: str) -> None:
    folder = os.environ.get("AGENTRL_TRANSCRIPTS")
    if folder is None or not pattern:
        return
    for file in sorted(home.glob(pattern)):
        kept = Path(folder) / key[-8:] / file.relative_to(home)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, kept)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
