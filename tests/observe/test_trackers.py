"""What trackers get of a run: late evaluations, resumed runs, samples, how it ended.

The packages of trackers are not installed here (test_tracker_packages.py has the real ones). What
stands in for them keeps the rules on which something depends: W&B drops rows of past steps, and
MLflow refuses some names.
"""

import io
import re
import sys
import tomllib
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentrl.config import validate_config
from agentrl.errors import ConfigError
from agentrl.observe.trackers import Comet, MLflow, TensorBoard, Trackio, Wandb
from agentrl.protocols import EpisodeSample
from agentrl.runs.run import Run

SAMPLE = EpisodeSample("t/0/0", "t", "terminated", 1.0, True, "user: P . O\n\nassistant: left")


def package(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # transformers looks for some of them
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard_has_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path, {"seed": "1"})
    tracker.log(3, {"reward": 0.25})
    tracker.log_samples("held_out", 3, [SAMPLE])
    tracker.end("failed", "the loss is nan")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(3, 0.25)]
    texts = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0] for tag in events.Tags()["tensors"]
    }
    assert b"P . O" in texts["samples/held_out/text_summary"]
    assert texts["ended/text_summary"] == b"failed: the loss is nan"


@dataclass
class Cloud:
    """W&B: keeps the rows of its runs by their ids."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    axes: set[tuple[str, str | None]] = field(default_factory=set)
    exits: list[int] = field(default_factory=list)

    def init(self, **asked: Any) -> Any:
        self.asked.append(asked)
        kept, step = self.rows.setdefault(asked["id"], []), 0

        def log(row: dict[str, Any], step: int, commit: bool) -> None:
            if not kept or step > kept[-1]["_step"]:  # else it is dropped, with a warning
                kept.append({**row, "_step": step})

        def define_metric(name: str, step_metric: str | None = None, hidden: bool = False) -> None:
            self.axes.add((name, step_metric))

        return SimpleNamespace(
            log=log,
            define_metric=define_metric,
            # of an offline run, which knows nothing of what was logged before it was resumed
            step=step,
            summary={},
            finish=lambda exit_code=0: self.exits.append(exit_code),
        )


def test_wandb_keeps_late_evaluations_over_resumes_in_one_run(tmp_path, monkeypatch):
    cloud = Cloud()
    package(monkeypatch, "wandb", init=cloud.init, Table=lambda columns, data: (columns, data))
    settings = Wandb.Config(project="lakes", entity="us", group="four", tags=("a", "b"))
    for launch, how in enumerate(("stopped", "failed", "completed")):
        tracker = Wandb(tmp_path / "lake", {"seed": "1"}, settings)
        for step in range(3):
            tracker.log(10 * launch + step, {"reward": 0.25})
        tracker.log(10 * launch, {"eval/success": 0.5})  # late: training went on meanwhile
        tracker.log_samples("held_out", 10 * launch, [SAMPLE])
        tracker.end(how, "why")
    (rows,) = cloud.rows.values()  # one run
    assert [row["step"] for row in rows if "reward" in row] == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 10, 20]
    assert [row["samples/held_out"][1][0][0] for row in rows if "samples/held_out" in row] == [
        "t/0/0"
    ] * 3
    assert ("*", "step") in cloud.axes
    assert cloud.exits == [255, 1, 0]
    first = cloud.asked[0]
    assert (first["project"], first["entity"], first["group"], first["tags"]) == (
        "lakes",
        "us",
        "four",
        ["a", "b"],
    )
    assert (first["name"], first["config"]) == ("lake", {"seed": "1"})


class Store:
    """MLflow with a store: the runs by their ids, and what its server would refuse."""

    __spec__ = ModuleSpec("mlflow", None)

    MlflowException = type(
        "MlflowException", (Exception,), {"error_code": "RESOURCE_DOES_NOT_EXIST"}
    )

    def __init__(self, address: str) -> None:
        self.address, self.runs, self.experiments = address, dict[str, Any](), list[str]()
        self.run: Any = None

    def get_tracking_uri(self) -> str:
        return self.address

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return name

    def get_run(self, run_id: str) -> Any:
        if run_id not in self.runs:
            raise self.MlflowException
        return self.runs[run_id]

    def start_run(
        self,
        run_id: str | None = None,
        run_name: str = "",
        experiment_id: Any = None,
        tags: Any = (),
    ) -> Any:
        if run_id is None:
            run_id = f"run{len(self.runs)}"
            data = SimpleNamespace(params={}, tags=dict(tags), metrics=[])
            info = SimpleNamespace(
                run_id=run_id, lifecycle_stage="active", name=run_name, experiment=experiment_id
            )
            self.runs[run_id] = SimpleNamespace(info=info, data=data, status="RUNNING")
        self.run = self.runs[run_id]
        return self.run

    def log_params(self, params: dict[str, str]) -> None:
        assert len(params) <= 100
        assert not params.keys() & self.run.data.params.keys(), "a parameter cannot change"
        self.run.data.params.update(params)

    def set_tags(self, tags: dict[str, str]) -> None:
        self.run.data.tags.update(tags)

    def set_tag(self, name: str, value: str) -> None:
        self.set_tags({name: value})

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            assert re.fullmatch(r"[/\w.\- :]+", name), name
            self.run.data.metrics.append((name, step, value))
        if self.address.startswith("file:"):  # a metric is a file there
            names = {name for name, _, _ in self.run.data.metrics}
            assert not [name for name in names for other in names if other.startswith(f"{name}/")]

    def log_table(self, data: dict[str, list[Any]], artifact_file: str) -> None:
        self.run.table = artifact_file, data

    def end_run(self, status: str = "FINISHED") -> None:
        self.run.status = status


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("file:/tmp/mlruns", ["reward", "reward.environment", "eval.hard.pass_4"]),
        ("http://tracking", ["reward", "reward/environment", "eval/hard/pass_4"]),
    ],
)
def test_mlflow_goes_on_in_the_same_run_and_gets_names_that_its_store_can_hold(
    tmp_path, monkeypatch, address, names
):
    store = Store(address)
    package(
        monkeypatch,
        "mlflow",
        **{name: getattr(store, name) for name in dir(store) if not name.startswith("_")},
    )
    for seed, how in (("1", "failed"), ("2", "completed")):
        tracker = MLflow(
            tmp_path / "lake",
            {"seed": seed, **{f"k{i}": i for i in range(150)}},
            MLflow.Config(tags=("a", "b=c")),
        )
        tracker.log(3, {"reward": 0.25, "reward/environment": 0.5, "eval/hard/pass@4": 1.0})
        tracker.log_samples("held_out", 3, [SAMPLE])
        (run,) = store.runs.values()
        tracker.end(how, "why")
        assert run.status == {"failed": "FAILED", "completed": "FINISHED"}[how]
    assert [name for name, _, _ in run.data.metrics] == 2 * names
    assert run.data.params["seed"] == "1"
    assert run.data.tags == {"a": "", "b": "c", "changed.seed": "2", "ended": "completed: why"}
    assert (run.info.name, run.info.experiment) == ("lake", "agentrl")
    assert run.table[1]["episode"] == ["t/0/0"]


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_mlflow_s_own_variables_name_the_experiment(tmp_path, monkeypatch, variable):
    store = Store("http://tracking")
    package(
        monkeypatch,
        "mlflow",
        **{name: getattr(store, name) for name in dir(store) if not name.startswith("_")},
    )
    monkeypatch.setenv(variable, "7")
    MLflow(tmp_path, {}).close()
    assert store.run.info.experiment is None  # MLflow reads the variable where nothing is asked for
    MLflow(tmp_path / "other", {}, MLflow.Config(project="lakes")).close()
    assert store.run.info.experiment == "lakes"


def test_trackio_finds_a_resumed_run_by_a_name_that_no_other_folder_has(tmp_path, monkeypatch):
    asked, said = [], []

    def init(project: str, **more: Any) -> Any:
        asked.append((project, more["name"], more["group"], more["resume"]))
        finish = lambda: said.append("finished")  # noqa: E731
        return SimpleNamespace(
            log=lambda row, step: said.append((step, row)),
            alert=lambda *told: said.append(told),
            finish=finish,
        )

    levels = SimpleNamespace(ERROR="error", INFO="info")
    package(monkeypatch, "trackio", init=init, AlertLevel=levels, Table=lambda columns, data: data)
    for folder in ("a/lake", "a/lake", "b/lake"):
        tracker = Trackio(
            tmp_path / folder, {"seed": "1"}, Trackio.Config(project="lakes", group="four")
        )
        tracker.log(3, {"reward": 0.25})
        tracker.log_samples("held_out", 3, [SAMPLE])
        tracker.end("failed", "why")
    (_, first, _, _), (_, again, _, _), (_, other, _, _) = asked
    assert first == again != other
    assert {one[0::2] for one in asked} == {("lakes", "four")}
    assert said[:4] == [
        (3, {"reward": 0.25}),
        (3, {"samples/held_out": [list(SAMPLE_ROW)]}),
        ("run failed", "why", "error"),
        "finished",
    ]


def test_every_tracker_gets_the_tags_of_a_run_beside_its_own(tmp_path, monkeypatch):
    cloud, store, asked = Cloud(), Store("https://tracking.example"), {}

    def started(name: str, tags: Any) -> Any:
        asked[name] = tags
        return SimpleNamespace(finish=lambda: None, log_parameters=lambda _: None, end=lambda: None)

    package(monkeypatch, "wandb", init=cloud.init)
    monkeypatch.setitem(sys.modules, "mlflow", store)
    package(
        monkeypatch,
        "trackio",
        init=lambda project, **more: started("trackio", more["config"]["tags"]),
    )
    start = lambda **more: started("comet", more["experiment_config"]["tags"])  # noqa: E731
    package(monkeypatch, "comet_ml", start=start, ExperimentConfig=lambda **more: more)
    monkeypatch.setenv("WANDB_TAGS", "from-shell")
    values = {
        "env": {"name": "frozen_lake"},
        "run_dir": str(tmp_path / "lake"),
        "observe": {"tags": ["baseline", "seed=3"]},
        "trackers": [{"name": "wandb", "tags": ["lora", "baseline"]}, "mlflow", "trackio", "comet"],
    }
    with Run(validate_config(values), Console(file=io.StringIO())):
        pass
    (tags,) = [one["tags"] for one in cloud.asked]
    assert sorted(tags) == ["baseline", "from-shell", "lora", "seed=3"]
    (kept,) = store.runs.values()
    assert {"baseline": "", "seed": "3"}.items() <= kept.data.tags.items()
    assert asked == {"trackio": ["baseline", "seed=3"], "comet": ["baseline", "seed=3"]}


SAMPLE_ROW = ("t/0/0", "t", "terminated", 1.0, True, "user: P . O\n\nassistant: left")


def test_comet_goes_on_in_the_same_experiment(tmp_path, monkeypatch):
    asked, said = [], []

    class Experiment:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **more: said.append((name, args, more))

    def start(**more: Any) -> Experiment:
        asked.append(more)
        return Experiment()

    package(monkeypatch, "comet_ml", start=start, ExperimentConfig=lambda **more: more)
    settings = Comet.Config(project="lakes", entity="us", tags=("a",))
    for _ in range(2):
        tracker = Comet(tmp_path / "lake", {"seed": "1"}, settings)
        tracker.log(3, {"reward": 0.25})
        tracker.end("stopped", "by SIGTERM")
    assert asked[0]["experiment_key"] == asked[1]["experiment_key"]
    assert (asked[0]["project_name"], asked[0]["workspace"], asked[0]["mode"]) == (
        "lakes",
        "us",
        "get_or_create",
    )
    assert asked[0]["experiment_config"]["tags"] == ["a"]
    assert ("log_metrics", ({"reward": 0.25},), {"step": 3}) in said
    assert ("log_other", ("ended", "stopped: by SIGTERM"), {}) in said


@pytest.mark.parametrize(
    ("name", "tracker"),
    [("wandb", Wandb), ("mlflow", MLflow), ("trackio", Trackio), ("comet_ml", Comet)],
)
def test_a_tracker_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch, name, tracker):
    monkeypatch.setitem(sys.modules, name, None)
    extra = name.removesuffix("_ml")
    said = re.escape(f"trackers: {extra} is not installed: pip install 'agentrl-train[{extra}]'")
    with pytest.raises(ConfigError, match=said):
        tracker(tmp_path, {})
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extra in extras


def test_wandb_without_a_key_is_refused_in_a_sentence(tmp_path, monkeypatch):
    usage = type("UsageError", (Exception,), {})

    def init(**asked: Any) -> None:
        raise usage("No API key configured. Use `wandb login` to log in.")

    package(monkeypatch, "wandb", init=init, errors=SimpleNamespace(UsageError=usage))
    with pytest.raises(ConfigError, match=r"wandb login.*WANDB_MODE=offline"):
        Wandb(Path(tmp_path), {})


def test_a_store_that_mlflow_refuses_is_no_server_that_may_come_back(tmp_path, monkeypatch):
    for address, kind in (("file:/tmp/mlruns", ConfigError), ("http://x", Store.MlflowException)):
        store = Store(address)
        refusal = Store.MlflowException("the filesystem backend is in maintenance mode")
        store.start_run = lambda refusal=refusal, **asked: (_ for _ in ()).throw(refusal)
        monkeypatch.setitem(sys.modules, "mlflow", store)
        with pytest.raises(kind, match="maintenance mode"):
            MLflow(tmp_path / "lake", {})
