"""Seconds per training step, tokens per second and model FLOP utilisation of each trainer, in one
run.

    python benchmarks/trainer.py [--device cpu|cuda] [--ranks 2] [--dtype float32|bfloat16]
                                 [--layers 8] [--hidden 256]
    python benchmarks/trainer.py --peers     (beside TRL and a plain loop: trainer_peers.py)

Each trainer makes the same steps on the same batches, with a random model of the given sizes. A
step is one pass with one update. The model's work is 6 N FLOPs for each token that is not padding
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1), where N is the number of parameters of the
layers and the output head; attention and recomputation do not count. Utilisation is the share of a
peak: `--peak` in FLOP/s for each rank, or else the speed of a large matrix product on the same
device with as many threads as a rank has. Figures are medians.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in the ranks

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.batch import TrainBatch, collate
from agentrl.testing.trainers import LOSS, random_samples
from agentrl.trainers.deepspeed import DeepSpeedTrainer
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer

VOCAB = 4096
WARM_UP = 2


def trainers(given: argparse.Namespace) -> dict[str, tuple[type[GroupTrainer], dict[str, Any]]]:
    ranks = {"world_size": given.ranks}
    return {
        "local": (LocalTrainer, {"device": given.device}),
        "local, adapters of rank 16": (LocalTrainer, {"device": given.device, "lora": {}}),
        "fsdp": (FsdpTrainer, ranks),
        "fsdp, weights kept": (FsdpTrainer, {**ranks, "reshard_after_forward": False}),
        **{
            f"deepspeed, ZeRO {stage}": (DeepSpeedTrainer, {**ranks, "zero_stage": stage})
            for stage in (1, 2, 3)
        },
    }


def make_model(folder: Path, given: argparse.Namespace) -> int:
    """Make the model; returns N."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64,
        num_key_value_heads=max(1, given.hidden // 128),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return int(sum(p.numel() for p in model.parameters()))  # the head is the embedding


def peak_of(device: str, dtype: str) -> float:
    """FLOP/s of a product of square matrices: the best of ten."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        product = a @ b
        float(product[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


async def measure(
    kind: type[GroupTrainer], settings: Mapping[str, Any], model: Path, batches: list[TrainBatch]
) -> tuple[float, list[Mapping[str, float]], list[float]]:
    """Seconds to start, and the metrics and seconds of each step after the warm-up."""
    config = kind.Config(lr=1e-5, **settings)
    begin = time.perf_counter()
    metrics, seconds = [], []
    async with kind(config, model, total_steps=len(batches)) as trainer:
        started = time.perf_counter() - begin
        for batch in batches:
            begin = time.perf_counter()
            metrics.append(await trainer.step(batch, LOSS, float(batch.num_loss_tokens)))
            seconds.append(time.perf_counter() - begin)
    return started, metrics[WARM_UP:], seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak", type=float, help="FLOP/s of a device; by default measured")
    parser.add_argument("--only", nargs="*", help="names of trainers; by default all")
    parser.add_argument(
        "--peers", action="store_true", help="compare a step with TRL's and with a plain loop's"
    )
    given = parser.parse_args()
    if given.peers:
        import trainer_peers

        trainer_peers.compare(max(2, given.steps))
        return
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    peak = given.peak or peak_of(given.device, given.dtype)
    batches = [
        collate(random_samples(VOCAB, seed=seed, count=given.samples))
        for seed in range(WARM_UP + given.steps)
    ]
    table = Table(
        title=f"{given.device}, {given.dtype}, a peak of {peak / 1e9:,.0f} GFLOP/s for each rank"
    )
    for column in (
        "trainer",
        "ranks",
        "start, s",
        "step, s",
        "tokens/s",
        "utilisation",
        "loss of the last step",
    ):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder), given)
        for name, (kind, own) in trainers(given).items():
            if given.only and name not in given.only:
                continue
            settings = {**own, "dtype": given.dtype, "micro_batch_tokens": given.micro_batch_tokens}
            measured = measure(kind, settings, Path(folder), batches)
            started, metrics, seconds = asyncio.run(measured)
            ranks = own.get("world_size", 1)
            rate = statistics.median(m["tokens"] / s for m, s in zip(metrics, seconds, strict=True))
            used = 6 * parameters * rate / (peak * ranks)
            step = statistics.median(seconds)
            figures = (
                f"{started:.1f}",
                f"{step:.3f}",
                f"{rate:,.0f}",
                f"{used:.1%}",
                f"{metrics[-1]['loss']:.6f}",
            )
            table.add_row(name, str(ranks), *figures)
    console = Console()
    console.print(table)
    console.print(f"{parameters / 1e6:.1f} million parameters; {given.samples} samples in a batch")


if __name__ == "__main__":
    main()
