"""Record the worst errors of the exactness tests as result rows.

Run: python benchmarks/exactness.py [engine | fields | trainers | adamw] [--dry-run] [options of pytest, such as
-k "dpo and float32"]

engine (the default) runs tests/engine/test_numerics.py (random branching forests, every loss) and
tests/engine/test_real_data.py; rows are appended to results/exactness.csv. fields runs tests of what rows may carry
(sets of ids, teachers, adapters, experts, images, tokens that count once), also on two ranks, for the same table.

trainers runs the trainers of TRL and transformers for 20 steps with share_prefixes and without, on one process and on
two. Rows hold the differences of logged metrics, final weights and weight updates; they are appended to
results/trainer_exactness.csv.

adamw runs these trainers with AdamW at a learning rate of 1e-2 for 3 steps and for 20. Rows hold the relative
differences of weights and of their updates; they are appended to results/adamw_exactness.csv.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import rows

ROOT = Path(__file__).parents[1]
WORKS = {
    "engine": ("exactness", ["tests/engine/test_numerics.py", "tests/engine/test_real_data.py"]),
    "fields": (
        "exactness",
        [
            *("tests/engine/test_given_ids.py", "tests/engine/test_distill.py", "tests/engine/test_adapters.py"),
            *("tests/engine/test_count_once.py", "tests/engine/test_images.py", "tests/models/test_moe_contract.py"),
            *("tests/parallel/test_distill_ranks.py", "tests/parallel/test_engine_ranks.py"),
            *(
                "-k",
                "gradients_of_rows_alone or ranks_distil or ranks_with_sets or its_own_rows or recorded_experts or"
                " each_sampled_token or with_images_is_exact",
            ),
        ],
    ),
    "trainers": (
        "trainer_exactness",
        [
            *("tests/trainers/test_share_prefixes.py", "tests/trainers/test_share_prefixes_ranks.py"),
            "tests/trainers/test_other_trl_trainers.py",
            *("-m", "slow", "-k", "not adamw_weights"),
        ],
    ),
    "adamw": ("adamw_exactness", ["tests/trainers/test_share_prefixes.py", "-m", "slow", "-k", "adamw_weights"]),
}


def main() -> int:
    """Run the tests and report their records; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="?", default="engine", choices=WORKS)
    parser.add_argument("--dry-run", **rows.DRY_RUN)
    options, pytest_options = parser.parse_known_args()
    table, tests = WORKS[options.work]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *tests, "-q", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        outcome = subprocess.run([*command, *pytest_options], cwd=ROOT, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        for entry in case.iter("property"):
            name, value = entry.attrib["name"], entry.attrib["value"]
            errors = ast.literal_eval(value) if name == "errors" else {f"float32 {name}": float(value)}
            for kind, error in errors.items():
                number = str(error) if kind == "distinct forests" else f"{error:.2e}"
                row = {"test": case.attrib["name"], "what": kind, "value": number}
                rows.report(table, row, dry_run=options.dry_run)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
