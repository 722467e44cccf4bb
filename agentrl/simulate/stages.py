"""Estimates how long each stage of a step takes on given devices, from the shape of the model,
without running it.

Three costs are counted: matrix products (FLOP over FLOP/s), memory reads (bytes over bandwidth) and
transfers (bytes over link bandwidth), each at an assumed share of the device's peak. The rollout
itself has no formula: its times go into a `World`, where the production scheduler plays it, so that
batches, tails, staleness and overlap count.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from statistics import fmean

from agentrl import plugins
from agentrl.errors import ConfigError
from agentrl.models.facts import ModelFacts
from agentrl.placement.config import Assumptions
from agentrl.placement.device_map import DeviceMap
from agentrl.placement.devices import DeviceKind
from agentrl.placement.footprint import (
    EngineLayout,
    TrainerLayout,
    context_bytes,
    dispatched,
    engine_footprint,
    exchanged,
    experts_elsewhere,
    summed,
    tokens_cached,
    trained_parameters,
    trainer_asleep,
    unit_numbers,
    weight_bytes,
    weights_on_device,
    weights_read,
)
from agentrl.placement.rows import lockstep_ratio, pack_rows
from agentrl.rollout.config import RolloutConfig
from agentrl.settings.precision import resolve_dtype
from agentrl.simulate.config import SimulatedEngineConfig, SimulationConfig
from agentrl.simulate.latency import Constant, Latency
from agentrl.weights.config import WeightsConfig
from agentrl.weights.moved import BytesMoved, Parties, Placed, Way
from agentrl.weights.transport import Transport

_MOST_DRAWN = 1024
"""Most episodes whose lengths are drawn."""
_OF_ALL_REPLICAS = ("groups_per_step", "max_live_episodes", "min_live_episodes")


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's work: the episodes trained on, and the mean turns, sampled tokens and observed
    tokens of an episode.

    `longest`: the tokens of the longest episode that can be; 0 if nothing bounds it but the model's
    context. `lengths`: the tokens of single episodes, as they are drawn; empty if all are alike.
    """

    episodes: int
    turns: float
    sampled: float
    observed: float
    longest: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def episode_tokens(self) -> float:
        """Tokens of a whole episode."""
        return self.sampled + self.observed

    @property
    def tokens(self) -> float:
        """Tokens that a step trains on."""
        return self.episodes * self.episode_tokens


def workload(rollout: RolloutConfig, simulation: SimulationConfig) -> Workload:
    """The mean workload that the section `simulation` describes, within the limits of `rollout`."""
    turns = _mean(simulation.env.turns, 1, rollout.budget.turns)
    answer = _mean(simulation.engine.answer_tokens, 1, rollout.sampling.max_tokens)
    observed = simulation.prompt_tokens + (turns - 1) * simulation.observation_tokens
    longest = simulation.prompt_tokens + (rollout.budget.turns - 1) * simulation.observation_tokens
    longest += rollout.budget.most_tokens(rollout.sampling.max_tokens)
    episodes = rollout.groups_per_step * rollout.group_size
    lengths = _draw_lengths(rollout, simulation, min(episodes, _MOST_DRAWN), longest)
    return Workload(episodes, turns, turns * answer, observed, longest, lengths)


def _draw_lengths(
    rollout: RolloutConfig, simulation: SimulationConfig, count: int, longest: int
) -> tuple[int, ...]:
    """The tokens of so many episodes; empty if all are alike."""
    turns, answers = simulation.env.turns, simulation.engine.answer_tokens
    if isinstance(turns, Constant) and isinstance(answers, Constant):
        return ()
    limits = rollout.budget.turns, rollout.sampling.max_tokens
    lengths = []
    for played, sampled in _draw_episodes(turns, answers, limits, count):
        observed = simulation.prompt_tokens + (played - 1) * simulation.observation_tokens
        lengths.append(min(round(observed + sampled), longest))
    return tuple(lengths)


@lru_cache(maxsize=64)
def _draw_episodes(
    turns: Latency, answers: Latency, limits: tuple[int, int], count: int
) -> tuple[tuple[int, float], ...]:
    """The turns and the sampled tokens of so many episodes. `limits`: the most turns of an episode,
    and the most tokens of an answer.
    """
    rng, drawn = Random(0), []
    for _ in range(count):
        played = round(min(max(turns.sample(rng), 1), limits[0]))
        said = (min(max(answers.sample(rng), 1), limits[1]) for _ in range(played))
        drawn.append((played, sum(said)))
    return tuple(drawn)


@lru_cache(maxsize=64)
def _mean(latency: Latency, least: float, most: float) -> float:
    rng = Random(0)
    return fmean(min(max(latency.sample(rng), least), most) for _ in range(2048))


@lru_cache(maxsize=256)
def _lockstep_ratio(lengths: tuple[int, ...], limit: int, attention: float, ranks: int) -> float:
    if ranks < 2:
        return 1.0
    costs = [length + attention / 2 * length**2 for length in lengths]
    rows = pack_rows(lengths, costs, limit, ranks)
    packed = [[sum(costs[number] for number in one) for one in row] for row in rows]
    return lockstep_ratio(packed, ranks)


@dataclass(frozen=True, slots=True)
class TrainSeconds:
    """Seconds of one training step: compute and communication, which overlap, and the optimizer
    after them.
    """

    compute: float
    communication: float
    optimizer: float

    @property
    def total(self) -> float:
        """Compute and communication overlap, so the longer of the two counts."""
        return max(self.compute, self.communication) + self.optimizer


@dataclass(frozen=True, slots=True)
class SentWeights:
    """How a run sends new weights to its engines."""

    config: WeightsConfig = field(default_factory=WeightsConfig)
    """The settings, in the number format of the engines (`WeightsConfig.in_format_of`)."""
    on_devices: bool = True
    """The cluster assigns devices."""
    reads_arrivals: bool = False
    """All engines that get them can read live shipments (`EngineOffers`)."""
    low_rank: bool = False
    """The trainer sends adapters alone."""
    as_adapters: bool = False
    """The engines serve adapters beside their weights, and do not merge them."""

    def placed(self, devices: DeviceMap | None) -> Placed:
        """What `weights.transport=auto` chooses by, on the devices of a map."""
        known = devices if self.on_devices else None
        return Placed(
            on_gpus=known is not None and known.inventory.kind.is_gpu,
            shares_devices=known is not None and bool(known.shared),
            reads_arrivals=self.reads_arrivals,
            low_rank=self.low_rank,
        )


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a step on the devices of a map."""

    facts: ModelFacts
    engine: EngineLayout
    trainer: TrainerLayout
    assume: Assumptions
    reference: TrainerLayout | None = None
    critic: TrainerLayout | None = None
    frozen: int = 0
    """Engines beside each engine, for models of agents that do not learn; assumed to have the
    engine's size.
    """
    sent: SentWeights = field(default_factory=SentWeights)
    """How new weights go to the engines."""

    def train_flop(self, work: Workload) -> float:
        """FLOP of a step.

        For each weight that a token meets, the forward pass takes 2 and the backward pass twice
        that (6 N in all: Kaplan et al. 2020, arXiv 2001.08361); of experts, only the chosen ones
        count. Attention comes on top. The head counts only at sampled tokens, and once more in the
        backward pass, which computes the logits again. Full recomputation is one more forward pass,
        and so are the old logprobs of all minibatches except the first. A reference takes one
        forward pass; a critic takes what the trainer does and one more forward pass. Both are
        counted with the trainer's head.
        """
        facts, layout = self.facts, self.trainer
        head = work.episodes * work.sampled * 2 * facts.embedding
        forward = work.tokens * (2 * facts.active + facts.attention * self._attended(work)) + head
        passes = 3 + (layout.recompute != "none") + (layout.minibatches - 1) / layout.minibatches
        others = bool(self.critic) + bool(self.reference)
        return (1 + bool(self.critic)) * (passes * forward + head) + others * forward

    def _attended(self, work: Workload) -> float:
        """The mean number of tokens before that a token sees: most tokens are of long episodes."""
        lengths = work.lengths or (work.episode_tokens,)
        seen = sum(length * self.facts.kv.mean_attended(length) for length in lengths)
        return seen / max(1, sum(lengths))

    def train(self, work: Workload, devices: DeviceMap) -> TrainSeconds:
        """Seconds of a training step. Ranks wait for the slowest one in every micro-batch."""
        facts, layout, kind = self.facts, self.trainer, devices.inventory.kind
        ranks = devices.of("trainer")
        flops = kind.flops_float32 if layout.precision == "float32" else kind.flops
        speed = self._share(devices, "trainer") * flops * self.assume.trainer_flops
        compute = self.train_flop(work) / (len(ranks) * speed)
        compute *= self.waiting(work, len(ranks))
        communication = self._communication(work, devices)
        parts = max(1, len(ranks) // layout.mesh.replicate) if layout.shards else 1
        bandwidth = kind.bandwidth * self._share(devices, "trainer") * self.assume.engine_bandwidth
        if layout.offload and kind.is_gpu:
            bandwidth = kind.host_link * self.assume.links
        # AdamW is bound by memory: it reads weight, gradient and two moments, and writes all but
        # the gradient.
        each = 3 * 4 + 4 * layout.moment_bytes
        optimizer = (
            layout.minibatches * each * trained_parameters(facts, layout) / parts / bandwidth
        )
        if self.critic:
            communication, optimizer = 2 * communication, 2 * optimizer
        return TrainSeconds(compute, communication, optimizer)

    def longest(self, work: Workload) -> int:
        """Tokens of the longest episode: what its turns can have, within the context of engine and
        model.
        """
        context = min(self.engine.max_context or self.facts.max_positions, self.facts.max_positions)
        return min(context, work.longest or context)

    def micro_batches(self, work: Workload, ranks: int) -> float:
        """Micro-batches of each rank in each minibatch. An episode is never cut, and a longer one
        goes alone.
        """
        episode = max(1.0, work.episode_tokens)
        together = max(1.0, self.trainer.micro_batch_tokens // episode)
        parts = ranks / self.trainer.mesh.sample_size
        return max(1.0, work.episodes / self.trainer.minibatches / parts / together)

    def _communication(self, work: Workload, devices: DeviceMap) -> float:
        """Seconds in which a rank sends in a step: weights and gradients inside of a replica of the
        model, sums of gradients between replicas, heads between the ranks of a context, hidden
        states between those that divide matrices, and tokens between those that divide experts.

        Neighbouring ranks make a replica, and in it a context, and groups that divide matrices or
        experts.
        """
        facts, layout, ranks = self.facts, self.trainer, devices.of("trainer")
        mesh, kind = layout.mesh, devices.inventory.kind
        shards = max(1, len(ranks) // mesh.replicate)

        def link(count: int) -> float:
            """Of the slowest of each so many neighbours."""
            groups = [ranks[i : i + count] for i in range(0, len(ranks), count)]
            apart = any(len({rank.node for rank in group}) > 1 for group in groups)
            return self.assume.links * (kind.network if apart else kind.link)

        divided = facts.expert_parameters if mesh.expert * mesh.tensor > 1 else 0
        own = divided - experts_elsewhere(facts, mesh) if divided else 0
        trained = trained_parameters(facts, layout)
        batches = self.micro_batches(work, len(ranks))
        # Gathering or summing among n ranks moves (n - 1) / n of the bytes through each of them.
        # Of a matrix that is divided, only the ranks that have the same part gather it.
        same = max(1, shards // mesh.tensor)
        whole = self._traffic(
            batches,
            facts.parameters - divided,
            trained if layout.lora_rank else trained - divided,
        )
        seconds = (same - 1) / same * whole / mesh.tensor
        alike = max(1, shards // mesh.expert)
        seconds += (alike - 1) / alike * self._traffic(batches, own, 0 if layout.lora_rank else own)
        seconds /= link(shards)
        part = 4 * trained / shards
        between = 2 * (mesh.replicate - 1) / mesh.replicate * part * layout.minibatches
        seconds += between / link(len(ranks))
        passes = 2 + (layout.recompute != "none") + (layout.minibatches - 1) / layout.minibatches
        each = layout.number * facts.layers * exchanged(facts, mesh) * passes
        tokens = work.tokens * mesh.tensor / len(ranks)
        sent = each * tokens * (mesh.context - 1) / mesh.context
        seconds += sent / link(mesh.sample_size)
        sent = layout.number * summed(facts, mesh) * passes * tokens
        seconds += 2 * (mesh.tensor - 1) / mesh.tensor * sent / link(mesh.tensor)
        # There and back, of the tokens that this rank computes.
        rows = 2 * layout.number * facts.layers * facts.hidden * dispatched(facts, mesh) * passes
        sent = rows * work.tokens / len(ranks) * (mesh.expert - 1) / mesh.expert
        return seconds + sent / link(mesh.expert)

    def waiting(self, work: Workload, ranks: int) -> float:
        """How many times as long ranks take that wait in every micro-batch for the slowest of them
        (`lockstep_ratio`), as the trainer packs a minibatch of such episodes.
        """
        mean = round(work.episode_tokens)
        lengths = work.lengths or (mean,) * min(work.episodes, _MOST_DRAWN)
        attention = self.facts.attention / (2 * self.facts.active)
        lengths = lengths[: max(1, len(lengths) // self.trainer.minibatches)]
        parts = ranks // self.trainer.mesh.sample_size
        return _lockstep_ratio(lengths, self.trainer.micro_batch_tokens, attention, parts)

    def _traffic(self, micro_batches: float, parameters: int, trained: int) -> float:
        """Bytes of so many parameters, of which so many are trained, that ranks gather and sum in a
        step: weights for each pass (ZeRO 3) or once after the update, and gradients in float32, of
        each micro-batch if they are sharded, else once for each minibatch.
        """
        layout = self.trainer
        sums = micro_batches if layout.shards >= 2 and not layout.accumulates_whole else 1
        gradients = 4 * trained * sums * layout.minibatches
        if layout.shards < 3:
            return layout.minibatches * 4 * parameters + gradients
        gathers = (1 if layout.keeps_gathered else 2) * micro_batches * layout.minibatches
        gathers += micro_batches * (layout.minibatches - 1)
        return parameters * gathers * layout.number + gradients

    def transport(self, devices: DeviceMap) -> str:
        """The name of the transport of new weights, as the run chooses it."""
        if self.sent.config.transport != "auto":
            return self.sent.config.transport
        return self.sent.placed(devices).transport

    def update(self, devices: DeviceMap) -> BytesMoved:
        """What an update of the engines' weights moves.

        Raises:
            ConfigError: the transport does not say it.
        """
        name = self.transport(devices)
        transport: Transport = plugins.load("weight_transports", name)(self.sent.config)
        if not hasattr(transport, "bytes_moved"):
            raise ConfigError(
                f"weights.transport={name} does not say what an update moves, so there is no"
                " plan: give it a method `bytes_moved`, as agentrl/weights/transport.py describes"
            )
        try:
            return transport.bytes_moved(self._parties(devices))
        finally:
            transport.close()

    def update_seconds(self, devices: DeviceMap) -> float:
        """Seconds to transfer new weights to all engines."""
        if not devices.of("engine") or not devices.of("trainer"):
            return 0.0
        kind = devices.inventory.kind
        moved, rates = self.update(devices), self._rates(kind)
        # On a CPU, all processes share the same cores, so their moves do not overlap.
        together = max if kind.is_gpu else sum
        busy = sum(
            together(move.largest / rates[move.way] for move in phase) for phase in moved.phases
        )
        return max(busy, moved.waiting) / self.assume.updates

    def _rates(self, kind: DeviceKind) -> dict[Way, float]:
        """Bytes/s of each way. A CPU takes bytes from memory as it takes them from a file that it
        has mapped: it sums, converts and copies them.
        """
        return {
            "link": kind.link * self.assume.links,
            "network": kind.network * self.assume.links,
            "memory": (
                kind.bandwidth * self.assume.engine_bandwidth
                if kind.is_gpu
                else self.assume.file_reading
            ),
            "writing": self.assume.file_writing,
            "reading": self.assume.file_reading,
        }

    def _parties(self, devices: DeviceMap) -> Parties:
        facts, low_rank = self.facts, self.sent.low_rank
        dtype = resolve_dtype(self.sent.config.dtype, None, gpu=devices.inventory.kind.is_gpu)
        number = 4 if low_rank or dtype == "float32" else 2
        ranks, split = devices.of("trainer"), devices.tensor_parallel()
        size = number * trained_parameters(facts, self.trainer)
        bucket = self.sent.config.bucket_mib << 20
        # Of a mixture, a layer goes as a whole.
        most = facts.layers + 1 if facts.experts and not low_rank else size
        return Parties(
            size=size,
            unit=number * unit_numbers(facts, self.trainer),
            bucket=bucket,
            buckets=min(most, -(-size // bucket)),
            ranks=[rank.node for rank in ranks],
            parts=len(ranks) // self.trainer.mesh.replicate if self.trainer.shards >= 3 else 1,
            engines=[engine.node for engine in devices.of("engine")],
            readers=split * devices.data_parallel,
            slices=split,
            places=[
                sum(replica.role == "trainer" for replica in devices.on(device))
                for device in devices.shared
            ],
            low_rank=low_rank,
            base=weight_bytes(facts, self.engine) if low_rank and not self.sent.as_adapters else 0,
        )

    def switch_seconds(self, devices: DeviceMap) -> float:
        """Seconds of both switches of a step, if roles take turns: each moves its state to host
        memory and back.
        """
        kind = devices.inventory.kind
        if not devices.time_shared or not kind.is_gpu:
            return 0.0
        most = max(sum(self.asleep(devices, device).values()) for device in devices.shared)
        return 2 * most / (kind.host_link * self.assume.links * self.assume.switches)

    def asleep(self, devices: DeviceMap, device: int) -> dict[str, int]:
        """Bytes in the host's memory of what sleeps on a device, by role, if roles take turns. The
        trainer keeps its part there while it is awake, too.
        """
        facts, here = self.facts, Counter(replica.role for replica in devices.on(device))
        ranks = len(devices.of("trainer"))
        weights = weights_on_device(facts, self.engine, devices.tensor_parallel())
        sizes = {"sleeping engine": here["engine"] * (1 + self.frozen) * weights}
        for role, layout in (
            ("trainer", self.trainer),
            ("reference", self.reference),
            ("critic", self.critic),
        ):
            if layout is not None:
                size = trainer_asleep(facts, layout, ranks, trains=role != "reference")
                sizes[f"sleeping {role}"] = here["trainer"] * size
        return {use: size for use, size in sizes.items() if size}

    def simulated_engine(
        self, work: Workload, devices: DeviceMap, base: SimulatedEngineConfig
    ) -> SimulatedEngineConfig:
        """The settings of the simulated engine: a step of B requests takes `fixed + B * each`
        seconds.

        `fixed` is the time in which each device reads its part of the weights once, of experts
        those that the requests choose; `each` is the time to read a request's KV cache and to
        multiply by every weight that a token meets. This is the roofline of Pope et al. 2022 (arXiv
        2211.05102), except that its two terms are added instead of taking the larger one.
        """
        facts, layout, kind = self.facts, self.engine, devices.inventory.kind
        split, context = devices.tensor_parallel(), round(work.episode_tokens)
        share = self._share(devices, "engine")
        bandwidth = split * kind.bandwidth * share * self.assume.engine_bandwidth
        flops = (
            split
            * share
            * (kind.flops if layout.number == 2 else kind.flops_float32)
            * self.assume.engine_flops
        )
        copies = len(devices.of("engine")) * layout.data_parallel
        live = min(layout.max_batch, max(1.0, work.episodes / max(1, copies)))
        each = 2 * (facts.active + facts.embedding) / flops
        prefill = each
        # All devices of a copy read at once; each has at least one head of keys, or the latent.
        each += split * context_bytes(facts, layout, split, max(1, context // 2)) / bandwidth
        fixed = split * weights_read(facts, layout, split, live) / bandwidth
        if kind.is_gpu:
            fixed += self.assume.engine_step_seconds
            sums = 2 * facts.layers * (split > 1)
            fixed += sums * self.assume.all_reduce_seconds
            each += (
                sums
                * 2
                * layout.number
                * facts.hidden
                * (split - 1)
                / split
                / (kind.link * self.assume.links)
            )
        size = engine_footprint(facts, layout, split, kind, context, assume=self.assume)
        cache = size.parts["kv cache"]
        # Its copies of the attention layers work side by side, each on its own requests.
        each, prefill = each / layout.data_parallel, prefill / layout.data_parallel
        live *= layout.data_parallel
        tokens = tokens_cached(facts, layout, split, cache, max(1, context))
        tokens *= layout.data_parallel
        longest = min(layout.max_context or facts.max_positions, facts.max_positions)
        bounded = layout.fraction is not None or layout.kv_bytes is not None
        slowdown = each / (fixed + each)
        return base.model_copy(
            update={
                "slots": layout.max_batch * layout.data_parallel,
                "seconds_per_token": fixed + each,
                "slowdown": slowdown,
                "knee": 1,
                # Prefills share the device with each other and with decoding requests. Each takes
                # so long that, with `live` requests running, all of them together take the seconds
                # of their matrix products.
                "prefill_seconds_per_token": prefill * live / (1 + slowdown * (live - 1)),
                "max_context": min(longest, tokens) if bounded else longest,
                "kv_tokens": tokens if bounded else None,
            }
        )

    def simulation(
        self, work: Workload, devices: DeviceMap, base: SimulationConfig
    ) -> SimulationConfig:
        """The section `simulation` with the times of this map instead of its own, and with a single
        engine: all engines are alike, and `share` gives the rollouts of each.
        """
        train = self.train(work, devices).total
        return base.model_copy(
            update={
                "engine": self.simulated_engine(work, devices, base.engine),
                "engines": 1,
                "episode_seconds": None,
                "train_seconds": Constant(value=train),
                "update_seconds": Constant(value=self.update_seconds(devices)),
                "time_shared": devices.time_shared,
                "switch_seconds": self.switch_seconds(devices),
            }
        )

    def share(self, rollout: RolloutConfig, devices: DeviceMap) -> RolloutConfig:
        """The rollouts of one replica of the engine."""
        replicas = max(1, len(devices.of("engine")))
        rollout = rollout.with_places(replicas * self.engine.max_batch)
        parts = {
            name: max(1, round(getattr(rollout, name) / replicas)) for name in _OF_ALL_REPLICAS
        }
        return rollout.model_copy(update=parts)

    @staticmethod
    def _share(devices: DeviceMap, role: str) -> float:
        """A replica's share of its device, which other replicas of its role may use too."""
        replicas = [replica for replica in devices.replicas if replica.role == role]
        return (
            1 / sum(replicas[0].devices[0] in replica.devices for replica in replicas)
            if replicas
            else 1.0
        )
