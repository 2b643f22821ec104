"""Trains the encoder and the language model on conversations about pictures, which are drawn as they are needed.

Two processes of one thread each share every step, as in `demo_model.train`, whose steps, checkpoints and rates these are.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn import functional

from demo_model.train import SEED, checkpoints, share_gradients, write
from demo_vision.dialogues import DialogueWriter
from demo_vision.encoder import EncoderConfig
from demo_vision.model import SeeingLlama, shipped_weights


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    tokenizer: Path
    text_model: Path
    out: Path
    steps: int
    decay: int
    rows: int
    rate: float
    text_rate: float
    workers: int
    resume: bool = False

    def factor(self, step: int, warm: int = 40) -> float:
        """Share of the full rate: warm up, stay, and fall over the last `decay` steps."""
        return max(min(1.0, (step + 1) / warm, (self.steps - step) / self.decay), 0.01)

    def fixed(self) -> dict[str, Any]:
        """Return what may not change when a training is resumed."""
        return {"rows": self.rows, "rate": self.rate, "text_rate": self.text_rate, "workers": self.workers}


def optimizers(model: SeeingLlama, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest; the language model learns more slowly."""
    made: list[torch.optim.Optimizer] = []
    for part, rate in ((model.encoder, plan.rate), (model.llama, plan.text_rate)):
        matrices = [
            p for name, p in part.named_parameters() if p.dim() == 2 and "embd" not in name and "embed" not in name
        ]
        rest = [p for name, p in part.named_parameters() if p.dim() != 2 or "embd" in name or "embed" in name]
        made.append(torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.01))
        made.append(torch.optim.AdamW(rest, lr=rate * 0.25, betas=(0.9, 0.98), weight_decay=0.0))
    return made


class Trainer:
    """One worker's half of the training: a step is a function of its number and of the state in a checkpoint."""

    def __init__(self, plan: Plan, worker: int) -> None:
        self.plan, self.worker = plan, worker
        self.config = EncoderConfig()
        self.model = SeeingLlama(self.config)
        self.model.llama.load_state_dict(shipped_weights(plan.text_model))
        self.writer = DialogueWriter(plan.tokenizer, self.config.side)
        self.opts = optimizers(self.model, plan)
        self.base = [opt.param_groups[0]["lr"] for opt in self.opts]
        self.done, self.average, self.right = 0, 0.0, 0.0
        if plan.resume:
            self._resume()

    def _resume(self) -> None:
        path = checkpoints(self.plan.out)[-1]
        state = torch.load(path, weights_only=True)
        if state["plan"] != self.plan.fixed():
            raise SystemExit(f"{path.name} was trained with {state['plan']}, not {self.plan.fixed()}")
        self.model.load_state_dict(state["weights"])
        for opt, saved in zip(self.opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        self.done, self.average, self.right = state["step"], state["average"], state["right"]
        if self.worker == 0:
            print(f"resuming {path.name}", flush=True)

    def step(self, step: int) -> tuple[float, float]:
        """One step of all optimizers; returns the loss of this worker and its share of right tokens."""
        plan = self.plan
        for opt, lr in zip(self.opts, self.base, strict=True):
            opt.param_groups[0]["lr"] = lr * plan.factor(step)
        first = (step * plan.workers + self.worker) * plan.rows
        batch = self.writer.write(range(first, first + plan.rows))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tensors = [torch.from_numpy(one) for one in (batch.pixels, batch.tokens, batch.learned)]
            scores, wanted = self.model(*tensors, batch.head)
        loss = functional.cross_entropy(scores.float(), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        share_gradients(self.model, plan.workers)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for opt in self.opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        return loss.item(), _share_right(scores, wanted)

    def run(self, save_every: int = 250) -> None:
        """All steps, with a line of news and a checkpoint now and then."""
        start, first = time.monotonic(), self.done
        while self.done < self.plan.steps:
            loss, right = self.step(self.done)
            weight = 1.0 if self.done == 0 else 0.02
            self.average += weight * (loss - self.average)
            self.right += weight * (right - self.right)
            self.done += 1
            if self.worker == 0 and self.done % 25 == 0:
                self._news((self.done - first) / (time.monotonic() - start))
            if self.worker == 0 and self.done % save_every == 0:
                self._checkpoint()
        if self.worker == 0:
            write(self._weights(), self.plan.out)

    def _news(self, speed: float) -> None:
        pictures = speed * self.plan.rows * self.plan.workers
        shown = f"loss {self.average:.4f}, {self.right:.1%} of the tokens right, {pictures:.0f} pictures/s"
        print(f"step {self.done} {shown} {time.strftime('%H:%M:%S')}", flush=True)

    def _weights(self) -> dict[str, Any]:
        return {"config": asdict(self.config), "weights": self.model.state_dict(), "step": self.done}

    def _checkpoint(self) -> None:
        saved = {"plan": self.plan.fixed(), "average": self.average, "right": self.right}
        saved["optimizers"] = [one.state_dict() for one in self.opts]
        write(self._weights() | saved, self.plan.out.with_suffix(f".{self.done}.pt"))
        for old in checkpoints(self.plan.out)[:-2]:
            old.unlink()


def _share_right(scores: Tensor, wanted: Tensor) -> float:
    return float((scores.argmax(-1) == wanted).float().mean())


def work(worker: int, plan: Plan, meeting: str) -> None:
    """Body of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if plan.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=worker, world_size=plan.workers)
    Trainer(plan, worker).run()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text_model", type=Path, help="the demo model's file, with whose weights it begins")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--decay", type=int, help="steps in which the rate falls to nothing; a quarter by default")
    parser.add_argument("--rows", type=int, default=16, help="pictures per worker and step")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--text-rate", type=float, default=0.003)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint next to `out`")
    arguments = vars(parser.parse_args())
    arguments["decay"] = arguments["decay"] or arguments["steps"] // 4
    plan = Plan(**arguments)
    meeting = plan.out.with_suffix(".meet").absolute()
    meeting.unlink(missing_ok=True)
    multiprocessing.spawn(work, args=(plan, str(meeting)), nprocs=plan.workers)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
