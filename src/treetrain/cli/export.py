"""`treetrain export`: a checkpoint as a model folder."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from treetrain.cli.parse import parse

SUMMARY = "Write the model of a checkpoint, of one process or of many, as a folder that transformers and peft load."
EXAMPLES = (
    "out/checkpoints/step-00000120 --output model",
    "out --output model --weights average",
    "out --output model --merge",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to write, and where to."""

    checkpoint: Annotated[str, tyro.conf.arg(metavar="CHECKPOINT"), tyro.conf.Positional]
    """A checkpoint, or the folder of a run: its newest whole one."""
    output: str
    """Folder for the model."""
    weights: Literal["last", "average", "best"] = "last"
    """Those after its last step, their average (ema_decay), or those of the best evaluation (keep_best)."""
    model: str | None = None
    """Where the model is now that the run began with; where it was if not given. An adapter is checked against it."""
    tokenizer: str | None = None
    """Tokenizer to save instead of the run's."""
    merge: bool = False
    """Add an adapter to its base model and write the sum."""
    overwrite: bool = False
    """Replace the model that the folder holds."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: Sequence[str]) -> int:
    """Parse, read, write the folder."""
    options = parse(ExportOptions, argv, command="export", summary=SUMMARY, examples=EXAMPLES)
    from treetrain.cli.output import print_json, print_notes
    from treetrain.cli.quiet import quiet_transformers
    from treetrain.train.export import export

    quiet_transformers()
    wanted = dataclasses.asdict(options)
    as_json = wanted.pop("json")
    made = export(wanted.pop("checkpoint"), wanted.pop("output"), **wanted)
    print_notes(made.notes)
    if as_json:
        print_json(dataclasses.asdict(made))
        return 0
    print(f"{made.output}: {'adapter' if made.adapter else 'model'} of step {made.step} ({made.weights} weights)")
    return 0
