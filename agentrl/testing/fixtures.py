"""Pytest fixtures: write `pytest_plugins = ["agentrl.testing.fixtures"]` in a `conftest.py`."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentrl.flow import run_virtual


@pytest.fixture
def virtual() -> Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]:
    """Runs an async function to its end in virtual time: `virtual(main)`."""
    return run_virtual
