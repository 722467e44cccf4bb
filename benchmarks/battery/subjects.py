"""What pieces try things on: random models of the shapes of published ones, random batches, and a
trainer's rank in this process.
"""

import gc
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algorithms.grpo import Grpo
from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.models.facts import PUBLISHED, ModelFacts, model_facts
from agentrl.placement.footprint import USABLE_SHARE, Footprint, trainer_footprint
from agentrl.placement.mesh import ONE_RANK
from agentrl.protocols import Loss
from agentrl.tokens.arrays import floats, ints, mask
from agentrl.trainers.batch_shards import BatchShard, gather, shard_batch
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.rank.worker import TrainerRank
from agentrl.trainers.settings import TrainerSettings
from agentrl.trainers.spec import TrainerSpec
from benchmarks.battery.piece import Findings, Place, SkipError

GIB = 2**30
LOSS: Loss = Grpo(Grpo.Config()).loss
SMALL, LARGE_FIRST = "Qwen/Qwen3-0.6B", ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-1.7B")
_TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""What stands for a model on a CPU."""


def shape_folder(place: Place, published: str, layers: int | None = None) -> Path:
    """A folder with a published config, cut to so many layers; on a CPU, that of a tiny model."""
    text = (PUBLISHED / published / "config.json").read_text()
    shape = {**(json.loads(text) if place.on_gpu else _TINY)}
    if layers is not None:
        shape["num_hidden_layers"] = min(layers, shape["num_hidden_layers"])
    folder = place.folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def random_model(place: Place, published: str, layers: int | None = None) -> Path:
    """A folder with such a model, of random weights; in bfloat16 on a GPU.

    Raises:
        SkipError: the disk has no room for it.
    """
    folder = shape_folder(place, published, layers)
    number = 2 if place.on_gpu else 4
    needs, room = number * model_facts(folder).parameters, shutil.disk_usage(folder).free
    if needs > 0.9 * room:
        raise SkipError(f"the model takes {needs / GIB:.1f} GiB of disk, {room / GIB:.1f} are free")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.random.fork_rng(), torch.device(place.device):
        torch.default_generator.manual_seed(0)
        if place.on_gpu:
            torch.cuda.manual_seed(0)
        kind = torch.bfloat16 if place.on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    model.save_pretrained(folder)
    del model
    free_memory(place)
    return folder


def remove_model(folder: Path) -> None:
    """Its weights are not kept beside the report."""
    shutil.rmtree(folder, ignore_errors=True)


def random_batch(vocabulary: int, samples: int, tokens: int, seed: int = 0) -> TrainBatch:
    """So many samples of about so many tokens, of which the second half carry loss, as a random
    model would have sampled them.
    """
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(samples):
        length = int(rng.integers(tokens // 2 + 1, tokens + 1))
        loss_T = np.arange(length) >= length // 2
        made.append(
            TrainingSample(
                token_ids=ints(rng.integers(0, vocabulary, length)),
                loss_mask=mask(loss_T),
                rollout_logprobs=floats(np.where(loss_T, -math.log(vocabulary), 0.0)),
                advantages=floats(np.where(loss_T, rng.normal(), 0.0)),
                policy_versions=ints(np.where(loss_T, 0, -1)),
                turn_ids=ints(np.zeros(length)),
            )
        )
    return collate(made)


@dataclass(frozen=True, slots=True)
class Rank:
    """A trainer on one device, in this thread."""

    worker: TrainerRank
    """The rank itself."""
    settings: TrainerSettings
    """Its settings, with what is chosen by the model."""

    @staticmethod
    def open(
        place: Place, model: Path, kind: type[GroupTrainer] = LocalTrainer, **settings: Any
    ) -> "Rank":
        """Load a model; `settings` are the trainer's."""
        facts = model_facts(model)
        if kind is LocalTrainer:
            settings = {"device": place.device, **settings}
        on_gpu = settings.get("device", place.device) == "cuda"
        config = kind.Config(**settings).chosen(
            parameters=facts.parameters, context=facts.max_positions, gpu=on_gpu
        )
        worker = TrainerRank(TrainerSpec(kind.sharding, config, model, 100, 1.0), 0)
        worker.open(ONE_RANK, worker.reserve(loopback=True))
        return Rank(worker, config)

    def close(self) -> None:
        """Free the model."""
        self.worker.close()

    def shard(self, batch: TrainBatch) -> BatchShard:
        """The rank's shard of a batch: all of it."""
        return shard_batch(batch, self.settings, parts=1)[0]

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Make a step."""
        count = batch.num_loss_tokens
        return self.worker.step(self.shard(batch), LOSS, float(count), count)

    def logprobs(self, batch: TrainBatch) -> np.ndarray[Any, Any]:
        """The logprobs of the loss tokens, in the order of the batch."""
        shard = self.shard(batch)
        return gather(batch, [shard], [self.worker.predict(shard)])

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights, on the CPU."""
        return {
            name: weight.detach().float().cpu().clone()
            for name, weight in self.worker.weights().items()
        }


@dataclass(frozen=True, slots=True)
class Steps:
    """Some steps, and what they took."""

    seconds: float
    """Of a step, the median."""
    tokens: int
    """Of a step."""
    losses: Sequence[float]
    """One a step."""
    peak: int
    """Most bytes of tensors on the GPU at once, with the weights; 0 on a CPU."""
    reserved: int
    """Most bytes that torch took for them; 0 on a CPU."""


def make_steps(place: Place, rank: Rank, batches: Sequence[TrainBatch]) -> Steps:
    """Make a step on each batch. The first one is for warming up: it counts in the peak only."""
    seconds, losses = [], []
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        synchronize(place)
        began = time.perf_counter()
        losses.append(rank.step(batch)["loss"])
        synchronize(place)
        seconds.append(time.perf_counter() - began)
    return Steps(
        seconds=float(np.median(seconds[1:] or seconds)),
        tokens=len(batches[-1].tokens_S),
        losses=losses,
        peak=torch.cuda.max_memory_allocated() if place.on_gpu else 0,
        reserved=torch.cuda.max_memory_reserved() if place.on_gpu else 0,
    )


def synchronize(place: Place) -> None:
    """Wait for the GPU."""
    if place.on_gpu:
        torch.cuda.synchronize()


def free_memory(place: Place) -> None:
    """Give the GPU's unused memory back."""
    gc.collect()  # hooks and modules refer to each other
    if place.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def product_flops(place: Place) -> float:
    """FLOP/s of a product of square matrices in the trainer's precision: the best of ten."""
    size, kind = (8192, torch.bfloat16) if place.on_gpu else (512, torch.float32)
    a, b = (torch.randn(size, size, device=place.device, dtype=kind) for _ in range(2))
    best = math.inf
    for _ in range(10):
        synchronize(place)
        began = time.perf_counter()
        torch.mm(a, b)
        synchronize(place)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def model_flops(facts: ModelFacts, batch: TrainBatch) -> float:
    """The products and the attention of a forward and a backward pass over a batch (three
    times the forward pass: Kaplan et al. 2020, arXiv:2001.08361, section 2.1), without what is
    computed again.
    """
    lengths_M = batch.lengths_M.astype(float)
    layers = 2 * facts.active * lengths_M.sum()
    attention = facts.attention * (lengths_M**2 / 2).sum()
    head = 2 * facts.embedding * batch.num_loss_tokens
    return float(3 * (layers + attention + head))


def largest_model(
    place: Place, kind: type[GroupTrainer], context: int, **settings: Any
) -> tuple[str, TrainerSettings]:
    """The largest published shape that the planner lets onto the GPUs of such a trainer, and its
    settings with what is chosen by the model.

    Raises:
        SkipError: none fits.
    """
    memory = torch.cuda.mem_get_info()[0]
    for name in (*LARGE_FIRST, SMALL):
        folder = shape_folder(place, name)
        facts = model_facts(folder)
        chosen = kind.Config(**settings).chosen(
            parameters=facts.parameters, context=facts.max_positions, gpu=True
        )
        if planned(folder, chosen, context).total <= USABLE_SHARE * memory:
            return name, chosen
    raise SkipError(f"no model fits into the {memory / GIB:.1f} GiB that are free on a GPU")


def planned(model: Path, settings: TrainerSettings, longest: int) -> Footprint:
    """What the planner says that a rank takes."""
    layout = settings.layout()
    return trainer_footprint(model_facts(model), layout, layout.mesh.world_size, longest=longest)


def note_plan(findings: Findings, steps: Steps, plan: Footprint) -> None:
    """Note the plan beside what was measured; the piece fails if the plan is too small."""
    for part, size in plan.parts.items():
        findings.note(f"planned: {part}", size / GIB, "GiB")
    findings.note("planned in all", plan.total / GIB, "GiB")
    findings.note("measured peak of tensors", steps.peak / GIB, "GiB")
    findings.note("measured peak of what torch took", steps.reserved / GIB, "GiB")
    findings.check(
        steps.peak <= 1.05 * plan.total,
        f"the planner counts {plan.total / GIB:.2f} GiB, and tensors took {steps.peak / GIB:.2f}",
    )


def distance(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference of tensors by name, as a share of the norm of the others."""
    apart = sum(float((some[name] - others[name]).double().square().sum()) for name in others)
    whole = sum(float(tensor.double().square().sum()) for tensor in others.values())
    return math.sqrt(apart / max(whole, 1e-300))
