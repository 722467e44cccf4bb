"""Counting: a task that tells a broken installation from a hard task.

The observation never says how far the episode has come, so each right answer needs all the answers
before it, exactly as they were sampled: a trainer that sees other tokens, other positions or other
weights than the engine cannot learn it. A sound one goes from a quarter of the reward to
two thirds and more in six steps, with the model `tiny`, on any device.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.config.from_file import load_config
from agentrl.config.loading import LoadedConfig
from agentrl.config.run_config import RunConfig
from agentrl.doctor.diagnosis import Diagnosis
from agentrl.envs.base import TextEnv, plays
from agentrl.protocols import StepResult
from agentrl.protocols.component_settings import TrainerSettingsOffers
from agentrl.settings.yaml_values import in_yaml

GOAL = 8
"""Numbers of an episode."""
_LEARNED, _IMPROVED = 0.55, 0.2
"""The mean reward that a sound installation reaches, and its least improvement."""


class Counting(TextEnv):
    """Count from 1, one number a message, which is all that the model sees. Each right number pays
    an eighth; a wrong one ends the episode.
    """

    system_prompt = "Count: 1 2 3 4 5 6 7 8"
    isolation = "inline"

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Begin before 1."""
        self.next = 1
        return "go on"

    def step(self, action: str) -> StepResult:
        """Take the next number."""
        right = action.strip() == str(self.next)
        self.next += 1
        done = not right or self.next > GOAL
        return "go on", right / GOAL, done, False, {"success": right and self.next > GOAL}


@plays(Counting)
def forgetful_player(env: Counting, rng: random.Random, skill: float = 0.6) -> str:
    """The next number with probability `skill`, else any. For warm starts."""
    return str(env.next if rng.random() < skill else rng.randint(1, GOAL))


def counting_config(config: RunConfig, folder: str) -> LoadedConfig:
    """A short run on counting with the config's engine, trainer and cluster, and a tiny model."""
    overrides = [f"run_dir={in_yaml(folder)}", f"seed={config.seed}"]
    overrides += [f"engine.name={config.engine.name}", f"trainer.name={config.trainer.name}"]
    overrides += [f"cluster={in_yaml(config.cluster.dump())}"]
    ranks = TrainerSettingsOffers.of(config.trainer.settings).world_size
    overrides += [f"trainer.world_size={ranks}"] if ranks else []
    overrides += [f"weights.transport={config.weights.transport}"]
    return load_config(Path(__file__).with_name("counting.yaml"), overrides)


def counting_diagnosis(rewards: Sequence[float], seconds: float) -> Diagnosis:
    """The diagnosis by the mean rewards of the steps."""
    first, last = fmean(rewards[:2]), fmean(rewards[-2:])
    words = f"reward {first:.2f} -> {last:.2f} in {len(rewards)} steps and {seconds:.0f} s"
    if last >= _LEARNED and last >= first + _IMPROVED:
        return Diagnosis("counting", words)
    remedy = (
        "engine, trainer or weights are broken, since this task is easy: try engine=local"
        " trainer=local; what then differs is at fault"
    )
    return Diagnosis("counting", words, remedy)
