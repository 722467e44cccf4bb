"""`launches.jsonl`: a line for each start of a run: when, on which host, and from which commit."""

import json
import os
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.files.durable import append_line
from agentrl.package.distribution import installed_version

FILE = "launches.jsonl"
_GIT_SECONDS = 5.0


def record_launch(run: Path, *, resumed: bool) -> None:
    """Add the start of this process to a run's file."""
    commit, changed = _commit(Path.cwd())
    launch = {
        "at": datetime.now(UTC).isoformat(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "commit": commit,
        "changed": changed,
        "version": installed_version(),
        "resumed": resumed,
    }
    append_line(run / FILE, json.dumps(launch))


def read_launches(text: bytes) -> list[dict[str, Any]]:
    """The lines of such a file that can be read."""
    found = []
    for line in text.splitlines():
        try:
            launch = json.loads(line)
        except ValueError:
            continue
        if isinstance(launch, dict) and isinstance(launch.get("at"), str):
            found.append(launch)
    return found


def _commit(folder: Path) -> tuple[str | None, bool]:
    """The commit of the repository that a folder is in, and whether files that it knows have
    changed since; None without a repository, or without git.
    """
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head.strip(), bool(
            _git(folder, "status", "--porcelain", "--untracked-files=no").strip()
        )
    except (OSError, subprocess.SubprocessError):
        return None, False


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
    ).stdout
