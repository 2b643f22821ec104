"""What a routed call says of its request: the first argument of the call, for the request router."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster import PromptBlocks


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt, and the replicas that are only chosen where there are no others."""

    prompt: PromptBlocks
    avoid: frozenset[str] = frozenset()
