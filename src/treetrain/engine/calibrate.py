"""Measures, in a few seconds, what the cost model multiplies counts with: on the user's own model and device.

Chains of a few lengths are run by the engine's own pass. Memory is counted tensor by tensor (``memory.py``), so
it does not depend on what else the machine does; times are the least of a few runs after one that is not counted. Where
a backward would reach beyond gradients (an optimiser that steps in it), nothing is run and formulas are taken.

The model's gradients are set aside while it is measured; its weights, mode and random state are not touched.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.attention.backends import choose_backend, make_attention
from treetrain.attention.schedule import Forest
from treetrain.engine import constants_cache
from treetrain.engine.formula import compute_dtype, formula_constants, head_softmax, is_checkpointed, trained_share
from treetrain.engine.gradients import GradientBuffers, gradient_buffers
from treetrain.engine.lm_head import ScoreRequest
from treetrain.engine.memory import live_bytes
from treetrain.engine.out_of_memory import is_out_of_memory
from treetrain.engine.packed import PackedRun, model_device
from treetrain.engine.planning import device_free_bytes
from treetrain.models.capability import Capabilities, causal_lm
from treetrain.planning.constants import Constants
from treetrain.planning.cost import ModelShape
from treetrain.planning.partition import uniform
from treetrain.planning.price import CostModel
from treetrain.tree.build import build_tree
from treetrain.tree.layout import PackedLayout, pack

LENGTHS = {"cpu": (512, 256, 128, 64, 32), "cuda": (8192, 4096, 2048, 1024, 512)}
"""Tokens of the longest pass that is measured: the first whose measurement fits the time limit."""
REPEATS = 3
LIMIT_SECONDS = 6.0
TOO_SLOW = 10
"""A model whose shortest measurement takes so many times the limit is not measured."""
_MEASURED: dict[str, Constants] = {}


def cost_model(model: nn.Module, capabilities: Capabilities) -> CostModel:
    """The cost model of a model on its device, measured at first use and then taken from the cache.

    Raises:
        UnsupportedModel: a family whose cost is not known.
    """
    shape = model_shape(model)
    return CostModel(shape=shape, constants=cached_constants(model, capabilities, shape))


def model_shape(model: nn.Module) -> ModelShape:
    """The shape of a model. Raises UnsupportedModel for a family whose cost is not known."""
    config = causal_lm(model).config.to_dict()  # type: ignore[operator, union-attr]
    text = config.get("text_config")
    return ModelShape.from_config(text if isinstance(text, dict) else config)


def cached_constants(model: nn.Module, capabilities: Capabilities, shape: ModelShape) -> Constants:
    """The constants measured earlier for such a model on such a device, in this process or another; else `calibrate`.

    The key is all that changes them: shape, dtypes, device, threads, versions, checkpointing, share of trained weights.
    What is measured while other work takes most of a CPU is not stored.
    """
    key = _key(model, capabilities, shape)
    name = json.dumps(key, sort_keys=True)
    if name not in _MEASURED:
        found = constants_cache.load(key)
        if found is None:
            busy = _is_busy(model_device(model))
            found = calibrate(model, capabilities, shape)
            if not busy:  # what a busy machine takes is right for this process at most
                constants_cache.store(key, found)
        _MEASURED[name] = found
    return _MEASURED[name]


def remember(model: nn.Module, capabilities: Capabilities, constants: Constants) -> None:
    """Take these constants for such a model on this device from now on, in this process and in later ones."""
    key = _key(model, capabilities, model_shape(model))
    _MEASURED[json.dumps(key, sort_keys=True)] = constants
    constants_cache.store(key, constants)


def calibrate(
    model: nn.Module,
    capabilities: Capabilities,
    shape: ModelShape | None = None,
    *,
    limit_seconds: float = LIMIT_SECONDS,
) -> Constants:
    """Measure a model on its device, under the autocast that is on now.

    Args:
        capabilities: of `check_model`.
        shape: None reads it from the model's configuration.
        limit_seconds: about how long it may take; the lengths are scaled down to it, to 32 tokens on a CPU and 512
            on a GPU at the least. A model that needs ten times as long for these gets constants by formula, and so
            does one for which there is no memory. What is compiled at first use comes on top.

    Raises:
        UnsupportedModel: a family whose cost is not known.
    """
    shape = model_shape(model) if shape is None else shape
    formula = formula_constants(model, capabilities, shape)
    if not any(p.requires_grad for p in model.parameters()) or _has_hooks(model):
        return formula
    try:
        with _gradients_aside(model), gradient_buffers(model) as buffers:
            bench = _Bench(model, capabilities, buffers)
            room = device_free_bytes(model)
            long = bench.longest(limit_seconds, lambda n: room is None or _peak(bench, formula, shape, n) <= room)
            if long is None:
                return dataclasses.replace(formula, source=f"{formula.source} (too slow here to be measured)")
            short = max(long // 4, 2)
            measured = _memory(bench, formula, shape, short, long) | _speeds(bench, formula, shape, short, long)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return dataclasses.replace(formula, source=f"{formula.source} (too little memory here to be measured)")
    name = f"measured on {_device_name(bench.device)} with passes of {short} and {long} tokens"
    return dataclasses.replace(formula, **measured, source=name)


def _peak(bench: "_Bench", formula: Constants, shape: ModelShape, tokens: int) -> float:
    """Bytes that the measurement with passes of so many tokens is expected to take."""
    layout = bench.layout(tokens, tokens)
    return CostModel(shape=shape, constants=formula).peak_bytes(uniform(layout, max(layout.num_tokens, 1)))


class _Marks(NamedTuple):
    """Bytes of one metered pass."""

    saved: int
    """Alive between forward and backward."""
    forward_peak: int
    backward_peak: int


class _Bench:
    """Passes over chains of random tokens."""

    def __init__(self, model: nn.Module, capabilities: Capabilities, buffers: GradientBuffers):
        self.model, self.capabilities, self.buffers = model, capabilities, buffers
        self.device = model_device(model)

    def longest(self, limit_seconds: float, fits: Callable[[int], bool]) -> int | None:
        """The longest length whose whole measurement (the time of about eight such passes) stays within the limit.

        The shortest where none does; None where even that takes many times as long.

        Args:
            fits: whether a length's passes are expected to fit into memory.
        """
        lengths = [n for n in LENGTHS[self.device.type] if n <= (self.capabilities.max_positions or n)]
        least = lengths[-1] if lengths else int(self.capabilities.max_positions or 2)
        # Kernels are compiled at first use, for some at that of a length: no part of what a pass takes, nor is the
        # memory in which the compiler tries what it has made.
        for tokens in (least, 2):
            self.graph(tokens, 1)
            self.forward(tokens)
        fixed = self.seconds(lambda: self.graph(2, 1), 1)
        token = max(self.seconds(lambda: self.graph(least, 1), 1) - fixed, 0.0) / least
        if 8 * (fixed + token * least) > TOO_SLOW * limit_seconds:
            return None
        return next((n for n in lengths if 8 * (fixed + token * n) <= limit_seconds and fits(n)), least)

    def layout(self, tokens: int, rows: int) -> PackedLayout:
        """A chain whose last `rows` tokens predict something."""
        ids = np.random.default_rng(0).integers(0, self.capabilities.vocab_size, tokens + 1)
        return pack(build_tree([ids.astype(np.int32)]), np.arange(tokens + 1) > tokens - rows)

    def graph(self, tokens: int, rows: int, meter: Any = None) -> _Marks:
        """A pass with graph."""
        run = PackedRun(self.model, self.capabilities, self.layout(tokens, rows))
        with run.mode(self.model), torch.enable_grad():
            loss = torch.stack([x.sum() for x in run.scores(ScoreRequest(buffers=self.buffers)).live]).sum()
            marks = (0, 0) if meter is None else (meter.now, meter.peak)
            if meter is not None:
                meter.restart_peak()
            loss.backward()
        return _Marks(*marks, 0 if meter is None else meter.peak)

    def forward(self, tokens: int) -> None:
        """A pass without graph and, but for one row, without head."""
        run = PackedRun(self.model, self.capabilities, self.layout(tokens, 1))
        with run.mode(self.model), torch.no_grad():
            run.scores(ScoreRequest())

    def metered(self, tokens: int, rows: int) -> _Marks:
        """The bytes of a pass with graph."""
        torch.clear_autocast_cache()
        with live_bytes(self.device) as meter:
            return self.graph(tokens, rows, meter)

    def forward_bytes(self, tokens: int) -> int:
        """The peak of a pass without graph."""
        torch.clear_autocast_cache()
        with live_bytes(self.device) as meter:
            self.forward(tokens)
            return meter.peak

    def seconds(self, call: Callable[[], Any], repeats: int = REPEATS) -> float:
        """Least time of a few calls: whatever else the machine does only adds."""
        times = []
        for _ in range(repeats):
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            times.append(time.perf_counter() - start)
        return min(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _memory(bench: _Bench, formula: Constants, shape: ModelShape, short: int, long: int) -> dict[str, float]:
    """Lines through two lengths; where a phase hides behind another, its formula."""
    floor = bench.metered(2, 1).backward_peak
    first, second = bench.metered(short, 1), bench.metered(long, 1)
    saved_token = max(second.saved - first.saved, 1) / (long - short)
    saved_pass = max(first.saved - saved_token * short, 0.0)
    found = {"saved_token": saved_token, "saved_pass": saved_pass, "end_pass": float(floor)}
    beside = [marks.backward_peak - marks.saved for marks in (first, second)]
    if first.backward_peak > 1.1 * floor:  # else the end of the backward is the peak
        found["layer_token"] = max(beside[1] - beside[0], 0) / (long - short)
        found["layer_pass"] = max(beside[0] - found["layer_token"] * short, 0.0)
    elif second.backward_peak > 1.1 * floor:
        found["layer_token"] = max(beside[1] - formula.layer_pass, 0.0) / long
    found["forward_token"] = bench.forward_bytes(long) / long
    return found


def _speeds(bench: _Bench, formula: Constants, shape: ModelShape, short: int, long: int) -> dict[str, float]:
    pair_flops = _pair_speed(bench, shape, long)

    def pair_seconds(n: int) -> float:
        return shape.pair_flops(shape.pairs_at(np.arange(n))) / pair_flops

    def line(call: Callable[[int], Any], factor: float) -> tuple[float, float]:
        """(seconds per token, seconds per pass), attention's pairs taken out."""
        low, high = (bench.seconds(lambda n=n: call(n)) - factor * pair_seconds(n) for n in (short, long))
        slope = max((high - low) / (long - short), 0.2 * high / long)  # a noisy pair of points is no free lunch
        return slope, max(low - slope * short, 0.0)

    graph_token, graph_pass = line(lambda n: bench.graph(n, 1), 3.0)
    forward_token, forward_pass = line(bench.forward, 1.0)
    forward_token = min(forward_token, graph_token / 1.5)
    plain = graph_token * long + graph_pass + 3.0 * pair_seconds(long)
    extra = bench.seconds(lambda: bench.graph(long, long)) - plain
    head_flops = 6.0 * shape.hidden * shape.vocab * (long - 1)
    bandwidth = _bandwidth(bench)
    return {
        "matrix_flops": shape.token_flops / forward_token,
        "backward_ratio": graph_token / forward_token - 1,
        "pair_flops": pair_flops,
        "head_flops": head_flops / extra if extra > 0 else formula.head_flops,
        "bandwidth": bandwidth,
        "graph_pass_seconds": max(graph_pass - formula.graph_pass_bytes / bandwidth, 0.0),
        "forward_pass_seconds": max(forward_pass - formula.forward_pass_bytes / bandwidth, 0.0),
    }


def _pair_speed(bench: _Bench, shape: ModelShape, tokens: int) -> float:
    """FLOP/s of causal attention, forward and backward, over a chain of at least 2,048 tokens."""
    count, heads = max(2048, 2 * tokens), shape.attention
    chain = np.arange(count)
    forest = Forest(
        ends=np.full(count, count), depth=chain, segment_start=np.array([0, count]), segment_parent=np.array([-1])
    )
    attention = make_attention(forest, bench.device, heads.heads * heads.key_size)
    dtype = compute_dtype(bench.model, bench.device)
    generator = torch.Generator(device=bench.device).manual_seed(0)
    inputs = [  # values are as long as keys here: where they are shorter, they are padded
        torch.randn(count, number, heads.key_size, dtype=dtype, device=bench.device, generator=generator)
        for number in (heads.heads, heads.kv_heads, heads.kv_heads)
    ]

    def call() -> None:
        live = [x.requires_grad_() for x in inputs]
        out: Tensor = attention(*live, scale=heads.key_size**-0.5)
        torch.autograd.grad(out.sum(), live)

    with torch.enable_grad():
        call()
        seconds = bench.seconds(call, 2 * REPEATS + 1)
    return 3.0 * heads.pair_flops * (count * (count + 1) / 2) / seconds


def _bandwidth(bench: _Bench, size: int = 1 << 23) -> float:
    """Bytes per second of adding one tensor to another: two reads and a write."""
    one, two = torch.zeros(size, device=bench.device), torch.ones(size, device=bench.device)
    one.add_(two)
    return 3.0 * 4 * size / bench.seconds(lambda: one.add_(two), 5)


def _key(model: nn.Module, capabilities: Capabilities, shape: ModelShape) -> dict[str, Any]:
    device, plain = model_device(model), capabilities.head_is_linear
    return {
        "model": type(causal_lm(model)).__name__,
        "shape": json.loads(json.dumps(dataclasses.asdict(shape))),  # as a file gives it back: lists, no tuples
        "dtype": str(model.dtype),
        "compute": str(compute_dtype(model, device)),
        "device": _device_name(device),
        "attention": choose_backend(device).name,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "torch": torch.__version__,
        "checkpointing": is_checkpointed(model),
        "trained": round(trained_share(model), 4),
        "head": head_softmax(capabilities, device, compute_dtype(model, device)).__name__
        if plain
        else "its own forward",
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "cpu"


def _is_busy(device: torch.device) -> bool:
    """Whether other work takes so much of the CPU that times of ours would mislead later runs."""
    return device.type == "cpu" and hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.75 * (os.cpu_count() or 1)


def _has_hooks(model: nn.Module) -> bool:
    """Whether a backward does more than add up gradients: hooks on parameters step optimisers or send gradients."""
    return any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """Backwards in the block add each gradient to one scratch buffer, at the usual cost; `.grad` is left as it was."""
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in trained]
    largest = max(trained, key=lambda p: p.numel())
    scratch = torch.zeros_like(largest).view(-1)

    def drop(parameter: Tensor) -> None:
        if parameter.grad is None:  # of a matrix whose gradient goes elsewhere
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
