"""Tokens per second of `LocalEngine` against transformers' own `generate`, on the same model, in
the same run.

    python benchmarks/engines.py [--batches 16 64 128] [--prompt 64] [--new 64]

Both sample at temperature 1 without stop tokens. The episodes row plays several turns, each prompt
extending the last, as a rollout does; `generate` computes every prompt again from its start. The
figures of a busy machine mean little, so look at the ratio: it is of medians over interleaved
rounds.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from agentrl.engines.local import LocalEngine
from agentrl.models.tiny import create_tiny_model
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import GrowingInts, ints


@dataclass(frozen=True)
class Work:
    """`batch` episodes of `turns` turns: `prompt` new tokens, then `new` sampled ones."""

    batch: int
    turns: int
    prompt: int
    new: int

    @property
    def sampled(self) -> int:
        return self.batch * self.turns * self.new

    def prompt_of(self, episode: int, turn: int) -> tuple[int, ...]:
        return tuple(10 + (episode * 31 + turn * 17 + i * 7) % 300 for i in range(self.prompt))


async def run_engine(engine: LocalEngine, work: Work) -> None:
    async def episode(number: int) -> None:
        history = GrowingInts()
        for turn in range(work.turns):
            history.append(ints(work.prompt_of(number, turn)))
            sampling = SamplingParams(max_tokens=work.new)
            request = GenerateRequest(f"{number}.{turn}", history.values, sampling, seed=number)
            history.append((await engine.generate(request)).token_ids)

    async with asyncio.TaskGroup() as tasks:
        for number in range(work.batch):
            tasks.create_task(episode(number))


def run_transformers(model: Any, work: Work) -> None:
    tokens = torch.empty(work.batch, 0, dtype=torch.long)
    for turn in range(work.turns):
        new = torch.tensor([work.prompt_of(number, turn) for number in range(work.batch)])
        tokens = torch.cat([tokens, new], dim=1)
        tokens = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            min_new_tokens=work.new,
            max_new_tokens=work.new,
        )


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--batches", type=int, nargs="+", default=[16, 64, 128])
    arguments.add_argument("--prompt", type=int, default=64)
    arguments.add_argument("--new", type=int, default=64)
    arguments.add_argument("--turns", type=int, default=6)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = arguments.parse_args()
    largest = max(options.batches)
    works = {
        f"decode, batch {batch}": Work(batch, 1, options.prompt, options.new)
        for batch in options.batches
    }
    works[f"prefill, batch {largest}"] = Work(largest, 1, 6 * options.prompt, 1)
    works[f"episodes, batch {largest}"] = Work(largest, options.turns, options.prompt // 2, 8)

    table = Table(
        "work",
        "engine tokens/s",
        "generate tokens/s",
        "ratio",
        title=f"{options.dtype}, sampled (prefill: prompt) tokens",
    )
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model_dir = Path(folder) / "model"
        create_tiny_model(model_dir)
        plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, options.dtype))
        engine = LocalEngine(
            LocalEngine.Config(max_batch=largest, dtype=options.dtype, prefix_cache=True), model_dir
        )
        runner.run(engine.__aenter__())
        for name, work in works.items():
            ours, theirs = [], []
            for _ in range(options.rounds + 1):  # the first is a warm-up
                # A new weight version, so that the cache of the round before does not help this
                # one.
                runner.run(engine.update_weights(plain.state_dict(), engine.policy_version + 1))
                ours.append(seconds(lambda work=work: runner.run(run_engine(engine, work))))  # type: ignore[misc]
                theirs.append(seconds(lambda work=work: run_transformers(plain, work)))  # type: ignore[misc]
            tokens = work.batch * work.prompt if name.startswith("prefill") else work.sampled
            fast, slow = (tokens / statistics.median(times[1:]) for times in (ours, theirs))
            table.add_row(name, f"{fast:,.0f}", f"{slow:,.0f}", f"{fast / slow:.1f}")
        runner.run(engine.__aexit__(None, None, None))
    Console().print(table)


if __name__ == "__main__":
    main()
