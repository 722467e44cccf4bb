"""The environment of `benchmarks/remote_env.py` with OpenEnv's own server and client.

Runs in a virtual environment that has `openenv==0.10.0` and not agentrl; `benchmarks/remote_env.py
--openenv FOLDER` makes it and starts both. The environment is one sync class, as in OpenEnv's
guides, and allows concurrent sessions. The client keeps its connection between episodes, which is
faster.

    python openenv_rival.py serve             prints its address
    python openenv_rival.py play URL SESSIONS SECONDS     prints the measurements as JSON
"""

import asyncio
import json
import socket
import sys
import time
from typing import Any

STEPS_OF_AN_EPISODE = 8


def serve() -> None:
    """Serve the counting environment with OpenEnv's server."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Seen(Observation):
        message: str

    class Counting(Environment[Say, Seen, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, **more: Any
        ) -> Seen:
            self.count = 0
            return Seen(message=f"counting from {seed}", done=False, reward=None)

        def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Seen:
            self.count += 1
            done = self.count == STEPS_OF_AN_EPISODE
            return Seen(
                message=f"{action.message}: the counter is {self.count}", done=done, reward=1.0
            )

        @property
        def state(self) -> State:
            return State(step_count=self.count)

    app = create_fastapi_app(Counting, Say, Seen, max_concurrent_envs=4096)
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])


async def play(url: str, sessions: int, seconds: float) -> dict[str, float]:
    """Play that many sessions for some seconds with OpenEnv's client."""
    from openenv.core.generic_client import GenericEnvClient

    waits: list[float] = []
    stop = False
    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]

    async def episodes(client: GenericEnvClient, seed: int) -> None:
        while not stop:
            await client.reset(seed=seed)
            done = False
            while not done and not stop:
                began = time.perf_counter()
                done = (await client.step({"message": "go on"})).done
                waits.append(time.perf_counter() - began)

    # One by one: connecting is not measured, and the server refuses some of many at once.
    for client in clients:
        await client.connect()
    async with asyncio.TaskGroup() as group:
        for seed, client in enumerate(clients):
            group.create_task(episodes(client, seed))
        await asyncio.sleep(0.5)
        waits.clear()
        began, own = time.perf_counter(), time.process_time()
        print("measuring", flush=True)
        await asyncio.sleep(seconds)
        took, own, steps = time.perf_counter() - began, time.process_time() - own, len(waits)
        print("measured", flush=True)
        stop = True
    for client in clients:
        await client.close()
    waits = sorted(waits[:steps])
    return {
        "steps": steps,
        "seconds": took,
        "client_seconds": own,
        "p50": waits[steps // 2],
        "p99": waits[int(steps * 0.99)],
    }


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(asyncio.run(play(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))))
