"""Algorithms that are an advantage and a surrogate under a name of their own: `algorithm: gspo` is
`{name: grpo, surrogate: gspo}`.
"""

import copyreg
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from pydantic import create_model
from pydantic.fields import FieldInfo

from agentrl.algorithms.grpo import Grpo
from agentrl.algorithms.policy_loss import PolicyAlgorithm, PolicyLoss
from agentrl.algorithms.surrogates import SURROGATES, SurrogateName


@dataclass(frozen=True)
class NamedPair:
    """The algorithm of an advantage with a surrogate; called with settings, as a class is."""

    advantage: type[PolicyAlgorithm]
    """The class of the advantage."""
    surrogate: SurrogateName
    """The surrogate, which is no choice then."""

    @property
    def Config(self) -> type[PolicyLoss]:
        """The settings of the advantage, with the defaults of the surrogate."""
        return _settings_of(self)

    def __call__(self, config: PolicyLoss | None = None) -> PolicyAlgorithm:
        """Make the algorithm."""
        return self.advantage(config or self.Config())


@cache
def _settings_of(pair: NamedPair) -> type[PolicyLoss]:
    settings = _make_settings(pair)
    # The class is in no module under its name, so pickle, which takes settings to the ranks of a
    # trainer, would not find it.
    copyreg.pickle(settings, partial(_reduce, pair))
    return settings


def _make_settings(pair: NamedPair) -> type[PolicyLoss]:
    """The settings of the advantage; those of the surrogate keep type and docstring, and get its
    defaults.
    """
    base = pair.advantage.Config
    defaults = {"surrogate": pair.surrogate, **SURROGATES[pair.surrogate].defaults}
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        field = base.model_fields[name]
        changed = FieldInfo(default=default, description=field.description)
        fields[name] = (field.rebuild_annotation(), changed)
    fields["surrogate"] = (Literal[pair.surrogate], fields["surrogate"][1])
    return create_model("Config", __base__=base, **fields)


def _reduce(pair: NamedPair, settings: PolicyLoss) -> tuple[Any, ...]:
    return _restore, (pair, settings.__getstate__())


def _restore(pair: NamedPair, state: dict[Any, Any]) -> PolicyLoss:
    kind = _settings_of(pair)
    settings = kind.__new__(kind)
    settings.__setstate__(state)
    return settings


GSPO = NamedPair(Grpo, "gspo")
CISPO = NamedPair(Grpo, "cispo")
SAPO = NamedPair(Grpo, "sapo")
