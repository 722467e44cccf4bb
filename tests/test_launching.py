"""The files that launch a run start Ray on all machines, then the run, and pass signals on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[1] / "examples" / "launch"
STAND_INS = {
    "scontrol": "printf 'first\\nsecond\\n'",
    # What is started is told; Ray blocks, and the run waits for its end or for SIGTERM.
    "srun": """
        while [ "${1#--}" != "$1" ]; do
            case $1 in --nodelist=*) where=${1#*=} ;; --exclude=*) where="all but ${1#*=}" ;; esac
            shift
        done
        echo "$where: $*" | head -n 1 >> "$TOLD"
        case $1 in
            agentrl) trap 'echo "got SIGTERM" >> "$TOLD"; exit 130' TERM
                     while [ ! -e "$TOLD.end" ]; do sleep 0.05; done; exit 3 ;;
            python) exit 0 ;;
            *) while [ ! -e "$TOLD.end" ]; do sleep 0.05; done ;;
        esac
    """,
}


@pytest.fixture
def job(tmp_path: Path) -> subprocess.Popen[bytes]:
    """The script as Slurm starts it, with stand-ins for Slurm's commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, code in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{code}\n")
        (commands / name).chmod(0o755)
    started = subprocess.Popen(
        ["bash", LAUNCH / "slurm.sh", "run.yaml", "trainer.lr=2e-6"],
        env={
            "PATH": f"{commands}:{os.environ['PATH']}",
            "TOLD": str(tmp_path / "told"),
            "SLURM_JOB_NODELIST": "first,second",
            "SLURM_JOB_NUM_NODES": "2",
        },
    )
    for _ in range(1200):  # a minute
        if started.poll() is not None:
            break
        told = (tmp_path / "told").read_text() if (tmp_path / "told").exists() else ""
        # What it starts in the background may tell later than the run.
        if "agentrl" in told and told.count("ray start") == 2:
            return started
        time.sleep(0.05)
    started.kill()
    pytest.fail(f"the script ends with {started.returncode} and does not start the run")


def test_slurm_s_script_starts_ray_on_all_machines_and_then_the_run(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "told.end").touch()
    assert job.wait(60) == 3
    told = (tmp_path / "told").read_text().splitlines()
    assert "first: ray start --head --port=6379 --block" in told
    assert any(line.startswith("all but first: bash -c until ray start") for line in told)
    run = (
        "first: agentrl train run.yaml cluster=ray cluster.address=first:6379 trainer.lr=2e-6"
        " --resume auto"
    )
    assert told.index("first: python -c ") < told.index(run)


def test_the_end_of_a_job_s_time_reaches_the_run_and_is_its_exit_status(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 130
    (tmp_path / "told.end").touch()
    assert "got SIGTERM" in (tmp_path / "told").read_text()


def test_the_machines_of_kubernetes_and_skypilot_are_alike() -> None:
    spec = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]
    assert [group["template"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]] == [head]
    run = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["run"]
    for command in (spec["entrypoint"], run):
        assert "--resume auto" in command
        assert "cluster=ray" in command
    assert subprocess.run(["bash", "-n"], input=run.encode(), check=False).returncode == 0
