"""Small multimodal models with random weights, and processors without a hub: rows of text alone go through both."""

from typing import Any

import torch
import transformers
from torch import nn
from trainer_runs import SHAPE, WORDS, tokenizer

TEXT = {name: value for name, value in SHAPE.items() if name not in ("pad_token_id", "eos_token_id")}
IMAGE_TOKEN = WORDS + 1
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN, "vision_start_token_id": IMAGE_TOKEN}
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def qwen2_5_vl() -> Any:
    text = transformers.Qwen2_5_VLTextConfig(**{**TEXT, "rope_parameters": MROPE})
    vision = QWEN_VISION | {"fullatt_block_indexes": [0], "window_size": 28}
    return transformers.Qwen2_5_VLConfig(text_config=text.to_dict(), vision_config=vision, **TOKENS)


def qwen3_vl() -> Any:
    text = transformers.Qwen3VLTextConfig(**{**TEXT, "rope_parameters": MROPE | {"mrope_interleaved": True}})
    vision = QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return transformers.Qwen3VLConfig(text_config=text.to_dict(), vision_config=vision, **TOKENS)


def qwen3_5() -> Any:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    rope = MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    kinds = ["linear_attention", "full_attention"]
    text = transformers.Qwen3_5TextConfig(**{**TEXT, **linear, "rope_parameters": rope, "layer_types": kinds})
    vision = QWEN_VISION | {"num_position_embeddings": 16}
    return transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, **TOKENS)


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**{**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8})
    vision = SIGLIP | {"image_size": 28, "patch_size": 14}
    return transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        image_token_id=IMAGE_TOKEN,
    )


def mistral3() -> Any:
    text = transformers.MistralConfig(**TEXT)
    vision = transformers.PixtralVisionConfig(**SIGLIP, image_size=28, patch_size=14)
    return transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN)


def llama4() -> Any:
    text = {name: value for name, value in TEXT.items() if name != "head_dim"}
    text |= {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64, "head_dim": 8}
    text = transformers.Llama4TextConfig(**{**text, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]})
    vision = SIGLIP | {"image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16}
    vision |= {"projector_output_dim": 16, "pixel_shuffle_ratio": 0.5}
    return transformers.Llama4Config(
        text_config=text.to_dict(), vision_config=vision, image_token_index=IMAGE_TOKEN, boi_token_index=IMAGE_TOKEN
    )


CONFIGURATIONS = {
    "Qwen2.5-VL": (qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration"),
    "Qwen3-VL": (qwen3_vl, "Qwen3VLForConditionalGeneration"),
    "Qwen3.5": (qwen3_5, "Qwen3_5ForConditionalGeneration"),
    "Gemma 3": (gemma3, "Gemma3ForConditionalGeneration"),
    "Mistral 3": (mistral3, "Mistral3ForConditionalGeneration"),
    "Llama 4": (llama4, "Llama4ForConditionalGeneration"),
}


def multimodal(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A small random model of this family, for text and images."""
    make, kind = CONFIGURATIONS[name]
    config = make()
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config).to(dtype)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def processor() -> transformers.ProcessorMixin:
    """A tokenizer and an image processor."""
    images = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    images = images(size={"height": 28, "width": 28}, do_center_crop=False)
    encode = tokenizer()
    encode.add_tokens(["<image>"])
    return transformers.LlavaProcessor(images, encode, patch_size=14, image_token="<image>")
