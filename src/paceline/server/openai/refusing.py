"""Refusals in OpenAI's words: which field was at fault. Pure; any thread."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.errors import RequestError
from paceline.server.problems import Problem, Refused, problem_of

_FIRST_WORD = re.compile(r"\w+")


def refused(message: str, param: str | None, code: str = "invalid_params", status: int = 400) -> Refused:
    """To be raised: the request is at fault."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return Refused(Problem(status, kind, code, message, param=param))


@contextmanager
def naming_the_field(names: Collection[str], **others: str) -> Iterator[None]:
    """Errors of a request get the `param` that their message begins with, where it is one of these names.

    others: what errors call a field that has another name in the body.
    """
    try:
        yield
    except RequestError as error:
        word = _FIRST_WORD.match(str(error))
        param = None if word is None else others.get(word[0], word[0])
        if param not in names:
            raise
        raise Refused(replace(problem_of(error), param=param)) from error
