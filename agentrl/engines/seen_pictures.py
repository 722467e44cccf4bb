"""`SeenPictures`: what a model that sees has made of pictures, each computed once.

Dimension suffixes: F rows of features, H hidden size.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch

from agentrl.models.vision import PictureFeatures, PictureInputs, Vision
from agentrl.tokens.encoded_image import EncodedImage

_ROWS = 1 << 16
"""Rows of features that are kept; those of the picture shown longest ago are dropped first."""
_GRIDS = 1 << 16
"""Pictures whose size in patches is kept."""
_INPUTS = 64
"""Pictures whose pixels are kept until the tower has computed them."""


class SeenPictures:
    """The sizes and features of pictures, by their digests.

    The tower computes each picture by itself, so that its features do not depend on what else is
    computed.
    """

    def __init__(self, vision: Vision, device: torch.device) -> None:
        self._vision = vision
        self._device = device
        self._features: OrderedDict[str, PictureFeatures] = OrderedDict()
        self._grids: OrderedDict[str, Sequence[int]] = OrderedDict()
        self._inputs: OrderedDict[str, PictureInputs] = OrderedDict()
        self._rows = 0

    def grid(self, image: EncodedImage) -> Sequence[int]:
        """The size of a picture in patches, by time, height and width; empty in families whose
        positions do not depend on it.
        """
        if image.digest not in self._grids:
            self._grids[image.digest] = next(iter(self._read(image).grids), ())
            if len(self._grids) > _GRIDS:
                self._grids.popitem(last=False)
        return self._grids[image.digest]

    def features(self, image: EncodedImage) -> PictureFeatures:
        """The features in place of a picture's placeholders, on the device."""
        if image.digest not in self._features:
            inputs = self._read(image)
            del self._inputs[image.digest]
            tensors = {name: tensor.to(self._device) for name, tensor in inputs.tensors.items()}
            found = self._vision.features(replace(inputs, tensors=tensors))
            self._features[image.digest] = found
            self._rows += len(found.rows_FH)
            while self._rows > _ROWS and len(self._features) > 1:
                _, dropped = self._features.popitem(last=False)
                self._rows -= len(dropped.rows_FH)
        self._features.move_to_end(image.digest)
        return self._features[image.digest]

    def forget_features(self) -> None:
        """The weights are others now."""
        self._features.clear()
        self._rows = 0

    def _read(self, image: EncodedImage) -> PictureInputs:
        if image.digest not in self._inputs:
            self._inputs[image.digest] = self._vision.inputs([image])
            if len(self._inputs) > _INPUTS:
                self._inputs.popitem(last=False)
        return self._inputs[image.digest]


__all__ = ["SeenPictures"]
