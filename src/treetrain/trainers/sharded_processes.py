"""FSDP2 in `share_prefixes`: each process holds a shard of the weights, so every pass of the model is collective.

The trainer calls its model equally often on all ranks; otherwise plain FSDP2 would wait for ever. So all ranks reach
the calls that trees answer too. What is decided there depends on the rows of all ranks (`StepScores` exchanges it):
whether micro-batches are scored as one tree, and which trees run backward. A rank whose rows share nothing, or whose
loss has no gradient, takes part all the same. FSDP2 itself reduces the gradients, in the backwards after the last
micro-batch; earlier ones leave them unreduced, as the trainer's own accumulation does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import Trainer

from treetrain.core.engine.score import Scored
from treetrain.engine import TreeEngine
from treetrain.parallel.process_group import is_shard, is_sharded, reduced_at_once
from treetrain.trainers.processes import Processes
from treetrain.trainers.relied_on import calls_may_be_replaced
from treetrain.trainers.step_scores import StepScores


class ShardedProcesses(Processes):
    """Processes that hold shards of the weights, by FSDP2 as accelerate sets it up."""

    call = "_call_impl"
    """The method of a module that runs its hooks and then its forward. It is replaced because FSDP2's hooks on the
    model must not run around a call that a tree answers: they would gather weights for a call that runs no layer, cast
    the answer to the policy's output_dtype, and take the tree's own calls of the model for parts of this one."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        if not calls_may_be_replaced():
            raise ValueError(
                f"torch {torch.__version__} does not call the _call_impl of a module, in whose place share_prefixes "
                "answers calls of a sharded model; install a torch that treetrain is tested with (2.11 to 2.13)"
            )

    def check(self, trainer: Trainer) -> None:
        plugin = trainer.accelerator.state.fsdp_plugin
        assert plugin is not None
        if plugin.fsdp_version != 2:
            raise ValueError(
                f"share_prefixes cannot be exact with fsdp_version: {plugin.fsdp_version}, whose weights are flat "
                "pieces of several layers; set fsdp_version: 2 in accelerate's configuration"
            )

    def check_prepared(self, model: nn.Module) -> None:
        names = [name for name, p in model.named_parameters() if p.requires_grad and not is_shard(p)]
        if names:
            more = f" and {len(names) - 1} more weights" if len(names) > 1 else ""
            raise ValueError(
                f"share_prefixes cannot be exact with {names[0]}{more}, trained and left out of FSDP2 "
                "(fsdp_ignored_modules): without it every rank would train a copy of its own. Freeze them, or leave "
                "that setting out"
            )

    def autocast(self) -> AbstractContextManager[None]:
        """No autocast: FSDP2's mixed precision policy casts weights and inputs."""
        return nullcontext()

    def comparison(self, model: nn.Module) -> AbstractContextManager[None]:
        return reduced_at_once(model)  # FSDP2 puts gradients into .grad only when it reduces them

    def scored(self, scored: Scored, settle: Callable[..., None]) -> None:
        scored.deferral.error = (
            "weights are sharded, so the gradients of a step run through its trees after the last micro-batch, on all "
            "ranks together: read or change .grad after that (on_pre_optimizer_step)"
        )

    def settle(self, engine: TreeEngine, steps: StepScores, *, everything: bool, last: bool) -> list[Scored]:
        return steps.settle(everything=everything, sync=last)

    def engine_key(self, model: nn.Module) -> object:
        return id(model), is_sharded(model)  # accelerate shards it in place
