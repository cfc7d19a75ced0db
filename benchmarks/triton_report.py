"""What the compiler makes of the Triton kernels for Hopper: shared memory, registers, spills. Needs no GPU.

Run: python benchmarks/triton_report.py [--sizes 64,128,256] [--dtypes bfloat16,float32] [--all]. Needs Triton, whose
wheel carries the assembler. Prints one line for each kernel in each block size that `triton_shapes.candidates` lists
(without --all: in the default one); a kernel that asks for more shared memory than a multiprocessor has is an error.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED_BYTES = 227 << 10
"""Of one block on sm_90."""
INTEGERS = ("end_ptr", "depth_ptr", "lowest_ptr", "order_ptr", "bounds_ptr", "list_ptr")
FLOATS = ("lse_ptr", "delta_ptr", "dk_ptr", "dv_ptr")


def compiled(kernel: Any, dtype: str, size: int, shape: Any, **flags: bool) -> Any:
    """A kernel as Triton compiles it for sm_90.

    Args:
        dtype: bf16 or fp32.
        shape: `triton_shapes.Shape`.
        flags: CAPPED, LOCAL, SINKS.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembled(binary: Any) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills) as the assembler says."""
    import triton.backends.nvidia as nvidia

    assembler = Path(nvidia.__file__).parent / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(binary.asm["ptx"])
        command = [str(assembler), "-v", "--gpu-name=sm_90a", str(source), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return tuple(int(found.group(1)) if found else 0 for found in numbers)  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--all", action="store_true", help="every candidate")
    options = parser.parse_args()
    import torch

    from treetrain.attention import triton_kernels
    from treetrain.attention.triton_shapes import candidates

    too_large = 0
    for name in options.dtypes.split(","):
        for size in map(int, options.sizes.split(",")):
            listed = candidates(size, getattr(torch, name))
            for shapes in listed if options.all else listed[:1]:
                for kernel_name, shape in zip(shapes._fields, shapes):
                    kernel = getattr(triton_kernels, f"{kernel_name}_kernel")
                    binary = compiled(kernel, "fp32" if name == "float32" else "bf16", size, shape)
                    shared = binary.metadata.shared
                    registers, spilled = assembled(binary)
                    products = "wgmma" if "wgmma" in binary.asm["ptx"] else "no tensor cores"
                    print(f"{name} {size} {kernel_name} {shape}: {shared} bytes shared, {registers} registers, "
                          f"{spilled} bytes spilled, {products}", flush=True)  # fmt: skip
                    too_large += shared > SHARED_BYTES
    return min(too_large, 1)


if __name__ == "__main__":
    sys.exit(main())
