"""Constraints on generated text: which tokens may come next, for one choice. vLLM calls them structured outputs.

constraint: the protocol `Constraint`, and logits processors of a user's own. compiler: makes a constraint of a JSON schema, a
regular expression, a list of texts or a Lark grammar, by llguidance, which is imported when it is first needed.
grammar_constraint: follows a compiled grammar. thinking: lets another constraint sleep while a model thinks. schema_walk: walks
of a JSON schema; llguidance_schemas and gbnf_schemas: the keywords that llguidance and llama.cpp's grammars enforce.

GBNF grammars are followed by the native sampler. Pure but for llguidance's own threads; nothing here knows an engine.
"""

from paceline.constraints.compiler import ConstraintCompiler, check_constraint, first_violation, has_constraint
from paceline.constraints.constraint import (
    Constraint,
    ConstraintFactory,
    LogitsProcessor,
    LogitsProcessors,
    TokenTable,
    logits_processors_of,
)
from paceline.constraints.thinking import ThinkingConstraint

__all__ = [
    "Constraint",
    "ConstraintCompiler",
    "ConstraintFactory",
    "LogitsProcessor",
    "LogitsProcessors",
    "ThinkingConstraint",
    "TokenTable",
    "check_constraint",
    "first_violation",
    "has_constraint",
    "logits_processors_of",
]
