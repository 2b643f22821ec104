"""Drafts of a model's own heads: next-token prediction (MTP), or EAGLE-3 and DFlash from files of their own. Pure.

The backend's memory of the heads follows the memory of the model under the same sequence ids. So a drafter of heads only knows
the id of a sequence, its newest token and its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline import validation
from paceline.errors import EngineError, InvalidParams, NoKvSlot, Unsupported
from paceline.speculation.drafter import Drafter, Drafters

DraftWish = tuple[int, int, int, int]
"""Sequence id, position of the newest token, that token, most drafts."""

Draft = Callable[[Sequence[DraftWish], float], Sequence[Sequence[int]]]
"""Returns drafts for wishes; each ends before a token less probable than the number. Raises `NoKvSlot` if cells are short."""


@dataclass(slots=True)
class _Placed:
    seq_id: int
    num_tokens: int
    newest: int


class HeadsDrafter:
    """Asks the backend for drafts of all sequences at once. Call `attach` before the first.

    architecture: of the file of these heads; None: the model's. drafts_blocks: see `DraftCost`.
    """

    architecture: ClassVar[str | None] = None
    drafts_blocks: ClassVar[bool] = False

    def __init__(self, p_min: float = 0.0, model: str | None = None) -> None:
        """p_min: a draft ends before a token that the heads find less probable. model: a file of the heads."""
        self._p_min = validation.number("p_min", p_min, 0, 1)
        self.model = None if model is None else validation.text("model", model)
        if self.model == "":
            raise InvalidParams("model is empty; name the file of the draft heads")
        self._draft: Draft | None = None
        self._placed: dict[int, _Placed] = {}

    def attach(self, draft: Draft) -> None:
        """Set the function that drafts."""
        self._draft = draft

    def begin_at(self, key: int, token_ids: Sequence[int], seq_id: int) -> None:
        """Begin with a sequence, in place of `begin`. seq_id: its id in memory until `end`."""
        self._placed[key] = _Placed(seq_id, len(token_ids), token_ids[-1])

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """Raise `EngineError`: speculation calls `begin_at`."""
        raise EngineError(
            f"{type(self).__name__} cannot begin with sequence {key} of {len(token_ids)} tokens without its id in memory: "
            "call begin_at"
        )

    def propose(self, key: int, max_tokens: int) -> Sequence[int]:
        return self.propose_all([(key, max_tokens)])[0]

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> Sequence[Sequence[int]]:
        """Return drafts; none for sequences that the heads could not follow.

        Cells that this tick frees are still in use, as its operations run with the pass. If all of them are needed, this tick has
        no drafts.
        """
        if self._draft is None:
            raise EngineError(f"{type(self).__name__} needs a backend with draft heads, which this one has not")
        wishes = []
        for key, max_tokens in wanted:
            placed = self._placed[key]
            wishes.append((placed.seq_id, placed.num_tokens - 1, placed.newest, max_tokens))
        try:
            return self._draft(wishes, self._p_min)
        except NoKvSlot:
            return [[] for _ in wishes]

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        placed = self._placed[key]
        placed.num_tokens += len(token_ids)
        placed.newest = token_ids[-1]

    def rollback(self, key: int, num_tokens: int) -> None:
        """Do nothing: the backend cuts the memory of the heads with the memory of the model."""

    def end(self, key: int) -> None:
        self._placed.pop(key, None)


class MtpDrafter(HeadsDrafter):
    """Next-token-prediction heads: in the model's own file, or in another one."""


class FileHeadsDrafter(HeadsDrafter):
    """Heads that are a file of their own, made for the model."""

    def __init__(self, model: str | None = None, p_min: float = 0.0) -> None:
        """model: the file; p_min: as of `HeadsDrafter`."""
        if model is None:
            name = self.architecture
            raise InvalidParams(f"{name} is a file of its own beside the model: give it as {name}:model=FILE")
        super().__init__(p_min, model)


class Eagle3Drafter(FileHeadsDrafter):
    """An EAGLE-3 file for the model."""

    architecture = "eagle3"


class DFlashDrafter(FileHeadsDrafter):
    """A DFlash or DSpark file for the model: a block of drafts in one pass."""

    architecture = "dflash"
    drafts_blocks = True


def attach_heads(drafter: Drafter | Drafters | None, backend: Any) -> None:
    """Let the draft heads among the drafters draft with the backend. Raises `Unsupported` if it has no `draft`."""
    for heads in drafter if isinstance(drafter, tuple) else (drafter,):
        if not isinstance(heads, HeadsDrafter):
            continue
        draft = getattr(backend, "draft", None)
        if draft is None:
            raise Unsupported(
                f"speculation with draft heads ({type(heads).__name__}) needs a model that has them, and "
                f"{type(backend).__name__} has none; name another drafter, such as 'ngram'"
            )
        heads.attach(draft)
