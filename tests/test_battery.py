"""The battery for machines with GPUs (`make gpu`), as far as a machine without one can show it."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.battery import command, machine, runner
from benchmarks.battery.piece import SECONDS, Findings, Piece, Place, Result, answer, read_result
from benchmarks.battery.pieces import PIECES
from benchmarks.battery.report import write_report
from benchmarks.battery.runner import run_piece
from tests.processes import still_alive
from tests.tiers import only

GPUS = torch.cuda.device_count()
BY_NAME = {piece.name: piece for piece in PIECES}
QUICK = ("attention", "trainer-step", "int8-moments", "local-engine")
"""Pieces that a CPU answers within a second, in this process."""


def answered(piece: Piece, folder: Path) -> Result:
    """The result of a piece in this process."""
    findings = Findings(folder / "result.json")
    answer(piece.code, Place("cpu", folder), findings)
    return read_result(piece, findings.file, "it came to no verdict")


@pytest.mark.parametrize("name", only(QUICK, "attention", "local-engine"))
def test_a_piece_that_a_cpu_can_answer_passes_there(name: str, tmp_path: Path) -> None:
    result = answered(BY_NAME[name], tmp_path)
    assert (result.verdict, result.reason) == ("passed", "")
    assert result.figures
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", only(["profile", "offload", "weights", "fsdp"], "offload"))
def test_so_does_a_piece_about_ranks_or_weights(name: str, tmp_path: Path) -> None:
    assert answered(BY_NAME[name], tmp_path).verdict == "passed"


@pytest.mark.long
def test_the_command_runs_a_piece_in_a_process_of_its_own_and_needs_no_installation(
    tmp_path: Path,
) -> None:
    asked = ["--device", "cpu", "--only", "speeds", "fsdp-step", "--into", "report"]
    done = subprocess.run(
        [sys.executable, str(runner.COMMAND), *asked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    verdicts = {piece["name"]: piece["verdict"] for piece in report["pieces"]}
    assert verdicts == {"speeds": "passed", "fsdp-step": "skipped"}
    assert report["versions"]["torch"] == torch.__version__


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_NAME)
def test_a_piece_passes_on_the_gpus_of_this_machine(name: str, tmp_path: Path) -> None:
    result = run_piece(BY_NAME[name], Place("cuda", tmp_path), GPUS, SECONDS)
    if result.verdict == "skipped":
        pytest.skip(result.reason)
    assert result.verdict == "passed", f"{result.reason}\n{result.log}"


def test_a_gradient_that_is_off_fails_the_piece_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.battery.trainer_pieces._GRADIENT_TOLERANCE", 0.0)
    result = answered(BY_NAME["attention"], tmp_path)
    assert result.verdict == "failed"
    assert "in bfloat16, gradients are off by" in result.reason
    assert [figure.name for figure in result.figures][-1].startswith("bfloat16")


def asked(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Result:
    """The result of a piece whose process runs this code after it has noted a figure."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, time\n"
        "content = {'verdict': None, 'figures': [{'name': 'one', 'value': 1.0, 'unit': 's'}]}\n"
        "open(os.path.join(sys.argv[3], 'result.json'), 'w').write(json.dumps(content))\n" + code
    )
    monkeypatch.setattr(runner, "COMMAND", program)
    return run_piece(Piece("it", "It is.", "none:none"), Place("cpu", tmp_path), 0, seconds)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"os.kill(os.getpid(), {signal.SIGSEGV:d})", "its process was ended by SIGSEGV"),
        ("raise MemoryError('no room')", "its process ended with 1: MemoryError: no room"),
        ("sys.exit(0)", "its process ended with 0: it printed nothing"),
    ],
)
def test_a_crash_is_a_failure_that_keeps_what_was_found(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = asked(code, tmp_path, monkeypatch, 30)
    assert (result.verdict, result.reason) == ("failed", reason)
    assert [figure.name for figure in result.figures] == ["one"]
    assert result.files == ("it/log.txt",)


def test_what_does_not_end_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "it" / "pids"

    class Patient(subprocess.Popen[bytes]):
        """Its time is over when both processes have written their ids down."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            while len(pids.read_text().split() if pids.exists() else ()) < 2:
                assert self.poll() is None
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr("benchmarks.battery.runner.subprocess.Popen", Patient)
    child = "os.fork()\nopen(sys.argv[3] + '/pids', 'a').write(f'{os.getpid()} ')\ntime.sleep(60)"
    result = asked(child, tmp_path, monkeypatch, 7)
    assert (result.verdict, result.reason) == ("failed", "it did not end within 7 s")
    assert still_alive([int(pid) for pid in pids.read_text().split()], 10) == []


def test_without_a_gpu_all_is_skipped_by_name_with_the_reason_and_that_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpus_here", lambda: {"gpus": [], "cuda": "none"})
    monkeypatch.setattr(machine, "versions", dict)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--into", str(tmp_path / "gpu")])
    assert command.main("") == 0
    report = json.loads((tmp_path / "gpu" / "report.json").read_text())
    assert [piece["name"] for piece in report["pieces"]] == list(BY_NAME)
    assert {piece["verdict"] for piece in report["pieces"]} == {"skipped"}
    printed = capsys.readouterr().out
    for piece in report["pieces"]:
        assert piece["reason"] == "this machine has no GPU that torch can use" or (
            "not installed" in piece["reason"]
        )
        assert (
            f"skipped  {piece['name']}: {piece['reason']}. It would show: {piece['purpose']}"
            in (printed)
        )


def test_a_piece_that_cannot_be_asked_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    needy = Piece("it", "It is.", "none:none", gpus=2, on_cpu=False, needs=("no_such_module",))
    assert needy.obstacle("cuda", 2) == "no_such_module is not installed"
    alone = Piece("it", "It is.", "none:none", gpus=2, on_cpu=False)
    assert alone.obstacle("cuda", 1) == "it needs 2 GPUs, and this machine has 1"
    assert alone.obstacle("cpu", 0) == "it is about a GPU, and --device is cpu"
    assert alone.obstacle("cuda", 2) is None


def test_a_module_that_is_missing_inside_is_named_and_our_own_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_piece.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    findings, place = Findings(tmp_path / "result.json"), Place("cpu", tmp_path)
    answer("needy_piece:run", place, findings)
    result = read_result(PIECES[0], findings.file, "")
    assert (result.verdict, result.reason) == ("skipped", "no_such_module is not installed")
    with pytest.raises(ModuleNotFoundError):
        answer("agentrl.gone:run", place, findings)


def test_the_page_has_all_that_the_report_has_and_loads_nothing(tmp_path: Path) -> None:
    piece = {
        "name": "it",
        "purpose": "It is.",
        "verdict": "failed",
        "reason": "</script><b>",
        "figures": [{"name": "peak", "value": 12.5, "unit": "GiB"}],
        "seconds": 3.0,
        "log": "Traceback",
        "files": ["it/trace.json.gz"],
    }
    facts = {"source": "abc", "device": "cuda", "machine": {"gpus": []}, "versions": {"torch": "2"}}
    page = write_report(tmp_path, {"format": 1, **facts, "pieces": [piece]}).read_text()
    assert "12.5 GiB" in page
    assert "Traceback" in page
    assert "<b>" not in page.partition("<script")[0]
    assert page.count("</script>") == 1
    assert not {"http:", "https:", "src=", "@import"} & set(page.replace('"', " ").split())
    embedded = page.partition('id="report">')[2].partition("</script>")[0]
    assert json.loads(embedded)["pieces"] == [piece]


def test_a_report_names_neither_host_nor_folders(tmp_path: Path) -> None:
    text = f"{tmp_path}/agentrl {Path.home()}/x {os.uname().nodename}"
    assert machine.without_names(text, tmp_path) == "SOURCE/agentrl HOME/x HOST"


BARE = {
    *("torch", "transformers", "numpy", "safetensors", "tokenizers"),
    *("pydantic", "pydantic_core", "yaml", "huggingface_hub", "jinja2"),
}
"""What an image with torch and transformers has; httpx and rich come with the hub's client."""


def test_pieces_about_trainers_import_nothing_that_a_bare_image_lacks() -> None:
    root, others = runner.ROOT, dict[str, str]()
    unread = [f"benchmarks/battery/{name}_pieces.py" for name in ("trainer", "rank", "engine")]
    read: set[str] = set()
    while unread:
        file = unread.pop()
        read.add(file)
        for name in imported_at_once(root / file):
            own = [f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
            files = [path for path in own if (root / path).is_file()]
            unread += [path for path in files if path not in read]
            top = name.partition(".")[0]
            if top not in ("agentrl", "benchmarks") and top not in sys.stdlib_module_names:
                others.setdefault(top, file)
    assert {top: file for top, file in others.items() if top not in BARE} == {}


def imported_at_once(file: Path) -> set[str]:
    """The modules that a file imports when it is imported."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
