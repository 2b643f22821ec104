"""A query and a document as the one text that a reranker reads."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import validation
from paceline.engine.prompts import check_list
from paceline.runtime import Model


def all_pairs(model: Model, query: str, documents: Sequence[str]) -> list[list[int]]:
    """A pair for each document. Raises `InvalidType` and `InvalidParams` for what is no text, or no list of them."""
    validation.text("query", query)
    check_list("documents", documents)
    return [
        pair_ids(model, query, validation.text(f"documents[{index}]", document))
        for index, document in enumerate(documents)
    ]


def pair_ids(model: Model, query: str, document: str) -> list[int]:
    """Its token ids: by the model's own "rerank" template, else bos, query, eos, sep, document, eos, as far as it uses them."""
    tokenizer = model.tokenizer
    template = model.chat_template("rerank")
    if template is not None:
        parts = template.split("{query}")
        text = query.join(part.replace("{document}", document) for part in parts)
        return tokenizer.encode(text, add_special=False, parse_special=True)
    ids = {name: tokenizer.special_tokens.get(name) for name in ("bos", "eos", "sep")}
    end = ids["sep"] if ids["eos"] is None else ids["eos"]
    wanted: list[list[int | None]] = [
        [ids["bos"]] if tokenizer.add_bos else [],
        [*tokenizer.encode(query, add_special=False)],
        [end] if tokenizer.add_eos else [],
        [ids["sep"]] if tokenizer.add_sep else [],
        [*tokenizer.encode(document, add_special=False)],
        [end] if tokenizer.add_eos else [],
    ]
    return [token for part in wanted for token in part if token is not None]
