"""Pictures among tokens: where they are in turns, samples, batches and files."""

from dataclasses import replace

import numpy as np
import pytest

from agentrl.batch import collate, to_samples
from agentrl.observe.trajectories import write_trajectories
from agentrl.protocols import GenerateRequest, Prompt
from agentrl.recipes.recordings import read_recordings
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import floats, ints
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import (
    PlacedImage,
    images_from,
    images_until,
    shared_length,
    shifted,
    whole_pictures,
)
from agentrl.trajectory import (
    Completion,
    Message,
    Score,
    Task,
    Terminated,
    Trajectory,
    Truncated,
    Turn,
)

RED, BLUE = (
    EncodedImage.of_pixels(np.full((2, 2, 3), colour, np.uint8))
    for colour in ((255, 0, 0), (0, 0, 255))
)


def turn(prompt: list[int], *images: PlacedImage, forked: bool = False) -> Turn:
    said = Completion(ints([7, 2]), floats([-0.1, -0.4]), ints([0, 0]), "stop")
    return Turn(ints(prompt), said, 0.0, {}, forked, images=images)


TURNS = (
    turn([5, 9, 9, 6], PlacedImage(1, 2, RED)),
    turn([9, 6], PlacedImage(0, 1, BLUE)),
    turn([5, 9, 6], PlacedImage(1, 1, BLUE), forked=True),
)
EPISODE = Trajectory("one", Task("grid", 0), TURNS, Terminated(), (Message("user", "Go."),))


def test_samples_have_the_pictures_of_their_turns_at_their_own_positions():
    cut = replace(
        EPISODE,
        status=Truncated("turns"),
        tail_ids=ints([9, 6]),
        tail_images=(PlacedImage(0, 1, RED),),
    )
    first, last = to_samples(cut, 1.0)
    assert first.images == (PlacedImage(1, 2, RED), PlacedImage(6, 1, BLUE))
    assert first.token_ids[6] == 9
    assert last.images == (PlacedImage(1, 1, BLUE), PlacedImage(5, 1, RED))  # one in the tail
    assert to_samples(cut.sealed(), 1.0) == [first, last]
    batch = collate([first, last])
    assert [*batch.images_M] == [first.images, last.images]
    assert [*batch.ordered([1, 0]).images_M] == [last.images, first.images]
    assert [*batch.lengthened(batch.tails_M).images_M] == [first.images, last.images]


def test_a_file_of_trajectories_keeps_pictures_where_they_are(tmp_path):
    score = Score(0.0, {})
    write_trajectories(tmp_path / "trajectories" / "step_000001.parquet", [(EPISODE, score)])
    (read,) = read_recordings(tmp_path / "trajectories")
    assert [turn.images for turn in read.trajectory.turns] == [turn.images for turn in TURNS]
    assert read.trajectory.turns[0].images[0].image.data == RED.data


def test_a_prompt_tells_which_of_its_pictures_are_new():
    images = (PlacedImage(1, 2, RED), PlacedImage(6, 1, BLUE))
    prompt = Prompt(ints([5, 9, 9, 6, 7, 2, 9, 6]), ints([9, 6]), forked=False, images=images)
    assert prompt.new_images == (PlacedImage(0, 1, BLUE),)
    assert images_until(images, 3) == images_until(images, 6) == images[:1]
    assert images_from(images, 1) == images
    assert images_from(images, 2) == images[1:]
    assert shifted(shifted(images, 4), -4) == images


def test_contexts_with_equal_tokens_part_at_the_first_other_picture():
    red, blue, later = PlacedImage(1, 2, RED), PlacedImage(1, 2, BLUE), PlacedImage(6, 1, RED)
    assert shared_length((), (), 9) == 9
    assert shared_length((red, later), (red, later), 9) == 9
    assert shared_length((red, later), (red,), 9) == 6
    assert shared_length((red, later), (blue, later), 9) == 1
    assert shared_length((red,), (), 9) == 1
    assert shared_length((red,), (blue,), 1) == 1
    assert shared_length((red,), (red,), 2) == 1  # never a part of a picture


def test_beginnings_with_other_pictures_have_other_names():
    other = replace(TURNS[0], images=(PlacedImage(1, 2, BLUE),))
    assert replace(EPISODE, turns=(other,)).beginning != EPISODE.beginning
    assert EPISODE.sealed().beginning == EPISODE.beginning
    assert EPISODE.sealed().turns == EPISODE.turns


@pytest.mark.parametrize(
    "images",
    [
        (PlacedImage(3, 2, RED),),
        (PlacedImage(-1, 1, RED),),
        (PlacedImage(0, 0, RED),),
        (PlacedImage(0, 2, RED), PlacedImage(1, 1, RED)),
    ],
)
def test_a_picture_outside_of_the_tokens_is_refused(images):
    with pytest.raises(ValueError, match="the picture at the tokens"):
        GenerateRequest("r", ints([1, 2, 3, 4]), SamplingParams(), images=images)


@pytest.mark.parametrize(
    ("start", "stop", "end"),
    [(0, 2, 2), (0, 3, 3), (0, 5, 3), (3, 5, 7), (4, 5, 7), (0, 7, 7), (0, 8, 7), (7, 8, 9)],
)
def test_tokens_end_inside_of_no_picture(start: int, stop: int, end: int) -> None:
    images = (PlacedImage(3, 4, RED), PlacedImage(7, 2, BLUE))
    assert whole_pictures(images, start, stop) == end
