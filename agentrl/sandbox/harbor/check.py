"""Checks tasks: its own solution must earn 1, and doing nothing 0."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import AgentRLError
from agentrl.protocols import SandboxProvider
from agentrl.sandbox.harbor.task import read_task
from agentrl.sandbox.harbor.trial import HarborTrial, TrialSettings


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What became of a task."""

    name: str
    solution: float | None
    """What its own solution earns; None if there is no verdict."""
    nothing: float | None
    """What doing nothing earns; no reward at all counts as 0."""
    why: str
    """What is wrong with it; empty if nothing is."""


async def check_task(folder: Path, provider: SandboxProvider, settings: TrialSettings) -> TaskCheck:
    """Build a task, and run its solution and nothing."""
    solution = nothing = None
    try:
        nothing, _ = await _try_task(folder, provider, settings, solve=False)
        solution, why = await _try_task(folder, provider, settings, solve=True)
    except (AgentRLError, OSError) as error:
        return TaskCheck(folder.name, solution, nothing, str(error))
    if solution != 1:
        return TaskCheck(folder.name, solution, nothing, f"its solution does not earn 1: {why}")
    if nothing != 0:
        return TaskCheck(folder.name, solution, nothing, f"doing nothing earns {nothing}")
    return TaskCheck(folder.name, solution, nothing, "")


async def _try_task(
    folder: Path, provider: SandboxProvider, settings: TrialSettings, solve: bool
) -> tuple[float, str]:
    """The reward, and what explains it."""
    trial = HarborTrial(await asyncio.to_thread(read_task, folder), provider, settings)
    try:
        await trial.start()
        said = ""
        if solve:
            done = await trial.solve()
            if done.exit:
                said = f"solve.sh ended with {done.exit} ({done.stdout.strip()[-300:]}); "
        verdict = await trial.judge()
    finally:
        await trial.close()
    # If none has this name, the lowest counts.
    reward = verdict.rewards.get("reward", min(verdict.rewards.values(), default=0.0))
    return reward, said + (verdict.why or f"the tests said: {verdict.output[-300:]}")
