"""What a step of a remote environment costs: steps a second, and CPU time of client and server, each its own process.

    python benchmarks/remote_env.py [--sessions 1 32 128 1024] [--seconds 3] [--rounds 3]

FrozenLake, which itself takes microseconds, played without pause in every session: what is measured is the way there
and back. "websocket" is `RemoteEnv`; "http" is a POST for each step, by aiohttp with a connection for each session (at
most 128 of them: more gain nothing). "local" is the same environment without a way. The best of the rounds is shown.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from agentrl.envs.frozen_lake import ACTIONS, FrozenLake
from agentrl.protocols import ResetResult, StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import Limits
from agentrl.rollout.env_host import Deadlines, LiveEnv


class PostEnv:
    """A session by plain HTTP."""

    isolation = "inline"

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http, self._at, self._seq = url, http, "", 0

    async def _post(self, path: str, **body: object) -> dict[str, object]:
        async with self._http.post(self._url + path, json=body) as answer:
            answer.raise_for_status()
            said: dict[str, object] = await answer.json()
            return said

    async def reset(self, *, seed: int, options: object) -> ResetResult:
        """Begin an episode."""
        self._at = self._at or f"/sessions/{(await self._post('/sessions'))['session']}"
        self._seq += 1
        said = await self._post(f"{self._at}/reset", seq=self._seq, seed=seed)
        return str(said["observation"]), {}

    async def step(self, action: str) -> StepResult:
        """Send a message."""
        self._seq += 1
        said = await self._post(f"{self._at}/step", seq=self._seq, action=action)
        return str(said["observation"]), 0.0, bool(said["terminated"]), False, {}

    async def close(self) -> None:
        """Give the session back."""
        async with self._http.delete(self._url + self._at):
            pass


def serve(pipe: Connection) -> None:
    """The server's process."""
    EnvServer(FrozenLake, limits=Limits(max_sessions=4096, drain_seconds=0), on_start=pipe.send).run()


@dataclass(frozen=True)
class Measured:
    """Of one run: steps a second; CPU milliseconds a step of client and server; the slowest percent's milliseconds."""

    rate: float
    client: float
    server: float
    p50: float
    p99: float


async def measure(make: Callable[[], object], sessions: int, seconds: float, server: psutil.Process) -> Measured:
    """Play `sessions` at once for some seconds."""
    lives = [LiveEnv(make(), Deadlines()) for _ in range(sessions)]  # type: ignore[arg-type]
    waits: list[float] = []
    stop = False

    async def play(live: LiveEnv, rng: random.Random) -> None:
        while not stop:
            over = False
            while not over and not stop:
                began = time.perf_counter()
                _, _, over, _, _ = await live.step(rng.choice(ACTIONS))
                waits.append(time.perf_counter() - began)
                if len(waits) % 8 == 0:
                    await asyncio.sleep(0)  # a local one never waits
                over = over or rng.random() < 0.02
            if not stop:
                await live.reset(rng.randrange(1000), {})

    async with asyncio.TaskGroup() as group:
        for index, live in enumerate(lives):
            group.create_task(live.reset(index, {}))
    began, own, others = time.perf_counter(), time.process_time(), sum(server.cpu_times()[:2])
    async with asyncio.TaskGroup() as group:
        for index, live in enumerate(lives):
            group.create_task(play(live, random.Random(index)))
        await asyncio.sleep(seconds)
        took, own = time.perf_counter() - began, time.process_time() - own
        others, steps = sum(server.cpu_times()[:2]) - others, len(waits)
        stop = True
    for live in lives:
        await live.close()
    waits.sort()
    p50, p99 = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
    return Measured(steps / took, 1e3 * own / steps, 1e3 * others / steps, 1e3 * p50, 1e3 * p99)


async def ways(url: str, sessions: int, seconds: float, server: psutil.Process) -> dict[str, Measured]:
    """Every way, measured once."""
    connector = aiohttp.TCPConnector(limit=min(sessions, 128))
    async with aiohttp.ClientSession(connector=connector) as http:
        makes: dict[str, Callable[[], object]] = {
            "websocket": lambda: RemoteEnv([url]),
            "http": lambda: PostEnv(url, http),
            "local": FrozenLake,
        }
        return {way: await measure(make, sessions, seconds, server) for way, make in makes.items()}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 32, 128, 1024])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    url = ours.recv()
    table = Table(title=f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}", box=None)
    for column in ("sessions", "way", "steps/s", "client CPU ms/step", "server CPU ms/step", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for sessions in arguments.sessions:
        rounds = [
            asyncio.run(ways(url, sessions, arguments.seconds, psutil.Process(process.pid)))
            for _ in range(arguments.rounds)
        ]
        for way in rounds[0]:
            best = max((found[way] for found in rounds), key=lambda measured: measured.rate)
            figures = (best.client, best.server, best.p50, best.p99)
            table.add_row(str(sessions), way, f"{best.rate:,.0f}", *(f"{figure:.3f}" for figure in figures))
    Console().print(table)
    process.terminate()


if __name__ == "__main__":
    main()
