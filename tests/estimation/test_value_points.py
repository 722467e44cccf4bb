"""Where a critic is asked: before turns, after answers, and at the ends of truncated episodes."""

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import TrainBatch, collate, to_samples
from agentrl.estimation.value_points import questions
from agentrl.trajectory import Completion, Task, Terminated, Trajectory, Truncated, Turn

Prefix = tuple[int, ...]


def episode(
    *turns: tuple[Sequence[int], Sequence[int], bool], tail: Sequence[int] | None = None
) -> Trajectory:
    """An episode of (prompt, answer, whether it forks); with a tail, possibly an empty one, it was
    truncated.
    """
    played = tuple(
        Turn(
            prompt,
            Completion(answer, [-1.0] * len(answer), [0] * len(answer), "stop"),
            0.0,
            {},
            forked,
        )
        for prompt, answer, forked in turns
    )
    status = Terminated() if tail is None else Truncated("turns")
    return Trajectory("t", Task("env", 0), played, status, tail_ids=np.array(tail or (), np.int32))


def batch_of(*episodes: Trajectory) -> TrainBatch:
    return collate(sample for one in episodes for sample in to_samples(one, 1.0))


def prefixes(batch: TrainBatch) -> Iterator[Prefix]:
    """What is before each loss token in its sample: all that a model's prediction depends on."""
    begins_S = np.repeat(np.cumsum(batch.lengths_M) - batch.lengths_M, batch.lengths_M)
    for at in np.flatnonzero(batch.loss_mask_S).tolist():
        yield tuple(batch.tokens_S[begins_S[at] : at].tolist())


FORKED = episode(([1, 2], [5], False), ([3], [6, 7], False), ([1, 9], [8], True))
CUT = episode(([1, 2], [5, 6], False), tail=[3, 4])
CUT_WITHOUT_TAIL = episode(([1, 2], [5], False), tail=[])


def test_a_critic_is_asked_before_and_after_each_answer_and_at_the_ends() -> None:
    asked = questions(batch_of(FORKED, CUT, CUT_WITHOUT_TAIL), answers=True, ends=True)
    answer, end = np.zeros((2, asked.asked.num_loss_tokens), np.bool_)
    answer[asked.lesson_N] = ~asked.own_N
    end[asked.ends_N] = True
    assert list(zip(prefixes(asked.asked), answer.tolist(), end.tolist(), strict=True)) == [
        ((1, 2), False, False),
        ((1, 2, 5), True, False),
        ((1, 2, 5, 3), False, False),
        ((1, 2, 5, 3, 6), False, False),
        ((1, 2, 5, 3, 6, 7), True, False),
        ((1, 9), False, False),  # a fork begins a new sample
        ((1, 9, 8), True, False),
        ((1, 2), False, False),
        ((1, 2, 5), False, False),
        ((1, 2, 5, 6), True, False),
        ((1, 2, 5, 6, 3, 4), False, True),
        ((1, 2), False, False),
        ((1, 2, 5), True, True),
    ]
    assert asked.lesson.turns_N.tolist() == [0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0]
    values_N = np.arange(asked.asked.num_loss_tokens, dtype=np.float32)
    lesson, learned_N, ends_M = asked.answered(values_N)
    assert learned_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12]
    assert ends_M.tolist() == [0, 0, 10, 12]
    assert lesson.num_loss_tokens == len(learned_N) == len(lesson.support_N)


def test_a_batch_without_more_questions_is_the_batch_itself() -> None:
    batch = batch_of(FORKED, CUT)
    plain = questions(batch, answers=False, ends=False)
    assert plain.asked is plain.lesson is batch
    with_ends = questions(batch, answers=False, ends=True)
    assert with_ends.lesson is batch
    assert with_ends.own_N.all()
    assert [
        prefix
        for prefix, end in zip(prefixes(with_ends.asked), with_ends.ends_N, strict=True)
        if end
    ] == [(1, 2, 5, 6, 3, 4)]


@st.composite
def episodes(draw: st.DrawFn) -> Trajectory:
    some = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    turns = [(draw(some), draw(some), draw(st.booleans())) for _ in range(draw(st.integers(1, 4)))]
    return episode(*turns, tail=draw(st.none() | st.lists(st.integers(1, 9), max_size=3)))


@given(st.lists(episodes(), min_size=1, max_size=4))
def test_every_turn_of_every_episode_is_asked_about_once(listed: list[Trajectory]) -> None:
    batch = batch_of(*listed)
    asked = questions(batch, answers=True, ends=True)
    expected_answers, expected_ends, before = list[Prefix](), list[Prefix](), ()
    for played in listed:
        for number, turn in enumerate(played.turns):
            prompt = (
                tuple(turn.prompt_ids.tolist())
                if turn.forked or number == 0
                else (*before, *turn.prompt_ids)
            )
            before = (*prompt, *turn.completion.token_ids)
            expected_answers.append(before)
        if isinstance(played.status, Truncated):
            expected_ends.append((*before, *played.tail_ids))
    in_lesson = list(prefixes(asked.lesson))
    assert [p for p, own in zip(in_lesson, asked.own_N, strict=True) if not own] == expected_answers
    assert [p for p, own in zip(in_lesson, asked.own_N, strict=True) if own] == list(
        prefixes(batch)
    )
    assert [
        p for p, end in zip(prefixes(asked.asked), asked.ends_N, strict=True) if end
    ] == expected_ends
