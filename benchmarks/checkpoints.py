"""How long a checkpoint blocks training, as a share of the time that it takes to write.

    python benchmarks/checkpoints.py                       # one rank, 500 MB
    python benchmarks/checkpoints.py --ranks 2 --mb 1000

All figures are of one run: seconds of a step alone (the median of two before and two after), the
seconds in which a checkpoint is begun (nothing else goes on then), the seconds until it has its
name (copied, written, checked, on the disk), and the steps that were made meanwhile. A checkpoint
blocks for as long as it is begun, and for as long as the steps beside it take longer than alone:
the first of them also waits for the copies before its update. The second part says something on a
quiet machine only.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.runs.checkpoint import Checkpoints
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.group import GroupTrainer
from agentrl.trainers.local import LocalTrainer

BYTES = 12
"""Of a parameter in a checkpoint: its weight and two moments, in float32."""


def make_model(folder: Path, megabytes: float) -> None:
    """A model whose checkpoint has at least so many megabytes."""
    block = 2_360_000
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=int(megabytes * 1e6 / BYTES / block) + 1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def bytes_in(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def step(trainer: GroupTrainer, batch: Any) -> float:
    """Seconds of a step."""
    start = time.perf_counter()
    await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
    return time.perf_counter() - start


async def measured(
    trainer: GroupTrainer, batch: Any, checkpoints: Checkpoints, number: int
) -> dict[str, float]:
    """A checkpoint, with steps while it is written."""
    single = [await step(trainer, batch) for _ in range(2)]
    start = time.perf_counter()
    begun = await checkpoints.begin(number, trainer)
    started = time.perf_counter() - start
    beside: list[float] = []

    async def finished() -> float:
        await begun.finish()
        return time.perf_counter() - start

    async with asyncio.TaskGroup() as group:
        saving = group.create_task(finished())
        while not saving.done():
            beside.append(await step(trainer, batch))
    written = saving.result()
    single += [await step(trainer, batch) for _ in range(2)]
    alone = median(single)
    size = await asyncio.to_thread(bytes_in, begun.final)
    slower = max(0.0, sum(beside) - alone * len(beside))
    return {
        "MB": size / 1e6,
        "a step alone, s": alone,
        "steps meanwhile": len(beside),
        "write, s": written,
        "blocked: begin, s": started,
        "blocked: slower steps, s": slower,
        "blocked / write": (started + slower) / written,
    }


async def main(given: argparse.Namespace, folder: Path) -> None:
    """Print a row for each checkpoint."""
    make_model(folder / "model", given.mb)
    batch = random_batches(folder / "model", 1)[0]
    kind: Any = FsdpTrainer if given.ranks > 1 else LocalTrainer
    config = kind.Config(world_size=given.ranks) if given.ranks > 1 else kind.Config(device="cpu")
    rows, checkpoints = [], Checkpoints(folder / "checkpoints")
    async with kind(config, folder / "model", total_steps=100) as trainer:
        await step(trainer, batch)
        for number in range(given.repeat):
            rows.append(await measured(trainer, batch, checkpoints, number))
    table = Table(*rows[0], title=f"checkpoints of {kind.__name__} with {given.ranks} ranks")
    for row in rows:
        table.add_row(*(f"{value:.3g}" for value in row.values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=500, help="megabytes of a checkpoint")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        asyncio.run(main(arguments, Path(made)))
