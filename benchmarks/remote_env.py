"""The cost of a step of a remote environment: steps per second, and CPU time of client and server
processes.

    python benchmarks/remote_env.py [--sessions 1 32 128 1024] [--seconds 3] [--rounds 3] [--openenv
    FOLDER]

Every session plays an environment that counts to 8, without pause, so this measures the round trip.

- "remote": `RemoteEnv` and `agentrl serve`, with the environment inline;
- "threads": the same, but each environment has its own thread, as an environment that may block
  does;
- "http": a POST for each step, with aiohttp and a connection for each session (at most 128: more
  gain nothing);
- "openenv": OpenEnv 0.10's own client and server (`benchmarks/openenv_rival.py`), in a virtual
  environment in FOLDER, which uv makes if it is missing;
- "spread": as "remote", from two processes behind one address; the CPU time is that of the process
  with the address;
- "busy" and "busy, spread": an environment that computes for 2 ms in each step.

The ways take turns, and the table shows the best round of each, since the machine may do other
work.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from openenv_rival import STEPS_OF_AN_EPISODE
from rich.console import Console
from rich.table import Table

from agentrl.cluster.local import LocalCluster
from agentrl.envs.base import TextEnv
from agentrl.hosting.config import EnvDeadlines
from agentrl.hosting.live_env import LiveEnv
from agentrl.protocols import Env, ResetResult, StepResult
from agentrl.remote.client import RemoteEnv
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import ServerLimits
from agentrl.remote.spread_server import SpreadServer

OPENENV = "openenv==0.10.0"


class Counting(TextEnv):
    """Counts."""

    isolation = "inline"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Begin at zero."""
        self.count = 0
        return f"counting from {seed}"

    def step(self, action: str) -> StepResult:
        """Count on."""
        self.count += 1
        return (
            f"{action}: the counter is {self.count}",
            1.0,
            self.count == STEPS_OF_AN_EPISODE,
            False,
            {},
        )


class Busy(Counting):
    """Computes for 2 ms in each step."""

    def step(self, action: str) -> StepResult:
        """Count on, slowly."""
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return super().step(action)


class CountingInThread(Counting):
    """The same, in a thread."""

    isolation = "thread"


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
        return str(said["observation"]), 1.0, bool(said["terminated"]), False, {}

    async def close(self) -> None:
        """End the session."""
        async with self._http.delete(self._url + self._at):
            pass


def serve(pipe: Connection, factory: Callable[[], Env]) -> None:
    """The server's process."""
    EnvServer(
        factory, limits=ServerLimits(max_sessions=4096, drain_seconds=0), on_start=pipe.send
    ).run()


def found(factory: Callable[[], Env]) -> Callable[[], Env]:
    """The factory, where a worker looks for it."""
    return factory


def serve_spread(pipe: Connection, factory: Callable[[], Env]) -> None:
    """The process in front of two others."""
    SpreadServer(
        LocalCluster(LocalCluster.Config()),
        2,
        partial(found, factory),
        limits=ServerLimits(max_sessions=4096, drain_seconds=0),
        on_start=pipe.send,
    ).run()


@dataclass(frozen=True)
class Measured:
    """One run: steps per second; CPU milliseconds per step of client and server; milliseconds of a
    step; threads.
    """

    rate: float
    client: float
    server: float
    p50: float
    p99: float
    threads: int


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of all threads of a process."""
    return sum(process.cpu_times()[:2])


async def measure(
    make: Callable[[], Env], sessions: int, seconds: float, server: psutil.Process
) -> Measured:
    """Play `sessions` at once for some seconds."""
    lives = [LiveEnv(make(), EnvDeadlines()) for _ in range(sessions)]
    waits: list[float] = []
    stop = False

    async def play(live: LiveEnv, seed: int) -> None:
        while not stop:
            await live.reset(seed, {})
            over = False
            while not over and not stop:
                began = time.perf_counter()
                _, _, over, _, _ = await live.step("go on")
                waits.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for seed, live in enumerate(lives):
            group.create_task(play(live, seed))
        await asyncio.sleep(0.5)
        waits.clear()
        began, own, others = time.perf_counter(), time.process_time(), cpu_seconds(server)
        await asyncio.sleep(seconds)
        took, own, others = (
            time.perf_counter() - began,
            time.process_time() - own,
            cpu_seconds(server) - others,
        )
        steps, threads = len(waits), server.num_threads()
        stop = True
    for live in lives:
        await live.close()
    p50, p99 = percentiles(waits[:steps])
    return Measured(steps / took, 1e3 * own / steps, 1e3 * others / steps, p50, p99, threads)


def percentiles(waits: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile, in milliseconds."""
    waits = sorted(waits)
    return 1e3 * waits[len(waits) // 2], 1e3 * waits[int(len(waits) * 0.99)]


def by_socket(url: str, seconds: float, server: psutil.Process, sessions: int) -> Measured:
    """Measure `RemoteEnv`."""
    return asyncio.run(measure(lambda: RemoteEnv([url]), sessions, seconds, server))


async def by_http(url: str, sessions: int, seconds: float, server: psutil.Process) -> Measured:
    """Measure a POST for each step."""
    connector = aiohttp.TCPConnector(limit=min(sessions, 128))
    async with aiohttp.ClientSession(connector=connector) as http:
        return await measure(lambda: PostEnv(url, http), sessions, seconds, server)


def by_openenv(
    python: Path, url: str, sessions: int, seconds: float, server: psutil.Process
) -> Measured:
    """Measure OpenEnv's own client."""
    with subprocess.Popen(
        [python, RIVAL, "play", url, str(sessions), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        try:
            client.stdout.readline()
            others = cpu_seconds(server)
            client.stdout.readline()
            others, threads = cpu_seconds(server) - others, server.num_threads()
            said = json.loads(client.stdout.readline())
        finally:
            client.kill()
    per_step = 1e3 / said["steps"]
    return Measured(
        said["steps"] / said["seconds"],
        per_step * said["client_seconds"],
        per_step * others,
        1e3 * said["p50"],
        1e3 * said["p99"],
        threads,
    )


RIVAL = Path(__file__).with_name("openenv_rival.py")


def openenv_python(folder: Path) -> Path:
    """The interpreter of a virtual environment with OpenEnv, which is made if it is missing.

    Raises:
        OSError: there is no uv.
        subprocess.CalledProcessError: uv could not install it.
    """
    python = folder / "bin" / "python"
    if (
        not python.exists()
        or subprocess.run([python, "-c", "import openenv"], check=False).returncode != 0
    ):
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        subprocess.run(
            [uv, "venv", "--quiet", "--allow-existing", "--python", "3.11", folder], check=True
        )
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, OPENENV], check=True)
    return python


@contextlib.contextmanager
def ours(
    factory: Callable[[], Env], how: Callable[[Connection, Callable[[], Env]], None] = serve
) -> Iterator[tuple[str, psutil.Process]]:
    """A server of ours: its address and its process."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=how, args=(theirs, factory))
    process.start()
    try:
        yield mine.recv(), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def theirs(python: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server of OpenEnv's: its address and its process."""
    with subprocess.Popen([python, RIVAL, "serve"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "OpenEnv's server did not start"
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 32, 128, 1024])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--openenv", type=Path, metavar="FOLDER", help="also measure OpenEnv, installed there"
    )
    arguments = parser.parse_args()
    seconds = arguments.seconds
    console = Console()
    with contextlib.ExitStack() as stack:
        url, server = stack.enter_context(ours(Counting))
        thread_url, thread_server = stack.enter_context(ours(CountingInThread))
        ways: dict[str, Callable[[int], Measured]] = {
            "remote": partial(by_socket, url, seconds, server),
            "threads": partial(by_socket, thread_url, seconds, thread_server),
            "http": lambda sessions: asyncio.run(by_http(url, sessions, seconds, server)),
        }
        for way, factory, how in (
            ("spread", Counting, serve_spread),
            ("busy", Busy, serve),
            ("busy, spread", Busy, serve_spread),
        ):
            address, front = stack.enter_context(ours(factory, how))
            ways[way] = partial(by_socket, address, seconds, front)
        if arguments.openenv is None:
            console.print("OpenEnv is not measured: name a folder for it with --openenv")
        else:
            try:
                python = openenv_python(arguments.openenv)
                rival_url, rival_server = stack.enter_context(theirs(python))
                ways["openenv"] = lambda sessions: by_openenv(
                    python, rival_url, sessions, seconds, rival_server
                )
            except (OSError, subprocess.CalledProcessError) as error:
                console.print(f"OpenEnv is not measured: {OPENENV} cannot be installed: {error}")
        table = Table(
            title=f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}", box=None
        )
        columns = (
            "sessions",
            "way",
            "steps/s",
            "client CPU ms/step",
            "server CPU ms/step",
            "p50 ms",
            "p99 ms",
        )
        for column in (*columns, "server's threads"):
            table.add_column(column, justify="right")
        for sessions in arguments.sessions:
            rounds = [
                {way: run(sessions) for way, run in ways.items()} for _ in range(arguments.rounds)
            ]
            for way in ways:
                best = max((found[way] for found in rounds), key=lambda measured: measured.rate)
                figures = (best.client, best.server, best.p50, best.p99)
                row = (
                    str(sessions),
                    way,
                    f"{best.rate:,.0f}",
                    *(f"{figure:.3f}" for figure in figures),
                )
                table.add_row(*row, str(best.threads))
        console.print(table)


if __name__ == "__main__":
    main()
