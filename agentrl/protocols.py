"""The seams. A plug-in is any object of one of these shapes; no base class is needed.

Each plug-in class that takes settings has a nested pydantic `Config` (strict), which the run's config validates
before anything starts. Dimension suffixes: N loss tokens of a micro-batch, flattened; G members of a group.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from agentrl.arrays import FloatArray, IntArray, ints, same_fields
from agentrl.batch import TrainBatch
from agentrl.trajectory import Completion, Group, Message, Score, Task, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


class Settings(BaseModel):
    """Base of every component's `Config`: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Isolation = Literal["inline", "thread", "process"]
"""Where an environment or a reward runs: on the event loop, in a thread, in a process."""
ResetResult = tuple[str, dict[str, Any]]
"""(observation, info)"""
StepResult = tuple[str, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info)"""


@runtime_checkable
class Env(Protocol):
    """A Gymnasium environment with text in and out. Methods may be sync or async.

    One instance plays one episode at a time; `reset` may be called again for the next. All randomness comes from
    `seed`. An environment never sees a token. Three attributes are read where they exist:

    - `system_prompt: str`, the system message of every episode;
    - `tools: Sequence[Mapping]`, JSON schemas of callable functions, passed to the chat template;
    - `isolation: "inline" | "thread" | "process"`: where it runs. Inline ones must answer in microseconds; a sync one
      that may block runs in a thread of its own, which is the default.

    `info["success"]`, where given, says whether the episode reached its goal; `info["answer"]`, at its end, what
    message would have, in a game of one (`check_env` tries it).

    Several agents may play in turns, in one environment. Its infos say so, and thus every transport carries it:

    - of a reset: `info["agents"]`, all their names; `info["agent"]`, who acts first and sees the observation; where
      they differ, `info["system_prompts"]` by name;
    - of a step: `info["agent"]`, who acts next and sees the observation, which is what is new since its own last
      action; `info["rewards"]`, by name, what each earned in this step, where others than the one who acted (whose
      the step's reward is) earned something. `info["success"]` may be by name.
    """

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> ResetResult | Awaitable[ResetResult]:
        """Start an episode; the same seed and options give the same episode."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Take the model's message, whole, as the action. A malformed one is answered by an observation."""
        ...

    def close(self) -> None | Awaitable[None]:
        """Give back what the environment holds. May be called at any time, more than once."""
        ...


ScriptedPlayer = Callable[[Env, Random], str | Awaitable[str]]
"""Looks at a live environment and says what it would do: the player of demonstrations.

It is given `env.unwrapped`, where there is such a thing: the environment without its wrappers.
"""


class SamplingParams(Settings):
    """How the policy is sampled: what a config says, and what each request carries."""

    max_tokens: int = Field(64, gt=0)
    """Longest answer of a turn, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it, in the engine and in the trainer; 0 is greedy."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, and are its last token; those that end a turn of the model are added to them."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One completion to sample. `id` is unique among live requests.

    `seed` makes sampling reproducible: the token at position i depends on the seed, i and the logits alone.
    A lower `priority` number is served first when the engine is full (the deadline step of the request's group).
    Requests of one `session` (an agent's conversation) come one after another, and extend each other: a router sends
    them where their prefix is cached. The first `known` tokens of the prompt are the last prompt of the session with
    its completion: an engine that has served that one need not look at them again, so that a late turn costs no more
    than an early one. 0 where the conversation begins, or its prompt is a new one.
    """

    id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    seed: int = 0
    priority: int = 0
    session: str = ""
    known: int = 0

    __eq__ = same_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", ints(self.prompt_ids))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: requests in the batch and those waiting for it, the share of the KV cache that live requests hold
    (0 to 1), and counts since the engine started. A preemption throws a running request's KV away to make room.
    """

    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    kv_use: float = 0.0
    preemptions: int = 0


class Engine(Protocol):
    """Samples tokens: token ids in, token ids out. An async context manager: entering loads, leaving frees all.

    Cancelling the task that awaits `generate` aborts the request and frees its place within one engine step.
    """

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled from; 0 are the weights it was started with."""
        ...

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the prompt does not fit into `max_context`, or the request is malformed.
            EngineDeadError: the engine is not running; no request to it will be answered.
        """
        ...

    async def interrupt(self) -> None:
        """End every live request at a token boundary: its `generate` returns what it has, finish reason "abort".

        When this returns no request is under way; one that had no token yet returns an empty completion. Every token
        that was sampled is returned to its caller, so that the turn can go on from there. New requests are welcome.
        """
        ...

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Replace all weights at a token boundary. Requests in flight go on under the new ones.

        Their KV cache is recomputed (unless `kv_on_update: keep` is set), so each later token's logprob
        equals a plain forward pass of the new weights over all tokens before it. No cached prefix of an older version
        is ever served to another request. When this returns, every token sampled from now on is stamped `version`.
        `weights` has Hugging Face names; tied weights may be absent.
        """
        ...

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        ...


@runtime_checkable
class SupportsProbe(Protocol):
    """An engine that lives elsewhere (another process, another machine), and can be asked for a sign of life."""

    async def probe(self) -> None:
        """Returns as soon as the engine answers; the caller says how long that may take.

        Raises:
            EngineDeadError: it is not running.
        """
        ...


@runtime_checkable
class SupportsStageWeights(Protocol):
    """An engine that looks at new weights before it takes them up: the first of two phases (`WeightPublisher`).

    When all engines have staged a version, it is committed on all of them by `Engine.update_weights`.
    """

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Fetch the weights and check whatever can be checked. What is served does not change, nor does it stop.

        Raises:
            WeightsError: they are damaged, or cannot be read from here.
            EngineError: they are not of this engine's model, or not newer than its own.
            EngineDeadError: the engine is not running.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What to show the model next. `ids` is the whole prompt, `new_ids` its part after the last turn's last token."""

    ids: IntArray
    new_ids: IntArray
    forked: bool

    __eq__ = same_fields


class Conversation(Protocol):
    """One agent's messages in an episode, and exact tokens, in step."""

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Append `messages` (system, user or tool) and return the prompt for the next assistant turn."""
        ...

    def answer(self, completion: Completion) -> str:
        """Append what the model sampled and return its text (without the stop token)."""
        ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        ...

    @property
    def shown(self) -> Sequence[Message]:
        """Those of them that the next prompt shows, with what is new then. It may not be changed."""
        ...

    def show(self, messages: Sequence[Message]) -> None:
        """Show these in place of those shown so far."""
        ...

    def size(self, messages: Sequence[Message]) -> int:
        """Tokens that `prompt(messages)` would have."""
        ...


class Renderer(Protocol):
    """Messages to tokens by the model's own chat template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        ...

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """A new, empty conversation."""
        ...


class Reward(Protocol):
    """Scores a trajectory. What it cannot score it raises `RewardError` for, or returns `Score.failed(...)`.

    A reward of any shape may be an async context manager, which the run enters and leaves. A plain function, sync or
    async, of a trajectory that returns a `Score` or a number is a reward too; its keyword-only parameters are its
    settings. Several rewards at once are a weighted sum (`agentrl/scoring/pipeline.py`). One that has a method
    `metrics() -> Mapping[str, float]` is asked by it, after each step, what its work has cost since the last one.
    """

    async def score(self, trajectory: Trajectory) -> Score:
        """The verdict on one trajectory."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Scores the trajectories of a group by comparing them. It is asked once, when the group is complete."""

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One verdict per trajectory, in their order. Fails as `Reward`, and as a whole."""
        ...


@runtime_checkable
class Rule(Protocol):
    """A reward that is a pure function of a part of the trajectory.

    `evaluate` runs in a process that is killed at the deadline `rollout.rules.deadline`, and verdicts are cached by
    content. A rule that always answers in microseconds says `isolation = "inline"` and runs on the event loop. The
    modules that it names in `imports`, where it has that, are imported before a deadline begins.
    """

    def content(self, trajectory: Trajectory) -> Any:
        """All that `evaluate` looks at, as something that pickles. Runs on the event loop.

        Raises:
            RewardError: it is not there (a task without a right answer).
        """
        ...

    def evaluate(self, content: Any) -> Score | float:
        """The verdict. The same content always gets the same."""
        ...


@dataclass(frozen=True, slots=True)
class LossTokens:
    """What a loss may look at: one entry per loss token of the micro-batch, so nothing masked can leak in.

    `old_logprobs_N`: the trainer's own, before the first update on this batch; `rollout_logprobs_N`: the engine's;
    `reference_logprobs_N`: of the model that the policy is kept near, where the algorithm asks for one, else the
    engine's; `segments_N`: the training sample a token belongs to, numbered over the batch.
    """

    old_logprobs_N: "Tensor"
    rollout_logprobs_N: "Tensor"
    reference_logprobs_N: "Tensor"
    advantages_N: "Tensor"
    segments_N: "Tensor"


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss_N`: one loss per token, differentiable; the trainer sums it and divides by the batch's normaliser.

    `metrics`: named per-token values of shape N (detached), reported as their mean over the batch's loss tokens.
    """

    loss_N: "Tensor"
    metrics: Mapping[str, "Tensor"]


class Loss(Protocol):
    """A pure function of the trainer's logprobs (a critic's values) and what stands beside them."""

    def __call__(self, logprobs_N: "Tensor", tokens: LossTokens, /) -> LossOutput:
        """The loss of each token."""
        ...


class Algorithm(Protocol):
    """An advantage and a loss.

    One whose attribute `uses_reference` is true gets a reference: a model as the run's was when it began, whose
    logprobs are `LossTokens.reference_logprobs_N`.
    """

    def advantages(self, group: Group) -> Sequence[float]:
        """One advantage per member of the group."""
        ...

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The loss of each token."""
        ...

    def normalizer(self, batch: TrainBatch) -> float:
        """What the summed token losses of a whole batch are divided by."""
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of each loss token: how much better it was than expected, and what a critic should have expected before it."""

    advantages_N: FloatArray
    returns_N: FloatArray


@runtime_checkable
class ActorCritic(Algorithm, Protocol):
    """An algorithm with a critic, which is trained on the batches that the policy is trained on."""

    def estimate(self, batch: TrainBatch, values_N: FloatArray) -> Estimate:
        """Of a batch whose `advantages_N` are what `advantages` has said of each member, and the critic's values."""
        ...

    def value_loss(self, values_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The critic's loss of each token: `advantages_N` are the returns, `rollout_logprobs_N` its values before."""
        ...


LatestCheckpoint = Callable[[], tuple[int, Path] | None]
"""The newest (steps done, folder of the checkpoint) of a run."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a trainer outlives its ranks: the keyword `recovery` that it is made with.

    `latest`: the run's newest checkpoint, if there is one: what `load` takes, and what is taken up after a death.
    `restarts`: how often ranks may be restarted without a step between. `deadline`: seconds for any one call; a trainer
    that misses it is not dead and not to be helped.
    """

    latest: LatestCheckpoint = lambda: None
    restarts: int = 8
    deadline: float = 3600.0


class Trainer(Protocol):
    """Owns weights and optimizer. An async context manager, as `Engine`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """Train on a batch, once through, and return its metrics (loss, grad_norm, lr, logprob gaps, ...)."""
        ...

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The weights now, by Hugging Face names; valid until the next `step`."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights (a Hugging Face folder with the tokenizer), optimizer and schedule into a new folder."""
        ...

    async def load(self, folder: Path) -> None:
        """Take up exactly where `save` left off.

        Raises:
            CheckpointError: the folder is missing or incomplete.
        """
        ...


@runtime_checkable
class SupportsPredict(Trainer, Protocol):
    """A trainer that can be asked without being trained: what a reference and a critic are made of."""

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """What the model says of each loss token, in the order of the batch, shape N.

        That is its logprob at the temperature of sampling; of a critic, the reward that is to be expected before it.
        """
        ...


class TaskSource(Protocol):
    """The tasks of one split of a run, by index: the same config gives the same tasks in every launch.

    The section `tasks` of a config names a class, which is called with its settings, the environment's name, the run's
    seed, the split ("train", "held-out", "demonstrations" or "corpus") and the environment's options.
    """

    def task(self, index: int) -> Task:
        """The task of this index."""
        ...


@runtime_checkable
class Curriculum(TaskSource, Protocol):
    """A task source that learns what became of its tasks, and may choose the next ones by it.

    Outcomes come with each batch, those of filtered groups first, each by task number. A resumed run replays them in
    that order from its ledger before it asks for a task.
    """

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """The members of this task's group earned these rewards. It is trained on, or was filtered."""
        ...


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush."""
        ...
