"""Images: every distinct image of a step goes through the encoder once, forward and backward.

The encoder runs before the parts, outside of tree mode. Parts read its features from leaf tensors, whose gradients add
up over parts in float32 or wider; after the last part they go through the encoder. So an image that many rows share, or
that stands in several parts, costs one forward and one backward of the encoder, whatever the plan.

Text after an image continues from the image's largest position, so positions are those of every token's own path.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from treetrain.core.device_arrays import on_device
from treetrain.core.engine.extension import Extension, ModelPass
from treetrain.core.head.lm_head import Scores
from treetrain.core.hf.capability import model_device
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
from treetrain.layers.images.image_rows import tree_images


class Images(Extension):
    """Gives passes the features and positions of images, and runs the gradients of the features through the encoder.

    Args:
        tree: a tree with images, which `check_images` has accepted.
    """

    within_hooks = True

    def __init__(self, model: nn.Module, tree: TokenTree):
        inner = image_encoder(model)
        images = tree_images(tree)
        assert inner is not None and images is not None
        self._inner = inner
        self._images = images
        self._device = model_device(model)
        self._positions = path_positions(inner, tree)
        self._attention: dict[int, str] = {}
        self._encoded: ImageFeatures | None = None
        """The encoder's output, with its graph if the encoder is trained."""
        self._leaves: list[Tensor] = []
        """The same numbers without graph, in float32 or wider. Backwards of parts add their gradients here."""
        self._of_pass: ImageFeatures | None = None

    def begin(self, plan: Plan, *, gradients: bool, idle_pass: Callable[[], Scores]) -> None:
        trained = is_trained(self._inner)
        if self._encoded is None or (gradients and trained and not self._encoded.kinds[0].requires_grad):
            self._attention = attention_of(self._inner)
            # The backward may come in a later run: that of a score, or of a second try after memory ran out.
            with torch.set_grad_enabled(trained and (gradients or torch.is_grad_enabled())):
                inputs = joined_images(self._images.distinct, self._device)
                self._encoded = encode_images(self._inner, inputs, self._images)
        self._leaves = []
        for kind in self._encoded.kinds:
            leaf = kind.detach().to(torch.promote_types(kind.dtype, torch.float32))
            self._leaves.append(leaf.requires_grad_(kind.requires_grad))

    @contextmanager
    def around(self, *, graph: bool, backward: bool) -> Iterator[None]:
        with features_given(self._inner, self._features), own_attention(self._inner, self._attention):
            yield
            if backward and self._encoded is not None:
                encoded, self._encoded = self._encoded, None
                pairs = [
                    (x, leaf.grad.to(x.dtype)) for x, leaf in zip(encoded.kinds, self._leaves) if leaf.grad is not None
                ]
                if pairs:
                    with torch.autocast(self._device.type, enabled=False):
                        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])

    def before_forward(self, model_pass: ModelPass) -> None:
        if model_pass.idle:
            return
        tokens = model_pass.part.piece.layout.tree_index
        if self._positions is not None:
            model_pass.keywords["position_ids"] = on_device(self._positions[:, None, tokens], self._device)
        features = self._images.feature[tokens]
        features = features[features >= 0]
        if not len(features):
            return
        assert self._encoded is not None
        index = on_device(features, self._device)
        kinds = [leaf[index].to(kind.dtype) for leaf, kind in zip(self._leaves, self._encoded.kinds)]
        self._of_pass = ImageFeatures(kinds, self._encoded.as_tensor)
        model_pass.keywords["pixel_values"] = torch.zeros(0, device=self._device)  # so that it asks for features

    def _features(self) -> ImageFeatures:
        assert self._of_pass is not None
        features, self._of_pass = self._of_pass, None
        return features
