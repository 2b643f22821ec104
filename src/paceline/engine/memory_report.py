"""What is asked about a model's memory, and the report: what the process that plans it reads and writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from paceline.engine.memory_fit import FittedMemory, MemoryChoice
from paceline.runtime import Device, MemoryEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuestion:
    """A draft model's files and options. n_ctx: cells; None: as many as the target has."""

    paths: tuple[str, ...]
    model: Mapping[str, Any]
    context: Mapping[str, Any]
    n_ctx: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorQuestion:
    """A multimodal projector's file and options, as `plan_projector` takes them."""

    path: str
    use_gpu: bool
    image_min_tokens: int | None
    image_max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """What a plan is about: a model's files and options, and what may be chosen to make it fit.

    draft, projector: a draft model, a multimodal projector that is loaded as well. drafts: whether there is speculation.
    sequence_cells: cells that one sequence of full length gets if n_ctx is None; 0: no more than 4,096 a slot.
    is_alone: whether all memory of the machine counts as free; otherwise the memory that is free now counts. heads_path: a
    file of draft heads beside the model. gpus: all that there are, those of RPC servers first. rpc, rpc_timeout_s: see
    `EngineConfig`.
    """

    paths: tuple[str, ...]
    model: Mapping[str, Any]
    context: Mapping[str, Any]
    n_ctx: int | None
    num_slots: int
    chooses_slots: bool
    chooses_layers: bool
    least_ctx: int
    targets: tuple[int, ...]
    sequence_cells: int = 0
    is_alone: bool = False
    drafts: bool = False
    heads_path: str | None = None
    draft: DraftQuestion | None = None
    projector: ProjectorQuestion | None = None
    gpus: tuple[Device, ...] = ()
    rpc: tuple[str, ...] = ()
    rpc_timeout_s: float = 0

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Read what the asking process wrote."""
        found = json.loads(text)
        draft, projector, gpus = found.pop("draft"), found.pop("projector"), found.pop("gpus")
        return cls(
            **found,
            draft=draft and DraftQuestion(**draft),
            projector=projector and ProjectorQuestion(**projector),
            gpus=tuple(Device(**one) for one in gpus),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What is wanted, what is chosen of it so that it fits, and what these need.

    fitted: None where nothing fits; refusal says why.
    """

    wanted: MemoryEstimate
    fitted: FittedMemory | None
    refusal: str = ""

    def to_json(self) -> str:
        """Return the report as the process writes it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Read what the process wrote."""
        found = json.loads(text)
        fitted = found["fitted"]
        return cls(
            wanted=MemoryEstimate.of_json(found["wanted"]),
            fitted=fitted
            and FittedMemory(MemoryChoice(**fitted["choice"]), MemoryEstimate.of_json(fitted["estimate"])),
            refusal=found["refusal"],
        )
