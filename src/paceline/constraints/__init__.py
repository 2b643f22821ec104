"""Constraints on generated text: which tokens may come next, for one choice. What vLLM calls structured outputs.

A `Constraint` is a protocol. `ConstraintCompiler` makes one of a JSON schema, a regular expression, a list of texts or a Lark
grammar, by llguidance, which is imported when it is first needed; `ThinkingConstraint` lets another one sleep while a model
thinks. `LogitsProcessors` are functions of a user's own that change logits. GBNF grammars are the native sampler's. Pure but
for llguidance's own threads; nothing here knows an engine.
"""

from paceline.constraints.compiler import ConstraintCompiler, check_constraint, first_violation, has_constraint
from paceline.constraints.constraint import Constraint, ConstraintFactory, TokenTable
from paceline.constraints.logits_processors import LogitsProcessor, LogitsProcessors, logits_processors_of
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
