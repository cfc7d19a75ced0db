"""How fast files are read, in one process, and what tokenisation adds. Run: python benchmarks/read_speed.py

Three kinds of JSONL: token rows (those of inspect_scale.py), the conversations of tau_airline, and the short ones of
tot_game24. Each is parsed, with the refusal of keys that an object has twice; by `json.loads` alone, for comparison;
and made into checked rows, with the real Qwen3 tokenizer where it is needed. The ways take turns. Figures are medians
of megabytes of file a second of CPU time, appended to results/read_speed.csv; a kind that has its row at this commit is
left out.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows as result_rows
import treetrain as tt
from inspect_scale import write_rows
from treetrain.logs.files import read_records
from workloads import DATA, tokenizer


def plainly(path: Path) -> None:
    """Parse every line and check nothing."""
    for line in path.open("rb"):
        json.loads(line)


def parsed(path: Path) -> None:
    """Parse and check every record."""
    for _, record in read_records(path):
        assert isinstance(record, dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000, help="token rows of 2,000 tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry-run", **result_rows.DRY_RUN)
    arguments = parser.parse_args()
    words = tokenizer()
    chats = {"tokenizer": words, "tools": DATA / "tau_airline" / "tools.json"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        write_rows(path, arguments.rows)
        kinds: dict[str, tuple[Path, dict[str, Any]]] = {
            "token rows": (path, {}),
            "tau_airline, transcripts": (DATA / "tau_airline" / "trajectories.jsonl", chats),
            "tau_airline, calls": (DATA / "tau_airline" / "trajectories.jsonl", chats | {"view": "calls"}),
            "tot_game24": (DATA / "tot_game24_bfs" / "trajectories.jsonl", {"tokenizer": words}),
        }
        for name, (file, options) in kinds.items():
            if not arguments.dry_run and result_rows.has("read_speed", kind=name):
                continue
            ways: dict[str, Callable[[], Any]] = {
                "json_loads": lambda file=file: plainly(file),
                "parsed": lambda file=file: parsed(file),
                "rows": lambda file=file, options=options: tt.load(file, **options),
            }
            size = os.path.getsize(file)
            found: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(arguments.repeats):
                for way, run in ways.items():
                    begun = time.process_time()
                    run()
                    found[way].append(size / 1e6 / (time.process_time() - begun))
            row = {"kind": name, "file_bytes": size, "rounds": arguments.repeats}
            for way, speeds in found.items():
                row[f"{way}_mb_per_s"] = f"{statistics.median(speeds):.1f}"
                row |= {f"{way}_mb_per_s_{of.__name__}": f"{of(speeds):.1f}" for of in (min, max)}
            result_rows.report("read_speed", row, dry_run=arguments.dry_run)


if __name__ == "__main__":
    main()
