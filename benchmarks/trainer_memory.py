"""Peak memory of a training step by the length of a sample, and by the number of its loss tokens, with a picture.

    python benchmarks/trainer_memory.py [--device cpu|cuda] [--vocab 151936] [--lengths 2048 4096 ...] [--picture FILE]

A forward and a backward pass of a random model on one sample, with recomputed activations, beyond what the process had
before, as torch's allocator counts it. In the first table every 16th token carries loss; in the second the length is
fixed (`--length`). `linear` is the peak that the first one would grow to if memory were proportional to the tokens.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.batch import TrainingSample, collate
from agentrl.trainers.forward import to_device
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.model import Predictor
from agentrl.trainers.one_device import open_sharding
from agentrl.trainers.packing import MicroBatch
from agentrl.trainers.spec import RankInfo, TrainerSpec

MIB = 1 << 20


def make_model(folder: Path, vocabulary: int) -> None:
    """A model of two layers."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def sample(length: int, loss_tokens: int) -> MicroBatch:
    """One sample of random tokens, of which so many carry loss, evenly spread."""
    rng, loss = np.random.default_rng(length), np.zeros(length, bool)
    loss[np.linspace(1, length - 1, loss_tokens).astype(int)] = True
    zeros = np.zeros(length)
    made = TrainingSample(rng.integers(0, 1000, length), loss, zeros, zeros, np.where(loss, 0, -1), zeros)
    return MicroBatch(collate([made]), np.zeros(1, np.int32))


def peak_of(step: Callable[[], None], device: torch.device) -> int:
    """Most bytes that the tensors of a step take beyond those before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    events = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def measured(model: Predictor, device: torch.device, length: int, loss_tokens: int) -> int:
    """The peak of a step, with gradients that are there already, as in all steps but the first."""
    rows = to_device(sample(length, loss_tokens), device)

    def step() -> None:
        model(rows).sum().backward()

    return peak_of(step, device)


def picture(path: Path, by_length: Mapping[int, int], by_loss: Mapping[int, int], length: int) -> None:
    """Two curves on logarithmic axes: peaks by tokens, and by loss tokens."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    peaks = [peak / MIB for peak in by_length.values()]
    for axis, found, name in (
        (axes[0], by_length, "tokens of a sample, 1 in 16 with loss"),
        (axes[1], by_loss, f"loss tokens of a sample of {length:,}"),
    ):
        axis.loglog(list(found), [peak / MIB for peak in found.values()], "o-", base=2)
        axis.set(xlabel=name, ylabel="peak, MiB", ylim=(min(peaks) / 4, 2 * max(peaks)))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--length", type=int, default=16384, help="tokens of the second table's sample")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), given.vocab)
        config = LocalTrainer.Config(device=given.device, activation_checkpointing="full")
        model = open_sharding(TrainerSpec("", config, Path(folder), 1, 1.0), RankInfo(0, 1, "")).model
    measured(model, device, 256, 16)  # makes the gradients
    length = given.length
    peaks = {tokens: measured(model, device, tokens, tokens // 16) for tokens in given.lengths}
    flat = {count: measured(model, device, length, count) for count in (length // n for n in (256, 64, 16, 4, 2))}
    first, least = next(iter(peaks.items()))
    by_length = Table("tokens", "peak, MiB", "linear, MiB", title="by length")
    for tokens, peak in peaks.items():
        by_length.add_row(f"{tokens:,}", f"{peak / MIB:,.0f}", f"{least / MIB * tokens / first:,.0f}")
    by_loss = Table("loss tokens", "peak, MiB", title=f"by loss tokens, of {length:,}")
    for count, peak in flat.items():
        by_loss.add_row(f"{count:,}", f"{peak / MIB:,.0f}")
    console = Console()
    console.print(by_length, by_loss)
    if given.picture:
        picture(given.picture, peaks, flat, length)


if __name__ == "__main__":
    main()
