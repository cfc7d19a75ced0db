"""What the project says about itself in several files is the same in all of them."""

import re
import tomllib
from pathlib import Path

import pytest

import treetrain as tt
from treetrain.cli import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = ("README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))))
PROSE = (
    "CITATION.cff",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "CHANGELOG.md",
    "pyproject.toml",
    *PAGES,
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_that_of_the_citation_and_of_the_newest_release_in_the_changelog():
    cited = re.search(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE)
    assert cited is not None and cited[1] == tt.__version__
    assert re.findall(r"^## (\d\S*)", read("CHANGELOG.md"), re.MULTILINE)[0] == tt.__version__


def test_every_extra_that_a_message_or_a_page_names_exists():
    extras = set(PROJECT["optional-dependencies"])
    assert {*EXTRAS.values(), "train"} <= extras
    for name in PAGES:
        for named in re.findall(r"pip install [^\n]*?(?:\.|treetrain)\[([a-z,]+)\]", read(name)):
            assert set(named.split(",")) <= extras, f"{name}: {named}"


def test_nothing_is_a_placeholder():
    for name in PROSE:
        assert not re.search(r"example\.(com|org)|TODO|FIXME|YOUR[-_ ]|OWNER/|<[a-z ]+@", read(name)), name


def test_the_oldest_versions_of_the_docs_are_those_of_the_package():
    everything = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    rows = re.findall(r"^\| ([a-z]+) \| ([\d.]+) \|", read("docs/versions.md"), re.MULTILINE)
    assert {"python", "torch", "transformers", "trl"} <= {package for package, _ in rows}
    for package, oldest in rows:
        if package == "python":
            assert PROJECT["requires-python"] == f">={oldest}"
        else:
            assert any(re.match(rf"{package}>={re.escape(oldest)}(,|$)", one) for one in everything), (package, oldest)


def test_ci_runs_targets_of_the_makefile_and_nothing_else():
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z][a-z-]+):", read("Makefile"), re.MULTILINE))
    run = {}
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            several = job.get("strategy", {}).get("matrix", {}).get("target", [])
            for step in job["steps"]:
                for target in re.findall(r"\bmake (\S+(?: matrix\.target \}\})?)", step.get("run", "")):
                    run |= dict.fromkeys(several if target.startswith("${{") else [target], path.name)
    assert {"lint", "types", "test", "pytest-fast", "test-oldest", "test-newest", "test-next", "test-wheel"} <= set(run)
    assert set(run) <= targets, {target: name for target, name in run.items() if target not in targets}
