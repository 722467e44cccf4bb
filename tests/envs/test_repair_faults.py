"""Episodes of `repair` in containers that are killed, on an engine that is restarted."""

import asyncio
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.envs.repair import Repair
from agentrl.flow.retries import Retries
from agentrl.hosting.pool import EnvPool
from agentrl.ledger.ledger import Ledger
from agentrl.plugins import NoSettings
from agentrl.protocols import GenerateRequest
from agentrl.rewards.environment import EnvironmentReward
from agentrl.rollout.budget import Budget
from agentrl.rollout.config import Deadlines, RolloutConfig
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.episode import EnvEpisodeRunner
from agentrl.rollout.scheduler import Rollouts
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.seeded import SeededTasks
from agentrl.testing import ScriptedEngine
from agentrl.testing.tokenizer import ByteTokenizer
from agentrl.trajectory import Group, Score, ToolCall, Trajectory
from tests.docker_engine import BASE, OwnEngine, docker, needs_docker, own_engine

EPISODES = int(os.environ.get("AGENTRL_FAULTY_EPISODES", "40"))
"""With 500, it takes ten minutes."""
GROUP, STEPS, KILLED = 5, 2, 0.1
RENDERER = TemplateRenderer(ByteTokenizer())


class CountingReward(EnvironmentReward):
    """Counts the episodes that it has scored."""

    scored = 0

    async def score(self, trajectory: Trajectory) -> Score:
        self.scored += 1
        return await super().score(trajectory)


def tasks_on(host: str) -> SeededTasks:
    sandbox = {"name": "docker", "host": host, "image": BASE}
    return SeededTasks(NoSettings(), "repair", 1, options={"sandbox": sandbox, "brief": True})


def mends_of(tasks: SeededTasks) -> dict[str, str]:
    """The command that mends the program of each task, by the program's text."""
    found = {}
    for index in range(EPISODES // GROUP):
        env = Repair()
        env.options = Repair.Options(brief=True)
        text = env._task_of(tasks.task(index).seed).instruction
        (found[text],) = env.repository.mends
    return found


def player_of(tasks: SeededTasks) -> ScriptedEngine:
    """A model that mends each program and submits it."""
    mends = mends_of(tasks)

    def answer(request: GenerateRequest) -> bytes:
        prompt = bytes(int(token) for token in request.prompt_ids if token < 256).decode()
        (mend,) = (mend for text, mend in mends.items() if text in prompt)
        is_mended = '"command": ' in prompt
        call = ToolCall("submit", {}) if is_mended else ToolCall("run", {"command": mend})
        return call.render().encode()

    return ScriptedEngine.replying(answer, max_context=1 << 16)


class Killer:
    """Kills one of ten containers soon after its start."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.killed = 0
        self._rng = random.Random(0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self._process.terminate()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        events = ("events", "--filter", "event=start", "--format", "{{.ID}}")
        while not ended.wait(0.2):  # an engine that is restarted ends the events
            with subprocess.Popen(
                docker(self.host, *events), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as self._process:
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    if self._rng.random() < KILLED:
                        name = line.decode().strip()
                        threading.Timer(self._rng.uniform(0, 0.5), self._kill, [name]).start()

    def _kill(self, name: str) -> None:
        command = docker(self.host, "kill", name)
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            self.killed += 1


async def played(
    engine: OwnEngine, restarter: Executor, reward: CountingReward, ledger: Ledger
) -> list[list[Group]]:
    """All episodes, in so many steps. The engine is restarted in the middle."""
    tasks = tasks_on(engine.host)
    model = player_of(tasks)
    patience: Any = {"reset": 300, "step": 300, "tool": 300}
    host = EnvPool({"repair": Repair}, Deadlines(**patience))
    sampling = SamplingParams(max_tokens=256, stop_token_ids=RENDERER.stop_token_ids)
    policy = EnginePolicy(model, sampling, 600.0, trained=True)
    rollouts = Rollouts(
        RolloutConfig(
            groups_per_step=EPISODES // GROUP // STEPS,
            group_size=GROUP,
            retries=Retries(environment=8),
            min_live_episodes=8,
            max_live_episodes=8,
        ),
        tasks=tasks,
        runner=EnvEpisodeRunner(policy, RENDERER, host, Budget(turns=3), 900.0),
        reward=reward,
        engine=model,
        ledger=ledger,
        seed=1,
        groups=EPISODES // GROUP,
    )

    async def restart() -> None:
        while reward.scored < EPISODES // 2 - 2:  # noqa: ASYNC110  nothing signals it
            await asyncio.sleep(0.05)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(restarter, engine.stop)
        await loop.run_in_executor(restarter, engine.start)

    batches = []
    try:
        async with model, rollouts:
            restarting = asyncio.create_task(restart())
            for step in range(STEPS):
                batches.append(await rollouts.next_batch())
                async with rollouts.new_weights(step + 1):
                    await model.update_weights({}, step + 1)
            await restarting
    finally:
        await host.close()
    return batches


def left_on(engine: OwnEngine) -> dict[str, int]:
    """How much of each kind the engine keeps.

    Not the folders of its layers: an engine that ends while it makes a container leaves some of
    these, which no command of its own lists or removes (moby issue 45939).
    """
    kinds = {
        "containers": ("ps", "-aq"),
        "images": ("images", "-aq"),
        "volumes": ("volume", "ls", "-q"),
    }
    kept = {}
    for kind, words in kinds.items():
        found = subprocess.run(docker(engine.host, *words), capture_output=True, check=True)
        kept[kind] = len(found.stdout.split())
    return kept


@needs_docker
@pytest.mark.long
def test_containers_that_are_killed_and_an_engine_that_is_restarted_cost_no_episode(
    tmp_path: Path,
) -> None:
    reward, ledger = CountingReward(EnvironmentReward.Config()), Ledger(tmp_path / "ledger.sqlite")
    # The engine ends with the thread that has started it.
    with own_engine() as engine, ThreadPoolExecutor(1) as restarter:
        before, killer = left_on(engine), Killer(engine.host)
        with killer.at_work():
            batches = asyncio.run(played(engine, restarter, reward, ledger))
        assert left_on(engine) == before
    fates, attempts = ledger.task_fates(), ledger.episode_fates()
    ledger.close()
    print(f"\n{killer.killed} containers killed; tasks {fates}; episodes {attempts}")
    assert killer.killed
    assert fates.settled
    assert attempts.settled
    assert fates.trained == EPISODES // GROUP
    scores = [score.value for batch in batches for group in batch for score in group.scores]
    # The player is right, so what was killed was never taken for a wrong repair.
    assert scores == [1.0] * EPISODES
