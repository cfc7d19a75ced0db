"""The first layers of a decoder that no trained parameter comes before."""

from torch import nn

from treetrain.core.hf.capability import Capabilities, causal_lm

LAST_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f")
"""Names of the norm after the layers."""


def decoder_layers(decoder: nn.Module, number: int) -> tuple[nn.Module, list[nn.Module]]:
    """The module that holds the decoder's layers, and the layers.

    If they are not in one list, the decoder itself is the only layer.
    """
    text = getattr(decoder, "language_model", decoder)  # an encoder of images may have as many layers
    for holder in text.modules():
        for child in holder.children():
            if isinstance(child, nn.ModuleList) and len(child) == number:
                return holder, list(child)
    return decoder, [decoder]


def frozen_layers(model: nn.Module, capabilities: Capabilities) -> int:
    """Count the first decoder layers whose keys, values and states depend on no trained parameter of the model.

    The last norm and the head come after all layers. A trained parameter anywhere else outside of the layers may come
    before all of them (embeddings, an image encoder), so there are none then.
    """
    lm = causal_lm(model)
    holder, layers = decoder_layers(lm.base_model, lm.config.get_text_config().num_hidden_layers)
    place = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            place.setdefault(parameter, number)
    scalar = capabilities.scalar
    last = [capabilities.head, *(getattr(holder, name, None) for name in LAST_NORMS)]
    for module in (*last, None if scalar is None else scalar.module):
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            place.setdefault(parameter, len(layers))
    for parameter in lm.get_input_embeddings().parameters():  # also where the head shares them
        place[parameter] = 0
    return min((place.get(p, 0) for p in model.parameters() if p.requires_grad), default=len(layers))
