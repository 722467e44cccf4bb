"""The pictures of packed samples: their features, in place of the placeholders' embeddings.

A picture is computed once, however many samples of a micro-batch show it. A tower that is sharded
over ranks is gathered by all of them together, so a rank that has no picture while others have some
computes a blank one, which no token shows.

Dimension suffixes: S tokens of a micro-batch that are computed, T tokens of its samples, M samples;
I of the S tokens stand for pictures; F rows of features; H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.batch import TrainBatch
from agentrl.errors import TrainingError
from agentrl.models.vision import PictureInputs, Vision
from agentrl.tokens.arrays import IntArray
from agentrl.tokens.encoded_image import EncodedImage
from agentrl.tokens.placed_images import PlacedImage
from agentrl.trainers.compute.whole_pictures import PictureSpan, PictureSpans
from agentrl.trainers.packing import MicroBatch

_BLANK_SIDE = 28


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of a micro-batch on the device.

    `places_I`: the tokens of the sequence that stand for them; `rows_I`: the row of features of
    each.
    """

    vision: Vision
    inputs: PictureInputs
    places_I: Tensor
    rows_I: Tensor

    def embedded(self, model: Any, tokens_S: Tensor) -> dict[str, Any]:
        """The arguments of a language model's call in place of its tokens."""
        found = self.vision.features(self.inputs)
        embedded_1SH = model.get_input_embeddings()(tokens_S[None])
        rows_IH = found.rows_FH.index_select(0, self.rows_I).to(embedded_1SH.dtype)
        arguments: dict[str, Any] = {
            "inputs_embeds": embedded_1SH.index_copy(1, self.places_I, rows_IH[None]),
            **self.vision.of_layers(tokens_S[None], self.places_I),
        }
        if found.deeper:
            shows_S = torch.zeros_like(tokens_S, dtype=torch.bool)
            arguments |= {
                "visual_pos_masks": shows_S.index_fill(0, self.places_I, True)[None],
                "deepstack_visual_embeds": [
                    rows_FH.index_select(0, self.rows_I) for rows_FH in found.deeper
                ],
            }
        return arguments


@dataclass(frozen=True)
class PictureReader:
    """Reads the pictures of micro-batches for a model that sees."""

    vision: Vision

    def read(self, micro_batch: MicroBatch, device: torch.device) -> tuple[Pictures, Tensor | None]:
        """The pictures of a micro-batch, and the positions by time, height and width of its tokens,
        shape (3, S), if the model has such.

        Raises:
            TrainingError: a picture has other features than its tokens are.
        """
        samples, shared = micro_batch.samples, micro_batch.shared
        images = {
            placed.image.digest: placed.image
            for of_sample in placed_images(samples)
            for placed in of_sample
        }
        inputs = self.vision.inputs([*images.values()]) if images else self._blank
        grids = dict(zip(images, inputs.grids, strict=False))
        places, rows = self._places(samples)
        positions_3T = self._positions(samples, grids)
        if shared is not None:
            places, first = np.unique(shared.places_T[places], return_index=True)
            rows = rows[first]
            positions_3T = None if positions_3T is None else positions_3T[:, shared.computed_S]
        on_device = replace(
            inputs,
            tensors={
                name: tensor.to(device, non_blocking=True)
                for name, tensor in inputs.tensors.items()
            },
        )
        read = Pictures(
            self.vision, on_device, *(_to_device(one, device) for one in (places, rows))
        )
        return read, None if positions_3T is None else _to_device(positions_3T, device)

    def both_ways(self, samples: TrainBatch) -> PictureSpans:
        """The pictures in the samples whose tokens see each other in both directions.

        Raises:
            TrainingError: a sample ends inside of one.
        """
        if self.vision.both_ways == "nowhere":
            return PictureSpans()
        ends_M = np.cumsum(samples.lengths_M)
        spans: list[PictureSpan] = []
        for end, length, placed in zip(
            ends_M.tolist(), samples.lengths_M.tolist(), placed_images(samples), strict=True
        ):
            start = end - length
            spans += [PictureSpan(start, start + one.start, start + one.stop) for one in placed]
            if placed and placed[-1].stop > length:
                raise TrainingError("a sample ends inside of a picture")
        return PictureSpans(spans, self.vision.both_ways == "windows")

    def _places(self, samples: TrainBatch) -> tuple[IntArray, IntArray]:
        """The tokens of the samples that stand for pictures, and the row of features of each. The
        features of pictures lie in the order in which they are first shown.
        """
        first_rows: dict[str, int] = {}
        counts: dict[str, int] = {}
        places: list[IntArray] = [np.zeros(0, np.int32)]
        rows: list[IntArray] = [np.zeros(0, np.int32)]
        starts_M = np.cumsum(samples.lengths_M) - samples.lengths_M
        for start, of_sample in zip(starts_M.tolist(), placed_images(samples), strict=True):
            for placed in of_sample:
                span = samples.tokens_S[start + placed.start : start + placed.stop]
                own = np.flatnonzero(span == self.vision.placeholder)
                digest = placed.image.digest
                first = first_rows.setdefault(digest, sum(counts.values()))
                if counts.setdefault(digest, len(own)) != len(own):
                    raise TrainingError(
                        f"a picture is {counts[digest]} tokens in one place of a micro-batch and"
                        f" {len(own)} in another: it was made tokens of in two ways"
                    )
                places.append((own + start + placed.start).astype(np.int32))
                rows.append(np.arange(first, first + len(own), dtype=np.int32))
        return np.concatenate(places), np.concatenate(rows)

    def _positions(
        self, samples: TrainBatch, grids: Mapping[str, Sequence[int]]
    ) -> IntArray | None:
        found: list[IntArray] = []
        ends_M = np.cumsum(samples.lengths_M)
        for end, length, placed in zip(
            ends_M.tolist(), samples.lengths_M.tolist(), placed_images(samples), strict=True
        ):
            of_sample = self.vision.positions(
                samples.tokens_S[end - length : end],
                placed,
                [grids[one.image.digest] for one in placed if grids],
            )
            if of_sample is None:
                return None
            found.append(of_sample)
        return np.concatenate(found, axis=1)

    @cached_property
    def _blank(self) -> PictureInputs:
        grey = np.full((_BLANK_SIDE, _BLANK_SIDE, 3), 128, np.uint8)
        return self.vision.inputs([EncodedImage.of_pixels(grey)])


def placed_images(samples: TrainBatch) -> list[Sequence[PlacedImage]]:
    """The pictures among the tokens of each sample; those in its tail are left out."""
    return [
        [image for image in images if image.start < length]
        for images, length in zip(
            samples.images_M.tolist(), samples.lengths_M.tolist(), strict=True
        )
    ]


def _to_device(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)
