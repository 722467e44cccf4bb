"""The settings of a run, from a YAML file and `a.b=c` overrides; strict, with the origin of every value.

`run_config.py` has what can be set. `source.py` reads what is written, `components.py` makes the components that
it names, `problems.py` explains what is wrong, and `loading.py` puts them together.
"""

from agentrl.config.components import component_like
from agentrl.config.loading import LoadedConfig, load_config, validate_config
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
    "EvaluationConfig",
    "LoadedConfig",
    "ModelConfig",
    "RunConfig",
    "brings_algorithm",
    "component_like",
    "load_config",
    "unused_by",
    "validate_config",
]
