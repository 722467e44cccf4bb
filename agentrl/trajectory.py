"""The values of a rollout: frozen, typed, and complete from the start.

Each stage takes values and returns new ones; no field starts as `None` to be filled in later. Times
are seconds of the running event loop's clock. Dimension suffixes: G members of a group.
"""

import copy
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic_core import from_json

from agentrl.errors import CompletionError, ConfigError, Layer, OutageError, RolloutError
from agentrl.tokens.arrays import (
    FloatArray,
    IntArray,
    Ragged,
    constant,
    floats,
    ints,
    mask,
    same_fields,
    scale_of,
    settled,
)
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.expert_choices import ExpertChoices
from agentrl.tokens.placed_images import PlacedImage, check_placed
from agentrl.tokens.sealed_turns import Seal, SealedMessages, SealedTurns, TurnColumns

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "abort"]
"""The reason why an engine ended a completion: a stop token (which is its last token), the length
limit, or an abort.
"""


def unshared(value: Any, what: str, *, keep_handles: bool = False) -> Any:
    """A copy of options, an info or the arguments of a call that shares nothing changeable with the
    original.

    Code of users gets such copies, so that what it does with one is seen nowhere else. Mappings
    become dicts, and a list that stands in two places becomes two, as where the copy is sent to
    another process. `what` is for messages. `keep_handles`: what cannot be copied, such as a lock,
    is handed on as it is.

    Raises:
        ConfigError: it holds something that cannot be copied, or itself.
    """
    try:
        return _copy_value(value, keep_handles)
    except RecursionError as error:
        raise ConfigError(
            f"{what} are nested too deeply, or hold themselves: write a plain tree"
        ) from error
    except _NoCopyError as error:
        raise ConfigError(
            f"{what} hold {error}, which cannot be copied, and each episode and each reward gets a"
            " copy of its own: write text, numbers, lists and dicts"
        ) from error


class _NoCopyError(Exception):
    """A value that cannot be copied: its text says which, and why."""


def _copy_value(value: Any, keep_handles: bool) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    if kind is dict or isinstance(value, Mapping):
        return {key: _copy_value(one, keep_handles) for key, one in value.items()}
    if kind is list:
        return [_copy_value(one, keep_handles) for one in value]
    if kind is tuple:
        return tuple([_copy_value(one, keep_handles) for one in value])
    try:
        return copy.deepcopy(value)
    except Exception as error:  # raised by the value's own code
        if keep_handles:
            return value
        raise _NoCopyError(f"{value!r:.80} ({kind.__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: which environment, which seed, which options. The options become a copy that
    only this task has.

    `Task(env="frozen_lake", seed=17, options={"size": 4}, id="train-000003")` is the fourth
    training task of a run.

    Raises:
        ConfigError: the options cannot be copied.
    """

    env: str
    """The environment's name in the run."""
    seed: int
    """The seed of the environment's reset."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the environment's reset."""
    id: str = ""
    """A name that is unique in the run."""

    def __post_init__(self) -> None:
        named = f"task {self.id!r}" if self.id else "the task"
        object.__setattr__(self, "options", unshared(self.options, f"the options of {named}"))


NO_CALLS = "<tool_call>\n[]\n</tool_call>"
"""Ends an answer in the canonical form that holds no calls though it looks as if it did."""
_TAG = re.compile(r"<tool_call((?: quoted)*)>")
_QUOTED_TAG = re.compile(r"<tool_call((?: quoted)*) quoted>")
_LAST_NOTE = re.compile(r'<tool_call>\n(?:\[\]|\{"unreadable": [^\n]*\})\n</tool_call>\Z')


def unreadable(why: str) -> str:
    """The canonical form of a call that cannot be read.

    Args:
        why: the explanation that the model gets
    """
    return f"<tool_call>\n{json.dumps({'unreadable': why})}\n</tool_call>"


def quoted(text: str) -> str:
    """A text that is no call, as it stands before calls in the canonical form: its tags are marked
    as quoted.
    """
    return _TAG.sub(r"<tool_call\1 quoted>", text)


def unquoted(text: str) -> str:
    """The text that `quoted` was given."""
    return _QUOTED_TAG.sub(r"<tool_call\1>", text)


_ENCLOSING_LEVELS = 16
"""Levels of JSON around a call in a message. pydantic's reader takes 200 in all."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it; neither its name nor its arguments are checked yet. `id`: if
    it has one.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def render(self) -> str:
        """The call in the canonical form, that of the Hermes and Qwen chat templates, whatever the
        model's own is.
        """
        body = json.dumps(
            {"name": self.name, "arguments": dict(self.arguments)},
            ensure_ascii=False,
            allow_nan=False,
        )
        return f"<tool_call>\n{body}\n</tool_call>"

    @property
    def is_plain(self) -> bool:
        """True if every reader of JSON can read it, also inside a message.

        A model may write infinite numbers, halves of surrogate pairs, and deep nesting, which
        readers refuse.
        """
        try:
            written = json.dumps([self.name, dict(self.arguments)], allow_nan=False)
            from_json(f"{'[' * _ENCLOSING_LEVELS}{written}{']' * _ENCLOSING_LEVELS}")
        except (RecursionError, TypeError, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call in a message, as the environment took it. `call` is None if it could not be read; one
    that was `refused` was read, and answered by an error. `seconds`: how long the environment
    worked on it; None if it does not say.
    """

    call: ToolCall | None
    refused: bool = False
    seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation, as text.

    The `content` of an answer is what its environment gets: its calls stand there in the canonical
    form, and so does what cannot be read as a call; its reasoning does not. If the renderer tells
    them apart, they are in `reasoning` (of so many tokens) and `tool_calls` too. A tool's result
    names the call that it answers (`tool_call_id`, `name`).

    `given`: it came with the task, as an example or an earlier turn. An answer that was given is
    shown to the model as its own, and was not sampled.

    `images` stand before the content.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning_tokens: int = 0
    given: bool = False
    images: tuple[EncodedImage, ...] = ()

    @property
    def is_answer(self) -> bool:
        """True if the model said it in this episode."""
        return self.role == "assistant" and not self.given

    def unshared(self) -> "Message":
        """The same, with copies of its calls' arguments."""
        if not self.tool_calls:
            return self
        calls = [
            replace(one, arguments=unshared(one.arguments, "the arguments of a call"))
            for one in self.tool_calls
        ]
        return replace(self, tool_calls=tuple(calls))

    @property
    def described(self) -> str:
        """The content for readers of text alone: its pictures are named."""
        return "\n".join(filter(None, (*(image.described for image in self.images), self.content)))

    @property
    def said(self) -> str:
        """The content without its calls, as the model wrote it."""
        if self.tool_calls:
            calls = "\n".join(call.render() for call in self.tool_calls)
            text = self.content.removesuffix(calls).removesuffix("\n")
            if text.endswith(NO_CALLS):
                text = text.removesuffix(NO_CALLS).removesuffix("\n")
            return unquoted(text)
        if _LAST_NOTE.search(self.content) is None:
            return self.content
        return unquoted(self.content[: self.content.index("<tool_call>")].removesuffix("\n"))


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The T tokens that the engine sampled, the stop token included. The first three fields become
    immutable arrays.
    """

    token_ids: IntArray
    """[T]"""
    logprobs: FloatArray
    """[T] Logprobs of the distribution that was sampled from (temperature and truncation applied),
    in nats."""
    policy_versions: IntArray
    """[T] The version of the weights, stamped by the engine when it samples each token."""
    finish_reason: FinishReason
    support: Ragged | None = None
    """[T] The ids that `top_k`, `top_p` and `min_p` left to sample each token from, in any order.
    It is kept where a request asks for it (`GenerateRequest.keep_support`). Without it, or where a
    row is empty, every token of the vocabulary could be sampled."""
    experts: ExpertChoices | None = None
    """The experts that the model chose for the tokens of the prompt and the completion, as far as
    the engine computed them for this request: not for the last token of all. They are kept where a
    request asks for them (`GenerateRequest.keep_experts`)."""

    __eq__ = same_fields

    def __post_init__(self) -> None:
        kind = np.asarray(self.token_ids).dtype.kind
        if kind not in "iu" and len(self.token_ids):
            raise CompletionError(
                "the tokens of a completion are ids, which are integers, got"
                f" {self.token_ids!r:.80}"
            )
        object.__setattr__(self, "token_ids", ints(self.token_ids))
        object.__setattr__(self, "logprobs", floats(self.logprobs))
        object.__setattr__(self, "policy_versions", ints(self.policy_versions))
        if not len(self.token_ids) == len(self.logprobs) == len(self.policy_versions):
            raise CompletionError(
                "a completion needs one logprob and one version per token, got"
                f" {len(self.token_ids)} tokens, {len(self.logprobs)} logprobs,"
                f" {len(self.policy_versions)} versions"
            )
        if self.support is not None:
            _check_support(self.token_ids, self.support)

    def without_experts(self) -> "Completion":
        """The same, without the experts that were chosen."""
        return self if self.experts is None else replace(self, experts=None)

    @property
    def support_of_each(self) -> Ragged:
        """One row for each token: the ids it was sampled from, or an empty row for the whole
        vocabulary.
        """
        return Ragged.empty(len(self.token_ids)) if self.support is None else self.support


def _check_support(token_ids: IntArray, support: Ragged) -> None:
    if len(support) != len(token_ids):
        raise ValueError(
            f"a completion of {len(token_ids)} tokens needs as many rows of support, got"
            f" {len(support)}"
        )
    # A token is found if some value of its row is its id.
    rows = support.row_of_value()
    found = np.zeros(len(token_ids), np.bool_)
    found[rows[support.values == token_ids[rows]]] = True
    outside = np.flatnonzero(~found & (support.lengths > 0))
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"token {at} of a completion, {token_ids[at]}, is outside of what it was sampled from"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One exchange: the new part of the prompt, the model's answer, and the environment's response
    to it.

    Example: three turns, with prompts p, answers a and the environment's replies e. The second
    prompt extends the first turn token for token; the third could not, so it has forked:

        what the engine saw          prompt_ids    completion
        p p                          p p           a a
        p p a a e e                  e e           a
        p p e e (another rendering)  p p e e       a a

    The first two turns become one training sample, `p p a a e e a`, and the third starts another.
    """

    prompt_ids: IntArray
    """The tokens after the last token of the turn before; if `forked`, the whole prompt."""
    completion: Completion
    """The model's answer."""
    reward: float
    """The environment's reward for it."""
    info: Mapping[str, Any]
    """The environment's info of the step."""
    forked: bool = False
    """The prompt could not extend the turn before it token for token."""
    generate_seconds: float = 0.0
    """Seconds that the model took to answer."""
    env_seconds: float = 0.0
    """Seconds that the environment took to respond."""
    state: str = ""
    """The name of the environment's state that the turn answers: `info["state_key"]` of the step
    before (or of the reset), or else a hash of the observation. Turns of one task with the same
    name can be compared with each other."""
    asked: float = 0.0
    """The time of the request to the model, in seconds of the loop's clock."""
    picture: str = ""
    """The environment's own picture of that state, as HTML; "" for none."""
    calls: tuple[MadeCall, ...] | None = None
    """The calls that the environment made of the answer, in whatever syntax; None if it does not
    say."""
    trained: bool = True
    """Its tokens carry loss; they do not in a summary that is masked
    (`agentrl/conversation/context.py`)."""
    images: tuple[PlacedImage, ...] = ()
    """The pictures in `prompt_ids`."""

    __eq__ = same_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", ints(self.prompt_ids))
        check_placed(self.images, len(self.prompt_ids), "a turn's prompt")


@dataclass(frozen=True, slots=True)
class Terminated:
    """The environment ended the episode."""

    name: ClassVar[str] = "terminated"


@dataclass(frozen=True, slots=True)
class Truncated:
    """A limit cut the episode: the environment's own ("env"), the context ("context"), or one of
    `rollout.budget` ("turns", "tokens", "seconds").

    An episode that goes on, of which a part is trained on already (`staleness_rule: segment`), is
    cut by "segment".
    """

    limit: str
    name: ClassVar[str] = "truncated"


@dataclass(frozen=True, slots=True)
class Failed:
    """The episode failed. A failure is never turned into a reward."""

    layer: Layer
    """The part that is at fault."""
    error: str
    outage: bool = False
    """Its server could not be reached."""
    final: bool = False
    """To play it again would only repeat the failure."""
    name: ClassVar[str] = "failed"

    @staticmethod
    def by(error: RolloutError) -> "Failed":
        """The failure of an episode that this error ended."""
        return Failed(error.layer, str(error), isinstance(error, OutageError), error.final)


Status = Terminated | Truncated | Failed
SEGMENT = Truncated("segment")
"""The status of a part of an episode that goes on."""


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The place where a branch has left its parent, another episode of its group
    (`rollout.branches`). The turns before it are those of the parent.
    """

    parent: str
    """The id of the parent."""
    turn: int
    """The number of the branch's first own turn, which answers the same prompt as the parent's."""
    share: float
    """Its share of the tree: 1 over the number of all episodes that the tree was to have. Branches
    that were not played, as the episode was over by then, count as this one."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode from the view of one agent. Unless its status is `SEGMENT`, it is over."""

    id: str
    """The episode's. With several agents, each trained agent has its own trajectory under that
    id."""
    task: Task
    turns: Sequence[Turn]
    """The conversation as exact tokens."""
    status: Status
    """The way it ended."""
    messages: Sequence[Message] = ()
    """The conversation as text."""
    seconds: float = 0.0
    """Seconds that the episode ran."""
    agent: str = ""
    """The agent's name, with several agents."""
    head_start: float = 0.0
    """The reward that the agent received before its first turn: for actions of others, or for
    answers that were given with the task."""
    tail_ids: IntArray = field(default_factory=lambda: ints(()), compare=False)
    """The tokens of a truncated episode that follow its last turn: what the model would have
    answered next."""
    trained_turns: int = 0
    """Number of turns that are trained on elsewhere: before, in segments, or with the parent of a
    branch. Here they are only context."""
    opponent: int | None = None
    """The version of the policy that played the other agents, where that was an earlier one
    (self-play)."""
    dropped: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Answers that were sampled in the episode and are in no turn, by reason: their number, and
    that of their tokens (`agentrl/gateway`)."""
    started: float = 0.0
    """The beginning of the episode, in seconds of the loop's clock."""
    picture: str = ""
    """The environment's own picture of its last state (`Turn.picture`)."""
    begun: str = field(default="", compare=False)
    """A digest of what the environment showed at the beginning, to all agents; "" if unknown (see
    `beginning`)."""
    branch: BranchPoint | None = None
    """The place where it has left another episode; None for one that was played from its
    beginning."""
    tail_images: tuple[PlacedImage, ...] = field(default=(), compare=False)
    """The pictures in `tail_ids`."""

    @property
    def beginning(self) -> str:
        """A digest of what the episode began with, equal in all episodes of a task; "" if it is
        unknown.
        """
        if self.begun or self.agent or not self.turns:
            return self.begun
        # The first prompt of a single agent has everything that the environment showed.
        if isinstance(self.turns, SealedTurns):
            columns = self.turns.columns
            shown = columns.tokens_T[: columns.shown_K[0]]
            images = self.turns[0].images if columns.has_images else ()
        else:
            shown, images = self.turns[0].prompt_ids, self.turns[0].images
        named = repr([image.key for image in images]).encode() if images else b""
        return blake2b(shown.tobytes() + named, digest_size=8).hexdigest()

    def unshared(self) -> "Trajectory":
        """A copy for code that may change it: its options, infos and calls are copies. The experts,
        which such code does not need, are left out.

        Raises:
            ConfigError: one of them cannot be copied.
        """
        own, dropped = replace(self.task), dict(self.dropped)
        if isinstance(self.turns, SealedTurns) and isinstance(self.messages, SealedMessages):
            seal = Seal(self.turns.seal.pickled)
            sealed, said = self.turns.unshared(seal), self.messages.unshared(seal)
            return replace(self, task=own, turns=sealed, messages=said, dropped=dropped)
        turns = [
            replace(
                turn,
                info=unshared(turn.info, "the info of a turn"),
                completion=turn.completion.without_experts(),
            )
            for turn in self.turns
        ]
        messages = tuple(message.unshared() for message in self.messages)
        return replace(self, task=own, turns=tuple(turns), messages=messages, dropped=dropped)

    def sealed(self) -> "Trajectory":
        """The same, with turns and messages as arrays and bytes until one is read
        (`agentrl/tokens/sealed_turns.py`).
        """
        columns = columns_of(self.turns)
        rest = [_RestOfTurn.of(turn) for turn in self.turns]
        seal = Seal(pickle.dumps((rest, tuple(self.messages)), pickle.HIGHEST_PROTOCOL))
        turns = SealedTurns(seal, columns, _rebuild_turns)
        messages = SealedMessages[Message](seal, len(self.messages))
        return replace(self, turns=turns, messages=messages)

    @property
    def trainable(self) -> bool:
        """True if the episode can be trained on: terminated or truncated, with a turn."""
        return isinstance(self.status, Terminated | Truncated) and bool(self.turns)

    @property
    def env_return(self) -> float:
        """The head start plus the undiscounted sum of the environment's rewards over all turns."""
        rewards = self.turn_rewards
        return settled(self.head_start + sum(rewards), scale_of((self.head_start, *rewards)))

    @property
    def turn_rewards(self) -> Sequence[float]:
        """The environment's reward for each turn."""
        if isinstance(self.turns, SealedTurns):
            rewards: list[float] = self.turns.columns.rewards_K.tolist()
            return rewards
        return [turn.reward for turn in self.turns]

    @property
    def success(self) -> bool | None:
        """The environment's verdict: `info["success"]` of the last turn. `None` if it gives none:
        ask `succeeded`.
        """
        if isinstance(self.turns, SealedTurns):
            return self.turns.columns.success
        success = self.turns[-1].info.get("success") if self.turns else None
        return None if success is None else bool(success)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return self._sampled_from(0)

    @property
    def num_new_tokens(self) -> int:
        """Those of them that are trained on here."""
        return self._sampled_from(self.trained_turns)

    @property
    def num_played_tokens(self) -> int:
        """Sampled tokens of the turns that the episode itself has played: without those of the
        episode that it has left (`branch`), so that a sum over episodes counts each once.
        """
        return self._sampled_from(0 if self.branch is None else self.branch.turn)

    def _sampled_from(self, turn: int) -> int:
        if isinstance(self.turns, SealedTurns):
            return int(self.turns.columns.sampled_K[turn:].sum())
        return sum(len(one.completion.token_ids) for one in self.turns[turn:])

    @property
    def has_new_turns(self) -> bool:
        """True if there are `new_turns`."""
        return len(self.turns) > self.trained_turns

    @property
    def new_turns(self) -> Sequence[Turn]:
        """The turns that are trained on here."""
        return self.turns[self.trained_turns :]

    @property
    def new_versions(self) -> IntArray:
        """The policy version of each sampled token of the new turns."""
        if isinstance(self.turns, SealedTurns):
            return self.turns.columns.versions_from(self.trained_turns)
        stamps = [turn.completion.policy_versions for turn in self.new_turns]
        return np.concatenate([ints(()), *stamps])

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the tokens of the new turns; `None` without tokens."""
        versions = self.new_versions
        return int(versions.min()) if len(versions) else None


def columns_of(turns: Sequence[Turn]) -> TurnColumns:
    """The numbers of turns, end to end."""
    if isinstance(turns, SealedTurns):
        return turns.columns
    answers = [turn.completion for turn in turns]
    tokens = [part for turn in turns for part in (turn.prompt_ids, turn.completion.token_ids)]
    last = turns[-1].info.get("success") if turns else None
    return TurnColumns(
        tokens_T=np.concatenate([ints(()), *tokens]),
        logprobs_P=np.concatenate([floats(()), *(one.logprobs for one in answers)]),
        versions_P=np.concatenate([ints(()), *(one.policy_versions for one in answers)]),
        shown_K=ints([len(turn.prompt_ids) for turn in turns]),
        sampled_K=ints([len(one.token_ids) for one in answers]),
        rewards_K=np.array([turn.reward for turn in turns], np.float64),
        env_seconds_K=np.array([turn.env_seconds for turn in turns], np.float64),
        forked_K=mask([turn.forked for turn in turns]),
        trained_K=mask([turn.trained for turn in turns]),
        cut_K=mask([one.finish_reason == "length" for one in answers]),
        support_P=Ragged.joined([one.support_of_each for one in answers])
        if any(one.support is not None for one in answers)
        else None,
        has_experts=any(one.experts is not None for one in answers),
        has_images=any(turn.images for turn in turns),
        success=None if last is None else bool(last),
    )


class _RestOfTurn(NamedTuple):
    """The fields of a turn that `TurnColumns` does not have."""

    finish_reason: FinishReason
    has_support: bool
    experts: ExpertChoices | None
    info: Mapping[str, Any]
    generate_seconds: float
    state: str
    asked: float
    picture: str
    calls: tuple[MadeCall, ...] | None
    images: tuple[PlacedImage, ...]

    @staticmethod
    def of(turn: Turn) -> "_RestOfTurn":
        answer = turn.completion
        return _RestOfTurn(
            answer.finish_reason,
            answer.support is not None,
            answer.experts,
            turn.info,
            turn.generate_seconds,
            turn.state,
            turn.asked,
            turn.picture,
            turn.calls,
            turn.images,
        )


def _rebuild_turns(columns: TurnColumns, rest: Sequence[_RestOfTurn]) -> list[Turn]:
    """The turns of these columns."""
    turns: list[Turn] = []
    end_T = end_P = 0
    for number, one in enumerate(rest):
        begin_T, begin_P = end_T, end_P
        asked_T = begin_T + int(columns.shown_K[number])
        end_T = asked_T + int(columns.sampled_K[number])
        end_P += end_T - asked_T
        sampled = slice(begin_P, end_P)
        answer = Completion(
            columns.tokens_T[asked_T:end_T],
            columns.logprobs_P[sampled],
            columns.versions_P[sampled],
            one.finish_reason,
            columns.support_P.take([sampled])
            if columns.support_P is not None and one.has_support
            else None,
            one.experts if columns.has_experts else None,
        )
        turn = Turn(
            columns.tokens_T[begin_T:asked_T],
            answer,
            float(columns.rewards_K[number]),
            one.info,
            bool(columns.forked_K[number]),
            one.generate_seconds,
            float(columns.env_seconds_K[number]),
            one.state,
            one.asked,
            one.picture,
            one.calls,
            bool(columns.trained_K[number]),
            one.images,
        )
        turns.append(turn)
    return turns


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward was computed."""

    name: ClassVar[str] = "scored"


@dataclass(frozen=True, slots=True)
class Unscored:
    """No part of the reward scores a single episode, and it was not compared with others."""

    name: ClassVar[str] = "unscored"


@dataclass(frozen=True, slots=True)
class Score:
    """A reward's verdict on a trajectory: the value, its named parts, and whether it could be
    computed at all.

    Example: a rule pays 1 and a judge 0.8, with weights 1 and 0.5:

        Score(1.4, {"math": 1.0, "judge": 0.8}, explanations={"judge": "correct, but terse"})
    """

    value: float
    """The reward. NaN if it failed, so that a mean that includes it by mistake is NaN too."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts by name, unweighted."""
    status: Scored | Failed | Unscored = field(default_factory=Scored)
    turns: tuple[float, ...] = ()
    """The contributions of single turns to the value; the last turn gets the rest
    (`Group.turn_rewards_G`)."""
    scoring_spans: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    """(began, ended) of the work of rewards on it, in seconds of the loop's clock."""
    explanations: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The reasons of a judge by part, for people who read the episode."""
    success: bool | None = None
    """The episode reached its goal. None: it did if the value is above zero (`succeeded`)."""

    @staticmethod
    def failed(error: str, layer: Layer = "reward", *, final: bool = False) -> "Score":
        """A score that could not be computed. `final`: it would not be the next time either."""
        return Score(float("nan"), {}, Failed(layer, error, final=final))


UNSCORED = Score(0.0, status=Unscored())
"""The score of an episode before any part of the reward has scored it."""


@dataclass(frozen=True, slots=True)
class Group:
    """The scored trajectories of one task, all from the same start. Advantages are computed over a
    group.

    With several trained agents, a group holds the trajectories of all of them, agent by agent, and
    advantages are computed over each group of `by_agent`.
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    """[G]"""
    scores: tuple[Score, ...]
    """[G]"""
    admitted_version: int = 0
    """The policy version that was served when the group was admitted: no token in it is older."""
    partial: bool = False
    """The group goes on: its trajectories are segments, or episodes that were over when it was
    cut."""

    def __post_init__(self) -> None:
        if len(self.trajectories) != len(self.scores):
            raise ValueError(f"{len(self.trajectories)} trajectories but {len(self.scores)} scores")

    @property
    def rewards_G(self) -> Sequence[float]:
        """One reward per trajectory."""
        return [score.value for score in self.scores]

    @property
    def turn_rewards_G(self) -> Sequence[Sequence[float]]:
        """The rewards of each trajectory's turns, which add up to its reward.

        A turn has what its score says (the reward `environment` gives the environment's own). The
        rest, such as a verdict on the whole episode, belongs to the last turn.
        """
        rewards_G = []
        for trajectory, score in zip(self.trajectories, self.scores, strict=True):
            rewards = [*score.turns, *[0.0] * (len(trajectory.turns) - len(score.turns))]
            if rewards:
                rest = score.value - math.fsum(rewards)
                # A rest that is only the rounding of the sum is none.
                rewards[-1] += settled(rest, scale_of((score.value, *rewards)))
            rewards_G.append(rewards)
        return rewards_G

    @property
    def has_signal(self) -> bool:
        """True if some agent's reward differs between episodes, by more than rounding
        (`agentrl/tokens/arrays.py`).

        Algorithms that compare whole rewards learn nothing from other groups.
        """
        return any(not constant(group.rewards_G) for group in self.by_agent())

    @property
    def begins_alike(self) -> bool:
        """True if all episodes began with the same observation, as those of one seed should, or if
        that is unknown.
        """
        return len({t.beginning for t in self.trajectories if t.beginning}) <= 1

    def by_agent(self) -> tuple["Group", ...]:
        """A group for each agent, in order of first appearance; with one agent, this group itself.

        An agent's reward is compared with the same agent's rewards in the other episodes, since
        games are rarely fair to each role (role-conditioned baselines, SPIRAL, arXiv:2506.24119).
        """
        agents = dict.fromkeys(trajectory.agent for trajectory in self.trajectories)
        if len(agents) == 1:
            return (self,)
        groups = []
        for agent in agents:
            members = [at for at, played in enumerate(self.trajectories) if played.agent == agent]
            trajectories = tuple(self.trajectories[at] for at in members)
            scores = tuple(self.scores[at] for at in members)
            groups.append(replace(self, trajectories=trajectories, scores=scores))
        return tuple(groups)


def succeeded(trajectory: Trajectory, score: Score) -> bool | None:
    """The success of an episode: True if it reached its goal, None if nothing tells. The only
    reader of success.

    The environment's verdict (`Trajectory.success`) counts, or else the reward's (`Score.success`).
    If neither gives one, an episode with a score above zero succeeded. A score that failed, or was
    not computed, tells nothing.
    """
    if trajectory.success is not None:
        return trajectory.success
    if not isinstance(score.status, Scored) or math.isnan(score.value):
        return None
    return score.value > 0 if score.success is None else score.success


def staleness(group: Group, step: int) -> int:
    """Versions by which the oldest token of `group` is behind the weights that `step` trains."""
    versions = (trajectory.oldest_version for trajectory in group.trajectories)
    return step - min((version for version in versions if version is not None), default=step)
