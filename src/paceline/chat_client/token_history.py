"""Token ids of a conversation so far, so that the next prompt begins with exactly the tokens that the KV cache has.

Encoding a conversation anew can give other ids than those that were generated, and then the cache serves only the part before
the difference. With images a prompt is segments, and its text has marks for them. Pure but for the tokenizer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from paceline.chat import ChatChoice, ChatRequest, RenderedPrompt
from paceline.chat.chat_media import ChatMedia, Segment
from paceline.media import Attachment, is_attachment
from paceline.runtime import Tokenizer


class TokenHistory:
    """The last prompt with what was generated after it. One thread at a time.

    token_ids: prompt and generated tokens, negative in the cells of images. text: what they spell, with marks of this nonce in
    place of images. has_images: whether there are any. first_kept: the index of the first message after the system message that
    the last prompt has; the messages before it are left out of prompts.
    """

    def __init__(self, token_ids: Sequence[int] = (), text: str = "") -> None:
        """Begin without images. token_ids: prompt and generated tokens. text: what they spell."""
        self.token_ids = tuple(token_ids)
        self.text = text
        self.nonce = secrets.token_hex(16)
        self.first_kept = 0
        self._segments: tuple[Segment, ...] = (list(token_ids),) if token_ids else ()

    @property
    def has_images(self) -> bool:
        """Whether there are images in the prompt."""
        return any(is_attachment(one) for one in self._segments)

    def copy(self) -> TokenHistory:
        """Return one that goes on from here by itself."""
        other = TokenHistory(self.token_ids, self.text)
        other.nonce, other._segments, other.first_kept = self.nonce, self._segments, self.first_kept
        return other

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

    def segments(self, rendered: RenderedPrompt, images: ChatMedia, tokenizer: Tokenizer) -> list[Segment]:
        """Return a prompt with images as segments, the known ones in front as `continued` has the known ids."""
        known = [one for one in self._segments if is_attachment(one)]
        if self.token_ids and rendered.text.startswith(self.text) and _same(known, images.attachments[: len(known)]):
            rest = images.segments(rendered, tokenizer, len(self.text), len(known))
            if rest and isinstance(rest[0], list) and tokenizer.is_control(rest[0][0]):
                return [*self._segments, *rest]
        return images.segments(rendered, tokenizer)

    def record(
        self,
        request: ChatRequest,
        prompt_token_ids: Sequence[int],
        choice: ChatChoice,
        tokenizer: Tokenizer,
        segments: Sequence[Segment] | None = None,
    ) -> None:
        """Take a reply to a prompt; where the text is not that of its tokens (a stop text has cut it), begin anew.

        segments: of a prompt with images, which is never truncated.
        """
        is_whole = segments is not None or list(prompt_token_ids) == list(request.token_ids)
        generated = tokenizer.decode(choice.token_ids, special=True)
        if is_whole and generated == choice.text:
            self.token_ids = (*prompt_token_ids, *choice.token_ids)
            self.text = request.rendered.text + choice.text
            before = (list(prompt_token_ids),) if segments is None else tuple(segments)
            self._segments = (*before, list(choice.token_ids)) if choice.token_ids else before
        else:
            self.token_ids, self.text, self._segments = (), "", ()


def _same(known: Sequence[Attachment], images: Sequence[Attachment]) -> bool:
    return [one.content_hash for one in known] == [one.content_hash for one in images]
