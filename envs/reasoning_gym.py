"""reasoning-gym's procedurally generated questions, each an episode of one turn: `env:
rg:leg_counting`.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import Field

from agentrl.envs.base import TextEnv, read_options
from agentrl.envs.foreign import GlobalRng, check_known, load_package
from agentrl.errors import ConfigError, EnvError
from agentrl.protocols import Env, StepResult
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import at_least

MAX_ANSWER = 20_000
"""Most characters of an answer. A longer one is wrong without scoring it: some scorers take
quadratic time.
"""


def scheme(rest: str) -> Callable[[], Env]:
    """rg:leg_counting: a data set of reasoning-gym, a question and its scored answer.

    Raises:
        PluginError: there is no such data set, or the package is missing.
    """
    load_package("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    check_known(f"rg:{rest}", rest, DATASETS)
    return partial(ReasoningGym, rest)


class ReasoningGym(TextEnv):
    """One question of a data set, chosen by the seed.

    The model's one message is the answer: the text between the last <answer> and </answer>, or else
    the whole message. The reward is the data set's score, from 0 to 1; a score of 1 is a success.
    `info["answer"]` is the expected answer.
    """

    system_prompt = "Answer the question. Write the answer alone between <answer> and </answer>."

    class Options(Settings):
        """The options of `reset`."""

        size: int = Field(10_000, ge=1)
        """Questions in the data set; the seed modulo this is the number of the question. `acre`
        makes all of them at once and pairs them, so use 500 for it."""
        config: dict[str, Any] = Field(default_factory=dict)
        """Settings of the data set, such as its difficulty. Its `seed` chooses another set of
        questions.
        """

    deterministic = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._data: Any = None
        self._made_of: Options | None = None
        self._entry: dict[str, Any] | None = None

    def start(self, seed: int, options: Mapping[str, Any]) -> str:
        """Look up the question of this seed.

        Raises:
            ConfigError: the data set does not accept these options.
        """
        chosen = read_options(self.Options, options)
        if self._made_of != chosen:
            with GlobalRng(0).install():
                self._data = _make(self._name, chosen)
            self._made_of = chosen.model_copy(deep=True)
        self._global_rng = GlobalRng(seed)  # some data sets draw from the global generators
        with self._global_rng.install():
            entry: dict[str, Any] = self._data[seed % chosen.size]
        self._entry = entry
        return str(entry["question"])

    def step(self, action: str) -> StepResult:
        """Score the answer.

        Raises:
            EnvError: no question is open, or the data set cannot score.
        """
        if self._entry is None:
            raise EnvError("no episode is being played; call reset first")
        entry, self._entry = self._entry, None
        with self._global_rng.install():
            score = _score(self._data, _answer(action), entry)
        info = {"success": at_least(score, 1), "answer": _right_answer(entry)}
        return f"Score: {score:.3g}.", score, True, False, info

    def close(self) -> None:
        """Drop the data set."""
        self._data = self._made_of = self._entry = None


Options = ReasoningGym.Options


def _make(name: str, options: Options) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(
            name, size=options.size, **{"seed": 0, **options.config}
        )
    except Exception as error:
        raise ConfigError(
            f"reasoning_gym cannot make {name!r} with size={options.size} and"
            f" config={options.config!r}: {error!r}. Its settings: {_describe_settings(name)}"
        ) from error


def _describe_settings(name: str) -> str:
    """The data set's settings, as `name=default` if there is a default."""
    from dataclasses import MISSING, fields

    from reasoning_gym.factory import DATASETS

    return ", ".join(
        field.name if field.default is MISSING else f"{field.name}={field.default!r}"
        for field in fields(DATASETS[name][1])
    )


def _answer(message: str) -> str:
    tagged = re.findall(r"<answer>(.*?)</answer>", message, re.DOTALL)
    return (tagged[-1] if tagged else message).strip()


def _score(data: Any, answer: str, entry: dict[str, Any]) -> float:
    """The score of an answer, between 0 and 1.

    Raises:
        EnvError: the scorer fails even on the expected answer.
    """
    if len(answer) > MAX_ANSWER:
        return 0.0
    try:
        return float(data.score_answer(answer=answer, entry=entry))
    except Exception as error:
        # Some scorers raise if they cannot read an answer, which is then wrong. But a scorer that
        # fails on the expected answer too is broken, and says nothing about this one.
        try:
            data.score_answer(answer=_right_answer(entry), entry=entry)
        except Exception:
            raise EnvError(f"the scorer fails, even on the expected answer: {error!r}") from error
        return 0.0


def _right_answer(entry: Mapping[str, Any]) -> str | None:
    """The expected answer, if one is known."""
    gold = entry.get("answer")
    return None if gold is None else str(gold)
