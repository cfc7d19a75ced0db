"""`logprobs`, `values` and `rewards`: differentiable scores of rows by a plain Hugging Face model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treetrain.device_arrays import on_device
from treetrain.engine.batch import Batch, check_batch, predictions_of, rewards_layout
from treetrain.engine.engine import TreeEngine
from treetrain.engine.gradients import gradients_of
from treetrain.engine.loss_gradients import ScoreTable
from treetrain.engine.routing import check_auxiliary
from treetrain.engine.score import LiveScoring
from treetrain.errors import UnsupportedModel
from treetrain.planning.budget import Bytes
from treetrain.tree.build import Row, as_tree
from treetrain.tree.layout import PackedLayout, pack_states
from treetrain.tree.token_tree import TokenTree


def logprobs(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    temperature: float = 1.0,
    *,
    return_entropy: bool = False,
    return_aux: bool = False,
    return_values: bool = False,
    value_head: nn.Module | None = None,
    mask: Sequence[Any] | None = None,
) -> Any:
    """Log-probability of every token but the first of every sequence; every shared prefix is computed once.

    Args:
        model: a Hugging Face causal LM, plain or wrapped by peft.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: tokens whose graph is alive at once, or bytes ("8GiB") of peak memory; None takes the free memory. A
            batch that fits runs as a whole, a larger one in parts. If the graphs of all parts do not fit, the forward
            keeps none and backward runs each part again. Backward sets existing ``.grad`` aside, which bytes do not
            count.
        temperature: divides the logits before the softmax.
        return_entropy: also give the entropy of the distribution each token was drawn from.
        return_aux: also give the auxiliary loss of a mixture of experts' routers over all tokens of all sequences,
            before its coefficient.
        return_values: also give the value of the state before each of these tokens, by `value_head`, from the same
            pass: policy and critic on one trunk. `tt.values` gives values alone.
        value_head: maps the inputs of the model's LM head, [n, hidden], to values [n] or [n, c].
        mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not computed; they hold 0 and get no
            gradient. None computes all.

    Returns:
        K tensors [L_k - 1], in nats, float32 or wider, with gradients to the model's parameters (and the value
        head's); ``return_entropy`` and ``return_values`` each add a list ([L_k - 1, c] for several values),
        ``return_aux`` adds a scalar at the end; the result is then a tuple. ``.backward()`` and
        ``torch.autograd.grad`` both work, once.

    Raises:
        DataError: an id outside the vocabulary or a row longer than the model's positions.
        UnsupportedModel: the model, or a setting of it, would not be exact on a tree; or gradients are wanted and
            several processes train together, which autograd would leave unsynchronised (use `TreeEngine.score`).
        ValueError: a budget that is neither tokens nor bytes, or bytes that no plan fits into; a model whose
            configuration asks for an auxiliary loss without ``return_aux``, or ``return_aux`` for a model without
            experts.
        RuntimeError: in a second backward, or if weights, the active adapter or ``requires_grad`` changed since the
            forward.
    """
    engine = TreeEngine(model, budget=budget, temperature=temperature, value_head=value_head)

    def prepared() -> tuple[TokenTree, Batch]:
        engine.prepare(logprobs=True, values=return_values)
        check_auxiliary(engine.capabilities.experts, return_aux)
        check_alone_where_live(engine, "treetrain.logprobs")
        tree = as_tree(sequences, merge=True)
        check_batch(tree, engine.capabilities)
        return tree, Batch.of(tree, weighted=False, every_token=return_aux, mask=predictions_of(tree, mask))

    tree, batch = engine.together("treetrain.logprobs", prepared)
    table, aux = scored(engine, tree, batch.layout, "treetrain.logprobs", entropy=return_entropy, balanced=return_aux)
    every = batch.everything()
    found: list[Any] = [every.of_edges(table.logprobs)]
    if table.entropies is not None:
        found.append(every.of_rows(table.entropies))
    if return_values:
        found.append(every.of_rows(table.values_or_zeros))
    if return_aux:
        found.append(aux)
    return found[0] if len(found) == 1 else tuple(found)


def values(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> list[Tensor]:
    """The value of every token's state, for every sequence; every shared prefix is computed once.

    Entry t of a row is the value of the state after its tokens 0 to t, before token t + 1 is known. `values` and
    `returns` of a `Trajectory` are indexed by the predicted token instead: ``values[t + 1]`` there is entry t here.

    Args:
        model: a model for token classification (a critic) or sequence classification (a reward model), plain or wrapped
            by peft; or, with `head`, a causal LM.
        sequences: K lists or arrays of token ids (or trajectories, or a tree).
        budget: as for `treetrain.logprobs`.
        head: maps the inputs of a causal LM's head, [n, hidden], to values [n] or [n, c].

    Returns:
        K tensors [L_k], or [L_k, c] for a head of several labels, float32 or wider, with gradients to the parameters of
        model and head. ``.backward()`` and ``torch.autograd.grad`` both work, once.

    Raises:
        DataError, UnsupportedModel, ValueError, RuntimeError: as `treetrain.logprobs`.
    """
    engine, tree = _prepared(model, sequences, budget, head)
    offsets, index = tree.paths()
    found = _values_at(engine, tree, pack_states(tree), index)
    return list(found.split(np.diff(offsets).tolist()))


def rewards(
    model: nn.Module,
    sequences: Sequence[Row] | TokenTree,
    budget: int | str | Bytes | None = None,
    *,
    head: nn.Module | None = None,
) -> Tensor:
    """Rewards of sequences by a reward model: the value at the last token; every shared prefix is computed once.

    A sequence-classification model reads the last token that is not its ``pad_token_id`` (the first token if all are),
    as it does in transformers. Any other model reads the last token.

    Args:
        model, sequences, budget, head: as `values`.

    Returns:
        [K], or [K, c] for a head of several labels; differentiable as those of `values`.

    Raises:
        DataError: a sequence without tokens; otherwise as `values`.
    """
    engine, tree = _prepared(model, sequences, budget, head)
    layout, last = rewards_layout(tree, engine.capabilities)
    return _values_at(engine, tree, layout, last)


def _prepared(
    model: nn.Module, sequences: Sequence[Row] | TokenTree, budget: int | str | Bytes | None, head: nn.Module | None
) -> tuple[TreeEngine, TokenTree]:
    engine = TreeEngine(model, budget=budget, value_head=head)

    def prepared() -> TokenTree:
        engine.prepare(logprobs=False, values=True)
        check_alone_where_live(engine, "treetrain.values")
        if engine.live:
            check_auxiliary(engine.capabilities.experts, False)
        tree = as_tree(sequences, merge=True)
        check_batch(tree, engine.capabilities)
        return tree

    return engine, engine.together("treetrain.values", prepared)


def _values_at(engine: TreeEngine, tree: TokenTree, layout: PackedLayout, index: np.ndarray) -> Tensor:
    """[T] or [T, c] values at rows of a layout.

    Args:
        index: int64 [T]: the rows that are read, in order.
    """
    table, _ = scored(engine, tree, layout, "treetrain.values")
    if table.values is None:
        return table.logprobs.new_zeros(0)
    return table.values.index_select(0, on_device(index, table.values.device))


def check_alone_where_live(engine: TreeEngine, what: str) -> None:
    """Raise UnsupportedModel if a backward by autograd would not synchronise gradients, or would break the common order
    of passes."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not engine.live or not (several or engine.in_lockstep):
        return
    why = (
        "the model is sharded (fully_shard), whose passes must come in one order, and autograd does not wait for those "
        "of other ranks"
        if engine.in_lockstep
        else "DistributedDataParallel would not synchronise the gradients that its backward gives"
    )
    raise UnsupportedModel(
        f"{what} with gradients in a group of {dist.get_world_size()} processes: {why}. Use scored = "
        "TreeEngine(model).score(rows), loss.backward() and scored.backward(), which averages gradients over the ranks "
        "(sync=False leaves that to you), or TreeEngine(model).forward_backward; or call this under torch.no_grad()."
    )


def scored(
    engine: TreeEngine,
    tree: TokenTree,
    layout: PackedLayout,
    name: str,
    *,
    entropy: bool = False,
    balanced: bool = False,
) -> tuple[ScoreTable, Tensor]:
    """All scores of a layout, differentiable if the engine is `live`, and the auxiliary loss. Call `engine.prepare`
    first.

    Args:
        name: the call, for messages.
    """
    routing = engine.routing(tree, balanced=balanced)
    scoring = LiveScoring(engine, engine.plan_of(layout), routing, name=name, entropy=entropy)
    if not scoring.live or not layout.num_tokens:
        return scoring.forward(), scoring.aux
    parameters = [p for p in engine.parameters if p.requires_grad]
    table = scoring.table
    found = _TreeScores.apply(scoring, parameters, *parameters)
    live = ScoreTable(0, table.num_rows, table.logprobs.dtype, table.device, entropy=False)
    live.logprobs, entropies, values, aux = found  # type: ignore[misc]
    live.entropies = entropies if entropy else None
    live.values = values if table.values is not None else None
    return live, aux


class _TreeScores(torch.autograd.Function):
    """A whole batch as one autograd node whose inputs are the parameters.

    The outer graph does not see the graph inside, so that activation checkpointing finds the model in tree mode when
    it runs layers again in backward.
    """

    @staticmethod
    def forward(ctx, scoring: LiveScoring, parameters: list[nn.Parameter], *_: Tensor):
        ctx.given = scoring, parameters
        table = scoring.forward()
        nothing = table.logprobs.new_zeros(0)
        entropies, values = (nothing if x is None else x for x in (table.entropies, table.values))
        # Copies: the caller may write into them.
        return table.logprobs.clone(), entropies.clone(), values.clone(), scoring.aux.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, edges: Tensor, rows: Tensor, values: Tensor, aux: Tensor):
        scoring, parameters = ctx.given
        scoring.check_backward()
        table = scoring.table
        gradients = scoring.backward(
            edges,
            None if table.entropies is None else rows,
            None if table.values is None else values,
            aux,
            attempt=partial(gradients_of, parameters),
        )
        return None, None, *gradients
