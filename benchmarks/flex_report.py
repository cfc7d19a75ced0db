"""Compile FlexAttention for Hopper and report shared memory, registers and spills. Needs no GPU.

Run: python benchmarks/flex_report.py [--sizes 64,128,256] [--dtypes bfloat16,float32] [--asks full,path,local,cap]
[--own]. Needs Triton and a torch that was built for CUDA. FlexAttention is traced on a CPU as `flex.py` of
`softmax_attention` calls it; its graphs are moved to a simulated GPU device and lowered by Inductor, and the resulting
Triton kernels are compiled for sm_90. Prints one line per kernel; a kernel that needs more shared memory than a
multiprocessor has is an error. --own lets FlexAttention choose kernels and blocks.
"""

import argparse
import contextlib
import copy
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read when torch is imported
import numpy as np
import torch

from treetrain.softmax_attention import flex
from treetrain.softmax_attention.tile_lists import keys_of
from treetrain.tree.attention_range import AttentionRange
from triton_report import SHARED_BYTES, assembled

GPU = torch.device("cuda", 0)
SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "path": {"path": 200},
    "short": {"queries": 100, "path": 200},
    "local": {"path": 200, "window": 100, "sinks": True},
    "cap": {"queries": 130, "cap": 30.0},
}
_PROPERTIES = {
    "multi_processor_count": 132,
    "major": 9,
    "minor": 0,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block_optin": SHARED_BYTES,
    "L2_cache_size": 60 << 20,
    "total_memory": 140 << 30,
    "name": "pretended",
}


class _Driver:
    """The driver interface that Triton needs to compile."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


@contextlib.contextmanager
def pretended_hopper() -> Iterator[None]:
    """Make PyTorch's compiler see a GPU of compute capability 9.0; nothing can run on it."""
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    properties = SimpleNamespace(**_PROPERTIES)
    known = {name: value for name, value in _PROPERTIES.items() if name in DeviceProperties._fields}
    hints = DeviceProperties(type="cuda", index=0, cc=90, **known)
    answers = [
        (torch.cuda, {"get_device_capability": (9, 0), "get_device_properties": properties, "current_device": 0}),
        (torch.cuda, {"is_available": True, "device_count": 1, "_lazy_init": None}),
        (CudaInterface, {"get_compute_capability": 90, "is_available": True, "is_triton_capable": True}),
        (CudaInterface, {"raise_if_triton_unavailable": None}),
        (CudaInterface.Worker, {"get_device_properties": properties, "current_device": 0}),
        (DeviceProperties, {"create": hints}),
        (scheduler, {"has_triton": True}),
        (fake_tensor, {"init_gpu_context": None}),
        (triton_helpers, {"set_driver_to_gpu": None}),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(type(driver), "active", _Driver()))
        for owner, given in answers:
            for name, value in given.items():
                answer: Callable[..., Any] = lambda *_, value=value, **__: value  # noqa: E731
                stack.enter_context(
                    mock.patch.object(owner, name, staticmethod(answer) if isinstance(owner, type) else answer)
                )
        yield


class Sources:
    """A backend of torch.compile that keeps Inductor's GPU source, and runs graphs eagerly."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        """("forward" or "backward", Python source) of every graph."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=self._inner)

    def _inner(self, graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        mode = next(t.fake_mode for t in inputs if isinstance(t, FakeTensor))
        side = "backward" if options.get("is_backward") else "forward"
        with pretended_hopper():
            self.found.append((side, _source(_on_gpu(copy.deepcopy(graph)), inputs, mode, side == "backward")))

        def run(arguments: list) -> Any:
            given = list(arguments)
            arguments.clear()
            return graph(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _on_gpu(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args = tuple(GPU if isinstance(x, torch.device) else x for x in node.args)
                node.kwargs = {k: GPU if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
            module.recompile()
    return graph


def _source(graph: torch.fx.GraphModule, inputs: Any, mode: Any, backward: bool) -> str:
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    with mode:
        given = [
            torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=GPU) if isinstance(x, torch.Tensor) else x
            for x in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    with V.set_fake_mode(mode):
        compile_fx._recursive_record_original_output_strides(graph)
        compile_fx._recursive_post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=given, shape_env=mode.shape_env, is_backward=backward)
        with DebugContext(), V.set_graph_handler(lowering):
            lowering.run(*given)
            return lowering.codegen()[0].value


def sources(size: int, dtype: torch.dtype, *, own: bool, queries=300, path=0, window=None, cap=None, sinks=False):
    """Sources that `FlexTreeAttention` would compile for a chain of `queries` tokens below a path, 4 heads over 2."""
    backend, ends, depth = Sources(), np.full(queries, queries), np.arange(path, path + queries)
    keys = keys_of(ends, depth, path, AttentionRange(window=window))
    mask = flex.block_mask(keys, torch.device("cpu"))
    shapes = [(4, queries), (2, len(keys.ends)), (2, len(keys.ends))]
    q, k, v = (torch.randn(1, n, h, size, dtype=dtype, requires_grad=True).transpose(1, 2) for h, n in shapes)
    options: dict[str, Any] = {} if own else {"kernel_options": flex.kernel_options(dtype, size)}
    options |= {"score_mod": flex._capped(cap)} if cap else {}
    options |= {"return_aux": flex.AuxRequest(lse=True)} if sinks else {}
    torch._dynamo.reset()
    call = torch.compile(flex.flex_attention, dynamic=True, backend=backend)
    # FlexAttention has no CPU backward; graphs run eagerly, with dense attention.
    with mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None), flex._tracing():
        out: Any = call(q, k, v, block_mask=mask, scale=size**-0.5, enable_gqa=True, **options)
    total = (out[0] * out[1].lse.sigmoid().unsqueeze(-1)).sum() if sinks else out.sum()
    # Backwards are compiled when they run.
    torch.autograd.grad(total, [q, k, v])
    return backend.found


def kernels(source: str, folder: Path) -> Iterator[tuple[Any, Any]]:
    """(settings, binary) of the attention kernels in a source."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, text in re.findall(r"async_compile\.triton\('(\w*_tem_\w+)', '''\n(.*?)'''", source, re.DOTALL):
        path = folder / f"{name}_{len(list(folder.iterdir()))}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        with pretended_hopper():
            spec.loader.exec_module(module)
            tuner = getattr(module, name)
            for config in tuner.configs:
                meta = tuner._create_compile_meta(config)
                given = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
                chosen = tuner._create_compile_options(config, meta)
                yield config, triton.compile(given, target=GPUTarget("cuda", 90, 32), options=chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--asks", default="full,path,local", help=", ".join(SPECS))
    parser.add_argument("--own", action="store_true", help="FlexAttention's own choice of kernels and blocks")
    options = parser.parse_args()
    failed = 0
    for dtype in options.dtypes.split(","):
        for size in map(int, options.sizes.split(",")):
            for spec in options.specs.split(","):
                shown = f"{dtype} {size} {spec}"
                try:
                    found = sources(size, getattr(torch, dtype), own=options.own, **SPECS[spec])
                except Exception as error:
                    print(f"{shown}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                    failed += 1
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    for side, source in found:
                        for config, binary in kernels(source, Path(folder)):
                            shared, (registers, spilled) = binary.metadata.shared, assembled(binary)
                            failed += shared > SHARED_BYTES
                            cut = f"{config.num_warps} warps, {config.num_stages} stages"
                            report = f"{shared} bytes shared, {registers} registers, {spilled} bytes spilled"
                            print(f"{shown} {side}, {cut}: {report}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
