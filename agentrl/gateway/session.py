"""One episode of a program: answers its calls with the policy, and keeps what was sampled.

A call belongs to its episode and not to the connection that it came over: if the connection breaks,
the call goes on, and the program gets the same answer when it asks again. So nothing is sampled
twice when a client retries.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite
from typing import Any, NamedTuple

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.conversation.tool_calls import parse_tool_calls
from agentrl.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    FormatError,
    ImagesRefusedError,
    LethalRequestError,
    RolloutError,
)
from agentrl.flow import Flow, elapsed, now
from agentrl.gateway.call import AgentAnswer, AgentCall, ChatRequest, RequestOptions, digest_after
from agentrl.gateway.call_tree import CallPlace, CallTree
from agentrl.gateway.outcome import AgentOutcome
from agentrl.gateway.refusal import CallRefusedError, unsupported
from agentrl.protocols import Prompt
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.runner import Episode
from agentrl.rollout.seeds import derive_seed
from agentrl.tokens.arrays import IntArray
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trajectory import Message, ToolCall

logger = logging.getLogger(__name__)
_ID_PREFIXES = ("", "chatcmpl-", "resp_", "msg_")
"""What each protocol puts before the id of an answer."""
_LIMIT_CODES = {
    "turns": "turn_limit_exceeded",
    "tokens": "token_limit_exceeded",
    "seconds": "time_limit_exceeded",
}
"""Error codes for programs, by the exhausted limit of `rollout.budget`."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one episode besides its budget: the answers of a call, and the calls at the same
    time.
    """

    answers: int = 16
    at_once: int = 64


class _Wanted(NamedTuple):
    """The content of a request, by which a retry is recognised. It is kept as long as the episode,
    so it holds a digest instead of the messages.
    """

    digest: bytes
    options: RequestOptions
    answers: int
    by_name: bool


@dataclass(eq=False, slots=True)
class _Pending:
    """A call, and the content of the request that it answers.

    `under_way`: set when the call has all of its answers, or has failed; None from then on.
    `listeners`: one for each connection that waits for it, true while the connection lasts.
    """

    call: AgentCall
    wanted: _Wanted
    under_way: asyncio.Event | None = field(default_factory=asyncio.Event)
    listeners: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True if it has ended without its answers."""
        return self.under_way is None and self.call.error is not None

    @property
    def lost(self) -> bool:
        """True if no program has its answer or waits for it. A program that has one and sends the
        same request again wants another answer.
        """
        return not (self.call.delivered or any(is_there() for is_there in self.listeners))


class AgentSession:
    """The calls of one episode. They run in `flow`, which ends with the episode."""

    def __init__(
        self,
        episode: Episode,
        policy: EnginePolicy,
        renderer: TemplateRenderer,
        limits: CallLimits,
        flow: Flow,
        *,
        model: str = "policy",
    ) -> None:
        self.episode = episode
        self.model = model
        """The name of the policy for programs."""
        self.name = blake2b(f"{episode.id} {episode.seed}".encode(), digest_size=6).hexdigest()
        """The prefix of the ids of its answers."""
        self.tree = CallTree()
        self.refused = ""
        """The limit that the last call exceeded, if it did: "context", or one of the budget."""
        self.first_too_long = 0
        """The tokens of the first prompt, if the context is too small for it."""
        self.engine_error: RolloutError | None = None
        """The reason why the engine has not answered the last call, if it has not."""
        self.outcome: AgentOutcome | None = None
        """The reward of the episode, if it came by a request."""
        self.rewarded = asyncio.Event()
        """A reward came by a request, of the episode or of a call."""
        self.done = asyncio.Event()
        """A remote agent has reported its end."""
        self.failure = ""
        """The failure that it reported, if any."""
        self.waiting = False
        """The task waits for an agent."""
        self.began = self.used = now()
        self._began_by_budget = episode.clock.now()
        self.closed = False
        self.calls_at_once = 0
        """Calls that are being answered."""
        self._policy = policy
        self._renderer = renderer
        self._limits = limits
        self._flow = flow
        self._pending: dict[AgentCall, _Pending] = {}
        self._by_request: dict[str, _Pending] = {}
        self._turned_away: Counter[_Wanted] = Counter()
        self._calls_of_tools: dict[str, ToolCall] = {}

    @property
    def max_context(self) -> int:
        """Most tokens that prompt and answer may have together."""
        return self._policy.max_context

    @asynccontextmanager
    async def asking(
        self, request: ChatRequest, is_there: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[AgentCall]:
        """The call of a request, with all of its answers: a new one, or an earlier one that is
        asked for once more.

        The block hands the answers over, and sets `AgentCall.delivered`. `is_there`: whether the
        program still waits for them.

        Raises:
            CallRefusedError: it exceeds a limit, the episode is over, or the engine does not
            answer.
        """
        if self.closed:
            raise CallRefusedError(401, "episode_over", "the episode of this key is over")
        self.used = now()
        pending = self._find_or_begin(self._restore_sampled_ids(request))
        pending.listeners.append(is_there)
        try:
            if pending.under_way is not None:
                await pending.under_way.wait()
            if pending.call.error is not None:
                raise self._note_refusal(_refusal_of(pending.call.error), pending.wanted)
            yield pending.call
        finally:
            pending.listeners.remove(is_there)
            self.used = now()

    def prompt_length(self, request: ChatRequest) -> int:
        """The number of tokens of a request's prompt. Nothing is sampled or kept.

        Raises:
            CallRefusedError: the chat template refuses it.
        """
        asked = self._restore_sampled_ids(request)
        place = self.tree.place(asked)
        return place.known + len(self._render_request(asked, place)[0])

    def answer(self, answer_id: str) -> AgentAnswer:
        """An answer by its id in the episode, or by that of a response, of any protocol.

        Raises:
            CallRefusedError: there is none.
        """
        word, _, own = answer_id.rpartition(f"{self.name}_")
        for answer in self.tree.answers():
            if answer.id == own and word in _ID_PREFIXES:
                return answer
        raise CallRefusedError(404, "no_such_call", f"the episode has no answer {answer_id!r:.80}")

    def earned(self, outcome: AgentOutcome) -> None:
        """The reward of the episode has come. A later one replaces it; a report without a reward
        adds to it.
        """
        self.outcome = outcome.filled_from(self.outcome)
        if outcome.reward is not None:
            self.rewarded.set()

    def call_earned(self, answer_id: str, reward: float) -> None:
        """Add a reward to an answer, which is that of its turn.

        Raises:
            CallRefusedError: there is no such answer, or its rewards are too large to be added.
        """
        answer = self.answer(answer_id)
        if not isfinite(answer.reward + reward):
            raise CallRefusedError(
                400, "invalid_reward", "the rewards of this answer add up to no finite number"
            )
        answer.reward += reward
        answer.rewarded = True
        self.rewarded.set()

    def decoded(self, token_ids: IntArray) -> str:
        """The text of tokens."""
        return self._renderer.decode(token_ids)

    def dropped(self) -> Mapping[str, tuple[int, int]]:
        """The answers that are in no row: for each reason their number, and the tokens that the
        engine returned for them.
        """
        dropped: dict[str, tuple[int, int]] = {}
        answers = {"unseen": self.tree.unseen(), "other_model": self.tree.of_another_model()}
        for reason, unused in answers.items():
            if unused:
                tokens = sum(len(answer.completion.token_ids) for answer in unused)
                dropped[reason] = len(unused), tokens
        unfinished = sum(isinstance(call.error, CallEndedError) for call in self.tree.calls)
        if unfinished:
            dropped["unfinished"] = unfinished, 0
        return dropped

    def _find_or_begin(self, request: ChatRequest) -> _Pending:
        place = self.tree.place(request)
        wanted = _Wanted(place.digest, request.options, request.count, self._is_by_name(request))
        pending = self._by_request.get(request.request_id) if request.request_id else None
        if pending is not None and pending.wanted[:-1] != wanted[:-1]:
            raise CallRefusedError(
                409,
                "idempotency_mismatch",
                f"the request id {request.request_id!r:.80} came with other content before",
            )
        has_none = pending is None or pending.failed
        if has_none and request.repeated and self._turned_away[wanted]:
            self._turned_away[wanted] -= 1
        elif pending is None:
            pending = self._find_retried(wanted, repeated=request.repeated)
        if pending is None or pending.failed:
            try:
                pending = self._begin(request, place, wanted)
            except CallRefusedError as refusal:
                raise self._note_refusal(refusal, wanted) from None
        if request.request_id:
            self._by_request[request.request_id] = pending
        return pending

    def _note_refusal(self, refusal: CallRefusedError, wanted: _Wanted) -> CallRefusedError:
        """The refusal, noted if the client is asked to try again. That retry asks for an answer of
        its own, and not for that of another call with the same content.
        """
        if refusal.retry_after is not None:
            self._turned_away[wanted] += 1
        return refusal

    def _find_retried(self, wanted: _Wanted, *, repeated: bool) -> _Pending | None:
        """The earlier call that a request retries, if it is a retry: one with the same content
        whose answer was lost, or else the newest if the client marks the request as a retry.

        A client retries the call that it has made last; an earlier one with the same content has
        had its own answer.
        """
        asked = (self._pending[call] for call in self.tree.asked(wanted.digest))
        same = [one for one in asked if one.wanted == wanted]
        lost = next((one for one in same if one.lost and not one.failed), None)
        return same[-1] if lost is None and repeated and same else lost

    def _is_by_name(self, request: ChatRequest) -> bool:
        """True if a request names the policy, or no model at all. Some libraries put a provider
        before the name.
        """
        return not request.model or request.model.rpartition("/")[2] == self.model

    def _begin(self, request: ChatRequest, place: CallPlace, wanted: _Wanted) -> _Pending:
        number, by_name = len(self.tree.calls), wanted.by_name
        matters = by_name or not self.tree.by_name[True]
        self._check_limits(request, self.tree.by_name[by_name] if matters else 0, matters=matters)
        new_ids, new_images = self._render_request(request, place)
        call = AgentCall(
            number,
            place.kind,
            place.parent,
            place.new,
            new_ids,
            elapsed(),
            place.opening,
            self.name,
            by_name,
            new_images=new_images,
        )
        length = call.prompt_length
        if length >= self.max_context:
            if matters:
                self.first_too_long = length if not number else 0
                self.refused = "context"
            raise CallRefusedError(
                400,
                "context_length_exceeded",
                f"the prompt has {length} tokens, and the context holds {self.max_context}",
            )
        if matters:
            self.refused, self.first_too_long = "", 0
        # Until it has answers. If the episode's flow cancels the task, this is what remains.
        call.error = CallEndedError("the episode ended before the call")
        thread = self._thread(call)
        self.tree.begin(call, place, len(request.messages))
        pending = self._pending[call] = _Pending(call, wanted)
        self.calls_at_once += 1
        task = self._flow.start(self._answer(pending, request, thread), name=f"call {number}")
        task.add_done_callback(lambda _: self._end(pending))  # it may be cancelled before it begins
        return pending

    def _end(self, pending: _Pending) -> None:
        self.calls_at_once -= 1
        if pending.under_way is not None:
            pending.under_way.set()
        pending.under_way = None

    def _check_limits(self, request: ChatRequest, turns: int, *, matters: bool) -> None:
        """Refuse a call beyond a limit. `turns`: the number of earlier calls that count as turns.
        `matters`: its answer is trained on.
        """
        limits = self._limits
        usage = self.episode.usage
        used_seconds = self.episode.clock.now() - self._began_by_budget
        seconds = used_seconds if self.tree.calls else 0.0
        if spent := usage.spent(turns, seconds):
            self.refused = spent if matters else self.refused
            limit = getattr(usage.budget, spent)
            text = f"the episode has used up its {limit:g} {spent} (rollout.budget.{spent})"
            raise CallRefusedError(400, _LIMIT_CODES[spent], text)
        if request.options.format is not None:
            self._check_format(request)
        if request.count > limits.answers:
            raise CallRefusedError(
                400, "too_many_answers", f"n is {request.count}, and {limits.answers} is the most"
            )
        if self.calls_at_once >= limits.at_once:
            raise CallRefusedError(
                429, "too_many_calls", f"{limits.at_once} calls of this episode are under way", 1.0
            )

    def _check_format(self, request: ChatRequest) -> None:
        if self._policy.trained:
            raise unsupported(
                "a format of answers (response_format)",
                "its tokens would not be sampled from the policy that is trained; describe the"
                " format in the prompt",
            )
        if not self._policy.formats:
            raise unsupported(
                "a format of answers (response_format)",
                "the engine does not constrain answers: describe the format in the prompt, or run"
                " with engine=vllm engine.structured_outputs=true",
            )
        if request.tools and request.options.may_call:
            raise unsupported(
                "a format of answers beside tools",
                'write tool_choice "none", or leave one of them out',
            )

    def _render_request(
        self, request: ChatRequest, place: CallPlace
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        """The tokens after the parent's, or the whole prompt, and the pictures among them."""
        answer = place.parent
        shown = place.new if answer is None else _link_results(place.new, answer.message)
        try:
            if answer is None:
                ids = self._renderer.whole(shown, request.tools)
            else:
                ids = self._renderer.added(
                    answer.call.new_ids, answer.completion.token_ids, shown, request.tools
                )
            return ids, self._renderer.placed(ids, shown, begins=answer is None)
        except ImagesRefusedError as error:
            raise _refusal_of(error) from error
        except ConfigError as error:
            raise CallRefusedError(
                400, "cannot_render", f"the model's chat template refuses the messages: {error}"
            ) from error

    def _thread(self, call: AgentCall) -> str:
        """The engine's session of a call: its parent's if the call is the first to extend that, so
        that the engine reuses the cached prefix; else a new one.
        """
        parent = call.parent
        if parent is not None and not parent.extended and parent.call.by_name == call.by_name:
            return parent.thread
        return f"{self.episode.id}/{call.number}" if call.number else self.episode.id

    async def _answer(self, pending: _Pending, request: ChatRequest, thread: str) -> None:
        """Sample the answers of a call. A failure of the engine is the call's, and the episode goes
        on.
        """
        call = pending.call
        sampled = await self._sample_all(call, request, thread)
        for answer in sampled:
            if isinstance(answer, AgentAnswer):
                answer.digest = digest_after(pending.wanted.digest, answer.message)
                self.tree.answered(answer)
                for given, sampled_call in zip(
                    answer.calls, answer.message.tool_calls, strict=True
                ):
                    self._calls_of_tools[given.id] = sampled_call
        call.error = next((one for one in sampled if not isinstance(one, AgentAnswer)), None)
        refused = isinstance(call.error, FormatError | ImagesRefusedError)
        self.engine_error = None if refused else call.error

    async def _sample_all(
        self, call: AgentCall, request: ChatRequest, thread: str
    ) -> Sequence[AgentAnswer | RolloutError]:
        if request.count == 1:
            return [await self._sample_answer(call, request, thread, 0)]
        async with Flow(f"answers of call {call.number}") as flow:
            tasks = [
                flow.start(self._sample_answer(call, request, thread, place), name=str(place))
                for place in range(request.count)
            ]
        return [task.result() for task in tasks]

    async def _sample_answer(
        self, call: AgentCall, request: ChatRequest, thread: str, place: int
    ) -> AgentAnswer | RolloutError:
        try:
            return await self._sample(call, request, thread, place)
        except RolloutError as error:
            return error

    async def _sample(
        self, call: AgentCall, request: ChatRequest, thread: str, place: int
    ) -> AgentAnswer:
        options, parent = request.options, call.parent
        goes_on = not place and parent is not None and parent.thread == thread
        # The first answer goes on in the engine's session; others get sessions of their own.
        own = f"{thread}/{call.number}.{place}" if place else thread
        episode = replace(self.episode, id=own, seed=self._seed(options, place))
        ids = call.prompt_ids
        new_ids = call.new_ids if goes_on else ids
        prompt = Prompt(ids, new_ids, forked=not goes_on, images=call.prompt_images)
        sampling = options.applied(self._policy.sampling, trained=self._policy.trained)
        policy = (
            self._policy
            if sampling is self._policy.sampling
            else replace(self._policy, sampling=sampling)
        )
        completion = await policy.sample(episode, call.number, prompt, options.format)
        tools = request.tools if options.may_call else ()
        message = _parse_canonical_calls(
            self._renderer.answer_message(call.new_ids, completion.token_ids, tools), tools
        )
        # The engine keeps the stop text, because it was sampled. The program does not get it.
        stops = [] if message.tool_calls else options.stop
        found = [stop for stop in stops if stop in message.content]
        stopped_at = min(found, key=message.content.index, default="")
        if stopped_at:
            message = replace(message, content=message.content[: message.content.index(stopped_at)])
        return AgentAnswer(call, completion, message, own, elapsed(), stopped_at=stopped_at)

    def _seed(self, options: RequestOptions, place: int) -> int:
        """The seed of an answer; a program may choose it where nothing is trained."""
        chosen = options.seed is not None and not self._policy.trained
        seed = derive_seed(options.seed or 0) if chosen else self.episode.seed
        return derive_seed(seed, "answer", place) if place else seed

    def _restore_sampled_ids(self, request: ChatRequest) -> ChatRequest:
        """The request with the ids that the model wrote for its tool calls, in place of the unique
        ones that programs get. Only so are its tokens those that were sampled.
        """
        if not self._calls_of_tools:
            return request
        return replace(request, messages=tuple(map(self._restore_call_ids, request.messages)))

    def _restore_call_ids(self, message: Message) -> Message:
        if message.role == "tool":
            call = self._calls_of_tools.get(message.tool_call_id)
            return (
                message if call is None else replace(message, tool_call_id=call.id, name=call.name)
            )
        calls = [
            replace(call, id=self._calls_of_tools.get(call.id, call).id)
            for call in message.tool_calls
        ]
        return replace(message, tool_calls=tuple(calls)) if calls else message


class CallEndedError(EngineError):
    """A call was under way when its episode ended."""


def _link_results(messages: Sequence[Message], answer: Message) -> Sequence[Message]:
    """The messages, with the id and name of the answered call in each tool result. A result without
    an id answers the next open call of its name, or the next one; if none is open, the first.
    """
    if not answer.tool_calls:
        return messages
    open_calls, linked = [*answer.tool_calls], []
    for message in messages:
        if message.role != "tool":
            linked.append(message)
            continue
        named = [
            call
            for call in open_calls
            if message.tool_call_id in (call.id, "") and message.name in (call.name, "")
        ]
        call = next(iter(named), answer.tool_calls[0])
        if named:
            open_calls.remove(call)
        linked.append(
            replace(
                message,
                tool_call_id=message.tool_call_id or call.id,
                name=message.name or call.name,
            )
        )
    return linked


def _parse_canonical_calls(answer: Message, tools: Sequence[Mapping[str, Any]]) -> Message:
    """The answer with its tool calls parsed, if the model writes them in the canonical form, which
    renderers leave as text.

    Calls that cannot be parsed stay text, and so does plain JSON that names no tool of the request.
    """
    if not tools or answer.tool_calls:
        return answer
    found = parse_tool_calls(answer.content)
    names = {tool["function"]["name"] for tool in tools}
    tagged = "<tool_call>" in answer.content
    if (
        found.errors
        or not found.calls
        or not (tagged or all(call.name in names for call in found.calls))
    ):
        return answer
    calls = tuple(replace(call, id=f"call{number:05d}") for number, call in enumerate(found.calls))
    content = "\n".join(filter(None, (found.text, *(call.render() for call in calls))))
    return replace(answer, content=content, tool_calls=calls)


def _refusal_of(error: Exception) -> CallRefusedError:
    if isinstance(error, CallEndedError):
        return CallRefusedError(401, "episode_over", str(error))
    if isinstance(error, FormatError):
        return CallRefusedError(400, "invalid_response_format", str(error))
    if isinstance(error, ImagesRefusedError):
        return CallRefusedError(400, "images_refused", str(error))
    if isinstance(error, LethalRequestError):
        return CallRefusedError(400, "request_set_aside", str(error))
    if isinstance(error, DeadlineError):
        return CallRefusedError(504, "engine_timeout", str(error))
    return CallRefusedError(503, "engine_error", str(error), 1.0)
