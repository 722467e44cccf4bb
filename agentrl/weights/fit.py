"""A check that the weights in a model's folder have the shapes that its config describes."""

from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.models.source import weight_files
from agentrl.models.vision import auto_class
from agentrl.models.weight_names import WeightNames
from agentrl.weights.bundle import weight_shapes


def check_fit(
    folder: Path, name: str, *, trust_remote_code: bool = False, setting: str = "model.name"
) -> None:
    """Compare the headers of a folder's files with its config. Files that are not safetensors are
    not read.

    Raises:
        ConfigError: a weight has another shape.
    """
    import torch
    from transformers import AutoConfig

    if not weight_files(folder):
        return
    config = AutoConfig.from_pretrained(
        folder, trust_remote_code=trust_remote_code, local_files_only=True
    )
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected, found = WeightNames.of(model).published_shapes(own), weight_shapes(folder)
    wrong = sorted(
        weight
        for weight in expected.keys() & found.keys()
        if tuple(expected[weight]) != found[weight]
    )
    if wrong:
        first = wrong[0]
        raise ConfigError(
            f"{setting}: {len(wrong)} weights of {name!r} have other shapes than its config.json"
            f" describes, such as {first}: {found[first]} in the files of {folder}, and"
            f" {tuple(expected[first])} by the config. One of both was changed: take config.json"
            " and weights from the same model"
        )


__all__ = ["check_fit"]
