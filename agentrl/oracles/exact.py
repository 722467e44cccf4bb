"""The exact probability of whole answers, under the policy that a trainer holds.

A sampled answer is a sequence of tokens, and several sequences spell the same text. So the
probability of a text is a sum over all of them, each followed by a token that ends the turn. Texts
of a few characters have few.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from math import fsum

import numpy as np

from agentrl.batch import collate, to_samples
from agentrl.conversation.context import FULL, ContextPolicy
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.protocols import Question, Trainer
from agentrl.tokens.arrays import IntArray, floats, ints
from agentrl.trajectory import Completion, Message, Task, Terminated, Trajectory, Turn

MAX_SPELLINGS = 4096
"""Most token sequences that an answer may be spelled by."""
_TASK = Task("question", 0)


async def answer_probabilities(
    trainer: Trainer,
    renderer: TemplateRenderer,
    questions: Sequence[Question],
    *,
    max_tokens: int | None = None,
    context: ContextPolicy = FULL,
) -> list[list[float]]:
    """For each question, the probability of each of its answers: that the model writes this text
    and ends its turn.

    It is that of untruncated sampling at the trainer's temperature, summed over all spellings of
    the text and all stop tokens. An answer may have `max_tokens` tokens, its stop token included.
    One that is cut there is sent as it is, so a spelling of that length needs no stop token, and a
    longer one cannot be sampled.

    Earlier answers among a question's messages are shown in the tokens of
    `TemplateRenderer.answer_ids`. `context`: which part of the messages the model sees.

    Raises:
        ConfigError: an answer has characters beyond ASCII, or more than `MAX_SPELLINGS` spellings;
            or a question does not end with a message to answer.
    """
    found = await spelling_probabilities(
        trainer, renderer, questions, max_tokens=max_tokens, context=context
    )
    return [[fsum(chances.values()) for chances in of_question] for of_question in found]


async def spelling_probabilities(
    trainer: Trainer,
    renderer: TemplateRenderer,
    questions: Sequence[Question],
    *,
    max_tokens: int | None = None,
    context: ContextPolicy = FULL,
) -> list[list[dict[tuple[int, ...], float]]]:
    """As `answer_probabilities`, by the tokens of each completion that is the answer's text.

    Raises:
        ConfigError: as `answer_probabilities`.
    """
    found: list[list[dict[tuple[int, ...], float]]] = [
        [{} for _ in question.answers] for question in questions
    ]
    trajectories: list[Trajectory] = []
    owners: list[tuple[dict[tuple[int, ...], float], tuple[int, ...]]] = []
    for question, of_question in zip(questions, found, strict=True):
        prompt_ids = prompt_of(renderer, question.messages, context)
        for text, chances in zip(question.answers, of_question, strict=True):
            for token_ids in completions(renderer, text, max_tokens):
                turn = Turn(prompt_ids, _certain(token_ids), 0.0, {})
                trajectories.append(Trajectory("", _TASK, (turn,), Terminated()))
                owners.append((chances, tuple(token_ids.tolist())))
    if trajectories:
        batch = collate(
            sample for trajectory in trajectories for sample in to_samples(trajectory, 0.0)
        )
        logprobs_N = (await trainer.predict(batch)).astype(np.float64)
        starts_M = np.cumsum([0, *batch.loss_tokens_M[:-1]])
        chances_M = np.exp(np.add.reduceat(logprobs_N, starts_M))
        for (chances, spelled), chance in zip(owners, chances_M.tolist(), strict=True):
            chances[spelled] = chance
    return found


def prompt_of(
    renderer: TemplateRenderer, messages: Sequence[Message], context: ContextPolicy = FULL
) -> IntArray:
    """The tokens that the model sees before it answers `messages`, rendered as in an episode, turn
    by turn.

    Raises:
        ConfigError: the last message is the model's own, or there is none.
    """
    answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not messages or (answers and answers[-1] == len(messages) - 1):
        raise ConfigError(
            "a question ends with a message that the model is to answer, such as the"
            f" environment's: add it to Question.messages, which has {len(messages)} messages"
        )
    conversation = renderer.conversation()
    for begin, end in pairwise([-1, *answers, len(messages)]):
        kept = context.keep(conversation.shown)
        if kept is not conversation.shown:
            conversation.show(kept)
        prompt = conversation.prompt(messages[begin + 1 : end])
        if end < len(messages):
            conversation.answer(_certain(renderer.answer_ids(messages[end].content)))
    return prompt.ids


def completions(
    renderer: TemplateRenderer, text: str, max_tokens: int | None = None
) -> list[IntArray]:
    """All completions of at most `max_tokens` tokens that are this text, as `answer_probabilities`
    counts them.

    Raises:
        ConfigError: as `answer_probabilities`.
    """
    if not text.isascii():
        raise ConfigError(
            f"the answer {text!r} has characters beyond ASCII, whose spellings are not enumerated"
        )
    spelled = list(islice(_spellings(renderer, text), MAX_SPELLINGS + 1))
    if len(spelled) > MAX_SPELLINGS:
        raise ConfigError(
            f"the answer {text!r:.80} can be spelled by more than {MAX_SPELLINGS} token sequences:"
            " take a shorter one"
        )
    found: list[IntArray] = []
    for token_ids in spelled:
        if max_tokens is None or len(token_ids) < max_tokens:
            found += [ints([*token_ids, stop]) for stop in renderer.stop_token_ids]
        elif len(token_ids) == max_tokens:
            found.append(ints(token_ids))
    return found


def _spellings(renderer: TemplateRenderer, text: str) -> Iterator[list[int]]:
    """All token sequences, without stop tokens, that are decoded to this text."""
    parts = {
        text[begin:end] for begin in range(len(text)) for end in range(begin + 1, len(text) + 1)
    }
    tokens = [(part, i) for part in parts for i in renderer.ids_by_text.get(part, ())]
    known = [(part, i) for part, i in tokens if i not in renderer.stop_token_ids]
    unfinished: list[tuple[list[int], int]] = [([], 0)]
    while unfinished:
        token_ids, length = unfinished.pop()
        if length == len(text):
            yield token_ids
            continue
        for part, token_id in known:
            # In its place it may begin with a space.
            if part not in text[length : length + len(part) + 1]:
                continue
            longer = [*token_ids, token_id]
            spelled = renderer.decode(ints(longer))
            if len(spelled) > length and text.startswith(spelled):
                unfinished.append((longer, len(spelled)))


def _certain(token_ids: IntArray) -> Completion:
    """A completion that nothing sampled."""
    return Completion(
        token_ids, floats(np.zeros(len(token_ids))), ints(np.zeros(len(token_ids))), "stop"
    )


__all__ = [
    "MAX_SPELLINGS",
    "Question",
    "answer_probabilities",
    "completions",
    "prompt_of",
    "spelling_probabilities",
]
