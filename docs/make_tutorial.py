"""Runs docs/tutorial.md and writes what its blocks print into the page.

Run: python docs/make_tutorial.py. With --check nothing is written: it prints each output, and fails if one differs from
the page in more than decimal numbers, which are measurements and rounding errors.
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"<!-- run -->\n```(?P<language>bash|python)\n(?P<code>.*?)```\n(?P<between>.*?)"
    r"<!-- output -->\n```text\n(?P<output>.*?)```",
    re.DOTALL,
)


def main(*, check: bool) -> int:
    """Run all blocks in order; returns 1 if an output differs from the page's."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    names: dict[str, object] = {}
    differing = 0

    def run(block: re.Match[str]) -> str:
        nonlocal differing
        printed = (by_command if block["language"] == "bash" else by_code)(block["code"], names)
        print(f"$ {block['code'].splitlines()[0]} ...\n{printed}")
        if plain(printed) != plain(block["output"]):
            differing += 1
            if check:
                pages, ours = block["output"].splitlines(), printed.splitlines()
                print(
                    "\n".join(difflib.unified_diff(pages, ours, "docs/tutorial.md", "what it prints now", lineterm=""))
                )
        return block[0][: block.start("output") - block.start()] + printed + "```"

    page = BLOCK.sub(run, PAGE.read_text(encoding="utf-8"))
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if differing:
        print(f"{differing} outputs differ from docs/tutorial.md: run python docs/make_tutorial.py")
    return int(differing > 0)


def by_command(code: str, _names: dict[str, object]) -> str:
    """What a `treetrain` command prints on stdout."""
    command = [sys.executable, "-m", *shlex.split(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{code}{done.stdout}{done.stderr}exit code {done.returncode}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def by_code(code: str, names: dict[str, object]) -> str:
    """What Python code prints; blocks share their names."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs/tutorial.md", "exec"), names)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def plain(output: str) -> list[str]:
    """The lines without what rounding decides (decimals, which parameter is worst), and without alignment."""
    without = re.compile(r"\d+(\.\d+)?e[+-]?\d+|\d+\.\d+|model\.[\w.]+")
    return [" ".join(without.sub("#", line).split()) for line in output.splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Compare with the page and write nothing.")
    sys.exit(main(check=parser.parse_args().check))
