"""Where a model comes from: folders, the hub's cache, and what is said of each mistake before
anything starts.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.models.source import commit_of, description_folder, here, model_folder, weight_files
from agentrl.runs.preflight import check_model
from agentrl.weights.bundle import weight_shapes

ROOT = Path(__file__).parents[2]
OLD, NEW = "1" * 40, "2" * 40


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def cached(offline: Path, tiny_model_dir: Path) -> Path:
    """The cache with a model in two versions, as the hub's own library keeps it: the snapshot of
    its newest.
    """
    home = offline / "models--someone--small-talk"
    for commit, refs in ((OLD, ["v1"]), (NEW, ["main"])):
        shutil.copytree(tiny_model_dir, home / "snapshots" / commit)
        for ref in refs:
            (home / "refs").mkdir(exist_ok=True)
            (home / "refs" / ref).write_text(commit)
    return home / "snapshots" / NEW


def checked(model: Any) -> None:
    settings = model if isinstance(model, dict) else {"name": str(model)}
    overrides = [f"model.{key}={json.dumps(value)}" for key, value in settings.items()]
    check_model(load_config(ROOT / "examples" / "frozen_lake.yaml", overrides).config)


def test_a_model_of_the_hub_is_its_snapshot_in_the_cache(cached: Path) -> None:
    assert model_folder("someone/small-talk") == cached
    assert model_folder("someone/small-talk", "v1") == cached.parent / OLD
    assert model_folder("someone/small-talk", OLD) == cached.parent / OLD
    assert [commit_of(path) for path in (cached, cached.parent.parent)] == [NEW, None]
    checked("someone/small-talk")
    # A worker on a machine that shares the cache gets the same folder; a folder of the user's is
    # left as it is.
    assert here(cached) == cached
    assert here(Path("some/where")) == Path("some/where")


def test_an_existing_folder_comes_before_the_hub(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(cached, tmp_path / "someone" / "small-talk")
    assert model_folder("someone/small-talk") == Path("someone/small-talk")
    with pytest.raises(
        ConfigError, match=r"model.revision=v1: 'someone/small-talk' is a folder here"
    ):
        model_folder("someone/small-talk", "v1")
    (tmp_path / "someone" / "small-talk" / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"no config.json in .*since a folder of that name exists"
    ):
        model_folder("someone/small-talk")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "someone/else",
            (
                r"neither the folder .*there is no folder .*/someone/else.* nor .* the cache .*"
                r" lacks it"
            ),
        ),
        ({"name": "someone/small-talk", "revision": "v9"}, r"from the hub at the revision 'v9'"),
        (
            "nowhere",
            (
                r"neither the folder .*there is no folder .* nor a model on the hub, which is"
                r" written owner/name"
            ),
        ),
        ("a/b/c", r"written owner/name"),
        ({"name": "tiny", "revision": "v1"}, r"model.revision: 'tiny' is made here"),
        (
            {"name": "tiny", "trust_remote_code": True},
            r"model.trust_remote_code: 'tiny' is made here",
        ),
    ],
)
def test_a_model_that_is_nowhere_is_said_in_both_readings(
    model: Any, message: str, cached: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(model)


def _edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | changes))

    return edit


def _without(*files: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / file).unlink() for file in files] and None


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
    )


def _only(file: str, content: str = "{}") -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / file).write_text(content)

    return edit


def _fewer_embeddings(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:20].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _edit("config.json", vocab_size=20)(folder)


def _half_of_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    listed = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _cut,
            (
                r"model.safetensors cannot be read: it is damaged or incomplete \(.*\): copy or"
                r" download it again"
            ),
        ),
        (_pointer, r"it is a pointer of Git LFS, .*: run `git lfs pull` there"),
        (
            _edit("config.json", intermediate_size=33),
            r"weights of .* have other shapes than its config.json describes, such",
        ),
        (
            _fewer_embeddings,
            r"the chat template in .* writes the token \d+, and the model has 20 tokens",
        ),
        (
            _only("adapter_config.json", '{"base_model_name_or_path": "a/b"}'),
            r"holds adapters only, of a/b: merge them",
        ),
        (_only("adapter_config.json", "{"), r"holds adapters only, of a model that is not named"),
        (
            _only("m.Q4_K_M.gguf"),
            r"holds GGUF files only, such as m.Q4_K_M.gguf: name the folder of the model that",
        ),
        (
            _edit("config.json", model_type="t5", architectures=["T5"]),
            r"is T5, which is no causal language model",
        ),
        (
            lambda folder: (folder / "generation_config.json").write_text("{"),
            r"generation_config.json cannot be read",
        ),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for x in %}"), r"template"),
        (_without("model.safetensors"), r"config of a model and no weights"),
        (
            _half_of_the_weights,
            r"lacks 1 of its 2 files of weights, such as model-00002-of-00002.safetensors",
        ),
        (_without("tokenizer.json"), r"the tokenizer in .* cannot be loaded"),
        (_without("chat_template.jinja"), r"has no chat template: name a file"),
        (
            _edit("config.json", model_type="vit", architectures=["ViTModel"]),
            r"is ViTModel, which is no causal",
        ),
        (
            _edit("config.json", model_type="xq9", architectures=["Xq9"]),
            r"transformers cannot read .*config.json",
        ),
        (
            _edit("config.json", quantization_config={"quant_method": "fp8"}),
            r"are quantised \(fp8\)",
        ),
        (
            _edit("config.json", model_type="xq9", auto_map={"AutoConfig": "code.Config"}),
            r"comes with code of its own. If you trust it, write model.trust_remote_code=true",
        ),
    ],
)
def test_what_a_models_folder_lacks_is_said_before_anything_starts(
    damage: Callable[[Path], None], message: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        checked(folder)


def test_a_model_is_found_in_the_home_folder_and_a_file_is_none(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(tiny_model_dir)
    assert model_folder("~/model") == tmp_path / "model"
    with pytest.raises(
        ConfigError, match=r"model.safetensors' is a file, and a model is a folder with config.json"
    ):
        checked(tiny_model_dir / "model.safetensors")


def test_weights_in_the_files_of_another_program_are_left_out(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """As Mistral publishes them, under names of its own."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    shutil.copy(
        tiny_model_dir / "model.safetensors", tmp_path / "model" / "consolidated.safetensors"
    )
    assert weight_files(tmp_path / "model") == [tmp_path / "model" / "model.safetensors"]
    save_file({"layers.0.weight": torch.zeros(2)}, tmp_path / "model" / "consolidated.safetensors")
    assert weight_shapes(tmp_path / "model") == weight_shapes(tiny_model_dir)


CODE = """
from pathlib import Path
from transformers import {base} as Base

class {name}(Base):
    model_type = "homemade"
    {more}
"""


def test_code_that_comes_with_a_model_runs_only_where_that_is_written(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "homemade"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "own_config.py").write_text(
        CODE.format(base="Qwen3Config", name="OwnConfig", more="ran = True")
    )
    auto_map = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    _edit("config.json", model_type="homemade", auto_map=auto_map)(folder)
    with pytest.raises(ConfigError, match=r"write model.trust_remote_code=true"):
        checked(folder)
    with pytest.raises(
        ConfigError, match=r"the model's own code \(own_model.OwnModel\) cannot be loaded"
    ):
        checked({"name": str(folder), "trust_remote_code": True})
    own_model = CODE.format(
        base="Qwen3ForCausalLM", name="OwnModel", more="config_class = OwnConfig"
    )
    (folder / "own_model.py").write_text(f"from .own_config import OwnConfig\n{own_model}")
    checked({"name": str(folder), "trust_remote_code": True})


@pytest.mark.slow
def test_a_run_from_the_hub_stays_at_the_commit_that_it_began_with(
    agentrl: Any, cached: Path, tmp_path: Path
) -> None:
    small = [
        "model=someone/small-talk",
        "recipe.demonstrations=null",
        "rollout.groups_per_step=2",
        "evaluation.tasks=0",
    ]
    small += [
        "rollout.group_size=2",
        "rollout.budget.turns=2",
        "checkpoint.every=1",
        "trackers=[]",
        "trainer.lora={}",
    ]
    config, run = str(ROOT / "examples" / "frozen_lake.yaml"), tmp_path / "run"
    done = agentrl("train", config, *small, f"run_dir={run}", "steps=1")
    assert done.returncode == 0, done.stderr
    assert (run / "model_commit").read_text() == f"{NEW}\n"
    # Somebody publishes a newer version, which is not a model at all. The run does not take it.
    shutil.copytree(cached, cached.parent / ("3" * 40))
    os.remove(cached.parent / ("3" * 40) / "model.safetensors")
    (cached.parent.parent / "refs" / "main").write_text("3" * 40)
    with pytest.raises(ConfigError, match="no weights"):
        model_folder("someone/small-talk")
    assert description_folder("someone/small-talk").name == "3" * 40
    done = agentrl("train", "--resume", str(run), "steps=2")
    assert done.returncode == 0, done.stderr
    assert (run / "checkpoints" / "step_000002").is_dir()
