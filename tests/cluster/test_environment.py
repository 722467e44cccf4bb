"""Workers compute with their share of the cores."""

import asyncio
import os
from pathlib import Path

import pytest

from agentrl.cluster import processes
from agentrl.cluster.environment import (
    ALLOCATOR,
    THREADS,
    allocator_variables,
    thread_variables,
)
from agentrl.cluster.processes import start_local
from agentrl.cluster.ray_actors import _Host

OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


class Started:
    """Says what its process was started with, before it imported anything."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def began_with(self) -> dict[str, str]:
        """The environment of the process when it began, and so before torch was imported."""
        entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def environments_of_ranks(role: str) -> list[dict[str, str]]:
    async def main() -> list[dict[str, str]]:
        group = await start_local(role, Started, 2)
        try:
            return await group.all("began_with")
        finally:
            await group.stop()

    return asyncio.run(main())


def test_ranks_on_this_machine_share_its_cores_and_have_segments_that_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 6)
    for name in (THREADS, ALLOCATOR, OLD_ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    for environ in environments_of_ranks("trainer"):
        assert environ[THREADS] == "3"
        assert environ[ALLOCATOR] == "expandable_segments:True"
    assert THREADS not in os.environ
    assert ALLOCATOR not in os.environ  # engines start from here, too


@pytest.mark.parametrize("role", ["trainer", "reference", "critic"])
def test_only_trainers_have_segments_that_grow_and_a_choice_is_kept(role: str) -> None:
    grows = {ALLOCATOR: "expandable_segments:True"}
    mine, old = {ALLOCATOR: "max_split_size_mb:64"}, {OLD_ALLOCATOR: "backend:cudaMallocAsync"}
    assert allocator_variables(role, {"HOME": "/"}) == grows
    assert allocator_variables(role, mine) == mine
    assert allocator_variables(role, old) == old
    assert allocator_variables(role, mine, old) == old  # the driver's before the node's
    assert allocator_variables("engine", {}) == {}
    assert allocator_variables("rollout", {}) == {}


def test_an_actor_of_a_trainer_sets_its_allocator_before_it_makes_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (ALLOCATOR, OLD_ALLOCATOR):
        monkeypatch.setenv(name, "for the test to restore")
        monkeypatch.delenv(name)
    _Host("rollout", {})
    assert ALLOCATOR not in os.environ
    _Host("critic", {})
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    _Host("critic", {ALLOCATOR: "max_split_size_mb:64"})
    assert os.environ[ALLOCATOR] == "max_split_size_mb:64"


def test_a_share_is_at_least_one_core_and_a_choice_is_kept() -> None:
    assert thread_variables(128, 8) == {THREADS: "16"}
    assert thread_variables(2, 8) == {THREADS: "1"}
    assert thread_variables(128, 8, "4") == {THREADS: "4"}
