"""What is known of every causal LM class of transformers: found by the tests, kept in a file beside this one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, Literal, Self

FILE = "table.json"
VERDICTS = ("exact", "refused", "untried")
ERRORS = ("float64", "float32", "rows_float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFound:
    """One class."""

    model_type: str
    model_class: str
    verdict: Literal["exact", "refused", "untried"]
    """exact: gradients of a small random model were those of its rows; refused: by name, before any work; untried:
    could not be run by the tests, and is checked when it is loaded."""
    reason: str = ""
    """The refusal of the small model, or why it was not tried; of an exact one, why a bound of it is wider."""
    layers: tuple[str, ...] = ()
    """Kinds of layers that the small model had; of one that was not run, as far as its configuration names them."""
    float64: float | None = None
    """Worst relative error of the whole gradient against the rows by themselves; two digits, as measured when the
    table was written."""
    float32: float | None = None
    """The same in float32."""
    rows_float32: float | None = None
    """Error of the float32 rows themselves against float64, the worst; only where it makes the bound wider."""
    bfloat16: float | None = None
    """Error in bfloat16 over that of the bfloat16 rows, pooled over forests."""

    @property
    def errors(self) -> tuple[str, ...]:
        """The three errors as they are shown."""
        ratio = "" if self.bfloat16 is None else f"{self.bfloat16:.2g}"
        return *("" if x is None else f"{x:.1e}" for x in (self.float64, self.float32)), ratio

    @property
    def stable(self) -> tuple[Any, ...]:
        """What every machine finds: all but the errors, whose digits are those of rounding."""
        return self.model_type, self.model_class, self.verdict, self.reason, self.layers


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTable:
    """All classes, and the release of transformers they are of."""

    transformers: str
    classes: tuple[ClassFound, ...]

    @classmethod
    def packaged(cls) -> Self:
        """As this release of the library was tested."""
        return cls.from_json(resources.files("treetrain.models").joinpath(FILE).read_text(encoding="utf-8"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of `to_json`."""
        data = json.loads(text)
        found = [ClassFound(**{**entry, "layers": tuple(entry["layers"])}) for entry in data["classes"]]
        return cls(transformers=data["transformers"], classes=tuple(found))

    def to_json(self) -> str:
        """Plain JSON, one class per line, so that a change is seen in a diff."""
        lines = ",\n".join(f"  {json.dumps(_plain(found))}" for found in self.classes)
        return f'{{"transformers": {json.dumps(self.transformers)}, "classes": [\n{lines}\n]}}\n'

    def find(self, model_type: str) -> ClassFound | None:
        """The class of a `model_type`; None for one that the tests do not know."""
        return next((found for found in self.classes if found.model_type == model_type), None)

    def of(self, verdict: str) -> tuple[ClassFound, ...]:
        """The classes with one verdict."""
        return tuple(found for found in self.classes if found.verdict == verdict)

    def markdown(self) -> str:
        """The page of the documentation."""
        exact, refused, untried = (self.of(verdict) for verdict in VERDICTS)
        counts = {"all": len(self.classes), "exact": len(exact), "refused": len(refused)}
        parts = [
            _INTRODUCTION.format(version=self.transformers, **counts),
            f"## Exact ({len(exact)})\n",
            _rows(_EXACT_COLUMNS, [_exact(found) for found in exact]),
            f"\n## Refused ({len(refused)})\n",
            _rows(("model_type", "class", "why"), [_why(found) for found in refused]),
            f"\n## Not tried ({len(untried)})\n\nThese are checked when they are loaded, as every model is.\n",
            _rows(("model_type", "class", "why"), [_why(found) for found in untried]),
        ]
        return "\n".join(parts) + "\n"


def _plain(found: ClassFound) -> Mapping[str, Any]:
    known = {field.name: getattr(found, field.name) for field in fields(found)}
    return {name: value for name, value in known.items() if name not in ERRORS or value is not None}


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
