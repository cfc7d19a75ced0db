"""Small random models for images and text, rows with images, and the plain model on one of them at a time."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import treetrain as tt
from support.plans import calls_answer
from treetrain.check import linear
from treetrain.check.contract import PureFloat64

IMAGE, START, END, BREAK = 60, 61, 62, 59
"""The placeholder token, those around an image, and that between the lines of an image."""
MERGE, PATCH = 2, 2
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "temporal_patch_size": 1,
    "spatial_merge_size": MERGE,
    "initializer_range": 0.2,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 63, "vision_start_token_id": START, "vision_end_token_id": END}


def qwen2_5_vl() -> Any:
    text = transformers.Qwen2_5_VLTextConfig(**TEXT, rope_parameters=MROPE)
    vision = VISION | {"fullatt_block_indexes": [1], "window_size": 8}
    return transformers.Qwen2_5_VLConfig(text_config=text.to_dict(), vision_config=vision, **TOKENS)


def qwen3_vl() -> Any:
    text = transformers.Qwen3VLTextConfig(**TEXT, rope_parameters=MROPE | {"mrope_interleaved": True})
    vision = VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    return transformers.Qwen3VLConfig(text_config=text.to_dict(), vision_config=vision, **TOKENS)


def qwen2_vl() -> Any:
    text = transformers.Qwen2VLTextConfig(**TEXT, rope_parameters=MROPE)
    vision = {name: value for name, value in VISION.items() if name not in ("intermediate_size", "out_hidden_size")}
    vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return transformers.Qwen2VLConfig(text_config=text.to_dict(), vision_config=vision, **TOKENS)


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def qwen3_5() -> Any:
    text = transformers.Qwen3_5TextConfig(**TEXT, **LINEAR)
    vision = VISION | {"num_position_embeddings": 16}
    return transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, **TOKENS)


def qwen3_5_moe() -> Any:
    text = {name: value for name, value in TEXT.items() if name != "intermediate_size"}
    text = transformers.Qwen3_5MoeTextConfig(**text, **LINEAR, **EXPERTS, shared_expert_intermediate_size=16)
    vision = VISION | {"num_position_embeddings": 16}
    return transformers.Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision, **TOKENS)


def qwen3_vl_moe() -> Any:
    text = transformers.Qwen3VLMoeTextConfig(
        **TEXT, **EXPERTS, rope_parameters=MROPE | {"mrope_interleaved": True}, mlp_only_layers=[]
    )
    vision = VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    return transformers.Qwen3VLMoeConfig(text_config=text.to_dict(), vision_config=vision, **TOKENS)


SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
SIGLIP |= {"patch_size": PATCH, "initializer_range": 0.2}


def mistral3() -> Any:
    text, vision = transformers.MistralConfig(**TEXT), transformers.PixtralVisionConfig(**SIGLIP, image_size=32)
    return transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, spatial_merge_size=MERGE
    )


def internvl() -> Any:
    text = transformers.Qwen2Config(**{name: x for name, x in TEXT.items() if name != "head_dim"})
    vision = transformers.InternVLVisionConfig(**SIGLIP, image_size=[8, 8], attention_bias=True)
    return transformers.InternVLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**SIGLIP, image_size=4)
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)


def pixtral() -> Any:
    text, vision = transformers.MistralConfig(**TEXT), transformers.PixtralVisionConfig(**SIGLIP, image_size=32)
    own = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, **own)


CONFIGURATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "Qwen3.5 MoE": (qwen3_5_moe, "Qwen3_5MoeForConditionalGeneration"),
    "LLaVA": (llava, "LlavaForConditionalGeneration"),
    "Qwen2.5-VL": (qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration"),
    "Qwen3-VL": (qwen3_vl, "Qwen3VLForConditionalGeneration"),
    "Qwen2-VL": (qwen2_vl, "Qwen2VLForConditionalGeneration"),
    "Qwen3.5": (qwen3_5, "Qwen3_5ForConditionalGeneration"),
    "Qwen3-VL MoE": (qwen3_vl_moe, "Qwen3VLMoeForConditionalGeneration"),
    "Mistral 3": (mistral3, "Mistral3ForConditionalGeneration"),
    "InternVL": (internvl, "InternVLForConditionalGeneration"),
    "Pixtral": (pixtral, "LlavaForConditionalGeneration"),
}
LINES = {"Mistral 3": PATCH * MERGE, "Pixtral": PATCH}
"""Families whose images have sizes, and are divided into lines by a token: pixels on a side of a token."""
TILES = {"InternVL": 8, "LLaVA": 4}
"""Families whose images are tiles of four tokens each: pixels on a side of a tile."""


def image_model(
    name: str, dtype: torch.dtype = torch.float64, seed: int = 0, tokens: dict[str, int] | None = None
) -> Any:
    """A small random model of this family, with noise in the places that start at zero.

    Args:
        tokens: other ids than `TOKENS`.
    """
    make, kind = CONFIGURATIONS[name]
    config = make()
    for field, value in (tokens or {}).items():
        setattr(config, field, value)
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model.to(dtype).train()


class Picture(NamedTuple):
    """What a processor makes of one image."""

    inputs: dict[str, np.ndarray]
    tokens: list[int]


def image(seed: int, height: int = 2, width: int = 2, family: str = "Qwen3-VL") -> Picture:
    """What a processor makes of an image of this many tokens; of a multiple of four where images are tiles."""
    random = np.random.default_rng(seed)
    if family in LINES:
        sides = LINES[family] * height, LINES[family] * width
        line = [*[IMAGE] * width, BREAK]
        inputs = {"pixel_values": random.normal(size=(1, 3, *sides)), "image_sizes": np.array([sides])}
        tokens = [*(line * height)[:-1], END]
    elif family in TILES:
        inputs = {"pixel_values": random.normal(size=(height * width // 4, 3, TILES[family], TILES[family]))}
        tokens = [START, *[IMAGE] * height * width, END]
    else:
        patches = random.normal(size=(height * width * MERGE**2, 3 * PATCH**2))
        inputs = {"pixel_values": patches, "image_grid_thw": np.array([[1, MERGE * height, MERGE * width]])}
        tokens = [START, *[IMAGE] * height * width, END]
    return Picture(inputs | {"pixel_values": inputs["pixel_values"].astype(np.float32)}, tokens)


def joined(*images: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a processor makes of several images, which it pads to the largest with numbers that no one may read."""
    found = {}
    for name in images[0]:
        arrays = [one[name] for one in images]
        if "image_sizes" in images[0]:
            widest = np.max([array.shape[1:] for array in arrays], axis=0)
            arrays = [np.pad(x, [(0, 0), *((0, n) for n in widest - x.shape[1:])], constant_values=7) for x in arrays]
        found[name] = np.concatenate(arrays)
    return found


def row(*parts: int | Picture, **facts: Any) -> tt.Trajectory:
    """A row of tokens and images."""
    ids = [token for part in parts for token in (part.tokens if isinstance(part, Picture) else [part])]
    images = [part.inputs for part in parts if isinstance(part, Picture)]
    given = {"images": joined(*images), "image_token": IMAGE} if images else {}
    return tt.Trajectory(ids, **given, **facts)


def plain_logits(model: nn.Module, one: tt.Trajectory) -> Tensor:
    """The logits [L, V] of the model by itself, called as a processor's output of this row asks for."""
    ids = torch.from_numpy(one.ids.astype(np.int64))[None]
    given = {}
    if one.images:
        whole = joined(*(each.inputs for each in one.images))
        given = {name: torch.from_numpy(x) for name, x in whole.items()} | {"mm_token_type_ids": (ids == IMAGE).long()}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits[0]


def plain_scores(model: nn.Module, rows: Sequence[tt.Trajectory], temperature: float = 1.0) -> list[Tensor]:
    """Log-probabilities [L - 1] of every row by itself."""
    found = []
    for one in rows:
        log_p = (plain_logits(model, one)[:-1] / temperature).log_softmax(-1)
        found.append(log_p.gather(1, torch.from_numpy(one.ids[1:].astype(np.int64))[:, None])[:, 0])
    return found


def plain_gradients(
    model: nn.Module, rows: Sequence[tt.Trajectory], loss: Callable[[list[Tensor]], Tensor], temperature: float = 1.0
) -> tuple[float, Tensor]:
    """A loss of the rows' scores by themselves, and its gradient."""
    total = loss(plain_scores(model, rows, temperature))
    return float(total.detach()), linear.gradients(model, total)


def some_rows(family: str = "Qwen3-VL") -> list[tt.Trajectory]:
    """Rows that share an image, another one, and text."""
    cat, dog = image(1, family=family), image(2, 2, 4, family=family)
    return [row(3, cat, 4, 5), row(3, cat, 4, 6), row(3, dog, 4, 5), row(3, 4, 5), row(3, cat, 7, dog), row(3, 4, 8)]


def step_of_ranks(group: Any, first: int) -> float:
    """The error of a step's gradients on this rank, whose loss is of all ranks' rows.

    Args:
        first: rows of the first rank; the others have the rest.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rows, model = some_rows(), image_model("Qwen3-VL")
    own = rows[:first] if dist.get_rank(group) == 0 else rows[first:]
    with PureFloat64():
        tt.TreeEngine(model, group=None).forward_backward(rows, tt.losses.sft())
        alone = linear.gradients(model)
        model.zero_grad()
        wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        tt.TreeEngine(wrapped).forward_backward(own, tt.losses.sft())
    return linear.relative_error(linear.gradients(model), alone)


@dataclasses.dataclass(frozen=True)
class ShardedJob:
    """A step of two ranks that each hold a shard of the weights."""

    family: str = "Qwen3-VL"
    ranks: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 2), (3, 4, 5))
    """The rows of each rank, out of `some_rows`."""
    frozen: str = ""
    """Parts of the names of weights that are not trained."""
    shards: str = "blocks"
    """Whether each layer and block of the encoder is a shard of its own, the model is one, or (empty) there is none."""
    context: bool = False
    """Whether both ranks have the rows of the first, and divide the tokens of every part."""
    run: str = "step"
    """By `forward_backward`, which may be in two calls, or by `score`."""
    budget: int | None = None
    checkpointing: bool = False
    reduces_each: bool = False
    """Whether every backward reduces its gradients, not the last one alone."""


def made(job: ShardedJob) -> Any:
    model = image_model(job.family)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in job.frozen.split()))
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def losses_of(scores: Sequence[Tensor]) -> Tensor:
    """The sum of a loss that differs from token to token; of `ShardedJob`."""
    weights = [torch.linspace(0.5, 2.0, len(one), dtype=one.dtype) for one in scores]
    return sum((-(weight * one).sum() for weight, one in zip(weights, scores)), torch.zeros((), dtype=torch.float64))


def sharded_step(group: Any, job: ShardedJob) -> tuple[float, float]:
    """The errors of the loss and of the gradients of a step of two ranks, against plain rows in this process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    rows, model = some_rows(job.family), made(job)
    ranks = job.ranks[:1] if job.context else job.ranks
    own = [rows[k] for k in ranks[dist.get_rank(group) % len(ranks)]]
    every = [rows[k] for some in ranks for k in some]
    with PureFloat64():
        loss, alone = plain_gradients(model, every, losses_of)
        mesh = DeviceMesh.from_group(group, "cpu")
        if job.shards == "blocks":
            for module in list(model.modules()):
                if isinstance(module, nn.ModuleList):
                    for block in module:
                        fully_shard(block, mesh=mesh)
        if job.shards:
            fully_shard(model, mesh=mesh)
        engine = tt.TreeEngine(model, budget=job.budget, context=group if job.context else None)
        calls_answer(engine, keeps_gradients=lambda _: not job.reduces_each)
        if job.run == "score":
            scored = engine.score(own)
            total = losses_of(scored.logprobs)
            if own:
                (total * len(ranks)).backward()  # gradients are averaged over ranks with rows of their own
            scored.backward()
            found = sum(engine.ranks.gather(float(total.detach()))) * len(ranks) / 2
        else:

            def weighted(logprobs: Tensor, _entropies: Any, _row: tt.Trajectory) -> tuple[Tensor, dict]:
                return losses_of([logprobs]), {}

            halves = [own[: len(own) // 2], own[len(own) // 2 :]] if job.run == "two calls" else [own]
            found = 0.0
            for number, half in enumerate(halves):
                last = number == len(halves) - 1
                found += engine.forward_backward(half, weighted, normaliser=1.0, sync=last).loss
    gradients = []
    for p in model.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten())
    return abs(found - loss) / abs(loss), linear.relative_error(torch.cat(gradients), alone)
