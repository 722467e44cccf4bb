"""Prompts that are cut on their way to an actor come whole there, whatever it has forgotten."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.ray_prompts import HeldPrompts, SentPrompts
from agentrl.protocols import GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trajectory import Completion

PICTURES = [EncodedImage.of_pixels(np.full((1, 1), shade, np.uint8)) for shade in (0, 255)]
tokens = st.lists(st.integers(0, 9), max_size=4)


def answer(token_ids: list[int]) -> Completion:
    return Completion(token_ids, [0.0] * len(token_ids), [0] * len(token_ids), "stop")


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            tokens,
            tokens,
            st.booleans(),
            st.sampled_from([None, *PICTURES]),
        ),
        max_size=30,
    ),
    limit=st.integers(0, 120),
)
def test_the_actor_sees_every_prompt_as_it_was_or_asks_for_it_whole(turns, limit):
    here, there = SentPrompts(), HeldPrompts(limit)
    so_far: dict[str, tuple[list[int], tuple[PlacedImage, ...]]] = {}
    for session, new, sampled, answered, shown in turns:
        known, images = so_far.get(session, ([], ()))
        if shown is not None:
            images = (*images, PlacedImage(len(known), 1, shown))
        request = GenerateRequest(
            "r",
            [*known, 1, *new],
            SamplingParams(),
            session=session,
            known=len(known),
            images=images,
        )
        cut = here.cut(request)
        seen = request if cut is None else there.whole(pickle.loads(pickle.dumps(cut)))
        if seen is None:
            seen = request
        assert seen == request
        if not answered:  # it was cancelled, and its episode is played again
            so_far.pop(session, None)
            continue
        there.answered(seen, answer(sampled), was_cut=cut is not None and seen is not request)
        here.answered(request, answer(sampled))
        so_far[session] = [*request.prompt_ids.tolist(), *sampled], images
        assert there._size == sum(held.size for held in there._held.values()) <= limit


def test_a_late_turn_sends_as_much_as_an_early_one():
    here, there = SentPrompts(), HeldPrompts()
    so_far, sizes = ints([]), []
    for turn in range(60):
        request = GenerateRequest(
            "r", np.append(so_far, [7] * 40), SamplingParams(), session="s", known=len(so_far)
        )
        cut = here.cut(request)
        sent = pickle.dumps(cut or request)
        sizes.append(len(sent))
        seen = pickle.loads(sent) if cut is None else there.whole(pickle.loads(sent))
        assert seen == request, turn
        there.answered(seen, answer([turn] * 20), was_cut=cut is not None)
        here.answered(request, answer([turn] * 20))
        so_far = np.append(request.prompt_ids, ints([turn] * 20))
    assert sizes[59] <= sizes[5] + 8  # bytes of larger numbers
    assert len(pickle.dumps(request)) > 10 * sizes[59]
