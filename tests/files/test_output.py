"""What a run prints may have nowhere to go: it goes on."""

import logging
import os
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from agentrl.files.output import LossyStream

PRINTING = """
import sys
from rich.console import Console
from agentrl.files.output import lossy_output, open_standard_streams
open_standard_streams()
console = Console()
with lossy_output():
    for line in range(2000):
        console.print(f"line {line}")
        stream = (sys.stdout, sys.stderr)[line % 2]
        print("an environment's own line", file=stream, flush=line % 3 == 0)
with open(sys.argv[1], "w") as file:
    file.write("the end")
    assert file.fileno() > 2
"""


def printed(tmp_path: Path, shell: str) -> tuple[int, str]:
    """(exit status, what is said elsewhere) of a program that prints 4,000 lines; `P` stands for
    it.
    """
    program = f"{sys.executable} -c '{PRINTING}' {tmp_path / 'file'}".replace("'s own", "s own")
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell.replace('P', program, 1)}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "file").read_text() == "the end", done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("shell", ["P 2>&1 | head -1", "P > /dev/full", "P >&- 2>&- <&-"])
def test_a_closed_or_full_output_ends_nothing_and_is_said_once_where_that_is_possible(
    tmp_path: Path, shell: str
) -> None:
    status, said = printed(tmp_path, shell)
    assert status == 0
    assert said.count("cannot be written (No space left on device)") == (
        1 if "full" in shell else 0
    )
    assert "Traceback" not in said
    assert "Exception" not in said


def test_what_fits_is_written_when_a_full_disk_has_room_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Disk(StringIO):
        name = "log.txt"
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    disk = Disk()
    stream = LossyStream(disk)
    with caplog.at_level(logging.WARNING):
        assert [stream.write("lost\n"), stream.write("lost\n")] == [5, 5]
    assert len(caplog.messages) == 1
    disk.full = False
    stream.writelines(["kept\n"])
    assert disk.getvalue() == "kept\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_has_no_character_for_is_written_by_its_code_and_the_rest_goes_on(
    encoding: str,
) -> None:
    raw = BytesIO()
    stream = LossyStream(TextIOWrapper(raw, encoding, write_through=True))
    assert stream.write("a snowman ☃\n")
    assert stream.write("and more\n")
    assert raw.getvalue() == rb"a snowman \u2603" + b"\nand more\n"


def test_a_command_prints_on_a_terminal_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "☃.jsonl").write_text('{"prompt": "☃ or \u2192?", "answer": "☃"}\n')
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "tasks", "☃.jsonl"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert r"\u2603 or \u2192?" in done.stdout
    assert "tasks: 1, of qa" in done.stdout
