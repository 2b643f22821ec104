"""Reads the input of a custom tool, a text, from the JSON of its function's arguments while they are generated. Pure."""

from __future__ import annotations

import json
import re

from paceline.server.dialects.responses.response_tools import CUSTOM_INPUT

_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Half of a pair of surrogates if the text after it cannot be the other half.
_LONE_HIGH = rf"{_HIGH}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
# Whole characters of a JSON string. A pair of surrogates is one character.
_CHARACTERS = re.compile(rf'(?:[^"\\]|{_HIGH}{_LOW}|{_LONE_HIGH}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\["\\/bfnrt])+')


class CustomInput:
    """The input of one call. text: the input as far as it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self._rest = ""
        self._is_open = False

    def feed(self, arguments: str) -> str:
        """Take the next piece of the arguments and return the next piece of the input."""
        self._rest += arguments
        if not self._is_open:
            found = _BEGIN.match(self._rest)
            if found is None:
                return ""
            self._is_open, self._rest = True, self._rest[found.end() :]
        characters = _CHARACTERS.match(self._rest)
        if characters is None:
            return ""
        self._rest = self._rest[characters.end() :]
        # A half of a pair of surrogates alone cannot be sent as UTF-8.
        piece = json.loads(f'"{characters[0]}"', strict=False).encode("utf-8", "replace").decode()
        self.text += piece
        return str(piece)

    def finish(self) -> str:
        """End the call and return the last piece: the arguments themselves if they do not have the shape of an input."""
        rest = "" if self._is_open else self._rest
        self.text += rest
        return rest


def custom_input_of(arguments: str) -> str:
    """Return the input in whole arguments."""
    reader = CustomInput()
    reader.feed(arguments)
    reader.finish()
    return reader.text
