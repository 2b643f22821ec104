"""llama-server's kinds of drafts as drafters, with the sizes that they have there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.named_object import NamedObject
from paceline.server.flags.flag import UNSET, Draft, on_one_line
from paceline.speculation.named_drafter import DRAFT_MODEL, drafter_parts


@dataclass(frozen=True, slots=True)
class SpecType:
    """One kind. drafter: its name here. sizes: of its options the flag's name behind `--spec-`, and llama-server's default."""

    drafter: str
    sizes: Mapping[str, tuple[str, int]]

    def aside(self, option: str) -> str:
        """Return where a size is stored that was given."""
        return f"aside.{self.sizes[option][0].replace('-', '_')}"


def _lookup(kind: str) -> SpecType:
    sizes = {"size_n": ("size-n", 12), "size_m": ("size-m", 48), "min_hits": ("min-hits", 1)}
    return SpecType("ngram", {option: (f"{kind}-{name}", default) for option, (name, default) in sizes.items()})


SPEC_TYPES: Final[Mapping[str, SpecType]] = {
    "ngram-simple": _lookup("ngram-simple"),
    "ngram-map-k": _lookup("ngram-map-k"),
    "ngram-mod": SpecType(
        "ngram-mod",
        {"size_n": ("ngram-mod-n-match", 24), "size_m": ("ngram-mod-n-max", 64), "min_m": ("ngram-mod-n-min", 48)},
    ),
    "ngram-cache": SpecType("ngram-cache", {}),
    "draft-simple": SpecType(DRAFT_MODEL, {}),
    "draft-mtp": SpecType("mtp", {}),
    "draft-eagle3": SpecType("eagle3", {}),
    "draft-dflash": SpecType("dflash", {}),
    "draft-dspark": SpecType("dflash", {}),
}
"""In the order in which they are asked: llama-server's, and a draft model last, as it costs most."""

HEADS: Final = ("draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")
"""Of these the kinds that draft with heads, for which -md names their file."""

_LOOKUP_CACHES: Final = ("lookup_cache_static", "lookup_cache_dynamic")

OTHERS: Final = ("ngram-map-k4v",)
"""What else it has, which is refused."""


def spec_type(draft: Draft, value: str, label: str) -> None:
    """Store kinds of drafts, apart by commas. Raises for a name that is none."""
    names = [name.strip() for name in value.split(",")]
    for name in names:
        validation.choice(label, name, ("none", *SPEC_TYPES))
    draft.put("aside.spec_type", UNSET if "none" in names else tuple(names), label)


def spec_default(draft: Draft, value: bool, label: str) -> None:
    """Store the kind that llama-server calls its default, beside others."""
    if value:
        draft.put("aside.spec_type", (*draft.get("aside.spec_type", ()), "ngram-mod"), label)


_DRAFT_OPTIONS: Final = (
    "p_min", "n_gpu_layers", "devices", "n_threads", "n_threads_batch", "type_k", "type_v", "tensor_overrides", "cpu_moe",
    "n_cpu_moe",
)  # fmt: skip


def resolve_draft_model(draft: Draft) -> None:
    """Store the draft model and its options; as in llama-server its kind of drafts is used where no other is named."""
    target, model = _draft_model(draft)
    types, speculation = draft.get("aside.spec_type"), draft.get("engine.speculation")
    given = [name for name in _DRAFT_OPTIONS if draft.get(f"aside.draft.{name}") is not None]
    if heads := [name for name in HEADS if name in (types or ())]:
        _check_heads(draft, heads, model)
        return
    if model is None:
        if types and "draft-simple" in types:
            raise InvalidParams(
                f"{draft.origins['aside.spec_type'].name} draft-simple needs a draft model; give -md or -hfd"
            )
        draft.notes += [
            f"{draft.origins[f'aside.draft.{name}'].name} has no effect without -md or -hfd, a draft model"
            for name in given
        ]
        return
    draft.origin = draft.origins[target]
    label = draft.origin.name
    if types and "draft-simple" not in types:
        draft.notes.append(f"{label} has no effect without draft-simple in --spec-type")
        return
    if types is None and speculation is None:
        draft.put("aside.spec_type", ("draft-simple",), label)
    elif speculation is not None and DRAFT_MODEL not in spec_names(speculation):
        raise InvalidParams(f"{label} and --speculation without {DRAFT_MODEL}: add it there, or leave one of them out")
    draft.put("engine.draft_model", model, label)
    if given:
        draft.put("engine.draft_options", {name: draft.get(f"aside.draft.{name}") for name in given}, label)


def _check_heads(draft: Draft, heads: list[str], model: str | None) -> None:
    """Raise what keeps draft heads from being used, and note options of a draft model that they have not."""
    label, types = draft.origins["aside.spec_type"].name, draft.get("aside.spec_type")
    if len(heads) > 1 or "draft-simple" in types:
        named = ", ".join([*heads, *(one for one in types if one == "draft-simple")])
        raise InvalidParams(f"{label} {named}: one of them can draft beside a model; leave the others out")
    if draft.get("aside.draft_repository") is not None:
        name = draft.origins["aside.draft_repository"].name
        raise InvalidParams(f"{name} names draft models, and {heads[0]} takes the file of its heads as -md")
    if model is None and heads[0] != "draft-mtp":
        raise InvalidParams(f"{label} {heads[0]} needs its file; give -md")
    draft.notes += [
        f"{draft.origins[f'aside.draft.{name}'].name} has no effect with {heads[0]}, whose heads compute as the model does"
        for name in _DRAFT_OPTIONS
        if name != "p_min" and draft.get(f"aside.draft.{name}") is not None
    ]


def _draft_model(draft: Draft) -> tuple[str, str | None]:
    """Return where the draft model was given, and its path or name."""
    path, repository = draft.get("aside.draft_path"), draft.get("aside.draft_repository")
    if path is not None and repository is not None:
        names = [draft.origins[f"aside.draft_{one}"].name for one in ("path", "repository")]
        raise InvalidParams(f"{names[0]} and {names[1]} name two draft models; give one of them")
    if repository is not None:
        return "aside.draft_repository", f"hf:{repository}"
    if path is not None and not draft.files.is_file(path):
        raise InvalidParams(
            f"{draft.origins['aside.draft_path'].name}: there is no file {on_one_line(path)}; -hfd takes draft models of the "
            "Hugging Face Hub"
        )
    return "aside.draft_path", None if path is None else str(path)


def resolve_spec_type(draft: Draft) -> None:
    """Make the drafters that llama-server's flags ask for, in its order; note which of them have no effect."""
    names = [name for name in SPEC_TYPES if name in (draft.get("aside.spec_type") or ())]
    draft.notes += [
        f"{draft.origins[kind.aside(option)].name} has no effect without --spec-type {other}"
        for other, kind in SPEC_TYPES.items()
        for option in kind.sizes
        if other not in names and draft.get(kind.aside(option)) is not None
    ]
    if "ngram-cache" not in names:
        draft.notes += [
            f"{draft.origins[f'aside.{name}'].name} has no effect without --spec-type ngram-cache"
            for name in _LOOKUP_CACHES
            if draft.get(f"aside.{name}") is not None
        ]
    if not names:
        if draft.get("engine.speculation") is None:
            draft.notes += [
                f"{draft.origins[target].name} has no effect without --spec-type or --speculation"
                for target in ("engine.max_draft", "engine.min_draft")
                if draft.get(target) is not None
            ]
        return
    draft.origin = draft.origins["aside.spec_type"]
    if draft.get("engine.speculation") is not None:
        raise InvalidParams(f"--speculation and {draft.origin.name} both name drafters; give one of them")
    drafters = [_drafter(draft, SPEC_TYPES[name]) for name in names]
    draft.put("engine.speculation", drafters if len(drafters) > 1 else drafters[0], draft.origin.name)


def _drafter(draft: Draft, kind: SpecType) -> dict[str, Any]:
    given = {option: draft.get(kind.aside(option)) for option in kind.sizes}
    options = {
        option: default if given[option] is None else given[option] for option, (_, default) in kind.sizes.items()
    }
    if options.get("min_m", 0) > options.get("size_m", 0):
        raise InvalidParams(
            f"--spec-ngram-mod-n-min {options['min_m']} is more than --spec-ngram-mod-n-max {options['size_m']}, so that "
            "nothing would ever be proposed; make it less"
        )
    return {"name": kind.drafter, **options, **_heads_options(draft, kind), **_lookup_files(draft, kind)}


def _lookup_files(draft: Draft, kind: SpecType) -> dict[str, str]:
    if kind is not SPEC_TYPES["ngram-cache"]:
        return {}
    paths = {name: draft.get(f"aside.{name}") for name in _LOOKUP_CACHES}
    return {name: str(path) for name, path in paths.items() if path is not None}


def _heads_options(draft: Draft, kind: SpecType) -> dict[str, Any]:
    if kind not in [SPEC_TYPES[name] for name in HEADS]:
        return {}
    path, p_min = draft.get("aside.draft_path"), draft.get("aside.draft.p_min")
    options = {"model": None if path is None else str(path), "p_min": p_min}
    return {name: value for name, value in options.items() if value is not None}


def spec_type_names(speculation: Any) -> str:
    """Return the kinds of drafts of the option `speculation`, apart by commas, by llama-server's names where it has them."""
    if speculation is None:
        return "none"
    names = spec_names(speculation)
    known = {kind.drafter: name for name, kind in reversed(list(SPEC_TYPES.items()))}
    return ",".join(known.get(name, name) for name in names)


def spec_names(speculation: Any) -> list[str]:
    """Return the names of the drafters of the option `speculation`."""
    return [
        NamedObject.parse("speculation", one).name if isinstance(one, (str, Mapping)) else type(one).__name__
        for one in drafter_parts(speculation)
    ]
