"""The docs site: builds without a warning, names every public name, and shows what the code draws and prints."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import treetrain as tt

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_in_the_api():
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    shown = set(re.findall(r"^::: treetrain\.(\w+)$", text, re.MULTILINE))
    assert shown - {"testing"} == set(tt.__all__) - {"__version__"}


BESIDE_THE_MENU = ("families.md", "log.md")
"""Tables that are looked up; the API, which is made from docstrings, stands beside the menu too."""


def menu() -> list[str]:
    """The pages of the menu, in its order."""
    return re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1])


def test_every_page_is_in_the_menu_or_linked_from_a_page_that_is():
    texts = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in menu() if page != "BENCHMARKS.md"}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(texts) | set(BESIDE_THE_MENU), "name the page in mkdocs.yml"
    for page in (*BESIDE_THE_MENU, "api/index.md"):
        assert any(f"]({page}" in text for text in texts.values()), f"no page of the menu links to {page}"


def test_the_docs_can_be_read_to_the_end():
    assert len(menu()) <= 20
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in menu() if page != "BENCHMARKS.md"]
    assert sum(text.count("\n") for text in texts) <= 2500, "cut something: nobody reads more"


def test_no_line_of_the_docs_is_too_long():
    """Rows of tables cannot be wrapped, and what a program prints is shown as it is."""
    for page in menu():
        if page != "BENCHMARKS.md":
            text = (ROOT / "docs" / page).read_text(encoding="utf-8")
            text = re.sub(r"^```text\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
            for line in text.splitlines():
                assert len(line) <= 120 or line.startswith("|"), f"{page}: {line}"


def test_the_pictures_are_what_the_script_draws(tmp_path):
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs/make_pictures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(drawn) == {"tree.svg", "step.svg", "plan.svg", "logs.svg"}
    for name, text in drawn.items():
        assert (ROOT / "docs/images" / name).read_text(encoding="utf-8") == text, "run python docs/make_pictures.py"


@pytest.mark.slow
def test_the_tutorial_prints_what_the_page_says():
    for package in ("torch", "transformers", "datasets"):
        pytest.importorskip(package)
    command = [sys.executable, str(ROOT / "docs/make_tutorial.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (extra docs)")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists() and "share_prefixes" in (tmp_path / "api/trainers.html").read_text()
