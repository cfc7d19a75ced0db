"""Which model's arithmetic the FLOP figures of a command are for, said by name."""

import dataclasses

from treetrain.plan.cost import ModelShape
from treetrain.train.rows import read_config

DEFAULT_SHAPE = "qwen3-8b"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedShape:
    """A model shape and where it comes from."""

    shape: ModelShape
    name: str
    assumed: bool
    """Nobody asked for it: it is the default."""

    @property
    def words(self) -> str:
        """For messages."""
        return f"{self.name} (assumed; --model or --shape names another)" if self.assumed else self.name


def find_shape(model: str | None, shape: str | None) -> NamedShape:
    """`shape` if given, else that of `model`, else the default.

    Raises:
        ValueError: an unknown shape, a model that is not there, or a family whose cost is not known.
    """
    if shape is None and model is not None:
        return NamedShape(shape=ModelShape.from_config(read_config(model)), name=model, assumed=False)
    name = shape or DEFAULT_SHAPE
    return NamedShape(shape=ModelShape.named(name), name=name, assumed=shape is None)
