"""Steps, rates, news and checkpoints of a training, whatever is learned.

Two processes of one thread each share every step, as in `demo_model.train`.
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from demo_model.train import SEED, checkpoints, share_gradients, write


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    out: Path
    steps: int
    decay: int
    rows: int
    rate: float
    workers: int
    resume: bool

    def factor(self, step: int, warm: int = 40) -> float:
        """Share of the full rate: warm up, stay, and fall over the last `decay` steps.

        Before the fall it does not depend on the number of steps, so that the end can be chosen when a training is resumed.
        """
        return max(min(1.0, (step + 1) / warm, (self.steps - step) / self.decay), 0.01)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that may not change when a training is resumed."""
        return {"rows": self.rows, "rate": self.rate, "workers": self.workers}


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, decay: int, rows: int, rate: float) -> None:
    """Add the options of `Plan` with these defaults."""
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument(
        "--decay", type=int, default=decay, help="steps in which the rate falls to nothing, the last ones"
    )
    parser.add_argument("--rows", type=int, default=rows, help="pictures per worker and step")
    parser.add_argument("--rate", type=float, default=rate)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint next to `out`")


def plan(a: argparse.Namespace) -> Plan:
    """Return the plan that the arguments say."""
    return Plan(a.out, a.steps, a.decay, a.rows, a.rate, a.workers, a.resume)


def optimizers(part: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    named = dict(part.named_parameters())
    of_layers = {name for name, p in named.items() if p.dim() == 2 and not any(k in name for k in ("emb", "heads"))}
    return [
        torch.optim.Muon(
            [named[name] for name in named if name in of_layers], lr=rate, momentum=0.95, weight_decay=0.01
        ),
        torch.optim.AdamW(
            [named[name] for name in named if name not in of_layers],
            lr=rate * 0.25,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        ),
    ]


class Trainer(ABC):
    """One worker's half of the training: a step is a function of its number and of the state in a checkpoint."""

    def __init__(self, plan: Plan, worker: int, model: nn.Module, opts: list[torch.optim.Optimizer]) -> None:
        self.plan, self.worker, self.model, self.opts = plan, worker, model, opts
        self.base = [opt.param_groups[0]["lr"] for opt in opts]
        self.done, self.average, self.right = 0, 0.0, 0.0
        if plan.resume:
            self._resume()

    @abstractmethod
    def loss(self, seeds: range) -> tuple[Tensor, Tensor]:
        """Return the loss of the pictures of these seeds, and the share of right answers."""

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """Return the contents of the finished file, without the number of the step."""

    def run(self, save_every: int = 100) -> None:
        """All steps, with a line of news and a checkpoint now and then."""
        start, first = time.monotonic(), self.done
        while self.done < self.plan.steps:
            self._count(*self._step(self.done))
            if self.worker == 0 and self.done % 25 == 0:
                self._news((self.done - first) / (time.monotonic() - start))
            if self.worker == 0 and self.done % save_every == 0:
                self._checkpoint()
        if self.worker == 0:
            write(self.weights() | {"step": self.done}, self.plan.out)

    def _step(self, step: int) -> tuple[float, float]:
        plan = self.plan
        for opt, lr in zip(self.opts, self.base, strict=True):
            opt.param_groups[0]["lr"] = lr * plan.factor(step)
        first = (step * plan.workers + self.worker) * plan.rows
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, right = self.loss(range(first, first + plan.rows))
        loss.backward()  # type: ignore[no-untyped-call]
        share_gradients(self.model, plan.workers)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for opt in self.opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        return loss.item(), right.item()

    def _count(self, loss: float, right: float) -> None:
        weight = 1.0 if self.done == 0 else 0.02
        self.average += weight * (loss - self.average)
        self.right += weight * (right - self.right)
        self.done += 1

    def _news(self, speed: float) -> None:
        pictures = speed * self.plan.rows * self.plan.workers
        shown = f"loss {self.average:.4f}, {self.right:.1%} right, {pictures:.0f} pictures/s"
        print(f"step {self.done} {shown} {time.strftime('%H:%M:%S')}", flush=True)

    def _checkpoint(self) -> None:
        saved = {"plan": self.plan.fixed(), "average": self.average, "right": self.right, "step": self.done}
        saved["optimizers"] = [option.state_dict() for option in self.opts]
        write(self.weights() | saved, self.plan.out.with_suffix(f".{self.done}.pt"))
        for old in checkpoints(self.plan.out)[:-2]:
            old.unlink()

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


Make: TypeAlias = Callable[[argparse.Namespace, int], Trainer]


def _work(worker: int, make: Make, arguments: argparse.Namespace, meeting: str) -> None:
    """Body of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if arguments.workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=worker, world_size=arguments.workers)
    make(arguments, worker).run()


def train(make: Make, arguments: argparse.Namespace) -> None:
    """Run all workers. make: called with the arguments and the worker's number."""
    meeting = arguments.out.with_suffix(".meet").absolute()
    meeting.unlink(missing_ok=True)
    multiprocessing.spawn(_work, args=(make, arguments, str(meeting)), nprocs=arguments.workers)  # type: ignore[attr-defined, no-untyped-call]
