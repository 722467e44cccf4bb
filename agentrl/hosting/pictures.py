"""An environment's own pictures of its states, which go the way of its infos.

An environment may have a method `render_html`. `Pictured` calls it after each reset and step, where
the environment runs, so that its pictures cross every transport. Where an episode is played,
`taken` takes them out of the infos again.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from agentrl.errors import RAISED_BY_CODE
from agentrl.hosting.wrappers import Wrapper
from agentrl.protocols.env import Env, ResetResult, StepResult, can_draw

PICTURE = "render_html"
"""The key of an info with the picture of the state, as HTML. An environment may also fill it in
itself.
"""


class Pictured(Wrapper):
    """An environment whose infos have its pictures. A picture that cannot be drawn is a text that
    says why: it fails no episode.
    """

    picklable = True

    def began(self, result: ResetResult) -> ResetResult:
        """The result with the picture of the first state. A malformed one is left for the host to
        refuse.
        """
        if not _is_whole(result, 2):
            return result
        observation, info = result
        return observation, self._add_picture(info)

    def stepped(self, result: StepResult) -> StepResult:
        """The result with the picture of the new state. A malformed one is left for the host to
        refuse.
        """
        if not _is_whole(result, 5):
            return result
        observation, reward, terminated, truncated, info = result
        return observation, reward, terminated, truncated, self._add_picture(info)

    def _add_picture(self, info: Mapping[str, Any]) -> dict[str, Any]:
        try:
            picture: object = self.env.render_html()  # type: ignore[attr-defined]
        except RAISED_BY_CODE as error:
            picture = f"<p>render_html raised {escape(repr(error))}</p>"
        if not isinstance(picture, str):
            picture = f"<p>render_html returned {escape(type(picture).__name__)}, and no text</p>"
        # Half of a surrogate pair cannot be stored.
        return {**info, PICTURE: picture.encode("utf-8", "replace").decode()}


def _is_whole(result: tuple[Any, ...], length: int) -> bool:
    """True if a result has this many parts, and ends with an info."""
    return len(result) == length and isinstance(result[-1], Mapping)


def pictured(env: Env) -> Env:
    """The environment with its pictures in its infos, if it draws any."""
    return Pictured(env) if can_draw(env) else env


def taken(info: dict[str, Any], most_bytes: int) -> tuple[str, dict[str, Any]]:
    """The picture of an info, "" for none, and the info without it.

    Of a picture longer than `most_bytes` there remains a text that says so; if that is 0, there are
    no pictures.
    """
    if PICTURE not in info:
        return "", info
    rest = {key: value for key, value in info.items() if key != PICTURE}
    picture = info[PICTURE]
    if most_bytes == 0 or not isinstance(picture, str):
        return "", rest
    size = len(picture.encode())
    if size > most_bytes:
        return (
            (
                f"<p>a picture of {size:,} bytes was not kept: observe.picture_kib allows"
                f" {most_bytes:,}</p>"
            ),
            rest,
        )
    return picture, rest
