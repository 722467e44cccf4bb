"""An open cluster with the plan of its devices."""

from dataclasses import dataclass

from agentrl.cluster.workers import Cluster
from agentrl.config.run_config import RunConfig
from agentrl.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class PlacedCluster:
    """An open cluster, its placement plan if any, and the config with the settings that follow from
    the plan.
    """

    config: RunConfig
    cluster: Cluster
    plan: Plan | None = None
