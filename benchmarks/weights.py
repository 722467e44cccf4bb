"""Seconds per GiB of new weights, from a trainer to two engines, compared with a plain copy of the
same bytes.

    python benchmarks/weights.py [--engine local|vllm] [--mib 200] [--updates 20] [--transport
    shared_memory|disk|stream|handles]

Every weight of a random model of about `--mib` MiB changes, and the model is published. After each
update the checksums must be equal everywhere: those of the trainer's weights, of the published
files, which each engine has checked, and, for engines in this process, of the weights that they
sample from. The two engines must also give the same answer. The plain copy goes into memory that is
already allocated, and is repeated for each update. Figures are medians.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engines.local import LocalEngine
from agentrl.engines.vllm import VllmEngine
from agentrl.protocols import Engine, GenerateRequest, Trainer
from agentrl.settings.sampling import SamplingParams
from agentrl.weights.bundle import WeightBundle
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import WeightPublisher, checksum

GIB = 2**30


class Source(Trainer):
    """The part of a trainer that publishing needs: changing weights. Tied ones have one name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {name: p.detach() for name, p in model.named_parameters()}

    def step(self) -> None:
        for weight in self._weights.values():
            weight.mul_(1.001)

    async def weights(self) -> Mapping[str, Tensor]:
        return self._weights


def make_model(folder: Path, mib: int) -> torch.nn.Module:
    hidden, mlp = 512, 2048
    of_a_layer = 4 * (3 * hidden * hidden + 3 * hidden * mlp)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=max(1, round(mib * 2**20 / of_a_layer)),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    made: torch.nn.Module = model
    return made


async def assert_equal_everywhere(
    engines: list[Engine], source: Source, bundle: WeightBundle, number: int
) -> None:
    """Compare the checksums, and an answer of each engine."""
    sums = {checksum(await source.weights()), checksum(WeightBundle.open(bundle.folder))}
    for engine in engines:
        if isinstance(engine, LocalEngine):
            sums.add(checksum({name: engine.weights[name] for name in bundle}))
    request = GenerateRequest(
        f"after update {number}", (5, 6, 7), SamplingParams(max_tokens=4, temperature=0.0)
    )
    first, *others = [await engine.generate(request) for engine in engines]
    if len(sums) != 1 or any(answer != first for answer in others):
        raise SystemExit(
            f"update {number}: the engines differ: checksums {sums}, answers {[first, *others]}"
        )


async def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Seconds per GiB of each update, by phase, and of the copy beside it."""
    source = Source(make_model(folder, options.mib))
    weights = await source.weights()
    size = sum(weight.nbytes for weight in weights.values())
    copies = [weight.clone() for weight in weights.values()]
    settings: dict[str, Any] = {"max_batch": 2, "max_context": 64}
    seconds = []
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        for _ in range(2):
            engine: Engine = (
                LocalEngine(LocalEngine.Config(**settings), folder)
                if options.engine == "local"
                else VllmEngine(VllmEngine.Config(**settings, kv_cache_gib=0.1), folder)
            )
            engines.append(await stack.enter_async_context(engine))
        config = WeightsConfig(transport=options.transport)
        publisher = WeightPublisher(engines[0], ((engines[1], 1),), config)
        await stack.enter_async_context(publisher)
        for number in range(1, options.updates + 2):  # the first is a warm-up
            source.step()
            start = time.perf_counter()
            for copy, weight in zip(copies, weights.values(), strict=True):
                copy.copy_(weight)
            copied = time.perf_counter()
            published = await publisher.publish(source, number)  # type: ignore[arg-type]
            done = time.perf_counter()
            phases = {
                "plain copy": copied - start,
                "publish, all in all": done - copied,
                **published.seconds,
            }
            seconds.append({phase: spent / (size / GIB) for phase, spent in phases.items()})
            written = await published.weights.at_rest()
            assert isinstance(written, WeightBundle)
            await assert_equal_everywhere(engines, source, written, number)
    print(
        f"{size / 2**20:.0f} MiB, {options.updates} updates, two engines: all checksums and answers"
        " were equal"
    )
    return seconds[1:]


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--engine", choices=["local", "vllm"], default="local")
    arguments.add_argument("--mib", type=int, default=200)
    arguments.add_argument("--updates", type=int, default=20)
    arguments.add_argument(
        "--transport",
        choices=["shared_memory", "disk", "stream", "handles"],
        default="shared_memory",
    )
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(measure(options, Path(folder) / "model"))
    table = Table(
        "phase",
        "s/GiB",
        "times a copy",
        title=f"engine={options.engine}, through {options.transport}",
    )
    for phase in seconds[0]:
        spent = statistics.median(each[phase] for each in seconds)
        ratio = statistics.median(each[phase] / each["plain copy"] for each in seconds)
        table.add_row(phase, f"{spent:.2f}", f"{ratio:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
