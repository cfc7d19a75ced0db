"""What a layer asks of its attention besides softmax: how far a token sees, and a cap on its scores."""

from dataclasses import dataclass

from treetrain.tree.attention_range import FULL, AttentionRange


@dataclass(frozen=True, slots=True)
class Ask:
    """What one layer asks; layers that ask the same share schedules and masks."""

    sight: AttentionRange = FULL
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the softmax."""


PLAIN = Ask()
