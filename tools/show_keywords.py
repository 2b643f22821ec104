"""An extension of griffe: constructors in the API reference show their keywords, with defaults, in place of `**options`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class ShowKeywords(griffe.Extension):
    """Replaces the parameters of each constructor that takes `**options: Unpack[...]` by the parameters that `help` shows."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace the parameters of the constructor of a class."""
        constructor = cls.members.get("__init__")
        if not isinstance(constructor, griffe.Function) or not _takes_keywords(constructor):
            return
        if constructor.docstring is not None:
            constructor.docstring.parsed  # noqa: B018 - now, while the signature has the `**options` that it documents
        shown = inspect.signature(getattr(importlib.import_module(cls.module.path), cls.name)).parameters
        keywords = [
            griffe.Parameter(
                name,
                annotation=parameter.annotation,
                kind=griffe.ParameterKind.keyword_only,
                default=repr(parameter.default),
            )
            for name, parameter in shown.items()
            if name not in constructor.parameters
        ]
        constructor.parameters = griffe.Parameters(*list(constructor.parameters)[:-1], *keywords)


def _takes_keywords(function: griffe.Function) -> bool:
    parameters = list(function.parameters)
    return bool(parameters) and str(parameters[-1].annotation).startswith("Unpack[")
