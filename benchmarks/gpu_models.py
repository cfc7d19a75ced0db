"""Models of real shapes with random weights, made on the device itself, and the steps that are timed on them."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import treetrain as tt
from gpu_rows import device, forget, wait
from treetrain.engine.costs import cost_if_countable
from treetrain.engine.engine import LinearEngine, TreeEngine
from treetrain.softmax_attention.backends import using
from treetrain.tree.build import as_tree

VOCABULARY = 151_936
PACK_TOKENS = 16_384
"""Tokens of a packed linear run; a longer row runs by itself."""
_QWEN3 = {
    # layers, hidden, intermediate, heads, kv heads, tied
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, False),
}
MOE = "qwen3-30b-a3b, 6 of 48 layers"
MODELS = (*_QWEN3, MOE)


def make_model(name: str, smoke: bool) -> nn.Module:
    """Make the named model in bfloat16; on a trial run, a small one of the family."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    forget()
    torch.manual_seed(0)
    common = {"head_dim": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 65_536}
    if name == MOE:
        made, kind = Qwen3MoeForCausalLM, Qwen3MoeConfig
        sizes = {"num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
        sizes |= {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
        sizes |= {"norm_topk_prob": True, "tie_word_embeddings": False}
        small = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    else:
        made, kind, small = Qwen3ForCausalLM, Qwen3Config, {}
        layers, hidden, intermediate, heads, groups, tied = _QWEN3[name]
        sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "tie_word_embeddings": tied}
    if smoke:
        sizes |= {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48} | small
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        common |= {"head_dim": 16, "vocab_size": 512}
    with device():
        model = made(kind(**common, **sizes)).to(torch.bfloat16 if device().type == "cuda" else torch.float32)
    return model.train()


class OneHead(TreeEngine):
    """Calls the head as a module, chunk by chunk, through autograd: no fused gradient."""

    def forward_backward(self, *arguments: Any, **options: Any) -> Any:
        """See `TreeEngine.forward_backward`."""
        head = self.model.lm_head
        head.forward = head.forward  # a head with a replaced forward is called as a module
        try:
            return super().forward_backward(*arguments, **options)
        finally:
            del head.__dict__["forward"]


class SegmentBySegment(TreeEngine):
    """Plans one part per segment, depth first."""

    def plan_of(self, layout: Any) -> Any:
        """See `TreeEngine.plan_of`."""
        from treetrain.planning.plan import Plan

        length = np.diff(layout.segment_start)
        return Plan.of_parts(layout, np.repeat(np.arange(len(length)), length))


@contextmanager
def blocks_compiled(model: nn.Module) -> Iterator[None]:
    """Compile norms and MLPs for any length, within the block."""
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("RMSNorm", "MLP"))]
    try:
        for block in blocks:
            block.compile(dynamic=True)
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


class Measured(NamedTuple):
    """One engine on one batch."""

    seconds: float
    spread: tuple[float, float]
    peak_bytes: int
    """Above model, gradients and optimiser state; 0 on a CPU."""
    total_bytes: int
    parts: int
    recomputed: int
    host_waits: int | str
    """See `count_waits`."""


def measure(
    model: nn.Module,
    optimiser: torch.optim.Optimizer | None,
    engine: TreeEngine,
    rows: list[tt.Trajectory],
    loss: Any,
    *,
    backend: str | None = None,
    repeats: int = 3,
    most: float = 6.0,
    warm_up: list[tt.Trajectory] | None = None,
    waits: bool = False,
) -> Measured:
    """Median seconds of forward, backward and optimiser as a training loop runs them, and the peak of memory.

    A step gets the tree of its rows and builds the next step's tree while the GPU works; an engine without sharing
    gets a tree of unmerged rows.

    Args:
        backend: tree attention to run; None takes the device's own.
        most: seconds after which no further repeat starts.
        warm_up: rows that run first, not timed; None uses the batch itself.
        waits: run one more step, in which the host's waits are counted.
    """
    cuda, results, given = device().type == "cuda", [], []

    def build() -> None:
        given.append(as_tree(rows, merge=engine.merge))

    def step(batch: list[tt.Trajectory] | tt.TokenTree) -> Any:
        model.zero_grad(set_to_none=False)  # kept, so that plans see the memory that is free besides them
        done = engine.forward_backward(batch, loss)
        if optimiser is not None:
            optimiser.step()
        build()
        return done

    with using(backend) if backend else nullcontext():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        step(rows if warm_up is None else warm_up)
        wait()
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        while len(times) < repeats and sum(times) < most:
            seconds, done = _timed(lambda: step(given.pop()))
            times.append(seconds)
            results.append(done)
        total = torch.cuda.max_memory_allocated() if cuda else 0
        counted = count_waits(lambda: step(given.pop())) if waits else ""
    done = results[-1]
    spread = min(times), max(times)
    peak = max(total - before, 0)
    return Measured(statistics.median(times), spread, peak, total, done.parts, done.recomputed_tokens, counted)


def count_waits(step: Callable[[], Any]) -> int | str:
    """How often the host waits for the GPU in a step, as PyTorch's debug mode counts it.

    Nothing without a GPU, and where the step fails.
    """
    if device().type != "cuda":
        return ""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
            wait()  # asynchronous GPU errors are raised here
        except Exception:
            return ""
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in told)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    wait()
    start = time.perf_counter()
    done = call()
    wait()
    return time.perf_counter() - start, done


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its state in the weights' dtype."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device().type == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()  # makes its state, so that plans see the memory that is free besides it
    return optimiser


def linear_engine(model: nn.Module, rows: list[tt.Trajectory]) -> LinearEngine:
    """Rows packed without padding: with varlen attention one stock flash call for each layer of a run.

    A run has 16,384 tokens, or the most that are predicted to fit.
    """
    size = PACK_TOKENS
    cost = cost_if_countable(model)
    if device().type == "cuda" and cost is not None and not model.is_gradient_checkpointing:
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.grad is None)
        room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - gradients
        while size > 2048 and cost.peak_bytes(LinearEngine(model, pack_tokens=size).plan(rows)) > 0.85 * room:
            size //= 2
    return LinearEngine(model, pack_tokens=size)


def checkpointing(model: nn.Module, on: bool) -> None:
    """Run every layer's forward again in backward, or not."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


def with_facts(rows: list[tt.Trajectory]) -> list[tt.Trajectory]:
    """Add the data that a GRPO update needs to every row."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [row.replace(advantages=float(rng.normal()), old_logprobs=np.full(len(row), -12.0)) for row in rows]
