"""Small built-in models with random weights, their tokenizer and chat template, for trying things out.

`--model tiny` needs no network. The tokenizer is in this folder; `examples/countdown/train_tokenizer.py` trained it.
Reading it needs transformers; only building a model needs torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

TOKENIZER_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The shape of a built-in Qwen3 model; the embedding is shared with the head."""

    parameters: int
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int


PRESETS = {
    "tiny": Preset(parameters=3_672_832, layers=4, hidden=256, feed_forward=768, heads=4, kv_heads=2),
    "small": Preset(parameters=29_371_008, layers=9, hidden=512, feed_forward=1536, heads=8, kv_heads=4),
}


def preset_config(name: str) -> "Qwen3Config":
    """The transformers configuration of a built-in model. Raises ValueError, listing the names, for an unknown one."""
    from transformers import Qwen3Config

    preset = _preset(name)
    return Qwen3Config(
        vocab_size=2048,  # exactly the ids of the tokenizer
        hidden_size=preset.hidden,
        intermediate_size=preset.feed_forward,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=64,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def load_preset_model(name: str, *, seed: int = 0, dtype: "torch.dtype | str" = "float32") -> "PreTrainedModel":
    """A built-in model with random weights, on the CPU, in evaluation mode.

    The weights are drawn in float32 and then cast, so one seed means the same model in every dtype. The global random
    state does not change. Raises ValueError for an unknown name.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    config = preset_config(name)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.dtype = kind
    return model.to(dtype=kind).eval()


def preset_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer and chat template of the built-in models. Raises ValueError for an unknown name."""
    from transformers import AutoTokenizer

    _preset(name)
    return AutoTokenizer.from_pretrained(TOKENIZER_FOLDER, local_files_only=True)


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"no built-in model is named {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
