"""The one Ray of a test process: it can start only once, so it serves all tests."""

from agentrl.cluster.environment import inherited
from agentrl.cluster.ray_cluster import join_ray


def join_shared_ray() -> None:
    """Start it, or use it where it runs. Its eight GPUs are not there: nothing is run on them. As
    in a job of Slurm, they are not the first of the machine.
    """
    with inherited({"CUDA_VISIBLE_DEVICES": "8,9,10,11,12,13,14,15"}):
        join_ray(num_cpus=2, num_gpus=8)
