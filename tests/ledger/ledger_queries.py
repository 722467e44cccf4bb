"""What tests ask a ledger."""

from agentrl.ledger.ledger import LedgerReader


def trained_tasks(ledger: LedgerReader) -> list[str]:
    """The ids of the tasks trained on, in order of index."""
    trained = {
        task.id: number
        for number, task, _ in ledger.outcomes()
        if ledger.task(number).fate == "trained"
    }
    return sorted(trained, key=trained.__getitem__)


def why_failed(ledger: LedgerReader) -> list[tuple[str, int]]:
    """The reasons of failed episodes, the commonest first, with their counts."""
    return [
        (tally.why, tally.count)
        for tally in ledger.reasons("episodes", 1000)
        if tally.fate == "failed"
    ]
