"""The files that engines write their own logs to."""

import os
from dataclasses import replace

from agentrl.plugins import Component
from agentrl.protocols.component_settings import EngineSettingsOffers


def with_log_of(engine: Component, **names: str) -> Component:
    """The engine with the log of one engine: of the names in its path, `{role}` and `{number}`,
    those that are given are filled in. The path becomes absolute, as workers may have other working
    directories.
    """
    log = EngineSettingsOffers.of(engine.settings).log
    if log is None:
        return engine
    for name, value in names.items():
        log = log.replace(f"{{{name}}}", value.replace(" ", "-"))
    return replace(
        engine, settings=engine.settings.model_copy(update={"log": os.path.abspath(log)})
    )
