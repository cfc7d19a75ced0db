"""Options that several commands have in common. No numpy, torch or transformers here: help must answer at once."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from treetrain.models.rows import ReadRows
    from treetrain.planning.budget import Bytes

Files = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE..."), tyro.conf.Positional]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How files are read."""

    files: Files
    """JSONL (plain or .gz), Parquet or Arrow files of token rows or of conversations."""
    format: Literal["auto", "tokens", "chat"] = "auto"
    """What the files hold: token rows (`input_ids`), conversations (`messages`), or what the first row looks like."""
    view: Literal["transcript", "calls"] = "transcript"
    """Conversations as whole transcripts, or every LLM call as its own row."""
    tools: str | None = None
    """JSON file of tool schemas for conversations that bring none."""
    chat_template: str | None = None
    """Instead of the tokenizer's template: chatml (built in, keeps prefixes) or a Jinja file."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's own; a hub id, a folder or a preset."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("no file given; name at least one")

    def read(self, model: str | None) -> "ReadRows":
        """The rows of the files; a model gives the tokenizer and what rows must fit. Raises DataError."""
        from treetrain.models.rows import read_rows

        names = ("format", "view", "tools", "chat_template", "tokenizer")
        return read_rows(self.files, model=model, **{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetOptions(RowOptions):
    """How much may be alive at once."""

    budget: str | None = None
    """Tokens whose graph is alive at once (4096), or bytes above model, gradients and optimiser state (8GiB, 900MB);
    any tree fits. None: what the device has free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parsed_budget()

    def parsed_budget(self) -> "int | Bytes | None":
        """Tokens, bytes or no choice. Raises ValueError."""
        if self.budget is None:
            return None
        from treetrain.planning.budget import parse_budget

        return parse_budget(self.budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(BudgetOptions):
    """A model, and a part of the files to run on it."""

    model: str
    """Hub id, local folder, or a built-in random preset: tiny, small."""
    sample: int = 16
    """Rows to use: the first whole groups (else trees) of at most so many; 0 uses all."""
    seed: int = 0
    """Of a preset's random weights."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample < 0:
            raise ValueError(f"--sample is {self.sample}; give the number of rows, or 0 for all")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads is {self.threads}; give at least 1")
