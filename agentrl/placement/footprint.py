"""The memory that a model takes on a device, in bytes, by the settings of trainer and engine,
before anything runs.

Trainers and engines describe themselves by the method `layout()` of their `Config`, and
`agentrl/models/facts.py` counts what a token leaves in memory.

    weights, gradients, optimizer   a rank's part of them
    gathered                        weights of the blocks that a rank computes with, as a whole
    block gradients                 gradients of these, before they are summed over the ranks
    reduce-scatter                  the float32 buffer in which FSDP sums them
    activations, logits             what a micro-batch leaves for its backward pass
    kv cache                        keys and values of an engine's requests
    step activations                the same of the largest step of an engine
    weight staging                  a layer of new weights beside the old ones
    fragmentation                   what is lost between the blocks of a trainer's allocator
    cuda context, nccl, cuda graphs what a process keeps on a GPU, also while it sleeps

Terms are counted where they are largest at the same time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal

from agentrl.models.facts import ModelFacts
from agentrl.models.layer_facts import Kept
from agentrl.placement.config import Assumptions
from agentrl.placement.devices import GIB, DeviceKind
from agentrl.placement.mesh import ONE_RANK, Mesh

Precision = Literal["float32", "bfloat16", "autocast"]
"""The number format that a trainer computes in: `autocast` keeps float32 weights and casts them for
each product."""

Recompute = Literal["none", "selective", "full"]
"""The activations that a trainer computes again in the backward pass: none; all of a layer except
the products of its matrices and its attention; or all."""

USABLE_SHARE = 0.98
"""Usable share of a GPU's memory: the rest is the driver's. What processes take besides tensors is
counted by name.
"""
USABLE_HOST_SHARE = 0.95
"""Usable share of a host's memory: the rest is the system's, or lost between blocks of the
allocator.
"""

LOGITS_AT_ONCE = 1 << 25
"""Logits that a trainer computes at a time (`agentrl/trainers/compute/logprobs.py`); more where
memory is free."""
LOGIT_BYTES = 10.5
"""Most bytes for each of these at the peak."""
QUERIES_AT_ONCE = 256
"""Queries whose attention a trainer computes at a time where no fused kernel can
(`agentrl/trainers/compute/attention.py`).
"""
GRADIENTS_AT_ONCE = 50_000_000
"""Elements of gradients that DeepSpeed adds up over the ranks at a time (by default ten times as
many).
"""
_ASSUMED = Assumptions()
KEPT_ASLEEP = ("cuda context", "nccl", "cuda graphs")
"""Uses of a GPU's memory by a process that sleeps."""
_TAKEN_LATER = ("step activations", "weight staging")
"""Uses of an engine's memory that its steps and updates begin with, and not its waking."""
_LOGIT_BYTES = 20
"""Bytes for each logit of an engine's step besides itself: in float32, as a logprob, and sorted by
its value, with an index of 8 bytes.
"""
_HEAD_BYTES = {"float32": 8.5, "bfloat16": LOGIT_BYTES, "autocast": LOGIT_BYTES}
"""Bytes for each of these at the peak. Measured from torch's allocator (a test measures it again).
"""


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The layout of a trainer over its ranks."""

    precision: Precision
    """The number format of products."""
    micro_batch_tokens: int
    """Tokens of a micro-batch."""
    minibatches: int
    """Updates in each step."""
    recompute: Recompute
    """The activations that are computed twice instead of kept."""
    mesh: Mesh = ONE_RANK
    """The mesh of its ranks."""
    grows: bool = False
    """There can be several ranks."""
    shards: int = 0
    """The state that is sharded over the ranks, as in ZeRO (Rajbhandari et al. 2019, arXiv
    1910.02054): 1 the optimizer, 2 gradients too, 3 weights too."""
    keeps_gathered: bool = False
    """Weights are whole from the first pass to the last."""
    accumulates_whole: bool = False
    """Gradients of all weights are kept whole until the last micro-batch."""
    offload: bool = False
    """Gradients and optimizer, and sharded weights, are in the host's memory."""
    lora_rank: int = 0
    """The rank of low-rank updates, if only those are trained."""
    trains_tower: bool = False
    """Of a model that sees: its tower or its projector is trained too."""
    lora_targets: tuple[str, ...] = ()
    """The ends of the names of the layers that have them; all if there are none."""
    activation_offload: bool = False
    """The inputs of layers are kept in the host's memory."""
    moment_bytes: float = 4
    """Bytes of each of AdamW's two moments of a parameter."""
    copies_weights: bool = False
    """The optimizer has float32 copies of the weights that it updates."""
    gradients_at_once: int = 0
    """Elements of a float32 buffer in which gradients of all ranks are added up."""
    sums_blocks: bool = False
    """The gradients of a block are added up together, in a float32 buffer of the block's size that
    lives until the next block's, as FSDP2 does it."""
    sleeps: bool = True
    """It can release its memory on a GPU."""

    @property
    def number(self) -> int:
        """Bytes of a number in computations."""
        return 4 if self.precision == "float32" else 2


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The layout of an engine over its devices."""

    number: int = 4
    """Bytes of a number in computations, and by default of each weight and in the KV cache."""
    weight_number: int | None = None
    """Bytes of each weight of a block, if they are kept in another format."""
    kv_number: int | None = None
    """Bytes of each number of the KV cache, if they are kept in another format."""
    max_batch: int = 128
    """Requests that are sampled together, by each copy of the attention layers."""
    max_context: int | None = None
    """Tokens of the longest context; by default the model's."""
    tensor_parallel: int = 1
    """Devices of each copy."""
    data_parallel: int = 1
    """Copies of the attention layers in an engine, over which the experts are divided."""
    splits: tuple[int, ...] = (1,)
    """The numbers of devices over which a copy may be spread."""
    fraction: float | None = None
    """Share of a device that it takes regardless of need, or None if it takes what it needs."""
    kv_bytes: int | None = None
    """Bytes of its cache, if set."""
    kv_bytes_on_cpu: int | None = None
    """Bytes of its cache on a CPU, if set."""
    prefill_tokens: int = 4096
    """Tokens of a prefill pass."""
    compact_cache: bool = False
    """The cache has the latent form of `KvShape.numbers`."""
    graphs: bool = False
    """It records CUDA graphs on GPUs."""
    reloads_layers: bool = False
    """New weights are put together layer by layer beside the old ones."""
    here: bool = True
    """False if another machine runs the engine."""
    sleeps: bool = True
    """It can release its memory on a GPU."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device, and in its host's memory for it, by use."""

    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes on the device."""
    host_parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes in the host's memory."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self.parts.values())

    @property
    def host(self) -> int:
        """All bytes in the host's memory."""
        return sum(self.host_parts.values())

    @property
    def asleep(self) -> int:
        """Bytes that it keeps on the device while it sleeps."""
        return sum(self.parts.get(use, 0) for use in KEPT_ASLEEP)

    @property
    def to_wake(self) -> int:
        """Bytes that must be free on the device before it wakes."""
        later = sum(self.parts.get(use, 0) for use in _TAKEN_LATER)
        return self.total - self.asleep - later


def trainer_footprint(
    facts: ModelFacts, layout: TrainerLayout, ranks: int, micro_batches: float = 1, longest: int = 0
) -> Footprint:
    """The peak memory of one rank of `ranks` while it trains on episodes of at most `longest`
    tokens.

    Weights and gradients are float32: 4 + 4 bytes for each trained parameter, and `moment_bytes`
    for each of AdamW's two moments; each is divided by the ranks of a replica if it is sharded. A
    micro-batch is as large as `micro_batch_tokens`, or as the longest episode, which is never cut
    except over the ranks of a context.
    """
    trained, mesh = trained_parameters(facts, layout), layout.mesh
    shards = max(1, ranks // mesh.replicate)
    tokens = -(-max(layout.micro_batch_tokens, longest) // mesh.context)
    state = _state(facts, layout, ranks)
    # A checkpoint that is being written: copies of weights and moments in float32.
    host = {"checkpoint": 12 * trained // ranks}
    host |= {f"offloaded {name}": state.pop(name) for name in _offloaded(layout)}
    whole = layout.accumulates_whole and micro_batches > 1 and ranks > 1
    if whole:
        state["whole gradients"] = 4 * trained
    peaks = (
        _fsdp_peaks(facts, layout, shards, tokens)
        if layout.sums_blocks and ranks > 1
        else [_whole_model_peak(facts, layout, tokens, whole=whole)]
    )
    peak = max(peaks, key=lambda parts: sum(parts.values()))
    if layout.activation_offload and layout.recompute != "none" and "activations" in peak:
        inputs = _inputs_bytes(facts, layout, tokens)
        peak["activations"] -= inputs
        host["activations"] = inputs
    return Footprint({**state, **peak}, host)


def _state(facts: ModelFacts, layout: TrainerLayout, ranks: int) -> dict[str, int]:
    """The bytes of a rank's part of weights, gradients and optimizer, wherever they are."""
    trained = trained_parameters(facts, layout)
    shards = max(1, ranks // layout.mesh.replicate)
    part = {stage: shards if layout.shards >= stage else 1 for stage in (1, 2, 3)}
    moments = 2 * layout.moment_bytes + 4 * layout.copies_weights
    return {
        "weights": 4 * facts.parameters // part[3],
        "gradients": 4 * trained // part[2],
        "optimizer": int(moments * trained) // part[1],
    }


def _offloaded(layout: TrainerLayout) -> tuple[str, ...]:
    """What of a rank's state is in the host's memory."""
    if not layout.offload:
        return ()
    return ("gradients", "optimizer", *(("weights",) if layout.shards == 3 else ()))


def trainer_asleep(
    facts: ModelFacts, layout: TrainerLayout, ranks: int, *, trains: bool = True
) -> int:
    """Bytes that a rank moves from its device to its host's memory before it sleeps: weights, and
    the optimizer if it `trains`. Gradients are dropped.
    """
    state = _state(facts, layout, ranks)
    moved = {"weights", "optimizer"} if trains else {"weights"}
    return sum(state[use] for use in moved.difference(_offloaded(layout)))


def _fsdp_peaks(
    facts: ModelFacts, layout: TrainerLayout, shards: int, tokens: int
) -> list[dict[str, int]]:
    """The bytes that FSDP2 holds besides a rank's part of the state, at each of the points of a
    backward pass where it can hold most: in the head, in a layer, and where the gradients of the
    parameters outside layers (embeddings and head) are summed last.
    """
    number, tensor = layout.number, layout.mesh.tensor
    outside = (facts.parameters - facts.blocks - facts.tower) // tensor
    block, head, rest = facts.block, facts.embedding // tensor, outside
    if layout.lora_rank:
        block, head, rest = trained_parameters(facts, layout) // facts.layers, 0, 0
    experts = facts.expert_parameters - experts_elsewhere(facts, layout.mesh)
    rest_of_block = facts.block - facts.expert_parameters // facts.layers
    block_here = rest_of_block // tensor + experts // facts.layers
    all_here = (facts.parameters - facts.expert_parameters) // tensor + experts
    if not layout.lora_rank:
        block = block_here
    # A block is computed with while the next one is on its way.
    most = all_here if layout.keeps_gathered else 2 * block_here + outside
    gathered = number * min(all_here, most)
    kept = activation_bytes(facts, layout, tokens)
    return [
        {
            "gathered": gathered,
            # Summed in float32 over the pieces of the logits.
            "block gradients": 4 * head,
            "activations": kept,
            "logits": head_bytes(facts, layout, tokens),
        },
        {
            "gathered": gathered,
            "block gradients": number * (block + head),
            # The previous layer's, which its collective may still read.
            "reduce-scatter": 4 * block,
            "activations": kept + layer_bytes(facts, layout, tokens),
        },
        {
            "gathered": number * outside,
            "block gradients": number * rest,
            "reduce-scatter": 4 * block,
        },
        {
            "block gradients": number * rest,
            # What goes in, and this rank's part of what comes out.
            "reduce-scatter": 4 * rest + 4 * rest * tensor // shards,
        },
    ]


def _whole_model_peak(
    facts: ModelFacts, layout: TrainerLayout, tokens: int, *, whole: bool
) -> dict[str, int]:
    """The bytes that other trainers hold besides the state."""
    kept, layer = activation_bytes(facts, layout, tokens), layer_bytes(facts, layout, tokens)
    summed = min(layout.gradients_at_once, trained_parameters(facts, layout))
    return {
        "gathered": _gathered_bytes(facts, layout) + (0 if whole else 4 * summed),
        "activations": kept + layer,
        # The head and a layer are computed one after the other: what the one leaves, the other
        # takes.
        "logits": max(0, head_bytes(facts, layout, tokens) - layer),
    }


def usable_bytes(kind: DeviceKind) -> int:
    """The memory of a device that can be used."""
    return int((USABLE_SHARE if kind.is_gpu else USABLE_HOST_SHARE) * kind.memory)


def process_parts(
    kind: DeviceKind, assume: Assumptions, *, together: bool, graphs: bool = False
) -> dict[str, int]:
    """Bytes that a process takes on a GPU whatever it computes; nothing on a CPU.

    `together`: it computes together with processes on other GPUs.
    """
    if not kind.is_gpu:
        return {}
    parts = {"cuda context": int(assume.cuda_context_gib * GIB)}
    if together:
        parts["nccl"] = int(assume.nccl_gib * GIB)
    if graphs:
        parts["cuda graphs"] = int(assume.cuda_graphs_gib * GIB)
    return parts


def trained_parameters(facts: ModelFacts, layout: TrainerLayout) -> int:
    """Parameters with a gradient. Low-rank updates of a linear layer have r (inputs + outputs)."""
    return (
        layout.lora_rank * facts.ends_of(layout.lora_targets)
        if layout.lora_rank
        else facts.parameters - facts.tower * (not layout.trains_tower)
    )


def unit_numbers(facts: ModelFacts, layout: TrainerLayout) -> int:
    """Parameters of the most that is sent to the engines at once: the largest tensor, the
    embedding; of a mixture of experts a layer, whose tensors have other names in a folder.
    """
    if layout.lora_rank:
        return layout.lora_rank * max(facts.inner, facts.hidden)
    return max(facts.embedding, facts.block) if facts.experts else facts.embedding


def _gathered_bytes(facts: ModelFacts, layout: TrainerLayout) -> int:
    """Weights and gradients for the products, besides those that a rank holds.

    These are casts and, if weights are sharded, the weights of two blocks (one in use, the next on
    its way) and of the parts outside blocks, with a block's gradient. The head's gradient is summed
    in float32 over the logits' pieces.
    """
    head = 0 if layout.lora_rank else 4 * facts.embedding
    # Torch keeps them for the backward pass.
    casts = 2 * facts.parameters if layout.precision == "autocast" else 0
    if layout.shards < 3:
        return casts + head
    outside = facts.parameters - facts.blocks - facts.tower
    gathered = (
        facts.parameters
        if layout.keeps_gathered
        else min(facts.parameters, 2 * facts.block + outside)
    )
    gradient = min(facts.parameters, facts.block + outside)
    number = 4 if casts else layout.number
    return casts + head + number * (gathered + gradient)


def kept_bytes(kept: Kept, precision: Precision) -> int:
    """Bytes of the numbers that autograd keeps of a token."""
    if precision == "float32":
        return 4 * kept.matrices + 8 * kept.norms + 4 * kept.scores
    if precision == "bfloat16":
        return 2 * kept.matrices + kept.low_norms + 4 * kept.scores
    return 2 * (kept.matrices + kept.casts) + 8 * kept.norms + 4 * kept.scores


def activation_bytes(facts: ModelFacts, layout: TrainerLayout, tokens: int) -> int:
    """Bytes that the layers keep of a micro-batch of so many tokens between its forward and its
    backward pass.

    With full recomputation these are only the inputs of layers, with a selective one also the
    products. Compare 34 bytes per hidden size of a GPT layer: Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.
    """
    kept = of_rank(facts.kept, facts.layers, facts, layout.mesh)
    # Any token may be a picture's, and nothing of a tower is computed again.
    tower = layout.number * facts.tower_kept * tokens if layout.trains_tower else 0
    if layout.recompute == "none":
        return kept_bytes(kept, layout.precision) * tokens + tower
    products = layout.number * kept.products if layout.recompute == "selective" else 0
    return _inputs_bytes(facts, layout, tokens) + products * tokens + tower


def of_rank(kept: Kept, layers: int, facts: ModelFacts, mesh: Mesh) -> Kept:
    """A rank's part of the numbers that so many layers keep, if their matrices are divided: all of
    the residual stream, which is the input of two groups of matrices and the output of two, and
    of norms; and its part of heads and hidden units, or all of them where ranks gather these.
    """
    if mesh.tensor == 1 or facts.gathered:
        return kept
    stream = 2 * layers * facts.hidden

    def part(numbers: int, whole: int) -> int:
        return whole - (whole - numbers) // mesh.tensor if numbers > whole else numbers

    return replace(
        kept,
        matrices=part(kept.matrices, stream),
        products=part(kept.products, stream),
        working=part(kept.working, layers * facts.hidden),
    )


def summed(facts: ModelFacts, mesh: Mesh) -> int:
    """Numbers of a token that the ranks which divide matrices sum in a pass: hidden states, after
    the embedding and twice in a layer. What they gather costs half as much to send.
    """
    if mesh.tensor == 1:
        return 0
    return (2 * facts.layers + 1) * facts.hidden + (facts.gathered or 0) // 2


def exchanged(facts: ModelFacts, mesh: Mesh) -> int:
    """Numbers of a token that a layer's attention exchanges between the ranks of a context: its
    queries and results, and keys and values, repeated until each rank has a head of them.
    """
    if mesh.context == 1:
        return 0
    heads = facts.kv.heads
    keys = lcm(heads.keys // mesh.tensor, mesh.context)
    return (heads.queries // mesh.tensor + keys) * (heads.key_size + heads.value_size)


def experts_elsewhere(facts: ModelFacts, mesh: Mesh) -> int:
    """Parameters of all experts that a rank never gathers, as others of its group have them."""
    return facts.expert_parameters - facts.expert_parameters // mesh.expert


def dispatched(facts: ModelFacts, mesh: Mesh) -> float:
    """To how many ranks a token goes in a layer whose experts are divided, if all experts are as
    likely; once to each, whatever the number of its experts there. With one rank it goes nowhere.
    """
    if mesh.expert == 1:
        return 0.0
    return float(mesh.expert * (1 - (1 - 1 / mesh.expert) ** facts.chosen))


def _inputs_bytes(facts: ModelFacts, layout: TrainerLayout, tokens: int) -> int:
    """Bytes of the inputs of all layers, which autocast leaves in float32."""
    number = 4 if layout.precision == "autocast" else layout.number
    return number * facts.layers * facts.hidden * tokens


def layer_bytes(facts: ModelFacts, layout: TrainerLayout, tokens: int) -> int:
    """Bytes of the backward pass of the layer that takes most, beyond those of `activation_bytes`.

    Attention with sinks or a soft cap is computed in pieces of queries that see all tokens before
    (the scores, the shares, and a gradient of each). On GPUs, one kernel takes the place of the
    pieces and builds none of these; they are counted until a GPU has measured it.
    """
    largest = of_rank(facts.largest, 1, facts, layout.mesh)
    again = 0 if layout.recompute == "none" else kept_bytes(largest, layout.precision)
    # A context's ranks have a part of the heads, and of all of its tokens.
    pieces = (
        4
        * 4
        * facts.pieced_heads
        // (1 if facts.gathered else layout.mesh.tensor)
        * min(QUERIES_AT_ONCE, tokens)
    )
    # What is sent and what is received.
    exchange = 2 * layout.number * exchanged(facts, layout.mesh)
    # The tokens that are sent and those that come, their results, and the sums in float32.
    rows = dispatched(facts, layout.mesh) * facts.hidden / layout.mesh.tensor
    exchange += round((4 * layout.number + 4) * rows)
    if layout.mesh.tensor > 1:  # a sum beside what goes into it
        exchange += layout.number * facts.hidden
    return (again + layout.number * largest.working + pieces + exchange) * tokens


def head_bytes(facts: ModelFacts, layout: TrainerLayout, tokens: int) -> int:
    """Bytes of the final norm, the output head and the loss: hidden states, and the logits of a
    piece of the tokens.
    """
    logits = min(LOGITS_AT_ONCE, tokens * facts.vocab // layout.mesh.tensor)
    return 6 * layout.number * facts.hidden * tokens + int(_HEAD_BYTES[layout.precision] * logits)


def engine_footprint(
    facts: ModelFacts,
    layout: EngineLayout,
    devices: int,
    kind: DeviceKind,
    episode_tokens: int,
    *,
    assume: Assumptions = _ASSUMED,
) -> Footprint:
    """The memory of one replica on each of its `devices` when its cache is full.

    An engine that takes a `fraction` fills it with cache; one that takes what it needs has a cache
    of `max_batch` contexts of `episode_tokens`.
    """
    together = devices * layout.data_parallel > 1
    parts = {
        "weights": weights_on_device(facts, layout, devices),
        "step activations": _largest_step_bytes(facts, layout, devices),
        **process_parts(kind, assume, together=together, graphs=layout.graphs),
    }
    given = layout.kv_bytes or (None if kind.is_gpu else layout.kv_bytes_on_cpu)
    if given is not None:
        cache = given
    elif layout.fraction is not None and kind.is_gpu:
        cache = max(0, int(layout.fraction * kind.memory) - sum(parts.values()))
    else:
        cache = layout.max_batch * context_bytes(facts, layout, devices, episode_tokens)
    parts["kv cache"] = cache
    if layout.reloads_layers:
        # Beyond its fraction: vLLM does not know of it when it sizes the cache.
        layer = max(block_number(layout) * facts.block, layout.number * facts.embedding)
        parts["weight staging"] = layer // devices
    return Footprint(parts)


def _largest_step_bytes(facts: ModelFacts, layout: EngineLayout, devices: int) -> int:
    """Bytes of an engine's largest step: in a layer, the residual stream and two inputs of
    matrices; queries, keys, values and what attention makes of them; gate, up and their product. Or
    those of the logits of a batch and their sampling.
    """
    heads = facts.kv.heads
    attention = heads.queries * (heads.key_size + heads.value_size)
    attention += heads.keys * (heads.key_size + heads.value_size)
    token = 3 * facts.hidden + max(attention, 3 * facts.inner) // devices
    in_layer = layout.number * layout.prefill_tokens * token
    logits = (layout.number + _LOGIT_BYTES) * layout.max_batch * facts.vocab
    return in_layer + logits


def block_number(layout: EngineLayout) -> int:
    """Bytes of each weight of a block; embedding and head are always in the format of products."""
    return layout.weight_number or layout.number


def weight_bytes(facts: ModelFacts, layout: EngineLayout) -> int:
    """Bytes of the weights of one copy of the model."""
    outside = facts.parameters - facts.blocks
    return block_number(layout) * facts.blocks + layout.number * outside


def weights_on_device(facts: ModelFacts, layout: EngineLayout, devices: int) -> int:
    """Bytes of the weights of one replica on each of the `devices` of a copy."""
    weights = weight_bytes(facts, layout) // devices
    if layout.data_parallel > 1:
        experts = block_number(layout) * facts.expert_parameters // devices
        weights -= experts - experts // layout.data_parallel
    return weights


def weights_read(facts: ModelFacts, layout: EngineLayout, devices: int, requests: float) -> float:
    """Bytes of the weights that each of the `devices` of a copy reads in a decoding step of so many
    requests for each copy: of experts, those that one of them chooses.
    """
    chosen_by = requests * layout.data_parallel
    missed = (facts.parameters - facts.read(chosen_by)) / (devices * layout.data_parallel)
    return weights_on_device(facts, layout, devices) - block_number(layout) * missed


def context_bytes(facts: ModelFacts, layout: EngineLayout, devices: int, tokens: int) -> int:
    """Bytes of the cache of a context of so many tokens on each device."""
    number = layout.kv_number or layout.number
    return number * facts.kv.numbers(tokens, devices, compact=layout.compact_cache)


def tokens_cached(
    facts: ModelFacts, layout: EngineLayout, devices: int, cache: int, context: int
) -> int:
    """The number of tokens, in contexts of length `context`, that a cache of `cache` bytes on each
    device holds.
    """
    return cache * context // max(1, context_bytes(facts, layout, devices, context))
