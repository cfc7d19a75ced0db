"""Tensor and expert parallel: transformers has divided a model's weights over ranks, by the model's own plans.

The ranks hold the same rows and run the same plan. Every rank has all tokens of a part with its share of the heads, of
the MLPs' columns and of the vocabulary; transformers' hooks combine hidden states. Tree attention and the KV cache
treat heads independently, so they run unchanged on a rank's heads. The LM head scores its share of the
vocabulary (`VocabularyShard`).

Expert parallel (`ep_size`) gives each rank whole experts in place of a share of every expert. Routers stay whole, and
every rank chooses experts for all tokens. transformers then sends each rank's slice of the tokens to the experts'
ranks and gathers the results, so all ranks again have the same hidden states after a layer.

Weights that every rank holds whole get the same gradient on every rank, except norms between divided layers (of queries
and keys), where a rank sees only its own heads. transformers sums their ``.grad`` over the ranks after every backward,
including the gradients of earlier backwards. So a second backward multiplies the first one's gradients by the number of
ranks. Here each backward's gradient is summed over the ranks once, before it is accumulated. This includes families
whose plan leaves these norms out (GLM-4-MoE). At the end of a call the ranks compare their gradients.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from treetrain.core.engine.extension import Extension, ModelPass
from treetrain.core.engine.ranks import Ranks
from treetrain.core.errors import RanksDisagree, UnsupportedModel
from treetrain.core.head.lm_head import ChunkGradients, EdgesOfChunk, LogSumExp, Moments, PlainChunk, Statistics
from treetrain.core.hf.capability import Capabilities, causal_lm, is_plain_linear
from treetrain.core.hf.tree_mode import hooks_replaced, replaced
from treetrain.parallel.process_group import GroupRanks, is_shard, meshes_of, sharded_modules

STYLES = (
    "all_reduce",
    "colwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "local_params",
    "moe_tp_experts",
    "packed_colwise",
    "packed_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "rowwise",
)
"""The styles of a plan that are exact here: between layers every rank has all tokens and whole hidden states."""
EP_STYLES = ("ep_dispatch_experts", "grouped_gemm")
PARTIAL = "ReplicatedWithGradAllReduce."
"""Part of the ``__qualname__`` of transformers' forward and hook for a norm between divided layers."""


def tensor_parallel_ranks(model: nn.Module, *others: object) -> Ranks:
    """The ranks that a model's weights are divided over; this process alone for any other model.

    Args:
        others: other ways to share a step; all must be None.

    Raises:
        UnsupportedModel: the model is divided in another way, or combined with one of `others`.
        RanksDisagree: weights that every rank holds whole are not the same.
    """
    lm = causal_lm(model)
    name, size = type(lm).__name__, int(getattr(lm, "_tp_size", None) or 1)
    settings: object = getattr(lm.config, "distributed_config", None) if getattr(lm, "_device_mesh", None) else None
    sizes = {field: int(getattr(settings, field, None) or 1) for field in ("ep_size", "pp_size", "fsdp_size")}
    if sizes["pp_size"] > 1 or sizes["ep_size"] not in (1, size):
        told = ", ".join(f"{field}={value}" for field, value in {"tp_size": size, **sizes}.items())
        raise UnsupportedModel(
            f"{name} was loaded with {told}: pipeline parallel is not supported, nor is expert parallel over ranks "
            "with rows of their own; take tp_size alone, or ep_size equal to tp_size."
        )
    meshes = meshes_of(model)
    if sharded_modules(model) or not (meshes or size > 1):
        if size > 1:
            raise UnsupportedModel(
                f"{name} is tensor parallel over {size} ranks (transformers' tp_plan) and sharded by FSDP2 too, which "
                "is not supported together; take one of them."
            )
        return Ranks()
    if size == 1:
        raise UnsupportedModel(
            f"the weights of {name} are DTensors that neither fully_shard nor transformers' tp_plan made, which is not "
            "supported; use one of them, or the same whole model on every rank."
        )
    members = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if [len(ranks) for ranks in members] != [size]:
        raise UnsupportedModel(
            f"{name} is tensor parallel over {size} ranks (transformers' tp_plan), and its weights lie on those of "
            f"{', '.join(map(str, sorted(members))) or 'none'}: other ways to divide a model are not supported beside "
            "it; leave them out of distributed_config."
        )
    if any(other is not None for other in others):
        raise UnsupportedModel(
            f"{name} is tensor parallel over {size} ranks, which hold the same rows: data parallel (group=, "
            "DistributedDataParallel) and context parallel (context=) are not supported beside it; leave them out."
        )
    ranks = GroupRanks(meshes[0].get_group())
    _check_plan(lm, ranks, experts=sizes["ep_size"] > 1)
    _check_adapters(model)
    whole = {name: parameter for name, parameter in model.named_parameters() if not is_shard(parameter)}
    sums = torch.stack([parameter.detach().sum(dtype=torch.float64) for parameter in whole.values()]).tolist()
    for name, *of_ranks in zip(whole, *ranks.gather(sums)):
        if len(set(of_ranks)) > 1:
            raise RanksDisagree(
                f"every tensor-parallel rank holds {name} whole, but their sums differ: {of_ranks}; make new weights, "
                "such as an adapter's, from the same seed on every rank"
            )
    return ranks


def _check_plan(lm: PreTrainedModel, ranks: Ranks, *, experts: bool) -> None:
    """Refuse plans that are not exact here, and sizes that do not fit; `experts`: whether experts are divided too."""
    name, config = type(lm).__name__, lm.config.get_text_config()
    plans = {"tp_plan": (lm.tp_plan, STYLES), "ep_plan": (lm.ep_plan if experts else {}, EP_STYLES)}
    for field, (plan, known) in plans.items():
        for key, style in plan.items():
            if style not in known:
                raise UnsupportedModel(
                    f"the {field} of {name} divides {key} by the style {style!r}, which has not been verified here; "
                    f"supported are {', '.join(known)}."
                )
    if set(lm.tp_plan.values()) <= {"replicate"}:
        return
    heads, vocabulary = int(config.num_attention_heads), int(config.vocab_size)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    # The last rank may have fewer tokens of the vocabulary, but not none.
    sizes = (n for n in range(1, keys + 1) if heads % n == keys % n == 0)
    fitting = [n for n in sizes if -(-vocabulary // n) * (n - 1) < vocabulary]
    if ranks.size not in fitting:
        raise UnsupportedModel(
            f"{name} has {heads} heads, {keys} heads of keys and values and a vocabulary of {vocabulary}, which "
            f"{ranks.size} tensor-parallel ranks cannot share; tp_size={' or '.join(map(str, fitting))} can."
        )


def _check_adapters(model: nn.Module) -> None:
    """Refuse adapters that peft does not divide in the way transformers divides their layers."""
    name: str
    module: Any
    for name, module in model.named_modules():
        parameter = getattr(module, "parameter_name", None)  # in peft's wrapper of one parameter
        if parameter is not None and is_shard(getattr(module.get_base_layer(), parameter)):
            raise UnsupportedModel(
                f"{name} adapts {parameter}, which is divided over the ranks, and peft does not divide its adapter; "
                "leave it out of target_parameters."
            )
        for adapter in getattr(module, "lora_B", {}).values():
            rows, needed = adapter.weight.shape[0], module.get_base_layer().weight.shape[0]
            if rows != needed:
                raise UnsupportedModel(
                    f"{name} has {needed} outputs, its adapter {rows}: peft does not divide this adapter as "
                    "transformers divides the layer; leave it out of target_modules."
                )


# ---- the head


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """One rank's share of a vocabulary that the ranks divide in order; all shares but the last are equal."""

    ranks: Ranks
    size: int
    """Tokens of the whole vocabulary."""

    @property
    def width(self) -> int:
        """Tokens in the largest share."""
        return -(-self.size // self.ranks.size)

    def own(self, weight: Tensor) -> Tensor:
        """This rank's part of the head's weight or bias, a DTensor."""
        return weight.to_local()  # type: ignore[operator]

    def chunk(self, own: PlainChunk) -> PlainChunk:
        """A chunk over the whole vocabulary, from that of this rank."""
        return ShardedChunk(own, self)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        dist.all_reduce(own, group=self.ranks.group)
        return own

    def gather(self, own: Shaped[Tensor, "*own"]) -> Shaped[Tensor, " P *own"]:
        """The tensors of all ranks."""
        every = own.new_empty(self.ranks.size, *own.shape)
        dist.all_gather(list(every.unbind()), own.contiguous(), group=self.ranks.group)
        return every

    def own_edges(self, edges: EdgesOfChunk) -> tuple[EdgesOfChunk, Bool[Tensor, " e"]]:
        """The edges with targets numbered within the share (0 for targets of other ranks), and a mask of own ones."""
        target = edges.target - self.ranks.rank * self.width
        own = (target >= 0) & (target < self.width)
        return EdgesOfChunk(edges.row, target.where(own, 0)), own


class ShardedChunk(PlainChunk):
    """`PlainChunk` for a sharded vocabulary: every rank has the logits of its share.

    The ranks exchange a few numbers per row and edge, never logits. Each gets the gradient of its own logits.
    """

    def __init__(self, own: PlainChunk, vocabulary: VocabularyShard):
        self._own, self._vocabulary = own, vocabulary

    def log_sum_exp(self) -> LogSumExp:
        every = LogSumExp(*(self._vocabulary.gather(x) for x in self._own.log_sum_exp()))
        highest = every.highest.amax(0)
        is_highest = every.highest == highest
        others = (every.highest - highest + every.log_total).exp()
        # Without the highest logits themselves, as in `LogSumExp.of`.
        rest = torch.where(is_highest, every.log_total.expm1(), others).sum(0)
        return LogSumExp(highest, (is_highest.sum(0) - 1 + rest).log1p())

    def logprobs(self, lse: LogSumExp, edges: EdgesOfChunk) -> Float[Tensor, " e"]:
        own, is_own = self._vocabulary.own_edges(edges)
        return self._vocabulary.sum(self._own.logprobs(lse, own).where(is_own, 0.0))

    def statistics(self, lse: LogSumExp, edges: EdgesOfChunk) -> Statistics:
        vocabulary, own = self._vocabulary, self._own.moments(lse)
        own = own._replace(token=own.token + vocabulary.ranks.rank * vocabulary.width)
        every = Moments(*(vocabulary.gather(x) for x in own))
        highest, rank = every.highest.max(0)
        whole = Moments(highest, every.token.gather(0, rank[None])[0], every.total.sum(0), every.squares.logsumexp(0))
        return whole.statistics(vocabulary.size, lse, edges)

    def entropies(self, lse: LogSumExp) -> Float[Tensor, " r"]:
        return self._vocabulary.sum(self._own.entropies(lse))

    def gradient(self, lse: LogSumExp, edges: EdgesOfChunk, gradients: ChunkGradients) -> Float[Tensor, "r V"]:
        own, is_own = self._vocabulary.own_edges(edges)
        return self._own.gradient(lse, own, gradients._replace(by_edge=gradients.by_edge.where(is_own, 0.0)))


class TensorParallel(Extension):
    """Corrects the hooks of a divided model around its passes, and scores with this rank's share of the vocabulary."""

    def __init__(self, model: nn.Module, capabilities: Capabilities, ranks: Ranks):
        self._model, self._ranks = model, ranks
        head: Any = capabilities.head
        divided = is_plain_linear(head) and is_shard(head.weight) and capabilities.scores_tokens
        self._vocabulary = VocabularyShard(ranks, capabilities.vocab_size) if divided else None

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        with tensor_parallel_mode(self._model, self._ranks):
            yield

    def before_forward(self, model_pass: ModelPass) -> None:
        model_pass.request = replace(model_pass.request, vocabulary=self._vocabulary)


# ---- gradients


def _partial(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights every rank holds whole, but whose gradients come from its own heads only."""
    lm = causal_lm(model)
    divided = {key.removesuffix("q_proj") for key, style in lm.tp_plan.items() if style == "colwise"}
    norms = {key + name for key in divided for name in ("q_norm", "k_norm")}
    planned = (m for m in lm.modules() if PARTIAL in getattr(vars(m).get("forward"), "__qualname__", ""))
    forgotten = (m for name, m in lm.named_modules() if re.sub(r"\.\d+\.", ".*.", name) in norms)
    return list(dict.fromkeys([*planned, *forgotten]))


def _check_whole_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a model if a weight's gradient should have been summed over the ranks and was not."""
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not is_shard(p)}
    if not whole:
        return
    sizes = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in whole.values()]).tolist()
    for name, *of_ranks in zip(whole, *ranks.gather(sizes)):
        # Devices may sum in a different order each time; gradients of different heads differ by more.
        if max(of_ranks) - min(of_ranks) > 1e-2 * max(of_ranks) + 1e-6 * max(sizes):
            raise UnsupportedModel(
                f"every tensor-parallel rank holds {name} whole, but the sizes of its gradient differ: {of_ranks}; the "
                "model's tp_plan divides layers on both sides of it, which is not supported. Leave tp_plan out."
            )


@contextmanager
def tensor_parallel_mode(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Correct errors of transformers and peft in a divided model, within the block.

    Partial gradients of weights that every rank holds whole are added up over the ranks once. Adapters of row-wise
    layers get their whole width: peft gives them one rank's share, which transformers' hooks treat as the whole.

    Raises:
        UnsupportedModel: at the end of the block, if gradients of these weights differ between ranks.
    """
    if ranks.alone:
        yield
        return

    def summed(gradient: Shaped[Tensor, "*weight"]) -> Shaped[Tensor, "*weight"]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        dist.all_reduce(wide, group=ranks.group)
        return wide.to(gradient.dtype)

    def unless_partial(hook: Callable[..., object]) -> Callable[..., object] | None:
        return None if PARTIAL in getattr(hook, "__qualname__", "") else hook

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_shard(module.weight):
                stack.callback(setattr, module, "in_features", module.in_features)
                module.in_features = module.weight.shape[1]
        for module in _partial(model):
            # transformers' forward would register its hook.
            stack.enter_context(replaced(module, forward=partial(type(module).forward, module)))
            for parameter in module.parameters(recurse=False):
                stack.enter_context(hooks_replaced([parameter._post_accumulate_grad_hooks], unless_partial))
                if parameter.requires_grad:
                    handle = parameter.register_hook(summed)
                    stack.callback(handle.remove)
                    own_hooks: Any = parameter._backward_hooks
                    own_hooks.move_to_end(handle.id, last=False)  # so that other hooks see the sum
        yield
        if torch.is_grad_enabled():
            _check_whole_gradients(model, ranks)
