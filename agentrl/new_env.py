"""`agentrl new-env NAME`: a package to start from, with an environment, its test, its entry point and a config."""

import importlib.util
import keyword
from pathlib import Path

from agentrl import plugins
from agentrl.errors import ConfigError

_ENV = '''"""@Class@: an environment for agentrl."""

from collections.abc import Mapping
from typing import Any

from agentrl.envs.base import TextEnv


class @Class@(TextEnv):
    """Find a secret number from 1 to 9. Reward 1 for the right one; for any other a hint, higher or lower."""

    system_prompt = "Find the secret number. Answer with one number from 1 to 9."
    isolation = "inline"  # answers in microseconds; use "thread" if it may block, "process" if it may hang or crash

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        self.secret = self.rng.randint(1, 9)  # `rng` is seeded with the task's seed: use no other randomness
        return "Guess."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = action.strip()
        if guess not in [str(number) for number in range(1, 10)]:  # answer unusable input, never raise
            return "Answer with one number from 1 to 9.", 0.0, False, False, {"success": False}
        right = int(guess) == self.secret
        hint = "right" if right else "higher" if int(guess) < self.secret else "lower"
        return hint, float(right), right, False, {"success": right}
'''

_TEST = '''"""The environment keeps the contract, and rewards only the right answer."""

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

_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@dashed@"
version = "0.1.0"
dependencies = ["agentrl"]

[project.entry-points."agentrl.envs"]
@name@ = "@name@:@Class@"

[tool.setuptools]
py-modules = ["@name@"]
"""

_CONFIG = """# agentrl train @name@.yaml
env: @name@:@Class@
steps: 50
rollout:
  groups_per_step: 8
  group_size: 8
  budget: {turns: 5}
"""


def write_env_package(name: str, parent: Path) -> Path:
    """Write the package `name` into a new folder of that name in `parent`, and return the folder.

    Raises:
        ConfigError: the name is not valid for a module, is taken, or the folder exists.
    """
    module = name.replace("-", "_").lower()
    folder = parent / module
    if not module.isidentifier() or keyword.iskeyword(module) or not module.strip("_"):
        raise ConfigError(f"{name!r} cannot be the name of a module: use letters, digits and _, such as my_game")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or remove it")
    if importlib.util.find_spec(module) or module in {plugin.name for plugin in plugins.installed("envs")}:
        raise ConfigError(f"{module!r} is the name of an installed module or environment: choose another")
    words = {
        "@name@": module,
        "@dashed@": module.strip("_").replace("_", "-"),
        "@Class@": class_name(module),
    }
    folder.mkdir(parents=True)
    files = {f"{module}.py": _ENV, f"test_{module}.py": _TEST, "pyproject.toml": _PYPROJECT, f"{module}.yaml": _CONFIG}
    for file, text in files.items():
        for word, meaning in words.items():
            text = text.replace(word, meaning)  # noqa: PLW2901
        (folder / file).write_text(text)
    return folder


def class_name(module: str) -> str:
    """`my_game` to `MyGame`."""
    return "".join(word.capitalize() for word in module.split("_"))
