"""What commands work on: rows of files, a model shape, a sample of rows and the model to run on it."""

import dataclasses
from argparse import Namespace
from typing import TYPE_CHECKING

from treetrain.cli.options import read
from treetrain.errors import DataError
from treetrain.models.rows import read_config
from treetrain.planning.cost import ModelShape

if TYPE_CHECKING:
    from torch import nn

    from treetrain.data.trajectory import Trajectory

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


def sample_rows(options: Namespace) -> "list[Trajectory]":
    """The rows to run a model on; what the user should know of them is printed.

    Raises:
        DataError: bad data, or nothing in the sample is trained.
    """
    from treetrain.cli.output import print_notes
    from treetrain.trainers.groups import sample_groups

    found = read(options)
    if not found.rows:
        raise DataError(
            f"{', '.join(options.files)}: no rows to sample; in the calls view a conversation without an "
            "assistant message has none"
        )
    rows, cut = sample_groups(found.rows, options.sample or len(found.rows))
    notes = list(found.notes)
    if len(rows) < len(found.rows):
        of = "of the first group or tree, which has more" if cut else "in whole groups or trees"
        notes.append(f"a sample of {len(rows)} of {len(found.rows)} rows, {of}; --sample sets how many, 0 takes all")
    if not any(row.weights.any() for row in rows):
        raise DataError(f"nothing to train: no token of the {len(rows)} sampled rows has a loss weight")
    print_notes(notes)
    return rows


def best_device_model(name: str, *, seed: int = 0, dtype: str = "float32", threads: int | None = None) -> "nn.Module":
    """A model on the best device there is, ready to be run."""
    import torch
    from transformers.utils import logging

    from treetrain.models.loading import load_model

    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_model(name, seed=seed, dtype=dtype)
    return torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu").eval()
