"""Time and memory of `treetrain inspect` on a file of token rows.

Run: python benchmarks/inspect_scale.py [--rows 20000] [--two] [--repeats 5] [--dry-run]

Writes a JSONL file of tool-agent-like rows of 2,000 tokens (one system prompt of 400 tokens, groups of 8 rows with a
prompt of 900 more; masks, rewards), inspects it in processes of their own with all defaults, and appends medians of
time, speed and peak memory to results/inspect_scale.csv. A million rows are 2 billion tokens and a file of 19 GB; the
default is a fiftieth. With --two the rows are two random tokens, so that only what is paid for each row counts. The
file is removed afterwards.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import rows as result_rows

GROUP = 8
SYSTEM, PROMPT, ANSWER = 400, 900, 700


def write_rows(path: Path, count: int) -> None:
    """Write the file; every number of a row is made here, so that it is read back as it would be from a log."""
    drawn = np.random.default_rng(0)
    words = np.array([str(token) for token in range(100_000)])

    def some(tokens: int) -> str:
        return ", ".join(words[drawn.integers(5, len(words), tokens)])

    system = some(SYSTEM)
    mask = ", ".join(["0"] * 1000 + ["1"] * 200 + ["0"] * 300 + ["1"] * 500)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            if number % GROUP == 0:
                prompt = some(PROMPT)
            file.write(
                f'{{"input_ids": [{system}, {prompt}, {some(ANSWER)}], "loss_mask": [{mask}], '
                f'"reward": {drawn.random():.3f}, "group_id": "task-{number // GROUP}"}}\n'
            )


def write_two(path: Path, count: int) -> None:
    """Write rows of two random tokens."""
    pairs = np.random.default_rng(0).integers(0, 100_000, (count, 2)).tolist()
    path.write_text("".join(f'{{"input_ids": [{one}, {other}]}}\n' for one, other in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of 2,000 tokens")
    parser.add_argument("--two", action="store_true", help="rows of two random tokens")
    parser.add_argument("--folder", help="where the file is written; not given: the system's temporary folder")
    parser.add_argument("--dry-run", **result_rows.DRY_RUN)
    parser.add_argument("--repeats", type=int, default=5, help="inspections of the file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder, "rows.jsonl")
        (write_two if arguments.two else write_rows)(path, arguments.rows)
        size = path.stat().st_size
        command = [sys.executable, "-m", "treetrain", "inspect", str(path), "--json"]
        command += ["--html", str(Path(folder, "page.html"))]
        measured = []
        for _ in range(arguments.repeats):
            begun = time.perf_counter()
            with open(Path(folder, "report.json"), "w+", encoding="utf-8") as out:
                process = subprocess.Popen(command, stdout=out, env=os.environ | {"TMPDIR": folder})
                _, status, used = os.wait4(process.pid, 0)
                out.seek(0)
                report = json.load(out)
            assert status == 0
            measured.append((time.perf_counter() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3))
        walls, processor, peaks = zip(*measured)
        seconds = statistics.median(walls)
        found = report["file"]  # of a sample, if the file does not fit in memory
        if arguments.two:
            tokens, unique = found["flat"], found["unique"]
            assert tokens == 2 * arguments.rows
        else:
            tokens = arguments.rows * (SYSTEM + PROMPT + ANSWER)
            unique = SYSTEM + -(-arguments.rows // GROUP) * PROMPT + arguments.rows * ANSWER
            assert abs(found["overlap"] - (1 - unique / tokens)) < 1e-2, found
        row = {
            "rows": arguments.rows,
            "flat_tokens": tokens,
            "file_bytes": size,
            "unique_tokens": unique,
            "flop_speedup": f"{found['flop_speedup']:.3f}",
            "rounds": arguments.repeats,
            "seconds": f"{seconds:.1f}",
            "cpu_seconds": f"{statistics.median(processor):.1f}",
            "cpu_seconds_min": f"{min(processor):.1f}",
            "cpu_seconds_max": f"{max(processor):.1f}",
            "mb_per_s": f"{size / 1e6 / seconds:.1f}",
            "peak_rss_mb": f"{statistics.median(peaks):.0f}",
            "page_bytes": Path(folder, "page.html").stat().st_size,
        }
        result_rows.report("inspect_scale", row, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
