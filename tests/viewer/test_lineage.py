"""The tree of an episode's calls."""

from typing import Any

from agentrl.viewer.lineage import parents


def turn(prompt: list[int], answer: list[int], forked: bool = False) -> dict[str, Any]:
    return {"prompt_ids": prompt, "token_ids": answer, "forked": forked}


def test_turns_of_one_conversation_continue_the_one_before() -> None:
    assert parents([turn([1], [2]), turn([3], [4]), turn([5], [6])]) == [None, 0, 1]
    assert parents([]) == []


def test_a_branch_continues_the_call_whose_words_it_repeats_also_one_that_is_in_a_later_row() -> (
    None
):
    right = turn([1, 2, 20, 7], [30])  # after the plan below
    plan, left = turn([1, 2], [20], forked=True), turn([8], [40])
    more, other = turn([9], [50]), turn([1, 3, 3], [60], forked=True)
    assert parents([right, plan, left, more, other]) == [1, None, 1, 2, None]


def test_an_edited_history_continues_the_last_turn_that_it_still_has_whole() -> None:
    turns = [
        turn([1], [2]),
        turn([3], [4]),
        turn([5], [6]),
        turn([1, 2, 3, 4, 9], [7], forked=True),
    ]
    assert parents(turns) == [None, 0, 1, 1]
    assert parents([turn([1], [2]), turn([1, 9, 9], [3], forked=True)]) == [None, None]
