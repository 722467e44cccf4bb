"""Weights as a folder and low-rank updates."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import ConfigError
from agentrl.weights.low_rank import Factors, LowRank


def test_low_rank_weights_are_those_of_the_folder_plus_the_scaled_product(tmp_path: Path) -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    save_file({"one": one.bfloat16()}, tmp_path / "model-1.safetensors")
    save_file({"two": torch.ones(3)}, tmp_path / "model-2.safetensors")
    factors = {
        "one": Factors(torch.tensor([[1.0, 10.0]]), torch.tensor([[1.0], [2.0], [0.0]]), 0.5)
    }
    weights = LowRank(tmp_path, factors)
    for weights in (
        LowRank(tmp_path, factors),
        pickle.loads(pickle.dumps(LowRank(tmp_path, factors))),
    ):
        for _ in range(2):  # reading changes nothing
            assert weights["one"].tolist() == [[1.5, 7.0], [4.0, 14.0], [5.0, 6.0]]
        assert weights["one"].dtype == torch.float32
        assert weights["two"].tolist() == [1.0, 1.0, 1.0]
        assert set(weights) == {"one", "two"}
        assert len(weights) == 2
    with pytest.raises(KeyError):
        weights["three"]


def test_a_folder_without_safetensors_says_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_pretrained"):
        len(LowRank(tmp_path, {}))
