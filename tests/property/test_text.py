"""Text for any bytes, any split and any stops, against plain functions of the whole sequence."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.output import Detokenizer, StopFilter, TextPipe

Tokens = list[tuple[int, bytes]]

# Few letters, so that stops occur and overlap; one of them takes four bytes; now and then bytes that are no text.
LETTERS = st.text("ab🙂", max_size=12)
STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=6), max_size=4)
BYTES = st.lists(LETTERS.map(str.encode) | st.binary(max_size=3), max_size=5).map(b"".join)


@st.composite
def token_lists(draw: st.DrawFn) -> Tokens:
    """Bytes, cut into tokens anywhere; some tokens have none."""
    data = draw(BYTES)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=10)))
    edges = [0, *cuts, len(data)]
    return [(100 + index, data[begin:end]) for index, (begin, end) in enumerate(pairwise(edges))]


def first_stop(data: bytes, stops: list[str]) -> tuple[int, str] | None:
    """Return the start of the first stop in all bytes, and the shortest stop that begins there."""
    found = [(data.find(stop.encode()), len(stop.encode()), stop) for stop in stops if stop.encode() in data]
    return min(found)[::2] if found else None


def might_begin(data: bytes, stops: list[str]) -> int:
    """Return the start of the longest end of the bytes that is a proper beginning of a stop."""
    for begin in range(len(data)):
        end = data[begin:]
        if any(stop.encode().startswith(end) and stop.encode() != end for stop in stops):
            return begin
    return len(data)


def is_decided(data: bytes, stops: list[str]) -> bool:
    """Whether no bytes to come can change which stop is the first."""
    for length in range(len(data) + 1):
        found = first_stop(data[:length], stops)
        if found and might_begin(data[:length], stops) >= found[0]:
            return True
    return False


def expected_of(tokens: Tokens, stops: list[str]) -> tuple[list[int], list[int], str, str | None]:
    """Ids before the stop, ids of the stop, text and stop of a whole sequence."""
    used: Tokens = []
    for token in tokens:
        used.append(token)
        if is_decided(b"".join(data for _, data in used), stops):
            break
    whole = b"".join(data for _, data in used)
    found = first_stop(whole, stops)
    cut = found[0] if found else len(whole)
    ids = [token_id for token_id, _ in used]
    before = sum(len(b"".join(data for _, data in used[: index + 1])) <= cut for index in range(len(used)))
    return ids[:before], ids[before:], whole[:cut].decode("utf-8", "replace"), found[1] if found else None


@given(BYTES | st.binary(), st.data())
def test_text_of_any_bytes_split_anywhere_is_the_text_of_the_whole(data: bytes, draw: st.DataObject) -> None:
    """Joined pieces equal the decoded whole, each alone is well-formed, and state may change hands anywhere."""
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)))))
    detokenizer, pieces = Detokenizer(), []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        pieces.append(detokenizer.push(data[begin:end]))
        assert len(detokenizer.state()) <= 3
        detokenizer = Detokenizer.from_state(detokenizer.state())
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == data.decode("utf-8", "replace")
    for piece in pieces:
        piece.encode()


@settings(max_examples=300)
@given(token_lists(), STOPS)
@example([(100, b"xab"), (101, b"c"), (102, b"d")], ["bc", "abcd"])
@example([(100, b"ab"), (101, b""), (102, b"aba")], ["abab", "aba"])
@example([(100, b"aa"), (101, b"ab")], ["aab"])
@example([(100, b"abcd!")], ["bc", "bcd", "abcde"])
def test_a_pipe_gives_what_the_whole_sequence_gives(tokens: Tokens, stops: list[str]) -> None:
    """Ids, ids of the stop, text and the stop itself equal those of a plain function of the whole; nothing is lost."""
    pieces_of = dict(tokens)
    pipe, results = TextPipe([pieces_of.get(index, b"") for index in range(100 + len(tokens))], stops), []
    for token_id, _ in tokens:
        results.append(pipe.push(token_id))
        if pipe.match:
            break
    results.append(pipe.finish())
    ids = [token_id for piece in results for token_id in piece.token_ids]
    text = "".join(piece.text for piece in results)
    matched = (list(pipe.match.token_ids), pipe.match.stop) if pipe.match else ([], None)
    assert (ids, matched[0], text, matched[1]) == expected_of(tokens, stops)
    for piece in results:
        piece.text.encode()


@settings(max_examples=300)
@given(token_lists(), STOPS)
def test_only_what_might_begin_a_stop_is_held_back(tokens: Tokens, stops: list[str]) -> None:
    """Bytes before the longest end that might begin a stop are out at once; the others are the filter's state."""
    stop_filter, seen, released = StopFilter(stops), b"", b""
    ids: list[int] = []
    for token_id, data in tokens:
        new_ids, new_bytes = stop_filter.push(token_id, data)
        seen, released, ids = seen + data, released + new_bytes, ids + list(new_ids)
        if stop_filter.match:
            break
        cut = might_begin(seen, stops)
        assert released == seen[:cut]
        held = stop_filter.state()
        assert ids + [held_id for held_id, _ in held] == [token for token, _ in tokens[: len(ids) + len(held)]]
        assert b"".join(held_data for _, held_data in held) == seen[cut:]
        stop_filter = StopFilter.from_state(stops, held)
        assert stop_filter.state() == held


@given(token_lists(), STOPS, st.randoms(use_true_random=False))
def test_the_order_of_the_list_does_not_matter(tokens: Tokens, stops: list[str], random: object) -> None:
    """A list of stops is a set."""
    shuffled = sorted(stops, key=lambda _: random.random())  # type: ignore[attr-defined]
    outcomes = []
    for order in (stops, shuffled + stops):
        stop_filter, results = StopFilter(order), []
        for token_id, data in tokens:
            results.append(stop_filter.push(token_id, data))
            if stop_filter.match:
                break
        outcomes.append((results, stop_filter.finish(), stop_filter.match))
    assert outcomes[0] == outcomes[1]
