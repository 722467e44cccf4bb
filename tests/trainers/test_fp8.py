"""Products in fp8: what they change, that samples stay independent, and what is refused.

torchao is installed for these tests alone: where it is, transformers imports it in every process,
for some seconds.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.testing.trainers import LOSS, TrainerCase, check_resume, random_batches
from agentrl.trainers.compute.attention import ATTENTION, Segments
from agentrl.trainers.compute.fp8 import use_fp8
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from tests.model_families import SMALL
from tests.trainers.shared_processes import Processes

CPU = torch.device("cpu")
CASE = TrainerCase()
ROOT = Path(__file__).parents[2]
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is installed by the last test of this module"
)


def model_of(**settings: Any) -> Any:
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    config = transformers.Qwen3Config(**{**SMALL, **sizes, **settings})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION
    ).eval()


def states(model: Any, lengths: Sequence[int], skipped: int = 0) -> torch.Tensor:
    """The last hidden states of samples of these lengths, which lie after so many other tokens."""
    places = torch.cat([torch.arange(length) for length in lengths])
    tokens = (torch.arange(skipped, skipped + len(places)) * 7) % 320
    found: torch.Tensor = model.base_model(
        input_ids=tokens[None],
        position_ids=places[None],
        use_cache=False,
        segments=Segments.of(lengths, CPU),
    ).last_hidden_state[0]
    return found


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@needs_torchao
def test_results_and_gradients_are_rounded_and_samples_stay_independent() -> None:
    model, rounded = model_of(), model_of()
    use_fp8(rounded, CPU)
    assert [name for name, _ in rounded.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    found = []
    for one in (model, rounded):
        out = states(one, [9, 30])
        out.square().mean().backward()
        found.append((out.detach(), *(p.grad for p in one.base_model.parameters())))
    for exact, near in zip(*found, strict=True):
        assert 0 < distance(near, exact) < 0.15
    # A large token beside them would change all, had a tensor one scale.
    with torch.no_grad():
        rounded.get_input_embeddings().weight[0] *= 100
        together, alone = states(rounded, [9, 30])[9:], states(rounded, [30], skipped=9)
    assert torch.allclose(together, alone, atol=1e-5)


@needs_torchao
def test_the_head_stays_as_it_is_and_so_do_matrices_of_other_sizes() -> None:
    model = model_of(intermediate_size=40)
    use_fp8(model, CPU)
    kinds = {
        name.rpartition(".")[2]: type(module).__name__ for name, module in model.named_modules()
    }
    assert kinds["lm_head"] == kinds["up_proj"] == kinds["down_proj"] == "Linear"
    assert kinds["q_proj"] == kinds["o_proj"] == "Float8Linear"
    with pytest.raises(ConfigError, match="multiples of 16, and Qwen3ForCausalLM has none"):
        use_fp8(model_of(hidden_size=40), CPU)


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"8\.9 or more, and this one is NVIDIA A100"):
        use_fp8(model_of(), torch.device("cuda"))


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (LocalTrainer, {"lora": {}}, "not been tried with lora"),
        (LocalTrainer, {"compile": True}, "not been tried with compile"),
        (FsdpTrainer, {"world_size": 2, "tensor_parallel": 2}, "tensor_parallel cuts"),
        (DeepSpeedTrainer, {}, "write trainer: fsdp"),
    ],
)
def test_settings_that_go_with_other_linear_layers_are_refused(
    kind: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        kind.Config(fp8=True, **settings)


def local(model: Path, case: TrainerCase = CASE) -> LocalTrainer:
    config = LocalTrainer.Config(**case.settings, device="cpu", fp8=True)
    return LocalTrainer(config, model, total_steps=case.total_steps, temperature=case.temperature)


@needs_torchao
def test_a_trainer_with_fp8_publishes_whole_weights_and_resumes_exactly(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    asyncio.run(check_resume(local, shallow_model_dir, tmp_path))


@needs_torchao
def test_two_ranks_learn_as_one_process_does(processes: Processes, shallow_model_dir: Path) -> None:
    """What one rounds up, another may round down: they are near, not equal."""
    batches = random_batches(shallow_model_dir, 3)

    async def trained(trainer: GroupTrainer) -> dict[str, torch.Tensor]:
        async with trainer:
            for batch in batches:
                await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
            return {name: weight.clone() for name, weight in (await trainer.weights()).items()}

    def of_two() -> GroupTrainer:
        config = FsdpTrainer.Config(**CASE.settings, world_size=2, fp8=True)
        return FsdpTrainer(
            config,
            shallow_model_dir,
            total_steps=CASE.total_steps,
            temperature=CASE.temperature,
            start=processes,
        )

    one, two = asyncio.run(trained(local(shallow_model_dir))), asyncio.run(trained(of_two()))
    first = transformers.AutoModelForCausalLM.from_pretrained(shallow_model_dir).state_dict()
    assert one.keys() == two.keys()
    moved = torch.cat([(one[name] - first[name]).flatten() for name in one])
    apart = torch.cat([(one[name] - two[name]).flatten() for name in one])
    assert float(apart.norm() / moved.norm()) < 0.05


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_all_of_it_where_torchao_is_installed(tmp_path: Path) -> None:
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *install, "torchao>=0.15"], check=True)
    tests = [sys.executable, "-m", "pytest", "-n", "0", "-W", "ignore", "-m", "not gpu"]
    options = "addopts=-q --import-mode=importlib --strict-markers -p no:schemathesis"
    ended = subprocess.run(
        [*tests, "-o", options, str(Path(__file__).relative_to(ROOT))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "1 skipped" in ended.stdout, ended.stdout[-500:]  # this one
