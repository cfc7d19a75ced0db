"""DeepSpeed's ZeRO-3: weights that are partitioned over processes, and gathered by hooks of modules.

As under FSDP2, every pass is a collective call, so all ranks follow one common order (`sharded.py`). What differs:

- DeepSpeed keeps no gradients that are not reduced yet. It treats every backward of a part as a micro-batch of plain
  training: its gradients are reduced as they come, and added to each rank's share. No rank ever holds them all.
- DeepSpeed's hooks reduce only in backwards of its engine. Here its own are off (`trainers/zero_processes.py`), and a
  hook that does the same is on while parts run. Hooks of users would see parts, so they are refused.
- DeepSpeed counts the inputs of a module's last forward, and releases its weights in a backward when all of these have
  had their gradients. After several forwards the first backward would use this count up, and later ones would release
  nothing until their end. So the count is set again before every backward. After the passes the old count is restored,
  since scores of other trees compare the model's settings with what they were.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from treetrain.core.engine.extension import ModelPass
from treetrain.core.engine.ranks import Ranks
from treetrain.core.head.lm_head import Scores
from treetrain.core.hf.capability import causal_lm
from treetrain.core.hf.tree_mode import forward_hooks, hooks_replaced
from treetrain.parallel.process_group import is_partitioned
from treetrain.parallel.sharded import Sharded, ShardedEncoder

_INPUTS = "ds_grads_remaining"
"""DeepSpeed's field of a module: inputs of its last forward that have not had their gradients yet."""


class Partitioned(Sharded):
    """Steps one rank through the common order of passes of a model under ZeRO-3.

    Args:
        zero: the DeepSpeedEngine that gets the gradients; None leaves each rank its own, whole in ``.grad``.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None,
        ranks: Ranks,
        encoder: ShardedEncoder | None,
        zero: Any,
    ):
        super().__init__(model, value_head, ranks, encoder)
        self._zero = zero
        self._inputs: dict[nn.Module, int] = {}
        self._in_backward = False
        """Whether gradients of the latest backward may wait in DeepSpeed's buckets."""

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._model.modules():
                if (count := vars(module).get(_INPUTS)) is not None:
                    stack.callback(setattr, module, _INPUTS, count)
            if graph and backward and self._zero is not None:
                reduce = self._zero.optimizer.reduce_ready_partitions_and_remove_grads
                for p in self._model.parameters():
                    if p.requires_grad:
                        stack.callback(p.register_post_accumulate_grad_hook(reduce).remove)
            with super().around(graph=graph, backward=backward):
                yield
            self._end_backward()

    def after_forward(self, model_pass: ModelPass, outputs: ModelOutput, scores: Scores) -> Scores:
        # Every forward with graph sets these counts, and every backward uses them up. They are the same in all passes,
        # so those of the first forward are set again before each backward.
        if torch.is_grad_enabled() and not self._inputs:
            modules = ((module, vars(module).get(_INPUTS)) for module in self._model.modules())
            self._inputs = {module: count for module, count in modules if count is not None}
        return super().after_forward(model_pass, outputs, scores)

    def _take_turn(self) -> None:
        self._end_backward()
        if self._turns[self._next].kind == "backward":
            self._begin_backward()
        super()._take_turn()

    def _begin_backward(self) -> None:
        for module, count in self._inputs.items():
            setattr(module, _INPUTS, count)
        if self._zero is not None:
            self._in_backward = True
            self._zero.optimizer.clear_backward_seen_flag()  # what this backward reduces is added to the rank's share
            if self._encoder is not None and self._zero.optimizer.micro_step_id == 0:
                self._drop_old_gradients()
            self._zero.set_gradient_accumulation_boundary(self.reduces != "never")
            self._zero.optimizer.backward_prologue()

    def _drop_old_gradients(self) -> None:
        """Set the rank's share of the gradients to zero at the beginning of a step.

        DeepSpeed replaces those of the step before in a step's first backward. An encoder gets its own in the last one,
        or in none, and would keep the old ones.
        """
        optimizer = self._zero.optimizer
        optimizer.grad_partitions_flat_buffer.zero_()
        if optimizer.offload_optimizer:
            for weights in optimizer.fp32_partitioned_groups_flat:
                if weights.grad is not None:
                    weights.grad.zero_()

    def _end_backward(self) -> None:
        """Reduce what is left in the buckets; a collective call, at the same place on all ranks."""
        if self._in_backward:
            self._in_backward = False
            self._zero.optimizer.independent_gradient_partition_epilogue()
            self._zero.optimizer.backward_epilogue()


@contextmanager
def called_alone(module: nn.Module) -> Iterator[None]:
    """Inside the block, a module has its whole weights, and no hooks that gather or release them; a collective call."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    weights = list(module.parameters())
    with hooks_replaced(forward_hooks(module.modules()), lambda _: None), deepspeed.zero.GatheredParameters(weights):
        yield


@contextmanager
def head_read_outside(model: nn.Module) -> Iterator[None]:
    """Inside the block, DeepSpeed has the head's weights gathered in all of the model's forward and backward.

    TRL's forward reads them without a call of the head. DeepSpeed finds that out only if it has not gathered them for
    the next call of the head already, as it does after passes of a tree.
    """
    from deepspeed.runtime.zero.partition_parameters import (  # pyright: ignore[reportMissingImports]
        register_external_parameter,
        unregister_external_parameter,
    )

    lm = causal_lm(model)
    head = lm.get_output_embeddings()  # None in a reward model, which calls its own
    weights = [] if head is None else [p for p in head.parameters(recurse=False) if is_partitioned(p)]
    for p in weights:
        register_external_parameter(lm, p)
    try:
        yield
    finally:
        for p in weights:
            unregister_external_parameter(lm, p)
