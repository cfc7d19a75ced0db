"""Images: every distinct image of a step goes through the encoder once, forward and backward.

The encoder runs before the parts, outside of tree mode. Parts read its features from leaf tensors, whose gradients add
up over parts in float32 or wider; after the last part they go through the encoder. So an image that many rows share, or
that stands in several parts, costs one forward and one backward of the encoder, whatever the plan.

Text after an image continues from the image's largest position, so positions are those of every token's own path.

Ranks that divide the tokens of every part each run the whole encoder, and read the features of their own tokens.

Where each rank holds a shard of the weights (`ShardedImages`), the encoder's modules gather theirs by hooks within the
model's forward, and all ranks must call them in the same order. So the encoder runs within the first pass of all ranks,
and backward after all others (`parallel/sharded.py`). A rank without images runs it on one of zeros, whose features no
token reads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.core.device_arrays import on_device
from treetrain.core.engine.extension import Extension, ModelPass
from treetrain.core.head.lm_head import Scores
from treetrain.core.hf.capability import model_device
from treetrain.core.hf.tree_mode import instance_of, replaced
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.token_tree import TokenTree
from treetrain.layers.images.encoders import (
    ImageFeatures,
    attention_of,
    encode_images,
    features_given,
    image_encoder,
    is_trained,
    joined_images,
    own_attention,
    path_positions,
)
from treetrain.layers.images.image_rows import Image, tree_images
from treetrain.parallel.context_parallel import Share
from treetrain.parallel.sharded import ShardedEncoder


class Images(Extension):
    """Gives passes the features and positions of images, and runs the gradients of the features through the encoder.

    Args:
        tree: a tree with images, which `check_images` has accepted.
    """

    within_hooks = True

    def __init__(self, model: nn.Module, tree: TokenTree):
        inner = image_encoder(model)
        assert inner is not None
        self._inner = inner
        self._images = tree_images(tree)
        self._device = model_device(model)
        self._positions = None if self._images is None else path_positions(inner, tree)
        self._attention: dict[int, str] = {}
        self._encoded: ImageFeatures | None = None
        """The encoder's output, with its graph if the encoder is trained."""
        self._leaves: list[Tensor] = []
        """The same numbers without graph, in float32 or wider. Backwards of parts add their gradients here."""
        self._of_pass = torch.zeros(0, dtype=torch.int64)
        """The features that the tokens of a pass stand for."""

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        self._attention = attention_of(self._inner)
        if self._lacks_features(gradients=gradients):
            assert self._images is not None
            self._encode(self._images.distinct, graph=gradients or torch.is_grad_enabled())
        self._make_leaves()

    def _lacks_features(self, *, gradients: bool) -> bool:
        encoded = self._encoded
        return encoded is None or (gradients and is_trained(self._inner) and not encoded.kinds[0].requires_grad)

    def _encode(self, images: Sequence[Image], *, graph: bool) -> None:
        """Run the encoder; its backward may come in a later run: that of a score, or of a try after memory ran out."""
        with torch.set_grad_enabled(graph and is_trained(self._inner)):
            self._encoded = encode_images(self._inner, joined_images(images, self._device), self._images)

    def _make_leaves(self) -> None:
        assert self._encoded is not None
        self._leaves = []
        for kind in self._encoded.kinds:
            leaf = kind.detach().to(torch.promote_types(kind.dtype, torch.float32))
            self._leaves.append(leaf.requires_grad_(kind.requires_grad))

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        with self.attached():
            yield
            if backward and self._encoded is not None:
                pairs = self.gradients()
                if pairs:
                    with torch.autocast(self._device.type, enabled=False):
                        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside the block passes take features from here."""
        with features_given(self._inner, self._features), own_attention(self._inner, self._attention):
            yield

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The features, and the gradients that parts have added to them; they are taken once."""
        assert self._encoded is not None
        encoded, self._encoded = self._encoded, None
        pairs = zip(encoded.kinds, self._leaves)
        return [(x, leaf.grad.to(x.dtype)) for x, leaf in pairs if leaf.grad is not None]

    def before_forward(self, model_pass: ModelPass) -> None:
        if model_pass.idle or self._images is None:
            return
        tokens = model_pass.part.piece.layout.tree_index
        share = instance_of(Share, model_pass.extras)
        if share is not None:
            own = share.of_tokens(torch.from_numpy(tokens), -1)
            assert own is not None
            tokens = own.numpy()  # -1 fills up: no feature, at any position
        if self._positions is not None:
            model_pass.keywords["position_ids"] = on_device(self._positions[:, None, tokens], self._device)
        features = self._images.feature[tokens[tokens >= 0]]
        features = features[features >= 0]
        if len(features):
            self._ask(model_pass, on_device(features, self._device))

    def _ask(self, model_pass: ModelPass, features: Tensor) -> None:
        """Have the model's forward ask for these features, by their numbers."""
        self._of_pass = features
        model_pass.keywords["pixel_values"] = torch.zeros(0, device=self._device)

    def _features(self) -> ImageFeatures:
        assert self._encoded is not None
        kinds = [leaf[self._of_pass].to(kind.dtype) for leaf, kind in zip(self._leaves, self._encoded.kinds)]
        return ImageFeatures(kinds, self._encoded.as_tensor)


class ShardedImages(Images, ShardedEncoder):
    """The same on a model of which each rank holds a shard; trees without images take part.

    All passes take features, if only none of them: else the embeddings below frozen ones would require a gradient on
    some ranks alone, and layers would reduce their gradients in another order there.
    """

    def __init__(self, model: nn.Module, tree: TokenTree):
        super().__init__(model, tree)
        self._to_encode: Sequence[Image] = [] if self._images is None else self._images.distinct
        self._runs = self._encodes = self._with_graph = False

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        """Nothing: `agree` has prepared the run."""

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        yield  # `attached` is around the passes that only accompany other ranks, too

    def offer(self) -> list[tuple[str, tuple[int, ...], np.ndarray]] | None:
        """The shapes and sizes of the smallest image, for ranks that have none."""
        if self._images is None:
            return None
        smallest = min(self._images.distinct, key=lambda image: image.inputs["pixel_values"].size)
        arrays = smallest.inputs.items()
        return [(name, x.shape, np.zeros_like(x.ravel()[:1]) if name == "pixel_values" else x) for name, x in arrays]

    def agree(self, offers: Sequence[list[tuple[str, tuple[int, ...], np.ndarray]] | None], *, gradients: bool) -> bool:
        offer = next((one for one in offers if one is not None), None)
        self._runs = offer is not None
        if offer is None:
            return False
        self._attention = attention_of(self._inner)
        if self._images is None:
            self._to_encode = [Image({name: np.broadcast_to(x, shape) for name, shape, x in offer})]
        self._encodes, self._with_graph = (
            self._lacks_features(gradients=gradients),
            gradients or torch.is_grad_enabled(),
        )
        if not self._encodes:
            self._make_leaves()
        return gradients and is_trained(self._inner)

    @contextmanager
    def attached(self) -> Iterator[None]:
        self._own_features = self._inner.get_image_features
        with super().attached() if self._runs else nullcontext():
            yield

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        for leaf in self._leaves:
            if leaf.requires_grad and leaf.grad is None:  # all ranks run all features backward
                leaf.grad = torch.zeros_like(leaf)
        return super().gradients()

    def before_forward(self, model_pass: ModelPass) -> None:
        if self._runs:
            self._ask(model_pass, torch.zeros(0, dtype=torch.int64, device=self._device))
            super().before_forward(model_pass)

    def _features(self) -> ImageFeatures:
        if self._encodes:
            self._encodes = False
            with replaced(self._inner, get_image_features=self._own_features):
                self._encode(self._to_encode, graph=self._with_graph)
            self._make_leaves()
        return super()._features()
