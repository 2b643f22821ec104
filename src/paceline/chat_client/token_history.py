"""Token ids of a conversation so far, so that the next prompt begins with exactly the tokens that the KV cache has.

Encoding a conversation anew can give other ids than those that were generated, and then the cache serves only the part before
the difference. Pure but for the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.chat import ChatChoice, ChatRequest
from paceline.runtime import Tokenizer


class TokenHistory:
    """The last prompt with what was generated after it. One thread at a time."""

    def __init__(self, token_ids: Sequence[int] = (), text: str = "") -> None:
        """token_ids: prompt and generated tokens. text: what they spell."""
        self.token_ids = tuple(token_ids)
        self.text = text

    def continued(self, request: ChatRequest, tokenizer: Tokenizer) -> ChatRequest:
        """Return the request with the known ids in front, if its prompt begins with their text.

        Otherwise return it as it is: the template has changed earlier turns, by leaving out their thinking for example, or
        what comes next does not begin with a control token, before which no token can reach over.
        """
        rendered = request.rendered
        if not self.token_ids or not rendered.text.startswith(self.text):
            return request
        start = len(self.text)
        inputs = [(max(begin, start) - start, end - start) for begin, end in rendered.inputs if end > start]
        rest = tokenizer.encode_prompt(rendered.text[start:], inputs)
        if tokenizer.add_bos and rest[:1] == [tokenizer.bos]:
            rest = rest[1:]
        if not rest or not tokenizer.is_control(rest[0]):
            return request
        return replace(request, token_ids=[*self.token_ids, *rest])

    def record(
        self, request: ChatRequest, prompt_token_ids: Sequence[int], choice: ChatChoice, tokenizer: Tokenizer
    ) -> None:
        """Take a reply to a prompt; where the text is not that of its tokens (a stop text has cut it), begin anew."""
        is_whole = list(prompt_token_ids) == list(request.token_ids)  # and not truncated
        generated = tokenizer.decode(choice.token_ids, special=True)
        if is_whole and generated == choice.text:
            self.token_ids = (*prompt_token_ids, *choice.token_ids)
            self.text = request.rendered.text + choice.text
        else:
            self.token_ids, self.text = (), ""
