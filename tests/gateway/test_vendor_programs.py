"""Unmodified vendors' programs, in interpreters of their own: `make agents`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.gateway.command_agent import CommandAgent
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.player import PlayerEngine
from agentrl.gateway.server import serving
from agentrl.gateway.session_registry import SessionRegistry
from agentrl.rollout.assignment import Assignment
from agentrl.trajectory import Task, Terminated, Trajectory
from tests.gateway.served import RENDERER, runner_on
from tests.gateway.vendors import ROOT, VENDORS, Vendor, folder_of_programs
from tests.processes import PATIENCE_SECONDS

EPISODES = 20


def play(
    vendor: Vendor, episodes: int, network: str = "open"
) -> tuple[Sequence[Trajectory], Sequence[str]]:
    """Episodes of a program, a few at a time; and all that the model has said."""
    command = vendor.command(folder_of_programs())
    said: list[str] = []

    def says(prompt: str, rng) -> str:
        said.append(vendor.model(prompt))
        return said[-1]

    async def main() -> Sequence[Trajectory]:
        registry, engine = (
            SessionRegistry(GatewayConfig(network=network)),
            PlayerEngine(says, RENDERER),
        )
        agent = CommandAgent(command, vendor.needs, registry if network == "gateway" else None)
        runner = runner_on(registry, engine, agent, PATIENCE_SECONDS)
        slots = asyncio.Semaphore(2)

        async def one(seed: int) -> Trajectory:
            async with slots:
                return (
                    await runner.play(Assignment(f"e{seed}", Task("agent:command", seed), seed))
                )[0]

        async with engine, serving(registry), asyncio.TaskGroup() as group:
            playing = [group.create_task(one(seed)) for seed in range(episodes)]
        return [task.result() for task in playing]

    return asyncio.run(main()), said


@pytest.mark.long
@pytest.mark.parametrize("vendor", [pytest.param(vendor, id=vendor.name) for vendor in VENDORS])
def test_an_unmodified_program_is_recorded_exactly(vendor):
    check(vendor, *play(vendor, EPISODES))


@pytest.mark.long
@pytest.mark.parametrize("vendor", [pytest.param(vendor, id=vendor.name) for vendor in VENDORS])
def test_an_unmodified_program_needs_no_network_but_the_gateway(vendor):
    check(vendor, *play(vendor, 2, "gateway"))


def check(vendor: Vendor, trajectories: Sequence[Trajectory], said: Sequence[str]) -> None:
    """Each episode has solved its task, and holds what the model has said, token for token."""
    sampled = []
    for trajectory in trajectories:
        assert trajectory.status == Terminated(), trajectory.status
        assert trajectory.env_return == 1.0, [message.content for message in trajectory.messages]
        assert len(trajectory.turns) == vendor.calls
        assert sum(turn.forked for turn in trajectory.turns) == vendor.edits
        assert not trajectory.dropped
        sampled += [turn.completion.token_ids.tolist() for turn in trajectory.turns]
    assert sorted(sampled) == sorted(RENDERER.answer_ids(text).tolist() for text in said)


def test_the_docs_name_every_program_that_is_played():
    table = (Path(ROOT) / "docs" / "gateway.md").read_text()
    for vendor in VENDORS:
        assert f"| `{vendor.name.split()[0]}`" in table, vendor.name
