"""Which model a replica has, and with which options: what travels to each machine, where its files are found."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.engine.engine_factory import local_files, local_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model as `LLM` takes it: a path, a name that the hub knows, or None for the demo model; options of its engine."""

    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    offline: bool = False
    hf_token: str | None = field(default=None, repr=False)

    def files(self, cancel: threading.Event) -> Any:
        """Return the file or files of the model on this machine, downloaded where they are not there; None: the demo model.

        Raises as `LLM`, and `Aborted` after `cancel` was set.
        """
        return local_files(self.model, {"cancel": cancel}, offline=self.offline, hf_token=self.hf_token)

    def found(self, trace_name: str = "") -> tuple[Any, dict[str, Any]]:
        """Return the file or files on this machine, downloaded where they are not there, and the options with theirs.

        trace_name: put into the name of the trace's file, as each replica writes its own. Raises as `LLM`.
        """
        source: dict[str, Any] = {"offline": self.offline, "hf_token": self.hf_token}
        given = {"isolation": "process", **self.options}
        options = dict(local_options(given, **source))
        if trace_name and options.get("trace") is not None:
            path = Path(options["trace"])
            options["trace"] = path.with_name(f"{path.stem}-{trace_name}{path.suffix}")
        return local_files(self.model, options, **source), options
