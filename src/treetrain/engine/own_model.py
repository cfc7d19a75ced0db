"""Tree training for your own model: pack rows for one or several forwards, and score the predictions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.engine.lm_head import ScoreRequest, score_edges
from treetrain.engine.loss_gradients import Batch, predictions_of
from treetrain.engine.packed import DeviceLayout
from treetrain.engine.runtime import plan_of_any_model
from treetrain.errors import DataError
from treetrain.softmax_attention.attention import AttentionTree
from treetrain.softmax_attention.kv_cache import CacheRows, KVCache, KVCacheView
from treetrain.tree.build import Row, as_tree
from treetrain.tree.layout import PackedLayout, cut
from treetrain.tree.token_tree import TokenTree

_NONE = np.zeros(0, np.int64)


class PackedPart(DeviceLayout):
    """Tokens for one forward of a model, and the predictions that they make.

    N tokens, T predictions. `Packed.forward_backward` makes parts; `pack` makes a whole batch.
    """

    input_ids: Tensor
    """int64 [N]: token ids."""
    positions: Tensor
    """int64 [N]: the position of every token in its rows, for rotary or learned embeddings."""
    tree: AttentionTree
    """The tree, for `tt.attention`."""
    predictions: Tensor
    """int64 [T]: index of each prediction into the concatenated predictions of all rows, [sum of L_k - 1]. It selects
    data of the predictions, such as advantages: ``torch.cat(advantages)[part.predictions]``."""

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device,
        edges: np.ndarray,
        predictions: np.ndarray,
        cache: KVCacheView | None = None,
    ):
        super().__init__(layout, device, cache, score=len(edges) > 0)
        self._largest_target = int(layout.edge_targets[edges].max(initial=-1))
        rows = layout.edge_row_index[edges]
        self.predictions, self._of_edge, self._of_row = (
            torch.from_numpy(x).to(device) for x in (predictions, edges, rows)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, N."""
        return self.tree.num_tokens


class Packed(PackedPart):
    """A batch of rows packed for one forward of a model: every shared prefix once. Made by `pack`."""

    def __init__(self, batch: Batch, device: torch.device):
        super().__init__(batch.layout, device, batch.edges, np.flatnonzero(batch.used))
        self._batch, self._device = batch, device

    def split(self, per_prediction: Tensor) -> list[Tensor]:
        """[T] (or [T, c]) numbers of the predictions -> one tensor [L_k - 1] for every row, as `tt.logprobs` returns.

        Predictions that the mask leaves out hold 0. Differentiable.
        """
        return self._batch.per_trajectory(per_prediction)

    def forward_backward(self, loss_of: Callable[[PackedPart], Tensor], budget: int | None = None) -> Tensor:
        """Run forward and backward in parts, so that few tokens are alive at once; adds to the parameters' ``.grad``.

        `loss_of` is called for every part with the tokens of the part. Keys and values of the path above it come from
        a cache, and their gradients go back through it, so the sum of all parts' gradients is that of the whole tree.
        For some parts it is called twice, first without graph and predictions, to fill the cache.

        Args:
            loss_of: maps a part to a scalar loss. The losses of all parts must add up to the loss of the batch: a sum
                over predictions, divided by a number that is the same for all parts. It must call every attention
                layer once, each with its own ``layer``.
            budget: tokens whose graph is alive at once; None takes parts of a size that runs well, each called once.

        Returns:
            The sum of the losses, a scalar without graph.

        Raises:
            ValueError: a budget below 1; a loss that is no scalar with a graph; a layer that was called twice. As after
                any error, gradients of earlier parts are in ``.grad``.
        """
        layout, read_edges = self._batch.layout, self._batch.edges
        predictions = np.flatnonzero(self._batch.used)
        plan = plan_of_any_model(layout, budget, self._device)
        cache = CacheRows(KVCache(plan.cached_tokens, self._device, gradients=True), layout.num_tokens)
        part_of_read = plan.part_of[layout.edge_rows[read_edges]]
        by_part = np.argsort(part_of_read, kind="stable")
        bounds = np.searchsorted(part_of_read[by_part], np.arange(plan.num_parts + 1))

        def run(tokens: np.ndarray, continued: int, read: np.ndarray) -> Tensor:
            piece = cut(layout, tokens)
            edges = np.searchsorted(piece.edges, read_edges[read])
            view = cache.view(plan.path(continued), tokens)
            part = PackedPart(piece.layout, self._device, edges, predictions[read], view)
            loss = loss_of(part)
            if twice := [layer for layer, calls in part.tree.layer_calls.items() if calls > 1]:
                raise ValueError(f"layer={twice[0]!r} was given by several calls of attention in one forward of a part")
            live = isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad
            if torch.is_grad_enabled() and not live:
                raise ValueError(
                    f"the loss of a part is {loss!r}; give a scalar tensor that depends on the part's "
                    "log-probabilities, also where the part makes no prediction"
                )
            return loss

        total, graphs, held = torch.zeros((), device=self._device), {}, {}
        for kind, number in plan.events():
            if kind == "prefill":
                first, tokens = plan.prefill_parts(number)[0], plan.prefill_tokens(number)
                held[first] = tokens
                cache.allocate(tokens)
                with torch.no_grad():
                    run(tokens, int(plan.attach[first]), _NONE)
            elif kind == "forward":
                if plan.kept[number]:
                    held[number] = plan.exported_tokens(number)
                    cache.allocate(held[number])
                read = by_part[bounds[number] : bounds[number + 1]]
                with torch.enable_grad():
                    graphs[number] = run(plan.tokens(number), int(plan.attach[number]), read)
            else:
                loss = graphs.pop(number)
                with torch.autocast(self._device.type, enabled=False):
                    loss.backward()
                total = total + loss.detach()
                del loss
                if number in held:
                    cache.release(held.pop(number))
        return total


def pack(
    rows: Sequence[Row] | TokenTree, *, mask: Sequence[Any] | None = None, device: torch.device | str = "cpu"
) -> Packed:
    """Pack rows for one forward of your own model: ids, positions, the tree for `attention`, and the predictions.

    Args:
        rows: K lists or arrays of token ids (or trajectories, or their tree).
        mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not made, and tokens that no
            prediction depends on are not computed. None makes all predictions.
        device: where the tensors are made.

    Raises:
        DataError: invalid rows, or a mask whose number or lengths of rows do not fit.
    """
    tree = as_tree(rows)
    batch = Batch.of(tree, weighted=False, mask=predictions_of(tree, mask))
    return Packed(batch, torch.device(device))


def prediction_logprobs(
    hidden: Tensor,
    head: nn.Module | Callable[[Tensor], Tensor],
    packed: PackedPart,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Any:
    """Log-probabilities of the predictions of packed rows, from the hidden states before the head; differentiable.

    The head runs once on each state that predicts something, a chunk of states at a time. Logits of all states never
    exist at once.

    Args:
        hidden: [N, D], the input of the head, for the tokens of `packed`.
        head: an ``nn.Linear``, or any module or function that maps [n, D] to logits [n, V], each row by itself.
        packed: the result of `pack`, or a part of it.
        temperature: divides the logits before the softmax.
        return_entropy: also give the entropy of the distribution of every prediction.

    Returns:
        [T], in nats, float32 or wider, in the order of ``packed.predictions``; ``packed.split`` gives one tensor for
        every row. With ``return_entropy`` a pair of such tensors.

    Raises:
        DataError: a predicted id that the head has no logit for.
        ValueError: hidden states of another shape, or a temperature not above 0.
    """
    if hidden.dim() != 2 or len(hidden) != packed.num_tokens:
        raise ValueError(f"hidden has shape {list(hidden.shape)}; expected [{packed.num_tokens}, hidden size]")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature!r}: it divides the logits, so it must be above 0 and finite")
    # Hooks run if the head is called, but not if its weight is read.
    plain = head if isinstance(head, nn.Linear) and type(head) is nn.Linear else None
    if plain is not None and (plain._forward_hooks or plain._forward_pre_hooks or "forward" in vars(plain)):
        plain = None
    with torch.no_grad():
        logits = head(hidden[:1]).shape[-1] if plain is None else plain.out_features
    if packed._largest_target >= logits:
        raise DataError(f"token id {packed._largest_target} is predicted, but the head gives {logits} logits")
    scores = score_edges(
        hidden,
        nn.Identity() if plain is None else plain,
        head,
        packed.edges,
        ScoreRequest(temperature=temperature, need_entropy=return_entropy),
        fused=plain is not None,
        vocab_size=logits,
    )
    logprobs = scores.logprobs.index_select(0, packed._of_edge)
    if not return_entropy:
        return logprobs
    assert scores.entropies is not None
    return logprobs, scores.entropies.index_select(0, packed._of_row)
