"""A part on its device: one forward of a Hugging Face model over it, or of a model of your own.

`PackedRun` runs a Hugging Face model in tree mode, with its head scoring the edges. `pack`, `PackedPart` and
`prediction_logprobs` are for those who own their model code and call `tt.attention` in it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from treetrain.device_arrays import to_device
from treetrain.engine.context_parallel import HeadExchange, Share
from treetrain.engine.distributed import Ranks, output_dtype
from treetrain.engine.lm_head import Edges, ScoreRequest, Scores, score_edges, scoring_head
from treetrain.engine.loss_gradients import Batch, predictions_of
from treetrain.engine.routing import RouterPass
from treetrain.errors import DataError, UnsupportedModel
from treetrain.linear_attention.paths import Paths, StateView
from treetrain.models.capability import Capabilities
from treetrain.models.recurrent_layers import tree_recurrence
from treetrain.models.tree_mode import RUN_KEYWORD, TreeRun, replaced_forward, tree_attention
from treetrain.planning.make import PART_TOKENS
from treetrain.planning.partition import partition
from treetrain.planning.plan import Plan
from treetrain.softmax_attention.attention import AttentionTree
from treetrain.softmax_attention.kv_cache import KVCache, KVCacheView
from treetrain.softmax_attention.schedule import Forest
from treetrain.tree.build import Row, as_tree
from treetrain.tree.layout import PackedLayout, cut
from treetrain.tree.token_tree import TokenTree

_NONE = np.zeros(0, np.int64)
PASS_TOKENS, FORWARD_SHARE = 40.0, 0.35
"""For a model that cannot be counted: the fixed cost of a pass in tokens, and a forward's share of a step. Every plan
within a budget is exact, so a wrong guess costs time only."""


class DeviceLayout:
    """The tensors of a layout that a model reads.

    Args:
        cache: the path that the layout continues and the rows that it fills; None for whole trees.
        score: False leaves the edges out.
        share: the tokens and edges of this rank, where several ranks divide the layout.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device,
        cache: KVCacheView | None = None,
        *,
        score: bool = True,
        share: Share | None = None,
    ):
        scored = (layout.rows, layout.edge_row_index, layout.edge_targets) if score else (_NONE, _NONE, _NONE)
        own = (layout.input_ids, layout.positions, *scored) if share is None else share.arrays()
        arrays = [x.astype(np.int64, copy=False) for x in own]
        # One copy, so that the host need not wait for a GPU at each part.
        ids, positions, rows, edge_row, targets = to_device(arrays, device)
        self.input_ids, self.positions = ids, positions
        self.tree = AttentionTree(Forest.of(layout), cache)
        self.edges = Edges(rows=rows, edge_row=edge_row, targets=targets, host_edge_row=arrays[3])


class PackedRun:
    """A layout on a model's device, ready to run forward and backward inside `mode`.

    Args:
        cache: the path that the layout continues and the rows that it fills; None for whole trees.
        states: the same for recurrent layers.
        score: False runs the layers alone, for their keys and values.
        routers: what the step does with the routers of experts; None leaves them as they are.
        context: the ranks that divide the layout's tokens among them.
    """

    def __init__(
        self,
        model: nn.Module,
        capabilities: Capabilities,
        layout: PackedLayout,
        cache: KVCacheView | None = None,
        *,
        states: StateView | None = None,
        score: bool = True,
        routers: RouterPass | None = None,
        context: Ranks | None = None,
    ):
        device = model_device(model)
        self.model, self.capabilities = model, capabilities
        self._share = share = None if context is None or context.alone else Share(context, layout, score=score)
        self.routers = routers if routers is None or share is None else routers.of_share(share)
        there = DeviceLayout(layout, device, cache, score=score, share=self._share)
        self.input_ids, self.positions = there.input_ids.unsqueeze(0), there.positions.unsqueeze(0)
        self.edges = there.edges
        self.attention = there.tree if self._share is None else HeadExchange(there.tree, self._share)
        self.paths = Paths(layout, device, states, exchange=share) if capabilities.recurrent_layers else None
        # transformers would look on the host whether positions without a mask are those of packed rows. With a mask it
        # does not; tree attention ignores it. Recurrent layers would look at the mask itself.
        self._mask = None if capabilities.recurrent_layers else torch.ones_like(self.input_ids, dtype=torch.bool)

    @staticmethod
    @contextmanager
    def mode(model: nn.Module) -> Iterator[None]:
        """Tree mode. Keep it open during backward too: activation checkpointing runs layers again there."""
        with tree_attention(model), tree_recurrence(model):
            yield

    @property
    def attention_calls(self) -> Counter[str]:
        """Attention calls of its forward, by backend."""
        return self.attention.calls

    def scores(self, request: ScoreRequest) -> Scores:
        """Run the model's own top-level forward with its head scoring edges. Call inside `mode`.

        Raises:
            UnsupportedModel: a layer that did not go through tree attention, or logits changed after the head.
        """
        run = TreeRun(self.attention, self.input_ids.shape[1], self.positions[0])
        run.routers, run.paths = self.routers, self.paths
        if self._share is not None:
            request = replace(request, coefficients=self._share.coefficients(request.coefficients))
        dtype = output_dtype(self.model) if request.meets_all else None
        with scoring_head(self.capabilities, self.edges, request, handed_on_as=dtype) as calls:
            outputs = self._forward(run)
        self._check_layers(run)
        if self.routers is not None:
            self.routers.close(outputs)
        if len(calls) != 1 or not calls[0].is_as_declared(outputs.logits):
            scalar = self.capabilities.scalar
            pooled = scalar is not None and scalar.pooled
            declared = "at a row's last token" if pooled else str(self.capabilities.logit_map)
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not return what its head gives, {declared} (so "
                f"its configuration says): it was called {len(calls)} times, or its logits are scaled, capped, cut or "
                "cast otherwise afterwards; such a head is not supported."
            )
        scores = replace(calls[0].scores, carrier=outputs.logits) if request.meets_all else calls[0].scores
        return scores if self._share is None else self._share.whole(scores)

    def _forward(self, run: TreeRun) -> Any:
        before = _random_state(self.input_ids.device)
        with _within_autocast(self.model):
            outputs = self.model(
                input_ids=self.input_ids,
                position_ids=self.positions,
                attention_mask=self._mask,
                use_cache=False,
                **{RUN_KEYWORD: run},
                **({} if self.routers is None else self.routers.begin()),
            )
        if not torch.equal(before, _random_state(self.input_ids.device)):
            raise UnsupportedModel(
                f"{type(self.model).__name__} draws random numbers in its forward"
                f"{' in training mode' if self.model.training else ''}: a shared token would get one draw where every "
                "row has its own. Switch off what does (an adapter, a hook), or call model.eval()."
            )
        return outputs

    def _check_layers(self, run: TreeRun) -> None:
        for twice, calls, hands_on in (
            (run.layers_twice, "calls its attention", "set of keys and values"),
            (run.recurrent_twice, "runs its recurrence", "state"),
        ):
            if twice:
                raise UnsupportedModel(
                    f"layer {min(twice)} of {type(self.model).__name__} {calls} several times in a forward; a part of "
                    f"a tree hands one {hands_on} per layer to the next, so this would be silently wrong under a "
                    "budget."
                )
        if len(run.layers_seen) != self.capabilities.layers:
            raise UnsupportedModel(
                f"{len(run.layers_seen)} of {self.capabilities.layers} layers went through tree attention; the "
                "others mix tokens in a way that is unknown here and would be silently wrong on a tree."
            )


def _within_autocast(model: nn.Module) -> AbstractContextManager[None]:
    """Under autocast, replace a forward that Accelerate has wrapped in autocast by the original one.

    Accelerate wraps a model's forward in one autocast object, which stores the state to restore. A call of the engine
    within a call of the model would enter that object twice, and autocast would stay on for good.
    """
    inner = vars(model).get("_original_forward")
    if inner is None or not torch.is_autocast_enabled(model_device(model).type):
        return nullcontext()
    return replaced_forward(model, inner)


def _random_state(device: torch.device) -> Tensor:
    """The state of the generators, which changes when a model draws random numbers."""
    own = torch.get_rng_state()
    return own if device.type != "cuda" else torch.cat([own, torch.cuda.get_rng_state(device)])


def model_device(model: nn.Module) -> torch.device:
    """The device that the model takes its input on."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    weight = next(embeddings.parameters())
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == weight.device.type:
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())  # offloaded


def wide_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of log-probabilities and entropies: float32, or float64 for a float64 model."""
    return torch.promote_types(model.dtype, torch.float32)  # type: ignore[arg-type]


def plan_of_any_model(layout: PackedLayout, budget: int | None, device: torch.device) -> Plan:
    """The plan of a model that cannot be counted; without a budget in tokens, parts are of a size that runs well."""

    def seconds(plan: Plan) -> float:
        passes = plan.num_parts + FORWARD_SHARE * plan.num_prefills
        return PASS_TOKENS * passes + plan.layout.num_tokens + FORWARD_SHARE * plan.recomputed_tokens

    size = PART_TOKENS["cuda" if device.type == "cuda" else "cpu"]
    tokens, target = (max(layout.num_tokens, 1), size) if budget is None else (budget, None)
    return partition(layout, tokens, seconds, part_tokens=target)


# ---- a model of your own


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
            ValueError: a budget below 1; a loss that is no scalar with a graph; a layer that was called twice. As after
                any error, gradients of earlier parts are in ``.grad``.
        """
        layout, read_edges = self._batch.layout, self._batch.edges
        predictions = np.flatnonzero(self._batch.used)
        plan = plan_of_any_model(layout, budget, self._device)
        cache = KVCache(plan.cached_tokens, self._device, gradients=True, tokens=layout.num_tokens)
        part_of_read = plan.part_of[layout.edge_rows[read_edges]]
        by_part = np.argsort(part_of_read, kind="stable")
        bounds = np.searchsorted(part_of_read[by_part], np.arange(plan.num_parts + 1))
        total, graphs, held = torch.zeros((), device=self._device), {}, {}
        for kind, number in plan.events():
            if kind == "backward":
                loss = graphs.pop(number)
                with torch.autocast(self._device.type, enabled=False):
                    loss.backward()
                total = total + loss.detach()
                del loss
                if number in held:
                    cache.release(held.pop(number))
                continue
            if kind == "prefill":
                first, read = plan.prefill_parts(number)[0], _NONE
                tokens = exported = plan.prefill_tokens(number)
            else:
                first, read = number, by_part[bounds[number] : bounds[number + 1]]
                tokens, exported = plan.tokens(number), plan.exported_tokens(number) if plan.kept[number] else _NONE
            if len(exported):
                held[first] = exported
                cache.allocate(exported)
            piece, view = cut(layout, tokens), cache.view(plan.path(int(plan.attach[first])), tokens)
            edges = np.searchsorted(piece.edges, read_edges[read])
            part = PackedPart(piece.layout, self._device, edges, predictions[read], view)
            with torch.set_grad_enabled(kind == "forward"):
                loss = loss_of(part)
            if twice := [layer for layer, calls in part.tree.layer_calls.items() if calls > 1]:
                raise ValueError(f"layer={twice[0]!r} was given by several calls of attention in one forward of a part")
            if kind == "forward":
                if not (isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad):
                    raise ValueError(
                        f"the loss of a part is {loss!r}; give a scalar tensor that depends on the part's "
                        "log-probabilities, also where the part makes no prediction"
                    )
                graphs[number] = loss
            del loss, part
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
