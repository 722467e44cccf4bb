"""Fixtures of trainers."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.trainers.shared_processes import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """The processes of all ranks of a module."""
    started = Processes()
    yield started
    for process in started.processes:
        asyncio.run(process.stop())
