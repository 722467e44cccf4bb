"""`Offers`: the base of what the plug-ins of a seam say that they offer."""

from dataclasses import dataclass, fields
from typing import Self

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Offers:
    """The base of `EngineOffers`, `AlgorithmOffers` and others: one frozen value with a default for
    every field. A plug-in has it as its attribute `offers`, of the class, or of the instance where
    it follows from the settings. A field that does not exist is an error when the plug-in's module
    is imported.
    """

    @classmethod
    def of(cls, plugin: object) -> Self:
        """The offers of a plug-in: of an instance, or of a class.

        One without `offers` offers what attributes with the names of the fields say, and otherwise
        the defaults.

        Raises:
            ConfigError: its `offers` are of another seam, or it has such an attribute beside them,
                which would be ignored.
        """
        names = [field.name for field in fields(cls)]
        stated = {name: getattr(plugin, name) for name in names if hasattr(plugin, name)}
        offers = getattr(plugin, "offers", None)
        if offers is None:
            return cls(**stated)
        kind = plugin if isinstance(plugin, type) else type(plugin)
        if not isinstance(offers, cls):
            raise ConfigError(
                f"{kind.__qualname__}.offers is {offers!r:.80}: write {cls.__name__}(...), with"
                f" {', '.join(names)}"
            )
        if stated:
            written = ", ".join(f"{name}=..." for name in stated)
            raise ConfigError(
                f"{kind.__qualname__} has `offers`, and the attribute {min(stated)!r} beside them:"
                f" write offers = {cls.__name__}({written})"
            )
        return offers
