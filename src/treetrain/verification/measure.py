"""Measures how fast a device runs a model, by two passes; and lets a CPU keep the memory that it has once allocated.

Two passes are enough: ``engine/costs.py`` counts the work of a pass, and the device's description gives the relative
speed of each kind of product. This leaves two unknowns, the overall speed of this device and the fixed cost of a pass:

    seconds                    long pass: FLOPs and fixed cost
       |                    .
       |                .        slope: measured over described seconds per FLOP
       |            .
       |        .  short pass
       |    .
       |.......................  intercept: the fixed cost of a pass
       +------------------------> seconds predicted from the description

Memory is not measured: it is counted tensor by tensor.
"""

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.engine.costs import cost_of
from treetrain.engine.gradients import gradient_buffers
from treetrain.engine.lm_head import ScoreRequest
from treetrain.engine.memory import is_out_of_memory
from treetrain.engine.packed import PackedRun, model_device
from treetrain.models.capability import Capabilities, check_model
from treetrain.planning.plan import Plan
from treetrain.planning.price import CostModel
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, pack

TOKENS = {"cpu": (64, 256), "cuda": (1024, 4096)}
"""Tokens of the short and of the long pass, with a prediction at every token."""
REPEATS = 5
"""The fastest of this many passes counts, after one to warm up: other load only adds time."""


def measured_cost(model: nn.Module) -> CostModel:
    """The cost model of a model on its device, with measured speeds.

    Gradients are set aside meanwhile; weights, mode and random state are not touched. Published speeds are kept if
    nothing is trained, if parameters have hooks (a backward would run them) or if memory is too small for the long
    pass; `speeds.source` says so.

    Raises:
        UnsupportedModel: a model that is not exact on a tree or cannot be counted.
    """
    cost, device = cost_of(model), model_device(model)
    if not any(p.requires_grad for p in model.parameters()):
        return _unmeasured(cost, "nothing is trained")
    if any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters()):
        return _unmeasured(cost, "parameters have hooks")
    capabilities = check_model(model)
    short, long = (min(n, capabilities.max_positions or n) for n in TOKENS[device.type])
    layouts = [_chain(n, capabilities.vocab_size) for n in (min(short, long // 2), long)]
    try:
        with _gradients_aside(model):
            times = [_seconds(model, capabilities, layout) for layout in layouts]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _unmeasured(cost, "too little memory")
    plans = [Plan.of_parts(layout, np.zeros(layout.num_tokens, np.int64)) for layout in layouts]
    predicted = [cost.seconds(plan) - cost.speeds.graph_pass for plan in plans]
    # Noise may not make a device look more than five times as fast as the long pass alone shows.
    slope = max((times[1] - times[0]) / (predicted[1] - predicted[0]), 0.2 * times[1] / predicted[1])
    fixed = max(times[0] - slope * predicted[0], 0.0)
    speeds, tokens = cost.speeds, " and ".join(str(layout.num_tokens) for layout in layouts)
    measured = replace(
        speeds,
        layers=speeds.layers / slope,
        attention=speeds.attention / slope,
        head=speeds.head / slope,
        graph_pass=fixed,
        forward_pass=fixed * speeds.forward_pass / speeds.graph_pass,
        source=f"measured on {_device_name(device)} with passes of {tokens} tokens",
    )
    return replace(cost, speeds=measured)


def _unmeasured(cost: CostModel, reason: str) -> CostModel:
    return replace(cost, speeds=replace(cost.speeds, source=f"{cost.speeds.source} ({reason}: not measured here)"))


def _chain(tokens: int, vocabulary: int) -> PackedLayout:
    """A layout of random tokens, all but the first predicted."""
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens + 1)
    return pack(build_tree([ids.astype(np.int32)]), np.arange(tokens + 1) > 0)


def _seconds(model: nn.Module, capabilities: Capabilities, layout: PackedLayout) -> float:
    """The least time of a forward and backward over a layout."""
    device, times = model_device(model), []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run = PackedRun(model, capabilities, layout)
        with gradient_buffers(model) as buffers, run.mode(model), torch.enable_grad():
            torch.stack([x.sum() for x in run.scores(ScoreRequest(buffers=buffers)).live]).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # kernels are compiled in the first


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "cpu"


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """Backwards in the block add each gradient to one scratch buffer, at the usual cost; `.grad` is left as it was."""
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in trained]
    scratch = torch.zeros_like(max(trained, key=lambda p: p.numel())).view(-1)

    def drop(parameter: Tensor) -> None:
        if parameter.grad is None:  # its gradient goes to a buffer
            return
        scratch[: parameter.numel()].add_(parameter.grad.view(-1))
        parameter.grad = None

    handles = []
    try:
        for parameter in trained:
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(drop))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in zip(trained, before):
            parameter.grad = grad


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_memory() -> bool:
    """Tell glibc to serve large blocks from its heap and to keep them. Returns whether that worked.

    Memory that is returned between steps costs page faults at every step on a CPU. This equals setting
    MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ before the start; it is a no-op without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 256 * 2**20))
    return all(mallopt(which, value) == 1 for which, value in settings)
