"""Steps of `engine=local` that end inside of no picture whose tokens see each other (Gemma)."""

import asyncio
from pathlib import Path

import pytest

from agentrl.engines import local
from agentrl.engines.local import LocalEngine
from agentrl.testing.vision_models import create_tiny_vision_model
from agentrl.tokens.placed_images import shifted
from tests.engines.test_seeing import Context, Family, check, picture, request
from tests.tiers import only

ONE, OTHER, WIDE = picture(0), picture(1), picture(2, 60, 130)
CONFIG = LocalEngine.Config(dtype="float32", max_batch=8)


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma") / "model"
    create_tiny_vision_model(made, request.param)
    return made


@pytest.fixture(scope="module")
def family(folder: Path) -> Family:
    return Family(folder)


@pytest.fixture(scope="module")
def contexts(family: Family) -> list[Context]:
    ends = family.context([9, 8], WIDE)
    stop = ends[1][0].stop
    return [
        family.context([10, 20, 30], ONE, [40, 41], OTHER, WIDE, [15] * 30, ONE, [16]),
        family.context(OTHER, [40]),
        family.context([19, 18, 17] * 9),
        (ends[0][:stop], ends[1]),  # whose last token is among those of a picture
    ]


@pytest.mark.parametrize("step_tokens", only([1, 5, 16, 23, 40], 5))
def test_steps_of_any_size_see_whole_pictures(
    folder: Path,
    family: Family,
    contexts: list[Context],
    step_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "_STEP_TOKENS", step_tokens)

    async def main() -> None:
        async with LocalEngine(CONFIG, folder) as engine:
            answers = await asyncio.gather(
                *(
                    engine.generate(request(f"{n}", context, session=f"{n}"))
                    for n, context in enumerate(contexts)
                )
            )
            for number, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
                check(family, context, answer)
                begun = [*context[0], *answer.token_ids.tolist()]
                ids, images = family.context([33], WIDE, [12], ONE)
                later = [*begun, *ids], (*context[1], *shifted(images, len(begun)))
                asked = request(f"later-{number}", later, session=f"{number}", known=len(begun))
                check(family, later, await engine.generate(asked))

    asyncio.run(main())


def test_members_of_a_group_copy_whole_pictures(
    folder: Path, family: Family, contexts: list[Context]
) -> None:
    async def main() -> None:
        for context in (contexts[0], contexts[3]):
            async with LocalEngine(CONFIG, folder) as engine:
                answers = await asyncio.gather(
                    *(engine.generate(request(f"{n}", context)) for n in range(4))
                )
                assert engine.stats().cached_tokens == 3 * (len(context[0]) - 1)
                for answer in answers:
                    check(family, context, answer)

    asyncio.run(main())


def test_a_prompt_that_was_given_up_goes_on_from_a_whole_picture(
    folder: Path, family: Family, contexts: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_STEP_TOKENS", 20)
    context = contexts[0]

    async def main() -> None:
        for steps in (1, 2, 3):
            async with LocalEngine(CONFIG, folder) as engine, asyncio.TaskGroup() as tasks:
                given_up = tasks.create_task(engine.generate(request("first", context)))
                await steps_of(engine, steps)
                await engine.interrupt()
                assert (await given_up).finish_reason == "abort"
                computed = engine.stats().prefilled_tokens
                assert 0 < computed < len(context[0])
                assert all(not one.start < computed < one.stop for one in context[1])
                check(family, context, await engine.generate(request("again", context)))
                assert engine.stats().cached_tokens == computed

    asyncio.run(main())


async def steps_of(engine: LocalEngine, count: int) -> None:
    """Wait until the engine has computed so many parts of prompts."""
    for _ in range(count):
        before = engine.stats().prefilled_tokens
        for _ in range(100):
            await asyncio.sleep(0)
            if engine.stats().prefilled_tokens > before:
                break
