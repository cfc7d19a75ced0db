"""Which tree attention runs on which device, and why."""

from dataclasses import dataclass

import torch

from treetrain.attention.carry import CarryView
from treetrain.attention.flex import FlexTreeAttention
from treetrain.attention.rectangles import RectangleAttention
from treetrain.attention.schedule import Forest


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name and the reason it was taken."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_backend(device: torch.device) -> Choice:
    """The backend for a device.

    Raises:
        NotImplementedError: a device that no backend covers.
    """
    if device.type == "cpu":
        return Choice(
            "rectangles", "CPU: stock flash attention calls merged by log-sum-exp; FlexAttention has no CPU backward"
        )
    if device.type == "cuda":
        return Choice("flex", "CUDA: FlexAttention with a block mask made from the subtree intervals")
    raise NotImplementedError(f"no tree attention for device {device.type!r}; use 'cpu' or 'cuda'")


def make_attention(forest: Forest, device: torch.device, heads_times_size: int, carry: CarryView | None = None):
    """Tree attention for one packed forest on ``device``.

    Args:
        heads_times_size: H * D of the model.
        carry: the path that the forest continues; None where it begins with roots and nothing follows.
    """
    if choose_backend(device).name == "rectangles":
        return RectangleAttention(forest, carry=carry, heads_times_size=heads_times_size)
    ends, depth = (torch.from_numpy(x).to(device) for x in (forest.ends, forest.depth))
    return FlexTreeAttention(ends, carry=carry, depth=depth)
