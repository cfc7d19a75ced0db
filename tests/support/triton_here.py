"""Whether Triton's kernels can run: on a GPU where there is one, else by Triton's interpreter on the CPU."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()


def triton_or_skip() -> None:
    """Skip the test, or the file that calls this before it imports kernels, where they cannot run."""
    if not GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and the kernels are defined
    pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot run here")
    import triton.language as tl

    if not GPU and type(tl.sum).__name__ == "JITFunction":
        reason = "Triton was imported for a GPU that is not here; run this file alone, with TRITON_INTERPRET=1"
        pytest.skip(reason, allow_module_level=True)
