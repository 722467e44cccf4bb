"""Fixtures shared by the suite."""

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.properties import FAST, FULL

# The process that hands tests out runs none: what is imported here, it waits for, and so does every
# other.
pytest_plugins = ["agentrl.testing.fixtures", "tests.docker_engine"]

# Before torch is loaded. With more, its threads spin against those of the other process: 31 s for a
# test of 2 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Else the workers of Ray that tests start by themselves get next to nothing of a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")

# Nothing of ours is compiled by torch. Some lines of vLLM's are, for up to 24 s in each engine that
# is started.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Until all tests are collected, nothing is garbage: looking for some is a seventh of what the
# imports take.
gc.disable()

# An example that takes 200 ms says something of what else the machine does.
settings.register_profile("fast", max_examples=FAST, deadline=None)
settings.register_profile("full", max_examples=FULL, deadline=None)
settings.load_profile("fast")


def pytest_collection_finish() -> None:
    """What is there now stays: a collection in the tests does not look through the million objects
    of torch. What they import themselves is looked through less often.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else extensions complain of what was still there at the end


BOTH_CORES = ("cluster/test_chaos.py", "cluster/test_ray_nodes.py")
ON_RAY = (
    "cluster/test_ray_placement.py",
    "weights/test_receiver.py",
    "cluster/test_workers.py",
    "engines/test_contract.py",
    "engines/test_routed_engines.py",
    "rollout/test_workers.py",
)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of this name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start vLLM, or a run on Ray that has to recover, come one after another: each
    takes both cores, and a fixture starts vLLM once for many. So do those that use Ray in the
    process of the test, and else the slow ones of a module: what they share is started once, and
    not in each of xdist's processes.
    """
    for item in items:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        if item.get_closest_marker("vllm") or name in BOTH_CORES:
            item.add_marker(pytest.mark.xdist_group("both cores"))
        elif item.get_closest_marker("slow") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("Ray" if name in ON_RAY else name))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer and compact chat template; read-only by agreement."""
    from agentrl.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    create_tiny_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def seeing_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of Qwen2.5-VL with its image processor; read-only by agreement."""
    from agentrl.testing.vision_models import create_tiny_vision_model

    folder = tmp_path_factory.mktemp("models") / "seeing"
    create_tiny_vision_model(folder)
    return folder


@pytest.fixture(scope="session")
def shallow_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's first two layers, for what is about no model in particular and computes a
    lot.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "shallow"
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    AutoModelForCausalLM.from_pretrained(tiny_model_dir, config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Done:
    """What a command has left, as of `subprocess.run`."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def agentrl(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """The command line in this process, `agentrl("train", "run.yaml", cwd=folder)`; one of its own
    takes seconds.
    """

    from agentrl.cli import main

    def run(*arguments: str, cwd: Path = Path(__file__).parent.parent) -> Done:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture(autouse=True)
def every_metric_of_a_run_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in the process of a test fails where it writes a metric that docs/metrics.md does not
    have.
    """
    if "agentrl.runs.run" not in sys.modules:
        return
    from agentrl.observe.meanings import meaning_of
    from agentrl.observe.metrics import MetricsFile

    class Described(MetricsFile):
        def append(self, row: Mapping[str, Any]) -> None:
            assert [name for name in row if name != "step" and meaning_of(name) is None] == []
            super().append(row)

    monkeypatch.setattr("agentrl.runs.recorder.MetricsFile", Described)
