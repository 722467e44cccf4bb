"""Runs the function of an agent in a process of its own: `python function_child.py
my_package.module:run`.

It imports nothing of agentrl, so any Python can run it (`env.python`).
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from types import SimpleNamespace


def main(address: str) -> None:
    """Call the function with the task of this process, and write its reward."""
    sys.path[0] = os.getcwd()  # instead of this file's folder
    module, _, name = address.partition(":")
    function = getattr(importlib.import_module(module), name)
    task = SimpleNamespace(**json.loads(os.environ["AGENTRL_TASK"]))
    result = function(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    if inspect.isawaitable(result):
        result = asyncio.run(_await_result(result))
    if result is None:
        return
    if hasattr(result, "value") and hasattr(result, "parts"):
        result = {"reward": result.value, "parts": dict(result.parts)}
    with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
        json.dump(result, file)


async def _await_result(awaitable: object) -> object:
    return await awaitable  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1])
