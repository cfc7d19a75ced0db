"""Every causal LM class of transformers is exact on a tree or refused by name; the table of them is up to date."""

import os
from collections import Counter
from pathlib import Path

import pytest
import transformers

from support.every_class import KEPT_CASTS, NAMES, ROUGH, Verdict, judge, small_model
from support.every_class_contract import DOUBLE, RATIO, SINGLE, on_random_forests
from support.families_page import markdown, stable, to_json
from treetrain.models.loading import FILE, ClassFound, FamilyTable

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
