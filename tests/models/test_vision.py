"""Models that see in a way that is not known here are refused by name."""

import json
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.models.vision import check_family, sees
from agentrl.models.vision_families import image_processor
from agentrl.testing.vision_models import create_tiny_vision_model


def test_a_family_that_is_not_known_is_refused_with_the_reason() -> None:
    from transformers import LlavaConfig, PaliGemmaConfig

    with pytest.raises(ConfigError, match=r"paligemma cannot .* tokens of a prompt see each other"):
        check_family(PaliGemmaConfig())
    with pytest.raises(ConfigError, match="llava cannot be computed: it has not been tried"):
        check_family(LlavaConfig())


def test_a_model_whose_pictures_are_not_known_here_is_one_of_text() -> None:
    from transformers import Gemma3nConfig

    assert not sees(Gemma3nConfig())


def test_pan_and_scan_is_refused(tmp_path: Path) -> None:
    create_tiny_vision_model(tmp_path / "model", "gemma3")
    settings = tmp_path / "model" / "preprocessor_config.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({**known, "do_pan_and_scan": False}))
    assert image_processor(tmp_path / "model").size == {"height": 56, "width": 56}
    settings.write_text(json.dumps({**known, "do_pan_and_scan": True}))
    with pytest.raises(ConfigError, match="do_pan_and_scan adds crops to a picture"):
        image_processor(tmp_path / "model")
