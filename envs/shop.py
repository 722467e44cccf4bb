"""Book a room for a user who states wishes only when asked. The model talks to the user and to the
desk.

The user is a function: `scripted_user` by default, or the option `user`, such as one that calls a
model.
"""

import inspect
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ImportString

from agentrl.envs.base import ToolEnv, ToolError, ToolResult, plays, read_options
from agentrl.errors import ConfigError
from agentrl.protocols import OwnerOnly
from agentrl.settings.base import Settings
from agentrl.trajectory import ToolCall

AREAS = ("centre", "harbour", "old town", "university")


@dataclass(frozen=True, slots=True)
class Room:
    """A room as the desk knows it. `price` is in euros per night; a room that is not `free` cannot
    be booked.
    """

    name: str
    price: int
    area: str
    beds: int
    breakfast: bool
    pets: bool
    parking: bool
    free: bool = True


@dataclass(frozen=True, slots=True)
class Wish:
    """One wish of the user. `value` is the maximum of a `price`, the minimum of `beds`, else the
    exact value.
    """

    about: str
    value: int | str | bool

    def holds(self, room: Room) -> bool:
        """True if the room fulfils the wish."""
        value = getattr(room, self.about)
        if self.about == "price":
            return bool(value <= self.value)
        return bool(value >= self.value) if self.about == "beds" else bool(value == self.value)

    def __str__(self) -> str:
        sentences = {
            "price": f"It may cost at most {self.value} euros a night.",
            "area": f"It should be in this part of town: {self.value}.",
            "beds": f"We need at least {self.value} beds.",
            "breakfast": "There must be breakfast.",
            "pets": "Our dog comes with us.",
            "parking": "We come by car and must park it.",
        }
        return sentences[self.about]


Topic = Literal["price", "area", "beds", "breakfast", "pets", "parking"]

TOPICS: Mapping[str, str] = {
    "price": r"pric|cost|budget|pay|euro|expensive|cheap|money",
    "area": r"area|where|location|part of|district|town|neighbou?rhood",
    "beds": r"\bbed|sleep|people|person|guest|how many of you",
    "breakfast": r"breakfast|meal|food|eat",
    "pets": r"\bpet|dog|\bcat|animal",
    "parking": r"parking|\bcar\b|drive|vehicle",
}
"""The topics of users' wishes, and the words by which the scripted user recognises them in a
question."""

LISTED = ("price", "area")
"""The topics that the list of rooms shows; the others need `inspect_room`."""

User = Callable[[str, Sequence[Wish], random.Random], str | Awaitable[str]]
"""Answers a question, given all wishes and the episode's generator. May be async; keeps no state
between calls.
"""


def scripted_user(question: str, wishes: Sequence[Wish], rng: random.Random) -> str:
    """Answers about at most two of the topics in the question, and volunteers nothing."""
    asked = [topic for topic, words in TOPICS.items() if re.search(words, question.lower())][:2]
    if not asked:
        return f"Please ask me about something: {', '.join(TOPICS)}."
    wished = {wish.about: str(wish) for wish in wishes}
    return " ".join(wished.get(topic, f"I do not mind about the {topic}.") for topic in asked)


class Shop(ToolEnv):
    """Book the room that the user wants, then finish: reward 1 if the booked room fulfils every
    wish.

    Finishing ends the episode; only the run limits the number of turns. Exactly one free room
    fulfils all wishes, and for each wish another room fails only that one.
    """

    system_prompt = (
        "Book the room that the user wants. The user tells you their wishes only if you ask about"
        " them. Look at the rooms with the tools, book one, then finish."
    )
    isolation = "inline"
    restorable = True

    class Options(Settings):
        """The options of `reset`."""

        level: int = Field(1, ge=1, le=5)
        """The user has `level` + 1 wishes; the house has 4 * `level` + 4 rooms. From level 3 on, a
        room that would fit is taken."""
        topics: tuple[Topic, ...] = Field(get_args(Topic), min_length=1)
        """The topics that the user may have wishes about."""
        wishes: int | None = Field(None, ge=1, le=6)
        """The number of the user's wishes, at most one for each topic; by default that of the
        level."""
        rooms: int | None = Field(None, ge=2, le=24)
        """The number of rooms in the house, by default that of the level. Each wish needs one, the
        user one more."""
        names: int = Field(24, ge=2, le=24)
        """From how many names those of the rooms are drawn: few are easier for a small model."""
        brief: bool = False
        """If true, the list of rooms is one line (`Rooms: Ivy: harbour; Opal: centre`), without a
        price or an area that is no topic."""
        user: Annotated[ImportString[User], OwnerOnly()] = Field(default=scripted_user)
        """The `User` that answers `ask_user`, or its address as `package.module:name`."""
        short_calls: bool = False
        """If true, tools are called in words (`book Amber`) instead of JSON, for very small
        models."""

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Draw the rooms and the wishes."""
        chosen = read_options(self.Options, options)
        self.call_shortly(chosen.short_calls)
        self._user: User = chosen.user
        self.topics = chosen.topics
        self.brief = chosen.brief
        self.wishes = _draw_wishes(
            chosen.topics, chosen.wishes or min(chosen.level + 1, len(set(chosen.topics))), self.rng
        )
        rooms = _draw_rooms(
            chosen.rooms or 4 * chosen.level + 4,
            self.wishes,
            self.rng,
            _NAMES[: chosen.names],
            one_is_taken=chosen.level >= 3,
        )
        self.rooms = {room.name: room for room in rooms}
        self.booked: Room | None = None
        self.listed: set[str] = set()
        self.questions: list[str] = []
        self.inspected: set[str] = set()
        return "Hello! I need a room for the night, please."

    # This one async tool makes the whole environment run on the event loop, where a user may wait
    # for a model.
    async def ask_user(self, question: str) -> str:
        """Ask the user something.

        Args:
            question: what you want to know, in words
        """
        self.questions.append(question)
        answer = self._user(question, self.wishes, self.rng)
        return await answer if inspect.isawaitable(answer) else answer

    def list_rooms(self, area: str = "") -> str:
        """List the names of the rooms, with price and area.

        Args:
            area: the part of town, for the rooms there only
        """
        where = area.strip().lower()
        if where and where not in AREAS:
            raise ToolError(f"there is no part of town {area[:40]!r}, only {', '.join(AREAS)}")
        rooms = [room for room in self.rooms.values() if where in ("", room.area)]
        if not rooms:
            return "No rooms."
        self.listed.update(room.name for room in rooms)
        topics = [topic for topic in LISTED if not self.brief or topic in self.topics]
        lines = []
        for room in rooms:
            facts = {"price": f"{room.price} euros", "area": room.area}
            text = ", ".join(facts[topic] for topic in topics)
            lines.append(f"{room.name}: {text}" if text else room.name)
        return f"Rooms: {'; '.join(lines)}" if self.brief else "\n".join(lines)

    def inspect_room(self, room: str) -> dict[str, Any]:
        """Tell all about a room.

        Args:
            room: its name, as in the list
        """
        found = self._find(room)
        self.inspected.add(found.name)
        return asdict(found)

    def book(self, room: str) -> str:
        """Book a room. An earlier booking is cancelled.

        Args:
            room: its name, as in the list
        """
        found = self._find(room)
        if not found.free:
            raise ToolError(f"{found.name} is not free")
        self.booked = found
        return f"{found.name} is booked."

    def finish(self) -> ToolResult:
        """Say goodbye to the user. Nothing can be changed afterwards."""
        fits = self.booked is not None and all(wish.holds(self.booked) for wish in self.wishes)
        reply = "Thank you, this is what I wanted." if fits else "This is not what I wanted."
        return ToolResult(reply, reward=float(fits), terminated=True, success=fits)

    def _find(self, name: str) -> Room:
        found = self.rooms.get(name.strip().title())
        if found is None:
            raise ToolError(
                f"there is no room {name[:40]!r}; list_rooms names those that there are"
            )
        return found


@plays(Shop)
def strong_player(env: Shop, rng: random.Random) -> str:
    """Asks about every topic, inspects rooms that may fit, and books the one that does. For
    demonstrations.
    """
    return weak_player(env, rng, skill=1.0)


@plays(Shop)
def weak_player(env: Shop, rng: random.Random, skill: float = 0.8) -> str:
    """With probability `skill` the call of `strong_player`, else a random one. For warm starts."""
    call = _next_call(env) if rng.random() < skill else _any_call(env, rng)
    return env.written(call)


@plays(Shop)
def hasty_player(env: Shop, rng: random.Random, skill: float = 0.4) -> str:
    """Lists the rooms where the user wants one, and books the first that fits. For warm starts in
    few tokens.

    With probability 1 - `skill` it does not ask, and books as if the user did not mind. It inspects
    no room, so the topics must be listed.
    """
    if env.booked is not None:
        return env.written(ToolCall("finish", {}))
    unasked = [topic for topic in env.topics if topic not in " ".join(env.questions)]
    if unasked and not env.listed and rng.random() < skill:
        return env.written(
            ToolCall("ask_user", {"question": f"Which {' and '.join(unasked[:2])}?"})
        )
    known = [wish for wish in env.wishes if wish.about in LISTED and wish.about not in unasked]
    if not env.listed:
        return env.written(
            ToolCall("list_rooms", {w.about: w.value for w in known if w.about == "area"})
        )
    first = next(
        room.name for room in env.rooms.values() if all(wish.holds(room) for wish in known)
    )
    return env.written(ToolCall("book", {"room": first}))


def _next_call(env: Shop) -> ToolCall:
    """The next call; it uses only what the episode has revealed so far."""
    asked = " ".join(env.questions)
    unasked = [topic for topic in env.topics if topic not in asked]
    if unasked:
        return ToolCall(
            "ask_user", {"question": f"What do you wish as to {' and '.join(unasked[:2])}?"}
        )
    if len(env.listed) < len(env.rooms):
        return ToolCall("list_rooms", {})
    shown = [wish for wish in env.wishes if wish.about in LISTED]
    for room in env.rooms.values():
        if not all(wish.holds(room) for wish in shown):
            continue
        if room.name not in env.inspected:
            return ToolCall("inspect_room", {"room": room.name})
        if room.free and all(wish.holds(room) for wish in env.wishes):
            return (
                ToolCall("finish", {})
                if env.booked == room
                else ToolCall("book", {"room": room.name})
            )
    return ToolCall("finish", {})


def _any_call(env: Shop, rng: random.Random) -> ToolCall:
    room = rng.choice(list(env.rooms))
    calls = [
        ToolCall("ask_user", {"question": f"And the {rng.choice(list(TOPICS))}?"}),
        ToolCall("list_rooms", {}),
        ToolCall("inspect_room", {"room": room}),
        ToolCall("book", {"room": room}),
        ToolCall("finish", {}),
    ]
    return rng.choice(calls)


def _draw_wishes(topics: Sequence[str], count: int, rng: random.Random) -> tuple[Wish, ...]:
    if count > len(set(topics)):
        raise ConfigError(
            f"options: {count} wishes need as many topics, and there are only {', '.join(topics)}"
        )
    values: dict[str, int | str | bool] = {
        "price": rng.randrange(60, 160, 10),
        "area": rng.choice(AREAS),
        "beds": rng.randint(2, 4),
        "breakfast": True,
        "pets": True,
        "parking": True,
    }
    return tuple(
        Wish(about, values[about])
        for about in rng.sample([about for about in values if about in topics], count)
    )


def _draw_rooms(
    count: int,
    wishes: Sequence[Wish],
    rng: random.Random,
    known_names: Sequence[str],
    *,
    one_is_taken: bool,
) -> list[Room]:
    """One room that fits, one for each wish that fails only that wish, and others that fail some;
    in random order.

    Raises:
        ConfigError: there are too few rooms for the wishes, or too few names for the rooms.
    """
    if count < (needed := len(wishes) + 1 + one_is_taken):
        raise ConfigError(
            f"options: {len(wishes)} wishes need at least {needed} rooms at this level, not {count}"
        )
    if count > len(known_names):
        raise ConfigError(f"options: {count} rooms need as many names, not {len(known_names)}")
    # The wishes that each room fails: none, each wish alone, and then any.
    missed = [[], *([wish] for wish in wishes)]
    missed += [rng.sample(wishes, rng.randint(1, len(wishes))) for _ in range(count - len(missed))]
    names = rng.sample(known_names, len(missed))
    rooms = [
        _draw_room(name, wishes, misses, rng) for name, misses in zip(names, missed, strict=True)
    ]
    if one_is_taken:
        # A twin of the room that fits, but taken: the player must look before it books.
        rooms[-1] = replace(rooms[0], name=rooms[-1].name, free=False)
    rng.shuffle(rooms)
    return rooms


def _draw_room(
    name: str, wishes: Sequence[Wish], misses: Sequence[Wish], rng: random.Random
) -> Room:
    """A random room that fulfils all wishes except `misses`."""
    breakfast, pets, parking = (rng.random() < 0.5 for _ in range(3))
    room = Room(
        name,
        rng.randrange(40, 200, 5),
        rng.choice(AREAS),
        rng.randint(1, 5),
        breakfast,
        pets,
        parking,
    )
    values: dict[str, Any] = {
        wish.about: _draw_value(wish, wish not in misses, rng) for wish in wishes
    }
    return replace(room, **values)


def _draw_value(wish: Wish, granted: bool, rng: random.Random) -> int | str | bool:
    """A random value that fulfils the wish, or fails it."""
    if wish.about == "price":
        limit = int(wish.value)
        return rng.randrange(40, limit + 1, 5) if granted else limit + rng.randrange(5, 60, 5)
    if wish.about == "beds":
        return rng.randint(int(wish.value), 5) if granted else rng.randint(1, int(wish.value) - 1)
    if granted:
        return wish.value
    return (
        rng.choice([area for area in AREAS if area != wish.value])
        if wish.about == "area"
        else False
    )


_NAMES = [
    *(
        "Amber",
        "Birch",
        "Cedar",
        "Clover",
        "Coral",
        "Crystal",
        "Fern",
        "Garnet",
        "Hazel",
        "Heather",
        "Iris",
        "Ivy",
    ),
    *(
        "Jade",
        "Juniper",
        "Laurel",
        "Lilac",
        "Maple",
        "Olive",
        "Opal",
        "Pearl",
        "Rowan",
        "Ruby",
        "Sage",
        "Willow",
    ),
]
