"""What is to be said of learning rates before a run begins: where they stay too low, or jump."""

from collections.abc import Iterator
from math import isclose

from agentrl.config.run_config import RunConfig, unused_by
from agentrl.protocols.recipe import RecipeOffers
from agentrl.protocols.trainer import SchedulesLearningRate

_ALIKE = 0.01
"""Rates that differ by a smaller share than this are alike."""


def notes_of_schedules(config: RunConfig) -> Iterator[str]:
    """Why trainers of a run would never reach their learning rates."""
    for section, (settings, updates) in _schedules(config).items():
        yield from notes_of_warm_up(
            f"{section}.warmup_steps", settings, updates * config.steps, "the run"
        )


def notes_of_warm_up(name: str, settings: object, steps: int, where: str) -> Iterator[str]:
    """Why a trainer with these settings would never reach its learning rate in so many steps."""
    if isinstance(settings, SchedulesLearningRate) and settings.warmup_steps > steps:
        last = settings.learning_rate(steps - 1, steps)
        yield (
            f"{name} is {settings.warmup_steps}, and {where} has {steps} steps: the learning rate "
            f"ends at {last:.3g} and never reaches {settings.lr:g}. Write fewer, such as "
            f"{name}={steps // 10}"
        )


def jumps_of_schedules(before: RunConfig, config: RunConfig, step: int) -> Iterator[str]:
    """Where learning rates jump at a resume after `step` steps, as the config was `before`."""
    old = _schedules(before)
    for section, (settings, updates) in _schedules(config).items():
        if section not in old or step == 0:
            continue
        (was, _), done = old[section], updates * step
        whole, longer = updates * before.steps, updates * config.steps
        last, expected = (was.learning_rate(one, whole) for one in (done - 1, done))
        comes = settings.learning_rate(done, longer)
        scaled = expected * settings.lr / was.lr  # if `lr` alone has changed, its own line says so
        if any(isclose(comes, even, rel_tol=_ALIKE) for even in (expected, scaled, last)):
            continue
        because, way_out = "the schedule has changed", ""
        if whole != longer and settings.schedule != "constant":
            because = (
                f"the {settings.schedule} now ends after {config.steps} steps, and ended after"
                f" {before.steps}"
            )
            way_out = (
                f". To go on evenly, write {section}.schedule=constant {section}.lr={last:.3g}"
            )
        yield (
            f"{section}: the learning rate jumps from {last:.3g} in step {step - 1} to {comes:.3g} "
            f"in step {step}, as {because}{way_out}"
        )


def _schedules(config: RunConfig) -> dict[str, tuple[SchedulesLearningRate, int]]:
    """The settings and the updates in a step of the trainers that learn from what is played."""
    if "engine" in unused_by(config.recipe):
        return {}  # such recipes make as many steps as their data need
    offers = RecipeOffers.of(config.recipe.settings)
    most = offers.most_updates
    updates = {
        "trainer": 1 if most is None else most(config) // config.steps,
        "critic": offers.critic_updates,
    }
    made = {section: getattr(config, section) for section in updates}
    return {
        section: (component.settings, updates[section])
        for section, component in made.items()
        if component is not None and isinstance(component.settings, SchedulesLearningRate)
    }
