"""The local trainer: its contract, and what is its own."""

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.algorithms.grpo import Grpo
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.cluster.processes import start_local
from agentrl.cluster.workers import InOwnProcess, Make, WorkerGroup
from agentrl.errors import (
    AgentRLError,
    CheckpointError,
    ConfigError,
    ConformanceError,
    TrainingError,
)
from agentrl.protocols import LossOutput, LossTokens
from agentrl.testing.trainers import (
    LOSS,
    TrainerCase,
    check_equals_reference,
    check_lora,
    check_resume,
    check_trainer,
    random_batches,
)
from agentrl.tokens.arrays import floats, ints, mask
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.settings import TrainerSettings
from agentrl.weights.low_rank import LowRank
from agentrl.weights.publisher import checksum


def make_trainer(model: Path, case: TrainerCase, **settings: Any) -> LocalTrainer:
    config = LocalTrainer.Config(**{**case.settings, "device": "cpu", **settings})
    return LocalTrainer(config, model, total_steps=case.total_steps, temperature=case.temperature)


async def run(
    trainer: LocalTrainer, batches: list[TrainBatch]
) -> tuple[str, list[Mapping[str, float]]]:
    """The checksum of the weights after the batches, and the metrics of each step."""
    async with trainer:
        metrics = [
            await trainer.step(batch, LOSS, float(batch.num_loss_tokens)) for batch in batches
        ]
        return checksum(await trainer.weights()), metrics


@pytest.fixture(scope="module")
def batches(shallow_model_dir: Path) -> list[TrainBatch]:
    return random_batches(shallow_model_dir, 3)


def test_the_local_trainer_computes_what_the_reference_does(shallow_model_dir: Path) -> None:
    asyncio.run(
        check_equals_reference(make_trainer, shallow_model_dir, TrainerCase(entropy_bonus=0.1))
    )


@pytest.mark.slow
def test_the_local_trainer_keeps_the_contract(shallow_model_dir: Path, tmp_path: Path) -> None:
    asyncio.run(check_trainer(make_trainer, shallow_model_dir, tmp_path))


@pytest.mark.slow
def test_the_local_trainer_keeps_the_contract_of_adapters(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    asyncio.run(check_lora(make_trainer, shallow_model_dir, tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 1.0},
        pytest.param({"weight_decay": 0.0}, marks=pytest.mark.slow),
        pytest.param({"max_grad_norm": 9.0}, marks=pytest.mark.slow),
        pytest.param({"eps": 1e-8}, marks=pytest.mark.slow),
    ],
)
def test_the_contract_notices_a_trainer_that_ignores_a_setting(
    shallow_model_dir: Path, wrong: dict[str, float]
) -> None:
    def make(model: Path, case: TrainerCase) -> LocalTrainer:
        return make_trainer(model, replace(case, **wrong))

    with pytest.raises(ConformanceError, match=r"reference has|off by"):
        asyncio.run(check_equals_reference(make, shallow_model_dir, TrainerCase()))


def test_the_contract_notices_a_trainer_that_forgets_its_optimizer(
    shallow_model_dir: Path, tmp_path: Path
) -> None:
    class Forgetful(LocalTrainer):
        async def load(self, folder: Path) -> None:
            await super().load(folder)
            self._ranks.workers[0].made.sharding.optimizer.state.clear()

    def make(model: Path, case: TrainerCase) -> LocalTrainer:
        config = make_trainer(model, case).config
        return Forgetful(config, model, total_steps=case.total_steps, temperature=case.temperature)

    with pytest.raises(ConformanceError, match="never having stopped"):
        asyncio.run(check_resume(make, shallow_model_dir, tmp_path))


def test_activation_checkpointing_computes_twice_and_changes_no_bit(
    shallow_model_dir: Path, batches: list[TrainBatch]
) -> None:
    async def train(checkpointing: str) -> tuple[str, int]:
        calls: list[None] = []
        case = TrainerCase(micro_batch_tokens=10**6)
        async with make_trainer(
            shallow_model_dir, case, activation_checkpointing=checkpointing
        ) as trainer:
            first_layer = (
                trainer._ranks.workers[0].made.sharding.model.model.base_model.layers[0].mlp
            )
            first_layer.register_forward_pre_hook(lambda *_: calls.append(None))
            await trainer.step(batches[0], LOSS, 100.0)
            return checksum(await trainer.weights()), len(calls)

    plain, once = asyncio.run(train("none"))
    checkpointed, twice = asyncio.run(train("full"))
    assert (once, twice) == (1, 2)
    assert plain == checkpointed


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_runs_give_bitwise_equal_weights(
    shallow_model_dir: Path, batches: list[TrainBatch], dtype: str
) -> None:
    one, two = (
        asyncio.run(run(make_trainer(shallow_model_dir, TrainerCase(), dtype=dtype), batches))
        for _ in range(2)
    )
    assert one[0] == two[0]
    start, _ = asyncio.run(run(make_trainer(shallow_model_dir, TrainerCase()), []))
    assert one[0] != start, "nothing was trained"


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(
    shallow_model_dir: Path, batches: list[TrainBatch]
) -> None:
    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase(), dtype="bfloat16") as trainer:
            coarse = await trainer.step(batches[0], LOSS, 100.0)
            assert {w.dtype for w in (await trainer.weights()).values()} == {torch.float32}
        async with make_trainer(shallow_model_dir, TrainerCase()) as trainer:
            fine = await trainer.step(batches[0], LOSS, 100.0)
        assert coarse["loss"] != fine["loss"]
        assert coarse["loss"] == pytest.approx(fine["loss"], abs=0.02)

    asyncio.run(main())


def test_a_policy_gradient_makes_the_good_likelier_and_the_bad_less_likely(
    shallow_model_dir: Path,
) -> None:
    good = TrainingSample(
        (1, 2, 3, 4),
        (0, 0, 1, 1),
        (0.0, 0.0, -5.0, -5.0),
        (0.0, 0.0, 1.0, 1.0),
        (-1, -1, 0, 0),
        (0,) * 4,
    )
    bad = replace(good, token_ids=(1, 2, 5, 6), advantages=(0.0, 0.0, -1.0, -1.0))
    batch = collate([good, bad])
    seen: list[torch.Tensor] = []

    def loss(logprobs_N: torch.Tensor, tokens: LossTokens) -> LossOutput:
        assert tokens.segments_N.tolist() == [0, 0, 1, 1]
        seen.append(logprobs_N.detach().clone())
        return Grpo(Grpo.Config(importance_cap=None)).loss(logprobs_N, tokens)

    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase(eps=1e-8)) as trainer:
            for _ in range(3):
                await trainer.step(batch, loss, 4.0)

    asyncio.run(main())
    change = seen[-1] - seen[0]
    assert (change[:2] > 0.01).all()
    assert (change[2:] < -0.01).all()


def test_logprobs_of_the_engine_that_equal_the_trainers_have_no_gap(
    shallow_model_dir: Path,
) -> None:
    (batch,) = random_batches(shallow_model_dir, 1)
    in_order: dict[int, torch.Tensor] = {}

    def loss(logprobs_N: torch.Tensor, tokens: LossTokens) -> LossOutput:
        for number in range(batch.num_samples):
            in_order[number] = logprobs_N.detach()[tokens.segments_N == number]
        return LossOutput(loss_N=logprobs_N * 0.0, metrics={"one": torch.ones_like(logprobs_N)})

    async def main() -> None:
        async with make_trainer(
            shallow_model_dir, TrainerCase(weight_decay=0.0, micro_batch_tokens=10**6)
        ) as trainer:
            first = await trainer.step(batch, loss, 1.0)
            own_N = np.concatenate(
                [in_order[number].numpy() for number in range(batch.num_samples)]
            )
            second = await trainer.step(replace(batch, rollout_logprobs_N=own_N), loss, 1.0)
        assert first["logprob_gap_max"] > first["logprob_gap_mean"] > 0.1
        assert second["logprob_gap_max"] == second["logprob_gap_mean"] == 0.0
        assert first["one"] == 1.0
        assert first["loss_tokens"] == batch.num_loss_tokens
        assert first["tokens"] == len(batch.tokens_S)

    asyncio.run(main())


def test_the_engines_logprobs_stand_for_the_trainers_old_ones_without_a_pass(
    shallow_model_dir: Path,
) -> None:
    async def main() -> None:
        (batch,) = random_batches(shallow_model_dir, 1)
        case, found = TrainerCase(minibatches=3), []
        async with make_trainer(shallow_model_dir, case) as trainer:
            batch = replace(batch, rollout_logprobs_N=await trainer.predict(batch))
        for old in ("trainer", "engine"):
            config = LocalTrainer.Config(**case.settings, device="cpu", old_logprobs=old)
            async with LocalTrainer(
                config, shallow_model_dir, total_steps=1, temperature=case.temperature
            ) as trainer:
                metrics = await trainer.step(batch, LOSS, 10.0)
                found.append(
                    {name: weight.clone() for name, weight in (await trainer.weights()).items()}
                )
            assert ("seconds_old_logprobs" in metrics) == (old == "trainer")
            assert metrics["logprob_gap_mean"] <= metrics["logprob_gap_max"] < 1e-5
        assert all(
            torch.allclose(one, found[1][name], rtol=0, atol=1e-6) for name, one in found[0].items()
        )

    asyncio.run(main())


def test_the_event_loop_goes_on_during_a_step(
    shallow_model_dir: Path, batches: list[TrainBatch]
) -> None:
    def slow(logprobs_N: torch.Tensor, tokens: LossTokens) -> LossOutput:
        time.sleep(0.05)
        return LOSS(logprobs_N, tokens)

    async def main() -> int:
        ticks = 0
        async with (
            make_trainer(shallow_model_dir, TrainerCase()) as trainer,
            asyncio.TaskGroup() as group,
        ):
            step = group.create_task(trainer.step(batches[0], slow, 1.0))
            while not step.done():
                await asyncio.sleep(0.005)
                ticks += 1
        return ticks

    assert asyncio.run(main()) > 5


def test_a_cancelled_step_is_finished_before_the_trainer_closes(
    shallow_model_dir: Path, batches: list[TrainBatch]
) -> None:
    calls: list[int] = []
    began, released = threading.Event(), threading.Event()

    def slow(logprobs_N: torch.Tensor, tokens: LossTokens) -> LossOutput:
        began.set()
        released.wait(60)
        calls.append(len(logprobs_N))
        return LOSS(logprobs_N, tokens)

    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase()) as trainer:
            step = asyncio.ensure_future(trainer.step(batches[0], slow, 1.0))
            await asyncio.to_thread(began.wait)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            released.set()

    asyncio.run(main())
    assert sum(calls) == batches[0].num_loss_tokens


def test_a_batch_with_nothing_to_learn_from_is_refused(
    shallow_model_dir: Path, batches: list[TrainBatch]
) -> None:
    empty = collate([TrainingSample((1, 2), (0, 0), (0.0, 0.0), (0.0, 0.0), (-1, -1), (0, 0))])

    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase()) as trainer:
            with pytest.raises(TrainingError, match="0 loss tokens"):
                await trainer.step(empty, LOSS, 1.0)
            with pytest.raises(TrainingError, match="normalizer"):
                await trainer.step(batches[0], LOSS, 0.0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda loss_N: loss_N.mean(), r"shape \(\) for losses, and \d+ tokens .* Do not average"),
        (lambda loss_N: loss_N[:, None], r"shape \(\d+, 1\) for losses"),
        (lambda loss_N: loss_N[:-1], r"shape \(\d+,\) for losses"),
        (lambda loss_N: loss_N.tolist(), "a list for losses"),
        (lambda loss_N: loss_N.detach(), "have no gradient"),
        (None, "returned a Tensor: return a LossOutput"),
    ],
)
def test_a_loss_without_one_number_for_each_token_is_refused_before_an_update(
    returned: Callable[[torch.Tensor], Any] | None,
    says: str,
    shallow_model_dir: Path,
    batches: list[TrainBatch],
) -> None:
    def loss(logprobs_N: torch.Tensor, tokens: LossTokens) -> Any:
        return logprobs_N if returned is None else LossOutput(returned(-logprobs_N), {})

    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase()) as trainer:
            before = checksum(await trainer.weights())
            with pytest.raises(TrainingError, match=says):
                await trainer.step(batches[0], loss, 1.0)
            assert checksum(await trainer.weights()) == before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("own", lambda logprobs_N: logprobs_N.mean(), r"shape \(\) for the metric 'own'"),
        ("own", lambda logprobs_N: 0.5, "a float for the metric 'own'"),
        ("loss", lambda logprobs_N: logprobs_N, "'loss' is reported twice, by the trainer and by"),
        ("tokens", lambda logprobs_N: logprobs_N, "'tokens' is reported twice, by the loss and by"),
    ],
)
def test_a_metric_of_a_loss_is_one_number_for_each_token_and_hides_no_other(
    name: str,
    value: Callable[[torch.Tensor], Any],
    says: str,
    shallow_model_dir: Path,
    batches: list[TrainBatch],
) -> None:
    def loss(logprobs_N: torch.Tensor, tokens: LossTokens) -> LossOutput:
        return LossOutput(-logprobs_N, {name: value(logprobs_N.detach())})

    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase()) as trainer:
            with pytest.raises(AgentRLError, match=says):
                await trainer.step(batches[0], loss, 1.0)

    asyncio.run(main())


def test_the_loss_of_a_single_token_may_have_no_axis(shallow_model_dir: Path) -> None:
    def loss(logprobs_N: torch.Tensor, tokens: LossTokens) -> LossOutput:
        return LossOutput(-logprobs_N.squeeze(), {"own": logprobs_N.detach().squeeze()})

    async def main() -> None:
        sample = TrainingSample(
            ints((5, 6)), mask((0, 1)), floats((0, -1)), floats((0, 1)), ints((-1, 0)), ints((0, 0))
        )
        async with make_trainer(shallow_model_dir, TrainerCase()) as trainer:
            metrics = await trainer.step(collate([sample]), loss, 1.0)
        assert metrics["loss"] == pytest.approx(-metrics["own"])

    asyncio.run(main())


def test_a_checkpoint_that_is_missing_or_damaged_or_foreign_says_the_way_out(
    shallow_model_dir: Path, tmp_path: Path, batches: list[TrainBatch]
) -> None:
    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase()) as trainer:
            await trainer.step(batches[0], LOSS, 1.0)
            before = checksum(await trainer.weights())
            with pytest.raises(CheckpointError, match="older checkpoint"):
                await trainer.load(tmp_path / "none")
            await trainer.save(tmp_path / "cut")
            weights = tmp_path / "cut" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-100])
            with pytest.raises(CheckpointError, match="damaged"):
                await trainer.load(tmp_path / "cut")
            weights.unlink()
            with pytest.raises(CheckpointError, match=r"damaged: there are no \*\.safetensors"):
                await trainer.load(tmp_path / "cut")
            foreign = {"model.norm.weight": torch.zeros(3), "model.other": torch.zeros(3)}
            save_file(foreign, weights, metadata={"format": "pt"})
            with pytest.raises(CheckpointError, match=r"does not fit .*unknown: \['model.other'\]"):
                await trainer.load(tmp_path / "cut")
            await trainer.save(tmp_path / "torn")
            state = tmp_path / "torn" / "trainer.pt"
            state.write_bytes(state.read_bytes()[:1000])
            with pytest.raises(CheckpointError, match="damaged"):
                await trainer.load(tmp_path / "torn")
            assert checksum(await trainer.weights()) == before

    asyncio.run(main())


def test_a_resumed_schedule_goes_on_where_it_stopped(
    shallow_model_dir: Path, tmp_path: Path, batches: list[TrainBatch]
) -> None:
    settings = {"schedule": "cosine", "warmup_steps": 2}

    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase(), **settings) as trainer:
            rates = [(await trainer.step(batch, LOSS, 1.0))["lr"] for batch in batches]
            await trainer.save(tmp_path / "c")
            unbroken = (await trainer.step(batches[0], LOSS, 1.0))["lr"]
        async with make_trainer(shallow_model_dir, TrainerCase(), **settings) as trainer:
            await trainer.load(tmp_path / "c")
            assert (await trainer.step(batches[0], LOSS, 1.0))["lr"] == unbroken
        assert rates == [pytest.approx(1.5e-3), pytest.approx(3e-3), pytest.approx(3e-3)]
        assert unbroken < 3e-3

    asyncio.run(main())


def test_the_schedule_climbs_falls_and_stays() -> None:
    cosine = TrainerSettings(lr=1.0, schedule="cosine", warmup_steps=4, min_lr_ratio=0.1)
    rates = [cosine.learning_rate(step, 14) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.55)
    assert rates[14:] == [pytest.approx(0.1)] * 6
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    flat = TrainerSettings(lr=1.0)
    assert {flat.learning_rate(step, 3) for step in range(6)} == {1.0}


def test_wrong_settings_say_what_to_write(shallow_model_dir: Path, tmp_path: Path) -> None:
    async def enter(trainer: LocalTrainer) -> None:
        async with trainer:
            pass

    with pytest.raises(ConfigError, match="temperature"):
        LocalTrainer(LocalTrainer.Config(), shallow_model_dir, total_steps=1, temperature=0.0)
    with pytest.raises(ConfigError, match=r"config\.json"):
        asyncio.run(enter(LocalTrainer(LocalTrainer.Config(), tmp_path, total_steps=1)))
    with pytest.raises(ConfigError, match="torch device"):
        asyncio.run(
            enter(
                LocalTrainer(
                    LocalTrainer.Config(device="quantum"), shallow_model_dir, total_steps=1
                )
            )
        )
    with pytest.raises(AgentRLError, match="async with"):
        asyncio.run(LocalTrainer(LocalTrainer.Config(), shallow_model_dir, total_steps=1).weights())


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    forward = Qwen3ForCausalLM.forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + 1
        return output

    async def enter() -> None:
        async with LocalTrainer(
            LocalTrainer.Config(device="cpu"), shallow_model_dir, total_steps=1
        ):
            pass

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", shifted)
    with pytest.raises(ConfigError, match="scaled or capped"):
        asyncio.run(enter())


def test_ranks_leave_before_they_are_stopped_and_one_that_cannot_is_stopped_all_the_same(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.trainers.group._LEAVE_SECONDS", 0.1)
    said: list[str] = []

    @dataclass
    class Seen:
        answers: bool

        async def call(self, method: str, *_: Any) -> Any:
            said.append(method)
            if method == "close" and not self.answers:
                await asyncio.Event().wait()
            return "localhost:1"

        async def stop(self) -> None:
            said.append("stop")

    async def leave(worker: Seen) -> None:
        async def start(role: str, make: Make, count: int) -> WorkerGroup:
            return WorkerGroup(role, [worker])

        async with LocalTrainer(
            LocalTrainer.Config(), shallow_model_dir, total_steps=1, start=start
        ):
            said.clear()

    for answers in (True, False):
        asyncio.run(leave(Seen(answers)))
        assert said == ["close", "stop"]


@pytest.mark.slow
def test_saved_adapters_are_those_of_peft_and_the_folder_has_them_merged(
    shallow_model_dir: Path, tmp_path: Path, batches: list[TrainBatch]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]}

    async def main() -> None:
        async with make_trainer(shallow_model_dir, TrainerCase(lora=lora, lr=0.1)) as trainer:
            for batch in batches:
                await trainer.step(batch, LOSS, 10.0)
            weights = await trainer.weights()
            assert isinstance(weights, LowRank)
            assert {name.split(".")[-2] for name in weights.factors} == {"q_proj", "down_proj"}
            await trainer.save(tmp_path / "saved")

    asyncio.run(main())
    base = AutoModelForCausalLM.from_pretrained(shallow_model_dir)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(1, 9)[None]
    before = base(tokens).logits.detach()
    beside = PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter")(tokens).logits
    torch.testing.assert_close(beside, merged(tokens).logits, atol=1e-4, rtol=1e-4)
    assert (merged(tokens).logits - before).abs().max() > 1.0


def test_adapters_that_cannot_be_made_say_why(shallow_model_dir: Path, tmp_path: Path) -> None:
    async def enter(model: Path, targets: Any) -> None:
        async with make_trainer(model, TrainerCase(lora={"targets": targets})):
            pass

    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets=\['nothing'\].*not found"):
        asyncio.run(enter(shallow_model_dir, ["nothing"]))
    with pytest.raises(
        ConfigError,
        match=r"'q_prj' is not found in Qwen3ForCausalLM: .* such as down_proj, .*, v_proj",
    ):
        asyncio.run(enter(shallow_model_dir, ["v_proj", "q_prj"]))
    with pytest.raises(
        ConfigError, match=r"linear layers only, and .*embed_tokens is of type Embedding"
    ):
        asyncio.run(enter(shallow_model_dir, ["embed_tokens"]))
    with pytest.raises(
        ConfigError, match="lm_head is the model's head, which can have no adapters"
    ):
        asyncio.run(enter(shallow_model_dir, ["q_proj", "lm_head"]))
    with pytest.raises(ConfigError, match="names no layer"):
        asyncio.run(enter(shallow_model_dir, []))
    for file in shallow_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        asyncio.run(enter(tmp_path, "all-linear"))


@pytest.mark.slow
@pytest.mark.long
def test_loading_and_saving_say_nothing(shallow_model_dir: Path, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from agentrl.trainers.local import"
        " LocalTrainer\nasync def main():\n    async with"
        " LocalTrainer(LocalTrainer.Config(device='cpu'), Path(sys.argv[1]), total_steps=1) as"
        " trainer:\n        await trainer.save(Path(sys.argv[2]))\nasyncio.run(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, shallow_model_dir, tmp_path / "saved"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == ("", "")


@pytest.mark.parametrize(
    ("missing", "kind", "settings"),
    [("deepspeed", DeepSpeedTrainer, {}), ("peft", LocalTrainer, {"device": "cpu", "lora": {}})],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    missing: str,
    kind: Any,
    settings: dict[str, Any],
    shallow_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_this_process(role: str, make: Make, count: int) -> Awaitable[WorkerGroup]:
        assert isinstance(make, InOwnProcess) == (kind is DeepSpeedTrainer)
        return start_local(role, make.make if isinstance(make, InOwnProcess) else make, count)

    async def enter() -> None:
        config = kind.Config(**settings)
        async with kind(config, shallow_model_dir, total_steps=1, start=in_this_process):
            pass

    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ConfigError, match=rf"agentrl-train\[({missing}|lora)\]"):
        asyncio.run(enter())
