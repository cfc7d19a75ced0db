"""The table of every causal LM class of transformers: exact on a tree, refused or untried. Tests write its file."""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Literal, Self

FILE = "table.json"
VERDICTS = ("exact", "refused", "untried")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFound:
    """The verdict on one class."""

    model_type: str
    model_class: str
    verdict: Literal["exact", "refused", "untried"]
    """exact: gradients of a small random model equal those of its separate rows; refused: with an error, before any
    work; untried: the tests could not run it, and it is checked when it is loaded."""
    reason: str = ""
    """The error message if refused; why it was not tried if untried; why its bound is wider if exact."""
    layers: tuple[str, ...] = ()
    """Kinds of layers of the small model; if it was not run, those that its configuration names."""
    float64: float | None = None
    """Worst relative error of the whole gradient in float64 against separate rows; two digits."""
    float32: float | None = None
    """The same in float32."""
    rows_float32: float | None = None
    """Worst error of the separate rows in float32 against float64; only where it makes the bound wider."""
    bfloat16: float | None = None
    """Error in bfloat16 divided by that of the separate rows in bfloat16, pooled over forests."""

    @property
    def errors(self) -> tuple[str, ...]:
        """The three errors, formatted."""
        ratio = "" if self.bfloat16 is None else f"{self.bfloat16:.2g}"
        return *("" if x is None else f"{x:.1e}" for x in (self.float64, self.float32)), ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTable:
    """All classes of one release of transformers."""

    transformers: str
    classes: tuple[ClassFound, ...]

    @classmethod
    def packaged(cls) -> Self:
        """The table that this release of the library was tested with."""
        return cls.from_json(resources.files("treetrain.models").joinpath(FILE).read_text(encoding="utf-8"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of the file."""
        data = json.loads(text)
        found = [ClassFound(**{**entry, "layers": tuple(entry["layers"])}) for entry in data["classes"]]
        return cls(transformers=data["transformers"], classes=tuple(found))

    def find(self, model_type: str) -> ClassFound | None:
        """The class of a `model_type`; None if the table does not have it."""
        return next((found for found in self.classes if found.model_type == model_type), None)

    def of(self, verdict: str) -> tuple[ClassFound, ...]:
        """The classes with one verdict."""
        return tuple(found for found in self.classes if found.verdict == verdict)
