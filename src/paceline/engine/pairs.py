"""A query and a document as the one text that a reranker reads."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import validation
from paceline.engine.prompts import check_list, truncated
from paceline.engine.text_requests import too_long_to_embed
from paceline.request import Truncate
from paceline.runtime import Model


def all_pairs(
    model: Model, query: str, documents: Sequence[str], longest: int, truncate: Truncate | None = None
) -> list[list[int]]:
    """Return a pair of at most `longest` tokens for each document, which truncate cuts where it has to be.

    Raises `InvalidType` and `InvalidParams` for what is no text, or no list of them; `PromptTooLong`.
    """
    validation.text("query", query)
    check_list("documents", documents)
    return [
        _fitted(
            model, query, validation.text(f"documents[{index}]", document), f"documents[{index}]", longest, truncate
        )
        for index, document in enumerate(documents)
    ]


def _fitted(model: Model, query: str, document: str, name: str, longest: int, truncate: Truncate | None) -> list[int]:
    pair = pair_ids(model, query, document)
    num_tokens, tokenizer = len(pair), model.tokenizer
    ids = tokenizer.encode(document, add_special=False)
    while len(pair) > longest:
        room = len(ids) - (len(pair) - longest)
        if truncate is None or room < 1:
            what = f"{name} with the query" if truncate is None else f"the query, with nothing of {name},"
            raise too_long_to_embed(what, num_tokens if truncate is None else len(pair) - len(ids), longest)
        ids = truncated(ids, room, truncate)
        pair = pair_ids(
            model, query, tokenizer.decode(ids)
        )  # where texts meet there may be other tokens: looked at again
    return pair


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
