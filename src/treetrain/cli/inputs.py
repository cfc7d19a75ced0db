"""Inputs of commands: rows of files, a model shape, a sample of rows and the model to run on it."""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetrain.data.load import detect_format, load
from treetrain.errors import DataError
from treetrain.inspection.report import Shape
from treetrain.planning.cost import ModelShape

if TYPE_CHECKING:
    from torch import nn

    from treetrain.data.trajectory import Trajectory

DEFAULT_SHAPE = "qwen3-8b"
SKIPPED = "treetrain-skipped.txt"
"""Where `--on_error skip` lists the records that were left out."""


def find_shape(model: str | None, shape: str | None, *, dtype_bytes: int = 4) -> Shape:
    """The named `shape` if given, else the counts of `model`, else the default shape. Only a model needs torch.

    Raises:
        ValueError: an unknown shape, a model that is not there, or one that cannot be counted.
    """
    if shape is None and model is not None:
        from treetrain.engine.costs import count_named

        return Shape(counts=count_named(model, dtype_bytes), name=model, assumed=False)
    name = shape or DEFAULT_SHAPE
    counts = ModelShape.named(name).counts(dtype_bytes=dtype_bytes)
    return Shape(counts=counts, name=name, assumed=shape is None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadRows:
    """Rows, notes on them for the user, and the tokenizer they were made with."""

    rows: "Sequence[Trajectory]"
    notes: tuple[str, ...]
    format: str
    view: str | None
    """"calls" or "transcript"; None for token rows."""
    tokenizer: Any
    """None for token rows if --tokenizer names none."""


def read(options: Namespace, files: Sequence[str] | None = None, **more: Any) -> ReadRows:
    """The rows of the files. The model gives the tokenizer, and the vocabulary and positions that rows must fit.

    Args:
        more: further options of `tt.load`.

    Raises:
        DataError: the message names file and line, or the model or tokenizer that cannot be loaded.
    """
    files = list(files or options.files)
    name = options.tokenizer or options.model
    kind, _ = detect_format(files[0], options.format, options.map)
    config = tokenizer = None
    wanted = options.tokenizer or (None if kind.tokens else name)
    if options.model is not None or wanted is not None:
        from treetrain.models.loading import load_config, load_tokenizer

        config = None if options.model is None else load_config(options.model).get_text_config()
        tokenizer = None if wanted is None else load_tokenizer(wanted)
    given = ("format", "view", "train", "tools", "chat_template", "map", "on_error")
    loaded = load(
        files,
        tokenizer=tokenizer,
        vocab_size=getattr(config, "vocab_size", None),
        max_positions=getattr(config, "max_position_embeddings", None),
        images=getattr(options, "images", "refuse"),
        **{option: getattr(options, option) for option in given},
        **more,
    )
    if loaded.skipped:
        Path(SKIPPED).write_text("".join(line + "\n" for line in loaded.skipped), encoding="utf-8")
        loaded = dataclasses.replace(loaded, notes=(*loaded.notes, f"the skipped records are listed in {SKIPPED}"))
    return ReadRows(
        rows=loaded.trajectories,
        notes=loaded.notes,
        format=loaded.format,
        view=None if kind.tokens else options.view,
        tokenizer=tokenizer,
    )


def sample_rows(options: Namespace) -> "list[Trajectory]":
    """The rows to run a model on; notes on them are printed.

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
    """A model in eval mode on the GPU, or on the CPU if there is none."""
    import torch
    from transformers.utils import logging

    from treetrain.models.loading import load_model

    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_model(name, seed=seed, dtype=dtype)
    return torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu").eval()
