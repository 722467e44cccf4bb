"""The plan of a run before it starts: what runs on which device, whether it fits, the time of a
step, and the reasons.

    facts = model_of(config)
    plan = make_plan(config, Inventory.uniform(gpu_named("H100"), per_node=8), facts)

Nothing is loaded: memory and times are computed from the model's shape, and the rollout is
simulated.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from agentrl.config.run_config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.models.facts import ModelFacts
from agentrl.placement.device_map import DeviceMap, device_maps
from agentrl.placement.inventory import Inventory
from agentrl.planner.advice import what_fits
from agentrl.planner.memory import fit_of, loads
from agentrl.planner.meshes import GAIN, MeshChoice, MeshOption, mesh_choice, with_mesh
from agentrl.planner.plan import Advice, Candidate, Plan, StepEstimate
from agentrl.planner.run_facts import (
    chosen_settings,
    layouts,
    placement_request_of,
    stages_of,
    with_defaults,
)
from agentrl.simulate.stages import Stages, Workload, workload
from agentrl.simulate.world import World

_MAX_SIMULATED_CANDIDATES = 4
"""Most candidates to simulate: the fastest by a rough estimate."""
_MAX_SIMULATED_MESHES = 2
"""The same of other meshes of the trainer's ranks."""
_SIMULATED_STEPS = 2
"""Steps to simulate after the first `rollout.max_staleness` ones, which do not count."""


def make_plan(config: RunConfig, inventory: Inventory, facts: ModelFacts) -> Plan:
    """The fastest map that the config allows and that fits.

    Raises:
        ConfigError: none fits; says what is missing where, and which settings would fit. Or the
            engine's context is longer than the model's.
    """
    _check_context(config, facts)
    written, config = config, with_defaults(config, facts, inventory.kind)
    inventory = inventory.with_rates(config.placement.device.stated)
    stages, work = stages_of(config, facts), workload(config.rollout, config.simulation)
    looked_at = [
        _examine(config, stages, work, devices)
        for devices in device_maps(config.placement, placement_request_of(config), inventory)
    ]
    fitting = sorted(
        (candidate for candidate in looked_at if not candidate.problems),
        key=lambda candidate: candidate.rough,
    )
    if not fitting:
        raise ConfigError(_explain_refusal(config, inventory, facts, looked_at))
    simulated = [
        _simulate_candidate(config, stages, work, candidate)
        for candidate in fitting[:_MAX_SIMULATED_CANDIDATES]
    ]
    simulated.sort(key=lambda candidate: candidate.step.seconds if candidate.step else float("inf"))
    chosen = simulated[0]
    if chosen.step is None:
        raise ConfigError(
            f"no step could be simulated on {chosen.devices}: {'; '.join(chosen.problems)}"
        )
    choices = [mesh_choice(config, facts, work, candidate.devices) for candidate in simulated]
    unfit = [candidate for candidate in looked_at if candidate.problems]
    return Plan(
        facts,
        work,
        chosen.devices,
        loads(stages, work, chosen.devices),
        chosen.step,
        stages.transport(chosen.devices),
        stages.update(chosen.devices),
        _explain_choice(config, simulated, len(fitting), len(looked_at)),
        (*simulated, *fitting[_MAX_SIMULATED_CANDIDATES:], *unfit),
        choices[0],
        _advise(config, facts, work, simulated, choices),
        chosen_settings(written, config),
    )


def _check_context(config: RunConfig, facts: ModelFacts) -> None:
    context = layouts(config)[0].max_context
    if context is not None and context > facts.max_positions:
        raise ConfigError(
            f"engine.max_context={context}, but {facts.name} knows {facts.max_positions} positions:"
            f" write engine.max_context={facts.max_positions}, or take a model whose config extends"
            " them (rope_scaling)"
        )


def _examine(config: RunConfig, stages: Stages, work: Workload, devices: DeviceMap) -> Candidate:
    fit = fit_of(stages, work, devices)
    rough = 0.0 if fit.problems else _rough_seconds(config, stages, work, devices)
    return Candidate(devices, fit.share, fit.problems, rough)


def _rough_seconds(config: RunConfig, stages: Stages, work: Workload, devices: DeviceMap) -> float:
    """Seconds of a step, with all replicas of the engine decoding full batches all the time."""
    busy = stages.train(work, devices).total
    extra = stages.update_seconds(devices) + stages.switch_seconds(devices)
    replicas = len(devices.of("engine"))
    if not replicas:
        return busy + extra
    engine = stages.simulated_engine(work, devices, config.simulation.engine)
    live = max(1.0, min(engine.slots, work.episodes / replicas))
    # Each request beyond the first slows a step down; a step samples a token for each of them.
    step = engine.seconds_per_token * (1 + engine.slowdown * (live - 1))
    rollout = work.episodes * work.sampled / replicas / live * step
    overlap = config.rollout.max_staleness > 0 and not devices.time_shared
    return (max(busy, rollout) if overlap else busy + rollout) + extra


def _simulate_candidate(
    config: RunConfig, stages: Stages, work: Workload, candidate: Candidate
) -> Candidate:
    """The candidate with its step, simulated with the scheduler."""
    devices = candidate.devices
    simulation = stages.simulation(work, devices, config.simulation)
    bound = config.rollout.max_staleness
    if not devices.of("engine"):
        simulation = config.simulation.model_copy(
            update={
                "train_seconds": simulation.train_seconds,
                "update_seconds": simulation.update_seconds,
            }
        )
    try:
        report = World(
            stages.share(config.rollout, devices),
            simulation,
            _SIMULATED_STEPS + bound,
            config.seed,
            weight_update=config.weights.update,
        ).run()
    except AgentRLError as error:
        return replace(candidate, problems=(f"its simulation ended: {error}",))
    seconds = report.step_seconds[bound:]
    train, weights = stages.train(work, devices).total, stages.update_seconds(devices)
    switch = stages.switch_seconds(devices)
    rollout = max(0.0, fmean(seconds) - train - weights - switch)
    rate = max(1, len(devices.of("engine"))) * report.tokens / report.seconds
    return replace(
        candidate,
        step=StepEstimate(rollout, train, switch, weights, rate, report.largest_staleness),
    )


def _advise(
    config: RunConfig,
    facts: ModelFacts,
    work: Workload,
    simulated: Sequence[Candidate],
    choices: Sequence[MeshChoice | None],
) -> Advice | None:
    """The map and the mesh with the fastest step, if it is clearly faster than the fastest map with
    the mesh of the config.
    """
    promising: list[tuple[float, Candidate, MeshOption]] = []
    for candidate, choice in zip(simulated, choices, strict=True):
        if choice is not None and choice.advised is not None and candidate.step is not None:
            saved = choice.written.train.total - choice.advised.train.total
            promising.append((candidate.step.seconds - saved, candidate, choice.advised))
    # A simulation costs far more than an estimate, so only the most promising are simulated.
    promising.sort(key=lambda entry: entry[0])
    found: list[Advice] = []
    for _, candidate, option in promising[:_MAX_SIMULATED_MESHES]:
        changed = with_mesh(config, option.settings, len(candidate.devices.of("trainer")))
        if changed is not None:
            played = _simulate_candidate(changed, stages_of(changed, facts), work, candidate)
            if played.step is not None:
                found.append(Advice(candidate.devices, option, played.step))
    best, now = min(found, key=lambda one: one.step.seconds, default=None), simulated[0].step
    if best is None or now is None or best.step.seconds > (1 - GAIN) * now.seconds:
        return None
    return best


def _explain_choice(
    config: RunConfig, simulated: list[Candidate], fitting: int, all_maps: int
) -> str:
    if config.placement.lists:
        return "the config lists the devices"
    if all_maps == 1:
        return f"the only way for placement={config.placement.name} on these devices"
    if fitting == 1:
        return f"the only one of {all_maps} maps that fits into memory"
    first, second = simulated[0].step, simulated[1].step
    if first is None or second is None:
        return "the only one that could be simulated"
    return (
        f"the fastest of {fitting} maps that fit into memory ({all_maps} considered):"
        f" {first.seconds:.1f} s a step; the next one ({simulated[1].devices}) takes"
        f" {second.seconds:.1f} s"
    )


def _explain_refusal(
    config: RunConfig, inventory: Inventory, facts: ModelFacts, looked_at: list[Candidate]
) -> str:
    """The error message: what does not fit on the closest map, and what would."""
    closest = min(looked_at, key=lambda candidate: candidate.filled)
    listed = (
        "\n".join(f"  {way}" for way in what_fits(config, inventory, facts))
        or "  a smaller model, or devices with more memory"
    )
    mode = config.placement.name if not config.placement.lists else "its lists"
    return (
        f"{facts.name} ({facts.parameters / 1e9:.2f} billion parameters) does not fit on"
        f" {inventory} with placement={mode}. Closest is {closest.devices}:"
        f" {'; '.join(closest.problems)}.\nWhat would fit:\n{listed}"
    )
