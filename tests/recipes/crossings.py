"""Runs in which settings cross: the factors of `test_crossings.py`, and what becomes of a row of
them.

A value of a factor is a piece of a config. A row has one of each factor; its config is either
refused, by one sentence and before any work, or its run ends well and can be resumed.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow.parquet as pq
import yaml
from safetensors.numpy import load_file

from agentrl.config import validate_config
from agentrl.config.source import Source
from agentrl.errors import ConfigError
from agentrl.models.tiny import create_tiny_model
from agentrl.runs.summary import count_steps
from agentrl.tokens.arrays import FloatArray
from tests.covering import Coverage

Piece = Mapping[str, Any]
Row = Mapping[str, str]
ROOT = Path(__file__).parents[2]
SECONDS = 300.0
"""After so long a run of two steps hangs; most take a second or two."""

FINAL = ("dpo", "reward_model", "sft", "demonstrations")
"""Where recipes without checkpoints leave their models."""

BASE: Piece = {
    "seed": 1,
    "steps": 2,
    "run_dir": "run",
    "model": {"name": "../shared/model"},
    "rollout": {
        "groups_per_step": 2,
        "group_size": 4,
        "budget": {"turns": 6},
        "sampling": {"max_tokens": 6},
        "retries": {"environment": 0, "engine": 0, "reward": 0},
        "max_failed_tasks": 0,
    },
    "engine": {"device": "cpu"},
    "trainer": {"device": "cpu", "lr": 1e-3},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 1},
    "trackers": [],
}
DEMONSTRATIONS = {"player": "parts:player", "episodes": 4, "episodes_per_step": 2}
PREFERENCES = {"path": "../shared/pairs.jsonl", "pairs_per_step": 2, "held_out": 0.25}
JUDGE = {"url": "JUDGE", "cache": None, "reasons": False}
QUESTIONS = {"name": "dataset", "data": "../shared/rows.jsonl", "held_out": 0.25}
GOLD = {"options": {"answer": "left", "tests": [{"call": "f", "returns": 1}]}}
WORDS = {"name": "parts:Words", **GOLD}

FACTORS: Mapping[str, Mapping[str, Piece]] = {
    "recipe": {
        "policy_gradient": {"recipe": "policy_gradient"},
        "imitating": {"recipe": {"name": "policy_gradient", "demonstrations": DEMONSTRATIONS}},
        "archer": {"recipe": {"name": "archer", "critic_warmup": 1, "critic_updates": 1}},
        "self_play": {"recipe": {"name": "self_play", "every": 1}},
        "sft demonstrations": {"recipe": {"name": "sft", "demonstrations": DEMONSTRATIONS}},
        "sft recordings": {"recipe": {"name": "sft", "recordings": {"path": "../shared/run"}}},
        "sft rejection": {"recipe": {"name": "sft", "rejection": {"keep": "best"}}},
        "distill": {"recipe": {"name": "distill", "teacher": {"model": "../shared/teacher"}}},
        "iterative_dpo": {"recipe": {"name": "iterative_dpo"}},
        "dpo": {"recipe": {"name": "dpo", "preferences": PREFERENCES}},
        "reward_model": {"recipe": {"name": "reward_model", "preferences": PREFERENCES}},
    },
    "engine": {
        "local": {},
        "vllm": {"engine": {"name": "vllm", "device": None}},
        "openai": {"engine": {"name": "openai", "device": None, "url": "http://127.0.0.1:9"}},
    },
    "cluster": {
        "local": {},
        "two engines": {"cluster": {"engines": 2}},
        "workers": {"cluster": {"env_workers": 1, "reward_workers": 1}},
        "ray": {"cluster": "ray"},
    },
    "trainer": {
        "local": {},
        "lora": {"trainer": {"lora": {"rank": 2}}},
        "minibatches": {"trainer": {"minibatches": 2}},
        "fsdp": {"trainer": {"name": "fsdp", "world_size": 2, "device": None}},
        "deepspeed": {"trainer": {"name": "deepspeed", "device": None}},
    },
    "isolation": {
        "default": {},
        "inline": {"env": {"isolation": "inline"}},
        "thread": {"env": {"isolation": "thread"}},
        "process": {"env": {"isolation": "process"}},
    },
    "env": {
        "text": {"env": WORDS},
        "tools": {"env": {"name": "parts:Tools", **GOLD}},
        "qa": {"env": {"name": "qa"}},
        "agent": {"env": {"name": "agent:parts:program"}},
        "multi-agent": {"env": {"name": "parts:Duel", **GOLD}},
        "frozen opponent": {
            "env": {
                "name": "parts:Duel",
                **GOLD,
                "agents": {"south": {"name": "frozen", "refresh": 1}},
            }
        },
        "scripted opponent": {
            "env": {
                "name": "parts:Duel",
                **GOLD,
                "agents": {"south": {"name": "scripted", "player": "parts:player"}},
            }
        },
        "wrapped": {"env": {**WORDS, "wrappers": [{"name": "time_limit", "turns": 5}]}},
        "mixture": {"env": [WORDS, {"name": "qa", "tasks": QUESTIONS}]},
    },
    "tasks": {
        "seeded": {},
        "dataset": {"tasks": QUESTIONS},
        "levels": {"tasks": {"name": "levels", "levels": [{"level": 1}, {"level": 2}]}},
        "pools": {"tasks": {**QUESTIONS, "name": "pools"}},
    },
    "reward": {
        "environment": {},
        "exact": {"reward": "exact"},
        "math": {"reward": "math"},
        "code": {"reward": {"name": "code", "sandbox": {"allow_unsafe": True}}},
        "regex": {"reward": {"name": "regex", "pattern": "[a-m]"}},
        "length": {"reward": {"name": "length", "free": 1, "limit": 9}},
        "tool_use": {"reward": "tool_use"},
        "monitor": {"reward": {"name": "monitor", "formula": "G !look"}},
        "judge": {"reward": {"name": "judge", "criteria": {"clear": "It is clear."}, **JUDGE}},
        "judge_pairwise": {
            "reward": {"name": "judge_pairwise", "better": "Which is clearer?", **JUDGE}
        },
        "reward_model": {
            "reward": {"name": "reward_model", "path": "../shared/reward_model", "device": "cpu"}
        },
        "function": {"reward": "parts:odd"},
        "list": {
            "reward": ["environment", {"name": "parts:odd", "weight": 0.5, "isolation": "process"}]
        },
    },
    "context": {
        "full": {},
        "last_k": {"rollout": {"context": {"name": "last_k", "turns": 1}}},
        "scratchpad": {"rollout": {"context": "scratchpad"}},
        "summary": {"rollout": {"context": {"name": "summary", "max_prompt_tokens": 60}}},
    },
    "history": {"extend": {}, "template": {"model": {"history": "template"}}},
    "evaluation": {
        "none": {},
        "ends": {"evaluation": {"tasks": 2}},
        "every step": {
            "evaluation": {"tasks": 2, "every": 1},
            "checkpoint": {"best": "eval/success"},
        },
        "own engines": {"evaluation": {"tasks": 2, "every": 1, "engines": 1}},
        "overlap": {"evaluation": {"tasks": 2, "every": 1, "overlap": True}},
        "suite": {
            "evaluation": {"suites": [{"name": "more", "env": WORDS, "tasks": 2, "samples": 2}]}
        },
    },
    "tracker": {
        "none": {},
        "tensorboard": {"trackers": ["tensorboard"]},
        "own": {"trackers": ["parts:Tracker"]},
        "both": {"trackers": ["tensorboard", "parts:Tracker"]},
    },
    "staleness": {
        "none": {},
        **{
            rule: {"rollout": {"max_staleness": 1, "staleness_rule": rule}}
            for rule in ("deadline_first", "mask", "segment", "drop")
        },
    },
    "algorithm": {
        name: {"algorithm": name}
        for name in [
            "grpo",
            "rloo",
            "gspo",
            "cispo",
            "sapo",
            "gigpo",
            "reinforce",
            "reinforce_pp",
            "rebn",
            "rae",
            "ppo",
            "turn_ppo",
            "archer",
            "dpo",
            "rejection",
            "distill",
        ]
    },
    "processing": {
        "none": {},
        "filter": {"rollout": {"filter_zero_variance": True, "max_filtered_per_step": 8}},
        "keep": {"batch_processing": {"keep_variance": 0.9}},
        "batch": {"batch_processing": {"normalize": "batch"}},
        "environment": {"batch_processing": {"normalize": "environment"}},
        "length": {"batch_processing": {"length_penalty": 0.1}},
        "mask": {"batch_processing": {"overlong": "mask"}},
    },
    "sampling": {"all": {}, "truncated": {"rollout": {"sampling": {"top_k": 16, "top_p": 0.95}}}},
    "weights": {
        "keep": {},
        "abort_resume": {"weights": {"update": "abort_resume"}},
        "drain": {"weights": {"update": "drain", "transport": "disk"}},
    },
    "members": {"exact": {}, "extra": {"rollout": {"extra_members": 1}}},
}
BASE_ROW: Row = {factor: next(iter(values)) for factor, values in FACTORS.items()}
STILL = ("sft demonstrations", "sft recordings", "dpo", "reward_model")
"""Recipes in which the model does not play: most settings are of no use to them, so pairs of these
show nothing.
"""
PLAYED = tuple(recipe for recipe in FACTORS["recipe"] if recipe not in STILL)
OF_ONE_AGENT = ("text", "tools", "qa", "wrapped", "frozen opponent", "scripted opponent")
TRAINING = ("policy_gradient", "imitating", "archer", "self_play", "sft rejection", "iterative_dpo")
ONLY_AT_THE_START: Sequence[tuple[Row, str]] = (
    *(
        ({"recipe": recipe, "engine": "openai"}, "engine=openai samples from a model")
        for recipe in TRAINING
    ),
    *(({"recipe": "self_play", "env": env}, "recipe=self_play") for env in OF_ONE_AGENT),
    *(
        ({"env": "qa", "tasks": tasks}, "env=qa asks what the rows of a file say")
        for tasks in ("seeded", "levels")
    ),
    *(
        ({"env": "agent", "reward": reward}, f"with the reward {reward}")
        for reward in ("exact", "math", "code")
    ),
    (
        {"env": "agent", "reward": "judge_pairwise", "evaluation": "every step"},
        "checkpoint.best=eval/success is unknown",
    ),
)
"""What is refused only when a run starts, because the config alone does not tell, and how the
sentence begins.
"""


def config_of(row: Row, judge: str = "http://127.0.0.1:9") -> dict[str, Any]:
    """The config of a row."""
    made = deepcopy(dict(BASE))
    for factor, value in row.items():
        _merge(made, deepcopy(dict(FACTORS[factor][value])))
    written: dict[str, Any] = json.loads(json.dumps(made).replace('"JUDGE"', json.dumps(judge)))
    return written


def _merge(into: dict[str, Any], piece: Piece) -> None:
    for key, value in piece.items():
        there = into.get(key)
        # What all entries of a mixture have.
        if isinstance(there, list) and isinstance(value, Mapping):
            for entry in there:
                _merge(entry, value)
        elif isinstance(value, list) and isinstance(there, Mapping):
            into[key] = [{**deepcopy(dict(there)), **entry} for entry in value]
        elif isinstance(value, Mapping) and isinstance(there, dict):
            _merge(there, value)
        elif isinstance(value, Mapping) and isinstance(there, str):
            into[key] = {"name": there, **value}
        elif value is None:
            into.pop(key, None)
        else:
            into[key] = value


@dataclass(frozen=True)
class Outcome:
    """What became of a row. `said`: the sentence of a refusal, or what is wrong.

    `ended`: what a model says by chance was never worth anything, and groups of equal members were
    filtered.
    """

    kind: Literal["accepted", "ended", "refused", "wrong"]
    said: str = ""


def validated(row: Row) -> Outcome:
    """Whether the config of a row is accepted; nothing is started."""
    source = Source()
    try:
        for key, value in config_of(row).items():
            source.set((key,), value, "run.yaml")
        validate_config(source.values, source.origins)
    except ConfigError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # a finding
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    return Outcome("accepted")


def blamed(row: Row, outcome: Callable[[Row], Outcome]) -> tuple[dict[str, str], Outcome]:
    """The choices of a row that is not accepted that are why, and what becomes of them alone.

    The row is brought near to `BASE_ROW` as long as it is not accepted. What is left is to blame,
    and so is what has become as there, where another value would be accepted: then it has to stay
    as it was.
    """
    kept: set[str] = set()
    while True:
        reduced = dict(row)
        for factor in (factor for factor in row if factor not in kept):
            nearer = {**reduced, factor: BASE_ROW[factor]}
            reduced = nearer if outcome(nearer).kind != "accepted" else reduced
        needed = {factor for factor in row if _matters(reduced, factor, outcome)}
        needed |= {factor for factor in row if reduced[factor] != BASE_ROW[factor]}
        wrong = {factor for factor in needed if reduced[factor] != row[factor]}
        if not wrong:
            return {factor: row[factor] for factor in row if factor in needed}, outcome(reduced)
        kept |= wrong


def _matters(row: Row, factor: str, outcome: Callable[[Row], Outcome]) -> bool:
    others = [value for value in FACTORS[factor] if value != row[factor]]
    return any(outcome({**row, factor: other}).kind == "accepted" for other in others)


WORKING = """
import contextlib, faulthandler, json, os, signal, sys, traceback
from agentrl.cli import main
faulthandler.register(signal.SIGUSR2)
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    folder, *arguments = json.loads(line)
    os.chdir(folder)
    logs = [name for name in os.listdir() if name.endswith(".log")]
    log = os.open(f"{len(logs)}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.argv, status = ["agentrl", "train", *arguments], 0
    try:
        main()
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    print(json.dumps(status), file=answers, flush=True)
"""


class Runs:
    """Starts runs one after another in a process that has imported what they need; one that hangs
    costs that process.

    The models, rows, pairs and episodes that they read are made in `folder`/shared. A context
    manager.
    """

    def __init__(self, folder: Path, judge: str, *, seconds: float = SECONDS) -> None:
        self._folder, self._judge, self._seconds = folder, judge, seconds
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        shared = self._folder / "shared"
        if shared.exists():
            return self
        shared.mkdir(parents=True)
        create_tiny_model(shared / "model", seed=0)
        create_tiny_model(shared / "teacher", seed=1)
        test = {"call": "f", "args": [], "returns": 1}
        rows = [
            {"prompt": f"Say {number}.", "answer": str(number), "tests": [test]}
            for number in range(40)
        ]
        (shared / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pairs = [
            {"prompt": f"Say {number}.", "chosen": "left", "rejected": "right"}
            for number in range(8)
        ]
        (shared / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        for recipe, kept, name in (
            ("policy_gradient", ".", "run"),
            ("reward_model", "reward_model", "reward_model"),
        ):
            made = self.tried({**BASE_ROW, "recipe": recipe}, f"making {name}")
            assert made.kind == "accepted", made.said
            (self._folder / f"making {name}" / "run" / kept).rename(shared / name)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def tried(self, row: Row, name: str) -> Outcome:
        """What becomes of a run of this row in the folder `name`: two steps, of which it repeats
        the second.
        """
        if (told := validated(row)).kind != "accepted":
            return told
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(Path(__file__).with_name("crossing_parts.py"), folder / "parts.py")
        (folder / "run.yaml").write_text(
            yaml.safe_dump(config_of(row, self._judge), sort_keys=False)
        )
        begun = self._train(folder, "run.yaml")
        if begun.kind != "accepted":
            return begun
        weights = _weights(folder)
        back = ["--step", "1"] if (folder / "run" / "checkpoints" / "step_000001").is_dir() else []
        resumed = self._train(folder, "--resume", "run", *back)
        if resumed.kind != "accepted":
            # Which groups are compared, and filtered, depends on what takes how long.
            ended = resumed.kind == "ended"
            return resumed if ended else Outcome("wrong", f"resumed: {resumed.said}")
        # Which members come first depends on what takes how long, and so does what is stale.
        same = row["staleness"] == "none" and row["members"] == "exact"
        if same and (distance := _distance(weights, _weights(folder))) > 0.01:
            return Outcome(
                "wrong",
                f"the resumed run is {distance:.3f} steps from the run that was not stopped",
            )
        if unseen := ignored(row, folder / "run"):
            return Outcome("wrong", f"nothing is to be seen of {', '.join(unseen)}")
        return begun

    def _train(self, folder: Path, *arguments: str) -> Outcome:
        """What becomes of `agentrl train`."""
        status = self._asked([str(folder), *arguments])
        said = sorted(folder.glob("*.log"))[-1].read_text()
        if status is None:
            return Outcome("wrong", f"hangs or dies: {said[-3000:]}")
        # The sentence is followed by one that names the way to go on.
        errors = [line for line in said.splitlines() if line.startswith("FilterBudgetError:")]
        if status == 1 and errors and "Traceback" not in said:
            return Outcome("ended", errors[-1])
        if "Traceback" in said or "never retrieved" in said or status not in (0, 2):
            return Outcome("wrong", f"exit {status}: {said[-3000:]}")
        if status == 0:
            return Outcome("accepted")
        sentence = said[said.index("error: ") :].removeprefix("error: ").strip()
        began = [name for name in FINAL if _is_there(folder / "run" / name)]
        began += ["a step"] if _has_trained(folder / "run") else []
        return (
            Outcome("wrong", f"refused after {began[0]}: {sentence}")
            if began
            else Outcome("refused", sentence)
        )

    def _asked(self, command: Sequence[str]) -> int | None:
        """The exit status of a command; None if it has none in time."""
        process = self._process = self._process or _working()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        if select.select([process.stdout], [], [], self._seconds)[0] and (
            answer := process.stdout.readline()
        ):
            status: int = json.loads(answer)
            return status
        if process.poll() is None:
            process.send_signal(signal.SIGUSR2)  # it says where it is
            time.sleep(1)
        self._end()
        return None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _working() -> "subprocess.Popen[str]":
    """Where runs are started. Modules are compiled once, also where a machine says that none are to
    be kept.
    """
    # By workers of Ray too.
    found = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": found,
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", WORKING], cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=variables
    )


def _is_there(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.stat().st_size > 0)


def _has_trained(run: Path) -> bool:
    """True after a step. The evaluation before the first one can still refuse the run."""
    metrics = run / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    return count_steps([json.loads(row) for row in rows]) > 0


def ignored(row: Row, run: Path) -> list[str]:
    """The factors of a row of which nothing is to be seen in what its run has left."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written, log = config_of(row), (run.parent / "0.log").read_text()
    noted = log.partition("does not use ")[2].partition("\n")[0].split(", ")
    seen = {
        "tracker": _tracked(row, run),
        "trainer": row["trainer"] != "lora" or _has(run, "step_000002/adapter"),
    }
    if row["recipe"] not in STILL:
        episodes = [
            row
            for file in (run / "trajectories").glob("step_*")
            for row in pq.read_table(file).to_pylist()
        ]
        seen |= {
            "evaluation": _evaluated(row, metrics),
            "reward": _rewarded(row, episodes),
            "isolation": _isolated(
                row, episodes, json.loads((run / "status.json").read_text())["pid"]
            ),
            "context": (
                row["context"] != "scratchpad"
                or "<scratchpad>" in episodes[0]["messages"][0]["content"]
            ),
        }
    else:
        seen |= {
            section: section in noted
            for section in ("evaluation", "algorithm", "reward")
            if section in written
        }
    return [factor for factor, is_seen in seen.items() if not is_seen]


def _has(run: Path, name: str) -> bool:
    return (run / "checkpoints" / name).exists() or not (
        run / "checkpoints" / "step_000002"
    ).exists()


def _tracked(row: Row, run: Path) -> bool:
    own = (run / "tracked.jsonl").read_text() if (run / "tracked.jsonl").exists() else ""
    events = any((run / "tensorboard").glob("events*"))
    closed = own.count('"closed"') == (2 if row["tracker"] in ("own", "both") else 0)
    return (
        events == (row["tracker"] in ("tensorboard", "both"))
        and closed
        and ("step" in own) == bool(own)
    )


def _evaluated(row: Row, metrics: Sequence[Mapping[str, Any]]) -> bool:
    name = "eval/more/success" if row["evaluation"] == "suite" else "eval/success"
    steps = {measured["step"] for measured in metrics if name in measured}
    due = {"none": set[int](), "ends": {0, 2}, "suite": {0, 2}}.get(row["evaluation"], {0, 1, 2})
    return steps == due


def _rewarded(row: Row, episodes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the parts of the scores are those of the reward."""
    names = {"function": {"odd"}, "list": {"environment", "odd"}}.get(
        row["reward"], {row["reward"]}
    )
    return all(
        {part.partition("/")[0] for part in json.loads(episode["parts"])} >= names
        for episode in episodes
    )


def _isolated(row: Row, episodes: Sequence[Mapping[str, Any]], controller: int) -> bool:
    """Whether environments that tell where they are were where they belong."""
    told = [json.loads(turn["info"]) for episode in episodes for turn in episode["turns"]]
    places = {
        (place["process"] == controller, place["main"]) for place in told if "process" in place
    }
    if row["cluster"] == "workers":
        return not any(here for here, _ in places)
    wanted = {"inline": {(True, True)}, "thread": {(True, False)}, "process": {(False, True)}}
    return not places or places == wanted.get(row["isolation"], places)


def _weights(folder: Path) -> dict[str, FloatArray]:
    """What a run has learned."""
    run = folder / "run"
    places = (*sorted((run / "checkpoints").glob("step_*"))[-1:], *(run / name for name in FINAL))
    files = [
        file for place in places if place.is_dir() for file in sorted(place.glob("*.safetensors"))
    ]
    return {
        f"{file.parent.name}/{name}": value
        for file in files
        for name, value in load_file(file).items()
    }


def _distance(first: Mapping[str, FloatArray], second: Mapping[str, FloatArray]) -> float:
    """The mean difference of weights, in steps of the optimizer.

    What is computed together decides on the last bits, and that depends on what takes how long.
    """
    moved = [np.abs(first[name] - second[name]).ravel() for name in first]
    return float(np.concatenate(moved).mean()) / BASE["trainer"]["lr"] if moved else 0.0


@dataclass
class Tally:
    """How many runs were accepted, or ended by a filter; the rows of all; the refusals with their
    choices; and what was wrong.
    """

    accepted: int = 0
    ended: int = 0
    rows: list[Row] = field(default_factory=list)
    refused: list[tuple[Row, str]] = field(default_factory=list)
    wrong: list[tuple[Row, str]] = field(default_factory=list)


def crossed(runs: Runs, coverage: Coverage, done: Path, *, most: int | None = None) -> Tally:
    """Try rows until no pair is open, or `most` runs. Their outcomes are added to the file `done`,
    whose are not tried again: what was stopped goes on where it was.
    """
    tally, outcome = Tally(), cache_of(validated)
    for choices, _ in ONLY_AT_THE_START:
        if all(value in coverage.factors[factor] for factor, value in choices.items()):
            coverage.refuse(choices)
    known = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
    number = 0
    while (most is None or number < most) and (row := coverage.row()) is not None:
        if outcome(row).kind != "accepted":
            choices, told = blamed(row, outcome)
            coverage.refuse(choices)
            (tally.refused if told.kind == "refused" else tally.wrong).append((choices, told.said))
            continue
        if number < len(known):
            was, kind, said = known[number]
            assert was == row, f"{done} has other rows: remove it"
            told = Outcome(kind, said)
        else:
            # No other row has this folder, in which Ray may live as long as the process.
            told = runs.tried(row, f"{done.parent.name} {done.stem} {number}")
            with done.open("a") as file:
                file.write(json.dumps([row, told.kind, told.said]) + "\n")
        number += 1
        coverage.accept(row)
        tally.rows.append(row)
        tally.accepted += told.kind == "accepted"
        tally.ended += told.kind == "ended"
        if told.kind not in ("accepted", "ended"):
            tally.wrong.append((row, told.said))
    return tally


def cache_of(outcome: Callable[[Row], Outcome]) -> Callable[[Row], Outcome]:
    """The function that remembers."""
    known: dict[tuple[str, ...], Outcome] = {}

    def remembered(row: Row) -> Outcome:
        key = tuple(row[factor] for factor in FACTORS)
        if key not in known:
            known[key] = outcome(row)
        return known[key]

    return remembered
