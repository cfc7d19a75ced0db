"""Rows with images in trainers: what a processor and TRL's collators make of them, with and without shared prefixes."""

import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import trainer_runs as runs
from datasets import Dataset
from peft import get_peft_model
from PIL import Image
from trainer_runs import adapter, difference, train
from transformers import Qwen2_5_VLProcessor, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import treetrain as tt
from support import images
from support.models import needs_transformers
from support.tree_runs import make_arguments
from treetrain.trainers.tree_trainer import TreeTrainer

needs_transformers("5.16", "processors have other classes")
from transformers import Qwen2VLImageProcessorPil  # noqa: E402
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil  # noqa: E402
from transformers.models.internvl.processing_internvl import InternVLProcessor  # noqa: E402
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil  # noqa: E402

with mock.patch("transformers.utils.is_vision_available", return_value=False):  # else it imports torchvision
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL = {"Mistral 3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "InternVL": ["<context>", "<video>", "<img>", "</img>"]}
"""The tokens of images, first the one that stands for an image; those of Qwen in other families."""
PLACES = {"Mistral 3": "[IMG]", "InternVL": "<context>"}
PLACE = "<|vision_start|> <|image_pad|> <|vision_end|>"
OTHERS = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3.5", "Qwen3-VL MoE", "Mistral 3", "InternVL")
PAD = len(runs.SPECIAL) + runs.WORDS
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}PLACE {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def without_videos(kind: type) -> Any:
    """A kind of processor without videos, which would need torchvision."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})


def processor(name: str = "Qwen3-VL", padding: str = "right") -> Any:
    encode = runs.tokenizer()
    encode.padding_side = padding
    encode.add_tokens(SPECIAL.get(name, QWEN), special_tokens=True)
    template = TEMPLATE.replace("PLACE", PLACES.get(name, PLACE))
    if name == "Mistral 3":
        pictures = PixtralImageProcessorPil(size={"longest_edge": 8}, patch_size=images.PATCH)
        sizes = {"patch_size": images.PATCH, "spatial_merge_size": images.MERGE}
        made = PixtralProcessor(pictures, encode, chat_template=template, **sizes)
        made.text_kwargs = {}  # GRPO of TRL would get tensors, for which its prompts are too different in length
        return made
    if name == "InternVL":
        roles = ("context_image_token", "video_token", "start_image_token", "end_image_token")
        for role, token in zip(roles, SPECIAL[name]):
            setattr(encode, role, token)
            setattr(encode, f"{role}_id", encode.convert_tokens_to_ids(token))
        pictures = GotOcr2ImageProcessorPil(size={"height": 8, "width": 8}, min_patches=1, max_patches=2)
        return without_videos(InternVLProcessor)(pictures, encode, None, 4, chat_template=template)
    pictures = Qwen2VLImageProcessorPil(
        patch_size=images.PATCH, temporal_patch_size=1, merge_size=images.MERGE, min_pixels=16, max_pixels=64
    )
    return without_videos(Qwen2_5_VLProcessor)(pictures, encode, None, chat_template=template)


def picture(seed: int) -> Image.Image:
    """8 by 8 pixels, or 4 by 8: 4 tokens or 2."""
    shape = (8 if seed % 2 else 4, 8, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8))


def model(name: str, dtype: torch.dtype, seed: int = 0) -> Any:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    names = names[: 1 if name in SPECIAL else None]
    found = images.image_model(name, dtype, seed, tokens=dict(zip(names, range(PAD, PAD + 4))))
    found.generation_config.pad_token_id, found.generation_config.eos_token_id = 0, 1
    return found


def questions(rows: int, name: str = "Qwen3-VL", *, answers: bool = True) -> list[dict[str, Any]]:
    """Four answers to each of a few questions; about one image, two, one twice, or none."""
    kinds, place = [[1], [2, 3], [4, 4], []], PLACES.get(name, PLACE)
    found = []
    for k in range(rows):
        about = kinds[k // 4 % 4]
        one = {"images": [picture(seed) for seed in about], "prompt": " ".join([place] * len(about)) + " "}
        one["prompt"] += runs.words(("task", k // 4), 4, 8)
        if answers:
            one["completion"] = " " + runs.words(("answer", k), 3, 6)
        found.append(one)
    return found


def sft(name: str, settings: dict[str, Any], dtype: torch.dtype, lora: bool) -> Trainer:
    return SFTTrainer(
        model(name, dtype),
        SFTConfig(**{"max_length": None, **settings}),
        train_dataset=Dataset.from_list(questions(32, name)),
        processing_class=processor(name),
        peft_config=adapter() if lora else None,
    )


def dpo(name: str, settings: dict[str, Any], dtype: torch.dtype, lora: bool) -> Trainer:
    pairs = [
        {"images": row["images"], "prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(questions(32, name), questions(64, name)[32:])
    ]
    return DPOTrainer(
        model(name, dtype),
        ref_model=None if lora else model(name, dtype, seed=1),
        args=DPOConfig(**{"beta": 0.5, "max_length": None, **settings}),
        train_dataset=Dataset.from_list(pairs),
        processing_class=processor(name),
        peft_config=adapter() if lora else None,
    )


def grpo(name: str, settings: dict[str, Any], dtype: torch.dtype, lora: bool) -> Trainer:
    asked = []
    for row in questions(32, name, answers=False)[::4]:
        if not row["images"]:
            continue  # TRL's own processing needs an image for every prompt, or for none
        words = row["prompt"].replace(PLACES.get(name, PLACE), "").strip()
        asked.append({"images": row["images"], "prompt": [{"role": "user", "content": words}]})
    never = {"suppress_tokens": list(range(PAD, 64))}  # a sampled placeholder would have no image
    own = {"num_generations": 4, "max_completion_length": 6, "temperature": 0.8, "beta": 0.1 if lora else 0.0}
    own |= {"generation_kwargs": never}
    return GRPOTrainer(
        model(name, dtype),
        reward_funcs=lambda completions, **_: runs.word_reward([each[0]["content"] for each in completions]),
        args=GRPOConfig(**{**own, **settings}),
        train_dataset=Dataset.from_list(asked),
        processing_class=processor(name, "left"),
        peft_config=adapter() if lora else None,
    )


def collate(rows: list[dict[str, Any]], name: str = "Qwen3-VL") -> dict[str, Any]:
    pictures = [row["images"] for row in rows]
    texts = [row["prompt"] + row["completion"] for row in rows]
    batch = processor(name)(
        images=pictures if any(pictures) else None, text=texts, padding=True, padding_side="right", return_tensors="pt"
    )
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return dict(batch)


def plain(name: str, settings: dict[str, Any], dtype: torch.dtype, lora: bool) -> Trainer:
    plain_model = model(name, dtype)
    return Trainer(
        get_peft_model(plain_model, adapter()) if lora else plain_model,
        TrainingArguments(**settings, remove_unused_columns=False),
        train_dataset=questions(32, name),
        data_collator=functools.partial(collate, name=name),
    )


def build_images(settings: dict[str, Any], dtype: torch.dtype, _folder: Any, *, lora: bool = False) -> Trainer:
    """A Trainer of Qwen3-VL whose rows have images; in order, every batch of eight has some.

    Plain FSDP2 and DeepSpeed fail where the rows of one rank have none: it reduces gradients that the other one lacks.
    """
    trainer = plain("Qwen3-VL", settings, dtype, lora)
    trainer.eval_dataset = trainer.train_dataset[:8]
    return trainer


@pytest.mark.parametrize("name", ["Qwen3-VL", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
@pytest.mark.parametrize(
    "build, lora",
    [
        (sft, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((plain, False), (dpo, True), (grpo, True))),
    ],
)
def test_trainers_give_what_they_give_by_themselves(build, lora, name, tmp_path):
    def make(settings: dict[str, Any], dtype: torch.dtype, folder: Any) -> Trainer:
        return build(name, settings, dtype, lora)

    options: dict[str, Any] = {"steps": 2, "gradient_accumulation_steps": 2}
    one, other = (train(make, tmp_path / str(shared), shared=shared, **options) for shared in (True, False))
    found = difference(one, other)
    assert found.updates < 1e-3, found
    # With a new adapter all of DPO's rewards are 0, so rounding decides its accuracy.
    assert found.metrics < 1e-4 or (build is dpo and found.worst.startswith("rewards/accuracies")), found


def settings(folder: Any, **more: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "use_cpu": True, "report_to": [], "per_device_train_batch_size": 8} | more


@pytest.mark.slow
def test_a_step_encodes_each_distinct_image_once(tmp_path):
    patches: list[int] = []
    trainer = tt.share_prefixes(plain("Qwen3-VL", settings(tmp_path), torch.float32, False), check=False)
    hook = trainer.model.model.visual.blocks[0].register_forward_hook(lambda _m, args, _o: patches.append(len(args[0])))
    batch = collate([*questions(8)[:4], *questions(12)[8:]])  # four rows on one image, four on one image twice
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, batch, 100)
    hook.remove()
    assert len(batch["pixel_values"]) == 4 * 16 + 4 * 2 * 8
    assert patches == [16 + 8]


def test_token_logprobs_of_a_batch_with_images_are_the_plain_models(tmp_path):
    batch = collate(questions(16))
    lm = model("Qwen3-VL", torch.float32)
    trainer = plain("Qwen3-VL", settings(tmp_path), torch.float32, False)
    with torch.no_grad():
        logits = lm(**{name: x for name, x in batch.items() if name != "labels"}).logits[:, :-1].log_softmax(-1)
        labels = batch["labels"][:, 1:]
        wanted = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0.0)
        torch.testing.assert_close(tt.token_logprobs(lm, batch), wanted, rtol=1e-4, atol=1e-4)
        tt.share_prefixes(trainer)
        torch.testing.assert_close(tt.token_logprobs(trainer.model, batch), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_tree_trainer_trains_rows_with_images_as_row_by_row(tmp_path):
    made = []
    for execution in ("tree", "linear"):
        rows = [images.row(3, 4, images.image(k // 4), 5, 6 + k) for k in range(8)]
        arguments = make_arguments(tmp_path / execution, execution=execution, max_steps=2)
        made.append(TreeTrainer(images.image_model("Qwen3-VL", torch.float32), arguments, rows))
        made[-1].train()
    ours, theirs = (dict(trainer.model.named_parameters()) for trainer in made)
    assert max(float((ours[name] - theirs[name]).detach().abs().max()) for name in theirs) < 1e-4


BY_TOKEN = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")


def changed(rows: slice = slice(None), columns: slice = slice(None), **entries: Any) -> dict[str, Any]:
    """A batch with some of its rows, their columns cut, and other entries; None leaves one out."""
    batch = collate(questions(8)) | entries
    batch = {name: x for name, x in batch.items() if x is not None}
    return batch | {name: batch[name][rows, columns] for name in BY_TOKEN if name in batch}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no types": ({"mm_token_type_ids": None}, "pixel_values, image_grid_thw and no mm_token_type_ids"),
    "types of other tokens": (
        {"mm_token_type_ids": collate(questions(8))["mm_token_type_ids"].flip(1)},
        "The types must be padded",
    ),
    "no grid": ({"image_grid_thw": None}, "there are 160 images and 12 runs"),
    "images of other rows": ({"rows": slice(4)}, "A row that is cut"),
    "videos": ({"pixel_values_videos": torch.ones(2)}, "pixel_values_videos.*no videos"),
    "cut images": ({"columns": slice(4)}, "A row that is cut|features, but 2 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_batches_whose_images_do_not_fit_are_refused_before_any_work(case, tmp_path, monkeypatch):
    entries, message = REFUSED[case]
    trainer = tt.share_prefixes(plain("Qwen3-VL", settings(tmp_path), torch.float32, False), check=False)
    monkeypatch.setattr(type(trainer.model), "forward", None)
    with pytest.raises(ValueError, match=message):
        trainer.training_step(trainer.model, changed(**entries), 100)
