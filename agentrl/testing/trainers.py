"""Tests a trainer against its contract, for the trainer's author: `asyncio.run(check_trainer(make,
model, workspace))`.

The results of the trainer are compared with a reference that is as plain as possible: one sample at
a time, the whole model, no packing, no accumulation. Dimension suffix: N loss tokens, flattened.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from agentrl.algorithms.grpo import Grpo
from agentrl.batch import TrainBatch, TrainingSample, collate, equal_parts
from agentrl.errors import ConformanceError, TrainingError
from agentrl.models.weight_names import WeightNames
from agentrl.protocols import Loss, LossTokens, Trainer
from agentrl.tokens.arrays import FloatArray, IntArray, Ragged, floats, ints, mask
from agentrl.weights.bundle import BundlePlace
from agentrl.weights.low_rank import Factors, LowRank
from agentrl.weights.transports.files import WriteBuckets, bundle_of

TOLERANCE = 1e-5
"""Largest allowed difference from the reference: absolute for weights, relative for metrics."""


def loss_with(entropy_bonus: float) -> Loss:
    """A clipped surrogate with weights, and an entropy bonus."""
    clips = Grpo.Config(
        clip_low=0.2, clip_high=0.28, dual_clip=3.0, importance_cap=1.2, entropy_bonus=entropy_bonus
    )
    return Grpo(clips).loss


LOSS: Loss = loss_with(0.0)


@dataclass(frozen=True, slots=True)
class TrainerCase:
    """The settings of a check: AdamW in float32 at a constant learning rate, with weight decay of
    matrices only.

    `eps` is large, so that AdamW does not amplify rounding errors in gradients near zero.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3
    weight_decay: float = 0.1
    max_grad_norm: float = 0.5
    micro_batch_tokens: int = 100
    minibatches: int = 1
    lora: Mapping[str, Any] | None = None
    temperature: float = 0.8
    total_steps: int = 10
    entropy_bonus: float = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are fields of `TrainerSettings`."""
        given = asdict(self)
        others = ("temperature", "total_steps", "entropy_bonus")
        fields = {name: given[name] for name in given if name not in others}
        return {"dtype": "float32", **fields}


MakeTrainer = Callable[[Path, TrainerCase], Trainer]
"""Makes a trainer of the model in a folder, with the settings of a case."""


async def check_trainer(make_trainer: MakeTrainer, model: Path, workspace: Path) -> None:
    """Check that a trainer follows the protocol, and that its numbers are right.

    `model` is a Hugging Face folder with full attention and no dropout; `workspace` an empty folder
    to write into.

    Raises:
        ConformanceError: it does not; the message says what differs.
    """
    await check_equals_reference(make_trainer, model, TrainerCase())
    await check_equals_reference(make_trainer, model, TrainerCase(minibatches=3, entropy_bonus=0.1))
    await check_accumulation(make_trainer, model)
    await check_resume(make_trainer, model, workspace)
    await check_refuses_non_finite(make_trainer, model)
    await check_predicts(make_trainer, model)
    await check_tells_logprobs(make_trainer, model)


async def check_predicts(make_trainer: MakeTrainer, model: Path) -> None:
    """Its predictions are the logprobs of the plain reference."""
    async with make_trainer(model, TrainerCase()) as trainer:
        reference = _Reference.open(model, TrainerCase(), await trainer.weights())
        samples = random_samples(reference.vocab_size, seed=1)
        batch = collate(samples)
        predicted_N = await trainer.predict(batch)
    if predicted_N.shape != (batch.num_loss_tokens,):
        raise ConformanceError(
            f"the prediction has the shape {predicted_N.shape}, but should have one number for each"
            f" of the {batch.num_loss_tokens} loss tokens"
        )
    of_samples = np.split(predicted_N, np.cumsum(batch.loss_tokens_M)[:-1])
    for number, (sample, got_N) in enumerate(zip(samples, of_samples, strict=True), 1):
        with torch.no_grad():
            want_N = reference._logprobs(sample)[0]
        if not torch.allclose(torch.from_numpy(got_N), want_N, rtol=0, atol=TOLERANCE):
            raise ConformanceError(
                f"the logprobs of sample {number} are not those of the plain reference"
            )


async def check_tells_logprobs(make_trainer: MakeTrainer, model: Path) -> None:
    """Its token logprobs, if it has any, are those before its step and at each update."""
    case = TrainerCase(minibatches=3, lr=1e-2)
    async with make_trainer(model, case) as trainer:
        reference = _Reference.open(model, case, await trainer.weights())
        batch = collate(random_samples(reference.vocab_size, seed=1))
        before_N = await trainer.predict(batch)
        await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
        told_3N = await trainer.token_logprobs()
    if told_3N is None and type(trainer).token_logprobs is Trainer.token_logprobs:
        return  # it keeps none, as by default
    if told_3N is None or told_3N.shape != (3, batch.num_loss_tokens):
        raise ConformanceError(
            f"after a step on {batch.num_loss_tokens} loss tokens, their logprobs have the shape "
            f"{None if told_3N is None else told_3N.shape}, but should have three numbers for each"
        )
    if not np.allclose(told_3N[0], before_N, rtol=0, atol=TOLERANCE):
        raise ConformanceError(
            "the first row of the token logprobs is not what `predict` gave before the step"
        )
    first = int(batch.loss_tokens_M[: equal_parts(batch.loss_tokens_M, case.minibatches)[0]].sum())
    if not np.allclose(told_3N[1, :first], before_N[:first], rtol=0, atol=TOLERANCE):
        raise ConformanceError(
            "nothing is updated before the first minibatch, and its token logprobs differ"
        )
    if np.allclose(told_3N[1, first:], before_N[first:], rtol=0, atol=TOLERANCE):
        raise ConformanceError(
            "the second row of the token logprobs does not show the updates of earlier minibatches"
        )


async def check_lora(make_trainer: MakeTrainer, model: Path, workspace: Path) -> None:
    """Check that a trainer with the setting `lora` trains only adapters, and publishes the weights
    as `LowRank`.

    Raises:
        ConformanceError: it does not; the message says what differs.
    """
    case = TrainerCase(lora={"rank": 4, "alpha": 8.0}, lr=1e-2)
    await check_equals_reference(make_trainer, model, case)
    await check_resume(make_trainer, model, workspace, case)
    await check_refuses_non_finite(make_trainer, model, case)


async def check_equals_reference(make_trainer: MakeTrainer, model: Path, case: TrainerCase) -> None:
    """Several steps give the losses, gradient norms and weights of the plain reference."""
    loss = loss_with(case.entropy_bonus)
    async with make_trainer(model, case) as trainer:
        reference = _Reference.open(model, case, await trainer.weights())
        for step in range(3):
            samples = random_samples(reference.vocab_size, seed=step)
            batch = collate(samples)
            weights_N = np.random.default_rng(step).uniform(0.5, 1.5, batch.num_loss_tokens)
            batch = replace(batch, weights_N=floats(weights_N))
            got = await trainer.step(batch, loss, float(batch.num_loss_tokens))
            want = reference.step(samples, batch.weights_N)
            for name, value in want.items():
                if name not in got or abs(got[name] - value) > TOLERANCE * max(1.0, abs(value)):
                    raise ConformanceError(
                        f"step {step}, {case.minibatches} minibatches: the metric {name!r} is"
                        f" {got.get(name)}, the reference has {value}"
                    )
            if case.minibatches == 1:
                _check_norms_by_group(got, step)
            _compare(
                await trainer.weights(),
                reference.weights(),
                TOLERANCE,
                f"after step {step} of {case}",
            )


def _check_norms_by_group(metrics: Mapping[str, float], step: int) -> None:
    """Gradient norms by group of layers, where a trainer tells them, make up that of the whole
    gradient.
    """
    groups = {name: value for name, value in metrics.items() if name.startswith("grad_norm/")}
    together = math.sqrt(sum(value**2 for value in groups.values()))
    if groups and abs(together - metrics["grad_norm"]) > TOLERANCE * max(1.0, metrics["grad_norm"]):
        raise ConformanceError(
            f"step {step}: the gradient norms by group of layers {groups} make up {together}, and"
            f" grad_norm is {metrics['grad_norm']}"
        )


async def check_accumulation(make_trainer: MakeTrainer, model: Path) -> None:
    """A batch in many micro-batches gives the weights of the same batch in one."""
    whole = await _train(make_trainer, model, TrainerCase(micro_batch_tokens=10**6))
    cut = await _train(make_trainer, model, TrainerCase(micro_batch_tokens=64))
    _compare(cut, whole, TOLERANCE, "micro-batches of 64 tokens against one")


async def check_resume(
    make_trainer: MakeTrainer,
    model: Path,
    workspace: Path,
    case: TrainerCase = TrainerCase(minibatches=2),
) -> None:
    """Saving, loading and going on is bitwise the same as going on, and the folder is a model with
    a tokenizer.

    The published weights are the same too (`agentrl/weights/publisher.py`).
    """
    from transformers import AutoModelForCausalLM

    folder = workspace / "checkpoint"
    batches = random_batches(model, 4)
    async with make_trainer(model, case) as trainer:
        await _take_steps(trainer, batches[:2])
        await trainer.save(folder)
        saved = _copy_weights(await trainer.weights())
        place = BundlePlace(workspace / "published", 1, 1 << 20)
        published = bundle_of(place, await trainer.send_weights(WriteBuckets(place, "float32")))
        published.check()
        _compare(published, saved, 0.0, "the weights that are published")
        await _take_steps(trainer, batches[2:])
        unbroken = _copy_weights(await trainer.weights())
    async with make_trainer(model, case) as trainer:
        await trainer.load(folder)
        _compare(await trainer.weights(), saved, 0.0, "right after load")
        await _take_steps(trainer, batches[2:])
        _compare(
            await trainer.weights(),
            unbroken,
            0.0,
            "two steps after load, against never having stopped",
        )
    as_model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    )
    as_published = WeightNames.of(as_model).published(as_model.state_dict())
    _compare(saved, as_published, 0.0, "the saved folder as a Hugging Face model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists() and not (folder / name).exists():
            raise ConformanceError(
                f"the model's {name} is not in the saved folder, so no engine can be started"
                " from it"
            )


async def check_refuses_non_finite(
    make_trainer: MakeTrainer, model: Path, case: TrainerCase = TrainerCase()
) -> None:
    """A NaN in a loss token raises `TrainingError`, and changes neither the weights nor the next
    step.
    """
    (batch,) = random_batches(model, 1)
    broken = replace(batch, advantages_N=np.full_like(batch.advantages_N, np.nan))
    async with make_trainer(model, case) as trainer:
        before = _copy_weights(await trainer.weights())
        try:
            await _take_steps(trainer, [broken])
        except TrainingError:
            pass
        else:
            raise ConformanceError("a step whose loss is NaN did not raise TrainingError")
        _compare(await trainer.weights(), before, 0.0, "after a refused step")
        await _take_steps(trainer, [batch])
        after = _copy_weights(await trainer.weights())
    _compare(
        after,
        await _train(make_trainer, model, case, [batch]),
        0.0,
        "a good step after a refused one",
    )


def random_samples(vocab_size: int, *, seed: int, count: int = 8) -> list[TrainingSample]:
    """Samples of several turns with uneven lengths, advantages of both signs, and logprobs near a
    random model's.

    In every third sample, most tokens were sampled from a few ids (`TrainingSample.support`). Every
    third begins as the sample before it, as the members of a group do.
    """
    rng, truncating = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    samples: list[TrainingSample] = []
    for number in range(count):
        length = int(rng.integers(4, 50))
        mask_T = np.concatenate([[0], np.repeat(rng.integers(0, 2, length), 3)[: length - 1]])
        advantage = float(rng.normal())
        logprobs = rng.normal(-np.log(vocab_size), 0.3, length)
        tokens = ints(rng.integers(0, vocab_size, length))
        if number % 3 == 1:
            begun = samples[-1].token_ids[: 2 * length // 3]
            tokens = ints([*begun, *tokens[len(begun) :]])
        support = (
            _random_support(tokens, mask_T, vocab_size, truncating) if number % 3 == 2 else None
        )
        if support is not None:
            logprobs = np.where(
                support.lengths > 0, -np.log(np.maximum(support.lengths, 1)), logprobs
            )
        samples.append(
            TrainingSample(
                token_ids=tokens,
                loss_mask=mask(mask_T),
                rollout_logprobs=floats(logprobs * mask_T),
                advantages=floats(advantage * mask_T),
                policy_versions=ints(mask_T - 1),
                turn_ids=ints(np.zeros(length)),
                support=support,
            )
        )
    return samples


def _random_support(
    tokens_T: IntArray, mask_T: IntArray, vocab_size: int, rng: np.random.Generator
) -> Ragged:
    """Up to eight ids for each loss token, itself among them; none, as for the whole vocabulary,
    for some.
    """
    sizes_T = rng.integers(0, 8, len(tokens_T)) * mask_T
    others = [rng.integers(0, vocab_size, size).tolist() for size in sizes_T]
    return Ragged.of(
        [
            list({token, *ids}) if ids else []
            for token, ids in zip(tokens_T.tolist(), others, strict=True)
        ]
    )


def random_batches(model: Path, count: int) -> list[TrainBatch]:
    """Batches of `random_samples` in the vocabulary of a model folder."""
    from transformers import AutoConfig

    vocab_size = (
        AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().vocab_size
    )
    return [collate(random_samples(vocab_size, seed=seed)) for seed in range(count)]


@dataclass(slots=True)
class _Reference:
    """Plain torch: one sample at a time; adapters are added to the weights."""

    model: Any
    factors: Mapping[str, Factors]
    parameters: Sequence[Tensor]
    optimizer: torch.optim.AdamW
    case: TrainerCase

    @staticmethod
    def open(folder: Path, case: TrainerCase, start: Mapping[str, Tensor]) -> "_Reference":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        ).eval()
        # From other weights than the trainer's, no number below could be equal.
        _compare(start, model.state_dict(), 0.0, "before the first step")
        factors = _copy_adapters(start) if case.lora is not None else {}
        parameters = [side for A, B, _ in factors.values() for side in (A, B)] or list(
            model.parameters()
        )
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": case.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=case.lr, betas=case.betas, eps=case.eps)
        return _Reference(model, factors, parameters, optimizer, case)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def weights(self) -> Mapping[str, Tensor]:
        return {**self.model.state_dict(), **self._merge_adapters()}

    def _merge_adapters(self) -> dict[str, Tensor]:
        own = self.model.state_dict()
        return {name: own[name] + scale * B @ A for name, (A, B, scale) in self.factors.items()}

    def step(self, samples: Sequence[TrainingSample], weights_N: FloatArray) -> dict[str, float]:
        """Train on the samples, and return the metrics that a trainer must report too."""
        ends = np.cumsum([int(sample.loss_mask.sum()) for sample in samples])
        weights = [
            torch.from_numpy(of_sample.copy()) for of_sample in np.split(weights_N, ends[:-1])
        ]
        normalizer = sum(sum(s.loss_mask) for s in samples) / self.case.minibatches
        with torch.no_grad():
            old = [self._logprobs(sample)[0] for sample in samples]
        rollout = [_at_loss(sample, sample.rollout_logprobs) for sample in samples]
        gaps = torch.cat([(a - b).abs() for a, b in zip(old, rollout, strict=True)])
        losses, norms = [], []
        sizes = equal_parts([sum(sample.loss_mask) for sample in samples], self.case.minibatches)
        for part in np.split(np.arange(len(samples)), np.cumsum(sizes)[:-1]):
            self.optimizer.zero_grad()
            loss = torch.zeros(())
            for i in part:
                advantages = _at_loss(samples[i], samples[i].advantages)
                logprobs_N, entropies_N = self._logprobs(samples[i])
                numbers_N = torch.full(advantages.shape, int(i))
                tokens = LossTokens(
                    old[i], rollout[i], rollout[i], advantages, numbers_N, entropies_N
                )
                token_loss_N = loss_with(self.case.entropy_bonus)(logprobs_N, tokens).loss_N
                loss = loss + (weights[i] * token_loss_N).sum() / normalizer
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(
                float(torch.nn.utils.clip_grad_norm_(self.parameters, self.case.max_grad_norm))
            )
            losses.append(float(loss.detach()))
            self.optimizer.step()
        return {
            "loss": float(np.mean(losses)),
            "grad_norm": max(norms),
            "lr": self.case.lr,
            "logprob_gap_mean": float(gaps.mean()),
            "logprob_gap_max": float(gaps.max()),
        }

    def _logprobs(self, sample: TrainingSample) -> Tensor:
        """The logprobs of the loss tokens, and the entropies before them, in two rows of N."""
        ids = torch.tensor(sample.token_ids, dtype=torch.long)
        logits = (
            functional_call(self.model, self._merge_adapters(), (ids[None],)).logits[0, :-1].float()
            / self.case.temperature
        )
        if sample.support is not None:
            # The logits at a place are of the token after it, so rows are one behind.
            kept = torch.zeros(len(ids), logits.shape[1], dtype=torch.bool)
            rows, kept_ids = sample.support.row_of_value(), sample.support.values
            kept[torch.tensor(rows, dtype=torch.long), torch.tensor(kept_ids, dtype=torch.long)] = (
                True
            )
            part = kept[1:].any(dim=1, keepdim=True)
            logits = logits.masked_fill(part & ~kept[1:], -torch.inf)
        all_logprobs = torch.log_softmax(logits, dim=-1)
        entropies = -(all_logprobs.exp() * all_logprobs.masked_fill(all_logprobs.isinf(), 0.0)).sum(
            dim=-1
        )
        logprobs = all_logprobs.gather(1, ids[1:, None])[:, 0]
        return torch.stack([logprobs, entropies])[
            :, torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
        ]


def _copy_adapters(weights: Mapping[str, Tensor]) -> Mapping[str, Factors]:
    """The trainer's initial adapters, copied as parameters."""
    if not isinstance(weights, LowRank) or not weights.factors:
        raise ConformanceError(
            f"with the setting lora, the weights are {type(weights).__name__} and no LowRank"
        )
    return {
        name: Factors(
            A.detach().clone().requires_grad_(), B.detach().clone().requires_grad_(), scale
        )
        for name, (A, B, scale) in weights.factors.items()
    }


def _at_loss(sample: TrainingSample, values_T: FloatArray) -> Tensor:
    return torch.from_numpy(values_T[sample.loss_mask])


async def _train(
    make_trainer: MakeTrainer,
    model: Path,
    case: TrainerCase,
    batches: Sequence[TrainBatch] | None = None,
) -> Mapping[str, Tensor]:
    async with make_trainer(model, case) as trainer:
        await _take_steps(trainer, random_batches(model, 3) if batches is None else batches)
        return _copy_weights(await trainer.weights())


async def _take_steps(trainer: Trainer, batches: Sequence[TrainBatch]) -> None:
    for batch in batches:
        await trainer.step(batch, LOSS, float(batch.num_loss_tokens))


def _copy_weights(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in weights.items()}


def _compare(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float, when: str
) -> None:
    """Check that all of `got` is in `want` and equal, and that weights missing in `got` are tied to
    others in it.
    """
    if not got or not got.keys() <= want.keys():
        raise ConformanceError(f"{when}: unknown weights {sorted(got.keys() - want.keys())[:5]}")
    present = {want[name].data_ptr() for name in got}
    missing = [name for name in want.keys() - got.keys() if want[name].data_ptr() not in present]
    if missing:
        raise ConformanceError(f"{when}: weights are missing: {sorted(missing)[:5]}")
    for name, weight in got.items():
        other = want[name].detach().cpu()
        if weight.dtype != torch.float32 or weight.shape != other.shape:
            raise ConformanceError(
                f"{when}: {name} is {weight.dtype} {tuple(weight.shape)}, want float32"
                f" {other.shape}"
            )
        gap = float((weight.detach().cpu() - other).abs().max())
        if not gap <= tolerance:
            raise ConformanceError(
                f"{when}: {name} is off by {gap:.3g}, the tolerance is {tolerance:.3g}"
            )
