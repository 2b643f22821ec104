"""Write the TypedDicts of `src/paceline/keywords.py` from the records and tables that define the options.

Run it after an option was added or changed: `python tools/write_keywords.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from paceline.chat_client.chat_arguments import _MEANINGLESS
from paceline.config import EngineConfig
from paceline.engine.arguments import (
    _DERIVED,
    _EMBEDDING_OPTIONS,
    _MODEL_NAMES,
    _PREFIX_OPTIONS,
    _READING_NAMES,
    _RERANKING_OPTIONS,
    SCORING_OPTIONS,
)
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.runtime import Model
from paceline.runtime.context_options import ContextOptions
from paceline.runtime.embedder import RESERVED

TARGET = Path(__file__).parent.parent / "src/paceline/keywords.py"
MARK = "# ---- written by `python tools/write_keywords.py`; do not edit\n"

_WIDER = {"int": "Int", "float": "Float", "tuple": "Sequence", "Any": "object"}


def with_types(module: str) -> str:
    """Return the text of the module with the TypedDicts that the options have now."""
    head, mark, _ = module.partition(MARK)
    if not mark:
        raise ValueError(f"{TARGET.name} has lost the line {MARK!r}")
    return head + mark + "".join(f"\n\n{text}" for text in _typed_dicts())


def _typed_dicts() -> list[str]:
    sampling, request, config = _options(SamplingParams), _options(RequestOptions), _options(EngineConfig)
    context, model = _options(ContextOptions), _options(Model.load)
    plain = sampling.keys() - set(_MEANINGLESS) - {name for name, hint in sampling.items() if _names_record(hint)}
    collected = request.keys() - set(_READING_NAMES)
    of_chat = collected - {*_MEANINGLESS, "truncate"}
    objects = {name for name, hint in config.items() if hint == "object"}
    of_engine = context.keys() - _DERIVED
    shared = of_engine - RESERVED
    return [
        _typed_dict(
            "PlainSamplingKeywords",
            "Fields of `SamplingParams`, but for those of `params.SamplingKeywords`.",
            sampling,
            plain,
        ),
        _typed_dict("ChatRequestKeywords", "Fields of `RequestOptions` that a chat takes.", request, of_chat),
        _typed_dict(
            "GenerateRequestKeywords(ChatRequestKeywords)",
            "Fields of `RequestOptions` that a completion takes.",
            request,
            collected - of_chat,
        ),
        _typed_dict(
            "ReadingKeywords", "Fields of `RequestOptions` that concern streams.", request, set(_READING_NAMES)
        ),
        _typed_dict("RequestKeywords(GenerateRequestKeywords, ReadingKeywords)", "Fields of `RequestOptions`."),
        _typed_dict("RerankKeywords", "Options of reranking.", request, _RERANKING_OPTIONS),
        _typed_dict(
            "EmbedKeywords(RerankKeywords)",
            "Options of embedding and classifying.",
            request,
            _EMBEDDING_OPTIONS - _RERANKING_OPTIONS,
        ),
        _typed_dict("ScoreKeywords", "Options of scoring choices.", request, SCORING_OPTIONS),
        _typed_dict("PrefixKeywords", "Options of saving and loading prefixes.", request, _PREFIX_OPTIONS),
        _typed_dict(
            "EngineKeywords", "Fields of `EngineConfig` that take no objects.", config, config.keys() - objects
        ),
        _typed_dict("EngineConfigKeywords(EngineKeywords)", "Fields of `EngineConfig`.", config, objects),
        _typed_dict("ModelKeywords", "Options of `Model.load` that `LLM` takes.", model, _MODEL_NAMES),
        _typed_dict("SharedContextKeywords", "Options of a context that `LLM` and `Embedder` take.", context, shared),
        _typed_dict(
            "EngineContextKeywords(SharedContextKeywords)",
            "Options of a context that `LLM` takes.",
            context,
            of_engine - shared,
        ),
        _typed_dict(
            "EmbedderKeywords(SharedContextKeywords)",
            "Options of a context that `Embedder` takes.",
            context,
            context.keys() - RESERVED - shared,
        ),
        _typed_dict(
            "ContextKeywords(EngineContextKeywords)",
            "Fields of `ContextOptions`.",
            context,
            context.keys() - of_engine,
        ),
    ]


def _typed_dict(name: str, about: str, hints: Mapping[str, str] | None = None, names: Collection[str] = ()) -> str:
    """Return the source of a TypedDict; its keywords have the order of `hints`."""
    own, _, bases = name.rstrip(")").partition("(")
    lines = [f"class {own}({bases or 'TypedDict'}, total=False):", f'    """{about}"""']
    fields = [f"    {field}: {hint}" for field, hint in (hints or {}).items() if field in names]
    return "\n".join([*lines, *([""] if fields else []), *fields]) + "\n"


def _options(source: Any) -> dict[str, str]:
    """Return the accepted type of each field of a record, or of each keyword of a function."""
    if dataclasses.is_dataclass(source):
        hints = {field.name: field.type for field in dataclasses.fields(source)}
        module = sys.modules[source.__module__]
    else:
        parameters = inspect.signature(source).parameters.values()
        hints = {
            parameter.name: parameter.annotation for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        }
        module = sys.modules[source.__module__]
    return {name: _accepted(str(hint), vars(module)) for name, hint in hints.items()}


def _accepted(hint: str, names: Mapping[str, Any]) -> str:
    """Return the types that an option of this type takes: NumPy's numbers, sequences for tuples, and None.

    names: of the module that has the annotation.
    """
    wider = ast.unparse(_Widening(names).visit(ast.parse(hint, mode="eval").body)).replace("'", '"')
    return wider if wider == "object" or "None" in wider.split(" | ") else f"{wider} | None"


class _Widening(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._names.get(node.id)
        if get_origin(value) is Literal:
            return ast.parse(f"Literal[{', '.join(map(repr, get_args(value)))}]", mode="eval").body
        return ast.Name(_WIDER.get(node.id, node.id))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        kind = ast.unparse(node.value)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        match kind, items:
            case "Annotated", [_, accepted]:
                return accepted
            case "tuple", [item, ast.Constant()]:  # tuple[X, ...]
                return ast.Subscript(ast.Name("Sequence"), self.visit(item))
            case "Mapping", [key, value]:  # whose keys are invariant
                return ast.Subscript(node.value, ast.Tuple([key, self.visit(value)]))
            case "tuple" | "Sequence", _:
                wider = [self.visit(item) for item in items]
                return ast.Subscript(node.value, ast.Tuple(wider) if len(wider) > 1 else wider[0])
        return node


def _names_record(hint: str) -> bool:
    """Return whether a type has a record of the module of `SamplingParams`, which `keywords` does not import."""
    names = {node.id for node in ast.walk(ast.parse(hint)) if isinstance(node, ast.Name)}
    own = vars(sys.modules[SamplingParams.__module__])
    return any(dataclasses.is_dataclass(own.get(name)) for name in names)


if __name__ == "__main__":
    TARGET.write_text(with_types(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
