"""Several processes: who shares an engine's steps, who holds the same rows, and who holds a part of the weights."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from treetrain import __version__
from treetrain.core.digest import digest
from treetrain.core.engine.engine_model import Call, Sharing
from treetrain.core.engine.extension import Extension, Reduces
from treetrain.core.engine.ranks import Ranks
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import Capabilities
from treetrain.core.hf.tree_mode import instance_of
from treetrain.core.losses.protocol import Loss, UserLoss
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout
from treetrain.core.tree.token_tree import TokenTree
from treetrain.core.tree.trajectory import Trajectory
from treetrain.kernels.backends import warm_up
from treetrain.parallel.context_parallel import ContextParallel, check_context
from treetrain.parallel.process_group import (
    GroupRanks,
    check_same,
    compute_dtype,
    drop_waiting_gradients,
    is_deepspeed_engine,
    is_partitioned,
    is_shard,
    is_sharded,
    ranks_of,
    unwrapped,
    waiting_gradients,
)
from treetrain.parallel.sharded import PassesTogether, Sharded, ShardedEncoder, plan_together
from treetrain.parallel.tensor_parallel import TensorParallel, tensor_parallel_ranks


def shared(
    model: nn.Module,
    value_head: nn.Module | None,
    group: "dist.ProcessGroup | None",
    context: "dist.ProcessGroup | None",
) -> "tuple[nn.Module, nn.Module | None, GroupSharing]":
    """Unwrap a model and value head from `DistributedDataParallel`, and find how processes share their steps."""
    zero = model if is_deepspeed_engine(model) else None
    model, group = unwrapped(model, group)
    if value_head is not None:
        value_head, group = unwrapped(value_head, group)
    return model, value_head, GroupSharing(model, value_head, group, context, zero)


def _warm_up_attention(model: nn.Module) -> None:
    """Compile the attention of a model whose configuration says its heads, before its ranks wait for one another."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    heads, hidden = (getattr(text, name, None) for name in ("num_attention_heads", "hidden_size"))
    device = next((p.device for p in model.parameters()), torch.device("meta"))
    if heads and hidden and getattr(text, "kv_lora_rank", None) is None:
        size = getattr(text, "head_dim", None) or hidden // heads
        groups = getattr(text, "num_key_value_heads", None) or heads
        warm_up(device, compute_dtype(model, device), (heads, groups), (size, size))


class GroupSharing(Sharing):
    """Says how the processes of some groups share the steps of an engine.

    Args:
        group: the processes whose gradients are averaged; None takes the ranks of a sharded model.
        context: the processes that divide the tokens of every part.
        zero: the DeepSpeedEngine around the model, if any.

    Raises:
        UnsupportedModel: the model is divided in a way that is not exact here.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None,
        group: "dist.ProcessGroup | None",
        context: "dist.ProcessGroup | None",
        zero: nn.Module | None = None,
    ):
        self._model = model
        self._value_head = value_head
        self._zero = zero
        self.context, self.tensor = GroupRanks(context), tensor_parallel_ranks(model, group, context)
        self.same_rows = self.context if self.tensor.alone else self.tensor
        self.ranks = ranks_of(model, group, value_head, self.same_rows)
        self.collective, self.divides_parts = is_sharded(model), self.context.size
        self.passes_with = self.ranks if self.collective else self.same_rows
        self.may_compile = not self.collective and self.tensor.alone
        if not self.ranks.alone:
            self.processes_on_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.size))

    def check_model(self, capabilities: Capabilities) -> None:
        check_context(self.context, self._model, capabilities)
        if not self.ranks.alone and self.same_rows.alone:  # ranks with the same rows compile at the same time
            _warm_up_attention(self._model)

    def extensions(
        self, capabilities: Capabilities, within: Sequence[Extension]
    ) -> tuple[list[Extension], list[Extension]]:
        outer: list[Extension] = []
        if not self.tensor.alone:
            outer.append(TensorParallel(self._model, capabilities, self.tensor))
        if not self.context.alone:
            outer.append(ContextParallel(self.context))
        inner: list[Extension] = []
        if not self.passes_with.alone:
            inner.append(PassesTogether(self.passes_with, self.same_rows, self.ranks))
        encoder = instance_of(ShardedEncoder, within)
        if self.collective and any(map(is_partitioned, self._model.parameters())):
            from treetrain.parallel.zero import Partitioned

            inner.append(Partitioned(self._model, self._value_head, self.ranks, encoder, self._zero))
        elif self.collective:
            inner.append(Sharded(self._model, self._value_head, self.ranks, encoder))
        return outer, inner

    def agree_on_plan(self, ranks: Ranks, layout: PackedLayout, free: int | None) -> int | None:
        """See `Sharing`. Processes that divide the tokens of every part have the bytes of all of them."""
        if self.same_rows.alone:
            return free
        arrays = (layout.input_ids, layout.parent, layout.edge_rows, layout.edge_targets)
        hashes = [digest(x.tobytes()) for x in arrays]
        by_set: dict[int, list[Any]] = {}
        for number, *own in ranks.exchange((self.ranks.data_rank, hashes, free)):
            by_set.setdefault(number, []).append(own)
        for same in by_set.values():
            check_same(
                "their rows (as hashes)", [own for own, _ in same], "pass the same rows, as they run them together"
            )
        least = [free for _, free in by_set[self.ranks.data_rank]]
        return None if None in least else min(least) * self.divides_parts

    def why_not_live(self) -> str | None:
        if self.collective:
            return "make passes of a sharded model (fully_shard), which autograd does not order over ranks"
        if dist.get_world_size() > 1 and self.tensor.alone:
            count = dist.get_world_size()
            return f"not be synchronised over the {count} processes, not by DistributedDataParallel either"
        return None

    def plan_together(
        self, call: Call, tree: TokenTree, plan: Plan, *, weighted: bool, apart: bool
    ) -> tuple[TokenTree, Plan, Reduces]:
        return plan_together(call, tree, plan, weighted=weighted, apart=apart)

    def check_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        if any(is_partitioned(p) and (p._backward_hooks or p._post_accumulate_grad_hooks) for p in parameters):
            raise UnsupportedModel(
                "weights under ZeRO-3 have hooks on their gradients, which they would see part by part: remove them "
                "(DeepSpeed's own are replaced by tt.share_prefixes; TreeEngine does not train a DeepSpeedEngine)."
            )
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

    def shards(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if is_shard(p)] if self.collective else []

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sharded gradients are reduced by FSDP2 itself; tensor-parallel ranks have the same ones already."""
        if self.tensor.alone:
            self.ranks.average_gradients([p for p in parameters if not is_shard(p)])

    @property
    def has_unreduced(self) -> bool:
        return bool(waiting_gradients(self._model, self._value_head))

    def drop_unreduced(self) -> None:
        drop_waiting_gradients(self._model, self._value_head)

    def rows_of_all_ranks(
        self, call: Call, kind: str, rows: list[Trajectory], loss: Loss, normaliser: float | None
    ) -> tuple[list[Trajectory] | None, float]:
        """See `Sharing`. All ranks add up the weights in rank order, so they get the same normaliser."""
        if self.ranks.alone:
            return rows, 0.0
        ranks, weights = self.ranks, [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in call.prepared.parameters]
        settings = {
            "treetrain": __version__,
            "torch": torch.__version__,
            "the temperature": call.temperature,
            "the kind of engine": kind,
            "the model": f"{type(call.model).__name__} of {len(weights)} weights",
            "the weights' shapes and kinds": digest(repr(weights)),
            "the auxiliary loss": call.capabilities.auxiliary,
            "loss": repr(loss),
            "what the loss needs": {"scope": loss.scope, "needs": sorted(loss.needs)},
            "a normaliser": None if normaliser is None else float(normaliser),
        }
        weight, sent = 0.0, None
        if ranks.data_size > 1:
            # A user's normaliser need not be a sum over rows, so it gets the rows of all ranks.
            if loss.scope == "batch" or (normaliser is None and isinstance(loss, UserLoss)):
                sent = [row.for_losses() for row in rows]
            else:
                loss.check(rows)
                weight = loss.total_weight(rows) if normaliser is None else 0.0
        ranks.same(settings)
        if ranks.data_size == 1:
            return rows, 0.0
        by_rank = ranks.per_data_rank(ranks.exchange((sent, weight)))
        everyone = None if sent is None else [row for own, _ in by_rank for row in own or ()]
        return everyone, sum(weight for _, weight in by_rank)
