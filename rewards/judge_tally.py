"""`JudgeTally`: what a judge has cost, how long it took, and how it failed."""

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

Trouble = Literal["unreachable", "busy", "unreadable"]
"""Reasons for a request without a verdict: no server answered, the server was busy, or the answer
was not a verdict."""
TROUBLES: tuple[Trouble, ...] = ("unreachable", "busy", "unreadable")


@dataclass(slots=True)
class JudgeTally:
    """Counts since the last `take`, and the total cost. Prices are per token."""

    prompt_price: float = 0.0
    completion_price: float = 0.0
    cached: int = 0
    failures: Counter[Trouble] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    total_cost: float = 0.0

    def count_answer(self, prompt_tokens: int, completion_tokens: int, seconds: float) -> None:
        """Count an answer, readable or not: both cost money."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.latencies.append(seconds)

    def take(self) -> dict[str, float]:
        """Return the counts as metrics and reset them. Latencies are seconds, of answered requests
        only.
        """
        cost = (
            self.prompt_tokens * self.prompt_price + self.completion_tokens * self.completion_price
        )
        self.total_cost += cost
        metrics: dict[str, float] = {
            "answers": float(len(self.latencies)),
            "cached": float(self.cached),
            **{str(kind): float(self.failures[kind]) for kind in TROUBLES},
            "prompt_tokens": float(self.prompt_tokens),
            "completion_tokens": float(self.completion_tokens),
            "cost": cost,
            "total_cost": self.total_cost,
        }
        if self.latencies:
            metrics |= {"latency_mean": fmean(self.latencies), "latency_max": max(self.latencies)}
        self.cached = self.prompt_tokens = self.completion_tokens = 0
        self.failures.clear()
        self.latencies.clear()
        return metrics
