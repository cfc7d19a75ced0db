"""Writes the table of model families: the file in the package, and the page of the documentation."""

import json
from dataclasses import asdict
from typing import Any

from treetrain.models.loading import VERDICTS, ClassFound, FamilyTable

ERRORS = ("float64", "float32", "rows_float32", "bfloat16")


def stable(found: ClassFound) -> tuple[Any, ...]:
    """The part of an entry that every machine finds: all but the errors, whose digits are those of rounding."""
    return found.model_type, found.model_class, found.verdict, found.reason, found.layers


def to_json(table: FamilyTable) -> str:
    """Plain JSON, one class per line, so that a change is seen in a diff."""
    lines = ",\n".join(f"  {json.dumps(_plain(found))}" for found in table.classes)
    return f'{{"transformers": {json.dumps(table.transformers)}, "classes": [\n{lines}\n]}}\n'


def _plain(found: ClassFound) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name not in ERRORS or value is not None}


def markdown(table: FamilyTable) -> str:
    """The page of the documentation."""
    exact, refused, untried = (table.of(verdict) for verdict in VERDICTS)
    counts = {"all": len(table.classes), "exact": len(exact), "refused": len(refused)}
    parts = [
        _INTRODUCTION.format(version=table.transformers, **counts),
        f"## Exact ({len(exact)})\n",
        _rows(_EXACT_COLUMNS, [_exact(found) for found in exact]),
        f"\n## Refused ({len(refused)})\n",
        _rows(("model_type", "class", "why"), [_why(found) for found in refused]),
        f"\n## Not tried ({len(untried)})\n\nThese are checked when they are loaded, as every model is.\n",
        _rows(("model_type", "class", "why"), [_why(found) for found in untried]),
    ]
    return "\n".join(parts) + "\n"


_EXACT_COLUMNS = ("model_type", "class", "layers of the model tested", "float64", "float32", "bfloat16 / rows")


def _exact(found: ClassFound) -> tuple[str, ...]:
    name = f"{found.model_type} (1)" if found.reason else found.model_type
    double, single, ratio = found.errors
    if found.rows_float32 is not None:
        single = f"{single} (rows {found.rows_float32:.1e})"
    return name, found.model_class, ", ".join(found.layers), double, single, ratio


def _why(found: ClassFound) -> tuple[str, ...]:
    return found.model_type, found.model_class, found.reason


def _rows(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return "\n".join(lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows])


_INTRODUCTION = """# Model families

Written by the test run (`tests/models/test_families_table.py`); do not edit. Every causal LM class of transformers
{version} ({all} of them) was made small, with random weights, and run on trees; models that may be encoders are made as
decoders. *Exact* ({exact}): the gradient of all weights was that of the rows by themselves, as one part and in parts.
*Refused* ({refused}): named, with the reason, before any gradient; nothing is run wrong in silence.

The errors are of the gradient of all weights, relative, the worst over random forests and parts, under SFT and under
PPO-clip with entropy: in float64 with the library's own float32 casts lifted (bound 1e-12), and in float32 (bound
1e-5). The last column is the bfloat16 tree's error against float64 over that of the bfloat16 rows, both pooled over
the forests (bound 1.5). Three forests are enough but for ReLU (OPT, CTRL): a unit whose input is within a rounding of
zero has its whole gradient or none, on either side by chance, so that 24 are pooled. In models with experts both are
told which experts the float32 rows choose, since a choice that rounding turns over is neither's error; the column is
empty where routers cannot be told, and where the rows' own bfloat16 gradient is not finite (Gemma 3n's). `(1)` marks
where a bound had to be wider: the library's casts could not be lifted (then 1e-5 in float64), or the float32 rows
themselves are more than 3e-6 off the float64 gradient (then three times that error, which stands beside the tree's).
`tests/models/test_every_class_contract.py` holds the same on real trajectories.

The decision is made by what a layer is and asks for, never by a model's name, so another model of the same layers is
exact as well. `treetrain models --model NAME_OR_FOLDER` answers for one model from its configuration, without weights,
and `treetrain verify` proves it on your rows.
"""
