"""What a task source must have, and what it may have besides."""

from agentrl.protocols import TaskSourceOffers, count_tasks
from agentrl.trajectory import Task


class Endless:
    """A source with nothing but tasks."""

    def task(self, index: int) -> Task:
        return Task("dice", index, {}, str(index))


class Three(Endless):
    """A finite source that counts how often its fingerprint is computed."""

    computed = 0

    def __len__(self) -> int:
        return 3

    @property
    def fingerprint(self) -> str:
        self.computed += 1
        return "one two three"


def test_a_source_needs_a_task_by_its_index_and_nothing_else() -> None:
    assert TaskSourceOffers.of(Endless()) == TaskSourceOffers()
    assert count_tasks(Endless(), 5) == 5


def test_a_finite_source_has_no_more_tasks_than_its_length() -> None:
    assert [count_tasks(Three(), most) for most in (2, 3, 5)] == [2, 3, 3]


def test_the_fingerprint_of_a_source_is_computed_once_where_its_offers_are_read() -> None:
    source = Three()
    assert TaskSourceOffers.of(source).fingerprint == "one two three"
    assert source.computed == 1
    assert TaskSourceOffers.of(Three).fingerprint is None, "a class does not tell"
