"""Options and needs of losses that users derive are checked, however their file is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

import treetrain as tt
from support.models import make_model
from treetrain.core.losses.protocol import Loss, numeric


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Loss):
    """A loss in a file whose annotations are text."""

    kind: Literal["a", "b"] = "a"
    clip: bool = True
    scale: float | None = numeric(1.0)

    def evaluate(self, logprobs, entropies, facts, values):
        return (facts.shares(self.reduction) * logprobs).sum(), {}


@pytest.mark.parametrize(
    "option, says",
    [
        ({"kind": "c"}, "kind is 'c'; allowed are 'a', 'b'"),
        ({"clip": 1}, "clip is 1; allowed are True and False"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"reduction": "rows"}, "reduction is 'rows'; allowed are 'token', 'trajectory'"),
    ],
)
def test_options_are_checked_where_annotations_are_text(option, says):
    with pytest.raises(ValueError, match=says):
        Own(**option)
    Own(scale=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Typo(Own):
    needs: ClassVar[tuple[str, ...]] = ("logprobs", "advantage")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTuple(Own):
    needs: ClassVar[str] = "logprobs"  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherScope(Own):
    scope: ClassVar[str] = "row"  # type: ignore[assignment]


@pytest.mark.parametrize(
    "kind, says",
    [(Typo, "needs 'advantage'; a loss may need"), (NoTuple, "has needs 'logprobs'"), (OtherScope, "has scope 'row'")],
)
def test_what_a_derived_loss_says_of_itself_is_checked(kind, says):
    engine = tt.TreeEngine(make_model())
    with pytest.raises(TypeError, match=says):
        engine.forward_backward([[1, 2, 3]], kind())


@pytest.mark.parametrize("number", ["3", True])
def test_a_normaliser_or_temperature_that_is_no_number_is_refused(number):
    model = make_model()
    with pytest.raises(ValueError, match="the normaliser is"):
        tt.TreeEngine(model).forward_backward([[1, 2, 3]], tt.losses.sft(), normaliser=number)
    for call in (lambda: tt.TreeEngine(model, temperature=number), lambda: tt.logprobs(model, [[1, 2]], None, number)):
        with pytest.raises(ValueError, match="temperature="):
            call()


def test_no_rows_have_no_advantages():
    assert tt.group_advantages([]) == []
