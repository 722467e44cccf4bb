"""The settings of a run, from a YAML file and `a.b=c` overrides; strict, with the origin of every
value.

`run_config.py` has what can be set. `source.py` reads what is written, `components.py` makes the
components that it names, `problems.py` explains what is wrong, `loading.py` puts them together,
`from_file.py` lets overrides work on configs that runs have saved, `history.py` keeps the configs
of a run, and `learning_rates.py` reads what they say of learning rates.
"""

from agentrl.config.components import component_like
from agentrl.config.from_file import load_config, parse_config
from agentrl.config.history import ConfigHistory, SettingChange, refuse_another_run
from agentrl.config.learning_rates import jumps_of_schedules, notes_of_schedules, notes_of_warm_up
from agentrl.config.loading import LoadedConfig, check_installed, check_options, validate_config
from agentrl.config.problems import RENAMED
from agentrl.config.run_config import (
    COMPONENTS,
    PLAYED,
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    brings_algorithm,
    unused_by,
)

__all__ = [
    "COMPONENTS",
    "PLAYED",
    "RENAMED",
    "CheckpointConfig",
    "ConfigHistory",
    "EvaluationConfig",
    "LoadedConfig",
    "ModelConfig",
    "RunConfig",
    "SettingChange",
    "brings_algorithm",
    "check_installed",
    "check_options",
    "component_like",
    "jumps_of_schedules",
    "load_config",
    "notes_of_schedules",
    "notes_of_warm_up",
    "parse_config",
    "refuse_another_run",
    "unused_by",
    "validate_config",
]
