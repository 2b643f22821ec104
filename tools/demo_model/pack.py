"""Encodes the corpus and packs whole documents into sequences of fixed length."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_model import nonce
from demo_model.corpus import FIRST_MIX, MIX, Document, Maker, documents

LENGTH = 512
OPEN_BINS = 64
CHUNK = 4000

# The share of the sequences that comes from the mixture of the beginning.
FIRST_SHARE = 0.05

Tokens = tuple[list[int], list[bool]]
Mix = list[tuple[Maker, float]]


def encode(tokenizer: Tokenizer, batch: list[Document]) -> Iterator[Tokens]:
    """Token numbers of each document and whether each one counts in the loss."""
    texts = [segment.text for document in batch for segment in document]
    codes = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for document in batch:
        ids: list[int] = []
        learn: list[bool] = []
        for segment in document:
            part = next(codes).ids
            ids += part
            learn += [segment.learn] * len(part)
        yield ids, learn


def _encoded(tokenizer: Tokenizer, seed: int, mix: Mix) -> Iterator[Tokens]:
    stream = documents(seed, mix)
    while True:
        yield from encode(tokenizer, list(itertools.islice(stream, CHUNK)))


def packed(tokenizer: Tokenizer, seed: int, mix: Mix) -> Iterator[Tokens]:
    """Sequences of LENGTH tokens: a document goes into the sequence that it fits best, none is cut in two."""
    bins: list[Tokens] = []
    for ids, learn in _encoded(tokenizer, seed, mix):
        ids, learn = ids[:LENGTH], learn[:LENGTH]
        fitting = [b for b in bins if len(b[0]) + len(ids) <= LENGTH]
        if fitting:
            best = max(fitting, key=lambda b: len(b[0]))
            best[0].extend(ids)
            best[1].extend(learn)
            continue
        if len(bins) == OPEN_BINS:
            fullest = max(range(OPEN_BINS), key=lambda i: len(bins[i][0]))
            yield bins.pop(fullest)
        bins.append((list(ids), list(learn)))


def write(tokenizer: Tokenizer, seed: int, sequences: int, out: Path) -> None:
    """Write the packed corpus: token numbers, and flags of learned tokens."""
    nonce.use_pieces(tokenizer.get_vocab())
    tokens = np.zeros((sequences, LENGTH), dtype=np.uint16)
    learned = np.zeros((sequences, LENGTH), dtype=np.bool_)
    first = int(sequences * FIRST_SHARE)
    stream = itertools.chain(
        itertools.islice(packed(tokenizer, seed + 1000, FIRST_MIX), first), packed(tokenizer, seed, MIX)
    )
    for row, (ids, learn) in enumerate(itertools.islice(stream, sequences)):
        tokens[row, : len(ids)] = ids
        learned[row, : len(ids)] = learn
    random = np.random.default_rng(seed)
    order = np.concatenate([random.permutation(first), first + random.permutation(sequences - first)])
    np.savez(out, tokens=tokens[order], learned=learned[order])
    print(f"{sequences * LENGTH} tokens, {learned.mean():.1%} of them learned")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=int, default=80_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write(Tokenizer.from_file(str(arguments.tokenizer)), arguments.seed, arguments.sequences, arguments.out)
