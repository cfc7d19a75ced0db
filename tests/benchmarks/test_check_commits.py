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
    for commit, why in ((f"{first}+", "uncommitted"), (other[:10], "not in this history"), ("", "not in this history")):
        name_commit(checkout, commit)
        assert check.main(checkout) == 1
        printed = capsys.readouterr().out
        assert "benchmarks/results/a.csv:2" in printed and why in printed


def test_ids_of_the_pages_are_read_too(check, checkout, capsys):
    first = git(checkout, "rev-parse", "--short", "HEAD~1")
    (checkout / "README.md").write_text(f"words\n\na machine; commit {first}, 0123abc\n")
    assert check.main(checkout) == 1
    assert "README.md:3: 0123abc is not in this history" in capsys.readouterr().out


def test_without_a_history_nothing_is_checked_and_a_line_says_why(check, checkout, tmp_path, capsys):
    name_commit(checkout, "0123abc")
    shutil.copytree(checkout, tmp_path / "archive", ignore=shutil.ignore_patterns(".git"))
    assert check.main(tmp_path / "archive") == 0
    assert "no git repository" in capsys.readouterr().out
    git(checkout, "commit", "-qam", "three")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{checkout}", "shallow")
    assert check.main(tmp_path / "shallow") == 0
    assert "shallow" in capsys.readouterr().out
    inside = checkout / "vendored"
    shutil.copytree(tmp_path / "archive", inside)
    assert check.main(inside) == 0
    assert "another one" in capsys.readouterr().out
