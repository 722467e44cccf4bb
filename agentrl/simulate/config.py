"""Settings of simulated runs: the models of the engine, the environments and the trainer."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.settings.base import Settings
from agentrl.simulate.latency import NO_TIME, Constant, Latency


class SimulatedOutage(Settings):
    """A time in which the server of all environments cannot be reached. It has lost its episodes
    when it is back.
    """

    at: float = Field(ge=0)
    """The beginning, in seconds."""
    seconds: float = Field(ge=0)
    """The duration, in seconds; 0 is a crash of all live episodes."""

    def hits(self, began: float, when: float) -> bool:
        """True if it breaks off an episode that began at `began` and is called at `when`."""
        return began < self.at + self.seconds and when >= self.at


class SimulatedEngineConfig(Settings):
    """Settings of the simulated engine. With all times 0 it is *instant*: it answers at once,
    without a batch.
    """

    slots: int = Field(64, gt=0)
    """Most requests decoded at once; the others wait, in order of priority and arrival."""
    seconds_per_token: float = Field(0.02, ge=0)
    """Seconds for each sampled token of each request, up to `knee` requests at once."""
    prefill_seconds_per_token: float = Field(0.0, ge=0)
    """Seconds for each prompt token that is not cached."""
    slowdown: float = Field(0.0, ge=0)
    """Slowdown of all requests for each further `knee` requests: 1 means twice the seconds at 2 *
    knee.
    """
    knee: int = Field(64, gt=0)
    """Most requests at once that do not slow each other down."""
    answer_tokens: Latency = Constant(value=64)
    """Tokens of an answer (rounded, at least 1); the request's `max_tokens` limits it."""
    max_context: int = Field(32768, gt=1)
    """Largest prompt plus completion, in tokens."""
    kv_tokens: int | None = Field(None, gt=1)
    """Capacity of the KV cache in tokens; when it is full, the newest of the least urgent
    requests is preempted.
    """
    kv_on_update: Literal["recompute", "keep", "reuse"] = "recompute"
    """The context of requests after a weight update: prefilled again (`recompute`); that of running
    requests kept (`keep`); or that of each session kept, within `rollout.max_staleness` (`reuse`).
    """
    kv_max_staleness: int = Field(0, ge=0)
    """How many versions older than the weights the KV may be that `reuse` keeps; in a simulation of
    rollouts, `rollout.max_staleness` sets it.
    """
    lost: float = Field(0.0, ge=0, le=1)
    """Share of requests that are never answered, drawn by the request's seed. They occupy no
    slot.
    """
    hangs_at: float | None = Field(None, ge=0)
    """Second of the event loop's clock at which the engine silently stops working."""
    dies_at: float | None = Field(None, ge=0)
    """Second of the event loop's clock from which all calls raise `EngineDeadError`."""
    seed: int = 0
    """Seed of the answer lengths."""

    @model_validator(mode="after")
    def _cache_holds_a_request(self) -> Self:
        if self.kv_tokens is not None and self.kv_tokens < self.max_context:
            raise ValueError(
                f"kv_tokens ({self.kv_tokens}) must hold one request of max_context"
                f" ({self.max_context})"
            )
        if self.kv_tokens is not None and self.seconds_per_token == 0:
            raise ValueError(
                "kv_tokens needs seconds_per_token > 0: the cache fills as tokens are sampled"
            )
        return self


class SimulatedEnvsConfig(Settings):
    """Settings of the episodes. Shares of troubles are shares of attempts; an attempt has at
    most one trouble.
    """

    turns: Latency = Constant(value=8)
    """Steps of an episode (rounded, at least 1)."""
    reset_seconds: Latency = NO_TIME
    """Seconds of a reset."""
    step_seconds: Latency = NO_TIME
    """Seconds of a step, drawn for each."""
    solve_rate: float = Field(0.5, ge=0, le=1)
    """Share of episodes with reward 1 in tasks that are neither hopeless nor trivial; the
    others get 0.
    """
    hopeless: float = Field(0.0, ge=0, le=1)
    """Share of tasks whose episodes all get 0."""
    trivial: float = Field(0.0, ge=0, le=1)
    """Share of tasks whose episodes all get 1."""
    hung: float = Field(0.0, ge=0, le=1)
    """Share of attempts in which a step never returns."""
    crash: float = Field(0.0, ge=0, le=1)
    """Share of attempts in which a step raises."""
    fail_slow: float = Field(0.0, ge=0, le=1)
    """Share of attempts in which a step takes `fail_slow_seconds` longer."""
    fail_slow_seconds: float = Field(600.0, ge=0)
    """Seconds that such a step takes longer."""
    slow_drip: float = Field(0.0, ge=0, le=1)
    """Share of attempts in which each step takes `slow_drip_factor` times as long."""
    slow_drip_factor: float = Field(10.0, ge=1)
    """Factor by which each step of such an attempt takes longer."""
    cores: int | None = Field(None, gt=0)
    """Cores that compute the resets and steps of all environments, each one at a time; the others
    wait. None: there are enough."""
    outages: tuple[SimulatedOutage, ...] = ()
    """Times in which no environment can be reached: `[{at: 100, seconds: 20}]`."""

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for shares in (("hopeless", "trivial"), ("hung", "crash", "fail_slow", "slow_drip")):
            if sum(getattr(self, name) for name in shares) > 1:
                raise ValueError(
                    f"{' + '.join(shares)} must not be above 1: they are shares of one whole"
                )
        return self


class SimulatedCpuConfig(Settings):
    """CPU time of the controller and of the rollout workers (`rollout.workers`), each of which is
    one core. With all times 0, they cost nothing.

    `benchmarks/at_scale.py` has the times of a machine, and how they were measured.
    """

    turn_seconds: float = Field(0.0, ge=0)
    """Of a turn, in the process that plays it: rendering, tokenising, requests, and environments
    that compute there."""
    controller_episode_seconds: float = Field(0.0, ge=0)
    """Of an episode, in the controller: tickets, slots, ledger, score."""
    controller_turn_seconds: float = Field(0.0, ge=0)
    """Of each turn that a rollout worker has played, in the controller: its part of the arrays and
    reports."""
    batch_episode_seconds: float = Field(0.0, ge=0)
    """Of each episode of a batch, in the controller, before the trainer's step: samples, metrics,
    files."""


class SimulationConfig(Settings):
    """The models of engine, environments and trainer in a simulated run."""

    engine: SimulatedEngineConfig = SimulatedEngineConfig()
    engines: int = Field(1, ge=1)
    """Replicas of the engine."""
    env: SimulatedEnvsConfig = SimulatedEnvsConfig()
    cpu: SimulatedCpuConfig = SimulatedCpuConfig()
    episode_seconds: Latency | None = None
    """If given, an episode is one span of this many seconds, without engine and environments, to
    study the scheduler alone. Three times as fast to simulate."""
    prompt_tokens: int = Field(256, gt=0)
    """Tokens of the first prompt."""
    observation_tokens: int = Field(64, gt=0)
    """Tokens that each further observation adds."""
    train_seconds: Latency = Constant(value=30.0)
    """Seconds of a training step."""
    update_seconds: Latency = Constant(value=0.0)
    """Seconds to transfer new weights to the engines."""
    time_shared: bool = False
    """True if the engines sleep while the trainer works, as they do if both share devices."""
    switch_seconds: float = Field(0.0, ge=0)
    """Seconds per step for both switches between engines and trainer."""
