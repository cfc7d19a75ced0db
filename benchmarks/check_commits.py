"""Do the rows of results and the pages name commits of this history? `make lint` runs this.

Run: python benchmarks/check_commits.py. A row of results has the commit that made it. An id that is not in the history,
or that has a + (made with changes that were not committed), says nothing about what was measured. Ids are also read
from BENCHMARKS.md, the README and docs/, where they follow the word commit. Exit code 1 if one is wrong. Without git or
a history to look in (an unpacked archive, a shallow clone) nothing is checked, and a line says so.
"""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ID = r"\b[0-9a-f]{7,40}\b\+?"
AFTER_COMMIT = re.compile(rf"\bcommits?:? ((?:`?{ID}`?(?:, | and )?)+)", re.IGNORECASE)


def main(root: Path = ROOT) -> int:
    """Check all ids below a folder; prints what is wrong."""
    if reason := no_history(root):
        print(f"commits of benchmarks are not checked: {reason}")
        return 0
    wrong = 0
    known: dict[str, bool] = {}
    for place, commit in named(root):
        if commit not in known:
            # Names of branches and tags are no ids: what they name changes.
            is_id = re.fullmatch(ID, commit) is not None
            known[commit] = is_id and _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None
        if not known[commit]:
            wrong += 1
            why = "was made with uncommitted changes" if commit.endswith("+") else "is not in this history"
            print(f"{place}: {commit or 'no commit'} {why}: measure it anew, or delete it")
    return int(wrong > 0)


def no_history(root: Path) -> str | None:
    """Why ids cannot be looked up; None if they can."""
    shallow = _git(root, "rev-parse", "--is-shallow-repository")
    if shallow is None:
        return "git is not installed, or reads no repository here"
    if shallow == "true":
        return "this clone is shallow (git fetch --unshallow)"
    top = _git(root, "rev-parse", "--show-toplevel")
    return None if top is not None and Path(top) == root.resolve() else f"the git repository is another one, {top}"


def named(root: Path) -> Iterator[tuple[str, str]]:
    """(place, id) of every commit that is named."""
    results = root / "benchmarks" / "results"
    for path in sorted(results.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in (reader := csv.DictReader(file)):
                yield f"{path.relative_to(root)}:{reader.line_num}", row.get("commit") or ""
    for path in sorted(results.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if commit := json.loads(line).get("commit"):
                yield f"{path.relative_to(root)}:{number}", commit
    for path in (root / "BENCHMARKS.md", root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for ids in AFTER_COMMIT.findall(line):
                for commit in re.findall(ID, ids):
                    yield f"{path.relative_to(root)}:{number}", commit


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or is not there."""
    try:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
