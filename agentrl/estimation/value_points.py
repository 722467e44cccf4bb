"""The points of a batch at which a critic is asked: before its loss tokens, after its answers, and
at the ends of episodes.

     prompt ▸ answer ▸ prompt ▸ answer ▸ tail ▸
            V        Q        V        Q      end

A critic predicts the return that it expects *before* a token. So it is asked after an answer, or at
an end, by one more loss token there. Which token that is does not matter, as nothing before it
attends to it.

Dimension suffixes: as in `agentrl/batch.py`.
"""

from dataclasses import dataclass

import numpy as np

from agentrl.batch import TrainBatch
from agentrl.tokens.arrays import FloatArray, MaskArray, Ragged


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions to a critic about a batch: before each loss token of `asked`.

    `lesson` has the questions that it learns from, which are all but those at the ends. `lesson_N`
    and `ends_N` say which loss tokens of `asked` are in the lesson, and which are at an end;
    `own_N`, which of the lesson's are the batch's own.
    """

    asked: TrainBatch
    lesson: TrainBatch
    lesson_N: MaskArray
    own_N: MaskArray
    ends_N: MaskArray

    def answered(self, values_N: FloatArray) -> tuple[TrainBatch, FloatArray, FloatArray]:
        """The lesson, its values, and by sample those after truncated trajectories, 0 for other
        samples.

        `values_N` are the answers to all questions.
        """
        ends_M = np.zeros(self.asked.num_samples, np.float32)
        if self.ends_N.any():
            ends_M[self.asked.truncated_M] = values_N[self.ends_N]
        return self.lesson, values_N[self.lesson_N], ends_M


def questions(batch: TrainBatch, *, answers: bool, ends: bool) -> Questions:
    """The loss tokens of a batch, and more of them for a critic.

    With `answers`, there is one after the last loss token of each turn: the value before it is that
    of the answer, before the environment has replied. With `ends`, there is one after each
    truncated trajectory and the tokens that would have been answered next (`tails_M`): the value
    before it is that of the end. Without such tokens, the last answer's is the end's too.
    """
    cut_M = batch.truncated_M & ends
    if not answers and not cut_M.any():
        all_N = np.ones(batch.num_loss_tokens, np.bool_)
        return Questions(batch, batch, all_N, all_N, ~all_N)
    # Make room for the new loss tokens behind each sample, and then say which tokens they are.
    longer = batch.lengthened(_added_tokens(batch.tails_M, cut_M, answers=answers))
    own_S, ends_S = longer.loss_mask_S, np.zeros(len(longer.tokens_S), np.bool_)
    ends_S[np.cumsum(longer.lengths_M)[cut_M] - 1] = True
    learned_S = own_S.copy()
    if answers:
        # The token after the last loss token of each turn, in the same sample.
        samples_N = np.repeat(np.arange(batch.num_samples), batch.loss_tokens_M)
        last_N = (np.diff(samples_N) != 0) | (np.diff(batch.turns_N) != 0)
        learned_S[np.flatnonzero(own_S)[np.append(last_N, True)] + 1] = True
    asked = longer.with_loss_on(learned_S | ends_S)
    lesson = longer.with_loss_on(learned_S) if answers else batch
    asked_S = asked.loss_mask_S
    return Questions(asked, lesson, learned_S[asked_S], own_S[learned_S], ends_S[asked_S])


def _added_tokens(tails_M: Ragged, cut_M: MaskArray, *, answers: bool) -> Ragged:
    """The tokens to add to each sample: the tail of one that was cut, and a token to ask before.

    Example: with `answers`, a sample that was cut before the tail [8, 9] gets [8, 9, 0], and
    another one [0].
    """
    counts_M = tails_M.lengths * cut_M + (cut_M | answers)
    tokens = np.zeros(int(counts_M.sum()), np.int32)
    is_tail = np.ones(len(tokens), np.bool_)
    is_tail[np.cumsum(counts_M)[counts_M > 0] - 1] = False
    tokens[is_tail] = tails_M.values[cut_M[tails_M.row_of_value()]]
    return Ragged(tokens, counts_M)
