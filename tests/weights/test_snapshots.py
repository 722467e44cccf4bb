"""Snapshots of the policy: what is needed is there, at any version that a run may resume from, and
no more.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import WeightsError
from agentrl.weights.bundle import BundlePlace
from agentrl.weights.low_rank import LowRank
from agentrl.weights.snapshots import Snapshots


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), float(version))}


def there(snapshots: Snapshots) -> set[int]:
    return {int(path.name.removeprefix("version_")) for path in snapshots.folder.iterdir()}


def test_the_last_ones_before_a_version_are_needed():
    snapshots = Snapshots(Path(), every=10, size=2)
    assert list(snapshots.needed(0)) == []
    assert list(snapshots.needed(1)) == [0]
    assert list(snapshots.needed(20)) == [0, 10]
    assert list(snapshots.needed(21)) == [10, 20]


@pytest.mark.long
@given(
    every=st.integers(1, 4), size=st.integers(1, 3), saved=st.integers(1, 5), kept=st.integers(1, 3)
)
def test_a_run_that_resumes_from_any_checkpoint_has_the_snapshots_that_it_needs(
    tmp_path_factory, every, size, saved, kept
):
    snapshots = Snapshots(tmp_path_factory.mktemp("run") / "opponents", every, size)
    checkpoints: list[int] = []
    for version in range(16):
        if version % every == 0:
            snapshots.write(version, weights(version))
        snapshots.thin_out(version, checkpoints)
        for start in (version, *checkpoints):
            assert set(snapshots.needed(start)) <= there(snapshots)
        assert len(there(snapshots)) <= (size + 1) * (len(checkpoints) + 1)
        if version % saved == 0:
            checkpoints = [*checkpoints, version][-kept:]
    snapshots.go_back_to(checkpoints[-1])
    assert set(snapshots.needed(checkpoints[-1])) - {0} <= there(snapshots), (
        "version 0 is written again"
    )
    assert max(there(snapshots), default=0) <= checkpoints[-1]


def test_what_is_read_is_what_was_written_whatever_published_it(tmp_path, tiny_model_dir):
    snapshots = Snapshots(tmp_path / "opponents", every=1, size=3)
    snapshots.write(1, weights(1))
    published = BundlePlace(tmp_path / "published", 2, 1 << 20).write(weights(2))
    snapshots.write(2, published)
    for file in published.folder.iterdir():
        file.unlink()  # a published bundle goes with its version
    assert [snapshots.open(version)["w"].tolist() for version in (1, 2)] == [[1.0, 1.0], [2.0, 2.0]]
    snapshots.write(2, weights(5))
    assert snapshots.open(2)["w"].tolist() == [2.0, 2.0], "a resumed run publishes a version again"
    base = LowRank(tiny_model_dir, {})
    snapshots.write(3, base)
    assert {name: weight.shape for name, weight in snapshots.open(3).items()} == {
        n: w.shape for n, w in base.items()
    }
    with pytest.raises(WeightsError, match="version_000007"):
        snapshots.open(7)
