"""What the project says about itself in several files is the same in all of them."""

import importlib.util
import os
import re
import subprocess
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


ADDRESS = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
NO_ADDRESS = "<the address of this repository>"


def test_the_address_of_the_repository_stands_wherever_it_is_needed():
    """CONTRIBUTING.md lists these places; they are filled by hand when pyproject.toml names the address."""
    assert f"git clone {ADDRESS or NO_ADDRESS} treetrain" in read("README.md")
    assert ("repository-code: " in read("CITATION.cff")) == bool(ADDRESS)
    assert not ADDRESS or f"repository-code: {ADDRESS}" in read("CITATION.cff")
    assert not ADDRESS or f"{ADDRESS}/actions/workflows/ci.yml/badge.svg" in read("README.md")


def test_links_of_the_readme_are_absolute_in_the_packages_and_text_without_an_address():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = "![a tree](docs/a.svg) see [b](docs/b.md#c), [d](https://e/f), [g](#h)"
    assert hook.with_absolute_links(text, "https://x/y") == (
        "![a tree](https://x/y/raw/main/docs/a.svg) see [b](https://x/y/blob/main/docs/b.md#c), "
        "[d](https://e/f), [g](#h)"
    )
    assert hook.with_absolute_links(text, "") == " see b, [d](https://e/f), [g](#h)"
    assert hook.urls("https://x/y")["Issues"] == "https://x/y/issues"
    assert all(address.startswith("https://arxiv.org/") for address in hook.urls("").values())


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


@pytest.mark.parametrize("tool", ["ruff", "pyright"])
def test_a_tool_of_the_linters_has_one_exact_version_in_all_files(tool):
    asked = {one for extra in PROJECT["optional-dependencies"].values() for one in extra if one.startswith(tool)}
    (pinned,) = asked
    assert re.fullmatch(rf"{tool}==[\d.]+", pinned)
    workflows = [str(path.relative_to(ROOT)) for path in (ROOT / ".github/workflows").glob("*.yml")]
    for name in ("Makefile", ".pre-commit-config.yaml", *workflows):
        for line in read(name).splitlines():
            if re.search(rf"\b{tool}\s*[=<>~!]|install\b.*\b{tool}\b", line):
                assert pinned in line, f"{name}: {line.strip()}, where pyproject.toml has {pinned}"


def test_the_hooks_before_a_commit_run_the_linter_of_make_lint():
    yaml = pytest.importorskip("yaml")
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    asked = [one for hook in hooks if hook["entry"].startswith("ruff ") for one in hook["additional_dependencies"]]
    assert len(asked) == 2 and set(asked) < set(PROJECT["optional-dependencies"]["dev"])


def workflow(name: str) -> dict:
    return pytest.importorskip("yaml").safe_load(read(f".github/workflows/{name}.yml"))


def test_ci_tests_the_versions_of_python_that_the_package_and_the_docs_name():
    named = [found for one in PROJECT["classifiers"] if (found := one.rpartition(":: ")[2]).startswith("3.")]
    jobs = workflow("ci")["jobs"]
    tested = [job["strategy"]["matrix"]["python"] for job in (jobs["tests"], jobs["wheel"])]
    assert tested == [named, named]
    assert f"| python | {named[0]} | {named[-1]} |" in read("docs/versions.md")


@pytest.mark.parametrize("name", ["ci", "publish"])
def test_a_job_that_lints_has_the_history_in_which_commits_of_rows_are_looked_up(name):
    for job in workflow(name)["jobs"].values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [])
        runs = [step.get("run") for step in job["steps"]]
        if "lint" in targets or "make test" in runs or "make lint" in runs:
            assert [step["with"]["fetch-depth"] for step in job["steps"] if "checkout" in step.get("uses", "")] == [0]


@pytest.mark.parametrize(
    "open_issue, written", [("", "issue create --title The nightly run fails"), ("7", "issue comment 7")]
)
def test_a_nightly_run_that_fails_opens_an_issue_or_writes_to_the_open_one(open_issue, written, tmp_path):
    jobs = workflow("nightly")["jobs"]
    report = jobs["report"]
    assert report["needs"] == "nightly" and report["permissions"] == {"actions": "read", "issues": "write"}
    assert "secrets" not in read(".github/workflows/nightly.yml")
    (step,) = report["steps"]
    client = tmp_path / "gh"
    client.write_text(
        '#!/bin/sh\necho "$@" >> "$CALLS"\n'
        'case "$1 $2" in\n"run view") echo "- [test-next](https://x/1)";;\n"issue list") echo "$OPEN";;\nesac\n'
    )
    client.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "OPEN": open_issue}
    environment |= {"RUN": "12", "TITLE": step["env"]["TITLE"]}
    subprocess.run(["bash", "-c", step["run"]], env=environment, check=True)
    asked = (tmp_path / "calls").read_text()
    assert written in asked and "- [test-next](https://x/1)" in asked.partition(written)[2]
    assert ("issue create" in asked) != ("issue comment" in asked)


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
