"""A model whose weights are in another process: only its vocabulary is loaded here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.runtime.model import MemoryClass, Model

FACTS = (
    "desc",
    "size_bytes",
    "n_params",
    "n_ctx_train",
    "n_embd",
    "n_embd_out",
    "n_layer",
    "n_head",
    "n_head_kv",
    "n_swa",
    "n_cls_out",
    "class_labels",
    "ftype",
    "is_recurrent",
    "is_hybrid",
    "is_diffusion",
    "has_encoder",
    "has_decoder",
)


def model_facts(model: Model) -> dict[str, Any]:
    """Return the facts that a `RemoteModel` needs, as plain values."""
    facts = {name: getattr(model, name) for name in FACTS}
    return facts | {"memory_class": model.memory_class, "modalities": sorted(model.modalities)}


def _fact(name: str) -> Any:
    def fact(self: RemoteModel) -> Any:
        return self._facts[name]

    return property(fact, doc=getattr(Model, name).__doc__)


class RemoteModel(Model):
    """A `Model` loaded with vocab_only: tokenizer, templates and metadata. The other facts come from `describe`.

    Contexts and adapters cannot be made from it.
    """

    _facts: Mapping[str, Any]

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Set the facts that `model_facts` returned in the other process; call it once, before they are read."""
        self._modalities = frozenset(facts.get("modalities", ("text",)))
        self._facts = {name: tuple(fact) if isinstance(fact, list) else fact for name, fact in facts.items()}

    @property
    def memory_class(self) -> MemoryClass:
        """The kind of memory that the model keeps of a sequence."""
        return MemoryClass(self._facts["memory_class"])


for _name in FACTS:
    setattr(RemoteModel, _name, _fact(_name))
