"""Trains the encoder and the language model on conversations about pictures, which are drawn as they are needed."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demo_vision import trainer
from demo_vision.dialogues import DialogueWriter
from demo_vision.encoder import EncoderConfig
from demo_vision.model import SeeingLlama, shipped_weights


class DialogueTrainer(trainer.Trainer):
    """The training of both; the encoder, which has learned to see, learns more slowly."""

    def __init__(self, a: argparse.Namespace, worker: int) -> None:
        self.config = EncoderConfig()
        self.seeing = SeeingLlama(self.config)
        self.seeing.llama.load_state_dict(shipped_weights(a.text_model))
        self.seeing.encoder.load_state_dict(_pretrained(a.encoder))
        self.writer = DialogueWriter(a.tokenizer, self.config.side)
        opts = trainer.optimizers(self.seeing.encoder, a.encoder_rate) + trainer.optimizers(self.seeing.llama, a.rate)
        super().__init__(trainer.plan(a), worker, self.seeing, opts)

    def loss(self, seeds: range) -> tuple[Tensor, Tensor]:
        """Return the loss of the replies about these pictures, and the share of right tokens."""
        batch = self.writer.write(seeds)
        tensors = [torch.from_numpy(item) for item in (batch.pixels, batch.tokens, batch.learned)]
        scores, wanted = self.seeing(*tensors, batch.head)
        return functional.cross_entropy(scores.float(), wanted), (scores.argmax(-1) == wanted).float().mean()

    def weights(self) -> dict[str, Any]:
        """Return both parts."""
        return {"config": asdict(self.config), "weights": self.seeing.state_dict()}


def _pretrained(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)["weights"]
    return {name.removeprefix("encoder."): weight for name, weight in weights.items() if name.startswith("encoder.")}


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text_model", type=Path, help="the demo model's file, with whose weights it begins")
    parser.add_argument("encoder", type=Path, help="what demo_vision.pretrain wrote")
    parser.add_argument("out", type=Path)
    trainer.add_arguments(parser, steps=1000, decay=400, rows=12, rate=0.005)
    parser.add_argument("--encoder-rate", type=float, default=0.002)
    trainer.train(DialogueTrainer, parser.parse_args())


if __name__ == "__main__":
    main()
