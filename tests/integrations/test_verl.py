"""verl's own engine and losses on its own batches, against the same with `VERL_ENGINE_VENDOR=treetrain`, on CPUs."""

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.framework_runs import PROMPTS, RESPONSES, image_prompts, on_fresh_ranks, saved_model

pytest.importorskip("verl", reason="verl is not installed; it needs an environment of its own: make test-verl")

LAYERS, CHOSEN = 3, 2
"""Layers of the model with experts, the second of which has none; experts that each token chooses, out of six."""
LOSSES = {
    "ppo": {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "calculate_entropy": True},
    "gspo": {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": "gspo"},
    "sft": {},
    "distillation": {},
    "distillation and rewards": {"calculate_entropy": True, "entropy_coeff": 0.1},
}
TEACHERS_IDS, VOCABULARY = 3, 40
OVERLAP = {"distillation/overlap_ratio", "distillation/overlap_token_advantage"}
"""Metrics that verl's engine makes of the student's own best ids, which a tree is not asked for."""


def configurations(folder: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """verl's own configurations of a model, its engine, optimizer and checkpoints."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), options.pop("dtype", "fp32"))
    attention = {"attn_implementation": "sdpa"}  # verl asks for flash_attention_2 otherwise
    if options.pop("replay", False):
        options["router_replay"] = EngineRouterReplayConfig(mode="R3")
    model = HFModelConfig(path=folder, load_tokenizer=False, override_config=attention, **options.pop("model", {}))
    config = FSDPEngineConfig(**{"strategy": "fsdp2", "mixed_precision": dtypes, "use_torch_compile": False} | options)
    # The constant schedule divides by the warm-up steps it is given.
    optimizer = FSDPOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=9)
    return model, config, optimizer, CheckpointConfig()


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, causal: bool, **_: Any
) -> torch.Tensor:
    """flash_attn's function for rows one after another, [N, heads, dim], on a CPU."""
    from torch.nn.functional import scaled_dot_product_attention as attend

    rows = zip(*(x.transpose(0, 1).split(cu_seqlens_q.diff().tolist(), dim=1) for x in (q, k, v)))
    return torch.cat([attend(*row, is_causal=causal) for row in rows], dim=1).transpose(0, 1)


def make_engine(vendor: str, folder: str, **options: Any) -> Any:
    """An engine of verl in training mode, made as its workers make it."""
    from verl.models.transformers import qwen2_vl
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    for name in ("_flash_supports_window_size", "_flash_supports_deterministic", "_flash_use_top_left_mask"):
        setattr(qwen2_vl, name, False)  # verl sets them where flash_attn is installed
    qwen2_vl.flash_attn_varlen_func = varlen_attention
    qwen2_vl.fa_peft_integration_check = lambda *states, **_: states  # it casts to bfloat16
    settings = configurations(folder, **options)
    if vendor:
        os.environ["VERL_ENGINE_VENDOR"] = vendor
        kind = EngineRegistry.get_engine_cls("language_model", settings[1].strategy)
    else:
        kind = FSDPEngineWithLMHead
    torch.manual_seed(0)  # adapters start at random
    engine = kind(*settings)
    engine.initialize()
    return engine


def recorded_experts() -> torch.Tensor:
    """Experts as a rollout of verl records them, int16 [K, width, layers, k] for left-padded rows.

    Rows agree where they share a prefix, but for the last one. As in verl, entries that were not recorded are 0: those
    of the last token of a row, and of the dense layer.
    """
    width, length = max(map(len, PROMPTS)), max(map(len, RESPONSES))
    experts = torch.zeros(len(PROMPTS), width + length, LAYERS, CHOSEN, dtype=torch.int16)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        ids = [*prompt, *response]
        for at in range(len(ids) - 1):
            draw = torch.Generator().manual_seed(hash((*ids[: at + 1], row == len(PROMPTS) - 1)) % 2**31)
            for layer in (0, 2):
                chosen = torch.randperm(6, generator=draw)[:CHOSEN]
                experts[row, width - len(prompt) + at, layer] = chosen.to(torch.int16)
    return experts


def replay_in_verls_engine(engine: Any) -> None:
    """Make the routers of verl's own engine, which has no replay, use what was recorded, token by token."""
    prepare, recorded = engine.prepare_model_inputs, []

    def prepared(micro_batch: Any) -> Any:
        recorded[:] = [micro_batch["routed_experts"].values().long()]
        return prepare(micro_batch)

    def replayed(gate: Any, layer: int) -> Any:
        forward = gate.forward

        def route(hidden: torch.Tensor) -> Any:
            logits, _, own = forward(hidden)
            target = recorded[0][:, layer]
            chosen = torch.where((target[:, :1] == target[:, 1:]), own, target)
            weights = logits.softmax(-1).gather(-1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return route

    engine.prepare_model_inputs = prepared
    for number, layer in enumerate(engine.module.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.forward = replayed(layer.mlp.gate, number)


def positions_of_images(folder: str, ids: list[int], images: dict[str, Any]) -> torch.Tensor:
    """Positions [4, L] as verl's agent loops compute them: the place in the row, and those of the processor."""
    from support.images import IMAGE

    ids, places = torch.tensor(ids)[None], torch.arange(len(ids))
    if not images:
        return places.expand(4, -1)
    types, grid = (ids == IMAGE).long(), images["image_grid_thw"]
    positions, _ = model_of(folder).model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
    return torch.cat([places[None], positions[:, 0]])


@functools.cache
def model_of(folder: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder)


def make_batch(
    rank: int, loss: str, *, experts: bool = False, images: str = "", filled: bool = False, **settings: Any
) -> Any:
    """A batch as verl's workers hand it to their engine: padded rows, made jagged by verl.

    Args:
        filled: its last row has the teacher and the mask of those by which verl's v1 trainers fill up a batch that is
            not divisible by the number of processes.
        images: the folder of a model for images, whose rows have images.
    """
    from tensordict import NonTensorStack, TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    rows = slice(None) if rank == 0 else slice(1, 4)
    prompts, responses = PROMPTS[rows], RESPONSES[rows]
    pictures: tuple[dict[str, Any], ...] = ()
    if images:
        prompts, pictures = zip(*image_prompts()[rows])  # type: ignore[assignment]
        pictures = tuple({name: torch.from_numpy(x) for name, x in own.items()} for own in pictures)
    width, length = max(map(len, prompts)), max(map(len, responses))
    total = width + length
    ids, mask = torch.zeros(len(prompts), total, dtype=torch.long), torch.zeros(len(prompts), total, dtype=torch.long)
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        span = slice(width - len(prompt), width + len(response))
        ids[row, span], mask[row, span] = torch.tensor([*prompt, *response]), 1
    draw = torch.Generator().manual_seed(rank)
    response_mask = mask[:, width:].clone()
    response_mask[0, 1] = 0  # the output of a tool
    facts = {
        name: torch.randn(len(prompts), length, generator=draw) * scale
        for name, scale in {"advantages": 1.0, "old_log_probs": 0.1, "ref_log_prob": 0.1}.items()
    }
    batch = TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "prompts": ids[:, :width],
            "responses": ids[:, width:],
            "response_mask": response_mask,
            **facts,
            **{name: facts[name] - 3.5 for name in ("old_log_probs", "ref_log_prob")},
        },
        batch_size=len(prompts),
    )
    if images:
        positions = torch.zeros(len(prompts), 4, total, dtype=torch.long)
        for row, (prompt, response, own) in enumerate(zip(prompts, responses, pictures)):
            places = positions_of_images(images, [*prompt, *response], own)
            positions[row, :, width - len(prompt) : width + len(response)] = places
            if own:
                own["images_seqlens"] = own["image_grid_thw"][:, 1] * own["image_grid_thw"][:, 2]
        batch["position_ids"] = positions
        batch["multi_modal_inputs"] = NonTensorStack(*pictures)
    if experts:
        batch["routed_experts"] = recorded_experts()[rows]
    if loss.startswith("distillation"):
        logits = torch.randn(len(prompts), total, VOCABULARY, generator=draw)
        logits[mask.bool()] = torch.randn(VOCABULARY, VOCABULARY, generator=draw)[ids[mask.bool()]]  # by the last token
        batch["teacher_logprobs"], batch["teacher_ids"] = logits.log_softmax(-1).topk(TEACHERS_IDS)
        settings = {"distillation_use_topk": True, "distillation_only": loss == "distillation", **settings}
    if filled and loss.startswith("distillation"):
        from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

        names = ("teacher_ids", "teacher_logprobs")
        filler, _ = construct_minimal_padding_template({name: batch[name][-1] for name in names}, {}, eos_token_id=1)
        for name in names:
            batch[name][-1] = filler[name][:total]
        batch["response_mask"][-1] = 0
    batch = left_right_2_no_padding(batch)
    if loss == "sft":
        whole = torch.nested.as_nested_tensor(
            [torch.cat([torch.zeros(len(p)), torch.ones(len(r))]) for p, r in zip(prompts, responses)],
            layout=torch.jagged,
        )
        batch["loss_mask"] = whole
        for name in ("prompts", "responses"):
            del batch[name]
    options = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 4096, "temperature": 1.0, "global_batch_size": 9}
    entropy = "calculate_entropy" in LOSSES[loss]
    options |= {"calculate_entropy": entropy, "use_remove_padding": True, **settings}
    tu.assign_non_tensor(batch, **options)
    return batch


def make_loss(name: str) -> Any:
    """One of verl's losses with one of its own configurations."""
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils import losses

    if name == "sft":
        return functools.partial(losses.sft_loss, config=None)
    options = dict(LOSSES[name])
    options["policy_loss"] = PolicyLossConfig(loss_mode=options.get("policy_loss", "vanilla"))
    required = {"strategy": "fsdp2", "rollout_n": 1, "use_dynamic_bsz": True, "ppo_micro_batch_size_per_gpu": 1}
    if name.startswith("distillation"):
        from verl.trainer.distillation import distillation_ppo_loss
        from verl.workers.config import DistillationLossConfig

        rewards = name != "distillation"
        own = {"loss_mode": "forward_kl_topk", "topk": TEACHERS_IDS, "log_prob_min_clamp": -4.0 if rewards else None}
        own |= {"use_task_rewards": rewards, "use_policy_gradient": False, "distillation_loss_coef": 0.7}
        config = SimpleNamespace(distillation_loss=DistillationLossConfig(**own))
        actor = ActorConfig(**required, **options)
        return functools.partial(distillation_ppo_loss, config=actor, distillation_config=config)
    return functools.partial(losses.ppo_loss, config=ActorConfig(**required, **options))


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """verl's metrics as plain numbers."""
    plain = {}
    for name, value in metrics.items():
        first = value[0] if isinstance(value, list) else value
        plain[name] = torch.as_tensor(getattr(first, "values", first), dtype=torch.float64).flatten()
    return plain


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """A parameter's gradient, gathered from its shards."""
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def difference(one: Any, other: Any) -> float:
    """The largest difference relative to the largest entry."""
    one, other = one.double(), other.double()
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)) if one.numel() else 0.0


def started(rank: int, world: int, port: int) -> None:
    """Make this process a rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)


def compare(
    rank: int, world: int, port: int, folder: str, loss: str, settings: dict, options: dict, queue: Any
) -> None:
    """Run both engines on a rank and put the differences into a queue.

    Where the tree's engine divides tokens over a group, the ranks of the group have the same rows in verl's engine,
    which needs a GPU to divide them: the mean over ranks is the same.
    """
    started(rank, world, port)
    shared = options.pop("shared", 1)
    plain = make_engine("", folder, **options)
    tree = make_engine("treetrain", folder, **options, ulysses_sequence_parallel_size=shared)
    assert type(tree).__name__ == "TreeFSDPEngine"
    if settings.get("experts"):
        replay_in_verls_engine(plain)
    rank //= shared
    with sys.modules["treetrain.integrations.verl"].own_forwards():
        assert tree._tree_engine(make_batch(rank, loss, **settings)).sharing.divides_parts == shared
    found: dict[str, float] = {}
    own = {"max_token_len_per_gpu": 4096, "use_dynamic_bsz": True} | settings.pop("own", {})
    scores = []
    for engine, over in ((plain, own), (tree, {})):
        with engine.eval_mode():
            scored = "ppo" if loss.startswith("distillation") else loss
            batch = make_batch(rank, scored, **settings | over | {"calculate_entropy": True})
            scores.append(engine.infer_batch(batch)["model_output"])
    shape = make_batch(rank, "ppo", images=settings.get("images", ""))
    read = torch.cat(
        [
            (torch.arange(1, n + 1) >= n - len(r)) & (torch.arange(1, n + 1) < n)
            for n, r in zip(shape["input_ids"].offsets().diff().tolist(), RESPONSES if rank == 0 else RESPONSES[1:4])
        ]
    )
    for name, value in scores[0].items():
        found[name] = difference(scores[1][name].values()[read], value.values()[read])
    results = []
    for step in range(3):
        for engine, over in ((plain, own), (tree, {})):
            with engine.train_mode():
                batch = make_batch(rank, loss, **settings | over)
                results.append(engine.train_batch(batch, loss_function=make_loss(loss)))
        one, two = results[-1], results[-2]
        found[f"loss {step}"] = difference(torch.tensor(one["loss"]), torch.tensor(two["loss"]))
        assert one["metrics"].pop("tree/overlap")[0] > (0.05 if settings.get("images") else 0.3)
        others = numbers(two["metrics"])
        for name, value in numbers(one["metrics"]).items():
            found[f"{name} {step}"] = difference(value, others[name])
        # In a context group, the first rank alone reports the gradients' norm.
        assert {name for name in others if name not in one["metrics"]} <= OVERLAP | (
            {"grad_norm"} if shared > 1 else set()
        )
    for engine in (plain, tree):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            over = own if engine is plain else {}
            engine.forward_backward_batch(make_batch(rank, loss, **settings | over), make_loss(loss))
            results.append({n: whole(p.grad) for n, p in engine.module.named_parameters() if p.requires_grad})
    if settings.get("images"):  # verl's engine runs verl's forwards, before and after
        assert any(type(module).forward.__module__.startswith("verl.") for module in plain.module.modules())
    one, two = results[-1], results[-2]
    scale = max(float(g.abs().max()) for g in two.values())
    found["gradients"] = max(float((one[n] - two[n]).abs().max()) for n in two) / scale
    queue.put(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model as verl loads it."""
    return saved_model(str(tmp_path_factory.mktemp("verl") / "model"))


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with experts in two of its three layers."""
    experts = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    path = str(tmp_path_factory.mktemp("verl") / "moe")
    return saved_model(path, "Qwen3Moe", num_hidden_layers=LAYERS, mlp_only_layers=[1], **experts)


def largest(of_ranks: list[dict[str, float]]) -> dict[str, float]:
    """The largest difference of each kind. In a context group, the first rank alone reports the gradients' norm."""
    names = {name for told in of_ranks for name in told}
    return {name: max(told.get(name, 0.0) for told in of_ranks) for name in sorted(names)}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that a user sets, and verl's platform for CPUs."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "support.verl_cpu,treetrain.integrations.verl")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    importlib.import_module("support.verl_cpu")  # verl was imported before the variables were set


@pytest.mark.parametrize(
    ("world", "loss", "settings", "options"),
    [
        (1, "ppo", {}, {}),
        (2, "ppo", {"max_token_len_per_gpu": 8, "temperature": 0.7}, {}),
        (2, "gspo", {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}, {}),
        (2, "sft", {"calculate_sum_pi_squared": True}, {}),
        (1, "ppo", {}, {"model": {"lora_rank": 4, "lora_alpha": 8}}),
        (4, "ppo", {"max_token_len_per_gpu": 5, "temperature": 0.7}, {"shared": 2}),
        (2, "ppo", {}, {"offload_policy": True}),
        (2, "sft", {}, {"param_offload": True, "optimizer_offload": True}),
        (1, "distillation", {"temperature": 0.7}, {}),
        (2, "distillation", {"filled": True}, {}),
        (2, "distillation and rewards", {"max_token_len_per_gpu": 8}, {}),
        (2, "distillation and rewards", {"max_token_len_per_gpu": 8}, {"shared": 2}),
    ],
    ids=[
        "ppo",
        "ppo-2-ranks-recomputed",
        "gspo-2-ranks",
        "sft-2-ranks",
        "ppo-lora",
        "ppo-ulysses-of-2",
        "ppo-offload-policy",
        "sft-offload",
        "distillation",
        "distillation-2-ranks-filled-up",
        "distillation-and-rewards-2-ranks-recomputed",
        "distillation-and-rewards-ulysses-of-2",
    ],
)
def test_log_probabilities_losses_metrics_weights_and_gradients_are_verls(
    folder: str, world: int, loss: str, settings: dict, options: dict
) -> None:
    of_ranks = on_fresh_ranks(compare, world, folder, loss, settings, options)
    found = largest(of_ranks)
    assert {"log_probs", "gradients", "loss 2"} <= set(found)
    wrong = {name: value for name, value in found.items() if not value <= 2e-5}
    assert not wrong, found


@pytest.mark.parametrize(
    ("world", "loss", "settings", "shared"),
    [(1, "sft", {}, 1), (2, "ppo", {"max_token_len_per_gpu": 8}, 2)],
    ids=["sft", "ppo-ulysses-of-2-recomputed"],
)
def test_recorded_experts_replace_the_choices_of_routers(
    moe_folder: str, world: int, loss: str, settings: dict, shared: int
) -> None:
    options = {"replay": True, "shared": shared}
    of_ranks = on_fresh_ranks(compare, world, moe_folder, loss, settings | {"experts": True}, options)
    found = largest(of_ranks)
    wrong = {name: value for name, value in found.items() if not value <= 2e-5}
    assert not wrong, found


@pytest.mark.parametrize(
    ("family", "world", "loss", "settings", "options"),
    [
        ("Qwen3-VL", 1, "sft", {}, {}),
        ("Qwen3-VL", 2, "ppo", {"max_token_len_per_gpu": 8, "temperature": 0.7}, {}),
        ("Qwen3-VL", 2, "ppo", {}, {"model": {"lora_rank": 4, "lora_alpha": 8}}),
        ("Qwen2.5-VL", 2, "ppo", {}, {}),
        ("Qwen3-VL", 2, "ppo", {"max_token_len_per_gpu": 8}, {"shared": 2}),
        # Without a GPU's kernels, recurrent layers would continue from the row before in verl's packed rows.
        ("Qwen3.5", 1, "ppo", {"own": {"use_remove_padding": False}}, {}),
    ],
    ids=[
        "sft",
        "ppo-2-ranks-recomputed",
        "ppo-2-ranks-lora",
        "ppo-2-ranks-patched-attention",
        "ppo-ulysses-of-2",
        "recurrent",
    ],
)
def test_rows_with_images_are_verls(
    tmp_path: Path, family: str, world: int, loss: str, settings: dict, options: dict
) -> None:
    from support.images import image_model

    image_model(family, torch.float32).save_pretrained(tmp_path)
    of_ranks = on_fresh_ranks(compare, world, str(tmp_path), loss, settings | {"images": str(tmp_path)}, options)
    found = largest(of_ranks)
    # Gradients of the recurrent layers are equal to 6e-6, and Adam makes whole steps of the smallest.
    wrong = {name: value for name, value in found.items() if not value <= (1e-4 if family == "Qwen3.5" else 2e-5)}
    assert not wrong, found


def test_images_and_positions_that_are_not_the_models_are_refused(folder: str, tmp_path: Path) -> None:
    from tensordict import NonTensorStack

    from support.images import IMAGE, image, image_model
    from treetrain import TreeEngine
    from treetrain.core.errors import DataError, UnsupportedModel
    from treetrain.integrations.verl import check_positions, rows_of

    model = image_model("Qwen3-VL", torch.float32)
    model.save_pretrained(tmp_path)

    def score(on: Any = model, inputs: dict[str, Any] | None = None, row: int = 0, **changes: Any) -> None:
        batch = make_batch(0, "ppo", images=str(tmp_path))
        given = list(batch["multi_modal_inputs"])
        if inputs is not None:
            given[row] = {name: None if x is None else torch.from_numpy(x) for name, x in inputs.items()}
        batch["multi_modal_inputs"] = NonTensorStack(*given)
        for name, change in changes.items():
            change(batch[name].values())
        rows = rows_of(batch, on, replays=False)
        TreeEngine(on).score(rows)
        check_positions(on, rows, batch["position_ids"])

    whole, tall = image(1).inputs, image(1, 2, 4).inputs
    videos = {"pixel_values_videos": whole["pixel_values"], "video_grid_thw": whole["image_grid_thw"]}
    score()
    score(inputs={"pixel_values_videos": None, "video_grid_thw": None}, row=3)  # as verl gives them for text
    with pytest.raises(DataError, match="images have pixel_values_videos: rows with videos"):
        score(inputs=videos)
    with pytest.raises(DataError, match=r"image_grid_thw \[1, 4, 8\] has 8 features, but 4"):
        score(inputs=tall)
    with pytest.raises(DataError, match=rf"row 0.* has the token {IMAGE}, which stands for images in other rows"):
        score(inputs={})
    counted = r"row 0 of verl's batch has position_ids \[5, 3, 3, 3\] at token 6; the model counts \[6, 4, 4, 4\]"
    with pytest.raises(DataError, match=counted):
        score(position_ids=lambda places: places[:, 6].sub_(1))
    with pytest.raises(UnsupportedModel, match="images are given for Qwen3ForCausalLM, which reads text"):
        from transformers import AutoModelForCausalLM

        score(AutoModelForCausalLM.from_pretrained(folder))


def test_a_rank_whose_images_are_refused_ends_the_others_too(tmp_path: Path) -> None:
    from support.images import image_model

    image_model("Qwen3-VL", torch.float32).save_pretrained(tmp_path)
    for change, error in (("positions", "position_ids"), ("images", "for images in other rows")):
        first, second = on_fresh_ranks(refused_on_one_rank, 2, str(tmp_path), change)
        told = {own["rank"]: own["error"] for own in (first, second)}
        assert error in told[1] and "rank 1" in told[0], told


def refused_on_one_rank(rank: int, world: int, port: int, folder: str, change: str, queue: Any) -> None:
    """A mini-batch whose rows the second rank refuses, and then one without a fault."""
    from tensordict import NonTensorStack

    from treetrain.core.errors import DataError, RanksDisagree

    started(rank, world, port)
    engine = make_engine("treetrain", folder)
    patched = {kind: kind.forward for kind in map(type, engine.module.modules())}
    with engine.train_mode():
        engine.optimizer_zero_grad()
        batch = make_batch(rank, "ppo", images=folder)
        if rank == 1 and change == "positions":
            batch["position_ids"].values()[:, 3] += 1
        elif rank == 1:
            batch["multi_modal_inputs"] = NonTensorStack({}, *list(batch["multi_modal_inputs"])[1:])
        with pytest.raises(DataError if rank == 1 else RanksDisagree) as refused:
            engine.forward_backward_batch(batch, make_loss("ppo"))
        assert all(kind.forward is forward for kind, forward in patched.items())
        assert any(forward.__module__.startswith("verl.") for forward in patched.values())
        engine.optimizer_zero_grad()
        assert engine.forward_backward_batch(make_batch(rank, "ppo", images=folder), make_loss("ppo"))
    queue.put({"rank": rank, "error": str(refused.value)})


def test_models_whose_forward_verl_replaced_too_early_are_refused(tmp_path: Path) -> None:
    from support.images import image_model

    image_model("Qwen3-VL", torch.float32).save_pretrained(tmp_path)
    on_fresh_ranks(patched_early, 1, str(tmp_path))


def patched_early(rank: int, world: int, port: int, folder: str, queue: Any) -> None:
    """verl patches the model's classes by its own function, and then makes a tree's engine."""
    from verl.models.transformers import monkey_patch

    from treetrain.core.errors import UnsupportedModel

    started(rank, world, port)
    monkey_patch.apply_monkey_patch(model_of(folder))
    with pytest.raises(UnsupportedModel, match=r"verl replaced Qwen3VL\w+.forward before treetrain kept"):
        make_engine("treetrain", folder)
    queue.put({})


def bfloat16_errors(rank: int, world: int, port: int, folder: str, queue: Any) -> None:
    """How far bfloat16 is from verl's engine in float32: verl's own engine and treetrain's."""
    started(rank, world, port)
    found = []
    for vendor, dtype in (("", "fp32"), ("", "bf16"), ("treetrain", "bf16")):
        engine = make_engine(vendor, folder, dtype=dtype)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(make_batch(0, "ppo"), make_loss("ppo"))
            gradients = [whole(p.grad).flatten().double() for p in engine.module.parameters()]
        with engine.eval_mode():
            scores = engine.infer_batch(make_batch(0, "ppo"))["model_output"]["log_probs"].values().double()
        found.append((torch.cat(gradients), scores))
    read = found[2][1] != 0
    errors = {}
    for name, (truth, own, tree) in zip(("gradients", "log_probs"), zip(*found)):
        if name == "log_probs":
            truth, own, tree = truth[read], own[read], tree[read]
        errors[name] = float((own - truth).norm()), float((tree - truth).norm())
    queue.put(errors)


def steps_of_one(rank: int, world: int, port: int, folder: str, queue: Any) -> None:
    """Log-probabilities, and losses and gradient norms of two steps, of verl's own engine in one process."""
    started(rank, world, port)
    engine, found = make_engine("", folder), {}
    with engine.eval_mode():
        found["log_probs"] = engine.infer_batch(make_batch(0, "ppo"))["model_output"]["log_probs"].values().numpy()
    for name in ("loss", "grad_norm"):
        found[name] = []
    for _ in range(2):
        with engine.train_mode():
            told = engine.train_batch(make_batch(0, "ppo"), loss_function=make_loss("ppo"))
        found["loss"].append(sum(told["loss"]) if isinstance(told["loss"], list) else told["loss"])
        found["grad_norm"].append(float(told["metrics"]["grad_norm"]))
    queue.put(found)


def test_bfloat16_errs_no_more_than_in_verls_engine(folder: str) -> None:
    (errors,) = on_fresh_ranks(bfloat16_errors, 1, folder)
    for name, (own, tree) in errors.items():
        assert 0 < tree <= 1.5 * own, (name, errors)


def test_verls_ray_workers_give_the_numbers_of_verls_engine_in_one_process(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn", reason="verl's workers import it")
    import ray
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import TrainingWorkerConfig

    from support.verl_cpu import ray_workers

    (plain,) = on_fresh_ranks(steps_of_one, 1, folder)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    names = "model_config", "engine_config", "optimizer_config", "checkpoint_config"
    config = TrainingWorkerConfig(model_type="language_model", **dict(zip(names, configurations(folder))))
    here = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    variables = {name: os.environ[name] for name in ("VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM")}
    variables |= {"VERL_ENGINE_VENDOR": "treetrain", "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    try:
        workers = ray_workers(2, config, variables)
        workers.reset()
        workers.set_loss_fn(make_loss("ppo"))
        scored = workers.infer_batch(make_batch(0, "ppo", compute_loss=False)).get()["log_probs"].values()
        read = scored != 0  # of the responses
        assert difference(scored[read], torch.from_numpy(plain["log_probs"])[read]) <= 2e-5
        for step in range(2):
            told = tu.get(workers.train_batch(make_batch(0, "ppo")).get(), "metrics")
            for name in ("loss", "grad_norm"):
                assert told[name] == pytest.approx(plain[name][step], rel=2e-5), (name, step, told)
    finally:
        ray.shutdown()


def test_rows_of_a_prompt_meet_in_one_process_of_verls_v1_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = pytest.importorskip("transfer_queue", reason="verl's v1 trainer imports it")
    for module in os.environ["VERL_USE_EXTERNAL_MODULES"].split(","):
        importlib.import_module(module)
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def balanced(vendor: str) -> tuple[list[str], dict[str, float]]:
        monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
        keys = [f"prompt{n % 4}_{n // 8}_{n // 4 % 2}" for n in range(32)]
        tags = [{"seq_len": 8 + 13 * n % 7, "is_padding": False} for n in range(32)]
        trainer = SimpleNamespace(
            actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 1]}),
            tokenizer=SimpleNamespace(eos_token_id=1),
            _get_required_batch_multiple=lambda dp_size: 8,
        )
        metrics: dict[str, float] = {}
        batch = queue.KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        batch = PPOTrainer._balance_batch(trainer, batch, metrics)
        lengths = {key: tag["seq_len"] for key, tag in zip(keys, tags)}
        assert [lengths[key] for key in batch.keys] == [tag["seq_len"] for tag in batch.tags]
        sums = [sum(tag["seq_len"] for tag in part) for part in (batch.tags[:16], batch.tags[16:])]
        assert vendor != "treetrain" or metrics["global_seqlen/balanced_max"] == max(sums)
        return [{key.split("_")[0] for key in part} for part in (batch.keys[:16], batch.keys[16:])], metrics

    assert balanced("treetrain")[0] == [{"prompt0", "prompt1"}, {"prompt2", "prompt3"}]
    assert all(len(prompts) > 2 for prompts in balanced("")[0])


def trajectories() -> tuple[list[str], Any, list[list[int]]]:
    """Keys and jagged fields of agents of two and three trajectories that train turns again, and the ids of each."""
    from tensordict import TensorDict

    ids = [[1, 2, 7, 8, 3, 9], [1, 2, 7, 8], [1, 2, 7, 8, 4, 5], [1, 2, 7, 9], [1, 2, 7, 8, 3, 9]]
    keys = ["p_0_10", "p_0_9", "p_0_11", "p_1_0", "p_1_1"]  # the tenth trajectory comes after the ninth
    masks = [[1, 1, 0, 1], [1, 1], [1, 1, 0, 1], [1, 1], [1, 1, 0, 1]]
    draw = torch.Generator().manual_seed(0)
    known: dict[tuple[int, ...], float] = {}
    old = [
        [known.setdefault(tuple(row[: at + 1]), -torch.rand((), generator=draw).item()) for at in range(2, len(row))]
        for row in ids
    ]
    old[2][0] += 1e-3

    def jagged(rows: list[list[Any]], dtype: torch.dtype = torch.float64) -> Any:
        return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)

    advantages = [[0.5 if key.startswith("p_0") else -1.5] * len(mask) for key, mask in zip(keys, masks)]
    fields = {
        "input_ids": jagged(ids, torch.int64),
        "response_mask": jagged(masks, torch.int64),
        "loss_mask": jagged(masks, torch.int64),
        "advantages": jagged(advantages),
        "old_log_probs": jagged(old),
    }
    return keys, TensorDict(fields, batch_size=len(ids)), ids


def test_each_sampled_token_counts_in_the_first_trajectory_of_its_agent_loop() -> None:
    """verl's own loss on the masks is the mean over tokens that are different, written out with a set."""
    from verl.trainer.ppo.core_algos import agg_loss

    from treetrain.core.errors import DataError
    from treetrain.integrations.verl import once_masks

    keys, data, ids = trajectories()
    masks, metrics = once_masks(keys, data)
    seen, terms = set(), []
    for k in (1, 0, 2, 3, 4):
        for at, (trained, advantage, old) in enumerate(
            zip(*(data[name][k].tolist() for name in ("response_mask", "advantages", "old_log_probs"))), 2
        ):
            name = (keys[k].rpartition("_")[0], *ids[k][: at + 1])
            if trained and name not in seen:
                seen.add(name)
                terms.append(-advantage * old)
    padded = {name: data[name].to_padded_tensor(0.0) for name in ("advantages", "old_log_probs")}
    loss = agg_loss(
        -padded["advantages"] * padded["old_log_probs"],
        masks["response_mask"].to_padded_tensor(0),
        "token-mean",
        batch_num_tokens=int(masks["loss_mask"].values().sum()),
    )
    assert len(terms) == 8 and loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)
    assert metrics["tree/repeated_tokens"] == pytest.approx(1 - 8 / 13)
    assert metrics["tree/repeated_logprob_difference"] == pytest.approx(1e-3)
    data["advantages"].values()[-4] = 3.0
    with pytest.raises(
        DataError, match=r"rows 3 \(.p_1_0.\) and 4 \(.p_1_1.\) both train token 2 .*advantages -1.5 and 3"
    ):
        once_masks(keys, data)


def test_trajectories_with_other_images_or_experts_sampled_other_tokens() -> None:
    from tensordict import NonTensorStack, TensorDict

    from treetrain.core.errors import DataError
    from treetrain.integrations.verl import once_masks, replays_experts

    def jagged(rows: list[Any]) -> Any:
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    def counted(image_token: int | None = None, **more: Any) -> list[list[int]]:
        ones = jagged([[1, 1]] * 3)
        fields = {"input_ids": jagged([[1, 9, 2, 5, 6]] * 3), "response_mask": ones, "loss_mask": ones, **more}
        data = TensorDict({**fields, "advantages": jagged([[1.0, 1.0]] * 3)}, batch_size=3)
        masks, _ = once_masks(["p_0_0", "p_0_1", "p_0_2"], data, image_token)
        return [row.tolist() for row in masks["response_mask"].unbind()]

    grid = torch.tensor([[1, 2, 2]])
    seen = [{"pixel_values": torch.full((4, 8), x), "image_grid_thw": grid} for x in (0.0, 1.0, 0.0)]
    assert counted(9, multi_modal_inputs=NonTensorStack(*seen)) == [[1, 1], [1, 1], [0, 0]]
    with pytest.raises(DataError, match=r"p_0_0.*images are given without image_token"):
        counted(multi_modal_inputs=NonTensorStack(*seen))
    experts = torch.tensor([0, 1]).expand(3, 5, 1, 2).clone()
    experts[1, 3], experts[2, 4] = torch.tensor([2, 3]), 0  # the last record of a row is fill
    assert counted(routed_experts=jagged([*experts])) == [[1, 1], [0, 1], [0, 0]]
    from omegaconf import OmegaConf

    for mode in ("R3", "disabled"):
        actor = {"fsdp_config": {"router_replay": {"mode": mode}}}
        assert replays_experts(OmegaConf.create({"actor_rollout_ref": {"actor": actor}})) == (mode == "R3")
    assert not replays_experts(OmegaConf.create({"actor_rollout_ref": {"actor": {}}}))


def step_of_repeats(rank: int, world: int, port: int, folder: str, queue: Any) -> None:
    """A step of a mini-batch in which every token repeats one of another."""
    from verl.utils import tensordict_utils as tu

    started(rank, world, port)
    engine, batch = make_engine("treetrain", folder), make_batch(0, "ppo")
    for name in ("response_mask", "loss_mask"):
        batch[name] = batch[name] * 0
    tu.assign_non_tensor(batch, tree_counted_once=True)
    with engine.train_mode():
        told = engine.train_batch(batch, loss_function=make_loss("ppo"))
    found = numbers(told["metrics"]) | {"loss": torch.as_tensor(told["loss"])}
    queue.put({name: value.tolist() for name, value in found.items()})


def test_a_mini_batch_that_only_repeats_has_loss_and_gradient_0(folder: str) -> None:
    (found,) = on_fresh_ranks(step_of_repeats, 1, folder)
    assert found["loss"] in (0.0, [0.0]) and found["grad_norm"] == [0.0]
    assert all(np.isfinite(value).all() for value in found.values()), found


def test_counting_once_needs_a_mean_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    from treetrain.integrations import verl as module

    def config(**changes: Any) -> Any:
        actor = {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "vanilla"}} | changes
        return OmegaConf.create({"actor_rollout_ref": {"actor": actor}})

    module.check_sums_tokens(config())
    with pytest.raises(ValueError, match=r"actor.loss_agg_mode=seq-mean-token-mean is not; set it to token-mean"):
        module.check_sums_tokens(config(loss_agg_mode="seq-mean-token-mean"))
    with pytest.raises(ValueError, match=r"actor.policy_loss.loss_mode=gspo is not"):
        module.check_sums_tokens(config(policy_loss={"loss_mode": "gspo"}))
    corrected = config()
    for value in ("token", "sequence"):
        corrected.algorithm = {"rollout_correction": {"rollout_is": value}}
        if value == "token":
            module.check_sums_tokens(corrected)
    with pytest.raises(ValueError, match=r"algorithm.rollout_correction.rollout_is=sequence is not; set it to token"):
        module.check_sums_tokens(corrected)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "treetrain")
    monkeypatch.setenv("TREETRAIN_COUNT", "twice")
    with pytest.raises(ValueError, match="TREETRAIN_COUNT=twice is neither"):
        module.counts_once()
    for value in ("", "per trajectory", "once"):
        monkeypatch.setenv("TREETRAIN_COUNT", value)
        assert module.counts_once() == (value == "once")


STEPS = 8


WITHOUT_VIDEOS = """
from transformers import ProcessorMixin
from transformers.models.qwen2_5_vl import processing_qwen2_5_vl


class Qwen2_5_VLProcessor(processing_qwen2_5_vl.Qwen2_5_VLProcessor):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **_):
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        for kind in ("image", "video"):
            setattr(self, f"{kind}_token", f"<|{kind}_pad|>")
            setattr(self, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"))
"""
"""The processor as users have it, but for videos, for which it needs torchvision."""


def save_model_of_words(folder: Path, images: bool) -> None:
    """A small model whose tokens are words, as verl's trainer loads it; or one for images, with its processor."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{number}": number for number in range(58 if images else 40)}
    options = {"eos_token": "t1", "pad_token": "t0"}
    if images:
        from support.images import END, IMAGE, MERGE, PATCH, START, image_model

        image_model("Qwen2.5-VL", torch.float32).save_pretrained(folder)
        special = {IMAGE: "image_pad", START: "vision_start", END: "vision_end", 63: "video_pad"}
        special |= {58: "im_start", 59: "im_end"}  # verl wants these, and a token for a newline
        words |= {f"<|{name}|>": number for number, name in special.items()}
        options["extra_special_tokens"] = [word for word in words if word.startswith("<")]
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    options["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    whole.save_pretrained(folder)
    if images:
        sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 1, "min_pixels": 16, "max_pixels": 64}
        pictures = getattr(transformers, "Qwen2VLImageProcessorPil", transformers.Qwen2VLImageProcessor)(**sizes)
        pictures.save_pretrained(folder)
        (folder / "without_videos.py").write_text(WITHOUT_VIDEOS)
        own = {
            "processor_class": "Qwen2_5_VLProcessor",
            "auto_map": {"AutoProcessor": "without_videos.Qwen2_5_VLProcessor"},
        }
        (folder / "processor_config.json").write_text(json.dumps(own))


@pytest.mark.slow
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_verls_trainer_learns_from_agents_with_two_trajectories_each(tmp_path: Path, images: bool) -> None:
    """`python -m verl.trainer.main_ppo` with two training workers; only the rollout and the devices are replaced."""
    pytest.importorskip("transfer_queue", reason="verl's v1 trainer imports it")
    import pandas

    save_model_of_words(tmp_path / "model", images)
    contents = [f"{first} t5 t6 t7" for first in ("t8", "t9", "t10", "t11")]
    rows = [{"prompt": [{"role": "user", "content": text}], "data_source": "none"} for text in contents]
    pandas.DataFrame(rows).to_parquet(tmp_path / "prompts.parquet")
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": tmp_path / "prompts.parquet",
        "data.val_files": tmp_path / "prompts.parquet",
        "data.trust_remote_code": images,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": tmp_path / "model",
        "actor_rollout_ref.model.trust_remote_code": images,
        "++actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.fsdp_config.param_offload": True,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
        "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "++actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "fp32",
        "++actor_rollout_ref.ref.fsdp_config.model_dtype": "fp32",
        "actor_rollout_ref.rollout.name": "cpu",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "two_calls",
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 2,
        "trainer.logger": "[file]",
        "trainer.total_epochs": STEPS,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "ray_kwargs.ray_init.num_cpus": 32,
        "++ray_kwargs.ray_init.num_gpus": 2,  # Ray only counts them
        "++ray_kwargs.ray_init.include_dashboard": False,
        "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR": "treetrain",
        "++ray_kwargs.ray_init.runtime_env.env_vars.TREETRAIN_COUNT": "once",
        "hydra.run.dir": tmp_path,
    }
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "support.verl_cpu,support.verl_rollout,treetrain.integrations.verl",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "log.jsonl"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",  # else workers starve where the machine has other work
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in settings.items())]
    done = subprocess.run(
        command, env=os.environ | variables, cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    steps = [json.loads(line)["data"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    rewards = [step["critic/score/mean"] for step in steps]
    assert rewards[-1] > rewards[0] + 0.2, rewards
    # The rollout's own model gives the same log-probabilities as the tree, so its weights are the trained ones.
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 1e-4
    # The eight trajectories of a prompt, two of each agent, meet in one process: that is why they share.
    assert min(step["actor/tree/overlap"] for step in steps) > 0.4
    # Of ten tokens that the two trajectories train, two are the same; the sampler's numbers for them are copies. More
    # are where the first call has sampled the tool's token and went on as the second one did.
    shares = [step["tree/repeated_tokens"] for step in steps]
    assert min(shares) == pytest.approx(0.2) and max(shares) < 0.25
    assert max(step["tree/repeated_logprob_difference"] for step in steps) < 1e-6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "fsdp"}, "strategy=fsdp .*fsdp2"),
        ({"router_replay": SimpleNamespace(mode="R2")}, "router_replay.mode=R2.*enable_rollout_routing_replay"),
        ({"dtype": "fp16"}, "param_dtype=fp16.*bf16"),
        ({"model": {"use_fused_kernels": True}}, "use_fused_kernels"),
        ({"model": {"use_liger": True}}, "use_liger"),
        ({"model": {"tiled_mlp": {"enabled": True, "num_shards": 4}}}, "tiled_mlp.enabled"),
        ({"model": {"enable_activation_offload": True}}, "enable_activation_offload.*ppo_max_token_len_per_gpu"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused_before_the_model_is_loaded(options: dict, named: str) -> None:
    from treetrain.integrations.verl import check_settings

    model = SimpleNamespace(use_fused_kernels=False, mtp=None)
    vars(model).update(options.get("model", {}))
    mixed = {"param_dtype": options.get("dtype", "bf16")}
    engine = SimpleNamespace(
        strategy="fsdp2", router_replay=SimpleNamespace(mode="disabled"), qat=None, mixed_precision=mixed
    )
    vars(engine).update({name: value for name, value in options.items() if name not in ("model", "dtype")})
    with pytest.raises(ValueError, match=named):
        check_settings(model, engine)


def test_several_temperatures_and_sampling_masks_in_a_batch_are_refused_by_name() -> None:
    from treetrain.core.errors import UnsupportedModel
    from treetrain.integrations.verl import check_batch

    batch = make_batch(0, "ppo")
    check_batch(batch)
    batch["rollout_sampling_mask"] = batch["input_ids"]
    with pytest.raises(UnsupportedModel, match="the batch has rollout_sampling_mask, and verl's losses have no"):
        check_batch(batch)
    batch["temperature"] = torch.arange(1.0, 1 + len(PROMPTS))
    with pytest.raises(UnsupportedModel, match=r"temperatures from 1\.0 to 6\.0"):
        check_batch(batch)


def test_distillation_without_the_ids_of_a_teacher_or_with_another_loss_is_refused() -> None:
    from treetrain.core.errors import DataError, UnsupportedModel
    from treetrain.integrations.verl import distillation_of, teacher_ids, trained, wanted

    nested = torch.nested.nested_tensor_from_jagged
    config = distillation_of(make_loss("distillation"))

    def ids_of(batch: Any, clamped: bool = False) -> Any:
        given = distillation_of(make_loss("distillation and rewards")) if clamped else config
        return teacher_ids(batch, trained(batch, wanted(batch)), given)

    def changed(name: str, change: Any, at: Any = ...) -> Any:
        batch = make_batch(0, "distillation")
        values = batch[name].values().clone()
        values[at] = change
        batch[name] = nested(values, batch[name].offsets())
        return batch

    for filled in (False, True):
        batch = make_batch(0, "distillation", filled=filled)
        masks, read = batch["response_mask"].unbind(), wanted(batch)
        for number, (row, own, mask) in enumerate(zip(ids_of(batch), read, masks, strict=True)):
            assert row.shape == (len(own), TEACHERS_IDS)
            on = (row >= 0).all(1)
            assert (on == (row >= 0).any(1)).all() and on[~own].sum() == 0
            assert on[own].tolist() == (mask != 0).tolist()[: int(own.sum())]
            assert bool(on.any()) == (not filled or number < len(read) - 1)
    with pytest.raises(UnsupportedModel, match=r"loss is functools.partial.*ppo_loss.*distillation_ppo_loss"):
        distillation_of(make_loss("ppo"))
    with pytest.raises(DataError, match="no teacher_ids for each token of its rows"):
        ids_of(make_batch(0, "ppo"))
    lacking = make_batch(0, "distillation")
    fewer = lacking["teacher_logprobs"].values()[:, 1:].contiguous()
    del lacking["teacher_logprobs"]
    with pytest.raises(DataError, match="no teacher_logprobs for each token of its rows"):
        ids_of(lacking)
    lacking["teacher_logprobs"] = nested(fewer, lacking["input_ids"].offsets())
    with pytest.raises(DataError, match="3 ids for each token and teacher_logprobs 2 log-prob"):
        ids_of(lacking)
    last = len(PROMPTS) - 1, len(PROMPTS[-1]) + len(RESPONSES[-1]) - 1
    where = r"row {} of verl's batch: of the teacher's ids for token {}, number {} ".format(*last, "{}")
    with pytest.raises(DataError, match=where.format(0) + "is -1 with the log-probability -"):
        ids_of(changed("teacher_ids", -1, at=-2))
    with pytest.raises(DataError, match=where.format(2) + "is -1 with the log-probability -"):
        ids_of(changed("teacher_ids", -1, at=(-2, 2)))
    for value, said in ((4.0, "4"), (float("nan"), "nan"), (-float("inf"), "-inf")):
        with pytest.raises(DataError, match=where.format(1) + rf"is \d+ with the log-probability {said};"):
            ids_of(changed("teacher_logprobs", value, at=(-2, 1)))
    ids_of(changed("teacher_logprobs", -float("inf"), at=(-2, 1)), clamped=True)
    ids_of(changed("teacher_logprobs", 4.0, at=-1))  # of no token


def test_a_rank_whose_batch_is_refused_ends_the_others_too(folder: str) -> None:
    for change, error in (("temperature", "temperatures from"), ("teacher_ids", "no teacher_ids for each")):
        first, second = on_fresh_ranks(refused_batch_of_one_rank, 2, folder, change)
        told = {own["rank"]: own["error"] for own in (first, second)}
        assert error in told[1] and "rank 1" in told[0], told


def refused_batch_of_one_rank(rank: int, world: int, port: int, folder: str, change: str, queue: Any) -> None:
    """A batch for distillation which the second rank refuses, and then one without a fault."""
    from treetrain.core.errors import DataError, RanksDisagree, UnsupportedModel

    started(rank, world, port)
    engine = make_engine("treetrain", folder)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        batch = make_batch(rank, "distillation")
        if rank == 1 and change == "temperature":
            batch["temperature"] = torch.arange(1.0, 1 + len(batch))
        elif rank == 1:
            del batch["teacher_ids"]
        with pytest.raises((DataError, UnsupportedModel) if rank == 1 else RanksDisagree) as refused:
            engine.forward_backward_batch(batch, make_loss("distillation"))
        engine.optimizer_zero_grad()
        assert engine.forward_backward_batch(make_batch(rank, "distillation"), make_loss("distillation"))
    queue.put({"rank": rank, "error": str(refused.value)})


def test_replay_without_recorded_experts_is_refused() -> None:
    from treetrain.core.errors import DataError
    from treetrain.integrations.verl import rows_of

    with pytest.raises(DataError, match="enable_rollout_routing_replay"):
        rows_of(make_batch(0, "ppo"), torch.nn.Identity(), replays=True)
    batch = make_batch(0, "ppo", experts=True)
    batch["routed_experts"] = torch.nested.nested_tensor_from_jagged(
        batch["routed_experts"].values()[..., :1].contiguous(), batch["input_ids"].offsets()
    )
    with pytest.raises(
        DataError, match=r"routed_experts of row 0 of verl's batch: token \d has 0 in .* one expert per"
    ):
        rows_of(batch, torch.nn.Identity(), replays=True)
