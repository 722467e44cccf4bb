"""The seams: the interfaces of plug-ins. Any object with one of these shapes is a plug-in, without
a base class.

Each plug-in class that takes settings has a nested pydantic `Config` (strict), which the run's
config validates before anything starts. Dimension suffixes: N loss tokens of a micro-batch,
flattened; G members of a group.
"""

import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from random import Random
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    Self,
    get_args,
    get_origin,
    runtime_checkable,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from agentrl.arrays import FloatArray, IntArray, ints, same_fields
from agentrl.batch import TrainBatch
from agentrl.settings.faults import DEEPEST
from agentrl.trajectory import Completion, Group, Message, Score, Task, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


LARGEST = 1e30
"""Largest number of a setting, and of a score. Beyond it, what is computed in float32 becomes
infinite or NaN.
"""
COLDEST = 1e-6
"""Lowest temperature above 0. Below it, logits that are divided by it become infinite."""


class Settings(BaseModel):
    """Base of every component's `Config`: frozen, and an unknown key is an error.

    Numbers are finite and not larger than `LARGEST`, also in mappings and lists. A field of which
    infinity is a sensible value says so: `Field(math.inf, allow_inf_nan=True)`. "No limit" is
    better written as `float | None`. In paths (`Path`, `PathText`), also in mappings and lists, `~`
    is the user's home folder.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # null, the default, would not be read back as the same setting
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _a_section_may_be_empty(cls, data: Any) -> Any:
        """A section without settings (`rollout:`, all of whose lines are comments) is as one that
        is left out.
        """
        if isinstance(data, Mapping):
            return {
                key: value
                for key, value in data.items()
                if value is not None or not cls._is_section(key)
            }
        return {} if data is None else data

    @classmethod
    def _is_section(cls, key: str) -> bool:
        """Whether a setting is a mapping of others, and cannot be null."""
        field = cls.model_fields.get(key)
        kind = None if field is None else get_origin(field.annotation) or field.annotation
        return isinstance(kind, type) and issubclass(kind, Settings | Mapping)

    @field_validator("*")
    @classmethod
    def _numbers_can_be_computed_with(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if field is not None and _is_free(field.annotation):
            for one in (
                value if isinstance(value, tuple) and field.annotation is not Any else [value]
            ):
                check_plain(one)
        if field is not None and not _may_be_infinite(field):
            check_numbers(value)
        return value

    @field_validator("*")
    @classmethod
    def _paths_may_begin_at_home(cls, value: Any) -> Any:
        return in_home(value)

    @model_validator(mode="after")
    def _defaults_can_be_computed_with(self) -> Self:
        for name, field in type(self).model_fields.items():
            if name not in self.model_fields_set and not _may_be_infinite(field):
                try:
                    check_numbers(getattr(self, name))
                except ValueError as error:
                    raise ValueError(f"the default of {name} will not do: {error}") from error
        return self


def _is_free(annotation: Any) -> bool:
    """Whether a setting of this type may hold values of any kind."""
    return annotation is Any or any(map(_is_free, get_args(annotation)))


def _may_be_infinite(field: FieldInfo) -> bool:
    return any(getattr(one, "allow_inf_nan", None) is True for one in field.metadata)


def in_home(value: Any) -> Any:
    """The value with `~` of its paths, also in mappings and lists, replaced by the user's home
    folder.
    """
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    if type(value) is dict:
        return {key: in_home(one) for key, one in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(in_home, value))
    return value


PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path as text: where something else may be written too, such as the name of a model on the hub.
"""


def check_temperature(temperature: float | None) -> float | None:
    """A sampling temperature that logits can be divided by, if there is one; 0 is greedy.

    Raises:
        ValueError: it is too low.
    """
    if temperature is not None and 0 < temperature < COLDEST:
        raise ValueError(
            f"logits cannot be divided by so little: write at least {COLDEST:g}, or 0 for greedy"
        )
    return temperature


def check_numbers(value: object) -> None:
    """Check all numbers in a value: a number, or a mapping or sequence with more of them.

    Raises:
        ValueError: one is not finite, or too large to compute with.
    """
    if isinstance(value, float):
        _check_finite(value)
        if abs(value) > LARGEST:
            raise ValueError(
                f"{value:g} is too large to compute with: write a number of at most {LARGEST:g}"
            )
    elif isinstance(value, Mapping):
        for one in value.values():
            check_numbers(one)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            check_numbers(one)


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(
            f"{value} is not a finite number: where there is no limit, leave the setting out, write"
            " null if it takes that, or a large number such as 1e9"
        )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{text!r:.80} has {half!r}, half of a surrogate pair, which is no character"
        ) from error


def check_plain(value: object, deepest: int = DEEPEST) -> None:
    """Check that a value means the same wherever it goes: in a YAML file, in JSON, in another
    process.

    Raises:
        ValueError: it, or a value in it, is not text, a finite number, true, false, null, a list or
            a mapping with texts as keys.
    """
    if deepest < 0:
        raise ValueError(
            f"more than {DEEPEST} levels of lists and mappings in each other: write less nesting"
        )
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        _check_finite(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{key!r:.80} ({type(key).__name__}) is a key: write text")
            _check_text(key)
            check_plain(one, deepest - 1)
    elif isinstance(value, list):
        for one in value:
            check_plain(one, deepest - 1)
    else:
        raise ValueError(
            f"{value!r:.80} is a {type(value).__name__}, which would come back from a file or a"
            " process as something else: write text, a number, true, false, null, a list or a"
            " mapping"
        )


@dataclass(frozen=True, slots=True)
class OwnerOnly:
    """Marks an option of an environment that can decide what code runs: `Annotated[str,
    OwnerOnly()]`.

    Clients of a served environment may not set it (`agentrl/hosting/client_options.py`).
    """


Isolation = Literal["inline", "thread", "process"]
"""Where an environment or a reward runs: on the event loop, in a thread, in a process."""
ResetResult = tuple[str, dict[str, Any]]
"""(observation, info)"""
StepResult = tuple[str, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info)"""


@runtime_checkable
class Env(Protocol):
    """A Gymnasium environment with text in and out. Methods may be sync or async.

    One instance plays one episode at a time; `reset` may be called again for the next. All
    randomness comes from `seed`. Environments never handle tokens. Five attributes are optional:

    - `system_prompt: str`: the system message of every episode;
    - `tools: Sequence[Mapping]`: JSON schemas of callable functions, passed to the chat template;
    - `isolation: "inline" | "thread" | "process"`: where it runs. An inline environment must answer
      in microseconds. By default a sync environment runs in its own thread and may block;
    - `calls_made: Sequence[MadeCall] | None`: the calls that the last step made, a new list for
      each step. Rewards that watch calls see these; else they read the messages as JSON;
    - `render_html() -> str`: draws the present state as HTML, after each reset and step. `agentrl
      view` shows it beside the messages, without scripts or requests: styles, SVG and `data:`
      images work.

    The optional `info["success"]` says whether the episode reached its goal. At the end of a game
    of one message, `info["answer"]` may give the message that would have reached it (`check_env`
    tries it). Without it, or if it is None, the verdict is left to the run's reward
    (`agentrl.trajectory.succeeded`): an episode with a score above 0 succeeded, unless a part of
    the reward says otherwise (`success_at`).

    A reset's `info["history"]` may give messages that stand before the observation, such as
    examples and earlier turns of a chat: a list of `{"role": ..., "content": ...}`
    (`agentrl.conversation.chats`). The model sees them and is not trained on them.

    In a multi-agent environment the agents take turns. Its infos name them, so that every transport
    carries the names:

    - of a reset: `info["agents"]`, the names of all agents; `info["agent"]`, the agent that acts
      first and sees the observation; `info["system_prompts"]` by name, if they differ;
    - of a step: `info["agent"]`, the agent that acts next and sees the observation, which tells
      what is new since that agent's last action. The step's reward belongs to the agent that acted;
      if others earned something too, `info["rewards"]` gives each agent's reward by name.
      `info["success"]` may be by name.
    """

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> ResetResult | Awaitable[ResetResult]:
        """Start an episode; the same seed and options give the same episode."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Act on the model's whole message. The answer to a malformed one is an observation, not an
        exception.

        It is called by position, so the parameter may have any name.
        """
        ...

    def close(self) -> None | Awaitable[None]:
        """Release the environment's resources. May be called at any time and more than once."""
        ...


ScriptedPlayer = Callable[[Env, Random], str | Awaitable[str]]
"""Looks at a live environment and returns an action, for example to play demonstrations.

It gets `env.unwrapped` if that exists: the environment without its wrappers.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """A point of a conversation at which an agent answers.

    `messages`: all that it has been shown so far, its own earlier answers among them; the last one
    is not its own. `answers`: texts that it could answer.
    """

    messages: Sequence[Message]
    answers: Sequence[str]


class Enumeration(Protocol):
    """What can happen in an environment with some options, enumerated: from the probabilities of a
    policy's answers follow exact numbers. `probabilities` has, for each of `questions`, that of
    each of its answers; the rest is that of all other messages.
    """

    @property
    def questions(self) -> Sequence[Question]:
        """All points at which the policy answers, in every conversation that can come to be."""
        ...

    def metrics(self, probabilities: Sequence[Sequence[float]]) -> Mapping[str, float]:
        """Exact numbers, by name. A run reports them as `exact/NAME`."""
        ...


@dataclass(frozen=True, slots=True)
class Credit:
    """The expected return from a turn on, before its answer, and by how much the answer raised it
    (undiscounted).
    """

    value: float
    advantage: float


@runtime_checkable
class EnumeratesCredit(Enumeration, Protocol):
    """An enumeration that also has the exact advantages of what was played, to compare the trained
    ones with.
    """

    def credit(
        self, probabilities: Sequence[Sequence[float]], trajectory: Trajectory
    ) -> Sequence[Credit] | None:
        """The credit of each turn of a trajectory; `None` if it is unknown."""
        ...


@runtime_checkable
class Enumerable(Env, Protocol):
    """An environment so small that it can be enumerated. Its runs have the metrics `exact/...`
    (docs/oracles.md).
    """

    def enumeration(self, options: Mapping[str, Any]) -> Enumeration:
        """What can happen with these options.

        Raises:
            ConfigError: with these options it cannot be enumerated; the message says why.
        """
        ...


class SamplingParams(Settings):
    """How the policy is sampled: set in the config, and part of each request."""

    max_tokens: int = Field(64, gt=0)
    """Longest answer of a turn, in tokens."""
    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(1.0, ge=0)
    """Logits are divided by it, in the engine and in the trainer's policy gradients, which are of
    the distribution that was sampled from; 0 is greedy. What others have said is imitated at
    temperature 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the fewest most likely tokens that have at least this probability together;
    1: from all.
    """
    top_k: int = Field(0, ge=0)
    """Sample only from so many of the most likely tokens; 0: from all. In training, `top_p` and
    `min_p` alone also leave at most 256 tokens, because the trainer needs those that each token was
    sampled from."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample only from tokens that are at least this times as likely as the most likely one; 0:
    from all.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, as its last token. The tokens that end the model's turns are
    always added.
    """
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, as soon as it contains one. The text stays in the answer."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens of the vocabulary may be left out."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def with_bounded_support(self) -> "SamplingParams":
        """The same with at most `MAX_SUPPORT` tokens to sample from, if it is truncated and has no
        `top_k`.
        """
        return (
            self.model_copy(update={"top_k": MAX_SUPPORT})
            if self.truncated and not self.top_k
            else self
        )


MAX_SUPPORT = 256
"""Most tokens to sample from in training, if `top_p` or `min_p` truncates the distribution and
`top_k` says nothing.
"""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What a completion must be: a JSON object, or a JSON value by this schema (JSON as text), up
    to its stop token.

    Only tokens that lead there are sampled, so the logprobs are of what is left of the model's
    distribution. A trainer does not know what that was, so such completions are not trained on.
    """

    schema: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One completion to sample. `id` is unique among live requests.

    `seed` makes sampling reproducible: the token at position i depends only on the seed, i and the
    logits. A full engine serves lower `priority` numbers first (the deadline step of the request's
    group).

    Requests of one `session` (an agent's conversation) come one after another, and each extends the
    one before; a router sends them to the engine that has cached their prefix. The first `known`
    tokens of the prompt are the session's previous prompt and completion. An engine that served
    that request need not process them again, so a late turn costs no more than an early one.
    `known` is 0 if the conversation begins or its prompt is new.

    The last `resumed` tokens of the prompt belong to the completion already: an interrupted request
    is resumed.

    With `keep_support`, the completion has the ids that each token was sampled from
    (`Completion.support`), for the trainer to compute its logprobs over the same ids ("Keep
    Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556). It takes `sampling.top_k`, which bounds their
    number.

    With `keep_experts`, an engine that can (`reports_experts`) keeps the experts that a mixture
    chose for each sampled token (`Completion.experts`). The others ignore it.

    With `format`, an engine that can constrains the completion. The others refuse the request.
    """

    id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    seed: int = 0
    priority: int = 0
    session: str = ""
    known: int = 0
    keep_support: bool = False
    keep_experts: bool = False
    resumed: int = 0
    format: AnswerFormat | None = None

    __eq__ = same_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", ints(self.prompt_ids))
        try:
            object.__setattr__(self, "seed", index(self.seed))
        except TypeError:
            raise TypeError(f"the seed of a request is an integer, got {self.seed!r}") from None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: requests in the batch and those waiting for it, the share of the KV cache that
    live requests hold (0 to 1), and counts since the engine started. A preemption discards a
    running request's KV cache to make room.
    """

    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    kv_use: float = 0.0
    preemptions: int = 0


class Engine(Protocol):
    """Samples tokens: token ids in, token ids out. An async context manager: entering it loads the
    model, leaving it frees everything.

    Cancelling the task that awaits `generate` aborts the request and frees its place within one
    engine step.
    """

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled from; 0 for the weights it
        started with.
        """
        ...

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        One whose tokens or logprobs no model can have sampled (NaN, -inf, above 0 by more than
        rounding) is a failure of the engine: the episode is played again, and never trained on.

        Raises:
            EngineError: the prompt does not fit into `max_context`, or the request is malformed.
            EngineDeadError: the engine is not running; no request to it will be answered.
        """
        ...

    async def interrupt(self) -> None:
        """End every live request at a token boundary: its `generate` returns the tokens so far,
        finish reason "abort".

        When this returns, no request is live. A request without a token yet returns an empty
        completion. Every sampled token is returned to its caller, so that the turn can continue
        from there. New requests are accepted.
        """
        ...

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Replace all weights at a token boundary. Requests in flight continue with the new ones.

        Their KV cache is recomputed (unless `kv_on_update: keep` is set), so each later token's
        logprob equals that of a plain forward pass of the new weights over all tokens before it. No
        cached prefix of an older version is ever served to another request. After this returns,
        every sampled token is stamped `version`. `weights` has Hugging Face names; tied weights may
        be absent.
        """
        ...

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        ...


@runtime_checkable
class SupportsProbe(Protocol):
    """An engine in another process or on another machine, whose health can be checked."""

    async def probe(self) -> None:
        """Return as soon as the engine answers; the caller sets the deadline.

        Raises:
            EngineDeadError: it is not running.
        """
        ...


@runtime_checkable
class SupportsStageWeights(Protocol):
    """An engine that checks new weights before it serves them: the first of two phases
    (`WeightPublisher`).

    When all engines have staged a version, `Engine.update_weights` commits it on each of them.
    """

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Fetch the weights and check whatever can be checked. The engine keeps serving its current
        weights.

        Raises:
            WeightsError: they are damaged, or cannot be read from here.
            EngineError: they are of another model, or not newer than the engine's own.
            EngineDeadError: the engine is not running.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Given tokens whose logprobs are wanted. `id` is unique among live requests.

    Wanted are those of `token_ids[start:]`, each after all the tokens before it, with logits
    divided by `temperature`, over the whole vocabulary. `start` is at least 1, because nothing
    predicts the first token.
    """

    id: str
    token_ids: IntArray
    start: int = 1
    temperature: float = 1.0

    __eq__ = same_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ints(self.token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The logprobs that a `ScoreRequest` asked for, shape `len(token_ids) - start`, all of one
    version of weights.
    """

    logprobs: FloatArray
    policy_version: int

    __eq__ = same_fields


@runtime_checkable
class SupportsScore(Protocol):
    """An engine that computes the logprobs of given tokens, as a teacher does.

    If its class attribute `scores_at_one_only` is true, it can do so only at temperature 1.
    """

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute logprobs. Weights that arrive meanwhile never mix: all are of the version that
        the result names.

        Raises:
            EngineError: the tokens do not fit into `max_context`, or the request is malformed.
            EngineDeadError: the engine is not running; no request to it will be answered.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The model's next prompt. `ids` is the whole prompt, `new_ids` its part after the last turn's
    last token.
    """

    ids: IntArray
    new_ids: IntArray
    forked: bool

    __eq__ = same_fields


class Conversation(Protocol):
    """One agent's messages in an episode, together with their exact tokens."""

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Append `messages` (system, user or tool) and return the prompt for the next assistant
        turn.
        """
        ...

    def answer(self, completion: Completion) -> str:
        """Append the model's completion and return its text (without the stop token)."""
        ...

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        ...

    @property
    def shown(self) -> Sequence[Message]:
        """The messages that the next prompt shows besides its new ones. The caller must not modify
        them.
        """
        ...

    def show(self, messages: Sequence[Message]) -> None:
        """Show `messages` instead of those shown so far."""
        ...

    def size(self, messages: Sequence[Message]) -> int:
        """The number of tokens that `prompt(messages)` would have."""
        ...


class Renderer(Protocol):
    """Renders messages as tokens by the model's own chat template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        ...

    def conversation(self, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """A new, empty conversation."""
        ...


class Reward(Protocol):
    """Scores a trajectory. If it cannot, it raises `RewardError` or returns `Score.failed(...)`.

    A reward of any shape may be an async context manager, which the run enters and leaves. A
    function of a trajectory, sync or async, that returns a `Score` or a number is a reward too; its
    keyword-only parameters are its settings. Several rewards are combined by a weighted sum
    (`agentrl/scoring/pipeline.py`). Three methods are optional:

    - `metrics() -> Mapping[str, float]`: called after each step, for the cost of the work since the
      last call;
    - `check_task(task) -> None`: raises `ConfigError` for a task that cannot be scored, such as one
      without a right answer. Called for each row of data before the run begins, on an instance that
      has not been entered;
    - `check_first_task(task) -> None`: the same for what takes long to see. Called for the first
      rows alone.
    """

    async def score(self, trajectory: Trajectory) -> Score:
        """The verdict on one trajectory."""
        ...


@runtime_checkable
class ScoresTurns(Reward, Protocol):
    """A reward that knows what single turns contribute while the episode still goes on
    (`staleness_rule: segment`).
    """

    def score_turns(self, trajectory: Trajectory) -> Sequence[float]:
        """The contribution of each turn so far: what `Score.turns` will say of these turns at the
        end.
        """
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Scores the trajectories of a group by comparing them. It is called once, when the group is
    complete.
    """

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """One verdict per trajectory, in their order. A failure, as in `Reward`, is one of the
        whole group.
        """
        ...


@runtime_checkable
class Rule(Protocol):
    """A reward that is a pure function of a part of the trajectory.

    `evaluate` runs in a process with limits (`rollout.rules`), and verdicts are cached by content.
    Content that uses up the CPU time or the memory gets the optional attribute `wrong` as its
    verdict, by default 0. A rule that always answers in microseconds may set `isolation = "inline"`
    to run on the event loop. The modules in its optional attribute `imports` are imported before
    the limits apply.
    """

    def content(self, trajectory: Trajectory) -> Any:
        """The whole input of `evaluate`, in a form that pickles. Runs on the event loop.

        Raises:
            RewardError: the input is missing (a task without a right answer).
        """
        ...

    def evaluate(self, content: Any) -> Score | float:
        """The verdict. The same content always gets the same verdict."""
        ...


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The inputs of a loss: one entry per loss token of the micro-batch, so no masked token can
    leak in.

    `old_logprobs_N`: the trainer's own, before the first update on this batch;
    `rollout_logprobs_N`: the engine's; `reference_logprobs_N`: the reference model's if the
    algorithm uses one, else the engine's; `segments_N`: the index of a token's training sample in
    the batch. `entropies_N`: the entropy of the policy before each token, in nats, over the ids
    that the token may have been sampled from; differentiable, and there only for a loss that
    `uses_entropy`.
    """

    old_logprobs_N: "Tensor"
    rollout_logprobs_N: "Tensor"
    reference_logprobs_N: "Tensor"
    advantages_N: "Tensor"
    segments_N: "Tensor"
    entropies_N: "Tensor | None" = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss_N`: one loss per token, differentiable; the trainer sums it and divides by the batch's
    normaliser.

    `metrics`: named per-token values of shape N (detached), reported as their mean over the batch's
    loss tokens.
    """

    loss_N: "Tensor"
    metrics: Mapping[str, "Tensor"]


class Loss(Protocol):
    """A pure function of the trainer's logprobs (or a critic's values) and the `LossTokens`.

    If it, or the algorithm whose method it is, has an attribute `uses_entropy` that is true, it
    gets `LossTokens.entropies_N`.
    """

    def __call__(self, logprobs_N: "Tensor", tokens: LossTokens, /) -> LossOutput:
        """The loss of each token."""
        ...


def uses_entropy(loss: Loss) -> bool:
    """Whether a loss, or the algorithm whose method it is, asks for entropies."""
    return bool(getattr(getattr(loss, "__self__", loss), "uses_entropy", False))


MemberAdvantage = float | Sequence[float]
"""The advantage of a trajectory: one number for all of its turns, or one for each turn."""


class Algorithm(Protocol):
    """An advantage and a loss.

    If its attribute `uses_reference` is true, it gets a reference: the model with which the run
    began, whose logprobs are `LossTokens.reference_logprobs_N`. If its attribute `compares_members`
    is true, a config with groups of a single member is refused. If `fixed_scale` is true, its
    advantages are labels or weights, and a config that normalises them is refused. If
    `beyond_rewards` names a setting, that adds to the advantages what no reward says, and a config
    that leaves out groups by their rewards is refused. If `credits_turns` is true, the turns of an
    episode have advantages of their own, which do not add up to 0 over a group. If
    `charges_rewards` is true, `prepared` takes costs off the rewards (`TrainBatch.charged`), so its
    batches know what their advantages come from.
    """

    def advantages(self, group: Group) -> Sequence[MemberAdvantage]:
        """For each member of the group one advantage, or one for each of its turns
        (`Group.turn_rewards_G`).
        """
        ...

    def loss(self, logprobs_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The loss of each token."""
        ...

    def normalizer(self, batch: TrainBatch) -> float:
        """The divisor of the summed token losses of a whole batch."""
        ...


@runtime_checkable
class PreparesBatch(Algorithm, Protocol):
    """An algorithm that changes a whole batch before it is trained on, such as the weights of its
    tokens.
    """

    def prepared(self, batch: TrainBatch) -> TrainBatch:
        """The batch to train on, and to ask the critic about. It has the reference's logprobs, if
        there is one.
        """
        ...


@runtime_checkable
class NormalizesAdvantages(Algorithm, Protocol):
    """An algorithm whose advantages depend on the whole batch."""

    def normalized(
        self, advantages: Sequence[Sequence[MemberAdvantage]]
    ) -> Sequence[Sequence[MemberAdvantage]]:
        """The advantages to train with, from those of each group of a batch."""
        ...


@runtime_checkable
class MeasuresSpread(Algorithm, Protocol):
    """An algorithm that compares the members of a group, and says how much they differ in what it
    compares.
    """

    def spread(self, group: Group) -> float:
        """The mean square of the group's advantages before they are divided by anything; 0 only if
        all are 0.
        """
        ...


@runtime_checkable
class LearnsFromBatches(Algorithm, Protocol):
    """An algorithm that remembers something of earlier batches, such as a running baseline.

    What it remembers is among a step's metrics, from which a resumed run restores it.
    """

    def restore(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Remember what `learned` returned in earlier steps; `rows` are the run's metrics so far."""
        ...

    def learned(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Learn from the groups of a step that has just been trained on, and return all that is to
        be remembered.

        Each is a group of one agent, with the scores that its advantages were computed from.
        """
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """For each loss token, its advantage, and the return that the critic should have predicted
    before it.

    `weights_N`: how much the critic learns from each token. The sum of its weighted losses is
    divided by the number of all loss tokens.
    """

    advantages_N: FloatArray
    returns_N: FloatArray
    weights_N: FloatArray


@runtime_checkable
class ActorCritic(Algorithm, Protocol):
    """An algorithm with a critic, which is trained on the same batches as the policy, or on earlier
    ones too.

    If its class attribute `values_answers` is true, the critic is also asked after each answer. The
    batch of `estimate` then has one more loss token after the last one of each turn, for the value
    before it (`agentrl/estimation/value_points.py`), and the weight 0 for tokens that the policy
    does not learn from.
    """

    @property
    def bootstraps(self) -> bool:
        """Whether `estimate` needs the critic's values after truncated episodes."""
        ...

    def estimate(self, batch: TrainBatch, values_N: FloatArray, ends_M: FloatArray) -> Estimate:
        """Estimate from a batch's rewards, the critic's values before its loss tokens, and those
        after its samples.

        `ends_M`: what the critic expects after the last token of a truncated trajectory's last
        sample, where the next turn would have begun; 0 for other samples, and for all if it does
        not bootstrap.
        """
        ...

    def value_loss(self, values_N: "Tensor", tokens: LossTokens) -> LossOutput:
        """The critic's loss of each token: `advantages_N` are the returns, `rollout_logprobs_N` its
        old values.
        """
        ...


LatestCheckpoint = Callable[[], tuple[int, Path] | None]
"""Returns (steps done, folder) of a run's newest checkpoint, or `None`."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a trainer recovers when its ranks die: its keyword argument `recovery`.

    `latest` returns the run's newest checkpoint, if any; restarted ranks load it, as `load` does.
    `restarts`: how often in a row ranks may be restarted without a step or an answer between.
    `deadline`: seconds per call; by default the trainer allows more for more tokens. A call that
    takes longer ends the run: its ranks are alive, so a restart would not help. `start_seconds`:
    how long the ranks may take to load their model, which then ends the run too.
    """

    latest: LatestCheckpoint = lambda: None
    restarts: int = 8
    deadline: float | None = None
    start_seconds: float = 1800.0


class Savable(Protocol):
    """State to save in a checkpoint: a trainer, or everything that a run trains."""

    async def save(self, folder: Path) -> None:
        """Write all state that training continues from into a new folder."""
        ...


@runtime_checkable
class SavesInBackground(Savable, Protocol):
    """State that is copied first, and written while it goes on to change."""

    async def begin_save(self, folder: Path) -> None:
        """Copy all state that training continues from, and begin to write it into a new folder."""
        ...

    async def saved(self) -> None:
        """Wait until what `begin_save` began is written."""
        ...


async def begin_save(state: Savable, folder: Path) -> None:
    """Begin to save a state, or save it if it cannot be written in the background."""
    if isinstance(state, SavesInBackground):
        await state.begin_save(folder)
    else:
        await state.save(folder)


async def saved(state: Savable) -> None:
    """Wait until what `begin_save` began is written."""
    if isinstance(state, SavesInBackground):
        await state.saved()


class Trainer(Protocol):
    """Owns weights and optimizer. An async context manager, as `Engine`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def step(self, batch: TrainBatch, loss: Loss, normalizer: float) -> Mapping[str, float]:
        """Train for one pass over a batch, and return its metrics (loss, grad_norm, lr, logprob
        gaps, ...).
        """
        ...

    async def weights(self) -> Mapping[str, "Tensor"]:
        """The current weights, by Hugging Face names; valid until the next `step`."""
        ...

    async def save(self, folder: Path) -> None:
        """Write weights (a Hugging Face folder with the tokenizer), optimizer and schedule into a
        new folder.
        """
        ...

    async def load(self, folder: Path) -> None:
        """Restore exactly the state that `save` wrote.

        Raises:
            CheckpointError: the folder is missing or incomplete.
        """
        ...


@runtime_checkable
class SupportsPredict(Trainer, Protocol):
    """A trainer whose model can be evaluated without training, as references and critics need."""

    async def predict(self, batch: TrainBatch) -> FloatArray:
        """The model's prediction for each loss token, in the order of the batch, shape N.

        It is the token's logprob at the sampling temperature; a critic predicts the expected return
        before the token.
        """
        ...


@runtime_checkable
class SupportsTokenLogprobs(Trainer, Protocol):
    """A trainer that keeps what it computed for each token of its last step."""

    async def token_logprobs(self) -> FloatArray | None:
        """What it computed for the loss tokens of its last step, in the order of the batch, shape
        (3, N); else None.

        The first row has the logprobs before the step's first update, the second those at the
        update of the token's minibatch: exp(second - first) is the ratio that the loss saw. The
        third has the policy's entropies before the tokens, at that update, for a loss that
        `uses_entropy`; else NaN.
        """
        ...


@runtime_checkable
class SchedulesLearningRate(Protocol):
    """Settings of a trainer whose learning rate follows a schedule."""

    lr: float
    warmup_steps: int
    schedule: str

    def learning_rate(self, step: int, total_steps: int) -> float:
        """The rate of step `step`, counted from 0 in calls of `Trainer.step`, of so many."""
        ...


class TaskSource(Protocol):
    """The tasks of one split of a run, by index: the same config gives the same tasks in every
    launch.

    The section `tasks` of a config names a class, which is called with its settings, the
    environment's name, the run's seed, the split ("train", "held-out", "demonstrations" or
    "corpus") and the environment's options.
    """

    def task(self, index: int) -> Task:
        """The task of this index."""
        ...


@runtime_checkable
class FiniteTasks(TaskSource, Protocol):
    """A task source with so many different tasks. `task` goes on after the last, with the same ones
    in another order.

    `fingerprint` changes with the tasks: a run is not resumed on others than it began with.
    """

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class Curriculum(TaskSource, Protocol):
    """A task source that observes the outcomes of its tasks, and may choose the next tasks by them.

    Outcomes come with each batch: first those of filtered groups, then those of trained ones, each
    by task number. A resumed run replays them in that order from its ledger before it asks for a
    task. A resumed run equals one that was not stopped, if what `task` chooses depends only on the
    index, the seed and these outcomes. If it has a method `metrics() -> Mapping[str, float]`, the
    run calls it after each step.
    """

    def observe(self, index: int, task: Task, rewards_G: Sequence[float]) -> None:
        """The members of this task's group earned these rewards. The group is trained on, or was
        filtered.
        """
        ...


class EnvLimits(Protocol):
    """What an environment of a mixture has of its own."""

    @property
    def group_size(self) -> int:
        """Members of its groups."""
        ...

    @property
    def max_failed_tasks(self) -> int:
        """How many of its tasks may fail permanently."""
        ...


@runtime_checkable
class MixesEnvironments(TaskSource, Protocol):
    """A task source of several environments, which keeps their shares of what is trained on."""

    def __getitem__(self, env: str, /) -> EnvLimits: ...

    def trained(self, groups: Iterable[Group]) -> None:
        """These groups are trained on."""
        ...

    def lost(self, task: Task) -> None:
        """The group of this task will not be trained on."""
        ...

    def give_up(self, env: str) -> bool:
        """Give an environment no more tasks; returns whether another is left."""
        ...


HowEnded = Literal["completed", "stopped", "failed"]
"""How a run ended: its work is done; a signal stopped it; an error ended it."""


@dataclass(frozen=True, slots=True)
class EpisodeSample:
    """An episode as a row of a tracker's table."""

    episode: str
    task: str
    status: str
    score: float | None
    """None if the reward only compares the members of a group."""
    success: bool | None
    """None if nothing tells."""
    conversation: str
    """Its messages, of which a long one lacks its middle."""


class Tracker(Protocol):
    """Receives the metrics of a run, in a thread of its own. What it raises ends no run.

    It may also have the methods of `SupportsSamples` and `SupportsEnding`.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step. Evaluations may come late: after those of later steps."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


@runtime_checkable
class SupportsSamples(Protocol):
    """A tracker that also receives some episodes (`observe.tracked_episodes`)."""

    def log_samples(self, name: str, step: int, samples: Sequence[EpisodeSample]) -> None:
        """Record episodes of `name`: those trained on ("train"), or of the evaluation of this name."""
        ...


@runtime_checkable
class SupportsEnding(Protocol):
    """A tracker that tells runs that have failed from those that have not: this is called instead
    of `close`.
    """

    def end(self, how: HowEnded, why: str) -> None:
        """Record how and why the run has ended, and flush."""
        ...
