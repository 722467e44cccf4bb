"""`agentrl new-env NAME`: a package to start from, with an environment, its test, its entry point
and a config.
"""

import importlib.util
import keyword
import os
import re
from pathlib import Path

from agentrl import plugins
from agentrl.errors import ConfigError

_GAME = '''"""@Class@: an environment for agentrl, and a player of it."""

import random
from collections.abc import Mapping
from typing import Any

from agentrl import TextEnv, plays


class @Class@(TextEnv):
    """Find a secret number from 1 to 9. Reward 1 for the right one; for any other a hint."""

    system_prompt = "Find the secret number. Answer with one number from 1 to 9."
    # "inline" answers in microseconds. Use "thread" if `step` may block, "process" if it may crash.
    isolation = "inline"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        # `rng` is seeded with the task's seed: use no other randomness.
        self.secret = self.rng.randint(1, 9)
        self.left = range(1, 10)
        return "Guess."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = action.strip()
        # Answer unusable input, never raise.
        if guess not in [str(number) for number in range(1, 10)]:
            return "Answer with one number from 1 to 9.", 0.0, False, False, {"success": False}
        right = int(guess) == self.secret
        hint = "right" if right else "higher" if int(guess) < self.secret else "lower"
        self.left = [n for n in self.left if (n > int(guess)) == (hint == "higher")]
        return hint, float(right), right, False, {"success": right}


@plays(@Class@)
def player(env: @Class@, rng: random.Random, skill: float = 0.5) -> str:
    """Shows a model how to answer: a careful guess with probability `skill`, else any."""
    careful = rng.random() < skill and env.left
    return str(env.left[len(env.left) // 2] if careful else rng.randint(1, 9))
'''

_GAME_TEST = '''"""The environment keeps the contract, and rewards only the right answer."""

from @name@ import @Class@

from agentrl.testing import check_env


def test_it_keeps_the_contract() -> None:
    check_env(@Class@)


def test_the_right_answer_and_no_other_is_paid() -> None:
    env = @Class@()
    env.reset(seed=0, options={})
    paid = {number: env.step(str(number))[1] for number in range(1, 10)}
    assert paid == {number: float(number == env.secret) for number in range(1, 10)}
'''

_TOOLS = '''"""@Class@: an environment with tools for agentrl, and a player of it."""

import random
from collections.abc import Mapping
from typing import Any

from agentrl import ToolCall, ToolEnv, ToolResult, plays


class @Class@(ToolEnv):
    """Open a safe whose code is a number from 1 to 4. Reward 1 if it opens."""

    system_prompt = "Open the safe. Its code is a number from 1 to 4."
    # "inline" answers in microseconds. Use "thread" if a tool may block, "process" if it may crash.
    isolation = "inline"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.call_shortly(options.get("short_calls", False))
        # `rng` is seeded with the task's seed: use no other randomness.
        self.code = self.rng.randint(1, 4)
        self.left = list(range(1, 5))
        return "The safe is closed."

    # Each public method is a tool. The model sees its signature as a schema, and its docstring.

    def compare(self, number: int) -> str:
        """Say whether the code is above a number."""
        above = self.code > number
        self.left = [n for n in self.left if (n > number) == above]
        return "above" if above else "not above"

    def open(self, code: int) -> ToolResult:
        """Try a code. There is only one try."""
        right = code == self.code
        answer = "open" if right else "locked"
        return ToolResult(answer, reward=float(right), terminated=True, success=right)


@plays(@Class@)
def player(env: @Class@, rng: random.Random, skill: float = 0.6) -> str:
    """Shows a model how to call: well with probability `skill`, else it opens with any code."""
    if rng.random() > skill:
        return env.written(ToolCall("open", {"code": rng.randint(1, 4)}))
    if len(env.left) == 1:
        return env.written(ToolCall("open", {"code": env.left[0]}))
    return env.written(ToolCall("compare", {"number": env.left[len(env.left) // 2 - 1]}))
'''

_TOOLS_TEST = '''"""The environment keeps the contract, and rewards only the right code."""

from @name@ import @Class@

from agentrl.testing import check_env


def test_it_keeps_the_contract() -> None:
    check_env(@Class@)


def test_the_right_code_and_no_other_is_paid() -> None:
    env = @Class@()
    env.reset(seed=0, options={})
    paid = {number: env.open(number).reward for number in range(1, 5)}
    assert paid == {number: float(number == env.code) for number in range(1, 5)}
'''

_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@dashed@"
version = "0.1.0"
dependencies = ["agentrl-train"]

[project.entry-points."agentrl.envs"]
@name@ = "@name@:@Class@"

[tool.setuptools]
py-modules = ["@name@"]
"""

_CONFIG = """\
# agentrl train @name@.yaml: a tiny model imitates the player, then learns to do better.
env: @address@
model: tiny  # or a pretrained one, such as Qwen/Qwen3-0.6B, which needs no demonstrations@hint@
steps: 16
recipe:
  demonstrations:
    player: @name@:player
    episodes: 1024
    episodes_per_step: 8
    lr: 2e-3
rollout:
  groups_per_step: 24
  group_size: 8
  budget: {turns: @turns@}
  sampling: {max_tokens: @tokens@}
trainer: {lr: @lr@, schedule: cosine, min_lr_ratio: 0.2, minibatches: 4, old_logprobs: engine}
engine: {max_batch: 192}
evaluation: {tasks: 100}
"""

_KINDS = {
    "game": (
        _GAME,
        _GAME_TEST,
        {
            "@address@": "@name@:@Class@",
            "@hint@": "",
            "@turns@": "3",
            "@tokens@": "8",
            "@lr@": "1e-3",
        },
    ),
    "tools": (
        _TOOLS,
        _TOOLS_TEST,
        {
            "@address@": "{name: '@name@:@Class@', options: {short_calls: true}}",
            "@hint@": (
                "\n# short_calls: `compare 5` in place of JSON, which takes a tiny model long to"
                " learn"
            ),
            "@turns@": "3",
            "@tokens@": "16",
            "@lr@": "5e-4",
        },
    ),
}
"""The environment, its test, and what its config says."""


def write_env_package(name: str, parent: Path, *, tools: bool = False) -> Path:
    """Write the package `name` into a new folder of that name in `parent`, and return the folder.

    Its environment is a game of text, or one with `tools`. Its config trains a tiny model that
    learns it.

    Raises:
        ConfigError: the name is not valid for a module, is taken, or the folder exists.
    """
    module = name.replace("-", "_").lower()
    folder = parent / module
    is_ascii = module.isascii()  # as names of packages have to be
    if not (is_ascii and module.isidentifier() and module.strip("_")) or keyword.iskeyword(module):
        raise ConfigError(
            f"{name!r} cannot be the name of a module: use the letters a to z, digits and _, such"
            " as my_game"
        )
    env, test, of_kind = _KINDS["tools" if tools else "game"]
    written = class_name(module)
    if not written.isidentifier() or keyword.iskeyword(written) or _imports(env, written):
        raise ConfigError(
            f"the class of {name!r} would be {written!r}, which cannot be a class's name or is"
            " taken in its file: choose another name, such as my_game"
        )
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists already: choose another name, or remove it")
    if importlib.util.find_spec(module) or module in {
        plugin.name for plugin in plugins.installed("envs")
    }:
        raise ConfigError(
            f"{module!r} is the name of an installed module or environment: choose another"
        )
    words = {
        **of_kind,
        "@name@": module,
        "@dashed@": module.strip("_").replace("_", "-"),
        "@Class@": written,
    }
    folder.mkdir(parents=True)
    files = {
        f"{module}.py": env,
        f"test_{module}.py": test,
        "pyproject.toml": _PYPROJECT,
        f"{module}.yaml": _CONFIG,
    }
    for file, text in files.items():
        for word, meaning in words.items():
            text = text.replace(word, meaning)  # noqa: PLW2901
        (folder / file).write_text(text)
    return folder


def _imports(source: str, name: str) -> bool:
    """True if a source imports something by this name."""
    lines = (line for line in source.splitlines() if line.startswith(("from ", "import ")))
    return any(name in re.findall(r"\w+", line.partition("import")[2]) for line in lines)


def class_name(module: str) -> str:
    """`my_game` to `MyGame`."""
    return "".join(word.capitalize() for word in module.split("_"))
