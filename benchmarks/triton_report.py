"""Compile the Triton kernels for Hopper and report shared memory, registers and spills. Needs no GPU.

Run: python benchmarks/triton_report.py [--kernels attention,head,merge] [--sizes 64,128,256]
[--dtypes bfloat16,float32] [--all | --defaults] [--append]. Needs Triton, whose wheel carries the assembler. Prints one
line for each kernel of attention in its default block size, for the sizes and dtypes asked for and for layers of
other kinds (`OTHERS`: windows, caps, sinks, other head sizes, float16, TF32; --defaults leaves them out), for those of
the LM head, and for those that merge pieces. With --all also in each block size that `triton_shapes.candidates` lists.
With --append also as rows of results/triton_report.csv. A kernel that does not compile, or needs more shared memory
than a multiprocessor has, is an error.
"""

import argparse
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows

SHARED_BYTES = 227 << 10
"""Shared memory of one block on sm_90."""
INTEGERS = ("end_ptr", "depth_ptr", "lowest_ptr", "order_ptr", "bounds_ptr", "list_ptr")
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FLOATS = ("lse_ptr", "delta_ptr", "dk_ptr", "dv_ptr")


LOCAL, CAPPED = {"LOCAL": True}, {"CAPPED": True}
EVERY = LOCAL | CAPPED | {"SINKS": True}
OTHERS: list[tuple[str, int, int, dict[str, bool]]] = [
    *((dtype, size, size, flags) for flags in (LOCAL, CAPPED, EVERY) for dtype, size in (
        ("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 128))),
    *(("bfloat16", size, size, {}) for size in (16, 24, 32, 80, 96, 112, 160, 192)),
    ("bfloat16", 192, 128, {}),
    *(("float16", size, size, {}) for size in (64, 128, 256)),
    *(("float32", size, size, {"TF32": True}) for size in (64, 128, 256)),
]  # fmt: skip
"""Layers of other kinds: dtype, head size of queries and of values, flags."""


def compiled(kernel: Any, dtype: str, size: int, shape: Any, value_size: int | None = None, **flags: bool) -> Any:
    """A kernel as Triton compiles it for sm_90.

    Args:
        dtype: bf16, fp16 or fp32.
        shape: `triton_attention.Shape`.
        value_size: None for that of queries.
        flags: CAPPED, LOCAL, SINKS, and TF32, which is how products of float32 are made.
    """
    from treetrain.kernels.triton_attention import _power

    value_size, tf32 = size if value_size is None else value_size, flags.pop("TF32", False)
    values: dict[str, Any] = {"HEADS": 16, "GROUPS": 8, "SIZE": size, "VALUE_SIZE": value_size}
    values |= {"BLOCK_D": _power(size), "BLOCK_V": _power(value_size), "TILE": 128}
    values |= {"BLOCK_M": shape.queries, "BLOCK_N": shape.keys, "CAPPED": False, "LOCAL": False, "SINKS": False}
    values |= {"PRECISION": "ieee" if dtype == "fp32" and not tf32 else "tf32"} | flags
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
    from treetrain.kernels.lm_head_kernels import BLOCK, WARPS

    types = {"logits_ptr": f"*{dtype}", "first_ptr": "*i64", "target_ptr": "*i64", "factor": "fp32"}
    types |= {"stride": "i32", "vocabulary": "i32"}
    constants = {"BLOCK": BLOCK, "ENTROPY": entropy}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    whole = [place for place, name in enumerate(kernel.arg_names) if name not in (*constants, "factor")]
    return _for_hopper(
        kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in whole}, num_warps=WARPS
    )


def compiled_merge(kernel: Any, dtype: str, heads: int, size: int, *, sums: bool, several: bool) -> Any:
    """A kernel that merges pieces, or adds them up, as Triton compiles it for sm_90."""
    from treetrain.kernels.merge_kernels import WARPS, block_rows
    from treetrain.kernels.triton_attention import _power

    constants = {"HEADS": heads, "SIZE": size, "BLOCK_D": _power(size), "BLOCK_ROWS": block_rows(size), "SUMS": sums}
    constants = {name: value for name, value in (constants | {"SEVERAL": several}).items() if name in kernel.arg_names}
    wide, narrow = ("sums_ptr", "lse_ptr", "piece_lse_ptr"), ("out_ptr", "total_ptr", "piece_ptr")
    types = dict.fromkeys(wide, "*fp32") | dict.fromkeys(narrow, f"*{dtype}") | {"token_ptr": "*i64"}
    types |= {"rows": "i32", "count": "i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in kernel.arg_names}
    pointers = [place for place, name in enumerate(kernel.arg_names) if name.endswith("_ptr")]
    return _for_hopper(
        kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in pointers}, num_warps=WARPS
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


class Report:
    """Prints a line for each kernel, and counts those that cannot run."""

    def __init__(self, *, append: bool):
        self.bad, self._append = 0, append

    def say(self, what: str, compile_it: Callable[[], Any]) -> None:
        """Compile a kernel, and print its resources."""
        try:
            binary = compile_it()
        except Exception as error:  # as many kinds as compilers have stages
            self.bad += 1
            print(f"{what}: {type(error).__name__}: {str(error).strip()[:300]}", flush=True)
            return
        shared, (registers, spilled), code = binary.metadata.shared, assembled(binary), binary.asm["ptx"]
        units = "wgmma" if "wgmma" in code else "mma" if "mma.sync" in code else "no tensor cores"
        numbers = f"{shared} bytes shared, {registers} registers, {spilled} bytes spilled"
        ahead = fetches_ahead(binary.asm["ttgir"])
        suffix = "" if ahead is None else ", fetches ahead" if ahead else ", waits"
        print(f"{what}: {numbers}, {units}{suffix}", flush=True)
        self.bad += shared > SHARED_BYTES
        if self._append:
            found = {"kernel": what, "shared_bytes": shared, "registers": registers, "spilled_bytes": spilled}
            rows.append("triton_report", found | {"units": units, "fetches_ahead": ahead})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="attention,head,merge")
    parser.add_argument("--sizes", default="64,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--all", action="store_true", help="every candidate")
    parser.add_argument("--defaults", action="store_true", help="no layers of other kinds")
    parser.add_argument("--append", action="store_true", help="append rows")
    options = parser.parse_args()
    dtypes, kernels, report = options.dtypes.split(","), options.kernels.split(","), Report(append=options.append)
    if "attention" in kernels:
        report_attention(report, [int(size) for size in options.sizes.split(",")], dtypes, every=options.all)
        if not options.defaults:
            report_others(report)
    if "head" in kernels:
        report_head(report, dtypes)
    if "merge" in kernels:
        report_merges(report)
    return min(report.bad, 1)


def report_attention(report: Report, sizes: list[int], dtypes: list[str], *, every: bool) -> None:
    """Full attention, in the default block sizes or every candidate."""
    import torch

    from treetrain.kernels import triton_kernels
    from triton_shapes import candidates

    for name, size in itertools.product(dtypes, sizes):
        for kernel_name, listed in candidates(size, getattr(torch, name)).items():
            for shape in listed if every else listed[:1]:
                kernel = getattr(triton_kernels, f"{kernel_name}_kernel")
                made = functools.partial(compiled, kernel, SHORT[name], size, shape)
                report.say(f"{name} {size} {kernel_name} {shape}", made)


def report_others(report: Report) -> None:
    """Layers of other kinds, in the default block sizes."""
    import torch

    from treetrain.kernels import triton_kernels
    from treetrain.kernels.triton_attention import shapes_for

    for name, size, value_size, flags in OTHERS:
        shapes = shapes_for(max(size, value_size), getattr(torch, name))
        for kernel_name, shape in shapes._asdict().items():
            kernel = getattr(triton_kernels, f"{kernel_name}_kernel")
            own = {flag: value for flag, value in flags.items() if flag == "TF32" or flag in kernel.arg_names}
            made = functools.partial(compiled, kernel, SHORT[name], size, shape, value_size, **own)
            sizes = str(size) if size == value_size else f"{size}/{value_size}"
            kind = "".join(f" {flag.lower()}" for flag in own)
            report.say(f"{name} {sizes}{kind} {kernel_name} {shape}", made)


def report_head(report: Report, dtypes: list[str]) -> None:
    """The LM head's softmax."""
    from treetrain.kernels import lm_head_kernels

    for name, kernel_name, entropy in itertools.product(dtypes, ("statistics", "gradient"), (False, True)):
        kernel = getattr(lm_head_kernels, f"{kernel_name}_kernel")
        made = functools.partial(compiled_head, kernel, SHORT[name], entropy=entropy)
        report.say(f"{name} head {kernel_name}{', entropy' if entropy else ''}", made)


def report_merges(report: Report) -> None:
    """The kernels around varlen calls, of queries (16 heads) and of keys (8)."""
    from treetrain.kernels import merge_kernels

    for name, size in (("bfloat16", 64), ("bfloat16", 80), ("bfloat16", 128), ("bfloat16", 256), ("float16", 128)):
        for sums in (False, True):
            beside = ", float32 sums" if sums else ""
            merge = functools.partial(
                compiled_merge, merge_kernels.merge_kernel, SHORT[name], 16, size, sums=sums, several=False
            )
            report.say(f"{name} {size} merge{beside}", merge)
            for several, heads in ((False, 16), (True, 8)):
                add = functools.partial(
                    compiled_merge, merge_kernels.add_kernel, SHORT[name], heads, size, sums=sums, several=several
                )
                report.say(f"{name} {size} add{', several copies' if several else ''}{beside}", add)
    for several in (False, True):  # below a root part's cache, sums of keys are float32
        add = functools.partial(compiled_merge, merge_kernels.add_kernel, "fp32", 8, 128, sums=False, several=several)
        report.say(f"float32 128 add{', several copies' if several else ''}", add)


def fetches_ahead(code: str) -> bool | None:
    """Whether every loop step leaves asynchronous copies in flight; None if there are none."""
    innermost = re.findall(r"scf\.for((?:(?!scf\.for).)*?)scf\.yield", code, re.DOTALL)
    left = [int(number) for body in innermost for number in re.findall(r"async_wait[^\n]*\{num = (\d+)", body)]
    return all(left) if left else None


if __name__ == "__main__":
    sys.exit(main())
