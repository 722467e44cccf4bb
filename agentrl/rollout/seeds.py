"""Seeds are derived, never drawn: from the run's seed and a path that says what the seed is for."""

import hashlib


def derive_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed from (run seed, path), by SHA-256: stable across versions, machines and
    launches.

    `derive_seed(0, "train", 17)` is the seed of the eighteenth training task of every run with seed
    0.
    """
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


SPLITS = ("train", "held-out", "demonstrations", "corpus")
"""The purposes of tasks. No environment seed belongs to two splits."""


def split_seed(seed: int, split: str, index: int) -> int:
    """A 31-bit environment seed of one split. Its remainder modulo the number of splits is the
    split, so none overlap.

    Raises:
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    derived = derive_seed(seed, split, index) & 0x7FFFFFFF
    return derived - derived % len(SPLITS) + SPLITS.index(split)
