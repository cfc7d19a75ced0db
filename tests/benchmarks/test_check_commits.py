"""benchmarks/check_commits.py: every commit that rows and pages name is in the history."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "check_commits.py"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("check_commits", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    run = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository of two commits, the second of which has a row of results."""
    folder = tmp_path / "project"
    (folder / "benchmarks" / "results").mkdir(parents=True)
    (folder / "README.md").write_text("a machine; commit ")
    (folder / "BENCHMARKS.md").write_text("# Benchmarks")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    name_commit(folder, git(folder, "rev-parse", "--short", "HEAD"))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "two")
    return folder


def name_commit(folder: Path, commit: str) -> None:
    (folder / "benchmarks" / "results" / "a.csv").write_text(f"date,commit\n2026-01-01,{commit}\n")


def test_commits_of_the_history_pass(check, checkout, capsys):
    assert check.main(checkout) == 0
    assert capsys.readouterr().out == ""


def test_an_id_that_is_elsewhere_or_was_not_committed_is_named_with_its_line(check, checkout, capsys):
    first = git(checkout, "rev-parse", "--short", "HEAD~1")
    other = git(checkout, "commit-tree", "HEAD^{tree}", "-m", "a commit of no branch")
    branch = git(checkout, "symbolic-ref", "--short", "HEAD")
    elsewhere = "not in this history"
    for commit, why in ((f"{first}+", "uncommitted"), (other[:10], elsewhere), ("", elsewhere), (branch, elsewhere)):
        name_commit(checkout, commit)
        assert check.main(checkout) == 1
        printed = capsys.readouterr().out
        assert "benchmarks/results/a.csv:2" in printed and why in printed


def test_rows_without_the_column_are_named(check, checkout, capsys):
    (checkout / "benchmarks" / "results" / "a.csv").write_text("date\n2026-01-01\n")
    assert check.main(checkout) == 1
    assert "benchmarks/results/a.csv:2: no commit" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "BENCHMARKS.md", "docs/memory.md"])
@pytest.mark.parametrize("written", ["commit {}, 0123abc", "commits `{}` and `0123abc`", "Commit: 0123abc"])
def test_ids_of_the_pages_are_read_too(check, checkout, capsys, page, written):
    first = git(checkout, "rev-parse", "--short", "HEAD~1")
    (checkout / "docs").mkdir()
    (checkout / page).write_text(f"words that commit nobody\n\na machine; {written.format(first)}\n")
    assert check.main(checkout) == 1
    assert capsys.readouterr().out == f"{page}:3: 0123abc is not in this history: measure it anew, or delete it\n"


def test_without_a_history_nothing_is_checked_and_a_line_says_why(check, checkout, tmp_path, capsys):
    name_commit(checkout, "0123abc")
    shutil.copytree(checkout, tmp_path / "archive", ignore=shutil.ignore_patterns(".git"))
    assert check.main(tmp_path / "archive") == 0
    assert "reads no repository here" in capsys.readouterr().out
    git(checkout, "commit", "-qam", "three")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{checkout}", "shallow")
    assert check.main(tmp_path / "shallow") == 0
    assert "shallow" in capsys.readouterr().out
    inside = checkout / "vendored"
    shutil.copytree(tmp_path / "archive", inside)
    assert check.main(inside) == 0
    assert "another one" in capsys.readouterr().out
