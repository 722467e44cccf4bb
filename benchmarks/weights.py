"""Updates of weights from the ranks of a trainer to several engines, by each transport in turns.

    python benchmarks/weights.py [--engine local|vllm] [--mib 200] [--updates 5] [--ranks 2]
    [--engines 2] [--transports files,stream,handles] [--bucket-mib 64] [--json FILE]

Every weight of a random model of about `--mib` MiB in bfloat16 changes before each update; the
ranks are processes with FSDP. Meanwhile each engine is asked for one token after another. After an
update all engines must answer alike, and engines in this process must have the weights that are in
the files.

    seconds             added to a step, all in all, and by phase
    times a copy        the same, divided by the seconds of a plain copy of the same bytes in memory
    files               seconds until the files of a live version are there, beside the next step
    served nothing      the longest time that an engine took for a token
    a reader            bytes that each reader got, for each parameter
    loopback            bytes over the machine's loopback interface, for each parameter: gathered
                        by the ranks, and sent to all readers. Run it by `unshare -n sh -c "ip link
                        set lo up; ..."` to count no other program's
    a rank holds        the most bytes of main memory that a rank took beyond what it had before
    limit               two buckets, the largest weight, and a rank's part of it; live transports
                        also hold a rank's part of the files until they are written

Figures are medians, and `a rank holds` is the largest.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.flow import Flow
from agentrl.protocols import Engine, GenerateRequest
from agentrl.protocols.weight_source import SendWeights, T, WeightSource
from agentrl.settings.sampling import SamplingParams
from agentrl.trainers.fsdp import FsdpTrainer
from agentrl.trainers.rank.weights import RankWeights
from agentrl.weights.bundle import WeightBundle, weight_shapes
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import Published, WeightPublisher, checksum

LARGE_MIB = 500
ROUNDING = 0.1
"""Nats by which logprobs of the likeliest token may differ."""
TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def make_model(folder: Path, mib: int) -> int:
    """Write a random model in bfloat16, and return the number of its parameters."""
    size = 2048 if mib >= LARGE_MIB else 512
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=size,
        intermediate_size=4 * size,
        num_attention_heads=size // 64,
        num_key_value_heads=size // 128,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    a_layer = 3 * size * size + 12 * size * size
    config.num_hidden_layers = max(1, round(mib * 2**20 / (2 * a_layer)))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    with torch.device("cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def change(source: WeightSource) -> None:
    """`SendWeights` that changes a rank's part of all weights, as a step would."""
    assert isinstance(source, RankWeights)
    with torch.no_grad():
        for parameter in source._sharding.trainable.model.parameters():
            parameter.to_local().mul_(1.01)


@dataclass(frozen=True)
class Watched:
    """`SendWeights` that appends the bytes of main memory that a rank took at most, besides what it
    had, to a file of `folder`. Linux counts them.
    """

    send: Any
    folder: Path

    def __call__(self, source: WeightSource) -> Any:
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        answer = self.send(source)
        with (self.folder / f"rank-{source.rank}").open("a") as file:
            file.write(f"{_memory('VmHWM') - before}\n")
        return answer


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


class WatchedTrainer(FsdpTrainer):
    """A trainer whose ranks say what they hold while they send."""

    folder: Path

    async def send_weights(self, send: SendWeights[T]) -> Any:
        return await super().send_weights(Watched(send, self.folder))

    def most_held(self) -> int:
        """The most that a rank held since the last call."""
        files = list(self.folder.glob("rank-*"))
        held = [int(line) for file in files for line in file.read_text().split()]
        for file in files:
            file.unlink()
        return max(held)


@asynccontextmanager
async def asking(engines: list[Engine]) -> AsyncIterator[list[float]]:
    """Ask each engine for one token after another, and give the seconds that each took."""
    seconds: list[float] = []
    is_over = asyncio.Event()

    async def ask(engine: Engine, name: int) -> None:
        number = 0
        while not is_over.is_set():
            start = time.perf_counter()
            number += 1
            await engine.generate(GenerateRequest(f"probe {name} {number}", (5, 6), TOKEN))
            seconds.append(time.perf_counter() - start)
            await asyncio.sleep(0.01)

    async with Flow("asking") as flow:
        for name, engine in enumerate(engines):
            flow.start(ask(engine, name), name=str(name))
        try:
            yield seconds
        finally:
            is_over.set()


def loopback() -> int:
    """Bytes that have been sent over the loopback interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def plain_copy(size: int) -> float:
    """Seconds to copy so many bytes within memory."""
    source, copy = (torch.ones(size, dtype=torch.uint8) for _ in "ab")
    start = time.perf_counter()
    copy.copy_(source)
    return time.perf_counter() - start


async def check_equal(engines: list[Engine], published: Published) -> None:
    """Engines in this process have the weights in the files; others answer alike. (In bfloat16,
    equal weights may answer differently: requests that are computed together round differently.)
    """
    at_rest = await published.weights.at_rest()
    assert isinstance(at_rest, WeightBundle)
    found = {checksum(WeightBundle.open(at_rest.folder))}
    for engine in engines:
        if isinstance(engine, LocalEngine):
            found.add(checksum({name: engine.weights[name] for name in at_rest}))
    asked = GenerateRequest(f"after {published.version}", (5, 6, 7), TOKEN)
    answers = [await engine.generate(asked) for engine in engines]
    logprobs = [float(answer.logprobs[0]) for answer in answers]
    if len(found) > 1 or max(logprobs) - min(logprobs) > ROUNDING:
        raise SystemExit(f"version {published.version}: the engines differ: {found}, {logprobs}")


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of each update, by transport."""
    parameters = make_model(folder / "model", options.mib)
    size, names = 2 * parameters, options.transports.split(",")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    settings: dict[str, Any] = {"max_batch": 2, "max_context": 64, "dtype": "bfloat16"}
    async with AsyncExitStack() as stack:
        made = WatchedTrainer.Config(world_size=options.ranks)
        trainer = WatchedTrainer(made, folder / "model", total_steps=1)
        trainer.folder = folder
        await stack.enter_async_context(trainer)
        engines: list[Engine] = []
        for _ in range(options.engines):
            engine: Engine = (
                LocalEngine(LocalEngine.Config(**settings), folder / "model")
                if options.engine == "local"
                else VllmEngine(VllmEngine.Config(**settings, kv_cache_gib=0.1), folder / "model")
            )
            engines.append(await stack.enter_async_context(engine))
        publishers = {}
        for name in names:
            config = WeightsConfig(
                transport=name, dtype="bfloat16", bucket_mib=options.bucket_mib, host="127.0.0.1"
            )
            others = tuple((engine, 1) for engine in engines[1:])
            publishers[name] = await stack.enter_async_context(
                WeightPublisher(engines[0], others, config)
            )
        version = 0
        for number in range(options.updates + 1):  # the first is a warm-up
            for name, publisher in publishers.items():
                version += 1
                await trainer.send_weights(change)
                trainer.most_held()
                copied = plain_copy(size)
                async with asking(engines) as answers:
                    sent, start = loopback(), time.perf_counter()
                    published = await publisher.publish(trainer, version)
                    seconds, sent = time.perf_counter() - start, loopback() - sent
                    await published.weights.at_rest()
                    late = time.perf_counter() - start - seconds
                await check_equal(engines, published)
                if number:
                    rows[name].append(
                        {
                            "seconds": seconds,
                            "times a copy": seconds / copied,
                            **published.seconds,
                            "files": late,
                            "served nothing": max(answers),
                            "a reader": published.weights.size / parameters,
                            "loopback": sent / parameters,
                            "a rank holds": trainer.most_held(),
                        }
                    )
    largest = _largest_weight(folder / "model")
    return {
        "engine": options.engine,
        "engines": options.engines,
        "ranks": options.ranks,
        "parameters": parameters,
        "bytes": size,
        "bucket": options.bucket_mib << 20,
        "limit": 2 * (options.bucket_mib << 20) + largest + largest // options.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "updates": rows,
    }


def _largest_weight(folder: Path) -> int:
    return max(2 * torch.Size(shape).numel() for shape in weight_shapes(folder).values())


def summary(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """A row for each transport: medians, and of what a rank holds the largest."""
    return {
        name: {
            figure: max(row[figure] for row in rows)
            if figure == "a rank holds"
            else statistics.median(row[figure] for row in rows)
            for figure in rows[0]
        }
        for name, rows in found["updates"].items()
    }


def print_table(found: Mapping[str, Any]) -> None:
    mib = found["bytes"] / 2**20
    table = Table(
        title=f"{mib:,.0f} MiB in bfloat16, {found['ranks']} ranks, {found['engines']} engines"
        f" ({found['engine']}), {found['cores']} cores, load {found['load']:.0f}"
    )
    rows = summary(found)
    table.add_column("transport")
    for figure in next(iter(rows.values())):
        table.add_column(figure, justify="right")
    table.add_column("limit", justify="right")
    for name, row in rows.items():
        cells = [
            f"{value / 2**20:,.0f} MiB" if figure == "a rank holds" else f"{value:.2f}"
            for figure, value in row.items()
        ]
        table.add_row(name, *cells, f"{found['limit'] / 2**20:,.0f} MiB")
    Console(width=160).print(table)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--engine", choices=["local", "vllm"], default="local")
    arguments.add_argument("--mib", type=int, default=200)
    arguments.add_argument("--updates", type=int, default=5)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--engines", type=int, default=2)
    arguments.add_argument("--transports", default="files,stream,handles")
    arguments.add_argument("--bucket-mib", type=int, default=64)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    if options.json:
        options.json.write_text(json.dumps({**found, "summary": summary(found)}, indent=1))
    print_table(found)


if __name__ == "__main__":
    main()
