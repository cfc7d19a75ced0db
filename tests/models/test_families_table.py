"""Every causal LM class of transformers is exact on a tree or refused by name; the table of them is up to date."""

import os
from collections import Counter
from pathlib import Path

import pytest
import transformers

from support.every_class import NAMES, Verdict, judge
from treetrain.models.table import FILE, ClassFound, FamilyTable

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
    known = [
        ClassFound(
            model_type=found.model_type,
            model_class=found.model_class,
            verdict=found.verdict,  # type: ignore[arg-type]
            reason=found.reason,
            layers=found.layers,
        )
        for found in verdicts
    ]
    return FamilyTable(transformers=transformers.__version__, classes=tuple(known))


def test_no_class_is_silently_wrong(verdicts):
    assert len(verdicts) >= 100
    assert [found for found in verdicts if found.verdict == "wrong"] == []


def test_most_classes_are_judged_and_no_refusal_is_without_a_reason(verdicts):
    counts = Counter(found.verdict for found in verdicts)
    assert counts["exact"] >= 80 and counts["untried"] <= 25, counts
    assert all(found.reason for found in verdicts if found.verdict != "exact")


def test_the_table_and_its_page_say_what_was_found(table):
    if os.environ.get(WRITE):
        DATA.write_text(table.to_json(), encoding="utf-8")
        PAGE.write_text(table.markdown(), encoding="utf-8")
    packaged = FamilyTable.packaged()
    assert PAGE.read_text(encoding="utf-8") == packaged.markdown(), f"docs/families.md is stale; write it by: {COMMAND}"
    if table.transformers != packaged.transformers:
        pytest.skip(f"the table is of transformers {packaged.transformers}; here is {table.transformers}")
    stale = set(table.classes) ^ set(packaged.classes)
    assert not stale, f"the table of families is stale; write it by: {COMMAND}\n{stale}"


def test_a_table_comes_back_from_its_file(table):
    assert FamilyTable.from_json(table.to_json()) == table
