"""agentrl: reinforcement learning for language-model agents over many turns.

The names below are what environments, rewards, algorithms and notebooks import. Each is loaded when
it is first used, so that `import agentrl` stays light. `agentrl.testing` has the conformance checks
and fakes. All other modules are inner ones, and may move.
"""

from typing import TYPE_CHECKING

from agentrl.package.lazy_names import home_of, lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from agentrl.algorithms.advantages import group_mean as group_mean
    from agentrl.algorithms.advantages import group_std as group_std
    from agentrl.algorithms.advantages import leave_one_out as leave_one_out
    from agentrl.algorithms.advantages import returns_to_go as returns_to_go
    from agentrl.algorithms.grpo import Grpo as Grpo
    from agentrl.algorithms.grpo import Rloo as Rloo
    from agentrl.algorithms.policy_loss import PolicyAlgorithm as PolicyAlgorithm
    from agentrl.batch import TrainBatch as TrainBatch
    from agentrl.config.from_file import load_config as load_config
    from agentrl.conversation.config import RendererConfig as RendererConfig
    from agentrl.conversation.reading import Reading as Reading
    from agentrl.conversation.reading import ToolFormat as ToolFormat
    from agentrl.conversation.renderer import TemplateRenderer as TemplateRenderer
    from agentrl.envs.base import TextEnv as TextEnv
    from agentrl.envs.base import ToolEnv as ToolEnv
    from agentrl.envs.base import ToolResult as ToolResult
    from agentrl.envs.base import plays as plays
    from agentrl.envs.base import read_options as read_options
    from agentrl.errors import AgentRLError as AgentRLError
    from agentrl.errors import ConfigError as ConfigError
    from agentrl.errors import EnvError as EnvError
    from agentrl.gateway.coding_agents import CodingAgent as CodingAgent
    from agentrl.hosting.wrappers import Wrapper as Wrapper
    from agentrl.protocols import Algorithm as Algorithm
    from agentrl.protocols import AlgorithmOffers as AlgorithmOffers
    from agentrl.protocols import Command as Command
    from agentrl.protocols import Curriculum as Curriculum
    from agentrl.protocols import Engine as Engine
    from agentrl.protocols import EngineOffers as EngineOffers
    from agentrl.protocols import EngineStats as EngineStats
    from agentrl.protocols import Enumerable as Enumerable
    from agentrl.protocols import Env as Env
    from agentrl.protocols import GenerateRequest as GenerateRequest
    from agentrl.protocols import GroupReward as GroupReward
    from agentrl.protocols import LossOutput as LossOutput
    from agentrl.protocols import LossTokens as LossTokens
    from agentrl.protocols import Observation as Observation
    from agentrl.protocols import Reward as Reward
    from agentrl.protocols import RewardOffers as RewardOffers
    from agentrl.protocols import Rule as Rule
    from agentrl.protocols import Sandbox as Sandbox
    from agentrl.protocols import SandboxProvider as SandboxProvider
    from agentrl.protocols import SandboxSpec as SandboxSpec
    from agentrl.protocols import Stateful as Stateful
    from agentrl.protocols import StepReply as StepReply
    from agentrl.protocols import StepResult as StepResult
    from agentrl.protocols import TaskSource as TaskSource
    from agentrl.protocols import Tracker as Tracker
    from agentrl.protocols import Trainer as Trainer
    from agentrl.recipes.lineage import verified_lineage as verified_lineage
    from agentrl.rollout.staleness import StalenessRule as StalenessRule
    from agentrl.runs.train import train as train
    from agentrl.sandbox.pool import ProgramSandbox as ProgramSandbox
    from agentrl.sandbox.providers import open_provider as open_provider
    from agentrl.sandbox.settings import SandboxConfig as SandboxConfig
    from agentrl.settings.base import Settings as Settings
    from agentrl.tokens.encoded_image import EncodedImage as EncodedImage
    from agentrl.trajectory import Completion as Completion
    from agentrl.trajectory import Failed as Failed
    from agentrl.trajectory import Group as Group
    from agentrl.trajectory import Message as Message
    from agentrl.trajectory import Score as Score
    from agentrl.trajectory import Task as Task
    from agentrl.trajectory import Terminated as Terminated
    from agentrl.trajectory import ToolCall as ToolCall
    from agentrl.trajectory import Trajectory as Trajectory
    from agentrl.trajectory import Truncated as Truncated
    from agentrl.trajectory import Turn as Turn
    from agentrl.viewer.notebook import metrics_of as metrics_of
    from agentrl.viewer.notebook import plot as plot

_HOMES = {
    "agentrl.algorithms.advantages": "group_mean group_std leave_one_out returns_to_go",
    "agentrl.algorithms.grpo": "Grpo Rloo",
    "agentrl.algorithms.policy_loss": "PolicyAlgorithm",
    "agentrl.batch": "TrainBatch",
    "agentrl.config.from_file": "load_config",
    "agentrl.conversation.config": "RendererConfig",
    "agentrl.conversation.reading": "Reading ToolFormat",
    "agentrl.conversation.renderer": "TemplateRenderer",
    "agentrl.envs.base": "TextEnv ToolEnv ToolResult plays read_options",
    "agentrl.errors": "AgentRLError ConfigError EnvError",
    "agentrl.gateway.coding_agents": "CodingAgent",
    "agentrl.hosting.wrappers": "Wrapper",
    "agentrl.protocols": (
        "Algorithm AlgorithmOffers Command Curriculum Engine EngineOffers EngineStats Enumerable"
        " Env GenerateRequest GroupReward LossOutput LossTokens Observation Reward RewardOffers"
        " Rule Sandbox SandboxProvider SandboxSpec Stateful StepReply StepResult TaskSource Tracker"
        " Trainer"
    ),
    "agentrl.recipes.lineage": "verified_lineage",
    "agentrl.rollout.staleness": "StalenessRule",
    "agentrl.runs.train": "train",
    "agentrl.sandbox.pool": "ProgramSandbox",
    "agentrl.sandbox.providers": "open_provider",
    "agentrl.sandbox.settings": "SandboxConfig",
    "agentrl.settings.base": "Settings",
    "agentrl.tokens.encoded_image": "EncodedImage",
    "agentrl.trajectory": (
        "Completion Failed Group Message Score Task Terminated ToolCall Trajectory Truncated Turn"
    ),
    "agentrl.viewer.notebook": "metrics_of plot",
}
"""The module of each public name; the same as above, where type checkers look."""

_HOME_OF = home_of(_HOMES)
__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604
__getattr__, __dir__ = lazy_names(globals(), _HOME_OF)
