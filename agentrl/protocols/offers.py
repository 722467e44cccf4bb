"""`Offers`: the base of what the plug-ins of a seam say that they offer."""

from dataclasses import dataclass, fields, replace
from typing import Self

from agentrl.errors import ConfigError

_ABSENT = object()


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

        Without `offers`, they are the defaults. An attribute with the name of a field, as in
        `uses_entropy = True`, stands for that field.

        Raises:
            ConfigError: its `offers` are of another seam.
        """
        names = [field.name for field in fields(cls)]
        found = {name: getattr(plugin, name, _ABSENT) for name in names}
        stated = {name: value for name, value in found.items() if value is not _ABSENT}
        offers = getattr(plugin, "offers", None)
        if isinstance(plugin, type):
            # A property follows from the settings of an instance, so a class does not tell.
            stated = {
                name: value for name, value in stated.items() if not isinstance(value, property)
            }
            offers = None if isinstance(offers, property) else offers
        if offers is None:
            offers = cls()
        if not isinstance(offers, cls):
            kind = plugin if isinstance(plugin, type) else type(plugin)
            raise ConfigError(
                f"{kind.__qualname__}.offers is {offers!r:.80}: write {cls.__name__}(...), with"
                f" {', '.join(names)}"
            )
        return replace(offers, **stated)
