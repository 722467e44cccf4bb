"""A written conversation, as the tokens that the model would have read and written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.tokens.arrays import IntArray, floats, ints
from agentrl.trajectory import Completion, FinishReason, Message, Task, Terminated, Trajectory, Turn


def trajectory_from_messages(
    messages: Sequence[Message],
    renderer: TemplateRenderer,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    cut: bool = False,
) -> Trajectory:
    """A conversation as the tokens that the model would have read and written.

    Calls are in the syntax of the model's chat template, and reasoning is between its marks, where
    it has some. Answers that were `given` are part of the prompt. `tools`: what the model is told
    that it can call. `cut`: the last answer was cut short, so nothing ends it.

    Raises:
        ConfigError: the assistant says nothing in it, or speaks first.
    """
    conversation, news, turns = renderer.conversation(tools), list[Message](), list[Turn]()
    last = max((at for at, message in enumerate(messages) if message.is_answer), default=-1)
    for place, message in enumerate(messages):
        if not message.is_answer:
            news.append(message)
            continue
        if not news:
            raise ConfigError(
                "a conversation has an answer of the assistant to nothing: give a prompt"
            )
        prompt = conversation.prompt(news)
        news = []
        text = _answer_text(message, renderer, prompt.new_ids, tools)
        ids = renderer.quoted_answer_ids(text)
        reason: FinishReason = "stop"
        if cut and place == last:
            # Without the tokens that end an answer, which are all of an empty one.
            ids, reason = ids[: len(ids) - len(renderer.answer_ids(""))], "length"
        certain = np.zeros(len(ids))
        completion = Completion(ids, floats(certain), ints(certain), reason)
        conversation.answer(completion)
        own = prompt.new_images
        turns.append(Turn(prompt.new_ids, completion, 0.0, {}, prompt.forked, images=own))
    if not turns:
        raise ConfigError(
            "a conversation has no answer of the assistant, so there is nothing to learn"
        )
    return Trajectory("pair", Task("pair", 0), tuple(turns), Terminated(), tuple(messages))


def _answer_text(
    message: Message,
    renderer: TemplateRenderer,
    prompt_ids: IntArray,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """An answer as the model would write it, after this prompt."""
    text = _with_thought(message, message.content, renderer, prompt_ids)
    if not message.tool_calls:
        return text
    calls = renderer.for_tools(tools).template.calls(message.tool_calls)
    own = _with_thought(message, message.said + calls, renderer, prompt_ids)
    read = renderer.read(prompt_ids, renderer.quoted_answer_ids(own), tools)
    asked = [(call.name, dict(call.arguments)) for call in message.tool_calls]
    # Some syntaxes have no room for a text before calls: then the canonical form, which all read.
    return own if [(one.name, dict(one.arguments)) for one in read.calls] == asked else text


def _with_thought(
    message: Message, text: str, renderer: TemplateRenderer, prompt_ids: IntArray
) -> str:
    """A text after the message's reasoning, if the model has marks for that."""
    marks = renderer.reasoning_marks
    if marks is None or marks.end in text:
        return text
    begin, thought = marks.begin.strip(), message.reasoning.strip()
    # Many templates begin the reasoning in the prompt, and then an answer ends it, even if empty.
    if renderer.decode(prompt_ids).rstrip().endswith(begin):
        return "\n".join(filter(None, (thought, marks.end))) + f"\n\n{text}"
    return f"{begin}\n{thought}\n{marks.end}\n\n{text}" if thought else text
