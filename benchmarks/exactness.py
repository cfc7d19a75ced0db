"""The worst gradient errors that the exactness tests see, as result rows.

Run: python benchmarks/exactness.py. Runs tests/engine/test_numerics.py (random branching forests, every loss) and
tests/engine/test_real_data.py and appends what they record to results/exactness.csv.

Run: python benchmarks/exactness.py trainers. Runs trainers of TRL and transformers for 20 steps with share_prefixes and
without, on one process and two, and appends how far logged metrics, final weights and what training has added to them
are apart to results/trainer_exactness.csv.
"""

import ast
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import rows

ROOT = Path(__file__).parents[1]
TESTS = {
    "exactness": ("tests/engine/test_numerics.py", "tests/engine/test_real_data.py"),
    "trainer_exactness": (
        "tests/trainers/test_share_prefixes.py",
        "tests/trainers/test_share_prefixes_ranks.py",
        "-m",
        "slow",
    ),
}


def main() -> None:
    table = "trainer_exactness" if sys.argv[1:] == ["trainers"] else "exactness"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *TESTS[table],
            "-q",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
        ]
        outcome = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        for entry in case.iter("property"):
            name, value = entry.attrib["name"], entry.attrib["value"]
            errors = ast.literal_eval(value) if name == "errors" else {f"float32 {name}": float(value)}
            for kind, error in errors.items():
                number = str(error) if kind == "distinct forests" else f"{error:.2e}"
                rows.append(table, {"test": case.attrib["name"], "what": kind, "value": number})
    sys.exit(outcome)


if __name__ == "__main__":
    main()
