"""A model with its budget, ranks and memory: all that a call of the engine needs to plan a batch and run the plan.

A step that runs out of memory is rolled back and starts over in smaller parts (`Runtime.within_memory`).
"""

import difflib
import functools
import inspect
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn

from treetrain.engine.context_parallel import check_context
from treetrain.engine.costs import cost_if_countable, cost_of
from treetrain.engine.deferred import allocated_gradient
from treetrain.engine.distributed import (
    Ranks,
    check_same,
    drop_waiting_gradients,
    is_shard,
    is_sharded,
    own_part,
    ranks_of,
    unwrapped,
    waiting_gradients,
)
from treetrain.engine.loss_gradients import ScoreTable
from treetrain.engine.packed import PackedRun, model_device, plan_of_any_model, wide_dtype
from treetrain.engine.routing import Routing
from treetrain.engine.tensor_parallel import tensor_parallel_ranks
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import Capabilities, check_model, loaded
from treetrain.planning.cost import CostModel
from treetrain.planning.devices import AMPLE, USABLE
from treetrain.planning.make import Bytes, make_plan, parse_budget
from treetrain.planning.plan import Plan
from treetrain.tree.build import Row, as_tree
from treetrain.tree.layout import PackedLayout
from treetrain.tree.token_tree import TokenTree

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
LAST_RESORT_TOKENS = 256
"""The token budget that is tried if no plan is predicted to fit into free memory."""
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that a plan may use now: the device's free memory times `USABLE`.

    CPU: the system's available memory, or what a control group of this process leaves if that is less. CUDA: free
    memory, and what PyTorch's allocator has reserved but not allocated.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(USABLE["cuda"] * (free + held))
    limits = [left for group in _control_groups() if (left := _left(group)) is not None]
    return int(USABLE["cpu"] * max(min([psutil.virtual_memory().available, *limits]), 0))


def _control_groups() -> list[Path]:
    """Folders of the control groups that this process is in (version 2, or the memory groups of version 1)."""
    listing, folders = Path("/proc/self/cgroup"), []
    for line in listing.read_text().splitlines() if listing.exists() else []:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            base = _CGROUP / controllers
            inner = base / name.lstrip("/")
            folders += [inner, *[parent for parent in inner.parents if parent.is_relative_to(base)]]
    return folders


def _left(group: Path) -> int | None:
    """The limit of a control group minus its use, without inactive file cache; None if it has no limit."""
    for limit_name, use_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (group / limit_name).exists():
            names = limit_name, use_name, "memory.stat"
            try:
                limit, use, statistics = ((group / name).read_text().strip() for name in names)
            except OSError:  # a group that may not be read is left out
                return None
            cache = re.search(rf"^{cache_name} (\d+)", statistics, re.MULTILINE)
            # Version 2 writes "max" where there is no limit, version 1 a huge number.
            return int(limit) - int(use) + int(cache[1] if cache else 0) if limit.isdigit() else None
    return None


def expandable_segments() -> None:
    """Let the CUDA allocator grow its segments from now on, unless the user's environment configures the allocator.

    Parts differ in size, so blocks of fixed segments would rarely fit the next part.
    """
    if torch.cuda.is_available() and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # pyright: ignore[reportAttributeAccessIssue]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (whose allocator raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    allocators = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    # The driver says "out of memory", and PyTorch and Triton name CUDA beside it. A kernel that asks for too much
    # shared memory is "out of resource".
    return any(name in message for name in allocators) or ("out of memory" in message and "CUDA" in message)


@dataclass
class PassCounts:
    """Counts the passes of one try of a step."""

    parts: int = 0
    """Parts that ran forward with graph."""
    tokens_without_graph: int = 0
    alive: int = 0
    """Tokens that are being computed, or whose graph is alive."""
    backward_begun: bool = False
    """Whether a backward has started, so that an error leaves incomplete gradients."""
    attention: Counter[str] = field(default_factory=Counter)
    """Attention calls of forwards, by backend."""


def callers_level() -> int:
    """The stack level, seen from the caller, of the first frame that is neither ours nor that of a library below us."""
    ours, level, frame = ("treetrain", "torch", "jaxtyping"), 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    return level


class Rollback:
    """Undoes the gradients of a step that fails within the block, or notes on the error that it cannot.

    Args:
        parameters: all that the step may add gradients to.
        modules: what FSDP2 may have sharded.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *modules: nn.Module | None):
        self._parameters, self._modules = parameters, modules
        self.obstacle: str | None = None
        """Why gradients cannot be restored, if they cannot."""
        if waiting_gradients(*modules):
            self.obstacle = (
                "gradients of earlier calls waited to be reduced (sync=False) and are dropped: begin the step again"
            )
        elif any(p.grad is not None for p in parameters):
            self.obstacle = "gradients of earlier calls lay in .grad"

    def __enter__(self) -> "Rollback":
        return self

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: Any) -> None:
        if error is not None:
            self.undo()
        if error is not None and self.obstacle is not None:
            error.add_note(f"{self.obstacle}; what this step has added to them is incomplete")

    def undo(self) -> None:
        """Restore the gradients, if that is possible."""
        drop_waiting_gradients(*self._modules)
        if self.obstacle is None:
            for parameter in self._parameters:
                parameter.grad = None


# ---- plans


def plan_within(layout: PackedLayout, budget: int | Bytes | None, model: nn.Module, *, free: int | None = None) -> Plan:
    """The fastest plan within a budget.

    Args:
        budget: tokens, bytes, or None for what the device has free.
        free: bytes that the device has free, where there is no budget; None if that is unknown.

    Raises:
        ValueError: bytes that no plan fits into.
        UnsupportedModel: bytes, and a model that cannot be counted.
    """
    if isinstance(budget, Bytes):
        return make_plan(layout, cost_of(model), budget=budget)
    cost = cost_if_countable(model)
    if cost is None:
        return plan_of_any_model(layout, budget, model_device(model))
    try:
        return make_plan(layout, cost, budget=budget, free_bytes=free)
    except ValueError as error:
        if budget is not None:
            raise
        # The user set no bound and predictions can be wrong, so small parts are tried; out of memory is handled.
        warnings.warn(f"more memory is predicted than is free ({error}); small parts are tried", stacklevel=2)
        return make_plan(layout, cost, budget=LAST_RESORT_TOKENS)


def unknown_named(init: F) -> F:
    """An ``__init__`` whose error for an unknown argument names those that there are."""
    known = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options.keys() - set(known):
            near = "".join(f" (did you mean {x}?)" for x in difflib.get_close_matches(name, known, n=1))
            raise TypeError(f"{type(self).__name__} has no argument {name!r}{near}; it has {', '.join(known)}")
        init(self, *args, **options)

    return cast("F", checked)


class Runtime:
    """Plans batches for a model and runs the plans. See `TreeEngine` for the arguments and errors."""

    merge = True
    """Whether rows that share a prefix are computed together; False for the linear baseline."""
    run_type: type[Any] = PackedRun

    @unknown_named
    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int | str | Bytes | None = None,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        group: "dist.ProcessGroup | None" = None,
        context: "dist.ProcessGroup | None" = None,
        compile_layers: bool | None = None,
    ):
        model, group = unwrapped(loaded(model), group)
        if value_head is not None:
            value_head, group = unwrapped(value_head, group)
        self.context, self.tensor = Ranks(context), tensor_parallel_ranks(model, group, context)
        self.ranks = ranks_of(model, group, value_head, self.same_rows)
        self.collective = is_sharded(model)
        self._may_compile = not self.collective and self.tensor.alone
        if compile_layers and not self._may_compile:
            raise UnsupportedModel(
                "compile_layers=True with a model in FSDP2 or tensor parallel, whose layers communicate by hooks, has "
                "not been verified: leave it out"
            )
        self.compile_layers = compile_layers
        self.compiled: dict[nn.Module, Callable[..., Any]] = {}
        """See `compiled_layers`."""
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature={temperature!r}: it divides the logits, so it must be above 0 and finite")
        self.model, self.budget, self.temperature = model, parse_budget(budget), float(temperature)
        self.value_head = value_head
        self.capabilities = self.checked()
        check_context(self.context, model, self.capabilities)
        # Each rank holds only its share of a part, so the ranks' budgets add up.
        if isinstance(self.budget, Bytes):
            self.budget = Bytes(self.budget.count * self.context.size)
        elif self.budget is not None:
            self.budget *= self.context.size

    @property
    def same_rows(self) -> Ranks:
        """The ranks that hold the same rows and run the same plan (context or tensor parallel)."""
        return self.context if self.tensor.alone else self.tensor

    @property
    def passes_with(self) -> Ranks:
        """The ranks that run every pass together with this one: they wait for one another in it."""
        return self.ranks if self.collective else self.same_rows

    # ---- the model

    def checked(self) -> Capabilities:
        """Check the model as it is now: a dropout may have been switched on since the last call."""
        return check_model(self.model, critics=True, value_head=self.value_head)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model and the value head, each once."""
        modules = [self.model] if self.value_head is None else [self.model, self.value_head]
        return list({p: None for module in modules for p in module.parameters()})

    @property
    def compiles(self) -> bool:
        """Whether decoder layers run compiled."""
        default = model_device(self.model).type == "cuda" and self._may_compile
        return default if self.compile_layers is None else self.compile_layers

    @property
    def balanced(self) -> bool:
        """Whether the model adds an auxiliary loss of its routers, over all tokens of a step."""
        return self.capabilities.auxiliary != 0

    @property
    def live(self) -> bool:
        """Whether scores computed now can have gradients."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters)

    def check_hooks(self) -> None:
        """Raise UnsupportedModel if hooks would see a rank's own gradients, before these are averaged."""
        averaged = not self.ranks.alone and self.tensor.alone
        if averaged and any(p._post_accumulate_grad_hooks for p in self.whole_parameters):
            raise UnsupportedModel(
                "weights that every rank holds as a whole have hooks that run after their gradients are accumulated "
                "(an optimiser step within backward?): they would see this rank's gradients before those are averaged. "
                "Remove the hooks and step the optimiser after forward_backward, or shard the model with fully_shard."
            )

    @property
    def whole_parameters(self) -> list[nn.Parameter]:
        """The parameters that every rank holds as a whole, whose gradients are averaged after a step."""
        return [p for p in self.parameters if not is_shard(p)]

    def rollback(self) -> Rollback:
        """The `Rollback` of a step that starts now."""
        return Rollback(self.parameters, self.model, self.value_head)

    def tree_of(self, rows: Sequence[Row] | TokenTree) -> TokenTree:
        """The tree of a batch; raises DataError for rows that are no token ids."""
        return as_tree(rows, merge=self.merge)

    # ---- plans

    @property
    def cost(self) -> CostModel:
        """The cost model of this model as it is now: counted without running it, with published speeds.

        Raises:
            UnsupportedModel: a model that cannot be counted.
        """
        return cost_of(self.model)

    def plan_of(self, layout: PackedLayout) -> Plan:
        """The plan of a layout under the engine's budget."""
        free = self.free_bytes() if self.budget is None else None
        return plan_within(layout, self.budget, self.model, free=free)

    def check_same_rows(self, ranks: Ranks, layout: PackedLayout) -> None:
        """Raise RanksDisagree, on all of these ranks, unless those that run the same plan have the same layout."""
        if not self.same_rows.alone:
            arrays = (layout.input_ids, layout.parent, layout.edge_rows, layout.edge_targets)
            hashes = [sha256(x.tobytes()).hexdigest()[:16] for x in arrays]
            by_set: dict[int, list[Any]] = {}
            for number, own in ranks.gather((self.ranks.data_rank, hashes)):
                by_set.setdefault(number, []).append(own)
            for same in by_set.values():
                check_same("their rows (as hashes)", same, "pass the same rows, as they run them together")

    def average_gradients(self) -> None:
        """Average the gradients of weights that several ranks hold as a whole, over these ranks.

        Tensor-parallel ranks have the same ones already.
        """
        if self.tensor.alone:
            self.ranks.average_gradients(self.whole_parameters)

    def free_bytes(self) -> int:
        """Bytes that plans may use now, minus gradients not yet allocated (``.grad`` is None).

        Processes on one host share its memory. Ranks that run the same plan have the least of their free bytes;
        context-parallel ranks, times their number.
        """
        device = model_device(self.model)
        free = free_bytes(device)
        if not self.ranks.alone and device.type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.size))
        absent = (own_part(p) for p in self.parameters if p.requires_grad and allocated_gradient(p) is None)
        free = max(free - sum(x.numel() * x.element_size() for x in absent), 0)
        return min(self.same_rows.gather(free)) * self.context.size

    def has_room(self, plan: Plan, extra: float | None = None) -> bool:
        """Whether a plan's predicted peak fits the budget or free memory; False if the model cannot be counted.

        Args:
            extra: further bytes that are optional; `AMPLE` times peak and extra must be free.
        """
        cost = cost_if_countable(self.model)
        if cost is None:
            return False
        room = self.budget.count if isinstance(self.budget, Bytes) else self.free_bytes()
        return cost.peak_bytes(plan) <= room if extra is None else AMPLE * (cost.peak_bytes(plan) + extra) <= room

    def keeps_graphs(self, plan: Plan) -> bool:
        """Whether the graphs of all parts fit at once, into the budget or into free memory."""
        if plan.num_parts <= 1:
            return True
        kept = plan.with_all_kept()
        return kept.peak_tokens <= self.budget if isinstance(self.budget, int) else self.has_room(kept)

    def keeps_logits(self, plan: Plan) -> bool:
        """Whether the logits of all scored rows fit in addition to the graphs of a plan, with room to spare.

        Keeping them saves a second product of the head's matrix with every row.
        """
        logits = len(plan.layout.rows) * self.capabilities.vocab_size * wide_dtype(self.model).itemsize
        return self.has_room(plan, extra=logits)

    def keeps_gradients(self, plan: Plan) -> bool:
        """Whether unsharded gradients fit in addition to a plan, with room to spare, until the step's last backward.

        FSDP2 then reduces them once instead of after every part.
        """
        trained = sum(p.numel() for p in self.parameters if p.requires_grad)
        return self.has_room(plan, extra=trained * wide_dtype(self.model).itemsize)

    # ---- runs

    def table(self, layout: PackedLayout, *, entropy: bool, statistics: bool = False) -> ScoreTable:
        """An empty table for the scores of a layout."""
        device, dtype = model_device(self.model), wide_dtype(self.model)
        return ScoreTable(layout.num_edges, len(layout.rows), dtype, device, entropy=entropy, statistics=statistics)

    def routing(self, tree: TokenTree, *, balanced: bool, **options: Any) -> Routing | None:
        """The routing of experts in a call; None for a model without experts."""
        experts = self.capabilities.experts
        if experts is None:
            return None
        return Routing(experts, tree, model_device(self.model), balanced=balanced, **options)

    def within_memory(
        self, plan: Plan, run: Callable[[Plan, PassCounts], T], rollback: Rollback | None = None
    ) -> tuple[T, Plan, PassCounts]:
        """Run a plan; while memory runs out, start over with half as many tokens alive. Warns once.

        It runs only once where other ranks wait in its passes.

        Args:
            rollback: undoes the gradients of a try that fails; None if `run` adds none.

        Returns:
            what `run` returned, the plan that it was given, and its passes.

        Raises:
            RuntimeError: the gradients of a failed try lie among those of earlier calls.
        """
        restarts, most, budget = 0, 0, sys.maxsize
        scores_first: Any = "no" if plan.scores_first == "no" else "recomputed"
        while True:
            counts = PassCounts()
            try:
                result = run(plan, counts)
                break
            except Exception as error:
                if not self.passes_with.alone or not is_out_of_memory(error):
                    raise
                tokens = counts.alive or plan.peak_tokens
                if rollback is not None and counts.backward_begun:
                    if rollback.obstacle is not None:
                        raise RuntimeError(
                            f"out of memory with {tokens} tokens alive; {rollback.obstacle}, so the step cannot start "
                            "over, and its gradients are incomplete: set them to None (zero_grad) and run the step "
                            f"again with budget={max(tokens // 2, 1)} or less"
                        ) from error
                    rollback.undo()
                restarts, most, budget = restarts + 1, max(most, tokens), min(tokens, budget) // 2
                if not budget:
                    raise
            # Outside the handler, so that nothing keeps the tensors of the failed try alive.
            if model_device(self.model).type == "cuda":
                torch.cuda.empty_cache()
            plan = replace(plan_within(plan.layout, budget, self.model), scores_first=scores_first)
        if restarts:
            times = "once" if restarts == 1 else f"{restarts} times"
            warnings.warn(
                f"out of memory with {most} tokens alive; the step started over in smaller parts {times}. The result "
                f"is exact, but took longer; budget={budget} would have avoided this",
                RuntimeWarning,
                stacklevel=callers_level(),
            )
        return result, plan, counts
