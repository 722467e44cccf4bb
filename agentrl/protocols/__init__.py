"""The seams: the interfaces of plug-ins. Any object with one of these shapes is a plug-in, without
a base class. One file per seam; this package exports all of their names.

Each plug-in class that takes settings has a nested pydantic `Config` (strict), which the run's
config validates before anything starts.
"""

from agentrl.protocols.algorithm import (
    ActorCritic,
    Algorithm,
    AlgorithmOffers,
    Estimate,
    Loss,
    LossOutput,
    LossTokens,
    MemberAdvantage,
    uses_entropy,
)
from agentrl.protocols.component_settings import (
    ClusterOffers,
    EngineSettingsOffers,
    TrainerSettingsOffers,
)
from agentrl.protocols.engine import (
    AnswerFormat,
    Engine,
    EngineOffers,
    EngineStats,
    GenerateRequest,
    ScoreRequest,
    Scores,
    clock_of,
)
from agentrl.protocols.enumeration import (
    Credit,
    Enumerable,
    Enumeration,
    EnumerationOffers,
    Question,
)
from agentrl.protocols.env import (
    Env,
    Isolation,
    OwnerOnly,
    ResetResult,
    ScriptedPlayer,
    StepResult,
    isolation_of,
    options_class_of,
    preload_of,
    reward_range_of,
    system_prompt_of,
    tools_of,
    unwrapped_env,
)
from agentrl.protocols.offers import Offers
from agentrl.protocols.recipe import RecipeOffers
from agentrl.protocols.renderer import Conversation, Prompt, Renderer
from agentrl.protocols.reward import GroupReward, Reward, RewardOffers, Rule
from agentrl.protocols.state import Stateful
from agentrl.protocols.tasks import (
    Curriculum,
    EnvLimits,
    FiniteTasks,
    MixesEnvironments,
    TaskSource,
    TaskSourceOffers,
)
from agentrl.protocols.tracker import (
    EpisodeSample,
    HowEnded,
    Tracker,
    TrackerOffers,
)
from agentrl.protocols.trainer import (
    LatestCheckpoint,
    Recovery,
    Savable,
    Trainer,
    check_trainer,
    missing_methods,
)
from agentrl.settings.base import Settings
from agentrl.settings.sampling import SamplingParams

__all__ = [
    "ActorCritic",
    "Algorithm",
    "AlgorithmOffers",
    "AnswerFormat",
    "ClusterOffers",
    "Conversation",
    "Credit",
    "Curriculum",
    "Engine",
    "EngineOffers",
    "EngineSettingsOffers",
    "EngineStats",
    "Enumerable",
    "Enumeration",
    "EnumerationOffers",
    "Env",
    "EnvLimits",
    "EpisodeSample",
    "Estimate",
    "FiniteTasks",
    "GenerateRequest",
    "GroupReward",
    "HowEnded",
    "Isolation",
    "LatestCheckpoint",
    "Loss",
    "LossOutput",
    "LossTokens",
    "MemberAdvantage",
    "MixesEnvironments",
    "Offers",
    "OwnerOnly",
    "Prompt",
    "Question",
    "RecipeOffers",
    "Recovery",
    "Renderer",
    "ResetResult",
    "Reward",
    "RewardOffers",
    "Rule",
    "SamplingParams",
    "Savable",
    "ScoreRequest",
    "Scores",
    "ScriptedPlayer",
    "Settings",
    "Stateful",
    "StepResult",
    "TaskSource",
    "TaskSourceOffers",
    "Tracker",
    "TrackerOffers",
    "Trainer",
    "TrainerSettingsOffers",
    "check_trainer",
    "clock_of",
    "isolation_of",
    "missing_methods",
    "options_class_of",
    "preload_of",
    "reward_range_of",
    "system_prompt_of",
    "tools_of",
    "unwrapped_env",
    "uses_entropy",
]
