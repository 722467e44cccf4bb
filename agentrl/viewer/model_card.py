"""The card of an exported model: what it was trained on, how, how well it does, and the command
that trains it again.

README.md           the card, whose metadata the Hugging Face hub reads
agentrl.yaml        the config of the run, as the command in the card takes it
reward_curve.png    the run's curve up to this model
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.files.durable import write_whole
from agentrl.models.base_model import CARD, BaseModel, base_model_of
from agentrl.observe.curve import draw_curve
from agentrl.package.distribution import installed_version
from agentrl.settings.yaml_values import in_yaml, read_yaml, to_yaml, value_of
from agentrl.viewer.evaluation_table import evaluation_table
from agentrl.viewer.folders import RunFolder

CONFIG = "agentrl.yaml"
"""The run's config beside the card."""
CURVE = "reward_curve.png"
_STEP = re.compile(r"step_(\d{1,9})")
_DESCRIBED = ("env", "tasks", "reward", "recipe", "algorithm", "trainer", "model")
"""The sections of a config whose choices the card lists."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """The part of a run that led to one of its checkpoints."""

    run: RunFolder
    steps: int
    rows: Sequence[Mapping[str, Any]]
    base: BaseModel
    is_best: bool

    @property
    def results(self) -> list[dict[str, Any]]:
        """The run's evaluations up to this checkpoint."""
        return evaluation_table([row for row in self.rows if row["step"] <= self.steps])

    @property
    def curve(self) -> list[Mapping[str, Any]]:
        """The rows of the steps before it, and of evaluations."""
        known = [row for row in self.rows if row["step"] <= self.steps]
        return [row for row in known if row["step"] < self.steps or "reward" not in row]

    def chosen(self, section: str) -> str:
        """A setting such as `env`, of which the config gives the name or a mixture."""
        settings = self.run.settings()
        if name := settings.get(f"{section}.name"):
            return str(name)
        return str(self._raw().get(section) or "")

    @property
    def environments(self) -> list[str]:
        """The names of the environments."""
        section = self._raw().get("env")
        mixture = section.get("mixture") if isinstance(section, dict) else None
        names = [one.get("name") for one in mixture or () if isinstance(one, dict)]
        return [str(name) for name in names if name] or [self.chosen("env") or "unknown"]

    @property
    def other_recipe(self) -> str:
        """The recipe, if it is another one than reinforcement learning by `algorithm`."""
        recipe = self.chosen("recipe")
        return "" if recipe in ("policy_gradient", "self_play") else recipe

    def config(self) -> str:
        """The run's config without the place of its folder, as YAML."""
        return to_yaml({key: value for key, value in self._raw().items() if key != "run_dir"})

    def _raw(self) -> dict[str, Any]:
        text = (self.run.path / "config.yaml").read_text(encoding="utf-8")
        root = read_yaml(text, "config.yaml")
        found = None if root is None else value_of(root)
        return found if isinstance(found, dict) else {}


def write_card(checkpoint: Path, into: Path, name: str, *, is_best: bool = False) -> None:
    """Write the card of a checkpoint's model into the folder that it is exported to. `name`: the
    model's. `is_best`: whether the checkpoint was chosen by the results that the card shows.
    """
    trained = _read_training(checkpoint, is_best=is_best)
    if trained is None:
        write_whole(into / CARD, _card({"library_name": "transformers"}, _body_without_run(name)))
        return
    has_curve = any("reward" in row and "success" in row for row in trained.curve)
    if has_curve:
        title = f"{name}, {trained.steps} steps"
        drawn = [row for row in trained.curve if "reward" not in row or "success" in row]
        draw_curve(drawn, into / CURVE, title)
    write_whole(into / CONFIG, trained.config())
    write_whole(into / CARD, _card(_metadata(name, trained), _body(name, trained, has_curve)))


def _read_training(checkpoint: Path, *, is_best: bool) -> _Trained | None:
    """The training of a checkpoint; None if it is not in the folder of a run."""
    folder = checkpoint.resolve().parent.parent
    step = _STEP.fullmatch(checkpoint.resolve().name)
    if step is None or not (folder / "config.yaml").is_file():
        return None
    run = RunFolder(folder.name, folder)
    commit_file = folder / "model_commit"
    commit = commit_file.read_text().strip() if commit_file.is_file() else None
    base = base_model_of(str(run.settings().get("model.name", "")), commit)
    return _Trained(run, int(step[1]), run.metrics(), base, is_best)


def _card(metadata: Mapping[str, Any], body: Iterable[str]) -> str:
    return "\n".join(["---", to_yaml(dict(metadata)).rstrip(), "---", "", *body])


def _metadata(name: str, trained: _Trained) -> dict[str, Any]:
    """The metadata of a card, which the hub reads."""
    how = trained.other_recipe or trained.chosen("algorithm")
    kinds = [] if trained.other_recipe else ["reinforcement-learning"]
    tags = ["agentrl", *kinds, how, *trained.environments]
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    found |= dict(trained.base.licence)
    if trained.base.name is not None:
        found |= {"base_model": trained.base.name, "base_model_relation": "finetune"}
    found["tags"] = list(dict.fromkeys(_tag(tag) for tag in tags if tag))
    # Later results of a suite replace earlier ones.
    newest = {one["suite"]: one for one in trained.results if one["success"] is not None}
    if results := [_result(one) for one in newest.values()]:
        kind = {"type": "reinforcement-learning", "name": "reinforcement learning"}
        played = " + ".join(trained.environments)
        found["model-index"] = [
            {
                "name": name,
                "results": [
                    {
                        "task": kind,
                        "dataset": {"type": _tag(played), "name": f"{played}, {suite}"},
                        "metrics": [metric],
                    }
                    for suite, metric in results
                ],
            }
        ]
    return found


def _result(one: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    words = f"success after {one['step']} steps"
    if one["low"] is not None and one["high"] is not None:
        words += f" (95 % interval {one['low']:.1%} to {one['high']:.1%})"
    return one["suite"], {
        "type": "success_rate",
        "value": round(one["success"], 4),
        "name": words,
    }


def _tag(text: str) -> str:
    """A text as the hub's tags are written."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _body_without_run(name: str) -> list[str]:
    return [
        f"# {name}",
        "",
        "This model comes from a checkpoint of agentrl that was exported outside the folder of its"
        " run, so nothing is known here of its training, its results and its licence.",
        "",
    ]


def _body(name: str, trained: _Trained, has_curve: bool) -> Iterator[str]:
    played = ", ".join(f"`{env}`" for env in trained.environments)
    other = trained.other_recipe
    how = f"the recipe `{other}`" if other else "reinforcement learning"
    yield f"# {name}"
    yield ""
    yield (
        f"{_origin(trained.base)}, trained by {how} in {played} for {trained.steps} steps with"
        " agentrl."
    )
    yield ""
    if has_curve:
        yield f"![Reward and success by training step]({CURVE})"
        yield ""
    yield from _success(trained)
    yield from _training(trained)
    yield from _reproduction(trained)
    yield from _licence(trained.base)
    yield "## Limits"
    yield ""
    yield (
        "The results above are of the tasks named there, and of no others. Whether the model is"
        " safe or useful elsewhere was not measured."
    )
    yield ""


def _origin(base: BaseModel) -> str:
    if base.random:
        return "A randomly initialised model"
    return "A model" if base.name is None else f"[{base.name}](https://huggingface.co/{base.name})"


def _success(trained: _Trained) -> Iterator[str]:
    yield "## Success on tasks that were not trained on"
    yield ""
    if not trained.results:
        yield "It was not evaluated in its run."
        yield ""
        return
    yield "| tasks | after steps | success | 95 % interval | mean score | episodes | failed |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for one in trained.results:
        bounds = "unknown"
        if one["low"] is not None and one["high"] is not None:
            bounds = f"{one['low']:.1%} to {one['high']:.1%}"
        success = "unknown" if one["success"] is None else f"{one['success']:.1%}"
        values = [one[key] for key in ("score", "episodes", "failed")]
        numbers = ["unknown" if value is None else f"{value:.4g}" for value in values]
        cells = [_cell(one["suite"]), str(one["step"]), success, bounds, *numbers]
        yield f"| {' | '.join(cells)} |"
    yield ""
    if trained.is_best:
        yield (
            "This checkpoint was chosen because it does best here among those that the run kept, so"
            " its own figure is more likely too high than too low: `agentrl eval` on other tasks"
            " has no such bias."
        )
        yield ""


def _training(trained: _Trained) -> Iterator[str]:
    rows = [row for row in trained.curve if "reward" in row]
    about, settings = trained.run.about(), trained.run.settings()
    commit = about.get("commit")
    tokens = [row["sampled_tokens"] for row in rows if "sampled_tokens" in row]
    facts = {
        "steps": f"{trained.steps} of {settings.get('steps', 'unknown')}",
        "sampled tokens": f"{sum(tokens):,.0f}" if tokens else None,
        "time of its steps": f"{sum(row.get('seconds', 0.0) for row in rows):,.0f} s",
        "seed": settings.get("seed"),
        "agentrl": about.get("version") or installed_version(),
        "commit of the folder that it was started in": commit
        and f"{commit}{', with changes' if about.get('changed') else ''}",
    }
    yield "## Training"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for fact, value in facts.items():
        if value is not None:
            yield f"| {fact} | {_cell(str(value))} |"
    origins = trained.run.origins()
    for key, value in settings.items():
        section = key.partition(".")[0]
        named = key in {f"{one}.name" for one in _DESCRIBED}
        if section in _DESCRIBED and (named or origins.get(key, "default") != "default"):
            yield f"| `{key}` | `{_cell(in_yaml(value))}` |"
    for change in trained.run.changes():
        if 0 < change["step"] < trained.steps and change["changed"]:
            what = json.dumps(change["changed"])
            yield f"| changed after {change['step']} steps (old and new value) | `{_cell(what)}` |"
    yield ""


def _reproduction(trained: _Trained) -> Iterator[str]:
    yield "## To train it again"
    yield ""
    yield (
        f"[{CONFIG}]({CONFIG}) is the resolved config of the run: the seed, and every setting."
        " Paths in it are those of the machine that trained."
    )
    yield ""
    yield "```sh"
    yield f"agentrl train {CONFIG} run_dir=runs/{_tag(trained.run.name) or 'again'}"
    yield "```"
    yield ""


def _licence(base: BaseModel) -> Iterator[str]:
    yield "## Licence"
    yield ""
    if base.random:
        yield "It has no base model, so its licence is its maker's choice: none was chosen here."
    elif base.licence:
        named = base.licence.get("license_name") or base.licence["license"]
        of = f" of {base.name}" if base.name else " of the base model"
        yield f"The licence{of} is `{_cell(named)}`, and this model is derived from it."
    else:
        yield (
            "The licence of the base model was not known on the machine that exported this one. Add"
            " it to the metadata (`license: ...`) before you pass the model on."
        )
    yield ""


def _cell(text: str) -> str:
    """A text in a cell of a table, in one line."""
    cut = text if len(text) <= 300 else f"{text[:300]}..."
    return " ".join(cut.split()).replace("|", "\\|").replace("`", "'")


__all__ = ["write_card"]
