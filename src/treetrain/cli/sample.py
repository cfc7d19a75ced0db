"""The rows and the model that `verify` and `bench` run on."""

from typing import TYPE_CHECKING

from treetrain.cli.options import SampleOptions

if TYPE_CHECKING:
    from torch import nn

    from treetrain.data.trajectory import Trajectory


def sample_rows(options: SampleOptions) -> "tuple[list[Trajectory], tuple[str, ...]]":
    """The sampled rows and what the user should know about them.

    Raises:
        DataError: bad data, or nothing in the sample is trained.
    """
    from treetrain.errors import DataError
    from treetrain.train.batches import sample_units
    from treetrain.train.rows import read_rows

    read = read_rows(options.files, options.source(options.model))
    if not read.rows:
        raise DataError(
            f"{', '.join(options.files)}: no rows to sample; in the calls view a conversation without an "
            "assistant message has none"
        )
    rows, cut = sample_units(read.rows, options.sample or len(read.rows))
    notes = list(read.notes)
    if len(rows) < len(read.rows):
        of = "of the first group or tree, which has more" if cut else "in whole groups or trees"
        notes.append(f"a sample of {len(rows)} of {len(read.rows)} rows, {of}; --sample sets how many, 0 takes all")
    if not any(row.weights.any() for row in rows):
        raise DataError(f"nothing to train: no token of the {len(rows)} sampled rows has a loss weight")
    return rows, tuple(notes)


def sample_model(options: SampleOptions, dtype: str = "float32") -> "nn.Module":
    """The model on the best device there is, ready to be run."""
    import torch

    from treetrain.cli.quiet import quiet_transformers
    from treetrain.models.loading import load_model

    quiet_transformers()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(options.model, seed=options.seed, dtype=dtype)
    return torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu").eval()
