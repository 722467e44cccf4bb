"""No token is sampled over KV that is older than the bound, whatever happens in whatever order."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines import kv_chains
from agentrl.engines.kv_chains import Chain, KvChains
from agentrl.engines.local import LocalEngine
from agentrl.engines.packed_model import Drawn, StepRow
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import IntArray, ints
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trajectory import Completion
from tests.properties import examples

BLOCK = 4


def request_of(
    name: str, tokens: Sequence[int], *, session: str = "", known: int = 0, resumed: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        name,
        ints(tokens),
        SamplingParams(max_tokens=5),
        session=session,
        known=known,
        resumed=resumed,
    )


def test_a_session_goes_on_with_its_chain_until_that_is_too_old_and_a_new_prompt_begins_one() -> (
    None
):
    chains = KvChains(2)
    later = request_of("r", (1, 2), session="a", known=1)
    assert chains.begin(request_of("r", (1,), session="a")) == Chain(0, 0)
    for version, origin in ((1, 0), (2, 0), (3, 3), (4, 3), (5, 3), (6, 6)):
        chains.advance(version)
        assert chains.begin(later) == Chain(origin, version)
    chains.advance(7)
    assert chains.begin(replace(later, session="")) == Chain(7, 7)
    assert chains.begin(replace(later, session="b")) == Chain(7, 7)
    assert chains.begin(replace(later, known=0, resumed=1)) == Chain(6, 7)
    assert chains.begin(replace(later, known=0)) == Chain(7, 7)  # the name of an earlier session
    assert chains.begin(later) == Chain(7, 7)


def test_a_cache_that_has_lost_all_its_kv_is_as_new_as_the_weights() -> None:
    chains, later = KvChains(1), request_of("r", (1, 2), session="a", known=1)
    chains.begin(later)
    chains.advance(1)
    chain = chains.begin(later)
    assert chains.oldest(chain, found_cached=True) == 0
    assert chains.oldest(chain, found_cached=False) == 1
    chains.note_empty()
    assert chains.oldest(chain, found_cached=True) == 1
    chains.advance(2)
    assert not chains.is_too_old(chain.origin)
    chains.advance(3)
    assert chains.is_too_old(chain.origin)


def test_sessions_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_chains, "_SESSIONS", 3)
    chains = KvChains(1)
    for number in range(5):
        chains.begin(request_of("r", (1,), session=f"{number}"))
    chains.advance(1)
    origins = [
        chains.begin(request_of("r", (1, 2), session=f"{number}", known=1)).origin
        for number in (4, 3, 2, 1, 0)
    ]
    assert origins == [0, 0, 0, 1, 1]


@dataclass
class SharedCache:
    """A cache of whole blocks that all requests share, as vLLM's: it knows tokens and salts, and no
    versions. This one remembers which version computed each token's KV.
    """

    blocks: dict[tuple[int, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def found(self, salt: int, tokens: Sequence[int]) -> list[int]:
        """The versions of the longest cached prefix."""
        versions: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self.blocks.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            versions += block
        return versions

    def store(self, salt: int, tokens: Sequence[int], versions: Sequence[int]) -> None:
        for end in range(BLOCK, len(versions) + 1, BLOCK):
            key = (salt, tuple(tokens[:end]))
            self.blocks.setdefault(key, list(versions[end - BLOCK : end]))


@dataclass
class Talk:
    """A session, and its turn in flight."""

    name: str
    opening: list[int]
    tokens: list[int] = field(default_factory=list)
    known: int = 0
    chain: Chain | None = None
    versions: list[int] = field(default_factory=list)
    found: bool = False

    def __post_init__(self) -> None:
        self.tokens = [*self.opening]


class PagedEngine:
    """An engine in miniature, that follows `KvChains` as vLLM's does. Its methods are what may
    happen to it: each takes the number of a session, and one more.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.chains = KvChains(bound)
        self.cache = SharedCache()
        self.talks = [Talk(f"{number}", [1, 2, 3, 4, 5, number // 2]) for number in range(6)]

    def turn(self, which: int, number: int) -> None:
        talk = self.talks[which]
        if talk.chain is None:
            talk.tokens += [number] * number
            self._begin(talk)
            self._sample(talk)

    def sample(self, which: int, number: int) -> None:
        for _ in range(number):
            if self.talks[which].chain is not None:
                self._sample(self.talks[which])

    def end(self, which: int, _: int) -> None:
        talk = self.talks[which]
        if talk.chain is not None:
            talk.chain, talk.known = None, len(talk.tokens)

    def play_again(self, which: int, _: int) -> None:
        talk = self.talks[which]
        if talk.chain is None:
            talk.tokens, talk.known = [*talk.opening], 0

    def evict(self, which: int, number: int) -> None:
        if self.cache.blocks:
            place = (6 * number + which) % len(self.cache.blocks)
            del self.cache.blocks[list(self.cache.blocks)[place]]

    def update(self, _: int, number: int) -> None:
        self.chains.advance(self.chains.version + 1 + number // 5)
        for talk in self.talks:
            if talk.chain is not None and self.chains.is_too_old(talk.chain.origin):
                self._begin(talk, resumed=1)

    def empty(self, _: int, __: int) -> None:
        self.cache.blocks.clear()
        self.chains.note_empty()
        for talk in self.talks:
            talk.versions = []

    def _begin(self, talk: Talk, resumed: int = 0) -> None:
        request = request_of("r", talk.tokens, session=talk.name, known=talk.known, resumed=resumed)
        talk.chain = self.chains.begin(request)
        talk.versions = self.cache.found(talk.chain.origin, talk.tokens)
        talk.found = bool(talk.versions)
        if not (talk.known or resumed):
            assert set(talk.versions) <= {self.chains.version}

    def _sample(self, talk: Talk) -> None:
        assert talk.chain is not None
        talk.versions += [self.chains.version] * (len(talk.tokens) - len(talk.versions))
        oldest = min(talk.versions)
        assert oldest >= self.chains.version - self.bound
        assert oldest >= self.chains.oldest(talk.chain, found_cached=talk.found)
        self.cache.store(talk.chain.origin, talk.tokens, talk.versions)
        talk.tokens.append(7)


def events_of(*names: str) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(
        st.tuples(st.sampled_from(names), st.integers(0, 5), st.integers(1, 8)),
        min_size=5,
        max_size=60,
    )


@given(
    events_of("turn", "turn", "sample", "end", "end", "play_again", "evict", "update", "empty"),
    st.integers(1, 3),
)
@examples(300)
def test_what_is_found_under_a_chain_s_origin_is_within_the_bound_in_any_order_of_events(
    events: Sequence[tuple[str, int, int]], bound: int
) -> None:
    engine = PagedEngine(bound)
    for what, which, number in events:
        getattr(engine, what)(which, number)


class VersionedModel:
    """In the place of a model: it knows which version has computed each token's KV in each slot."""

    vocab_size, max_positions = 50, 200
    sees = sees_both_ways = False

    def __init__(self) -> None:
        self.version = 0
        self.kv: dict[int, list[tuple[int, int]]] = {}
        self.sampled: list[tuple[int, int, int, int]] = []
        """Of each sampled token: its request's seed, its position, its version, and the oldest
        version that computed KV that it attends to.
        """

    def positions(self, prompt_ids: IntArray, images: Sequence[PlacedImage]) -> None:
        """Those of a model that reads no pictures."""

    def step(self, rows: Sequence[StepRow]) -> list[Drawn]:
        drawn = []
        for row in rows:
            source = row.slot if row.copied_from is None else row.copied_from
            kept = self.kv.get(source, [])[: row.start]
            assert len(kept) == row.start
            self.kv[row.slot] = kept + [(token, self.version) for token in row.token_ids.tolist()]
            if row.sample:
                oldest = min(version for _, version in self.kv[row.slot])
                self.sampled.append((row.seed, row.position, self.version, oldest))
                drawn.append(Drawn(10 + (row.seed + row.position) % 3, 0.0, ints(())))
        return drawn

    def check_weights(self, weights: Mapping[str, Any]) -> None:
        """They fit."""

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        self.version += 1

    def sleep(self) -> int:
        self.kv.clear()
        return 0

    def wake(self) -> None:
        """Nothing to load."""


class VersionedEngine(LocalEngine):
    """The local engine on such a model."""

    def __init__(self, config: LocalEngine.Config) -> None:
        super().__init__(config, Path())
        self.model = VersionedModel()

    def _load(self) -> Any:
        return self.model


@dataclass
class Player:
    """A session of the engine."""

    name: str
    opening: list[int]
    tokens: list[int] = field(default_factory=list)
    known: int = 0
    resumed: int = 0
    task: asyncio.Task[Completion] | None = None

    def __post_init__(self) -> None:
        self.play_again()

    def play_again(self) -> None:
        self.tokens, self.known, self.resumed = [*self.opening], 0, 0

    def take_answer(self) -> None:
        """The tokens of the last turn, if that has ended."""
        if self.task is None or not self.task.done():
            return
        completion = self.task.result()
        sampled = completion.token_ids.tolist()
        self.tokens += sampled
        is_cut = completion.finish_reason == "abort"
        self.resumed = self.resumed + len(sampled) if is_cut else 0
        self.known = self.known if is_cut else len(self.tokens)
        self.task = None


class Players:
    """What may happen to an engine: each method takes the number of a player, and one more."""

    def __init__(self, engine: VersionedEngine, tasks: asyncio.TaskGroup) -> None:
        self.engine, self.tasks = engine, tasks
        # More than the engine has slots, and some with the same prompt.
        self.players = [Player(f"{number}", [1, 2, 3, number // 3]) for number in range(6)]
        self.fresh: set[int] = set()
        """Seeds of requests that begin a conversation."""
        self.requests = 0

    async def turn(self, which: int, number: int) -> None:
        player = self._idle(which)
        if player is None or len(player.tokens) > 150:
            return
        if player.known and not player.resumed:
            player.tokens += [5] * (number % 3 + 1)
        self.requests += 1
        if not (player.known or player.resumed):
            self.fresh.add(self.requests)
        request = GenerateRequest(
            f"{self.requests}",
            ints(player.tokens),
            SamplingParams(max_tokens=number),
            self.requests,
            session=player.name,
            known=player.known,
            resumed=player.resumed,
        )
        player.task = self.tasks.create_task(self.engine.generate(request))

    async def steps(self, _: int, number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    async def update(self, _: int, __: int) -> None:
        await self.engine.update_weights({}, self.engine.policy_version + 1)

    async def play_again(self, which: int, _: int) -> None:
        player = self._idle(which)
        if player is not None:
            player.play_again()

    async def interrupt(self, _: int, __: int) -> None:
        await self.engine.interrupt()

    async def sleep(self, _: int, __: int) -> None:
        await self.engine.sleep()
        await self.engine.wake()

    def _idle(self, which: int) -> Player | None:
        player = self.players[which]
        player.take_answer()
        return player if player.task is None else None


@pytest.mark.parametrize("kv_on_update", ["recompute", "reuse"])
@given(
    events_of(
        "turn", "turn", "turn", "steps", "steps", "update", "play_again", "interrupt", "sleep"
    ),
    st.integers(0, 3),
)
@examples(200)
def test_the_local_engine_samples_over_no_kv_that_is_too_old_and_counts_what_is_older(
    kv_on_update: Any, events: Sequence[tuple[str, int, int]], bound: int
) -> None:
    """Against a model that remembers, for each token in each slot, who computed it."""
    config = LocalEngine.Config(
        max_batch=4, max_context=200, kv_on_update=kv_on_update, kv_max_staleness=bound
    )

    async def main() -> Players:
        async with VersionedEngine(config) as engine, asyncio.TaskGroup() as tasks:
            players = Players(engine, tasks)
            for what, which, number in events:
                await getattr(players, what)(which, number)
            for player in players.players:
                if player.task is not None:
                    await player.task
        return players

    players = asyncio.run(main())
    sampled, allowed = players.engine.model.sampled, bound if kv_on_update == "reuse" else 0
    for seed, position, version, oldest in sampled:
        assert oldest >= version - allowed
        if position == 0 and seed in players.fresh:
            assert oldest == version
    older = [version for *_, version, oldest in sampled if oldest < version]
    assert players.engine.stats().older_kv_tokens == len(older)
