"""What is known of every causal LM class of transformers: found by the tests, kept in a file beside this one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, Self

FILE = "table.json"
VERDICTS = ("exact", "refused", "untried")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFound:
    """One class."""

    model_type: str
    model_class: str
    verdict: Literal["exact", "refused", "untried"]
    """exact: gradients of a small random model were those of its rows; refused: by name, before any work; untried:
    could not be run by the tests, and is checked when it is loaded."""
    reason: str = ""
    """The refusal of the small model, or why it was not tried."""
    layers: tuple[str, ...] = ()
    """Kinds of layers that the small model had, where its configuration names them."""


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
            _rows(("model_type", "class", "layers of the model tested"), [_exact(found) for found in exact]),
            f"\n## Refused ({len(refused)})\n",
            _rows(("model_type", "class", "why"), [_why(found) for found in refused]),
            f"\n## Not tried ({len(untried)})\n\nThese are checked when they are loaded, as every model is.\n",
            _rows(("model_type", "class", "why"), [_why(found) for found in untried]),
        ]
        return "\n".join(parts) + "\n"


def _plain(found: ClassFound) -> Mapping[str, Any]:
    return {name: getattr(found, name) for name in ("model_type", "model_class", "verdict", "reason", "layers")}


def _exact(found: ClassFound) -> tuple[str, ...]:
    return found.model_type, found.model_class, ", ".join(found.layers) or "not named by the configuration"


def _why(found: ClassFound) -> tuple[str, ...]:
    return found.model_type, found.model_class, found.reason


def _rows(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return "\n".join(lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows])


_INTRODUCTION = """# Model families

Written by the test run (`tests/models/test_families_table.py`); do not edit. Every causal LM class of transformers
{version} ({all} of them) was made small, with random weights, and run on a tree. *Exact* ({exact}): the gradient of all
weights was that of the rows by themselves in float64, to 1e-10 of its size (1e-5 where the library's own float32 casts
could not be lifted), as one part and in parts of 7 tokens. *Refused* ({refused}): named, with the reason, before any
gradient; nothing is run wrong in silence.

The decision is made by what a layer is and asks for, never by a model's name, so another model of the same layers is
exact as well. `treetrain models --model NAME_OR_FOLDER` answers for one model from its configuration, without weights,
and `treetrain verify` proves it on your rows.
"""
