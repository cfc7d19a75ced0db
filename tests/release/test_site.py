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


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = set(re.findall(r"[\w/]+\.md", menu))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= named, "name the page in mkdocs.yml"


def test_the_pictures_are_what_the_script_draws(tmp_path):
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs/make_pictures.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(drawn) == {"tree.svg", "step.svg", "plan.svg"}
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
