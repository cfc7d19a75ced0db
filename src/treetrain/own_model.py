"""A model of your own: a batch packed for its forward, run in parts, and the scores of its predictions.

For those who own their model code and call `tt.attention` in it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from treetrain.core.attention.attention import AttentionTree
from treetrain.core.attention.kv_cache import KVCacheView
from treetrain.core.attention.schedule import AttentionSpec, Forest
from treetrain.core.engine.engine import checked_temperature
from treetrain.core.engine.engine_model import plan_of_any_model
from treetrain.core.engine.executor import Executor, Part, PassCounts
from treetrain.core.engine.loss_gradients import Batch, Mask, predictions_of
from treetrain.core.engine.model_passes import DeviceLayout, layout_arrays
from treetrain.core.errors import DataError
from treetrain.core.head.lm_head import ScoreRequest, score_edges
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import AttentionRange, PackedLayout
from treetrain.core.tree.token_tree import Row, TokenTree, as_tree
from treetrain.kernels.backends import DeviceBackends
from treetrain.kernels.lm_head import DeviceHeadKernels

_NONE = np.zeros(0, np.int64)


class PackedPart(DeviceLayout):
    """Tokens for one forward of a model, and the predictions that they make.

    N tokens, T predictions. `Packed.forward_backward` makes parts; `pack` makes a whole batch.
    """

    input_ids: Int64[Tensor, " N"]
    """Token ids."""
    positions: Int64[Tensor, " N"]
    """The position of every token in its rows, for rotary or learned embeddings."""
    tree: AttentionTree
    """The tree, for `tt.attention`."""
    predictions: Int64[Tensor, " T"]
    """Index of each prediction into the concatenated predictions of all rows, [sum of L_k - 1]. It selects
    data of the predictions, such as advantages: ``torch.cat(advantages)[part.predictions]``."""

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device,
        edges: Int64[np.ndarray, " T"],
        predictions: Int64[np.ndarray, " T"],
        cache: KVCacheView | None = None,
    ):
        super().__init__(layout_arrays(layout, score=len(edges) > 0), device)
        self.tree = AttentionTree(Forest.of(layout), cache, DeviceBackends())
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

    @property
    def layout(self) -> PackedLayout:
        """The tokens and their predictions as arrays of numpy."""
        return self._batch.layout

    def split(self, per_prediction: Shaped[Tensor, " T *c"]) -> list[Shaped[Tensor, " _ *c"]]:
        """The numbers of the predictions as one tensor [L - 1] (or [L - 1, c]) for every row of L tokens, as
        `tt.logprobs` returns.

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
            ValueError: a budget below 1; a loss that is no scalar, or that needs no gradient in any part; a layer that
                was called twice. As after any error, gradients of earlier parts are in ``.grad``.
        """
        plan = plan_of_any_model(self._batch.layout, budget, self._device)
        losses = _LossPasses(self._batch, plan, loss_of, self._device)
        Executor(plan, losses, gradients=True).train()
        if not losses.needs_gradients:
            raise ValueError(
                "the loss of no part requires a gradient: it must be computed from the part's log-probabilities, and "
                "some parameter before them must be trained"
            )
        return losses.total


class _LossPasses:
    """Calls a loss function of the user's own on the parts of a plan. The `PartRunner` of `Packed.forward_backward`."""

    def __init__(self, batch: Batch, plan: Plan, loss_of: Callable[[PackedPart], Tensor], device: torch.device):
        self.total = torch.zeros((), device=device)
        self.device = device
        self.counts = PassCounts()
        self.needs_gradients = not plan.num_parts
        """Whether some part's loss requires a gradient: not one of a part without anything trained in it or above."""
        self._batch = batch
        self._plan = plan
        self._loss_of = loss_of
        self._predictions = np.flatnonzero(batch.used)
        part_of_read = plan.part_of[batch.layout.edge_rows[batch.edges]]
        self._by_part = np.argsort(part_of_read, kind="stable")
        self._bounds = np.searchsorted(part_of_read[self._by_part], np.arange(plan.num_parts + 1))

    def begin(self, plan: Plan, *, gradients: bool) -> None:
        """See `PartRunner`."""

    def may_need_gradients(self, layer: Hashable) -> bool:
        """See `PartRunner`; what is trained before a layer is not known."""
        return True

    @contextmanager
    def passes(self, *, graph: bool, backward: bool) -> Iterator[None]:
        yield

    def forward(self, part: Part) -> Tensor:
        read = _NONE
        if part.graph:
            number = self._plan.part_of[part.tokens[0]]
            read = self._by_part[self._bounds[number] : self._bounds[number + 1]]
        edges = np.searchsorted(part.piece.edges, self._batch.edges[read])
        packed = PackedPart(part.piece.layout, self.device, edges, self._predictions[read], part.cache)
        loss = self._loss_of(packed)
        if twice := [layer for layer, calls in packed.tree.layer_calls.items() if calls > 1]:
            raise ValueError(f"layer={twice[0]!r} was given by several calls of attention in one forward of a part")
        scalar = isinstance(loss, Tensor) and not loss.dim()
        if part.graph and not (scalar and (loss.requires_grad or not packed.tree.requires_grad)):
            raise ValueError(
                f"the loss of a part is {loss!r}; give a scalar tensor that depends on the part's log-probabilities, "
                "also where the part makes no prediction"
            )
        return loss

    def backward(self, part: Part, output: Tensor) -> None:
        with torch.autocast(self.device.type, enabled=False):
            if output.requires_grad:
                output.backward()
                self.needs_gradients = True
        self.total = self.total + output.detach()


def pack(rows: Sequence[Row] | TokenTree, *, mask: Mask | None = None, device: torch.device | str = "cpu") -> Packed:
    """Pack rows for one forward of your own model: ids, positions, the tree for `attention`, and the predictions.

    Args:
        rows: K lists or arrays of token ids (or trajectories, or their tree).
        mask: K rows [L_k - 1], bools or weights: predictions whose entry is 0 are not made, and tokens that no
            prediction depends on are not computed. None makes all predictions.
        device: where the tensors are made.

    Raises:
        DataError: invalid rows, rows with images, or a mask whose number or lengths of rows do not fit.
    """
    tree = as_tree(rows)
    for name, given in (("images", "images" in tree.special), ("sampling masks", tree.id_sets)):
        if given:
            raise DataError(
                f"the rows have {name}, which tt.pack does not hand to a model of your own; give rows without, or a "
                "Hugging Face model to tt.TreeEngine"
            )
    batch = Batch.of(tree, weighted=False, mask=predictions_of(tree, mask))
    return Packed(batch, torch.device(device))


def prediction_logprobs(
    hidden: Float[Tensor, "N D"],
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
        hidden: the input of the head, for the N tokens of `packed`.
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
    temperature = checked_temperature(temperature)
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
        ScoreRequest(temperature=temperature, need_entropy=return_entropy, kernels=DeviceHeadKernels()),
        fused=plain is not None,
        vocab_size=logits,
    )
    logprobs = scores.logprobs.index_select(0, packed._of_edge)
    if not return_entropy:
        return logprobs
    assert scores.entropies is not None
    return logprobs, scores.entropies.index_select(0, packed._of_row)


def attention(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "N G D"],
    value: Float[Tensor, "N G V"],
    tree: AttentionTree,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    layer: Hashable = None,
    backend: str | None = None,
) -> Float[Tensor, "N H V"]:
    """Attention of every packed token to itself and its ancestors in the tree, differentiable.

    The result at a token is that of causal attention on the token's row alone. Apply rotary embeddings beforehand, at
    the ``positions`` of `pack`.

    Args:
        query: N tokens, H heads of size D; any floating dtype.
        key: G heads; H is a multiple of G (grouped queries).
        value: heads of size V, which may differ from D.
        tree: ``tt.pack(rows).tree``, or the tree of a part.
        scale: factor on the scores; None is ``D ** -0.5``.
        window: a token sees itself and the window - 1 tokens before it on its path; None sees the whole path.
        chunk: a token sees the tokens of its own chunk, counted from the start of its path; not with a window.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: logits of an extra key without a value.
        layer: a number or name, different for each layer; needed only in parts, where keys are cached by layer.
        backend: "rectangles" or "matmul"; on a GPU "varlen", "flex", "triton" or "cudnn" too. None: the one that the
            environment variable TREETRAIN_ATTENTION names, else the first that serves the layer and gives the right
            result.

    Returns:
        The output in the dtype of the query.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a backend that does not exist or cannot run here.
        NotImplementedError: a device that no backend supports.
        RuntimeError: no backend gives the right result on this GPU, or the named one does not.
    """
    _check(tree, query, key, value, sinks)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: give a number above 0, or None for no cap")
    spec = AttentionSpec(AttentionRange(window=window, chunk=chunk), softcap)
    return tree(
        query, key, value, float(query.shape[-1]) ** -0.5 if scale is None else scale, layer, spec, sinks, backend
    )


def _check(tree: AttentionTree, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if x.dim() != 3 or len(x) != tree.num_tokens:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; expected [{tree.num_tokens}, heads, head size], one entry for "
                "each token of the tree"
            )
    dtypes, devices = {x.dtype for x in given.values()}, {x.device for x in given.values()}
    casts = torch.is_autocast_enabled(query.device.type)  # then all get one dtype
    if (len(dtypes) > 1 and not casts) or not query.is_floating_point() or len(devices) > 1:
        found = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in given.items())
        raise ValueError(f"{found}: all three must have one floating dtype and one device")
    (heads, size), groups = query.shape[1:], key.shape[1]
    if value.shape[1] != groups or not groups or heads % groups:
        raise ValueError(
            f"{heads} heads of queries, {groups} of keys, {value.shape[1]} of values: keys and values need the "
            "same number, which divides that of the queries"
        )
    if key.shape[2] != size:
        raise ValueError(f"heads of queries have {size} entries, those of keys {key.shape[2]}; they must agree")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {list(sinks.shape)}; expected [{heads}], one logit for each head")
