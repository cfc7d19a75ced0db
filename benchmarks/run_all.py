"""Run every benchmark, one process each, and rewrite BENCHMARKS.md. `make bench` runs this.

Run: python benchmarks/run_all.py. Those on texts of real trajectories need the folder that TREETRAIN_SHARED_DATA names
(default: ../shared/data) and are left out, by name, where it is not there.
"""

import subprocess
import sys
from pathlib import Path

from workloads import DATA

HERE = Path(__file__).parent
NEEDS_DATA = ("lost_sharing.py", "overhead.py", "read_speed.py")
PAGE = "page.py"
OTHERS = (
    Path(__file__).name,
    PAGE,
    "check_commits.py",
    "calculator.py",
    "smoke.py",
    "quarter_hour.py",
    "gpu_table.py",
    "gpu_training.py",
)
"""Scripts that append no rows for the page, one that takes hours, and those for a GPU."""


def main() -> int:
    """Run all; returns 1 if a benchmark failed or was skipped."""
    missing = []
    for script in benchmarks():
        if script.name in NEEDS_DATA and not DATA.is_dir():
            missing.append(script.name)
            continue
        print(f"== {script.name}", flush=True)
        subprocess.run([sys.executable, str(script)], check=True)
    subprocess.run([sys.executable, str(HERE / PAGE)], check=True)
    if missing:
        print(f"left out: {', '.join(missing)}, whose data is not at {DATA}; set TREETRAIN_SHARED_DATA")
    return 1 if missing else 0


def benchmarks() -> list[Path]:
    """Scripts of this folder that can be run, the quick ones (without data) first."""
    scripts = [path for path in sorted(HERE.glob("*.py")) if '__name__ == "__main__"' in path.read_text("utf-8")]
    chosen = [path for path in scripts if path.name not in OTHERS]
    return sorted(chosen, key=lambda path: path.name in NEEDS_DATA)


if __name__ == "__main__":
    sys.exit(main())
