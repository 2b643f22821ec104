"""What the engine needs of whatever computes: llama.cpp, or a fake. One thread calls `copy` to `embed`; any thread the rest.

Errors: whatever is raised belongs to all rows or texts of that call, and nothing of it may have been kept. An error of one
row alone goes into its `RowOutput`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol

from paceline.params import SamplingParams
from paceline.scheduling.limits import Vocabulary
from paceline.scheduling.plan import Row, RowOutput
from paceline.scheduling.prefix_tree import Saved

Lora = tuple[tuple[str, float], ...]


class Backend(Protocol):
    """Computes rows and texts."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes and the ends of generation."""

    def make_samplers(self, params: SamplingParams, prompt: list[int]) -> tuple[object, ...]:
        """One sampler for each of `params.n` choices, told the prompt. May take long; raises `RequestError`s."""

    def resume_sampler(self, sampler: object, token_ids: Many[int], state: bytes | None) -> None:
        """Brings a new sampler to where another one stood after it drew these; state: what `sampler_state` said of it."""

    def sampler_state(self, sampler: object) -> bytes:
        """What a sampler has become; needed for those alone whose draws follow from more than seed and tokens."""

    def prepare_embedding(self, pooling: str | None) -> str:
        """Makes ready for texts pooled so, and answers the way of pooling; may take long. Raises `RequestError`s."""

    def max_embedding_tokens(self, pooling: str) -> int:
        """The longest text that can be embedded so, once it was made ready for."""

    def copy(self, from_seq_id: int, to_seq_id: int, num_tokens: int) -> None:
        """The first tokens of one sequence id become those of another, which is empty."""

    def save(self, seq_id: int, start: int, end: int) -> Saved:
        """Tokens [start, end) of a sequence id, for host memory; all that it has, where memory is only saved whole."""

    def load(self, seq_id: int, data: Any, start: int, end: int) -> None:
        """Adds tokens [start, end) of what `save` answered to a sequence id that holds exactly those before."""

    def remove(self, seq_id: int) -> None:
        """Empties a sequence id."""

    def step(self, rows: Many[Row], lora: Lora) -> list[RowOutput]:
        """One pass over the rows, and a draw where a row wants one."""

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        """A vector, or a score, for each text; one pass."""

    def positions(self, seq_id: int) -> int:
        """How many tokens a sequence id holds, from the first on; for checks."""

    def abort(self) -> None:
        """Ends the pass that is running, which raises `Aborted`."""

    def close(self) -> None:
        """Gives the memory back."""
