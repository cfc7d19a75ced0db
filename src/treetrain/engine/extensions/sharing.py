"""Several processes: who shares an engine's steps, who holds the same rows, and who holds a part of the weights."""

import os
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from torch import nn

from treetrain.engine.extension import Extension
from treetrain.engine.extensions.context_parallel import ContextParallel, check_context
from treetrain.engine.extensions.process_group import (
    GroupRanks,
    check_same,
    drop_waiting_gradients,
    is_shard,
    is_sharded,
    ranks_of,
    unwrapped,
    waiting_gradients,
)
from treetrain.engine.extensions.sharded import PassesTogether, Sharded
from treetrain.engine.extensions.tensor_parallel import TensorParallel, tensor_parallel_ranks
from treetrain.engine.ranks import Ranks, Sharing
from treetrain.errors import UnsupportedModel
from treetrain.models.capability import Capabilities, model_device
from treetrain.tree.layout import PackedLayout

if TYPE_CHECKING:
    import torch.distributed as dist


def shared(
    model: nn.Module,
    value_head: nn.Module | None,
    group: "dist.ProcessGroup | None",
    context: "dist.ProcessGroup | None",
) -> "tuple[nn.Module, nn.Module | None, GroupSharing]":
    """The model and value head within `DistributedDataParallel`, and how their steps are shared."""
    model, group = unwrapped(model, group)
    if value_head is not None:
        value_head, group = unwrapped(value_head, group)
    return model, value_head, GroupSharing(model, value_head, group, context)


class GroupSharing(Sharing):
    """Says how the processes of some groups share the steps of an engine.

    Args:
        group: those whose gradients are averaged; None: the ranks of a sharded model.
        context: those that divide the tokens of every part.

    Raises:
        UnsupportedModel: the model is divided in a way that is not exact here.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None,
        group: "dist.ProcessGroup | None",
        context: "dist.ProcessGroup | None",
    ):
        self._model, self._value_head = model, value_head
        self.context, self.tensor = GroupRanks(context), tensor_parallel_ranks(model, group, context)
        self.same_rows = self.context if self.tensor.alone else self.tensor
        self.ranks = ranks_of(model, group, value_head, self.same_rows)
        self.collective, self.divides_parts = is_sharded(model), self.context.size
        self.may_compile = not self.collective and self.tensor.alone
        self.has_own_rows = self.tensor.alone

    def check_model(self, capabilities: Capabilities) -> None:
        check_context(self.context, self._model, capabilities)

    def extensions(self, capabilities: Capabilities) -> tuple[list[Extension], list[Extension]]:
        outer: list[Extension] = []
        if not self.tensor.alone:
            outer.append(TensorParallel(self._model, capabilities, self.tensor))
        if not self.context.alone:
            outer.append(ContextParallel(self.context))
        inner: list[Extension] = []
        if not self.passes_with.alone:
            inner.append(PassesTogether(self.passes_with, self.same_rows, self.ranks))
        if self.collective:
            inner.append(Sharded(self._model, self._value_head, self.ranks))
        return outer, inner

    def check_rows(self, ranks: Ranks, layout: PackedLayout) -> None:
        if self.same_rows.alone:
            return
        arrays = (layout.input_ids, layout.parent, layout.edge_rows, layout.edge_targets)
        hashes = [sha256(x.tobytes()).hexdigest()[:16] for x in arrays]
        by_set: dict[int, list[Any]] = {}
        for number, own in ranks.exchange((self.ranks.data_rank, hashes)):
            by_set.setdefault(number, []).append(own)
        for same in by_set.values():
            check_same("their rows (as hashes)", same, "pass the same rows, as they run them together")

    def check_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        if (
            not self.ranks.alone
            and self.tensor.alone
            and any(p._post_accumulate_grad_hooks for p in parameters if not is_shard(p))
        ):
            raise UnsupportedModel(
                "weights that every rank holds as a whole have hooks that run after their gradients are accumulated "
                "(an optimiser step within backward?): they would see this rank's gradients before those are averaged. "
                "Remove the hooks and step the optimiser after forward_backward, or shard the model with fully_shard."
            )

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sharded gradients are reduced by FSDP2 itself; tensor-parallel ranks have the same ones already."""
        if self.tensor.alone:
            self.ranks.average_gradients([p for p in parameters if not is_shard(p)])

    def usable_bytes(self, free: int, absent: int) -> int:
        """Processes on one host share its memory. Ranks that run the same plan have the least of their bytes;
        context-parallel ranks, times their number."""
        if not self.ranks.alone and model_device(self._model).type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.size))
        return min(self.same_rows.gather(max(free - absent, 0))) * self.context.size

    @property
    def has_unreduced(self) -> bool:
        return bool(waiting_gradients(self._model, self._value_head))

    def drop_unreduced(self) -> None:
        drop_waiting_gradients(self._model, self._value_head)
