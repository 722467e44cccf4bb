"""Algorithms that are an advantage and a surrogate under a name of their own: `algorithm: gspo` is
`{name: grpo, surrogate: gspo}`.
"""

from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def Config(self) -> type[PolicyLoss]:
        """The settings of the advantage, with the defaults of the surrogate."""
        base = self.advantage.Config
        defaults = {"surrogate": self.surrogate, **SURROGATES[self.surrogate].defaults}
        fields: dict[str, Any] = {
            name: _with_default(base.model_fields[name], default)
            for name, default in defaults.items()
        }
        chosen = fields["surrogate"][1]
        fields["surrogate"] = (Literal[self.surrogate], chosen)
        return create_model("Config", __base__=base, **fields)

    def __call__(self, config: PolicyLoss | None = None) -> PolicyAlgorithm:
        """Make the algorithm."""
        return self.advantage(config or self.Config())


def _with_default(field: FieldInfo, default: object) -> tuple[Any, FieldInfo]:
    """A setting with the same type and docstring, and another default."""
    return field.rebuild_annotation(), FieldInfo(default=default, description=field.description)


GSPO = NamedPair(Grpo, "gspo")
CISPO = NamedPair(Grpo, "cispo")
SAPO = NamedPair(Grpo, "sapo")
