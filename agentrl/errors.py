"""The exceptions of agentrl.

    AgentRLError
    ├── ConfigError                a setting, a name or a file is wrong; nothing was started
    │   │                          (the CLI exits with 2)
    │   └── PluginError            a plug-in cannot be found or loaded
    ├── RolloutError               an episode could not continue; becomes the trajectory's
    │   │                          `Failed(layer, error)`
    │   ├── EnvError               reset, step or close raised, or broke the protocol
    │   │   ├── OutageError        the environment's server cannot be reached; episodes wait for it
    │   │   ├── SandboxError       a sandbox was lost, or did not start: nothing that was run in it
    │   │   │                      is to blame; SandboxOutageError, also an OutageError, where
    │   │   │                      what runs them cannot be reached
    │   │   ├── ImagesRefusedError it shows pictures, which the model cannot see
    │   │   ├── ReplayError        it did not reply to given answers as it had before
    │   │   ├── EnvProcessDiedError the process that an environment had of its own died
    │   │   └── LethalTaskError    servers or processes of the environment died of a task:
    │   │                          it is set aside
    │   ├── EngineError            the engine refused a request
    │   │   ├── EngineDeadError    the engine is not running, and answers no request
    │   │   ├── CompletionError    what the engine has sampled does not fit together
    │   │   ├── FormatError        the engine cannot make answers of this format
    │   │   └── LethalRequestError engines died of a request: it is set aside
    │   ├── RewardError            the reward could not be computed
    │   │   ├── ScoreError         what the reward returned is no score
    │   │   ├── RuleLimitError     the judged content used up a rule's CPU time or memory,
    │   │   │                      and counts as wrong
    │   │   └── LethalContentError the processes of a rule died of the judged content:
    │   │                          it is set aside
    │   └── DeadlineError          something outside did not answer in time
    ├── RetriesExhaustedError      too many tasks failed after all retries; training on the rest
    │                              would be biased
    ├── FilterBudgetError          too many groups taught nothing (dynamic sampling): the tasks do
    │                              not suit the policy
    ├── StallError                 no progress for too long; names the stages that are waited for
    ├── StalenessError             the staleness bound would be exceeded (a bug in agentrl: its
    │                              rule prevents this)
    ├── TrainingError              an update would corrupt the weights; they are unchanged
    ├── TimeShareError             roles that share devices could not take turns; names the roles
    │                              that are awake
    ├── WorkerDiedError            a worker of the cluster died, and its state is lost
    ├── NodeDiedError              the cluster's node on the controller's machine died
    ├── WeightsError               new weights could not be published; the engines still serve
    │                              the old ones
    ├── CheckpointError            a checkpoint is missing, incomplete or of another run
    ├── MetricNameError            two parts of a run report a metric of the same name
    ├── StorageError               a run's files cannot be written: the disk is full, read-only, ...
    ├── ImageError                 the bytes of a picture are not taken: damaged, huge, animated
    ├── HubError                   the Hugging Face hub has refused a model, or cannot be reached
    └── ConformanceError           `agentrl.testing` found that a plug-in breaks its contract

A failed rollout is data, not a crash: `RolloutError` is caught in one place (`rollout/episode.py`),
where it becomes a value. Every other error ends the run, and its message gives the remedy.

The module has three mechanisms:

1. Vocabulary: the classes above.
2. Classification: `RAISED_BY_CODE` and `is_cancellation` tell failures of the user's code from the
   end of the run.
3. Surfacing: `describe` gives an error in one line with the user's own frame.
"""

import asyncio
import sysconfig
from pathlib import Path
from traceback import walk_tb
from typing import Literal

Layer = Literal["environment", "engine", "reward", "data"]
"""The part that caused a failure of an episode. Retry budgets and the ledger count failures by
layer.
"""


class AgentRLError(Exception):
    """Base class of all errors that agentrl raises itself."""


class ConfigError(AgentRLError):
    """A setting is wrong. Names it, what would be right, and where it was written."""


class PluginError(ConfigError):
    """No plug-in of that name, or its import failed. Lists what exists."""


class RolloutError(AgentRLError):
    """An episode cannot continue. `final`: playing it again would only repeat the failure."""

    layer: Layer = "data"
    final: bool = False


class EnvError(RolloutError):
    """The environment raised or broke the protocol."""

    layer: Layer = "environment"


class OutageError(EnvError):
    """No server of the environment can be reached. It may come back: episodes wait for it."""


class EngineError(RolloutError):
    """The engine refused a request or died."""

    layer: Layer = "engine"


class EngineDeadError(EngineError):
    """The engine is not running: never entered, closed, or dead. Another replica may answer the
    same request.
    """


class CompletionError(EngineError, ValueError):
    """The parts of a sampled completion contradict each other: a token without a logprob, or ids
    that are no integers.
    """


class FormatError(EngineError):
    """The engine cannot make answers of the format that a request asks for."""


class LethalRequestError(EngineError):
    """Engines died of a request twice. It is set aside: a failure, which is not tried again."""

    final = True


class SandboxError(EnvError):
    """What a sandbox stands on has failed. It says nothing about what was run there, and is never a
    result of it.
    """


class SandboxOutageError(SandboxError, OutageError):
    """What runs the sandboxes cannot be reached, such as a Docker engine that is restarted."""


class ImagesRefusedError(EnvError):
    """Messages hold pictures, and the model reads text alone. None is left out in silence."""

    final = True


class ReplayError(EnvError):
    """The environment did not come again to the place where an episode is to begin. It would not at
    the next try.
    """

    final = True


class EnvProcessDiedError(EnvError):
    """The process that an environment had of its own died. Says how, and what it last wrote."""


class LethalTaskError(EnvError):
    """Servers of the environment or rollout workers died of a task twice, or processes of a reset
    or of the same steps. It is set aside, as `LethalRequestError`.
    """

    final = True


class RewardError(RolloutError):
    """A reward could not be computed. It is never replaced by a number."""

    layer: Layer = "reward"


class ScoreError(RewardError):
    """A reward returned something that is no score. The message names it, and what to return."""


class RuleLimitError(RewardError):
    """The judged content used up the CPU time or the memory of a rule. It counts as wrong, and is
    not judged again.
    """


class LethalContentError(RewardError):
    """The processes of a rule died twice of what they judged. It is set aside, never a number."""

    final = True


class DeadlineError(RolloutError):
    """`phase` of `layer` did not answer within `seconds` of loop time."""

    def __init__(self, layer: Layer, phase: str, seconds: float) -> None:
        super().__init__(
            f"{phase} did not answer within its deadline of {seconds:g} s"
            f" (rollout.deadlines.{phase})"
        )
        self.layer = layer
        self.phase = phase
        self.seconds = seconds

    def __reduce__(self) -> tuple[type["DeadlineError"], tuple[Layer, str, float]]:
        return type(self), (self.layer, self.phase, self.seconds)


class RetriesExhaustedError(AgentRLError):
    """More tasks failed after all retries than the run allows."""


class FilterBudgetError(AgentRLError):
    """More groups that teach nothing were filtered for one batch than the run allows."""


class StallError(AgentRLError):
    """There was no progress for too long, and no worker could be replaced to fix that."""


class StalenessError(AgentRLError):
    """A group older than the bound was about to be trained on, or an evaluation mixes versions of
    the weights.
    """


class TrainingError(AgentRLError):
    """An update cannot be made: its loss or gradient is not finite, or the batch has nothing to
    learn from.
    """


class TimeShareError(AgentRLError):
    """Roles that share devices could not take turns. Names the roles that are asleep and those that
    are awake.
    """


class WorkerDiedError(AgentRLError):
    """A worker process or actor died. It is unknown whether its current call took effect."""

    def __init__(self, role: str, rank: int, why: str) -> None:
        super().__init__(f"{role} {rank} died: {why}")
        self.role = role
        self.rank = rank
        self.why = why

    def __reduce__(self) -> tuple[type["WorkerDiedError"], tuple[str, int, str]]:
        return type(self), (self.role, self.rank, self.why)


class NodeDiedError(AgentRLError):
    """The node of the cluster that the controller talks through died: no worker can be reached."""


class WeightsError(AgentRLError):
    """Published weights are damaged or cannot be read, or a version could not be brought to an
    engine.
    """


class CheckpointError(AgentRLError):
    """A checkpoint cannot be used."""


class MetricNameError(AgentRLError):
    """Two parts of a run report a metric of the same name. Names both."""


class StorageError(AgentRLError):
    """The files of a run cannot be read or written. Says which, and how to continue."""


class ImageError(AgentRLError):
    """The bytes of a picture are not taken. Says what they are, and what to write."""


class HubError(AgentRLError):
    """The Hugging Face hub has refused a model, or cannot be reached. Says which, and why."""


class ConformanceError(AgentRLError):
    """A plug-in breaks the contract of its interface."""


_FOLDERS = [
    Path(__file__).parent,
    *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")),
]
_LIBRARIES = tuple(f"{folder}/" for path in _FOLDERS for folder in (path, path.resolve()))


RAISED_BY_CODE = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions that count as a failure of the user's code. `KeyboardInterrupt` is none: it is the
user's own wish.

`sys.exit()` in a game (pygame, argparse) or a `CancelledError` that a library lets out must not end
a run.
"""


def is_cancellation(error: BaseException) -> bool:
    """True if a caught error means that this task is being cancelled, and must be raised on.

    Otherwise a `CancelledError` is one that the awaited code has raised by itself.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def as_exception(error: BaseException) -> Exception:
    """The error as one that a future can carry: what is no failure of code there, such as a
    `StopIteration`, becomes a RuntimeError with its text.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(describe(error))


def text_of(error: BaseException) -> str:
    """The text of an error, which can be stored and printed whatever the user's code raises: an
    error may have none (`__str__` raises), and names of files half of a surrogate pair in theirs.
    """
    try:
        text = str(error)
    except Exception as failure:
        return f"its text cannot be read ({type(failure).__name__})"
    return text.encode(errors="backslashreplace").decode()


def describe(error: BaseException) -> str:
    """`KeyError: 'x' (game.py:31 in move)`: the error and the innermost frame of the user's own
    code that it came from.

    If there is none, because libraries called each other, it is the innermost frame of all. Of a
    group of errors, which tells nothing itself ("unhandled errors in a TaskGroup"), it is the first
    one, and how many others there are.
    """
    if isinstance(error, BaseExceptionGroup):
        first, others = describe(error.exceptions[0]), len(error.exceptions) - 1
        return (
            f"{first}, and {others} other{'s' if others > 1 else ''} at once" if others else first
        )
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        # The file that cannot be read has no frame: those are of what has tried to.
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    said = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    if not frames:
        return said
    own = [
        (code, line) for code, line in frames if not code.co_filename.startswith((*_LIBRARIES, "<"))
    ]
    code, line = (own or frames)[-1]
    return f"{said} ({code.co_filename}:{line} in {code.co_name})"
