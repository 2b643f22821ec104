"""Trains a demo model on the packed corpus, with Muon for the layers and AdamW for the rest.

Two processes of one thread each share every step and add up their gradients: on a busy
machine this is much faster than one process with threads that wait for each other.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn import functional

from demo_model.model import BIG, DRAFT, Config, Llama

SEED = 1


class Data:
    """The packed sequences, served in order; `at` selects the sequences of one step."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.tokens = arrays["tokens"]
            self.learned = arrays["learned"]

    def at(self, part: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token numbers and learned flags of one part, joined to sequences of `length`."""
        index = [(part * rows + i) % len(self.tokens) for i in range(rows)]
        tokens = torch.from_numpy(self.tokens[index].astype(np.int64)).view(-1, length)
        return tokens, torch.from_numpy(self.learned[index]).view(-1, length)


def loss_of(model: Llama, body: Callable[[Tensor], Tensor], tokens: Tensor, learned: Tensor) -> Tensor:
    """Mean cross entropy of the learned tokens; the head runs only for these tokens."""
    wanted = learned[:, 1:]
    hidden = body(tokens[:, :-1])[wanted]
    return functional.cross_entropy(model.logits(hidden).float(), tokens[:, 1:][wanted])


def optimizers(model: Llama, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=rate * 0.25, betas=(0.9, 0.98), weight_decay=0.0),
    ]


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    data: Path
    out: Path
    draft: bool
    steps: int
    decay: int
    rows: int
    rate: float
    workers: int
    resume: bool = False

    def factor(self, step: int, warm: int = 40) -> float:
        """Share of the full rate: warm up, stay, and fall over the last `decay` steps.

        Before the fall the rate does not depend on the number of steps, so the end can be
        chosen late, when the training is resumed.
        """
        return max(min(1.0, (step + 1) / warm, (self.steps - step) / self.decay), 0.01)

    def length(self, step: int) -> int:
        """Sequences are twice as long in the second half of the fall."""
        return 1024 if step >= self.steps - self.decay // 2 else 512

    def fixed(self) -> dict[str, Any]:
        """Return the settings that may not change when a training is resumed."""
        return {"draft": self.draft, "rows": self.rows, "rate": self.rate, "workers": self.workers}


def write(state: dict[str, Any], path: Path) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    temporary.replace(path)


def checkpoints(out: Path) -> list[Path]:
    """Return the checkpoints of a training, the newest last."""
    found = [p for p in out.parent.glob(f"{out.stem}.*.pt") if p.suffixes[-2][1:].isdigit()]
    return sorted(found, key=lambda p: int(p.suffixes[-2][1:]))


def share_gradients(model: nn.Module, workers: int) -> None:
    """Average the gradients of all workers."""
    if workers == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= workers
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class Trainer:
    """One worker's half of the training.

    Nothing is drawn at random after the first weights: a step is a function of its number and of
    the state in a checkpoint, so a resumed training equals one that was never stopped.
    """

    def __init__(self, plan: Plan, worker: int, config: Config) -> None:
        self.plan, self.worker = plan, worker
        self.model = Llama(config)
        # Compiled only for the short length; the few long steps are not worth a second wait.
        self.compiled = torch.compile(self.model.hidden, dynamic=False)
        self.data = Data(plan.data)
        self.opts = optimizers(self.model, plan.rate)
        self.base = [opt.param_groups[0]["lr"] for opt in self.opts]
        self.done, self.average = 0, 0.0
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
        self.done, self.average = state["step"], state["average"]
        if self.worker == 0:
            print(f"resuming {path.name}", flush=True)

    def step(self, step: int) -> float:
        """One step of all optimizers; returns the loss of this worker."""
        plan = self.plan
        for opt, lr in zip(self.opts, self.base, strict=True):
            opt.param_groups[0]["lr"] = lr * plan.factor(step)
        body = self.compiled if plan.length(step) == 512 else self.model.hidden
        with torch.autocast("cpu", dtype=torch.bfloat16):
            part = self.data.at(step * plan.workers + self.worker, plan.rows, plan.length(step))
            loss = loss_of(self.model, body, *part)
        loss.backward()  # type: ignore[no-untyped-call]
        share_gradients(self.model, plan.workers)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for opt in self.opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        return loss.item()

    def run(self, save_every: int = 100) -> None:
        """All steps, with a line of news and a checkpoint now and then."""
        start, first = time.monotonic(), self.done
        while self.done < self.plan.steps:
            loss = self.step(self.done)
            self.average = loss if self.done == 0 else 0.98 * self.average + 0.02 * loss
            self.done += 1
            if self.worker == 0 and self.done % 25 == 0:
                self._news((self.done - first) / (time.monotonic() - start))
            if self.worker == 0 and self.done % save_every == 0:
                self._checkpoint()
        if self.worker == 0:
            write(self._weights(), self.plan.out)

    def _news(self, speed: float) -> None:
        tokens = speed * self.plan.rows * self.plan.workers * 512
        print(f"step {self.done} loss {self.average:.4f} {tokens:.0f} tok/s {time.strftime('%H:%M:%S')}", flush=True)

    def _weights(self) -> dict[str, Any]:
        return {"config": asdict(self.model.config), "weights": self.model.state_dict(), "step": self.done}

    def _checkpoint(self) -> None:
        saved = {"plan": self.plan.fixed(), "average": self.average, "optimizers": [o.state_dict() for o in self.opts]}
        write(self._weights() | saved, self.plan.out.with_suffix(f".{self.done}.pt"))
        for old in checkpoints(self.plan.out)[:-2]:
            old.unlink()


def work(worker: int, plan: Plan, meeting: str) -> None:
    """Body of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if plan.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=worker, world_size=plan.workers)
    Trainer(plan, worker, DRAFT if plan.draft else BIG).run()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--decay", type=int, help="steps in which the rate falls to nothing; a fifth by default")
    parser.add_argument("--rows", type=int, default=6, help="sequences per worker and step")
    parser.add_argument("--rate", type=float, default=0.008)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint next to `out`")
    arguments = vars(parser.parse_args())
    arguments["decay"] = arguments["decay"] or arguments["steps"] // 5
    plan = Plan(**arguments)
    meeting = str(plan.out.with_suffix(".meet").absolute())
    if os.path.exists(meeting):
        os.remove(meeting)
    multiprocessing.spawn(work, args=(plan, meeting), nprocs=plan.workers)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
