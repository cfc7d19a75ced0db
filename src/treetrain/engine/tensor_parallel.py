"""Tensor parallel: transformers has divided a model's weights over ranks, by the model's own `tp_plan`.

The ranks hold the same rows and run the same plan. Every rank has all tokens of a part with its share of the heads, of
the MLPs' columns and of the vocabulary; transformers' hooks put hidden states together. Tree attention treats every
head by itself, so it runs unchanged on a rank's heads, and so does the KV cache. The LM head scores its share of the
vocabulary (`VocabularyShard` in ``lm_head.py``).

Weights that every rank holds whole get the same gradient on every rank, except norms between divided layers (of queries
and keys): a rank sees its own heads alone. transformers adds up their ``.grad`` over the ranks after every backward,
with all that earlier backwards have left there. After a second backward, the first one's gradients are counted as often
as there are ranks. Here the gradient is added up over the ranks once per call, before it is accumulated.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treetrain.engine.distributed import Ranks, is_shard, sharded_modules
from treetrain.engine.lm_head import VocabularyShard
from treetrain.errors import RanksDisagree, UnsupportedModel
from treetrain.models.capability import Capabilities, causal_lm
from treetrain.models.heads import is_plain_linear
from treetrain.models.tree_mode import replaced_forward

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
PARTIAL = "ReplicatedWithGradAllReduce."
"""Where transformers' forward and hook of a norm between divided layers are defined."""


def tensor_parallel_ranks(model: nn.Module, *others: object) -> Ranks:
    """The ranks that a model's weights are divided over; this process alone for any other model.

    Args:
        others: other ways to share a step; all must be None.

    Raises:
        UnsupportedModel: the model is divided otherwise, or together with one of the others.
        RanksDisagree: weights that every rank holds whole are not the same.
    """
    lm: Any = causal_lm(model)
    name, size = type(lm).__name__, int(getattr(lm, "_tp_size", None) or 1)
    meshes: list[Any] = []
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh not in meshes:
            meshes.append(mesh)
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
    if len(meshes) != 1 or meshes[0].size() != size:
        raise UnsupportedModel(
            f"{name} is tensor parallel over {size} ranks (transformers' tp_plan), and its weights lie on "
            f"{len(meshes)} device meshes of {', '.join(str(mesh.size()) for mesh in meshes) or 'no'} ranks: expert "
            "parallel, pipeline parallel and FSDP2 are not supported beside it; leave them out of distributed_config."
        )
    if any(other is not None for other in others):
        raise UnsupportedModel(
            f"{name} is tensor parallel over {size} ranks, which hold the same rows: data parallel (group=, "
            "DistributedDataParallel) and context parallel (context=) are not supported beside it; leave them out."
        )
    ranks = Ranks(meshes[0].get_group())
    _check_plan(lm, ranks)
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


def _check_plan(lm: Any, ranks: Ranks) -> None:
    name, config = type(lm).__name__, lm.config.get_text_config()
    unknown = {key: style for key, style in lm.tp_plan.items() if style not in STYLES}
    if unknown:
        key, style = next(iter(unknown.items()))
        raise UnsupportedModel(
            f"the tp_plan of {name} divides {key} by the style {style!r}, which has not been verified here; supported "
            f"are {', '.join(STYLES)}."
        )
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
    """Refuse adapters that transformers' hooks take for narrower ones, before their forward fails."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_shard(module.weight) and module.in_features != module.weight.shape[1]:
            raise UnsupportedModel(
                f"{name} has in_features={module.in_features}, one rank's share of its weight's "
                f"{module.weight.shape[1]} columns: this release of peft does not divide adapters of rowwise layers as "
                "transformers does. Leave these layers (o_proj, down_proj) out of target_modules."
            )


def vocabulary_shard(capabilities: Capabilities, ranks: Ranks) -> VocabularyShard | None:
    """This rank's share of the vocabulary; None where it has all of it, or a head that is more than a matrix."""
    head: Any = capabilities.head
    if ranks.alone or not is_plain_linear(head) or not is_shard(head.weight) or not capabilities.scores_tokens:
        return None
    return VocabularyShard(ranks, capabilities.vocab_size)


def _partial(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights every rank holds whole, with gradients of its own heads."""
    return [m for m in model.modules() if PARTIAL in getattr(vars(m).get("forward"), "__qualname__", "")]


@contextmanager
def summed_gradients(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Add the partial gradients of weights that every rank holds whole up over the ranks, in place of transformers."""

    def summed(gradient: Tensor) -> Tensor:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        dist.all_reduce(wide, group=ranks.group)
        return wide.to(gradient.dtype)

    with ExitStack() as stack:
        for module in [] if ranks.alone else _partial(model):
            # transformers' forward would register its hook.
            stack.enter_context(replaced_forward(module, partial(type(module).forward, module)))
            for parameter in module.parameters(recurse=False):
                hooks: Any = parameter._post_accumulate_grad_hooks or {}
                theirs = {key: hook for key, hook in hooks.items() if PARTIAL in getattr(hook, "__qualname__", "")}
                for key in theirs:
                    del hooks[key]
                stack.callback(hooks.update, theirs)
                if parameter.requires_grad:
                    handle = parameter.register_hook(summed)
                    stack.callback(handle.remove)
                    own_hooks: Any = parameter._backward_hooks
                    own_hooks.move_to_end(handle.id, last=False)  # others see the sum
        yield
