"""The encoder's training on predictions for each patch, before a language model reads it."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from demo_vision.encoder import Encoder, EncoderConfig
from demo_vision.scenes import COLOURS, MAX_FIGURES, SHAPES, Pixels, Scene, draw, random_scene

_NAMES: Final = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]


class Sight(nn.Module):
    """The encoder followed by a linear layer that is thrown away after this training.

    From each embedding it predicts the figure that covers the patch (0: none), the number of figures, and the middle of
    the covering figure; so a language model finds all of this in the embeddings by linear maps, too.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.heads = nn.Linear(config.width_text, 1 + len(_NAMES) + MAX_FIGURES + 2)

    def forward(self, pixels: Tensor, names: Tensor, counts: Tensor, middles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and which share of the covered patches and of the counts is right.

        names: (batch, patches), the covering figures; counts: (batch,), figures less one; middles: (batch, patches, 2).
        """
        told = self.heads(self.encoder(pixels)).float()
        name, count, middle = told.split((1 + len(_NAMES), MAX_FIGURES, 2), -1)
        covered, many = names > 0, counts[:, None].expand(names.shape)
        loss = functional.cross_entropy(name.flatten(0, 1), names.flatten())
        loss = loss + functional.cross_entropy(name[covered], names[covered])
        loss = loss + 0.5 * functional.cross_entropy(count.flatten(0, 1), many.flatten())
        loss = loss + functional.smooth_l1_loss(middle[covered], middles[covered], beta=0.1)
        right = torch.cat(((name.argmax(-1) == names)[covered], (count.argmax(-1) == many).flatten()))
        return loss, right.float().mean()


def covering(scene: Scene, patches: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the covering figure of each patch, 0 if there is none, and the place of its middle, from -1 to 1.

    patches: of one side. A figure covers a patch if the patch's middle lies in the figure's square.
    """
    names = np.zeros((patches, patches), np.int64)
    middles = np.zeros((patches, patches, 2), np.float32)
    places = (np.arange(patches) + 0.5) / patches
    for figure in scene.figures:
        rows, columns = abs(places - figure.y) < figure.size, abs(places - figure.x) < figure.size
        inside = rows[:, None] & columns[None, :]
        names[inside] = 1 + _NAMES.index(figure.name)
        middles[inside] = (2 * figure.x - 1, 2 * figure.y - 1)
    return names.reshape(-1), middles.reshape(-1, 2)


def sights(seeds: range, config: EncoderConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures and the right predictions, as `Sight` takes them; the same seed gives the same picture."""
    pixels: list[Pixels] = []
    told: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
    counts = []
    for seed in seeds:
        scene = random_scene(random.Random(seed))
        pixels.append(draw(scene, config.side))
        told.append(covering(scene, config.side // config.patch))
        counts.append(len(scene.figures) - 1)
    names, middles = (np.stack(column) for column in zip(*told, strict=True))
    return torch.from_numpy(np.stack(pixels)), torch.from_numpy(names), torch.tensor(counts), torch.from_numpy(middles)
