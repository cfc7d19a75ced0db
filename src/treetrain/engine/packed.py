"""One forward of a model over a part: hidden states at its tokens, scores at its edges."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.device_arrays import to_device
from treetrain.engine.context_parallel import HeadExchange, Share
from treetrain.engine.distributed import Ranks, output_dtype
from treetrain.engine.lm_head import Edges, ScoreRequest, Scores, scoring_head
from treetrain.engine.routing import RouterPass
from treetrain.errors import UnsupportedModel
from treetrain.linear_attention.paths import Paths, StateView
from treetrain.models.capability import Capabilities
from treetrain.models.recurrent_layers import tree_recurrence
from treetrain.models.tree_mode import RUN_KEYWORD, TreeRun, missing_window, replaced_forward, tree_attention
from treetrain.softmax_attention.attention import AttentionTree
from treetrain.softmax_attention.kv_cache import KVCacheView
from treetrain.softmax_attention.schedule import Forest
from treetrain.tree.layout import PackedLayout

_NONE = np.zeros(0, np.int64)


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
        try:
            with _within_autocast(self.model):
                outputs = self.model(
                    input_ids=self.input_ids,
                    position_ids=self.positions,
                    attention_mask=self._mask,
                    use_cache=False,
                    **{RUN_KEYWORD: run},
                    **({} if self.routers is None else self.routers.begin()),
                )
        except ValueError as error:
            refusal = missing_window(type(self.model).__name__, error)
            if refusal is None:
                raise
            raise refusal from error
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
