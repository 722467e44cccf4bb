"""Engines: token ids in, sampled token ids with their logprobs out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Protocol, Self

from agentrl.errors import ConfigError, EngineError
from agentrl.flow.pausable_clock import PausableClock
from agentrl.protocols.offers import Offers
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import FloatArray, IntArray, ints, same_fields
from agentrl.tokens.placed_images import PlacedImage, check_placed
from agentrl.trajectory import Completion

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.net.link import RemoteDoor


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a completion: a JSON object, or a JSON value by this schema (JSON as text), up
    to its stop token.

    Only tokens that lead there are sampled, so the logprobs are of what is left of the model's
    distribution. A trainer does not know what that was, so such completions are not trained on.
    """

    schema: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One completion to sample. `id` is unique among live requests.

    `seed` makes sampling reproducible: the token at position i depends only on the seed, i and the
    logits. A full engine serves lower `priority` numbers first (the deadline step of the request's
    group).

    Requests of one `session` (an agent's conversation) come one after another, and each extends the
    one before; a router sends them to the engine that has cached their prefix. The first `known`
    tokens of the prompt are the session's previous prompt and completion. An engine that served
    that request need not process them again, so a late turn costs no more than an early one.
    `known` is 0 if the conversation begins or its prompt is new.

    The last `resumed` tokens of the prompt belong to the completion already: an interrupted request
    is resumed.

    With `keep_support`, the completion has the ids that each token was sampled from
    (`Completion.support`), for the trainer to compute its logprobs over the same ids ("Keep
    Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556). It takes `sampling.top_k`, which bounds their
    number.

    With `keep_experts`, an engine that can (`reports_experts`) keeps the experts that a mixture
    chose for each token from `experts_from` on (`Completion.experts`). The others ignore it.

    With `format`, an engine that can constrains the completion. The others refuse the request.

    `images` are the pictures in `prompt_ids`. An engine that does not read any (`reads_images`)
    refuses the request.
    """

    id: str
    prompt_ids: IntArray
    sampling: SamplingParams
    seed: int = 0
    priority: int = 0
    session: str = ""
    known: int = 0
    keep_support: bool = False
    keep_experts: bool = False
    resumed: int = 0
    format: AnswerFormat | None = None
    images: tuple[PlacedImage, ...] = ()

    __eq__ = same_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", ints(self.prompt_ids))
        check_placed(self.images, len(self.prompt_ids), f"request {self.id}")
        try:
            object.__setattr__(self, "seed", index(self.seed))
        except TypeError:
            raise TypeError(f"the seed of a request is an integer, got {self.seed!r}") from None

    @property
    def experts_from(self) -> int:
        """The first token whose experts are not known from an earlier completion: the last one of
        that, which was sampled and not computed.
        """
        return len(self.prompt_ids) - 1 if self.resumed else max(0, self.known - 1)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine's work. Counts are since the engine started."""

    running: int
    """Requests in the batch."""
    waiting: int
    """Requests that wait for a place in the batch."""
    generated_tokens: int
    """Sampled tokens."""
    prefilled_tokens: int
    """Tokens of prompts that were computed."""
    cached_tokens: int
    """Tokens of prompts whose KV was found in the cache."""
    kv_use: float = 0.0
    """Share of the KV cache that live requests hold, 0 to 1."""
    preemptions: int = 0
    """Running requests whose KV was discarded to make room."""
    proposed_tokens: int = 0
    """Tokens that speculative decoding has proposed."""
    accepted_tokens: int = 0
    """Proposed tokens that the model has accepted."""
    older_kv_tokens: int = 0
    """Sampled tokens that attended to KV of older weights than those that sampled them. An engine
    that does not know how old a piece of its cache is counts it as being as old as it may be."""
    kv_tokens: int = 0
    """Tokens for which the KV cache has room; 0 if that is not known."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Given tokens whose logprobs are wanted. `id` is unique among live requests.

    Wanted are those of `token_ids[start:]`, each after all the tokens before it, with logits
    divided by `temperature`, over the whole vocabulary. `start` is at least 1, because nothing
    predicts the first token. `images` are the pictures in `token_ids`.
    """

    id: str
    token_ids: IntArray
    start: int = 1
    temperature: float = 1.0
    images: tuple[PlacedImage, ...] = ()

    __eq__ = same_fields

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ints(self.token_ids))
        check_placed(self.images, len(self.token_ids), f"request {self.id}")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The logprobs that a `ScoreRequest` asked for, shape `len(token_ids) - start`, all of one
    version of weights.
    """

    logprobs: FloatArray
    policy_version: int

    __eq__ = same_fields


class Engine(Protocol):
    """Samples tokens: token ids in, token ids out. An async context manager: entering it loads the
    model, leaving it frees everything.

    Cancelling the task that awaits `generate` aborts the request and frees its place within one
    engine step.

    The methods from `score` on are optional: an engine that lacks one does not offer it
    (`EngineOffers`). Six more facts are its attribute `offers`.
    """

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled from; 0 for the weights it
        started with.
        """
        ...

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens."""
        ...

    @property
    def clock(self) -> PausableClock | None:
        """The clock for deadlines of its answers, if there are times in which none can be expected:
        it stands still then. By default, None.
        """
        return None

    async def __aenter__(self) -> Self:
        """Load the model."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Free everything."""
        return

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        One whose tokens or logprobs no model can have sampled (NaN, -inf, above 0 by more than
        rounding) is a failure of the engine: the episode is played again, and never trained on.

        Raises:
            EngineError: the prompt does not fit into `max_context`, or the request is malformed.
            EngineDeadError: the engine is not running; no request to it will be answered.
        """
        ...

    async def interrupt(self) -> None:
        """End every live request at a token boundary: its `generate` returns the tokens so far,
        finish reason "abort".

        When this returns, no request is live. A request without a token yet returns an empty
        completion. Every sampled token is returned to its caller, so that the turn can continue
        from there. New requests are accepted.
        """
        ...

    async def update_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Replace all weights at a token boundary. Requests in flight continue with the new ones.

        By default, their KV cache is recomputed, so each later token's logprob equals that of a
        plain forward pass of the new weights over all tokens before it, and no cached prefix of an
        older version is ever served. An engine's setting `kv_on_update` may say otherwise
        (`KvOnUpdate` in agentrl/engines/admission.py). After this returns, every sampled token is
        stamped `version`. `weights` has Hugging Face names; tied weights may be absent.
        """
        ...

    def stats(self) -> EngineStats:
        """The present load of the engine."""
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute the logprobs of given tokens, as a teacher does. Weights that arrive meanwhile
        never mix: all are of the version that the result names.

        Raises:
            EngineError: the tokens do not fit into `max_context`, or the request is malformed, or
                it scores no tokens, as by default.
            EngineDeadError: the engine is not running; no request to it will be answered.
        """
        raise EngineError(
            f"{type(self).__name__} has no method `score`: it cannot score given tokens"
        )

    async def stage_weights(self, weights: Mapping[str, "Tensor"], version: int) -> None:
        """Fetch the weights and check whatever can be checked, while the engine keeps serving its
        current ones: the first of two phases (`WeightPublisher`). When all engines have staged a
        version, `update_weights` commits it on each of them. By default, there is nothing to check.

        Raises:
            WeightsError: they are damaged, or cannot be read from here.
            EngineError: they are of another model, or not newer than the engine's own.
            EngineDeadError: the engine is not running.
        """
        return

    async def probe(self) -> None:
        """Return as soon as an engine in another process or on another machine answers; the caller
        sets the deadline. One in this process needs no probe.

        An answer that does not wait behind its work, as from a thread of its own, is a sign of life
        at any time (`EngineOffers.probes_while_busy`); such a method may be called on the event
        loop of any thread. Any other answer may have to wait for new weights, so its absence proves
        nothing before the engine has taken them.

        Raises:
            EngineDeadError: it is not running.
        """
        return

    async def sleep(self) -> int | None:
        """Release all memory that can be released. Repeating it changes nothing. If this raises,
        the engine is awake as before.

        Returns the bytes of its own that this freed, on the device where it freed most; None if it
        cannot tell, or was asleep already.

        A sleeping engine answers no requests: new ones wait, and those in flight continue when it
        wakes, from the same token, with their KV recomputed. After `wake_weights`, it takes new
        weights meanwhile.

        Raises:
            ConfigError: it has no way to sleep here, as by default.
        """
        raise ConfigError(f"{type(self).__name__} cannot sleep: give it devices of its own")

    async def wake_weights(self) -> int | None:
        """Allocate the weights of a sleeping engine again, and nothing else, so that it can take
        new ones: it still answers no requests, and has no KV cache. `wake` does the rest, `sleep`
        undoes it. Repeating it changes nothing, nor does it change an engine that is awake. If this
        raises, the engine is asleep as before.

        Returns the bytes that this took on the device where it took most; None if it cannot tell,
        or took nothing. By default, nothing happens: such an engine takes new weights as it sleeps.
        """
        return None

    async def wake(self) -> None:
        """Allocate the memory again; when this returns, the engine works. If this raises, it is
        asleep as before.
        """
        return


@dataclass(frozen=True, slots=True)
class EngineOffers(Offers):
    """The abilities of an engine beyond `generate`. An engine states the first six in its attribute
    `offers`; the others follow from its methods.
    """

    reports_experts: bool = False
    """It keeps the experts that a mixture of experts chose (`GenerateRequest.keep_experts`)."""
    scores_at_one_only: bool = False
    """It scores given tokens only at temperature 1."""
    probes_while_busy: bool = False
    """Its `probe` is answered whatever it works on, also while it takes new weights or sleeps."""
    reads_arrivals: bool = False
    """It loads weights as they arrive (`Shipment.arrivals`), and so can take live ones."""
    reads_images: bool = False
    """It reads the pictures of a request (`GenerateRequest.images`), if its model can."""
    remote_door: "RemoteDoor | None" = None
    """Where rollout workers may ask it themselves, if it is in another process."""
    scores: bool = False
    """It has a method `score`."""
    stages_weights: bool = False
    """It has a method `stage_weights`."""
    probes: bool = False
    """It has a method `probe`."""

    @classmethod
    def of(cls, plugin: object) -> Self:
        """The offers of an engine, or of its class."""
        stated = super(EngineOffers, cls).of(plugin)
        kind = plugin if isinstance(plugin, type) else type(plugin)
        return replace(
            stated,
            scores=_has_own(kind, "score"),
            stages_weights=_has_own(kind, "stage_weights"),
            probes=_has_own(kind, "probe"),
        )


def clock_of(engine: Engine) -> PausableClock | None:
    """The clock of an engine (`Engine.clock`); None if it does not inherit from `Engine`."""
    return getattr(engine, "clock", None)


def _has_own(kind: type, method: str) -> bool:
    """True if a class has this method, other than as `Engine` has it by default."""
    inherited = vars(Engine)[method]
    return getattr(kind, method, None) not in (None, inherited)
