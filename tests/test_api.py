"""The page of reference is what signatures and docstrings say, and they say what a user needs."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import treetrain as tt

pytest.importorskip("transformers")
SCRIPT = Path(__file__).parents[1] / "docs" / "make_api.py"


def make_api():
    """docs/make_api.py as a module."""
    spec = importlib.util.spec_from_file_location("make_api", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says():
    script = make_api()
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python docs/make_api.py"


def test_a_public_name_that_is_in_no_section_stops_the_script(monkeypatch):
    script = make_api()
    monkeypatch.setattr(tt, "__all__", [*tt.__all__, "brand_new"])
    with pytest.raises(ValueError, match=r"in no section of docs/make_api\.py: brand_new"):
        script.page()


NAMES = [name for names in make_api().SECTIONS.values() for name in names if name.split(".")[0] in tt.__all__]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_docstring_says_what_for_and_names_every_argument(name):
    found = make_api().public(name)
    doc = inspect.getdoc(found) or ""
    first = doc.split("\n")[0]
    assert first.endswith(".") and not re.match("(Of|What)\\b", first), first
    if inspect.isfunction(found) and not hasattr(found, "__signature__"):  # a preset's options are those of its class
        for argument in inspect.signature(found).parameters:
            assert re.search(rf"\b{argument}\b", doc), f"{name} does not say what {argument} is"
