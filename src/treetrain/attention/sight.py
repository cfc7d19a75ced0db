"""What a layer asks of its attention besides softmax: how far a token sees, and a cap on its scores.

Distances are counted along a token's own path, so a window or chunk that crosses a fork, or the border of a part,
covers the same tokens as in the row by itself.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sight:
    """Which ancestors a token sees (itself always): all of them, the nearest ones, or those of its chunk."""

    window: int | None = None
    """A token at depth d sees depths above d - window."""
    chunk: int | None = None
    """A token at depth d sees depths from (d // chunk) * chunk on."""

    def __post_init__(self) -> None:
        sizes = [size for size in (self.window, self.chunk) if size is not None]
        if len(sizes) > 1 or any(size < 1 for size in sizes):
            raise ValueError(f"{self}: give one size of at least 1, or none")

    def lowest(self, depth: Any) -> Any:
        """The least depth that a token at each depth sees. An integer array or tensor in, the like out."""
        if self.window is not None:
            return (depth - (self.window - 1)).clip(0)
        if self.chunk is not None:
            return depth // self.chunk * self.chunk
        return depth * 0

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"


FULL = Sight()


@dataclass(frozen=True, slots=True)
class Ask:
    """What one layer asks; layers that ask the same share schedules and masks."""

    sight: Sight = FULL
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the softmax."""


PLAIN = Ask()
