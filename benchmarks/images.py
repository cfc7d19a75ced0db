"""A GRPO-like step of 8 answers to one question about one image, with and without shared prefixes, on a CPU.

Run: python benchmarks/images.py [--repeats N] [--dry-run]

Without: the plain model on the padded batch that TRL's GRPO makes, whose pixels are repeated for every answer. With:
`TreeEngine.forward_backward` on the same rows. The loss is the mean log-probability of the answers, so both sides run
one forward and one backward. The encoder's own forward and backward are timed apart, on one image and on eight. Seconds
are the process's own; the median and the spread of the repeats are appended to results/images.csv.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import rows
import treetrain as tt

ANSWERS, ANSWER, QUESTION, SIDE = 8, 96, 64, 12
"""Rows; tokens of an answer and of the question; tokens in a row and a column of the image."""
IMAGE, START, END = 4090, 4091, 4092


def model() -> Any:
    """A Qwen3-VL shape of 20M parameters in the language model and 4M in the encoder, float32."""
    text = transformers.Qwen3VLTextConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    )
    vision = {
        "depth": 6,
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_heads": 4,
        "out_hidden_size": 384,
        "patch_size": 14,
        "deepstack_visual_indexes": [1, 3],
        "num_position_embeddings": 1024,
    }
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": 4093,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config=text.to_dict(), vision_config=vision, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config).train()


def processor_seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat, after one to warm up."""
    run()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return found


def measure(repeats: int) -> dict[str, Any]:
    """The result row."""
    lm, random = model(), np.random.default_rng(0)
    patches = 4 * SIDE * SIDE
    image = {
        "pixel_values": random.normal(size=(patches, 3 * 2 * 14 * 14)).astype(np.float32),
        "image_grid_thw": np.array([[1, 2 * SIDE, 2 * SIDE]]),
    }
    asked = [START, *[IMAGE] * SIDE**2, END, *random.integers(0, 4000, QUESTION).tolist()]
    ids = [asked + random.integers(0, 4000, ANSWER).tolist() for _ in range(ANSWERS)]
    weights = [0.0] * len(asked) + [1.0] * ANSWER
    trajectories = [tt.Trajectory(row, loss_weights=weights, images=image, image_token=IMAGE) for row in ids]
    engine = tt.TreeEngine(lm)

    whole = torch.tensor(ids)
    batch = {
        "input_ids": whole,
        "attention_mask": torch.ones_like(whole),
        "mm_token_type_ids": (whole == IMAGE).long(),
        "labels": whole.masked_fill(torch.tensor(weights) == 0, -100),
    }

    def pictures(count: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.concatenate([array] * count)) for name, array in image.items()}

    def plain() -> None:
        lm.zero_grad()
        lm(**batch, **pictures(ANSWERS), use_cache=False).loss.backward()

    def tree() -> None:
        lm.zero_grad()
        engine.forward_backward(trajectories, tt.losses.sft())

    def encoder(count: int) -> Callable[[], None]:
        def run() -> None:
            lm.zero_grad()
            torch.cat(lm.model.get_image_features(**pictures(count)).pooler_output).sum().backward()

        return run

    runs = {"without": plain, "with": tree, "encoder_8": encoder(ANSWERS), "encoder_1": encoder(1)}
    plain()
    wanted = torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])
    tree()
    found = torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])
    seconds = {name: processor_seconds(run, repeats) for name, run in runs.items()}
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "answers": ANSWERS,
        "image_tokens": SIDE**2,
        "row_tokens": len(ids[0]),
        "gradient_difference": f"{float((found - wanted).norm() / wanted.norm()):.1e}",
        **{f"{name}_s": f"{value:.3f}" for name, value in medians.items()},
        **{f"{name}_spread_s": f"{max(each) - min(each):.3f}" for name, each in seconds.items()},
        "speedup": f"{medians['without'] / medians['with']:.2f}",
        "repeats": repeats,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry-run", **rows.DRY_RUN)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows.report("images", measure(given.repeats), dry_run=given.dry_run)
