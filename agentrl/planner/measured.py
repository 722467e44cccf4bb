"""Replaces assumptions by an earlier run's measurements: its episodes, and the speed of its stages.

A run records how many seconds each stage took on its devices; the shape of its model gives the
amount of work. Their ratio holds for the same kind of device with another model or another number
of devices.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from agentrl.config.from_file import load_config
from agentrl.config.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.metrics import MetricsFile
from agentrl.placement.device_map import DeviceMap, device_maps
from agentrl.placement.inventory import Inventory
from agentrl.planner.run_facts import model_of, placement_request_of, stages_of, with_defaults
from agentrl.simulate.latency import Constant
from agentrl.simulate.stages import Stages, Workload, workload
from agentrl.simulate.world import World

_NEEDED = (
    "seconds/rollout",
    "seconds/train",
    "seconds/weights",
    "sampled_tokens",
    "prompt_tokens",
    "turns",
)
_PHASES = ("weights/seconds_write", "weights/seconds_stage", "weights/seconds_commit")


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the steps of a run, without the first step, which starts everything, if there are
    more.
    """

    config: RunConfig
    steps: int
    rollout: float
    train: float
    weights: float
    """In turns, with the switch back."""
    update: float
    """The update alone."""
    work: Workload


def read_measurements(folder: Path) -> Measured:
    """The measurements of the run in this folder.

    Raises:
        ConfigError: it is not a run, or no step has recorded its times yet.
    """
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"--from: {str(folder)!r} holds no run (no config.yaml in it)")
    config = load_config(folder / "config.yaml").config
    rows = [
        row
        for row in MetricsFile(folder / "metrics.jsonl").rows()
        if all(key in row for key in _NEEDED)
    ]
    if not rows:
        raise ConfigError(
            f"--from: {folder} has no step in its metrics.jsonl with {', '.join(_NEEDED)}"
        )
    rows = rows[1:] or rows
    means = {key: fmean(row[key] for row in rows) for key in _NEEDED}
    update = fmean(sum(row.get(phase, 0.0) for phase in _PHASES) for row in rows)
    episodes = config.rollout.groups_per_step * config.rollout.group_size
    return Measured(
        config,
        len(rows),
        means["seconds/rollout"],
        means["seconds/train"],
        means["seconds/weights"],
        update,
        Workload(
            episodes,
            means["turns"],
            means["sampled_tokens"] / episodes,
            means["prompt_tokens"] / episodes,
        ),
    )


def with_measured(config: RunConfig, measurements: Measured, inventory: Inventory) -> RunConfig:
    """The config with a run's episodes in its section `simulation`, and the run's speeds in
    `placement.assume`.

    The run must have been on devices of the inventory's kind, which cannot be checked.

    Raises:
        ConfigError: the run's own placement is not possible on such devices.
    """
    inventory = inventory.with_rates(config.placement.device.stated)
    facts = model_of(measurements.config)
    stages = stages_of(with_defaults(measurements.config, facts, inventory.kind), facts)
    devices = device_maps(
        measurements.config.placement, placement_request_of(measurements.config), inventory
    )[0]
    was = measurements.config.placement.assume
    assume = was.model_copy(
        update={
            "trainer_flops": was.trainer_flops
            * stages.train(measurements.work, devices).total
            / measurements.train
        }
    )
    # Else rollouts overlap with training, and only the rest was measured.
    if measurements.config.rollout.max_staleness == 0:
        factor = _simulated_seconds(measurements, stages, devices) / measurements.rollout
        assume = assume.model_copy(
            update={
                "engine_flops": was.engine_flops * factor,
                "engine_bandwidth": was.engine_bandwidth * factor,
                "engine_step_seconds": was.engine_step_seconds / factor,
            }
        )
    # Last, since weights are copied within the memory that the engine reads.
    stages = replace(stages, assume=assume)
    assume = assume.model_copy(update=_update_speeds(measurements, stages, devices))
    return config.model_copy(
        update={
            "placement": config.placement.model_copy(update={"assume": assume}),
            "simulation": config.simulation.model_copy(update=_episodes(measurements.work, config)),
        }
    )


def _update_speeds(measurements: Measured, stages: Stages, devices: DeviceMap) -> dict[str, float]:
    """`Assumptions.updates`, and in turns `switches`: half of the switches are measured, the way
    back.
    """
    was, planned = stages.assume, stages.update_seconds(devices)
    if not planned:
        return {}
    back = measurements.weights - measurements.update
    if not (devices.time_shared and measurements.update and back > 0):
        return {"updates": was.updates * planned / max(measurements.weights, 1e-6)}
    return {
        "updates": was.updates * planned / measurements.update,
        "switches": was.switches * stages.switch_seconds(devices) / 2 / back,
    }


def _episodes(work: Workload, config: RunConfig) -> dict[str, object]:
    """The measured episodes as settings of the simulation; tokens beyond the prompt are the later
    observations.
    """
    # At most half of what was observed is taken for the first prompt.
    first = min(config.simulation.prompt_tokens, round(work.observed / 2)) or 1
    later = (work.observed - first) / max(1e-9, work.turns - 1) if work.turns > 1 else 1
    answer = Constant(value=work.sampled / work.turns)
    return {
        "env": config.simulation.env.model_copy(update={"turns": Constant(value=work.turns)}),
        "engine": config.simulation.engine.model_copy(update={"answer_tokens": answer}),
        "prompt_tokens": first,
        "observation_tokens": max(1, round(later)),
    }


def _simulated_seconds(measurements: Measured, stages: Stages, devices: DeviceMap) -> float:
    """Seconds of the run's rollout of one step in the simulation, at the assumed speeds."""
    simulation = measurements.config.simulation.model_copy(
        update=_episodes(measurements.work, measurements.config)
    )
    simulation = stages.simulation(
        workload(measurements.config.rollout, simulation), devices, simulation
    )
    report = World(
        stages.share(measurements.config.rollout, devices),
        simulation,
        3,
        measurements.config.seed,
        weight_update=measurements.config.weights.update,
    ).run()
    apart = report.train_seconds + 3 * stages.update_seconds(devices)
    return (report.seconds - apart) / 3
