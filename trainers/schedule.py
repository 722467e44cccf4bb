"""The learning rate of a step: a pure function, so the only scheduler state of a resumed run is the step."""

import math

from agentrl.trainers.settings import TrainerSettings


def learning_rate(settings: TrainerSettings, step: int, total_steps: int) -> float:
    """The rate of step `step`, counted from 0 in calls of `Trainer.step`.

    A linear warm-up, then constant, or half a cosine from `lr` down to `min_lr_ratio * lr` at `total_steps`
    (SGDR, arXiv:1608.03983, equation 5, without restarts). Steps beyond `total_steps` keep the last rate.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    low = settings.min_lr_ratio * settings.lr
    return low + (settings.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
