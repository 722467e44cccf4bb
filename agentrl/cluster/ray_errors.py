"""The errors of calls to Ray's actors, without Ray's own classes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def errors_of_actor(gone: Callable[[str], Exception]) -> Iterator[None]:
    """Around what waits for the answer of an actor: what its code has raised is raised unchanged.

    If no answer will come, `gone` of Ray's reason is raised. The actor may have died alone, with
    its node, or as the one that Ray has killed when memory was short, and each has a class of its
    own, of which only some are `RayActorError`.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise gone(str(error).strip().splitlines()[0]) from error


__all__ = ["errors_of_actor"]
