"""Assembles the parts of a run from its config: cluster, environments, engine, reward, trainer.

    assemble_rollouts: cluster ─▶ environments, engine, reward ─▶ RolloutAssembly     (to evaluate)
    assemble_training: the same, plus a trainer and a publisher of its weights ─▶ TrainingAssembly

The parts are started here and stopped in reverse order.
"""

from agentrl.assembly.devices import device_sharing, open_cluster
from agentrl.assembly.placed import PlacedCluster
from agentrl.assembly.players import agent_player, env_host
from agentrl.assembly.policy import assemble_policy, assemble_rollouts
from agentrl.assembly.rollouts import RolloutAssembly, reward_of
from agentrl.assembly.trainers import make_advisors, make_trainer
from agentrl.assembly.training import TrainingAssembly, assemble_training

__all__ = [
    "PlacedCluster",
    "RolloutAssembly",
    "TrainingAssembly",
    "agent_player",
    "assemble_policy",
    "assemble_rollouts",
    "assemble_training",
    "device_sharing",
    "env_host",
    "make_advisors",
    "make_trainer",
    "open_cluster",
    "reward_of",
]
