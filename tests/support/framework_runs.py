"""What the tests of other frameworks' own engines share: rows, a small model as they load it, and processes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from support.processes import free_port

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10], [5, 6, 11], [12], [5, 6, 7, 8, 9, 10]]
RESPONSES = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 13, 14, 15], [16, 17], [18, 19, 20], [1, 2]]
"""Duplicates, a row that is a prefix of others, forks in prompts, in responses and at the first token."""


def image_prompts() -> list[tuple[list[int], dict[str, Any]]]:
    """A prompt for each response, with what a processor makes of its images: equal ids have another image, too."""
    from support.images import image, joined, row

    cat, dog, far = image(1), image(2), image(3, 2, 4)
    # Here a micro-batch may have a row of text beside one with images, which the frameworks' own forwards need.
    rows = [row(5, cat, 7), row(5, dog, 7), row(5, cat, 7), row(5, 6, 11), row(cat, 12, far), row(5, cat, 7)]
    return [(one.ids.tolist(), joined(*(own.inputs for own in one.images)) if one.images else {}) for one in rows]


def saved_model(folder: str, name: str = "Qwen3", **settings: Any) -> str:
    """Save a `small_model`, and return its folder."""
    small_model(name, **settings).save_pretrained(folder)
    return folder


def small_model(name: str = "Qwen3", **settings: Any) -> Any:
    """A small random model of a class of transformers."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **{"vocab_size": 40, "num_hidden_layers": 2, "tie_word_embeddings": False} | settings,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def on_fresh_ranks(function: Callable[..., None], world: int, *args: Any) -> list[dict[str, Any]]:
    """Run `function(rank, world, port, *args, queue)` on every rank; return what each puts into the queue."""
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(function, (world, free_port(), *args, queue), nprocs=world)
    return [queue.get() for _ in range(world)]
