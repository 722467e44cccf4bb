"""Peak memory of a training step by the length of a sample, and by the number of its loss tokens,
with a picture.

    python benchmarks/trainer_memory.py [--device cpu|cuda] [--vocab 151936 4096] [--lengths 2048
    ...] [--picture FILE]

A forward and a backward pass of a random model on one sample, with recomputed activations, beyond
what the process had before, as torch's allocator counts it. In the first table every 16th token
carries loss; in the second the length is fixed (`--length`). `linear` is the peak that the first
one would grow to if memory were proportional to the tokens. The picture has a line for each
vocabulary.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from agentrl.placement.mesh import ONE_RANK

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.batch import TrainingSample, collate
from agentrl.trainers.compute.forward import to_device
from agentrl.trainers.local import LocalTrainer
from agentrl.trainers.packing import MicroBatch
from agentrl.trainers.rank.model import Predictor
from agentrl.trainers.rank.one_device import open_sharding
from agentrl.trainers.spec import RankInfo, TrainerSpec

MIB = 1 << 20


def make_model(folder: Path, vocabulary: int) -> None:
    """A model of two layers."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def sample(length: int, loss_tokens: int) -> MicroBatch:
    """One sample of random tokens, of which so many carry loss, evenly spread."""
    rng, loss = np.random.default_rng(length), np.zeros(length, bool)
    loss[np.linspace(1, length - 1, loss_tokens).astype(int)] = True
    zeros = np.zeros(length)
    made = TrainingSample(
        rng.integers(0, 1000, length), loss, zeros, zeros, np.where(loss, 0, -1), zeros
    )
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


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of a model with one vocabulary, in bytes, by the tokens and by the loss tokens of a
    sample.
    """

    vocabulary: int
    by_length: Mapping[int, int]
    by_loss: Mapping[int, int]


def peaks_of(vocabulary: int, given: argparse.Namespace) -> Peaks:
    """Measure a model with this vocabulary."""
    device, length = torch.device(given.device), given.length
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocabulary)
        config = LocalTrainer.Config(device=given.device, activation_checkpointing="full")
        model = open_sharding(
            TrainerSpec("", config, Path(folder), 1, 1.0), RankInfo(0, ONE_RANK, "")
        ).model
    measured(model, device, 256, 16)  # makes the gradients
    return Peaks(
        vocabulary,
        {tokens: measured(model, device, tokens, tokens // 16) for tokens in given.lengths},
        {
            count: measured(model, device, length, count)
            for count in (length // n for n in (256, 64, 16, 4, 2))
        },
    )


def tables(found: Peaks, length: int) -> Iterator[Table]:
    """The two tables of a vocabulary."""
    (first, least), *_ = found.by_length.items()
    by_length = Table(
        "tokens", "peak, MiB", "linear, MiB", title=f"by length; vocabulary of {found.vocabulary:,}"
    )
    for tokens, peak in found.by_length.items():
        by_length.add_row(
            f"{tokens:,}", f"{peak / MIB:,.0f}", f"{least / MIB * tokens / first:,.0f}"
        )
    yield by_length
    by_loss = Table("loss tokens", "peak, MiB", title=f"by loss tokens, of {length:,}")
    for count, peak in found.by_loss.items():
        by_loss.add_row(f"{count:,}", f"{peak / MIB:,.0f}")
    yield by_loss


def picture(path: Path, all_found: Sequence[Peaks], length: int) -> None:
    """Two curves of each vocabulary: peaks by tokens, and by loss tokens."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for found, marker in zip(all_found, "osv^D", strict=False):
        label = f"vocabulary of {found.vocabulary:,}"
        for axis, peaks in ((left, found.by_length), (right, found.by_loss)):
            axis.plot(
                list(peaks), [peak / MIB for peak in peaks.values()], f"{marker}-", label=label
            )
    left.set(
        xlabel="tokens of a sample, 1 in 16 with loss",
        ylabel="peak of a step, MiB",
        title="at most linear in the tokens",
    )
    left.set_xticks([0, *(tokens for tokens in all_found[0].by_length if tokens >= length)])
    right.set(
        xlabel=f"loss tokens of a sample of {length:,}",
        title="flat in the loss tokens beyond a piece of logits",
        xscale="log",
    )
    right.set_xticks(list(all_found[0].by_loss), minor=False)
    right.minorticks_off()
    for axis in (left, right):
        axis.xaxis.set_major_formatter(FuncFormatter(_short))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda mib, _: f"{mib:,.0f}"))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    left.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)


def _short(count: float, _: object) -> str:
    return f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"


def main() -> None:
    """Print the tables, and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vocab", type=int, nargs="+", default=[151_936, 4096])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768, 65536]
    )
    parser.add_argument(
        "--length", type=int, default=8192, help="tokens of the second table's sample"
    )
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    console, all_found = Console(), []
    for vocabulary in given.vocab:
        all_found.append(peaks_of(vocabulary, given))
        console.print(*tables(all_found[-1], given.length))
        if given.picture:
            picture(given.picture, all_found, given.length)


if __name__ == "__main__":
    main()
