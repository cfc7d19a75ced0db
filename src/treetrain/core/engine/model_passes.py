"""Runs parts on a Hugging Face model in tree mode, with its own top-level forward and its head scoring the edges."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.core.attention.attention import AttentionTree
from treetrain.core.attention.schedule import Forest
from treetrain.core.device_arrays import to_device
from treetrain.core.engine.engine_model import Call
from treetrain.core.engine.executor import Part, PassCounts
from treetrain.core.engine.extension import Extension, LayoutArrays, ModelPass
from treetrain.core.engine.loss_gradients import KnownGradients, ScoreTable
from treetrain.core.errors import UnsupportedModel
from treetrain.core.head.lm_head import Edges, GradientBuffers, ScoreRequest, Scores, check_head, scoring_head
from treetrain.core.hf.capability import is_checkpointed
from treetrain.core.hf.tree_mode import RUN_KEYWORD, TreeRun, replaced, tree_attention
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.layout import PackedLayout, Piece, pack
from treetrain.core.tree.token_tree import build_tree


def layout_arrays(layout: PackedLayout, *, score: bool) -> LayoutArrays:
    """The numbers of a layout that a model reads; `score=False` leaves the edges out."""
    none = np.zeros(0, np.int64)
    scored = (layout.rows, layout.edge_row_index, layout.edge_targets) if score else (none, none, none)
    return LayoutArrays(*(x.astype(np.int64, copy=False) for x in (layout.input_ids, layout.positions, *scored)))


class DeviceLayout:
    """The tensors of a layout on a device."""

    def __init__(self, arrays: LayoutArrays, device: torch.device):
        # One copy, so that the host need not wait for a GPU at each part.
        self.input_ids, self.positions, rows, edge_row, targets = to_device(arrays, device)
        self.edges = Edges(rows=rows, edge_row=edge_row, targets=targets, host_edge_row=arrays.edge_row)


class ModelPasses:
    """Runs the parts of one plan. The `PartRunner` of an engine.

    Args:
        extensions: outermost first.
        table: gets the scores; None runs the layers without the head.
        gradients: of the loss by the scores; None if they come later (`gradients` and `table` may be set) or never.
        keep_logits: whether the head keeps its logits with the graphs.
    """

    def __init__(
        self,
        call: Call,
        extensions: Sequence[Extension],
        counts: PassCounts,
        table: ScoreTable | None,
        gradients: KnownGradients | None = None,
        *,
        keep_logits: bool = False,
    ):
        self.counts, self.gradients = counts, gradients
        self.device = call.device
        self._call, self._extensions, self.table = call, extensions, table
        self._keep_logits = keep_logits
        # Where passes are collective, weights are whole only during a pass; no sum over passes holds their gradients.
        self._buffers = None if call.sharing.collective else GradientBuffers()

    @contextmanager
    def passes(self, *, graph: bool, backward: bool) -> Iterator[None]:
        """See `PartRunner`. Activation checkpointing runs layers again in backward, so tree mode stays on there."""
        with ExitStack() as stack:
            stack.enter_context(self.mode(self._call))
            for extension in self._extensions:
                stack.enter_context(extension.around(graph=graph, backward=backward))
            if graph and self._buffers is not None:
                stack.enter_context(self._buffers.collecting(self._call.model))
            yield

    def mode(self, call: Call) -> AbstractContextManager[None]:
        return tree_attention(call.prepared.configured)

    def forward(self, part: Part) -> Scores:
        """Run a part forward and hand its scores over.

        Raises:
            UnsupportedModel: a layer that did not go through tree attention, or logits changed after the head.
        """
        gradients = self.gradients
        table = self.table  # None: the layers run for what they leave behind, a KV cache or the routers' counts
        if gradients is not None and not part.graph and not gradients.needs_scores_early:
            table = None  # a prefill, whose scores are computed when its part runs with graph
        request = ScoreRequest(
            temperature=self._call.temperature,
            need_entropy=table is not None and table.entropies is not None,
            coefficients=gradients.coefficients(part.piece) if part.graph and gradients is not None else None,
            buffers=self._buffers,
            need_statistics=table is not None and table.statistics is not None,
            keep_logits=self._keep_logits,
            kernels=self._call.registry.head,
        )
        scores = self.run(part, request, score=table is not None)
        if table is not None:
            # Without gradients whoever asked reads the table when all parts have run. With them a loss may be evaluated
            # here, for the rows that end in this part: a user's code, which may raise anything.
            take = table.write if gradients is None else gradients.scored
            try:
                take(part.piece, scores)
            except Exception as error:  # raised at the end where other processes wait for this one's later passes
                if not any(extension.postpones(error) for extension in self._extensions):
                    raise
        return scores

    def begin(self, plan: Plan, *, gradients: bool) -> None:
        """Tell the extensions that a run of a plan begins; `gradients`: whether its parts run backward too."""
        for extension in self._extensions:
            extension.begin(plan, gradients=gradients, idle_pass=self.idle_pass)

    def may_need_gradients(self, layer: Hashable) -> bool:
        return self._call.prepared.may_need_gradients(layer)

    def idle_pass(self) -> Scores:
        """Run a forward over one token that adds nothing to the result."""
        layout, none = pack(build_tree([[0, 0]])), np.zeros(0, np.int64)
        graph = torch.is_grad_enabled()
        part = Part(Piece(layout, none, none), np.zeros(1, np.int64), -1, None, graph)  # a root, without a cache
        zeros = torch.zeros(layout.num_edges, device=self.device) if graph else None  # its backward adds zeros
        request = ScoreRequest(temperature=self._call.temperature, coefficients=zeros, kernels=self._call.registry.head)
        return self.run(part, request, idle=True)

    def backward(self, part: Part, output: Scores) -> None:
        """Run a part backward from the gradients of its scores."""
        scores = output
        for extension in self._extensions:
            extension.before_backward()
        # Under the caller's autocast, backward would use 16-bit products where forward used float32.
        with torch.autocast(self.device.type, enabled=False):
            # Known gradients are in the loss already: the common case, which nothing else has to be computed for.
            if scores.linear_loss is not None and scores.values is None and scores.carrier is None:
                if scores.linear_loss.requires_grad:  # not where nothing is trained in the part or above it
                    scores.linear_loss.backward()
                return
            assert self.gradients is not None
            known = self.gradients.gradients_of(part.piece)
            first, edges = scores.logprobs, known.edges
            if scores.linear_loss is not None:
                first, edges = scores.linear_loss, torch.ones_like(scores.linear_loss)
            zeros = None if scores.carrier is None else torch.zeros_like(scores.carrier)
            pairs = zip(
                (first, scores.entropies, scores.values, scores.carrier), (edges, known.rows, known.values, zeros)
            )
            live = [(x, grad) for x, grad in pairs if x is not None and grad is not None and x.requires_grad]
            if live:
                torch.autograd.backward([out for out, _ in live], [grad for _, grad in live])

    def run(self, part: Part, request: ScoreRequest, *, score: bool = True, idle: bool = False) -> Scores:
        """Run one forward; `idle` if it only accompanies those of other processes."""
        model, capabilities = self._call.model, self._call.capabilities
        attention = AttentionTree(Forest.of(part.piece.layout), part.cache, self._call.registry.attention)
        arrays = layout_arrays(part.piece.layout, score=score)
        model_pass = ModelPass(part, arrays, attention, request, scores=score, idle=idle)
        for extension in self._extensions:
            extension.before_forward(model_pass)
        layout = DeviceLayout(model_pass.arrays, self.device)
        run = TreeRun(model_pass.attention, len(layout.input_ids), layout.positions, model_pass.extras)
        with scoring_head(capabilities, layout.edges, model_pass.request) as calls, self._live_inputs(part):
            try:
                outputs = self.call(layout, run, model_pass.keywords)
            except IndexError as error:
                if not calls:
                    raise
                raise UnsupportedModel(
                    f"{type(model).__name__} reads or changes logits after its head, in its forward or in a hook "
                    f"({error}): on a tree the head gives log-probabilities in their place. Leave it out"
                ) from error
        self.check_layers(run)
        check_head(model, capabilities, calls, outputs.logits)
        self.counts.attention.update(attention.calls)
        scores = calls[0].scores
        for extension in reversed(self._extensions):
            scores = extension.after_forward(model_pass, outputs, scores)
        return scores

    @contextmanager
    def _live_inputs(self, part: Part) -> Iterator[None]:
        """Within the block the embeddings require a gradient, if checkpointed layers would lose those of the path.

        Under reentrant checkpointing a layer runs backward only if its own input requires a gradient.
        """
        model, below = self._call.model, part.cache is not None and part.cache.path_tokens > 0
        if not (part.graph and below and is_checkpointed(model) and self._call.prepared.may_need_gradients(0)):
            yield
            return

        def live(_module: nn.Module, _given: object, out: Tensor) -> Tensor:
            return out if out.requires_grad else out + out.new_zeros((), requires_grad=True)

        hook = model.get_input_embeddings().register_forward_hook(live)  # type: ignore[operator]
        try:
            yield
        finally:
            hook.remove()

    def call(self, layout: DeviceLayout, run: TreeRun, keywords: dict[str, Any]) -> Any:
        model, device = self._call.model, layout.input_ids.device
        before = _random_state(device)
        # transformers would look on the host whether positions without a mask are those of packed rows. With a mask it
        # does not; tree attention ignores it.
        keywords = {
            "position_ids": layout.positions.unsqueeze(0),
            "attention_mask": torch.ones_like(layout.input_ids, dtype=torch.bool).unsqueeze(0),
            **keywords,
        }
        # Accelerate wraps a model's forward in one autocast object, which stores the state to restore. A call of the
        # engine within a call of the model would enter that object twice, and autocast would stay on for good.
        inner = vars(model).get("_original_forward") if torch.is_autocast_enabled(device.type) else None
        with ExitStack() as stack:
            if inner is not None:
                stack.enter_context(replaced(model, forward=inner))
            for module in self._call.prepared.undrawn:
                stack.enter_context(replaced(module, training=False))
            outputs = model(
                input_ids=layout.input_ids.unsqueeze(0),
                use_cache=False,
                **{RUN_KEYWORD: run},
                **keywords,
            )
        if not torch.equal(before, _random_state(device)):
            raise UnsupportedModel(
                f"{type(model).__name__} draws random numbers in its forward"
                f"{' in training mode' if model.training else ''}: a shared token would get one draw where every "
                "row has its own. Switch off what does (an adapter, a hook), or call model.eval()."
            )
        return outputs

    def check_layers(self, run: TreeRun) -> None:
        """Raise UnsupportedModel unless every layer has gone through tree attention (or recurrence) once."""
        name = type(self._call.model).__name__
        if run.repeated:
            layer, (call, hands_on) = min(run.repeated.items())
            raise UnsupportedModel(
                f"layer {layer} of {name} {call} several times in a forward; a part of a tree hands one {hands_on} "
                "per layer to the next, so this would be silently wrong under a budget."
            )
        layers = self._call.capabilities.layers
        if len(run.layers_seen) != layers:
            raise UnsupportedModel(
                f"{len(run.layers_seen)} of {layers} layers went through tree attention; the others mix tokens in a "
                "way that is unknown here and would be silently wrong on a tree."
            )


def _random_state(device: torch.device) -> Tensor:
    """The state of the generators, which changes when a model draws random numbers."""
    own = torch.get_rng_state()
    return own if device.type != "cuda" else torch.cat([own, torch.cuda.get_rng_state(device)])
