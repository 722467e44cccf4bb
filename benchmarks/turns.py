"""The cost of a turn without the model as its context grows: an early and a late turn with equally
many new tokens.

    python benchmarks/turns.py [--new 650] [--sessions 64] [--turns 80]

"local" is `LocalEngine` with a model that computes nothing: microseconds from a request to its
answer, for the checks, copies and lookups of its prompt and for the event loop. "wire" is the way
to an engine in an actor: microseconds to pickle and unpickle the request, and its bytes. Each is
measured for requests that say how much of their prompt is known, as those of episodes do, and for
requests that do not. Figures are medians over the sessions, which take turns.
"""

import argparse
import asyncio
import pickle
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from agentrl.cluster.ray_prompts import HeldPrompts, SentPrompts
from agentrl.engines.local import LocalEngine
from agentrl.engines.packed_model import PackedModel, StepRow
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import GrowingInts, ints
from agentrl.trajectory import Completion

EARLY = 5
SAMPLING = SamplingParams(max_tokens=2)


class InstantModel:
    """Always samples the same token."""

    vocab_size = 150_000
    max_positions = 1 << 30

    def step(self, rows: Sequence[StepRow]) -> Iterator[tuple[int, float]]:
        return iter([(7, -0.5) for row in rows if row.sample])


class InstantEngine(LocalEngine):
    """The local engine, with nothing to compute."""

    def _load(self) -> PackedModel:
        return cast(PackedModel, InstantModel())


class Wire:
    """What `RayEngine` and its actor do with a request, but without Ray."""

    def __init__(self) -> None:
        self._here, self._there = SentPrompts(), HeldPrompts()
        self.bytes: list[int] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        cut = self._here.cut(request)
        sent = pickle.dumps(cut or request, protocol=5)
        self.bytes.append(len(sent))
        seen = pickle.loads(sent)
        whole = seen if cut is None else self._there.whole(seen)
        assert whole is not None
        completion = Completion([7, 7], [-0.5, -0.5], [0, 0], "length")
        self._there.answered(whole, completion, was_cut=cut is not None)
        self._here.answered(request, completion)
        return completion


async def play(engine: Any, sessions: int, turns: int, new: int, known: bool) -> list[float]:
    """The median microseconds of each turn."""
    contexts = [GrowingInts() for _ in range(sessions)]
    rng, medians = np.random.default_rng(0), []
    for turn in range(1, turns + 1):
        seconds = []
        for session, context in enumerate(contexts):
            seen = len(context)
            context.append(ints(rng.integers(0, 150_000, new)))
            request = GenerateRequest(
                f"{session}/{turn}",
                context.values,
                SAMPLING,
                0,
                0,
                str(session),
                seen if known else 0,
            )
            begun = time.perf_counter()
            completion = await engine.generate(request)
            seconds.append(time.perf_counter() - begun)
            context.append(completion.token_ids)
        medians.append(1e6 * statistics.median(seconds))
    return medians


async def benchmark(sessions: int, turns: int, new: int) -> None:
    """Print the table."""
    table = Table(
        "",
        f"turn {EARLY}, us",
        f"turn {turns}, us",
        "ratio",
        "bytes",
        title=f"{new} new tokens a turn, {sessions} sessions",
    )
    for known in (True, False):
        said = "known" if known else "not known"
        config = LocalEngine.Config(max_batch=2 * sessions, device="cpu")
        async with InstantEngine(config, Path()) as engine:
            medians = await play(engine, sessions, turns, new, known)
        early, late = medians[EARLY - 1], medians[-1]
        table.add_row(f"local, {said}", f"{early:.0f}", f"{late:.0f}", f"{late / early:.2f}", "")
        wire = Wire()
        medians = await play(wire, sessions, turns, new, known)
        early, late = medians[EARLY - 1], medians[-1]
        table.add_row(
            f"wire, {said}",
            f"{early:.0f}",
            f"{late:.0f}",
            f"{late / early:.2f}",
            f"{wire.bytes[-1]:,}",
        )
    Console().print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new", type=int, default=650)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=80)
    given = parser.parse_args()
    asyncio.run(benchmark(given.sessions, given.turns, given.new))


if __name__ == "__main__":
    main()
