"""The table of every causal LM class of transformers: exact on a tree, or refused. The tests write its file."""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Literal, Self

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
    """The refusal of the small model, or why it was not tried; of an exact one, why a bound of it is wider."""
    layers: tuple[str, ...] = ()
    """Kinds of layers that the small model had; of one that was not run, as far as its configuration names them."""
    float64: float | None = None
    """Worst relative error of the whole gradient against the rows by themselves; two digits."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTable:
    """All classes, and the release of transformers they belong to."""

    transformers: str
    classes: tuple[ClassFound, ...]

    @classmethod
    def packaged(cls) -> Self:
        """The table that this release of the library was tested with."""
        return cls.from_json(resources.files("treetrain.models").joinpath(FILE).read_text(encoding="utf-8"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text of the file."""
        data = json.loads(text)
        found = [ClassFound(**{**entry, "layers": tuple(entry["layers"])}) for entry in data["classes"]]
        return cls(transformers=data["transformers"], classes=tuple(found))

    def find(self, model_type: str) -> ClassFound | None:
        """The class of a `model_type`; None for one that the tests do not know."""
        return next((found for found in self.classes if found.model_type == model_type), None)

    def of(self, verdict: str) -> tuple[ClassFound, ...]:
        """The classes with one verdict."""
        return tuple(found for found in self.classes if found.verdict == verdict)
