"""From a caller's value to a strategy: names, `module:attr`, entry points, objects; and refusals."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling import strategies
from paceline.scheduling.strategies import (
    ENTRY_POINT_GROUP,
    Balanced,
    BatchStrategy,
    DecodeMaximal,
    Paced,
    PrefillPriority,
    resolve_strategy,
)

OWN = """
from typing import Literal, Optional

class Own:
    def plan(self, view, budget):
        return []

class Needs(Own):
    def __init__(self, size):
        self.size = size

class Typed(Own):
    def __init__(
        self, *, count: int, rate: float, fine: bool, word: str, mode: Literal["fast", "exact"] = "exact",
        limit: Optional[int] = 5, either: int | float | None = None, any=None
    ):
        self.given = dict(
            count=count, rate=rate, fine=fine, word=word, mode=mode, limit=limit, either=either, any=any
        )

class Any_(Own):
    def __init__(self, **given):
        self.given = given

class Outer:
    ready = Own()

nothing = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_strategies.py").write_text(OWN)
    (tmp_path / "broken_strategies.py").write_text("raise RuntimeError('no such luck')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_strategies", raising=False)
    return "own_strategies"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("balanced", Balanced),
        ("decode_maximal", DecodeMaximal),
        ("paced", Paced),
        ("prefill_priority", PrefillPriority),
    ],
)
def test_a_name_is_a_shipped_strategy(name: str, kind: type) -> None:
    """Each of the four names gives an object of its class, which is a `BatchStrategy`."""
    strategy = resolve_strategy(name)
    assert type(strategy) is kind and isinstance(strategy, BatchStrategy)


def test_an_object_is_returned_as_it_is() -> None:
    """A strategy itself is not copied."""
    strategy = Paced(least_tokens=4)
    assert resolve_strategy(strategy) is strategy


def test_a_module_and_attribute_name_a_class_or_an_object(own_module: str) -> None:
    """A class is called without arguments, an object is taken as it is, and the attribute may have dots."""
    assert type(resolve_strategy(f"{own_module}:Own")).__name__ == "Own"
    ready = resolve_strategy(f"{own_module}:Outer.ready")
    assert ready is sys.modules[own_module].Outer.ready


def test_an_entry_point_names_a_strategy(own_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package announces one under the group; the shipped names come first."""
    announced = [
        EntryPoint("theirs", f"{own_module}:Own", ENTRY_POINT_GROUP),
        EntryPoint("paced", f"{own_module}:Own", ENTRY_POINT_GROUP),
    ]

    def entry_points(*, group: str) -> EntryPoints:
        return EntryPoints(announced).select(group=group)

    monkeypatch.setattr(strategies, "entry_points", entry_points)
    assert type(resolve_strategy("theirs")).__name__ == "Own"
    assert type(resolve_strategy("paced")) is Paced
    with pytest.raises(InvalidParams, match="did you mean 'theirs'"):
        resolve_strategy("their")


def test_the_error_for_an_unknown_name_has_the_nearest_and_the_ways_out() -> None:
    """The error shows the names, the nearest of them, and how to give one's own."""
    with pytest.raises(
        InvalidParams, match=r"strategy must be one of .* not 'pacd'; did you mean 'paced'\?.*module:attr"
    ):
        resolve_strategy("pacd")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:Own", "ModuleNotFoundError"),
        ("own_strategies:Missing", "AttributeError"),
        ("own_strategies:", "must be of the form 'module:attr'"),
        (":Own", "must be of the form 'module:attr'"),
        ("own_strategies:Needs", "size"),
        ("broken_strategies:Own", "RuntimeError: no such luck"),
    ],
)
def test_values_that_cannot_be_loaded_are_named_with_the_reason(own_module: str, path: str, reason: str) -> None:
    """Whatever an import or a constructor raises comes with the strategy's name."""
    with pytest.raises(InvalidParams, match=rf"^strategy '{path}' cannot be loaded: .*{reason}") as caught:
        resolve_strategy(path)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("value", [None, 3, True, object(), b"paced"])
def test_an_object_without_a_plan_is_no_strategy(value: Any) -> None:
    """The error is a TypeError and names the missing part."""
    with pytest.raises(InvalidType, match="method plan"):
        resolve_strategy(value)


def test_a_module_may_name_no_strategy(own_module: str) -> None:
    """The object of `module:attr` is checked like an object, and named."""
    with pytest.raises(InvalidType, match="'own_strategies:nothing' must be an object with a method plan"):
        resolve_strategy(f"{own_module}:nothing")


def test_a_class_instead_of_an_object_is_refused_with_the_way_out() -> None:
    """A class has a plan too, but nothing to call it on."""
    with pytest.raises(InvalidType, match=r"pass Paced\(\)"):
        resolve_strategy(Paced)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        "paced:patience=4,stretch=1.5",
        "paced:patience = 4 , stretch = 1.5",
        {"name": "paced", "patience": 4, "stretch": 1.5},
    ],
)
def test_a_name_takes_options_as_text_or_as_a_mapping(value: Any) -> None:
    """They are the arguments of the class; unnamed options keep their defaults."""
    strategy = resolve_strategy(value)
    assert isinstance(strategy, Paced)
    assert (strategy._patience, strategy._stretch, strategy._least_tokens) == (4, 1.5, 16)


def test_options_are_read_by_the_types_of_the_class(own_module: str) -> None:
    """Integers, numbers, booleans, texts, choices and their unions; without an annotation by the look of the text."""
    text = "count=3,rate=2,fine=off,word=7,mode=fast,limit=none,either=4.5,any=1e3"
    typed = {
        "count": 3,
        "rate": 2,
        "fine": False,
        "word": "7",
        "mode": "fast",
        "limit": None,
        "either": 4.5,
        "any": 1e3,
    }
    wanted = {**typed, "rate": 2.0}
    for value in (f"{own_module}:Typed:{text}", {"name": f"{own_module}:Typed", **typed}):
        given = resolve_strategy(value).given  # type: ignore[attr-defined]
        assert given == wanted
        assert {name: type(each) for name, each in given.items()} == {name: type(each) for name, each in wanted.items()}
    assert resolve_strategy(f"{own_module}:Any_:a=1,b=x").given == {"a": 1, "b": "x"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("paced:patienc=4", r"strategy 'paced': unknown option 'patienc'; did you mean 'patience'\?"),
        (
            {"name": "paced", "zzz": 4},
            "unknown option 'zzz'; known are efficiency, least_tokens, patience, prefill_share, stretch",
        ),
        ("balanced:patience=4", "strategy 'balanced' takes no options, not 'patience'"),
        ("paced:patience=4.5", "strategy 'paced': patience must be an integer, not '4.5'"),
        ("paced:patience=", "strategy 'paced': patience must be an integer, not ''"),
        ("paced:patience=0", "strategy 'paced': patience must be an integer >= 1, not 0"),
        ("paced:stretch=nan", "strategy 'paced': stretch must be a finite number, not 'nan'"),
        ({"name": "paced", "patience": True}, "strategy 'paced': patience must be an integer, not True"),
        ({"name": "paced", "patience": "4"}, "strategy 'paced': patience must be an integer, not '4'"),
        ("paced:patience=4,patience=5", "strategy names the option 'patience' twice"),
        ("paced:patience=4,stretch", "strategy must be NAME:KEY=VALUE"),
        ("paced:patience", "strategy 'paced' takes options as paced:KEY=VALUE,KEY=VALUE, not 'patience'"),
        ({"patience": 4}, "strategy is a mapping without the key 'name'"),
        ({"name": 4}, r"strategy\['name'\] must be a str, not 4"),
        ("own_strategies:Outer.ready:a=1", "leads to a Own that is made already, and takes no options"),
        ("own_strategies:Typed:mode=slow", "mode must be one of 'fast', 'exact', not 'slow'"),
        ("own_strategies:Typed:fine=yes", "fine must be True or False, not 'yes'"),
        ("own_strategies:Typed:either=x", "either must be a finite number, not 'x'"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_its_strategy(own_module: str, value: Any, message: str) -> None:
    """The option, its value and the allowed values; afterwards the right value works."""
    with pytest.raises(InvalidParams, match=message):
        resolve_strategy(value)
    assert isinstance(resolve_strategy("paced:patience=4"), Paced)


def test_a_name_is_checked_without_importing_what_is_not_shipped() -> None:
    """Options of shipped strategies are checked whole; of others, the syntax."""
    strategies.check_strategy_name("no_such_module:Own:size=3")
    strategies.check_strategy_name(Paced())
    strategies.check_strategy_name("paced:patience=4")
    for value in ("paced:patienc=4", "no_such_module:Own:size=3,"):
        with pytest.raises(InvalidParams):
            strategies.check_strategy_name(value)


def test_shipped_strategies_are_found_without_the_compiled_core() -> None:
    """A name of theirs is resolved without NumPy and llama.cpp."""
    code = (
        "import sys; from paceline.scheduling.strategies import resolve_strategy; resolve_strategy('balanced');"
        "print(sorted({'numpy', 'paceline._native'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
