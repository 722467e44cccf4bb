"""The one Ray of a test process: it can start only once, so it serves all tests."""

from agentrl.cluster.ray_cluster import join_ray


def join_shared_ray() -> None:
    """Start it, or use it where it runs. Its eight GPUs are not there: nothing is run on them."""
    join_ray(num_cpus=2, num_gpus=8, resources={"accelerator_type:H100": 1})
