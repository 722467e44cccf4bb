"""What engines offer, by their class attribute `offers` and their methods."""

import pytest

from agentrl.engines.local import LocalEngine
from agentrl.engines.openai import OpenAIEngine
from agentrl.engines.router import Router
from agentrl.engines.vllm import VllmEngine
from agentrl.errors import ConfigError
from agentrl.protocols import Engine, EngineOffers
from agentrl.testing import ScriptedEngine

BOTH = {"scores": True, "stages_weights": True}


@pytest.mark.parametrize(
    ("engine", "offers"),
    [
        (
            LocalEngine,
            EngineOffers(reports_experts=True, reads_arrivals=True, reads_images=True, **BOTH),
        ),
        (
            VllmEngine,
            EngineOffers(
                reports_experts=True,
                scores_at_one_only=True,
                probes=True,
                probes_while_busy=True,
                reads_arrivals=True,
                reads_images=True,
                **BOTH,
            ),
        ),
        (Router, EngineOffers(**BOTH)),
        (OpenAIEngine, EngineOffers(reads_images=True)),
        (ScriptedEngine, EngineOffers(scores=True)),
        (Engine, EngineOffers()),
    ],
)
def test_what_an_engine_offers_follows_from_its_class(engine, offers):
    assert EngineOffers.of(engine) == offers


def test_a_class_without_base_offers_what_its_methods_and_attributes_say():
    class Plain:
        scores_at_one_only = True

        async def score(self, request): ...

    for plugin in (Plain, Plain()):
        assert EngineOffers.of(plugin) == EngineOffers(scores_at_one_only=True, scores=True)


def test_a_mistyped_offer_is_an_error_and_never_a_default():
    with pytest.raises(TypeError, match="report_experts"):
        EngineOffers(report_experts=True)

    class Foreign:
        offers = ("reports_experts",)

    with pytest.raises(ConfigError, match=r"Foreign.offers is .*: write EngineOffers\(\.\.\.\), w"):
        EngineOffers.of(Foreign)
