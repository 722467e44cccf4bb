"""Attention of pictures' tokens to all of their picture, in families whose pictures are seen in
both directions (Gemma 3; Gemma 4 in layers with a window).

Attention looks back, for all tokens of a sequence. For those of pictures it is computed once more,
from all of a picture's tokens to the tokens of their segment up to the picture's end, and takes the
place of the first result. So a sequence without pictures costs nothing more, and there is a mask
only where a window hides something from some of a picture's tokens. The first result gets no
gradients there.

Dimension suffixes: as in `agentrl/trainers/compute/attention.py`; I of the S tokens of the sequence
stand for pictures, Q of these for one picture, whose tokens see C columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentrl.tokens.arrays import IntArray
from agentrl.trainers.compute.prefixes import SharedPrefixes

Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries (1, H, Q, D), keys and values (1, K, C, D)."""
Attention = Callable[[Inputs, Tensor | None], Tensor]
"""From these, and the columns that each query sees (Q, C), if it does not see all, to (1, H, Q, D).
"""


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """The tokens `start` to `stop` of all segments, which stand for a picture, in the segment that
    begins at `segment`.
    """

    segment: int
    start: int
    stop: int

    def first_seen(self, window: int | None) -> int:
        """The first token that some of the picture's tokens see."""
        return self.segment if window is None else max(self.segment, self.start - window + 1)


@dataclass(frozen=True, slots=True)
class PictureSpans:
    """Pictures whose tokens see each other in both directions, in all layers or in those with a
    window alone.
    """

    spans: Sequence[PictureSpan] = ()
    only_windows: bool = False


@dataclass(frozen=True, slots=True)
class WholePictures:
    """The pictures of a sequence, each once: `places`, where it has the first token of each, and
    `places_I`, all of their tokens.

    `only_windows`: see `PictureSpans`. `needed`: the last layer's results of some of these tokens
    are used.
    """

    spans: Sequence[PictureSpan]
    places: Sequence[int]
    places_I: Tensor
    only_windows: bool
    needed: bool
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, compare=False)
    """What layers have asked for, by the place of the first query among the columns, the queries
    and the window.
    """

    @staticmethod
    def of(
        pictures: PictureSpans,
        device: torch.device,
        shared: SharedPrefixes | None = None,
        needed_P: IntArray | None = None,
    ) -> "WholePictures | None":
        """None without pictures. `needed_P`: as in `Segments.of`."""
        spans = pictures.spans
        if shared is not None:
            # A picture that segments share is computed in the first of them.
            first_T = shared.computed_S[shared.places_T]
            spans = [span for span in spans if first_T[span.start] == span.start]
        if not spans:
            return None
        starts = np.asarray([span.start for span in spans])
        places = starts if shared is None else shared.places_T[starts]
        places_I = np.concatenate(
            [
                np.arange(place, place + span.stop - span.start)
                for place, span in zip(places.tolist(), spans, strict=True)
            ]
        )
        needed = needed_P is None or bool(np.isin(needed_P, places_I).any())
        on_device = torch.from_numpy(places_I).to(device)
        return WholePictures(spans, places.tolist(), on_device, pictures.only_windows, needed)

    def are_seen(self, window: int | None, *, needed_only: bool) -> bool:
        """True if a layer with this window has to compute them. `needed_only`: it is the last."""
        in_layer = window is not None or not self.only_windows
        return in_layer and (self.needed or not needed_only)

    def seen(
        self,
        out_1SHD: Tensor,
        inputs: Inputs,
        places_T: Tensor | None,
        window: int | None,
        attention: Attention,
    ) -> Tensor:
        """The results of a layer, with those of pictures' tokens by `attention` to all of their
        picture that the window reaches.

        `inputs`: those of all tokens of the sequence. `places_T`: where the sequence
        has each token of the segments, if not in their order.
        """
        query, key, value = inputs
        rows = []
        for span, place in zip(self.spans, self.places, strict=True):
            count, first = span.stop - span.start, span.first_seen(window)
            seen_QC = self._mask(span.start - first, count, window)
            if places_T is None:
                key_1KCD, value_1KCD = (x[:, :, first : span.stop] for x in (key, value))
            else:
                own_C = places_T[first : span.stop]
                key_1KCD, value_1KCD = (x.index_select(2, own_C) for x in (key, value))
            query_1HQD = query[:, :, place : place + count]
            rows.append(attention((query_1HQD, key_1KCD, value_1KCD), seen_QC))
        of_pictures_1IHD = torch.cat(rows, dim=2).transpose(1, 2).to(out_1SHD.dtype)
        return out_1SHD.index_copy(1, self.places_I, of_pictures_1IHD)

    def _mask(self, offset: int, queries: int, window: int | None) -> Tensor | None:
        """The columns that each query of a picture sees, (Q, C); None if all see all of them. The
        first query is the column `offset`.
        """
        if window is None or offset + queries <= window:
            return None
        if (offset, queries, window) not in self.masks:
            places_C = torch.arange(offset + queries, device=self.places_I.device)
            behind_QC = places_C[offset:, None] - places_C
            self.masks[offset, queries, window] = behind_QC < window
        return self.masks[offset, queries, window]


__all__ = ["Attention", "PictureSpan", "PictureSpans", "WholePictures"]
