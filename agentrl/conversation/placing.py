"""The places of a conversation's messages in a model's prompt: `place_messages`, by what the
model's template can express.

Chat APIs take sequences of messages that templates refuse, or leave parts of out. What a template
has no place for is folded, by these rules in this order; what it has a place for is not changed:

1. results of tools come right after the calls that they answer, and what stood between them comes
   after the results;
2. a result without a call, or in a template without results, is a user message between
   `<tool_response>` tags;
3. several system messages at the beginning become one, with an empty line between them;
4. a system message that has no place begins the next user message, followed by an empty line. If an
   answer, a result or nothing follows, it is a user message itself;
5. two user messages, or two answers, in a row become one, with an empty line between them, and the
   pictures of both before that. An answer whose text the template leaves out beside its calls
   becomes two;
6. a user message after a result ends that result, after an empty line;
7. a conversation that must begin with the user begins with an empty message of the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from agentrl.tokens.encoded_image import EncodedImage
from agentrl.trajectory import Message


@dataclass(frozen=True, slots=True)
class Places:
    """The places that a template has."""

    system: bool = True
    systems: bool = True
    """Several system messages at the beginning."""
    late_systems: bool = True
    """System messages after others."""
    calls: bool = True
    results: bool = True
    stray_results: bool = True
    """Results without calls."""
    repeated_users: bool = True
    repeated_answers: bool = True
    users_after_results: bool = True
    text_beside_calls: bool = True
    any_beginning: bool = True
    """Conversations that do not begin with the user, or in which the user says nothing."""


def place_messages(messages: Sequence[Message], can: Places, *, begins: bool) -> list[Message]:
    """The messages as the template has a place for them. `begins`: else they follow an answer,
    which may be a call.
    """
    found = _place_results(messages, can, called=not begins)
    found = _place_systems(found, can, begins=begins)
    found = _join_messages(found, can)
    if begins and not can.any_beginning:
        systems = [*takewhile(lambda message: message.role == "system", found)]
        first = found[len(systems)].role if len(found) > len(systems) else ""
        if first != "user":
            found.insert(len(systems), Message("user", ""))
    return found


def text_of_result(content: str) -> str:
    """A result of a tool, as text of the user."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _place_results(messages: Sequence[Message], can: Places, *, called: bool) -> list[Message]:
    """Results right after their calls, and as text of the user where they have no place."""
    found: list[Message] = []
    waiting: list[Message] = []  # what stands between a call and its results
    for message in messages:
        if message.role == "assistant":
            found += [*waiting, message]
            waiting, called = [], bool(message.tool_calls) or not can.calls
        elif message.role != "tool":
            waiting.append(message)
        elif can.results and (called or can.stray_results):
            found += [message] if called else [*waiting, message]
            waiting = waiting if called else []
        else:
            told = Message("user", text_of_result(message.content), images=message.images)
            found += [*waiting, told]
            waiting = []
    return found + waiting


def _place_systems(messages: Sequence[Message], can: Places, *, begins: bool) -> list[Message]:
    """System messages where they have a place, and folded into messages of the user elsewhere."""
    leading = [*takewhile(lambda message: message.role == "system", messages)] if begins else []
    rest = messages[len(leading) :]
    found = [*leading] if can.system else []
    if len(found) > 1 and not can.systems:
        found = [Message("system", _lines(found), images=_images(found))]
    folded = [] if can.system else leading
    for message in rest:
        if message.role == "system" and not (can.system and can.late_systems):
            folded = [*folded, message]
            continue
        # Folded texts go into the next message of the user, or become one before another's.
        if folded and message.role != "user":
            found.append(Message("user", _lines(folded), images=_images(folded)))
            folded = []
        both = [*folded, message]
        joined = replace(message, content=_lines(both), images=_images(both))
        found.append(joined if folded else message)
        folded = []
    if folded:
        found.append(Message("user", _lines(folded), images=_images(folded)))
    return found


def _join_messages(messages: Sequence[Message], can: Places) -> list[Message]:
    """Join messages in a row that cannot be two, and split answers that cannot be one."""
    apart = {
        ("user", "user"): can.repeated_users,
        ("tool", "user"): can.users_after_results,
        ("assistant", "assistant"): can.repeated_answers,
    }
    found: list[Message] = []
    for message in messages:
        if found and not apart.get((found[-1].role, message.role), True):
            last = found.pop()
            both = [last, message]
            joined = replace(last, content=_lines(both), images=_images(both))
            found.append(_join_answers(last, message) if message.role == "assistant" else joined)
        elif (
            message.tool_calls
            and message.said
            and not can.text_beside_calls
            and can.repeated_answers
        ):
            calls = "\n".join(call.render() for call in message.tool_calls)
            said = Message("assistant", message.said, images=message.images)
            found += [said, replace(message, content=calls, images=())]
        else:
            found.append(message)
    return found


def _join_answers(first: Message, second: Message) -> Message:
    calls = (*first.tool_calls, *second.tool_calls)
    said = "\n\n".join(filter(None, (first.said, second.said)))
    return replace(
        second,
        content="\n".join(filter(None, (said, *(call.render() for call in calls)))),
        reasoning="\n\n".join(filter(None, (first.reasoning, second.reasoning))),
        tool_calls=calls,
        reasoning_tokens=first.reasoning_tokens + second.reasoning_tokens,
        images=first.images + second.images,
    )


def _images(messages: Sequence[Message]) -> tuple[EncodedImage, ...]:
    return tuple(image for message in messages for image in message.images)


def _lines(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in messages if message.content)
