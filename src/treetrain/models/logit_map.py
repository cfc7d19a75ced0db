"""What a model does to its logits after the head: scales them, caps them, or nothing."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitMap:
    """Logits z become cap * tanh(z / cap), of z times a factor and over a divisor."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    @property
    def is_identity(self) -> bool:
        """Whether logits stay as they are."""
        return self.factor == 1.0 and self.divisor == 1.0 and self.cap is None

    def __call__(self, logits: Tensor) -> Tensor:
        """Differentiable; in the order of operations that models use."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def apply_(self, logits: Tensor, *, want_slope: bool) -> Tensor | None:
        """In place. Returns the derivative by the logits that were given where it differs from one to the next."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.cap is None:
            return None
        logits.div_(self.cap).tanh_()
        slope = (1 - logits.square()).mul_(self.factor / self.divisor) if want_slope else None
        logits.mul_(self.cap)
        return slope

    def pull_back_(self, grad: Tensor, slope: Tensor | None) -> Tensor:
        """Gradient by the mapped logits to gradient by those that were given, in place."""
        if slope is not None:
            return grad.mul_(slope)
        return grad if self.is_identity else grad.mul_(self.factor / self.divisor)

    def __str__(self) -> str:
        if self.is_identity:
            return "as they are"
        words = [
            f"times {self.factor}" if self.factor != 1.0 else "",
            f"over {self.divisor}" if self.divisor != 1.0 else "",
            f"soft-capped at {self.cap}" if self.cap is not None else "",
        ]
        return ", ".join(word for word in words if word)


IDENTITY = LogitMap()
"""Of a model that says nothing of its logits: it must return them untouched."""
