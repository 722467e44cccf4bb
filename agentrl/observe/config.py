"""The records of a run besides its metrics."""

from pydantic import Field

from agentrl.settings.base import NameText, Settings


class ObserveConfig(Settings):
    """The records of a run besides its metrics, for `agentrl view`."""

    notes: str = ""
    """The purpose of this run, in words, for the page of `agentrl view`. What is known later may be
    written into the file `notes.md` of the run's folder."""
    tags: tuple[NameText, ...] = ()
    """Words to find the run by, such as `[baseline, seed-3]`: in `agentrl view`, and as tags in
    trackers.
    """
    token_groups: int = Field(1, ge=0)
    """Groups of each step, drawn at random, of whose tokens the trainer's logprobs, ratios and
    advantages are kept (`samples/` in the run's folder)."""
    untrained_episodes: int = Field(8, ge=0)
    """Episodes of each step that were not trained on whose messages and tokens are kept: so many
    that were filtered, as many that were stale, and as many that failed in each layer (`untrained/`
    in the run's folder)."""
    picture_kib: int = Field(32, ge=0)
    """The longest picture of a state that is kept, in KiB, of environments that draw
    (`render_html`). 0: none is drawn."""
    tracked_episodes: int = Field(4, ge=0)
    """Episodes that trackers get as a table: the first so many of each evaluation, and one of each
    of the first so many groups of a step, as often as checkpoints are saved (`checkpoint.every`).
    0: none."""
    profile: bool = False
    """Record a trace of the whole run in `profile/`, for `agentrl profile RUN` and
    https://ui.perfetto.dev. Of a run that goes on, `agentrl profile RUN --live 60` records a
    minute."""
