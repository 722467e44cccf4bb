"""Warnings about learning rates before a run begins: where they stay too low, or jump."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose

from agentrl.config.run_config import RunConfig, unused_by
from agentrl.protocols.component_settings import TrainerSettingsOffers
from agentrl.protocols.recipe import RecipeOffers

_ALIKE = 0.01
"""Rates that differ by a smaller share than this are alike."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a trainer's learning rate."""

    lr: float
    """The highest rate."""
    warmup_steps: int
    """Calls of `Trainer.step` in which the rate rises to `lr`."""
    name: str
    """The course of the rate after them."""
    rate: Callable[[int, int], float]
    """Returns the rate of a call, from its number and the number of all calls."""

    @staticmethod
    def of_settings(settings: object) -> "Schedule | None":
        """The schedule that the settings of a trainer have, if they have one."""
        offers = TrainerSettingsOffers.of(settings)
        if offers.learning_rate is None:
            return None
        return Schedule(offers.lr, offers.warmup_steps, offers.schedule, offers.learning_rate)


def notes_of_schedules(config: RunConfig) -> Iterator[str]:
    """The warnings of trainers of a run that would never reach their learning rates."""
    for section, (schedule, updates) in _schedules(config).items():
        yield from _warm_up_notes(
            f"{section}.warmup_steps", schedule, updates * config.steps, "the run"
        )


def notes_of_warm_up(name: str, settings: object, steps: int, where: str) -> Iterator[str]:
    """The warning of a trainer with these settings that would never reach its learning rate in
    `steps` steps.
    """
    schedule = Schedule.of_settings(settings)
    if schedule is not None:
        yield from _warm_up_notes(name, schedule, steps, where)


def _warm_up_notes(name: str, schedule: Schedule, steps: int, where: str) -> Iterator[str]:
    if schedule.warmup_steps > steps:
        last = schedule.rate(steps - 1, steps)
        yield (
            f"{name} is {schedule.warmup_steps}, and {where} has {steps} steps: the learning rate "
            f"ends at {last:.3g} and never reaches {schedule.lr:g}. Write fewer, such as "
            f"{name}={steps // 10}"
        )


def jumps_of_schedules(before: RunConfig, config: RunConfig, step: int) -> Iterator[str]:
    """The jumps of learning rates at a resume after `step` steps, from the config `before`."""
    old = _schedules(before)
    for section, (schedule, updates) in _schedules(config).items():
        if section not in old or step == 0:
            continue
        (was, _), done = old[section], updates * step
        whole, longer = updates * before.steps, updates * config.steps
        last, expected = (was.rate(call, whole) for call in (done - 1, done))
        comes = schedule.rate(done, longer)
        scaled = expected * schedule.lr / was.lr  # if `lr` alone has changed, its own line says so
        if any(isclose(comes, even, rel_tol=_ALIKE) for even in (expected, scaled, last)):
            continue
        because, way_out = "the schedule has changed", ""
        if whole != longer and schedule.name != "constant":
            because = (
                f"the {schedule.name} now ends after {config.steps} steps, and ended after"
                f" {before.steps}"
            )
            way_out = (
                f". To go on evenly, write {section}.schedule=constant {section}.lr={last:.3g}"
            )
        yield (
            f"{section}: the learning rate jumps from {last:.3g} in step {step - 1} to {comes:.3g} "
            f"in step {step}, as {because}{way_out}"
        )


def _schedules(config: RunConfig) -> dict[str, tuple[Schedule, int]]:
    """The schedules, and the updates in a step, of the trainers that learn from episodes."""
    if "engine" in unused_by(config.recipe):
        return {}  # such recipes make as many steps as their data need
    offers = RecipeOffers.of(config.recipe.settings)
    most = offers.most_updates
    updates = {
        "trainer": 1 if most is None else most(config) // config.steps,
        "critic": offers.critic_updates,
    }
    schedules: dict[str, tuple[Schedule, int]] = {}
    for section, per_step in updates.items():
        component = getattr(config, section)
        schedule = None if component is None else Schedule.of_settings(component.settings)
        if schedule is not None:
            schedules[section] = (schedule, per_step)
    return schedules
