"""Helpers for adapters to other libraries' environments."""

import difflib
import importlib
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

import numpy as np

from agentrl.errors import EnvError, PluginError
from agentrl.package.distribution import install_command

GLOBAL_RNG_SECONDS = 25.0
"""Seconds that a call waits for the global generators: a little less than the default deadline of a
step."""

_installed = threading.Lock()
_silencing = threading.Lock()


class GlobalRng:
    """States of the process-global `random` and `numpy.random`, installed for one call of a foreign
    environment.

        rng = GlobalRng(seed)
        with rng.install():
            game.step(action)

    Each environment has its own states, so that interleaved games draw the same numbers as games
    played alone. The caller's states are restored after each call. Threads wait for each other,
    even for a call that hangs.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def install(self) -> Iterator[None]:
        """Inside the block, the global generators continue from these states.

        Raises:
            EnvError: another call has held them for `GLOBAL_RNG_SECONDS`.
        """
        if not _installed.acquire(timeout=GLOBAL_RNG_SECONDS):
            raise EnvError(
                "another game of this process has held the global random state for"
                f" {GLOBAL_RNG_SECONDS:g} s and does not return. Play games that hang with"
                " env.isolation=process: then each is killed at its deadline"
            )
        try:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)
        finally:
            _installed.release()


class _Silence:
    """A stdout that drops one thread's output and passes on everything else."""

    def __init__(self, around: Any) -> None:
        self._around = around
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._around.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._around, name)


@contextmanager
def silence_output() -> Iterator[None]:
    """Drop what this thread prints inside the block, but not what others print. Threads wait for
    each other.

    Raises:
        EnvError: another call has been inside for `GLOBAL_RNG_SECONDS`.
    """
    if not _silencing.acquire(timeout=GLOBAL_RNG_SECONDS):
        raise EnvError(
            "another environment of this process has not returned from reset for"
            f" {GLOBAL_RNG_SECONDS:g} s. Play environments that hang with env.isolation=process:"
            " then each is killed at its deadline"
        )
    try:
        with redirect_stdout(_Silence(sys.stdout)):
            yield
    finally:
        _silencing.release()


def load_package(name: str) -> ModuleType:
    """Import an optional package, and hide the warnings of its import.

    Raises:
        PluginError: it cannot be imported; the message says what to install.
    """
    try:
        with GlobalRng(0).install(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise PluginError(
            f"the package {name!r} cannot be imported: {error}. Install it by:"
            f" {install_command('envs')}"
        ) from error


def check_known(address: str, name: str, known: Iterable[str]) -> None:
    """Check that `name` is one of `known`.

    Raises:
        PluginError: it is not; the message lists the most similar names, or the first few.
    """
    there = sorted(known)
    if name in there:
        return
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.4)
    hint = (
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"Some of them: {', '.join(there[:12])}"
    )
    raise PluginError(f"{address!r}: there is no {name!r} among {len(there)}. {hint}")
