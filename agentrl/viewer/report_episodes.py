"""The episodes that a report shows, with the beginnings of their messages and pictures."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import KINDS, EpisodeIndex, EpisodeQuery

MAX_TEXT_CHARACTERS = 4000
"""Characters of a text; the rest is left out."""
_MAX_MESSAGES = 40
_MAX_PICTURE_CHARACTERS = 256 << 10
"""Characters of the pictures of an episode."""

# Style and images within the picture; no script, and nothing that would be asked of anyone. The
# page (page/episode.js) draws its frames in the same way.
_FRAME = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
    " content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"><meta"
    ' http-equiv="x-dns-prefetch-control" content="off"><style>body{margin:6px;font:14px'
    " sans-serif;color:#22303c;background:#fff}svg,img{max-width:100%;max-height:calc(100vh -"
    " 12px)}</style>"
)


def shorten(text: str | None) -> str:
    """A text, cut to the length that a report shows."""
    text = text or ""
    return (
        text
        if len(text) <= MAX_TEXT_CHARACTERS
        else f"{text[:MAX_TEXT_CHARACTERS]} … ({len(text) - MAX_TEXT_CHARACTERS:,} more characters)"
    )


def episodes_to_read(index: EpisodeIndex, reader: EpisodeReader) -> Iterator[dict[str, Any]]:
    """The best, the worst and the median episode of the newest step whose episodes were kept, and
    one that failed.
    """
    newest = index.page(EpisodeQuery(kind=KINDS[0], limit=1))["rows"]
    step = newest[0]["step"] if newest else None
    total = index.page(EpisodeQuery(kind=KINDS[0], step=step, limit=1))["total"] if newest else 0
    places = (("The best", 0), ("The worst", total - 1), ("The median", total // 2))[:total]
    found = [
        (
            f"{kind} of step {step}",
            EpisodeQuery(kind=KINDS[0], step=step, sort="score", offset=place, limit=1),
        )
        for kind, place in places
    ]
    for kind, query in (*found, ("One that failed", EpisodeQuery(fate="failed", limit=1))):
        for row in index.page(query)["rows"]:
            episode = reader.episode(row["id"], row["agent"] or "", row["step"], pictures=True)
            played = episode["trajectory"] or {}
            words = {
                name: shorten(said)
                for name, said in json.loads(played.get("words") or "{}").items()
            }
            yield {
                "kind": kind,
                "row": row,
                "fate": episode["fate"],
                "words": words,
                **_conversation(played),
            }


def _conversation(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """The messages of an episode, each with the document that draws what it shows, or "" where
    there is none.
    """
    messages: Sequence[Mapping[str, Any]] = trajectory.get("messages") or []
    shown, left_out = [], 0
    room = _MAX_PICTURE_CHARACTERS
    for message, picture in zip(
        messages[:_MAX_MESSAGES], _pictures(trajectory, messages), strict=False
    ):
        fits = len(picture) <= room
        room -= len(picture) if fits else 0
        left_out += not fits
        images: list[tuple[str, int | None]] = []
        for image, tokens in zip(
            message.get("pictures") or (), message.get("picture_tokens") or (), strict=True
        ):
            fits_too = len(image) <= room
            room -= len(image) if fits_too else 0
            left_out += not fits_too
            images += [(image, tokens)] if fits_too else []
        texts = {name: shorten(message.get(name)) for name in ("role", "reasoning", "content")}
        calls = [
            shorten(f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})")
            for call in json.loads(message.get("tool_calls") or "[]")
        ]
        shown.append(
            {
                **texts,
                "calls": calls,
                "images": images,
                "picture": _FRAME + picture if picture and fits else "",
            }
        )
    return {
        "messages": shown,
        "left_out": max(0, len(messages) - _MAX_MESSAGES),
        "pictures_left_out": left_out,
    }


def _pictures(trajectory: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The picture that belongs to each message: of the state that the next answer reacts to, or in
    which the episode ended.
    """
    turns: Sequence[Mapping[str, Any]] = trajectory.get("turns") or []
    found, answers = [""] * len(messages), 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and not message.get("given") and answers < len(turns):
            if place > 0:
                found[place - 1] = turns[answers].get("picture") or ""
            answers += 1
    if messages:
        found[-1] = found[-1] or trajectory.get("picture") or ""
    return found
