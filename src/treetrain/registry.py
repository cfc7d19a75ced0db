"""The table of everything that an engine may use from outside the core.

A package can add to it by an entry point of the group ``treetrain.features``: a class derived from
`core.engine.engine_model.Feature`, made without arguments for every engine.
"""

from functools import cache
from importlib.metadata import entry_points

from torch import nn

from treetrain.core.engine.engine_model import Call, Feature, Registry, StepBalance
from treetrain.core.engine.extension import Extension
from treetrain.core.hf.tree_mode import instance_of
from treetrain.core.planning.cost import Beside, CostModel
from treetrain.core.tree.token_tree import TokenTree
from treetrain.explain import Explained
from treetrain.kernels.backends import DeviceBackends
from treetrain.kernels.compiled import CompiledFeature
from treetrain.kernels.lm_head import DeviceHeadKernels
from treetrain.layers.experts.recorded import recorded_experts
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.finders import check_model
from treetrain.layers.images.image_rows import tree_images
from treetrain.layers.recurrence.recurrent_layers import RecurrentLayers

ENTRY_POINTS = "treetrain.features"

# What a call of a dense model does not need is imported where it is used.


def cost_of(model: nn.Module) -> CostModel:
    """See `models.costs.cost_of`."""
    from treetrain.models import costs

    return costs.cost_of(model)


class ExpertsFeature(Feature):
    """Routers: their auxiliary loss, and recorded choices."""

    takes = frozenset({"experts"})

    def check_rows(self, call: Call, tree: TokenTree) -> None:
        if recorded_experts(tree) is not None:
            from treetrain.layers.experts.experts import check_recorded

            check_recorded(tree, experts_of(call.capabilities))

    def extension(
        self, call: Call, tree: TokenTree, *, balanced: bool, scale: float, balance: StepBalance | None
    ) -> Extension | None:
        experts = experts_of(call.capabilities)
        if experts is None:
            return None
        from treetrain.layers.experts.experts import Experts, RouterBalance, has_work

        if not has_work(experts, tree, balanced=balanced):
            return None
        assert balance is None or isinstance(balance, RouterBalance)
        return Experts(call.model, experts, tree, call.device, balanced=balanced, whole=balance, scale=scale)


class RecurrenceFeature(Feature):
    """Recurrent layers, whose states follow the tree."""

    def extension(
        self, call: Call, tree: TokenTree, *, balanced: bool, scale: float, balance: StepBalance | None
    ) -> Extension | None:
        if instance_of(RecurrentLayers, call.capabilities.special) is None:
            return None
        from treetrain.layers.recurrence.recurrence import Recurrence

        return Recurrence(call.model, call.prepared.may_need_gradients)


class ImagesFeature(Feature):
    """Images, each of which goes through the encoder once in a step."""

    takes = frozenset({"images"})
    within_sharing = True  # the gradients that it adds are reduced, and seen by hooks, around it

    def check_rows(self, call: Call, tree: TokenTree) -> None:
        if (images := tree_images(tree)) is None:
            return
        from treetrain.layers.images.encoders import check_images
        from treetrain.models.encoder_memory import encoder_memory

        check_images(call.model, tree)
        memory = encoder_memory(call.model, images.distinct)
        if isinstance(memory, Beside):  # each process of a group runs the whole encoder, and the budget is the group's
            size = call.sharing.divides_parts
            memory = memory._replace(held=size * memory.held, peak=size * memory.peak)
        call.beside = memory

    def extension(
        self, call: Call, tree: TokenTree, *, balanced: bool, scale: float, balance: StepBalance | None
    ) -> Extension | None:
        if tree_images(tree) is None and not call.sharing.collective:
            return None
        from treetrain.layers.images.encoders import takes_images
        from treetrain.layers.images.images import Images, ShardedImages

        if not call.sharing.collective:
            return Images(call.model, tree)
        return ShardedImages(call.model, tree) if takes_images(call.model) else None  # other ranks may have images


class KeptActivationsFeature(Feature):
    """Users' forward hooks, which may keep activations for a penalty."""

    within_sharing = True

    def extension(
        self, call: Call, tree: TokenTree, *, balanced: bool, scale: float, balance: StepBalance | None
    ) -> Extension | None:
        if not (call.prepared.live and call.prepared.hooked):
            return None
        from treetrain.check.kept_activations import KeptActivations

        return KeptActivations(call.model, call.prepared.hooked)


@cache
def _features_of_others() -> tuple[type[Feature], ...]:
    kinds = []
    for point in entry_points(group=ENTRY_POINTS):
        try:
            kind = point.load()
        except Exception as error:  # whatever a package raises when it is imported
            error.add_note(f"this is the entry point {point.name!r} of the group {ENTRY_POINTS}: {point.value}")
            raise
        if not (isinstance(kind, type) and issubclass(kind, Feature)):
            raise TypeError(
                f"the entry point {point.name!r} of the group {ENTRY_POINTS} ({point.value}) is {kind!r}; expected a "
                "class derived from treetrain.core.engine.engine_model.Feature"
            )
        kinds.append(kind)
    return tuple(kinds)


def make_registry(compile_layers: bool | None) -> Registry:
    """The registry of an engine.

    Args:
        compile_layers: see `TreeEngine`.
    """
    # Compiled layers come last of those that change the model's modules.
    ours = [
        ExpertsFeature(),
        RecurrenceFeature(),
        CompiledFeature(compile_layers),
        ImagesFeature(),
        KeptActivationsFeature(),
    ]
    return Registry(
        check_model=check_model,
        features=[*(kind() for kind in _features_of_others()), *ours],
        cost_of=cost_of,
        purpose=Explained,
        attention=DeviceBackends(),
        head=DeviceHeadKernels(),
    )
