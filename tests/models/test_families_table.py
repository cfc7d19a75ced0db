"""Every causal LM class of transformers is exact on a tree or refused by name; the table of them is up to date."""

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers

from support.every_class import KEPT_CASTS, NAMES, ROUGH, Verdict, judge, small_model
from support.every_class_contract import DOUBLE, RATIO, SINGLE, on_random_forests
from treetrain.models.loading import FILE, VERDICTS, ClassFound, FamilyTable

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

The tests write this page (`tests/models/test_families_table.py`); do not edit it. transformers {version} has {all}
causal LM classes. The tests make a small model of each, with random weights, and run it on trees. Models that may be
encoders are made as decoders.

- *Exact* ({exact}): the gradient of all weights equals that of the rows run one by one, with the tree as one part and
  in several.
- *Refused* ({refused}): an error names the reason before any gradient. No class gave a wrong gradient.

**Errors.** They are relative errors of the gradient of all weights, the worst over random forests and parts, with SFT
and with PPO-clip and entropy. The bounds are 1e-12 in float64 and 1e-5 in float32. In float64 transformers' own float32
casts are lifted. The last column divides the tree's bfloat16 error by that of the rows, both against float64 and pooled
over the forests. Its bound is 1.5.

- Three forests are pooled, for ReLU models (OPT, CTRL) 24. A unit whose input is within rounding of zero passes all of
  its gradient or none, so few forests are not enough.
- In models with experts, tree and rows use the experts that the float32 rows choose. Otherwise a choice that rounding
  changes would count as an error.
- The last column is empty if the choice of experts cannot be set, or if the rows' own bfloat16 gradient is not finite
  (Gemma 3n).
- `(1)` marks a wider bound. Either the library's casts could not be lifted (1e-5 in float64), or the float32 rows are
  more than 3e-6 off the float64 gradient (three times their error, which is shown beside the tree's).

`tests/models/test_every_class_contract.py` checks the same on real trajectories.

**Other models.** The decision depends on what a layer is and asks for, not on the model's name. So another model of the
same layers is exact as well. `treetrain models --model NAME_OR_FOLDER` answers for one model from its configuration,
without weights. `treetrain verify` checks it on your rows.
"""


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
DATA = ROOT / "src" / "treetrain" / "models" / FILE
WRITE = "TREETRAIN_WRITE_FAMILIES"
COMMAND = f"{WRITE}=1 python -m pytest {Path(__file__).relative_to(ROOT)}"


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    transformers.logging.set_verbosity_error()
    return [judge(name) for name in NAMES]


@pytest.fixture(scope="module")
def table(verdicts) -> FamilyTable:
    known = tuple(as_found(verdict, measured=bool(os.environ.get(WRITE))) for verdict in verdicts)
    return FamilyTable(transformers=transformers.__version__, classes=known)


def as_found(verdict: Verdict, *, measured: bool) -> ClassFound:
    """An entry of the table, with errors over several forests only where it is to be written: that takes minutes."""
    errors = {}
    if measured and verdict.verdict == "exact":
        model, lifted = small_model(verdict.model_type), KEPT_CASTS not in verdict.reason
        assert model is not None
        found = on_random_forests(model, lifted=lifted)
        ratio = None if found.bfloat16 is None else two_digits(found.bfloat16)
        errors = {"float64": two_digits(found.float64), "float32": two_digits(found.float32), "bfloat16": ratio}
        if ROUGH in verdict.reason:
            errors["rows_float32"] = two_digits(found.rows_float32)
    return ClassFound(
        model_type=verdict.model_type,
        model_class=verdict.model_class,
        verdict=verdict.verdict,  # type: ignore[arg-type]
        reason=verdict.reason,
        layers=verdict.layers,
        **errors,
    )


def two_digits(number: float) -> float:
    return float(f"{number:.1e}")


def test_every_twenty_fourth_class_is_as_the_table_says():
    packaged = FamilyTable.packaged()
    if packaged.transformers != transformers.__version__:
        pytest.skip(f"the table is of transformers {packaged.transformers}; here is {transformers.__version__}")
    transformers.logging.set_verbosity_error()
    known = {stable(found) for found in packaged.classes}
    for name in list(NAMES)[::24]:
        verdict = judge(name)
        assert verdict.verdict != "wrong", verdict
        assert stable(as_found(verdict, measured=False)) in known, f"the table is stale; write it by: {COMMAND}"


@pytest.mark.slow
def test_no_class_is_silently_wrong(verdicts):
    assert len(verdicts) >= 100
    assert [found for found in verdicts if found.verdict == "wrong"] == []


@pytest.mark.slow
def test_most_classes_are_judged_and_no_refusal_is_without_a_reason(verdicts):
    counts = Counter(found.verdict for found in verdicts)
    assert counts["exact"] >= 80 and counts["untried"] <= 25, counts
    assert all(found.reason for found in verdicts if found.verdict != "exact")


def test_the_errors_that_the_table_names_are_within_the_contract_and_all_are_named():
    for found in FamilyTable.packaged().classes:
        if found.verdict != "exact":
            assert (found.float64, found.float32, found.bfloat16) == (None, None, None), found
            continue
        assert found.float64 is not None and found.float32 is not None, found
        assert 0 < found.float64 <= (SINGLE if KEPT_CASTS in found.reason else DOUBLE), found
        assert (found.rows_float32 is not None) == (ROUGH in found.reason), found
        assert 0 < found.float32 <= max(SINGLE, 3 * (found.rows_float32 or 0.0)), found
        # Routers may be of a kind that cannot be told; Gemma 3n's rows have no finite gradient in bfloat16.
        assert found.bfloat16 is not None or "experts" in found.layers or found.model_type == "gemma3n_text", found
        assert found.bfloat16 is None or found.bfloat16 <= RATIO, found
        assert found.layers, found


@pytest.mark.slow
def test_the_table_and_its_page_say_what_was_found(table):
    if os.environ.get(WRITE):
        DATA.write_text(to_json(table), encoding="utf-8")
        PAGE.write_text(markdown(table), encoding="utf-8")
    packaged = FamilyTable.packaged()
    assert PAGE.read_text(encoding="utf-8") == markdown(packaged), f"docs/families.md is stale; write it by: {COMMAND}"
    if table.transformers != packaged.transformers:
        pytest.skip(f"the table is of transformers {packaged.transformers}; here is {table.transformers}")
    stale = {stable(found) for found in table.classes} ^ {stable(found) for found in packaged.classes}
    assert not stale, f"the table of families is stale; write it by: {COMMAND}\n{stale}"


def test_a_table_comes_back_from_its_file_and_the_page_is_written_from_it():
    packaged = FamilyTable.packaged()
    assert FamilyTable.from_json(to_json(packaged)) == packaged
    assert PAGE.read_text(encoding="utf-8") == markdown(packaged)
