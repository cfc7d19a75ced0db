"""Objects of a file to trajectories, all of them in the same way: the format, the tokenizer, what a row must fit."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from treetrain.data.chat import View, trajectories_from_chat_row
from treetrain.data.messages import clean_tools, read_tools
from treetrain.data.notes import Notes
from treetrain.data.rendering import Renderer, chat_template_text
from treetrain.data.spans import Tools
from treetrain.data.token_rows import trajectory_from_token_row
from treetrain.data.trajectory import Trajectory
from treetrain.errors import DataError

Format = Literal["tokens", "chat"]


class RowMaker:
    """Makes the trajectories of every object of some files of one format.

    Args: see `treetrain.data.load.load`.

    Raises:
        ValueError: an unknown format or view.
        DataError: tools or a template that cannot be read.
    """

    def __init__(
        self,
        *,
        tokenizer: Any = None,
        format: Literal["auto", "tokens", "chat"] = "auto",
        view: View = "transcript",
        tools: Sequence[Any] | str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        vocab_size: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        if view not in ("transcript", "calls") or format not in ("auto", "tokens", "chat"):
            raise ValueError(f"format {format!r}, view {view!r}: known are auto/tokens/chat and transcript/calls")
        self.format: Format | None = None if format == "auto" else format
        """None until the first row has told."""
        self.view: View = view
        self.schemas: Tools = (
            read_tools(Path(tools)) if isinstance(tools, str | os.PathLike) else clean_tools(tools, "tools")
        )
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self._tools_given = tools is not None
        self._renderer: Renderer | None = None

    def make(self, row: dict[str, Any], place: str, notes: Notes) -> list[Trajectory]:
        """The trajectories of one object, in the order of the file.

        Args:
            row: the object.
            place: where it is, for messages.
            notes: collects what was ignored or looks odd.

        Raises:
            DataError: naming `place`, what is wrong, both values and what to do.
        """
        self.format = self.format or format_of(row, place)
        if self.format == "tokens":
            made = [trajectory_from_token_row(row, place, notes)]
        else:
            renderer = self.renderer(place)
            made = trajectories_from_chat_row(row, renderer, place, view=self.view, tools=self.schemas, notes=notes)
        for trajectory in made:
            _check_fits(trajectory, place, self.vocab_size, self.max_positions)
        return made

    def renderer(self, place: str) -> Renderer:
        """The tokenizer with its template; DataError, naming `place`, where there is none."""
        if self._renderer is None:
            if self.tokenizer is None:
                raise DataError(f"{place}: conversations need a tokenizer; pass --model or --tokenizer")
            self._renderer = Renderer(self.tokenizer, self.chat_template)
        return self._renderer

    def settings(self) -> dict[str, Any]:
        """All that decides what rows become, as plain data: to tell whether they must be read again."""
        tokenizer = self.tokenizer
        if tokenizer is not None:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            vocabulary = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
            template = chat_template_text(self.chat_template) or getattr(tokenizer, "chat_template", None)
            tokenizer = [type(tokenizer).__name__, vocabulary, template, tokenizer.special_tokens_map]
        limits = [self.vocab_size, self.max_positions]
        about = {"format": self.format, "view": self.view, "tools": self.schemas}
        return about | {"limits": limits, "tokenizer": tokenizer}

    def remarks(self) -> tuple[str, ...]:
        """What of the settings had no effect."""
        chat_only = self.view == "calls" or self.chat_template is not None or self._tools_given
        if self.format != "tokens" or not chat_only:
            return ()
        return ("the rows are token ids already: view, chat template and tools have no effect",)


def format_of(row: dict[str, Any], place: str) -> Format:
    """What a row looks like. Raises DataError where it looks like neither."""
    if "input_ids" in row:
        return "tokens"
    if "messages" in row:
        return "chat"
    keys = ", ".join(map(repr, row)) or "no keys"
    raise DataError(
        f"{place}: cannot tell the format: the row has {keys}; expected `input_ids` (token rows) or `messages` (chat)"
    )


def _check_fits(trajectory: Trajectory, place: str, vocab_size: int | None, max_positions: int | None) -> None:
    ids = trajectory.ids
    if vocab_size is not None and ids.size and int(ids.max()) >= vocab_size:
        at = int(ids.argmax())
        raise DataError(
            f"{place}: ids[{at}] = {ids[at]} is outside the model's vocabulary of {vocab_size} tokens; "
            "the rows were made for another model: pass that model, or its tokenizer"
        )
    if max_positions is not None and ids.size > max_positions:
        raise DataError(
            f"{place}: row {trajectory.id!r} has {ids.size} tokens, the model has {max_positions} positions; "
            "rows are never cut or dropped for you: shorten it, take it out, or use a longer model"
        )
