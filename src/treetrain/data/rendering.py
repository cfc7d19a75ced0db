"""A chat template as a function of messages, and text to token ids without doing the same piece twice."""

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treetrain.data.messages import Message
from treetrain.errors import DataError

CHATML_END = "<|im_end|>"
CACHED_CHARACTERS = 1 << 24
"""Characters of pieces whose tokens are remembered; at most some 100 MB."""
# Token ids of a text, and where each token starts and ends in it (characters).
Encoded = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]


def chat_template_text(template: str | None) -> str | None:
    """The template's text, from itself, from `chatml` (ours, prefix-preserving) or from a file."""
    if template is None or "{" in template:
        return template
    if template == "chatml":
        return resources.files("treetrain.data").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"chat template {template!r} is no template text, no readable file and not the built-in 'chatml'"
        ) from error


class Renderer:
    """One tokenizer with one chat template.

    Args:
        tokenizer: a transformers tokenizer; used are `apply_chat_template`, `__call__` and its added tokens.
        chat_template: overrides the tokenizer's own; text, file or `chatml`.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = chat_template_text(chat_template)
        own = getattr(tokenizer, "chat_template", None)
        if self.template is None and not own:
            raise DataError("the tokenizer has no chat template; pass one, e.g. --chat-template chatml")
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        markers = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        if CHATML_END in str(self.template or own):
            markers.add(CHATML_END)  # ends a turn even where the vocabulary has no token of its own for it
        self._markers = _alternatives(markers)
        self._endings = tuple(markers - {""})
        self._pieces = _piece_pattern(tokenizer, added)
        self._cache: dict[str, Encoded] = {}
        self._cached = 0
        self.header = self._find_header()

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, prompt: bool = False) -> str:
        """The text of these messages; `prompt` adds what comes before an answer. Refusals are DataErrors."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is a program of the model's authors: it may raise anything
            raise DataError(
                f"the chat template refuses these messages ({type(error).__name__}: {error}); "
                "change the messages or pass another template, e.g. --chat-template chatml"
            ) from error

    def end_of_turn(self, text: str, start: int) -> int:
        """End of the special token that follows `start` at once or after white space; else `start`."""
        found = re.compile(r"\s*(?:" + self._markers + ")").match(text, start) if self._markers else None
        return found.end() if found else start

    def last_marker_end(self, text: str) -> int | None:
        """End of the special token that closes the text, white space after it aside; None if none does."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._endings) else None

    def has_marker(self, text: str, start: int = 0, end: int | None = None) -> bool:
        """Whether a special token is spelled out in text[start:end]."""
        return bool(self._markers) and re.compile(self._markers).search(text[start:end]) is not None

    def _find_header(self) -> str:
        """What the template puts before every answer; empty where it cannot be told."""
        question: list[Message] = [{"role": "user", "content": "a"}]
        try:
            bare, prompted = self.render(question, None), self.render(question, None, prompt=True)
        except DataError:
            return ""
        return prompted[len(bare) :] if prompted.startswith(bare) else ""

    def encode(self, text: str) -> Encoded:
        """Token ids of a text, none added, with the characters [start, end) that each token covers.

        Where added tokens cut the text anyway, the tokens of the pieces between them are remembered for a while.
        """
        pieces = [text] if self._pieces is None else [piece for piece in self._pieces.split(text) if piece]
        parts, at = [], 0
        for piece in pieces:
            ids, starts, ends = self._encode_piece(piece)
            parts.append((ids, starts + at, ends + at))
            at += len(piece)
        if not parts:
            return np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64)
        ids, starts, ends = zip(*parts)
        return np.concatenate(ids), np.concatenate(starts), np.concatenate(ends)

    def encode_ids(self, text: str) -> NDArray[np.int32]:
        """Only the token ids of `encode`."""
        pieces = [text] if self._pieces is None else [piece for piece in self._pieces.split(text) if piece]
        ids = [self._encode_piece(piece)[0] for piece in pieces]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    def _encode_piece(self, piece: str) -> Encoded:
        encoded = self._cache.get(piece)
        if encoded is None:
            encoded = _encode_whole(self.tokenizer, piece)
            self._cached += len(piece)
            if self._cached > CACHED_CHARACTERS:
                # What is shared comes back with the next row; a file may be larger than memory.
                self._cache.clear()
                self._cached = len(piece)
            self._cache[piece] = encoded
        return encoded


def _encode_whole(tokenizer: Any, text: str) -> Encoded:
    fast = bool(getattr(tokenizer, "is_fast", False))
    # `verbose=False`: its warning about long texts would be about a piece; the loader checks whole rows.
    output = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.array(output["input_ids"], np.int32)
    offsets = np.array(output["offset_mapping"] if fast else [(0, len(text))] * len(ids), np.int64).reshape(-1, 2)
    return ids, offsets[:, 0], offsets[:, 1]


def _alternatives(words: set[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word)


def _piece_pattern(tokenizer: Any, added: list[Any]) -> "re.Pattern[str] | None":
    """Where a text can be cut so that its pieces' tokens, joined, are exactly the text's; None if nowhere."""
    plain = {str(t) for t in added if not (t.lstrip or t.rstrip or t.single_word or t.normalized)}
    odd = any(t.lstrip or t.rstrip or t.single_word for t in added)
    if odd or not plain or not getattr(tokenizer, "is_fast", False):
        return None
    pattern = re.compile("(" + _alternatives(plain) + ")")
    # Tokenizers that mark the start of a text (a dummy space before it) would mark every piece: try it.
    word = max(plain, key=len)
    for probe in (f"a b{word}a{word} c {word}\n\nd{word}{word} ", f" a{word}\n", f"{word}a"):
        joined = [i for piece in pattern.split(probe) if piece for i in _encode_whole(tokenizer, piece)[0]]
        if joined != _encode_whole(tokenizer, probe)[0].tolist():
            return None
    return pattern
