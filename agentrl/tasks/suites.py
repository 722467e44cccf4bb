"""`SuiteConfig`: an evaluation suite, a fixed set of tasks that is played several times.

evaluation:
  suites:
    - {name: hard, env: {name: sokoban, options: {level: 4}}, tasks: 200, every: 20}
    - {name: gsm8k, env: qa, data: test.jsonl, reward: math, samples: 4}
"""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from agentrl.rollout.budget import OwnBudget
from agentrl.settings.base import NameText, Settings, check_temperature
from agentrl.settings.sampling import SamplingParams
from agentrl.tasks.env_config import OneEnv, RewardsField


class EvaluationSampling(Settings):
    """The sampling of the policy in an evaluation; settings left out are as in training."""

    temperature: Annotated[float | None, AfterValidator(check_temperature)] = Field(None, ge=0)
    """Sampling temperature; by default the run's (`rollout.sampling.temperature`), which measures
    the policy that is trained. verl validates greedily by default, and reports often do: write 0 to
    compare with them."""
    top_p: float | None = Field(None, gt=0, le=1)
    """As `rollout.sampling.top_p`, which it is by default."""
    top_k: int | None = Field(None, ge=0)
    """As `rollout.sampling.top_k`, which it is by default."""
    min_p: float | None = Field(None, ge=0, le=1)
    """As `rollout.sampling.min_p`, which it is by default."""

    def sampling(self, in_training: SamplingParams) -> SamplingParams:
        """The sampling of the policy in the evaluation."""
        own = {name: getattr(self, name) for name in EvaluationSampling.model_fields}
        return in_training.model_copy(
            update={name: value for name, value in own.items() if value is not None}
        )


class SuiteConfig(EvaluationSampling):
    """A fixed set of tasks to evaluate on: the same for every run, whatever its seed."""

    name: str = Field(pattern=r"^[\w-]+$")
    """Its name: results are the metrics `eval/NAME/...`."""
    env: Annotated[
        OneEnv | None, BeforeValidator(lambda raw: {"name": raw} if isinstance(raw, str) else raw)
    ] = None
    """The environment with its options; by default the run's."""
    data: NameText | None = None
    """Rows of tasks, as `tasks.data`: all of them may be played. By default, tasks are held-out
    seeds.
    """
    split: NameText = "test"
    """The split of `data`, if it is a folder or on the hub."""
    subset: NameText | None = None
    """As `tasks.subset`."""
    columns: dict[str, str] = Field(default_factory=dict)
    """As `tasks.columns`."""
    prompt: str | None = None
    """As `tasks.prompt`."""
    answer: str | None = None
    """As `tasks.answer`."""
    tasks: int = Field(200, gt=0)
    """The number of tasks."""
    samples: int = Field(1, gt=0)
    """The number of times that each is played; with more than one there are `pass@k` for k up to
    it."""
    every: int = Field(0, ge=0)
    """Also evaluate every so many steps; 0: only before and after."""
    reward: RewardsField | None = None
    """Its reward, by default the run's."""
    budget: OwnBudget = OwnBudget()
    """As `rollout.budget`, of which it may set some."""
    max_tokens: int | None = Field(None, gt=0)
    """As `rollout.sampling.max_tokens`, which it is by default."""

    @field_validator("name")
    @classmethod
    def _is_not_taken(cls, name: str) -> str:
        if name in ("agents", "envs", "held_out"):
            raise ValueError(f"{name} is the name of other metrics: choose another")
        return name

    @property
    def label(self) -> str:
        """The name of its environment among those of a run."""
        return f"suite/{self.name}"
