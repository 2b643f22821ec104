"""The spellings of constraints in the bodies of requests: OpenAI's response_format, vLLM's structured_outputs and guided_*.

Pure; any thread. Constraints are compiled with the samplers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline import validation
from paceline.constraints.json_schema_rules import relaxed_schema
from paceline.errors import InvalidParams, InvalidType
from paceline.params import SamplingParams
from paceline.server.dialects.request_body import FieldRules, check_fields

CONSTRAINTS = ("grammar", "json_schema", "regex", "choice", "lark")
"""Fields of `SamplingParams` that a body may set."""

NO_CONSTRAINT: tuple[Any, ...] = (None, "", [], ())
"""Values of these fields with which they constrain nothing: clients send fields that their users left blank."""

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older names, and those of `structured_outputs`."""

_FIELDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_NARROWING = ("uniqueItems", "propertyNames", "format")
_MAX_WARNINGS = 10
_KINDS = (*_FIELDS, "json_object")
_COMPACT = "disable_any_whitespace"
_STRUCTURED = FieldRules(
    without_effect=("disable_fallback", "disable_additional_properties", "whitespace_pattern"),
    unsupported={"structural_tag": f"use one of {', '.join(_KINDS)}"},
)
_FORMAT = ("type", "json_schema", "schema")
_DESCRIBED = ("name", "description", "schema", "strict")


def response_format_changes(
    response_format: Mapping[str, Any] | None, warnings: list[str], *, strict: bool
) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` for OpenAI's response_format; none for text.

    warnings: takes the warnings about unknown members. Raises `InvalidParams`, and `ApiException` for unknown members if strict.
    """
    if response_format is None:
        return {}
    warnings += check_fields(response_format, _FORMAT, place="response_format.", strict=strict)
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": response_format.get("schema") or {"type": "object"}}
    if kind != "json_schema":
        raise InvalidParams(f'response_format.type must be "text", "json_object" or "json_schema", not {kind!r:.80}')
    described = response_format.get("json_schema")
    if described is None:  # llama-server's examples have it here
        schema = response_format.get("schema")
    else:
        schema = described.get("schema") if isinstance(described, Mapping) else None
    if isinstance(described, Mapping):
        warnings += check_fields(described, _DESCRIBED, place="response_format.json_schema.", strict=strict)
    if schema is None:
        raise InvalidParams("response_format.json_schema.schema must be a JSON schema")
    return {"json_schema": schema}


def structured_output_changes(given: Mapping[str, Any], warnings: list[str], *, strict: bool) -> dict[str, Any]:
    """Return the keywords of `SamplingParams` for vLLM's structured_outputs and guided_* among the fields of a body.

    warnings: takes the warnings about unknown members. Raises `InvalidParams` for more than one constraint, and
    `ApiException` for a constraint that is not supported, or for unknown members if strict.
    """
    found: dict[str, Any] = {}
    options = given.get("structured_outputs")
    if options is not None:
        if not isinstance(options, Mapping):
            raise InvalidType(f"structured_outputs must be an object, not {type(options).__name__}")
        known = (*_KINDS, _COMPACT)
        warnings += check_fields(options, known, _STRUCTURED, place="structured_outputs.", strict=strict)
        found |= {f"structured_outputs.{name}": options[name] for name in _KINDS if name in options}
    found |= {name: given[name] for name in GUIDED if given.get(name) is not None}
    found = {name: value for name, value in found.items() if value not in (*NO_CONSTRAINT, False)}
    if len(found) > 1:
        raise InvalidParams(f"{' and '.join(found)} exclude each other: set one of them")
    for name, value in found.items():
        kind = GUIDED.get(name, name.removeprefix("structured_outputs."))
        if kind == "json_object":
            return {"json_schema": {"type": "object"}}
        return {_FIELDS[kind]: value}
    return {}


def compact_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword of `SamplingParams` for `disable_any_whitespace` within vLLM's structured_outputs; none without it."""
    options = given.get("structured_outputs")
    wanted = options.get(_COMPACT) if isinstance(options, Mapping) else None
    return {} if wanted is None else {_COMPACT: validation.boolean(f"structured_outputs.{_COMPACT}", wanted)}


def enforceable(field: str, params: SamplingParams) -> tuple[SamplingParams, list[str]]:
    """Return params without the keywords of `_NARROWING` that cannot be enforced, and a warning for each left-out keyword.

    Pydantic writes these keywords for types of Python. Other keywords are refused when the schema is compiled.

    Args:
        field: The field of the body that has the schema.
        params: The params.

    Raises:
        GrammarError: A keyword has a value of the wrong type.
    """
    schema = json.loads(params.json_schema) if isinstance(params.json_schema, str) else None
    if not isinstance(schema, dict):
        return params, []
    relaxed, left_out = relaxed_schema(schema, _NARROWING)
    if relaxed == schema:
        return params, []
    warnings = [f"{field}: {sentence}" for sentence in left_out[:_MAX_WARNINGS]]
    if len(left_out) > _MAX_WARNINGS:
        warnings.append(f"{field}: {len(left_out) - _MAX_WARNINGS} more keywords are left out")
    return params.replace(json_schema=relaxed), warnings


def without_other_constraints(base: SamplingParams, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes without empty constraints. If they set a constraint, further changes remove the default constraint."""
    changes = {name: value for name, value in changes.items() if name not in CONSTRAINTS or value not in NO_CONSTRAINT}
    given = [name for name in CONSTRAINTS if changes.get(name) is not None]
    if not given:
        return dict(changes)
    others: dict[str, Any] = {
        name: None for name in CONSTRAINTS if name not in changes and getattr(base, name) is not None
    }
    if "grammar" not in given:
        others |= {"grammar_lazy": False, "grammar_triggers": (), "grammar_prefix": "", "grammar_root": "root"}
    return {**others, **changes}
