"""The staleness rules by name: those of this project, and those of other packages.

A package registers a rule by an entry point, as this project registers its own:

    [project.entry-points."agentrl.staleness_rules"]
    newest_first = "my_package.rules:NewestFirst"
"""

from collections.abc import Mapping
from typing import TypeGuard

from agentrl import plugins
from agentrl.errors import PluginError
from agentrl.rollout.staleness import StalenessRule


def installed_rules() -> Mapping[str, str]:
    """The address of each rule by its name, rivals' included."""
    return {plugin.name: plugin.address for plugin in plugins.installed("staleness_rules")}


def load_rule(name: str) -> type[StalenessRule]:
    """The class of a rule, by its name or as `package.module:Name`.

    Raises:
        PluginError: there is no such rule, its import failed, or it is something else.
    """
    rules = installed_rules()
    if name not in rules and ":" not in name:
        offered = [
            known
            for known, rule in plugins.usable("staleness_rules")
            if _is_rule(rule) and not rule.train_with
        ]
        raise PluginError(
            f"there is no staleness rule {name!r}.{plugins.nearest(name, rules)} There is"
            f' {", ".join(offered)}. Another can be given as "package.module:Name", or registered'
            ' in the entry-point group "agentrl.staleness_rules"'
        )
    rule = plugins.load("staleness_rules", name)
    if not _is_rule(rule):
        raise PluginError(
            f"{name!r} is no staleness rule: write a subclass of"
            " agentrl.rollout.staleness.StalenessRule"
        )
    return rule


def _is_rule(found: object) -> TypeGuard[type[StalenessRule]]:
    return isinstance(found, type) and issubclass(found, StalenessRule)
