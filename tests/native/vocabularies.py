"""Model files that have nothing but a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf


def write_vocabulary(path: Path, model: str, tokens: list[str], types: list[int], **more: Any) -> Path:
    """Write a GGUF with nothing but a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores([0.0] * len(tokens))
    for name, value in more.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
