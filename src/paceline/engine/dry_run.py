"""The process that plans a model's memory: `python -m paceline.engine.dry_run`, started by `memory_needs` only.

It reads a `MemoryQuestion` as JSON from stdin and writes a `MemoryReport`, or the name and text of an error, on one line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.engine.memory_fit import (
    FitRules,
    MemoryChoice,
    MemoryQuestion,
    MemoryReport,
    default_n_ctx,
    draft_sized_options,
    fit_memory,
    sized_options,
)
from paceline.errors import NotEnoughMemory, PacelineError
from paceline.runtime import (
    MemoryClass,
    MemoryEstimate,
    Model,
    on_empty_machine,
    plan_memory,
    plan_projector,
    rpc,
)


def answer(question: MemoryQuestion) -> MemoryReport:
    """Plan the wanted choice, and choose one that fits. Raises as `Model.load`, `plan_memory` and `rpc.connect`."""
    if question.rpc:
        rpc.connect(question.rpc, question.rpc_timeout_s)
    planner = _Planner(question)
    model = planner.sketch(question.model.get("n_gpu_layers"), 0, False)

    def most_ctx(num_slots: int) -> int:
        return default_n_ctx(model.n_ctx_train, num_slots)

    wanted = MemoryChoice(
        n_ctx=most_ctx(question.num_slots) if question.n_ctx is None else question.n_ctx,
        num_slots=question.num_slots,
        n_gpu_layers=question.model.get("n_gpu_layers"),
    )
    rules = FitRules(
        chooses_ctx=question.n_ctx is None,
        chooses_slots=question.chooses_slots and model.memory_class is not MemoryClass.ATTENTION,
        chooses_layers=question.chooses_layers,
        least_ctx=question.least_ctx,
        most_ctx=most_ctx,
        sequence_cells=question.sequence_cells,
        n_layer=model.n_layer,
        n_expert=planner.n_expert,
        targets=question.targets,
        is_alone=question.is_alone,
        has_draft=question.draft is not None,
        chooses_repack="use_extra_bufts" not in question.model
        and question.model.get("load_mode", "auto") in ("auto", "mmap"),
    )
    estimate = planner.measure(wanted)
    try:
        fitted = fit_memory(planner.measure, wanted, rules)
    except NotEnoughMemory as error:
        return MemoryReport(wanted=estimate, fitted=None, refusal=str(error))
    return MemoryReport(wanted=fitted.estimate if fitted.choice.n_ctx > wanted.n_ctx else estimate, fitted=fitted)


class _Planner:
    """Plans choices for one model; keeps the last placement of its layers."""

    def __init__(self, question: MemoryQuestion) -> None:
        self._question = question
        self.sketch: Callable[[int | None, int, bool], Model] = functools.lru_cache(maxsize=1)(self._sketch)

    @property
    def n_expert(self) -> int:
        model = self.sketch(self._question.model.get("n_gpu_layers"), 0, False)
        found = model.metadata.get(f"{model.metadata.get('general.architecture')}.expert_count", "0")
        return int(found) if found.isdecimal() else 0

    def measure(self, choice: MemoryChoice) -> MemoryEstimate:
        """Return the memory that a choice needs."""
        question, model = self._question, self.sketch(choice.n_gpu_layers, choice.n_cpu_moe, choice.no_repack)
        options = sized_options(
            model.memory_class, choice.num_slots, choice.n_ctx, question.context, drafts=question.drafts
        )
        load_mode = question.model.get("load_mode", "auto")
        heads = model if question.model.get("draft_heads") else self.heads
        estimate = plan_memory(model, num_slots=choice.num_slots, load_mode=load_mode, draft_heads=heads, **options)
        if question.draft is not None:
            draft, n_batch = question.draft, options.get("n_batch")
            n_ctx = choice.n_ctx if draft.n_ctx is None else draft.n_ctx
            memory, mode = self.draft.memory_class, draft.model.get("load_mode", "auto")
            own = draft_sized_options(memory, choice.num_slots, n_ctx, n_batch, draft.context)
            estimate = estimate.plus(plan_memory(self.draft, num_slots=choice.num_slots, load_mode=mode, **own))
        if self.projector is not None:
            estimate = estimate.plus(self.projector)
        return on_empty_machine(estimate) if question.is_alone else estimate

    @functools.cached_property
    def projector(self) -> MemoryEstimate | None:
        """The memory of the projector; None without a projector. Raises `ModelLoadError`."""
        asked = self._question.projector
        return None if asked is None else plan_projector(**dataclasses.asdict(asked))

    @functools.cached_property
    def heads(self) -> Model | None:
        path = self._question.heads_path
        return None if path is None else Model.load(path, no_alloc=True, draft_heads=True)

    @functools.cached_property
    def draft(self) -> Model:
        """The draft model, without its weights. Raises as `Model.load`."""
        draft = self._question.draft
        assert draft is not None  # noqa: S101 - asked where there is one
        paths = draft.paths
        return Model.load(paths[0] if len(paths) == 1 else paths, **{**draft.model, "no_alloc": True})

    def _sketch(self, n_gpu_layers: int | None, n_cpu_moe: int, no_repack: bool) -> Model:
        options: dict[str, Any] = {**self._question.model, "no_alloc": True, "n_gpu_layers": n_gpu_layers}
        if n_cpu_moe:
            options["n_cpu_moe"] = n_cpu_moe
        if no_repack:
            options["use_extra_bufts"] = False
        paths = self._question.paths
        return Model.load(paths[0] if len(paths) == 1 else paths, **options)


def main() -> None:
    """Answer the question on stdin."""
    # The parser of msgspec refuses NaN and lone surrogates, which options may have until the plan checks them.
    question = msgspec.convert(json.loads(sys.stdin.read()), MemoryQuestion)
    try:
        reply = msgspec.json.encode(answer(question)).decode()
    except PacelineError as error:
        reply = json.dumps(
            {"error": type(error).__name__, "message": str(error), "file": getattr(error, "filename", None)}
        )
    sys.stdout.write(reply + "\n")
    sys.stdout.flush()
    os._exit(0)  # nothing is left to free that the end of the process does not free faster


if __name__ == "__main__":
    main()
