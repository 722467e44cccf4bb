"""The prefix tree of an episode's calls: which call goes on after which answer, and the rows to
train on.

                   call 1 ── answer ─┬─ call 2 ── answer ── call 4 ── answer   row 1: calls 1, 2, 4
                                     └─ call 3 ── answer                       row 2: call 3
    (a sub-agent)  call 5 ── answer ─── call 6 ── answer                       row 3: calls 5, 6

A row is a path of the tree, laid end to end as one training sample. The first call after an answer
continues its row. Any other begins a row of its own, with the tokens before it as a prompt, without
loss. So each answer is trained on in one row, and there are as few rows as the tree has ends.

Programs have other models for small things, such as titles, which the policy answers too. If an
episode calls the policy by its name, what it has asked of others is in no row, and continues none.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.gateway.call import (
    AgentAnswer,
    AgentCall,
    CallKind,
    ChatRequest,
    digest_after,
    digest_of_tools,
)
from agentrl.trajectory import Message


class CallPlace(NamedTuple):
    """The place of a request in the tree: after `parent`, if any, with the messages `new`.
    `digests`: that of the whole request; that of its opening, which are the messages before the
    first answer; that of its tools; and that of its tools and the system messages at its beginning.
    """

    parent: AgentAnswer | None
    new: Sequence[Message]
    digest: bytes
    opening: bytes
    tools: bytes
    setup: bytes
    kind: CallKind

    @property
    def known(self) -> int:
        """The number of tokens of the conversation up to the end of `parent`."""
        return 0 if self.parent is None else self.parent.end


class CallTree:
    """The calls of one episode, in the order in which they came."""

    def __init__(self) -> None:
        self.calls: list[AgentCall] = []
        self.by_name: Counter[bool] = Counter()
        """The numbers of calls that asked for the policy by its name, and of those that did not."""
        self._answers: dict[bytes, list[AgentAnswer]] = {}
        self._asked: dict[bytes, list[AgentCall]] = {}
        self._tools_of: dict[AgentCall, bytes] = {}
        self._said: set[bytes] = set()
        self._setups: dict[bytes, int] = {}
        self._tools: tuple[Sequence[Mapping[str, Any]], bytes] = ((), digest_of_tools(()))

    def place(self, request: ChatRequest) -> CallPlace:
        """The place of a request: after the answer with which most of its messages end, if only new
        ones follow it.
        """
        if request.tools != self._tools[0]:
            self._tools = (request.tools, digest_of_tools(request.tools))
        digest = opening = setup = self._tools[1]
        answered, new, begins = b"", 0, False
        for position, message in enumerate(request.messages):
            begins |= digest in self._asked  # the messages so far are an earlier request
            leads = digest == setup and message.role == "system"  # only system messages so far
            digest = digest_after(digest, message)
            setup = digest if leads else setup
            if message.role == "assistant":
                answered, new = digest, position + 1
            elif not answered:
                opening = digest
        parent = self._find_answer(answered)
        messages = request.messages if parent is None else request.messages[new:]
        if not self.calls:
            kind: CallKind = "start"
        elif digest in self._asked:
            kind = "retry"
        elif parent is not None:
            kind = "branch" if parent.extended else "extension"
        else:
            kind = self._kind_without_parent(request.messages, self._tools[1], setup, begins=begins)
        return CallPlace(parent, messages, digest, opening, self._tools[1], setup, kind)

    def asked(self, digest: bytes) -> Sequence[AgentCall]:
        """The calls that asked the same."""
        return self._asked.get(digest, ())

    def begin(self, call: AgentCall, place: CallPlace, length: int) -> None:
        """Add a call, of `length` messages, to which answers will come."""
        self.calls.append(call)
        self.by_name[call.by_name] += 1
        self._asked.setdefault(place.digest, []).append(call)
        self._tools_of[call] = place.tools
        self._setups[place.setup] = max(length, self._setups.get(place.setup, 0))
        if place.parent is not None:
            place.parent.returned = True
            place.parent.extended |= place.parent.call.by_name == call.by_name

    def answered(self, answer: AgentAnswer) -> None:
        """Add an answer to its call."""
        answer.call.answers.append(answer)
        self._said.add(digest_after(self._tools_of[answer.call], answer.message))
        self._answers.setdefault(answer.digest, []).append(answer)

    def answers(self) -> Iterator[AgentAnswer]:
        """All answers, by call."""
        for call in self.calls:
            yield from call.answers

    def rows(self) -> list[list[AgentAnswer]]:
        """The seen answers as paths of the tree: each answer is in one row. The row that ends last
        is the last one.
        """
        rows: list[list[AgentAnswer]] = []
        by_end: dict[AgentAnswer, list[AgentAnswer]] = {}
        for answer in self.answers():
            if not answer.seen or self._is_of_another_model(answer):
                continue
            row = by_end.pop(answer.call.parent, None) if answer.call.parent is not None else None
            if row is None:
                row = []
                rows.append(row)
            row.append(answer)
            by_end[answer] = row
        return sorted(rows, key=lambda row: row[-1].call.number)

    def unseen(self) -> list[AgentAnswer]:
        """The answers that no program saw: those of abandoned calls, and those whose connection
        broke.
        """
        return [
            answer
            for answer in self.answers()
            if not (answer.seen or self._is_of_another_model(answer))
        ]

    def of_another_model(self) -> list[AgentAnswer]:
        """The answers that were asked of other models by their names, beside the policy's."""
        return [answer for answer in self.answers() if self._is_of_another_model(answer)]

    def _is_of_another_model(self, answer: AgentAnswer) -> bool:
        return bool(self.by_name[True]) and not answer.call.by_name

    def _find_answer(self, digest: bytes) -> AgentAnswer | None:
        """The answer at the end of a conversation; of several with the same text, one that no call
        extends yet.
        """
        found = self._answers.get(digest)
        return (
            next((answer for answer in found if not answer.extended), found[0]) if found else None
        )

    def _kind_without_parent(
        self, messages: Sequence[Message], tools: bytes, setup: bytes, *, begins: bool
    ) -> CallKind:
        """The kind of a call that follows no known answer. `begins`: its first messages are an
        earlier request.
        """
        earlier = begins or any(
            digest_after(tools, message) in self._said
            for message in messages
            if message.role == "assistant"
        )
        if earlier and len(messages) >= self._setups.get(setup, 0):
            return "edit"
        if setup in self._setups and self._quotes_answer(messages):
            return "compaction"
        return "edit" if earlier else "subagent"

    def _quotes_answer(self, messages: Sequence[Message]) -> bool:
        """True if a message that is not an answer quotes an earlier answer."""
        given = [message.content for message in messages if message.role != "assistant"]
        texts = {answer.message.said.strip() for answer in self.answers()}
        return any(
            len(text) >= _SHORTEST_QUOTE and text in content for text in texts for content in given
        )


_SHORTEST_QUOTE = 16
"""Characters. Shorter answers can occur in a message by chance."""


def messages_of(rows: Sequence[Sequence[AgentAnswer]]) -> tuple[Message, ...]:
    """The conversations of rows, one after another: of each call what was new, and its answer."""
    return tuple(
        message
        for row in rows
        for answer in row
        for message in (*answer.call.new_messages, answer.message)
    )


def conversation_of(row: Sequence[AgentAnswer]) -> tuple[Message, ...]:
    """The whole conversation that a row ends with, from its first message on."""
    before: list[AgentAnswer] = []
    answer = row[0].call.parent
    while answer is not None:
        before.append(answer)
        answer = answer.call.parent
    return messages_of([[*before[::-1], *row]])


def kinds_of(calls: Sequence[AgentCall]) -> Mapping[str, int]:
    """The number of calls of each kind."""
    return Counter(call.kind for call in calls)
