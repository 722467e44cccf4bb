"""Search and answer: questions about a small invented world, whose documents can only be found by
searching.

Each seed invents people, towns and companies, writes a document about each, and asks a question
whose answer takes `level` facts, each from another document. All names are invented, so the model's
own knowledge does not help.
"""

import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from agentrl.envs.base import ToolEnv, ToolError, ToolResult, plays, read_options
from agentrl.settings.base import Settings
from agentrl.trajectory import ToolCall


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact about each thing of a kind: its sentence ({0} the thing, {1} the other), and the
    phrase for {1}.
    """

    kind: str
    other: str
    sentence: str
    phrase: str


RELATIONS = (
    Relation("person", "town", "{0} was born in {1}.", "the town where {0} was born"),
    Relation("person", "person", "{0} was taught by {1}.", "the teacher of {0}"),
    Relation("person", "company", "{0} works for {1}.", "the employer of {0}"),
    Relation("town", "person", "The mayor of {0} is {1}.", "the mayor of {0}"),
    Relation("town", "river", "{0} lies on {1}.", "the river on which {0} lies"),
    Relation("company", "person", "{0} was founded by {1}.", "the founder of {0}"),
    Relation("company", "town", "{0} has its seat in {1}.", "the town where {0} has its seat"),
    Relation(
        "company",
        "product",
        "{0} became known for the {1}.",
        "the product that {0} became known for",
    ),
)

REMARKS: Mapping[str, Sequence[str]] = {
    "person": (
        "{0} collects old maps.",
        "{0} never learned to swim.",
        "{0} has {1} grandchildren.",
    ),
    "town": (
        "{0} has {1}00 inhabitants.",
        "The market of {0} is held on Fridays.",
        "{0} burned down in 17{1}.",
    ),
    "company": (
        "{0} was registered in 18{1}.",
        "{0} employs {1} people.",
        "{0} once stood before its ruin.",
    ),
}
"""Sentences that answer no question."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the corpus; its `id` says nothing about its content."""

    id: int
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class SearchWorld:
    """The documents, a question, and the chain of things that leads to its answer.

    Each thing of the chain is named in the document of the one before.
    """

    documents: tuple[Document, ...]
    question: str
    chain: tuple[str, ...]


class Search(ToolEnv):
    """Answer the question: reward 1 for exactly the right name, ignoring case, articles and
    punctuation.

    An answer ends the episode. Only the run limits the number of turns.
    """

    system_prompt = (
        "Answer the question. The names in it are invented: look everything up. Search finds"
        " documents by their words; read them, and answer with the name alone."
    )
    # In so small an index a search takes about a tenth of a millisecond; building it takes one or
    # two.
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        level: int = Field(1, ge=1, le=5)
        """The number of facts that the answer takes, each from another document. There are 16 *
        `level` documents."""
        short_calls: bool = False
        """If true, tools are called in words (`answer Tobin`) instead of JSON, for very small
        models."""
        most: int = Field(10, ge=1, le=10)
        """The number of documents that a search shows at most, whatever `k` says."""
        brief: bool = False
        """If true, a search shows of each document the one sentence that fits best, for models with
        a small context; otherwise its title and 12 words in a row."""
        names: int | None = Field(None, le=10_000)
        """The number of names that the worlds of all seeds share, at least 40 * `level`, for models
        that are too small to copy unseen names. By default each world invents its own."""

        @field_validator("names")
        @classmethod
        def _check_names(cls, names: int | None, info: ValidationInfo) -> int | None:
            if names is not None and names < (needed := 40 * info.data.get("level", 1)):
                raise ValueError(f"a world of this level has {needed} names")
            return names

    def __init__(self) -> None:
        self._index: sqlite3.Connection | None = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Invent the world of this seed and ask about it."""
        chosen = read_options(self.Options, options)
        self.call_shortly(chosen.short_calls)
        self.most, self.brief = chosen.most, chosen.brief
        self.world = make_world(chosen.level, seed, chosen.names)
        self.by_id = {document.id: document for document in self.world.documents}
        self.found: set[int] = set()
        self.done: set[int] = set()
        self.shown = ""  # by the last search
        self.close()
        return self.world.question

    def close(self) -> None:
        """Free the index."""
        if self._index is not None:
            self._index.close()
            self._index = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the index, which is made again from the documents."""
        return {**self.__dict__, "_index": None}

    def restore(self, state: bytes) -> None:
        """Go back to a state; the next search makes its index."""
        self.close()
        super().restore(state)

    def search(self, query: str, k: Annotated[int, Field(ge=1, le=10)] = 3) -> str:
        """Find the documents that fit a query best: their numbers, titles and an excerpt.

        Args:
            query: words to look for
            k: how many documents at most
        """
        # Quoting keeps a word from being an operator of FTS5's query language. A real query has no
        # more words.
        words = [f'"{word}"' for word in re.findall(r"\w+", query)[:32]]
        if not words:
            raise ToolError("the query has no words")
        if self._index is None:
            self._index = _index(self.world.documents)
        rows = self._index.execute(
            "SELECT rowid, title, snippet(documents, 1, '', '', '...', 12) FROM documents WHERE"
            " documents MATCH ? ORDER BY bm25(documents, 5.0, 1.0), rowid LIMIT ?",
            (" OR ".join(words), min(k, self.most)),
        ).fetchall()
        self.found |= {number for number, *_ in rows}
        if self.brief:
            self.shown = "\n".join(
                f"[{number}] {best_sentence(self.by_id[number].text, query)}" for number, *_ in rows
            )
        else:
            self.shown = "\n".join(
                f"[{number}] {title}: {excerpt}" for number, title, excerpt in rows
            )
        return self.shown or "Nothing was found."

    def read(self, document: int) -> str:
        """Read a document.

        Args:
            document: its number, as search gives it
        """
        if document not in self.by_id:
            raise ToolError(
                f"there is no document {document}; search gives the numbers of those that there are"
            )
        self.done.add(document)
        return f"{self.by_id[document].title}\n{self.by_id[document].text}"

    def answer(self, text: str) -> ToolResult:
        """Give the answer. There is only one try.

        Args:
            text: the name that was asked for, and nothing else
        """
        right = normal(text) == normal(self.world.chain[-1])
        return ToolResult(
            "right" if right else "wrong", reward=float(right), terminated=True, success=right
        )


def best_sentence(text: str, query: str) -> str:
    """The sentence of a text that has most words of the query; the first of several."""
    wanted = set(normal(query).split())
    return max(
        re.split(r"(?<=\.) ", text),
        key=lambda sentence: len(wanted & set(normal(sentence).split())),
    )


def normal(answer: str) -> str:
    """An answer without case, punctuation, articles and extra spaces."""
    words = re.findall(r"\w+", answer.casefold())
    return " ".join(word for word in words if word not in ("a", "an", "the"))


@plays(Search)
def strong_player(env: Search, rng: random.Random) -> str:
    """Searches for the name in the question or the last document, reads the result, and so on. A
    `ScriptedPlayer`.
    """
    return weak_player(env, rng, skill=1.0)


@plays(Search)
def weak_player(env: Search, rng: random.Random, skill: float = 0.7) -> str:
    """With probability `skill` the call of `strong_player`, else a random one. For warm starts."""
    call = _next_call(env) if rng.random() < skill else _any_call(env, rng)
    return env.written(call)


@plays(Search)
def hasty_player(env: Search, rng: random.Random, skill: float = 0.5) -> str:
    """Reads nothing but the one excerpt that a search shows, and answers from it. For warm starts
    in few tokens.

    With probability `skill` it searches for the words of the fact ("was born in Lara Tobin"), which
    usually shows it, else for the name alone. If the answer is not shown, it gives the last name
    that is.
    """
    texts = {document.title: document for document in env.world.documents}
    for thing, other in pairwise(env.world.chain):
        document = texts[thing]
        if document.id not in env.found:
            words = (
                f"{_fact_without_names(document, other)} {thing}" if rng.random() < skill else thing
            )
            return env.written(ToolCall("search", {"query": words, "k": 1}))
    answer = env.world.chain[-1]
    names = re.findall(r"[A-Z]\w+(?: [A-Z]\w+)*", env.shown)
    return env.written(ToolCall("answer", {"text": answer if answer in env.shown else names[-1]}))


def _fact_without_names(document: Document, other: str) -> str:
    """The document's words about its thing and the other one, without both names."""
    (sentence,) = (sentence for sentence in document.text.split(". ") if other in sentence)
    return " ".join(sentence.replace(other, "").replace(document.title, "").rstrip(" .").split())


def _next_call(env: Search) -> ToolCall:
    numbers = {document.title: document.id for document in env.world.documents}
    for title in env.world.chain[:-1]:
        if numbers[title] not in env.found:
            return ToolCall("search", {"query": title})
        if numbers[title] not in env.done:
            return ToolCall("read", {"document": numbers[title]})
    return ToolCall("answer", {"text": env.world.chain[-1]})


def _any_call(env: Search, rng: random.Random) -> ToolCall:
    title = rng.choice(env.world.documents).title
    calls = [ToolCall("search", {"query": title}), ToolCall("answer", {"text": title})]
    calls += [ToolCall("read", {"document": number}) for number in sorted(env.found)[:1]]
    return rng.choice(calls)


@lru_cache(maxsize=1024)
def make_world(level: int, seed: int, shared_names: int | None = None) -> SearchWorld:
    """The world of a seed; all members of a group share it."""
    rng = random.Random(seed)
    things = _draw_names(8 * level, rng, _shared_names(shared_names) if shared_names else None)
    kinds = [(thing, kind) for kind in REMARKS for thing in things[kind]]
    facts: dict[str, list[tuple[Relation, str]]] = {}
    for thing, kind in kinds:
        facts[thing] = []
        for relation in RELATIONS:
            if relation.kind == kind:
                others = [other for other in things[relation.other] if other != thing]
                facts[thing].append((relation, rng.choice(others)))
    numbers = rng.sample(range(1000, 10_000), len(kinds))
    documents = tuple(
        Document(number, thing, _write_document(thing, facts[thing], REMARKS[kind], rng))
        for number, (thing, kind) in zip(numbers, kinds, strict=True)
    )
    return SearchWorld(documents, *_draw_question(level, things["person"], facts, rng))


@cache
def _shared_names(count: int) -> Sequence[str]:
    """`count` different names, the same for every seed."""
    rng, names = random.Random(0), dict[str, None]()
    while len(names) < count:
        names[_name(rng)] = None
    return tuple(names)


def _draw_names(
    people: int, rng: random.Random, shared: Sequence[str] | None
) -> dict[str, list[str]]:
    """Names by kind, all different. People share surnames, so that only the full name finds one."""
    # Five names a person suffice: a first name each, and half as many of each other kind. Invented
    # names may repeat, so more are drawn.
    names = (
        rng.sample(shared, 5 * people)
        if shared
        else list(dict.fromkeys(_name(rng) for _ in range(8 * people)))
    )
    few = people // 2
    families = names[: few // 2]
    firsts, towns, companies, rivers, products = (
        names[few + at * people : few + at * people + count]
        for at, count in enumerate((people, few, few, few, few))
    )
    return {
        "person": [f"{first} {rng.choice(families)}" for first in firsts],
        "town": towns,
        "company": [f"{name} {rng.choice(('Works', 'Brothers', 'Society'))}" for name in companies],
        "river": [f"River {name}" for name in rivers],
        "product": [f"{name} {rng.choice(('lamp', 'clock', 'boat'))}" for name in products],
    }


def _name(rng: random.Random) -> str:
    syllables = [
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))
    ]
    return "".join(syllables).capitalize() + rng.choice("lmnrst")


_Facts = Mapping[str, Sequence[tuple[Relation, str]]]


def _write_document(
    thing: str, facts: Sequence[tuple[Relation, str]], remarks: Sequence[str], rng: random.Random
) -> str:
    sentences = [relation.sentence.format(thing, other) for relation, other in facts]
    sentences += [remark.format(thing, rng.randint(10, 99)) for remark in rng.sample(remarks, 2)]
    rng.shuffle(sentences)
    return " ".join(sentences)


def _draw_question(
    level: int, people: Sequence[str], facts: _Facts, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    """A question of `level` facts, and its chain, all different, from the thing it names to the one
    it asks for.
    """
    while True:
        chain = [rng.choice(people)]
        phrase = chain[0]
        for _ in range(level):
            ways = [
                (relation, other)
                for relation, other in facts.get(chain[-1], ())
                if other not in chain
            ]
            if not ways:
                break
            relation, other = rng.choice(ways)
            phrase = relation.phrase.format(phrase)
            chain.append(other)
        if len(chain) == level + 1:
            return f"What is the name of {phrase}?", tuple(chain)


def _index(documents: Sequence[Document]) -> sqlite3.Connection:
    # An environment may be closed in another thread than the one that played it, but is never used
    # by two at the same time.
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
    rows = [(document.id, document.title, document.text) for document in documents]
    index.executemany("INSERT INTO documents (rowid, title, text) VALUES (?, ?, ?)", rows)
    return index
