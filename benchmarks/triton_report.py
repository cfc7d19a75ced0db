"""Compile the Triton kernels for Hopper and report shared memory, registers and spills. Needs no GPU.

Run: python benchmarks/triton_report.py [--kernels attention,head] [--sizes 64,128,256] [--dtypes bfloat16,float32]
[--all]. Needs Triton, whose wheel carries the assembler. Prints one line for each kernel of attention in each block
size that `triton_shapes.candidates` lists (without --all: in the default one), and for those of the LM head; a
kernel that needs more shared memory than a multiprocessor has is an error.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED_BYTES = 227 << 10
"""Shared memory of one block on sm_90."""
INTEGERS = ("end_ptr", "depth_ptr", "lowest_ptr", "order_ptr", "bounds_ptr", "list_ptr")
SHORT = {"bfloat16": "bf16", "float32": "fp32"}
FLOATS = ("lse_ptr", "delta_ptr", "dk_ptr", "dv_ptr")


def compiled(kernel: Any, dtype: str, size: int, shape: Any, **flags: bool) -> Any:
    """A kernel as Triton compiles it for sm_90.

    Args:
        dtype: bf16 or fp32.
        shape: `triton_attention.Shape`.
        flags: CAPPED, LOCAL, SINKS.
    """
    power = max(16, 1 << (size - 1).bit_length())
    values: dict[str, Any] = {"HEADS": 16, "GROUPS": 8, "SIZE": size, "VALUE_SIZE": size, "BLOCK_D": power}
    values |= {"BLOCK_V": power, "TILE": 128, "BLOCK_M": shape.queries, "BLOCK_N": shape.keys}
    values |= {"CAPPED": False, "LOCAL": False, "SINKS": False, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    values |= flags
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in values:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name in INTEGERS else "*fp32" if name in FLOATS else f"*{dtype}"
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("scale", "cap") else "i32"
    constants = {name: values[name] for name in kernel.arg_names if name in values}
    return _for_hopper(kernel, signature, constants, attributes, num_warps=shape.warps, num_stages=shape.stages)


def _for_hopper(kernel: Any, signature: Any, constants: Any, attributes: Any, **options: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compiled_head(kernel: Any, dtype: str, *, entropy: bool) -> Any:
    """A kernel of the LM head as Triton compiles it for sm_90, for a vocabulary that is a multiple of 16."""
    from treetrain.engine.lm_head_kernels import BLOCK, WARPS

    types = {"logits_ptr": f"*{dtype}", "first_ptr": "*i64", "target_ptr": "*i64", "factor": "fp32"}
    types |= {"stride": "i32", "vocabulary": "i32"}
    constants = {"BLOCK": BLOCK, "ENTROPY": entropy}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    whole = [place for place, name in enumerate(kernel.arg_names) if name not in (*constants, "factor")]
    return _for_hopper(
        kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in whole}, num_warps=WARPS
    )


def assembled(binary: Any) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills) as the assembler says."""
    from triton.backends.nvidia.compiler import get_ptxas  # the one whose PTX this Triton writes

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(binary.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return tuple(int(found.group(1)) if found else 0 for found in numbers)  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="attention,head")
    parser.add_argument("--sizes", default="64,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--all", action="store_true", help="every candidate")
    options = parser.parse_args()
    dtypes, too_large = options.dtypes.split(","), 0
    if "attention" in options.kernels.split(","):
        too_large += report_attention([int(size) for size in options.sizes.split(",")], dtypes, every=options.all)
    if "head" in options.kernels.split(","):
        too_large += report_head(dtypes)
    return min(too_large, 1)


def report_attention(sizes: list[int], dtypes: list[str], *, every: bool) -> int:
    """Print a line per kernel; returns how many need too much shared memory."""
    import torch

    from treetrain.softmax_attention import triton_kernels
    from triton_shapes import candidates

    too_large = 0
    for name, size in itertools.product(dtypes, sizes):
        for kernel_name, listed in candidates(size, getattr(torch, name)).items():
            for shape in listed if every else listed[:1]:
                kernel = getattr(triton_kernels, f"{kernel_name}_kernel")
                binary = compiled(kernel, SHORT[name], size, shape)
                too_large += say(f"{name} {size} {kernel_name} {shape}", binary)
    return too_large


def report_head(dtypes: list[str]) -> int:
    """See `report_attention`."""
    from treetrain.engine import lm_head_kernels

    too_large = 0
    for name, kernel_name, entropy in itertools.product(dtypes, ("statistics", "gradient"), (False, True)):
        binary = compiled_head(getattr(lm_head_kernels, f"{kernel_name}_kernel"), SHORT[name], entropy=entropy)
        too_large += say(f"{name} head {kernel_name}{', entropy' if entropy else ''}", binary)
    return too_large


def say(what: str, binary: Any) -> bool:
    """Print the resources of a kernel; returns whether it needs too much shared memory."""
    shared, (registers, spilled), code = binary.metadata.shared, assembled(binary), binary.asm["ptx"]
    units = "wgmma" if "wgmma" in code else "mma" if "mma.sync" in code else "no tensor cores"
    numbers = f"{shared} bytes shared, {registers} registers, {spilled} bytes spilled"
    ahead = fetches_ahead(binary.asm["ttgir"])
    print(f"{what}: {numbers}, {units}{'' if ahead is None else ', fetches ahead' if ahead else ', waits'}", flush=True)
    return shared > SHARED_BYTES


def fetches_ahead(code: str) -> bool | None:
    """Whether every loop step leaves asynchronous copies in flight; None if there are none."""
    innermost = re.findall(r"scf\.for((?:(?!scf\.for).)*?)scf\.yield", code, re.DOTALL)
    left = [int(number) for body in innermost for number in re.findall(r"async_wait[^\n]*\{num = (\d+)", body)]
    return all(left) if left else None


if __name__ == "__main__":
    sys.exit(main())
