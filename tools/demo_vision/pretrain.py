"""Trains the encoder alone, which is cheap: for each patch it predicts the figure there, the number of figures, and places."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from demo_vision import trainer
from demo_vision.encoder import EncoderConfig
from demo_vision.sight import Sight, sights


class SightTrainer(trainer.Trainer):
    """The encoder's training."""

    def __init__(self, arguments: argparse.Namespace, worker: int) -> None:
        self.config = EncoderConfig()
        self.sight = Sight(self.config)
        super().__init__(trainer.plan(arguments), worker, self.sight, trainer.optimizers(self.sight, arguments.rate))

    def loss(self, seeds: range) -> tuple[Tensor, Tensor]:
        """Return the loss of the predictions about these pictures."""
        loss, right = self.sight(*sights(seeds, self.config))
        return loss, right

    def weights(self) -> dict[str, Any]:
        """Return the encoder with its heads."""
        return {"config": asdict(self.config), "weights": self.sight.state_dict()}


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    trainer.add_arguments(parser, steps=860, decay=160, rows=32, rate=0.02)
    trainer.train(SightTrainer, parser.parse_args())


if __name__ == "__main__":
    main()
