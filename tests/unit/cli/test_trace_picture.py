"""The picture of a trace: well-formed, one cell for each work of a slot, bounded in size, safe against any name."""

from __future__ import annotations

import itertools
from collections import Counter
from xml.etree import ElementTree as ET

import pytest
from tests.unit.cli.test_trace_layout import drafted, tick
from tests.unit.observability.recorded import Recorded, busy, two_requests
from tests.unit.observability.simulated import Simulation

from paceline.cli.trace_picture import LEFT, RIGHT, axis_ticks, draw, fit
from paceline.errors import InvalidParams
from paceline.observability.trace_events import Trace
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord
from paceline.streaming.chunk import FinishReason, Usage

SVG = "{http://www.w3.org/2000/svg}"


def group(picture: str, look: str) -> ET.Element:
    (found,) = [each for each in ET.fromstring(picture).iter(f"{SVG}g") if each.get("class") == look]
    return found


def cells(picture: str) -> list[ET.Element]:
    return list(group(picture, "cells"))


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(picture).iter(f"{SVG}text")]


def test_a_known_trace_has_a_cell_for_every_row() -> None:
    """Three of prefill and three of decode, in four columns and two lanes."""
    found = cells(draw(two_requests()))
    assert Counter(str(cell.get("class")).split()[0] for cell in found) == {"prefill": 3, "decode": 3}
    assert len({cell.get("x") for cell in found}) == 4
    assert len({cell.get("y") for cell in found}) == 2


def test_more_tokens_have_more_colour() -> None:
    """The most tokens of each sort have full opacity."""
    looks = [cell.get("class") for cell in cells(draw(two_requests()))]
    assert looks == ["prefill l4", "prefill l4", "prefill l3", "decode l4", "decode l4", "decode l4"]


def test_cells_lie_where_their_ticks_do() -> None:
    """Columns follow the time from the left edge to the right, and do not overlap."""
    found = [
        cell
        for cell in cells(draw(two_requests(), width=1000))
        if cell.get("y") == cells(draw(two_requests()))[0].get("y")
    ]
    edges = [(float(cell.get("x", 0)), float(cell.get("x", 0)) + float(cell.get("width", 0))) for cell in found]
    assert edges[0][0] == LEFT
    assert edges[-1][1] == pytest.approx(1000 - RIGHT, abs=1)
    for (_, end), (begin, _) in itertools.pairwise(edges):
        assert begin - 1 <= end <= begin


def test_names_of_requests_are_escaped() -> None:
    """Markup in a name is text, and characters that XML does not allow are replaced."""
    picture = draw(two_requests(), title="a < b & \x00c")
    assert "<short>" not in picture and "&lt;short&gt;" in picture
    assert "a < b & \ufffdc" in texts(picture)
    (story,) = [each.text for each in group(picture, "stays").iter(f"{SVG}title") if "short" in str(each.text)]
    assert str(story).startswith("#1 <short> & \ufffd\ud7ff, from 0.000 s, to ")
    assert str(story).endswith("10 prompt tokens, 2 generated, length")


def test_what_xml_cannot_carry_is_replaced() -> None:
    """One replacement for each character, all others stay."""
    assert fit("a\x00\x1b\ufffe\ud800b\tc\n\U0001f600") == "a\ufffd\ufffd\ufffd\ufffdb\tc\n\U0001f600"


def test_every_way_to_end_has_its_mark() -> None:
    """Every ending has its mark, preemptions included."""
    marks = Counter(each.get("class") for each in group(draw(busy(30)), "marks"))
    assert marks["preempted"] > 0
    assert marks["ended"] == marks["cancelled"] == marks["failed"] == 10


def test_embedding_shows_only_where_there_was_some() -> None:
    """Embedding adds a lane, a colour and an entry of the legend."""
    with_it, without = draw(busy(30)), draw(two_requests())
    assert "embed" in texts(with_it) and "embedding" in texts(with_it)
    assert "embed" not in texts(without) and "embedding" not in texts(without)
    assert any(cell.get("class") == "embed l4" for cell in cells(with_it))


def test_an_end_without_a_slot_is_marked_where_it_waited() -> None:
    """A request for vectors in their lane, another one in the queue's strip."""
    recorded = Recorded()
    for key, kind in ((1, "generate"), (2, "embed")):
        recorded.request_queued(
            RequestRecord(
                key=key,
                request_id=None,
                kind=kind,  # type: ignore[arg-type]
                prompt_tokens=5,
                num_choices=1,
                max_tokens=None,
                priority=0,
                submitted_s=0.0,
            )
        )
    simulation = Simulation(recorded)
    simulation.embed(1, 5)
    for key in (1, 2):
        reason = (FinishReason.CANCELLED, FinishReason.STOP)[key - 1]
        recorded.request_ended(EndRecord(key=key, reason=reason, usage=Usage(), now_s=simulation.now_s))
    picture = draw(recorded.trace())
    ways = {
        str(each.get("class")): float(str(each.get("d")).split()[1].split("m")[0]) for each in group(picture, "marks")
    }
    (cell,) = cells(picture)
    assert float(cell.get("y", 0)) < ways["ended"] < float(cell.get("y", 0)) + 14 < ways["cancelled"]


def test_the_queue_is_drawn_up_to_its_peak() -> None:
    """The peak has its number; without a queue the strip is empty."""
    trace = busy(30, num_slots=2)
    peak = max(event.num_waiting for event in trace.events if isinstance(event, TickRecord))
    assert peak > 1 and str(peak) in texts(draw(trace))
    assert [each.get("class") for each in group(draw(trace), "queue")][-1] == "waiting"
    assert len(group(draw(two_requests()), "queue")) == 2


def test_ten_thousand_ticks_stay_within_bounds() -> None:
    """There are no more cells than pixels can show."""
    trace = busy(400, num_wanted=150)
    num_ticks = sum(isinstance(event, TickRecord) for event in trace.events)
    picture = draw(trace, width=600)
    assert num_ticks > 10_000
    assert len({cell.get("x") for cell in cells(picture)}) <= 600
    assert len(cells(picture)) <= 600 * (4 * 2 + 1)
    assert f"{num_ticks:,} ticks" in picture


def test_many_slots_leave_no_room_for_names() -> None:
    """Names are drawn in no stay; tooltips have them."""
    picture = draw(busy(30, num_slots=20))
    assert not any(text.startswith("#") for text in texts(picture))
    assert len(list(group(picture, "stays").iter(f"{SVG}title"))) > 29


def test_an_empty_trace_has_a_picture() -> None:
    """The picture of an empty trace has a summary of zeros."""
    assert any("0 ticks" in text for text in texts(draw(Trace(()))))


def test_every_colour_has_a_dark_style() -> None:
    """Every colour has a counterpart in the dark style, apart from those that need none."""
    style = ET.fromstring(draw(two_requests())).findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for look in ("text", ".paper", ".soft", ".grid", ".lane", ".stay", ".prefill", ".decode", ".embed", ".failed"):
        assert f"{look} {{" in light and f"{look} {{" in dark


@pytest.mark.parametrize("width", [399, 20_001, 800.0, True])
def test_a_width_out_of_range_is_refused(width: int) -> None:
    """The message has the option's name."""
    with pytest.raises(InvalidParams, match="width must be"):
        draw(Trace(()), width=width)


@pytest.mark.parametrize(
    ("span_s", "first", "last"),
    [(0.0512, "0.000 s", "0.050 s"), (1.0, "0.0 s", "1.0 s"), (99.2, "0 s", "90 s"), (7200.0, "0 s", "7000 s")],
)
def test_the_axis_has_round_times(span_s: float, first: str, last: str) -> None:
    """Labels have as many decimals as their step needs."""
    found = [label for _, label in axis_ticks(span_s)]
    assert (found[0], found[-1]) == (first, last)
    assert 5 <= len(found) <= 13


def test_drafts_are_bars_in_their_lanes() -> None:
    """Accepted ones at the bottom, the others above them; the most drafts nearly fill a lane. Without drafts there are none."""
    ticks = [tick(0.0, drafted(0, 4, 3)), tick(0.5, drafted(0, 2, 1))]
    picture = draw(Trace(tuple(ticks)))
    bars = [
        (str(bar.get("class")), *(float(bar.get(name, 0)) for name in ("y", "height")), bar.findtext(f"{SVG}title"))
        for bar in group(picture, "bursts")
    ]
    assert [(look, title) for look, _, _, title in bars] == [
        ("lost", None), ("won", "2 of 4 drafts accepted"), ("lost", None), ("won", "0 of 2 drafts accepted"),
    ]  # fmt: skip
    lane = max(float(cell.get("height", 0)) for cell in cells(picture))
    (_, top, lost, _), (_, middle, won, _), (_, _, second, _), (_, bottom, none, _) = bars
    assert (lost, won, second, none) == (pytest.approx(0.45 * lane),) * 3 + (0,)
    assert top + lost == pytest.approx(middle) and middle + won == pytest.approx(bottom)
    assert "accepted drafts" in texts(picture)
    assert "accepted drafts" not in texts(draw(two_requests()))
