"""The CPU time of the rollout code itself, without engine and environments, on a real clock.

    python benchmarks/overhead.py [--repeats 3] [--live 16 256 1000 10000] [--gateway]

*In process*: an instant engine and an instant environment, with the real scheduler, renderer and
ledger (on disk), for several numbers of live episodes. *Over HTTP*: 256 trajectories of 8 turns
against a server in another process, which answers with token ids and logprobs, 32 requests at a
time in order of arrival; for comparison, a bare client that does the same turns with only aiohttp.
In the zero model answers are instant. In the scaled model an answer takes (50 ms + 20 ms for each
token) / 100, with tokens lognormal(median 140, sigma 0.6) in [70, 500], and the environment
lognormal(median 0.5 s, sigma 1.5, at most 30 s) / 100. Efficiency is the lower bound of the
makespan / the makespan: no schedule of these times is shorter than its longest trajectory, nor than
the sum of all answers / 32.

*Programs* (`--gateway` alone; also at the end of the others): see `gateway_turns.py`.

CPU time is of all threads of this process. Figures are medians; wall-clock times mean little on a
shared machine.
"""

import argparse
import asyncio
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import gateway_turns
from rich.console import Console
from rich.table import Table

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.engines.openai import OpenAIEngine
from agentrl.flow import freeze_gc, run_steadily
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.models.tiny import create_tiny_model
from agentrl.plugins import NoSettings
from agentrl.protocols import Engine, EngineStats, GenerateRequest
from agentrl.rewards.environment import EnvironmentReward
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.testing.openai_server import MODEL, serve_engine
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion

TURNS = 8
GROUP = 8
TRAJECTORIES = 256
SLOTS = 32
MAX_CONTEXT = 8192
_EVER_NEW = count(10**6)


def answer_of(seed: int) -> tuple[int, ...]:
    """The answer to a request with this seed: words of the tiny tokenizer, without a stop token."""
    random = Random(seed)
    return tuple(
        random.choices(
            range(300, 400), k=int(min(max(random.lognormvariate(math.log(140), 0.6), 70), 500))
        )
    )


def answer_seconds(tokens: int) -> float:
    """The service time of an answer in the scaled model."""
    return (0.050 + 0.020 * tokens) / 100


def env_seconds(random: Random) -> float:
    """The time of an environment's step in the scaled model."""
    return min(random.lognormvariate(math.log(0.5), 1.5), 30) / 100


class MockEngine:
    """Answers after `seconds(length of the answer)`, `slots` requests at a time in order of
    arrival.
    """

    policy_version = 0
    max_context = MAX_CONTEXT

    def __init__(
        self, slots: int, answer: Callable[[int], tuple[int, ...]], seconds: Callable[[int], float]
    ) -> None:
        self._places = asyncio.Semaphore(slots)
        self._answer = answer
        self._seconds = seconds
        self._tokens = 0

    async def __aenter__(self) -> "MockEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> Completion:
        tokens = (*self._answer(request.seed), *request.sampling.stop_token_ids[:1])
        async with self._places:
            await asyncio.sleep(self._seconds(len(tokens)))
        self._tokens += len(tokens)
        logprobs = floats([-0.123456789 - token for token in tokens])
        return Completion(ints(tokens), logprobs, ints([0] * len(tokens)), "stop")

    async def interrupt(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: object, version: int) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, self._tokens, 0, 0)


class InstantEngine(MockEngine):
    """Always gives the same answer, in the loop's next iteration, so that all live episodes advance
    together.
    """

    def __init__(self) -> None:
        super().__init__(1, lambda seed: (), lambda tokens: 0.0)
        self._said = Completion(ints([320] * 32), floats([-0.5] * 32), ints([0] * 32), "length")

    async def generate(self, request: GenerateRequest) -> Completion:
        await asyncio.sleep(0)
        return self._said


class Game:
    """Begins alike for each member of a group, then returns something new in each turn. Instant, on
    the loop.
    """

    isolation = "inline"
    system_prompt = "You play. Answer with what you want to do."

    def reset(self, *, seed: int, options: object) -> tuple[str, dict[str, Any]]:
        self._turn = 0
        return f"Game {seed} begins. {self._view(seed)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        return (
            f"Turn {self._turn}. {self._view(next(_EVER_NEW))}",
            0.0,
            self._turn == TURNS,
            False,
            {},
        )

    def close(self) -> None:
        pass

    def _view(self, number: int) -> str:
        return f"You see {number % 10007} at {number % 9973}. What do you do?"


class SlowGame(Game):
    """The same, but each step takes a random time of the scaled model."""

    def __init__(self, random: Random) -> None:
        self._delays = random

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        seconds = env_seconds(self._delays)
        await asyncio.sleep(seconds)
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"seconds": seconds}


@dataclass(frozen=True)
class Measured:
    """One run: CPU and wall-clock seconds, and each trajectory's turns as (tokens, seconds the
    environment slept).
    """

    cpu: float
    wall: float
    turns: list[list[tuple[int, float]]]

    @property
    def cpu_ms_per_turn(self) -> float:
        return 1000 * self.cpu / sum(map(len, self.turns))

    @property
    def efficiency(self) -> float:
        """Lower bound of the makespan / makespan."""
        services = [[answer_seconds(tokens) for tokens, _ in turns] for turns in self.turns]
        chains = [
            sum(service) + sum(seconds for _, seconds in turns)
            for service, turns in zip(services, self.turns, strict=True)
        ]
        return max(*chains, sum(map(sum, services)) / SLOTS) / self.wall


async def measured(work: Awaitable[list[list[tuple[int, float]]]]) -> Measured:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    turns = await work
    return Measured(time.process_time() - cpu, time.perf_counter() - wall, turns)


async def play(
    engine: Engine,
    game: Callable[[], Any],
    renderer: TemplateRenderer,
    trajectories: int,
    live: int,
) -> list[list[tuple[int, float]]]:
    """Play one batch with the real scheduler. Only this function joins the parts."""
    config = RolloutConfig(
        groups_per_step=trajectories // GROUP,
        group_size=GROUP,
        budget=Budget(turns=TURNS),
        max_live_episodes=live,
        min_live_episodes=live,
    )
    host = EnvPool({"game": game}, config.deadlines)
    policy = EnginePolicy(
        engine,
        SamplingParams(max_tokens=512, temperature=1.0, stop_token_ids=renderer.stop_token_ids),
        config.deadlines.generate,
    )
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        rollouts = Rollouts(
            config,
            tasks=SeededTasks(NoSettings(), "game", seed=next(_EVER_NEW)),
            runner=EnvEpisodeRunner(
                policy, renderer, host, config.budget, config.deadlines.episode
            ),
            reward=EnvironmentReward(EnvironmentReward.Config()),
            engine=engine,
            ledger=ledger,
            seed=0,
            groups=config.groups_per_step,
        )
        async with rollouts:
            groups = await rollouts.next_batch()
        await host.close()
        ledger.close()
    played = [trajectory for group in groups for trajectory in group.trajectories]
    return [
        [(len(turn.completion.token_ids), turn.info.get("seconds", 0.0)) for turn in each.turns]
        for each in played
    ]


async def play_bare(url: str, scaled: bool) -> list[list[tuple[int, float]]]:
    """The same turns with the right number of token ids, by nothing but a client."""
    random = Random(0)

    async def trajectory(session: aiohttp.ClientSession, number: int) -> list[tuple[int, float]]:
        prompt = [300] * 40
        turns = []
        for turn in range(TURNS):
            body = {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": 512,
                "seed": 1000 * number + turn,
                "logprobs": 0,
            }
            async with session.post(f"{url}/v1/completions", json=body) as response:
                choice = (await response.json())["choices"][0]
            seconds = env_seconds(random) if scaled else 0.0
            if scaled:
                await asyncio.sleep(seconds)
            prompt += [*choice["token_ids"], *([300] * 20)]
            turns.append((len(choice["token_ids"]), seconds))
        return turns

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        started = [tasks.create_task(trajectory(session, number)) for number in range(TRAJECTORIES)]
        for task in started:
            await task
    return [task.result() for task in started]


async def serve(scaled: bool) -> None:
    """The other process: print the URL, serve until standard input ends."""
    engine = MockEngine(SLOTS, answer_of, answer_seconds if scaled else lambda tokens: 0.0)
    async with serve_engine(engine) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def server(scaled: bool) -> AsyncIterator[str]:
    """A mock server in a process of its own."""
    command = [sys.executable, __file__, "--serve", "scaled" if scaled else "zero"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018
    yield (await process.stdout.readline()).decode().strip()
    process.stdin.close()
    await process.wait()


async def in_process(
    renderer: TemplateRenderer, lives: Sequence[int], repeats: int
) -> dict[int, float]:
    """CPU-ms per turn by the number of live episodes, each over as many trajectories; the numbers
    take turns.
    """
    trajectories = max(1024, *lives)
    engine = InstantEngine()
    await play(engine, Game, renderer, 64, 64)
    freeze_gc()  # as a run does
    runs: dict[int, list[Measured]] = {live: [] for live in lives}
    for _ in range(repeats):
        for live in lives:
            runs[live].append(await measured(play(engine, Game, renderer, trajectories, live)))
    return {
        live: statistics.median(run.cpu_ms_per_turn for run in of_live)
        for live, of_live in runs.items()
    }


async def over_http(
    renderer: TemplateRenderer, scaled: bool, repeats: int
) -> dict[str, list[Measured]]:
    """Our client and the bare one in turns, against the same server."""
    runs: dict[str, list[Measured]] = {"agentrl, engine=openai": [], "bare aiohttp client": []}
    random = Random(1)

    def game() -> Game:
        return SlowGame(random) if scaled else Game()

    async with server(scaled) as url, OpenAIEngine(OpenAIEngine.Config(url=url)) as engine:
        for repeat in range(repeats + 1):  # the first is a warm-up
            ours = await measured(play(engine, game, renderer, TRAJECTORIES, TRAJECTORIES))
            bare = await measured(play_bare(url, scaled))
            for name, run in zip(runs, (ours, bare), strict=True):
                runs[name] += [run] if repeat else []
    return runs


def tiny_renderer() -> TemplateRenderer:
    with tempfile.TemporaryDirectory() as folder:
        create_tiny_model(Path(folder) / "model")
        return TemplateRenderer.of_model(Path(folder) / "model")


async def benchmark(lives: Sequence[int], repeats: int, console: Console) -> None:
    renderer = tiny_renderer()
    table = Table(
        "live episodes",
        "CPU-ms per turn",
        "ratio",
        title="in process, instant engine and environment",
    )
    by_live = await in_process(renderer, lives, repeats)
    for live, spent in by_live.items():
        table.add_row(f"{live:,}", f"{spent:.3f}", f"{spent / by_live[lives[0]]:.2f}")
    console.print(table)
    zero, scaled = [await over_http(renderer, scaled, repeats) for scaled in (False, True)]
    title = f"{TRAJECTORIES} trajectories x {TURNS} turns over HTTP, {SLOTS} slots"
    table = Table("", "CPU-ms per turn (zero)", "(scaled)", "efficiency (scaled)", title=title)
    for name in zero:
        table.add_row(
            name,
            f"{statistics.median(run.cpu_ms_per_turn for run in zero[name]):.2f}",
            f"{statistics.median(run.cpu_ms_per_turn for run in scaled[name]):.2f}",
            f"{statistics.median(run.efficiency for run in scaled[name]):.2f}",
        )
    console.print(table)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--live", type=int, nargs="*", default=[16, 256, 1000, 10_000])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--serve", choices=["zero", "scaled"], help=argparse.SUPPRESS)
    arguments.add_argument("--gateway", action="store_true", help="Only the programs.")
    options = arguments.parse_args()
    console = Console()
    if options.serve:
        asyncio.run(serve(options.serve == "scaled"))
        return
    if not options.gateway:
        run_steadily(benchmark(options.live, options.repeats, console))
    run_steadily(
        gateway_turns.benchmark(InstantEngine(), tiny_renderer(), options.repeats, console)
    )


if __name__ == "__main__":
    main()
