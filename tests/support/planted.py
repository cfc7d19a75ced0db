"""A phase of benchmarks/quarter_hour.py in whose process an error was planted.

PLANTED names the error of each phase, as JSON: "crash" ends the process in the phase's first case, "hang" makes that
case sleep, "wrong" falsifies the default attention on trees with forks, larger ones than the forest that an engine
compares at first use (which would refuse the model). Layers are not compiled, to save time.
"""

# ruff: noqa: E402
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import numpy as np
import torch

import gpu_cases
import quarter_hour
from treetrain.kernels.backends import BACKENDS

NAME = sys.argv[sys.argv.index("--phase") + 1]
FIRST_USE_TOKENS = 35
"""The tokens of the forest of `first_use`."""
ERROR = json.loads(os.environ["PLANTED"]).get(NAME)


def falsify() -> None:
    """Make the default attention of a CPU wrong by a tenth in large forests with two segments of the same parent."""
    make = BACKENDS["rectangles"]

    def wrong(forest, *others):
        made = make(forest, *others)
        parents = forest.segment_parent[forest.segment_parent >= 0]
        if len(forest.ends) > FIRST_USE_TOKENS and len(np.unique(parents)) < len(parents):
            right = made.forward
            made.forward = lambda *given: (lambda out, *rest: (1.1 * out, *rest))(*right(*given))
        return made

    BACKENDS["rectangles"] = wrong


def plant_in_first_case() -> None:
    """Let the first case of the phase crash or hang."""
    case, errors = quarter_hour.Phase.case, {"crash": os.abort, "hang": lambda: time.sleep(3600)}
    waiting = [errors[ERROR]]

    def planted(self, name, call):
        case(self, name, waiting.pop() if waiting else call)

    quarter_hour.Phase.case = planted


gpu_cases.rehearse = lambda: setattr(torch, "compile", lambda function, **_: function)
if ERROR == "wrong":
    falsify()
elif ERROR:
    plant_in_first_case()
sys.exit(quarter_hour.main())
