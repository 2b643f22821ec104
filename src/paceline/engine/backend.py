"""What the engine needs of a backend: llama.cpp, or a fake. One thread calls `copy` to `detach_adapter`; any thread the rest.

Memory is addressed by positions, which are cells where a prompt is text; a range of positions has all cells of the media items in
it.

Errors: an exception belongs to all rows or texts of that call, and nothing of it may have been kept. An error of one
row alone goes into its `RowOutput`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol

from paceline.kv_cache import SavedState
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.scheduling.records import EmbeddingItem, EmbeddingRequest
from paceline.sequence import Row, RowOutput

Lora = tuple[tuple[str, float], ...]


class Backend(Protocol):
    """Computes rows and texts."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes and the ends of generation."""

    def make_samplers(self, params: SamplingParams, prompt: list[int]) -> tuple[object, ...]:
        """Return a sampler with the prompt for each of `params.n` choices. May take long; raises `RequestError`s."""

    def resume_sampler(self, sampler: object, token_ids: Many[int], state: bytes | None) -> None:
        """Bring a new sampler to the state of another one, which drew these tokens and has this `sampler_state`."""

    def sampler_state(self, sampler: object) -> bytes:
        """Return a sampler's state; needed only if its draws depend on more than seed and tokens."""

    def prepare_embedding(self, pooling: str | None, num_tokens: int) -> str:
        """Prepare for texts of up to num_tokens tokens, and return the pooling. May take long.

        Raises `RequestError`s and `NotEnoughMemory`.
        """

    def prepare_media_embedding(self, pooling: str | None, num_tokens: int, num_at_once: int) -> str:
        """Prepare for prompts with media of up to num_tokens tokens and cells, and return the pooling. May take long.

        num_at_once: cells of the largest item that one pass has to compute. Raises `Unsupported` for another pooling than that
        of the last token, and as `prepare_embedding`.
        """

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the positions before `end` of one sequence id to another, which is empty."""

    def copy_cells(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the cells of these positions alone, where a state lies beside them; `load_state` makes the copy usable."""

    def save(self, seq_id: int, start: int, end: int) -> SavedState:
        """Return the cells at positions [start, end) of a sequence id, for host memory."""

    def load(self, seq_id: int, data: Any, start: int, end: int) -> None:
        """Add positions [start, end) of what `save` returned to a sequence id that holds exactly those before."""

    def cut(self, data: Any, start: int, end: int) -> SavedState:
        """Return positions [start, end) of what `save` returned, as `save` would have; needs free cells for all of it."""

    def save_state(self, seq_id: int, end: int) -> SavedState:
        """Return the state of a sequence id that goes on at position `end`: what it holds beside cells, or all of it."""

    def load_state(self, seq_id: int, data: Any, end: int) -> None:
        """Give a sequence id what `save_state` returned; the cells before `end` are there, if they are kept apart."""

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence id from `end` on, which the last row had; needed where drafts can be verified.

        Where memory has a state that cannot be cut, `end` is where that row began, which had drafts.
        """

    def remove(self, seq_id: int) -> None:
        """Empty a sequence id."""

    def step(self, rows: Many[Row], lora: Lora) -> list[RowOutput]:
        """Run one pass over the rows, which are of one kind, and draw for those that want it.

        A row with drafts draws along them: behind its last known token and behind each draft, while what is drawn is the
        next draft. Drafts from the first that was not drawn on are not kept; where that would be too many to be cut from memory,
        nothing of the row is. A drawn end of generation is the last draw.

        Raises `Unsupported` for a kind of row that this backend cannot compute.
        """

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        """Return a vector, or a score, for each text, with pooling "none" a vector for each token; one pass."""

    def embed_media(self, item: EmbeddingItem) -> Any:
        """Return the vector of a prompt with media, that of its last token. Raises why its media have no embeddings."""

    def detach_adapter(self, adapter: str) -> None:
        """Stop applying an adapter that no row needs any more; does nothing for one that is not applied. Engine's thread."""

    def load_adapter(self, adapter: str, path: str) -> None:
        """Load the LoRA adapter of a file under a key that is new. May take long; raises `AdapterError`. Any thread."""

    def adapter_fingerprint(self, adapter: str) -> bytes:
        """Return 16 bytes that identify the content of a loaded adapter. Raises `AdapterNotFound`. Any thread."""

    def free_adapter(self, adapter: str) -> None:
        """Free a detached adapter; does nothing for one that is not there. Any thread."""

    def positions(self, seq_id: int) -> int:
        """Return the position behind the last one that a sequence id holds; 0 where it is empty. For checks."""

    def abort(self) -> None:
        """Abort the pass that is running, which raises `Aborted`."""

    def abort_embedding(self) -> None:
        """Abort the pass that is running if it embeds texts; it raises `Aborted`. Any thread."""

    def close(self) -> None:
        """Free the memory."""


def prepare_embedding(backend: Backend, request: EmbeddingRequest) -> str | None:
    """Prepare a backend for the texts of a request, and those with media, and return the pooling. Raises as the backend does."""
    pooling = request.pooling
    if request.media:
        pooling = backend.prepare_media_embedding(pooling, request.longest_media_prompt, request.largest_whole_item)
    return backend.prepare_embedding(pooling, request.longest_text) if request.longest_text else pooling
