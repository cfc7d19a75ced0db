"""verl's own engine and losses on its own batches, against the same with `VERL_ENGINE_VENDOR=treetrain`, on CPUs."""

import functools
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("verl", reason="verl is not installed; it needs an environment of its own: make test-verl")

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10], [5, 6, 11], [12], [5, 6, 7, 8, 9, 10]]
RESPONSES = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 13, 14, 15], [16, 17], [18, 19, 20], [1, 2]]
"""Duplicates, a row that is a prefix of others, forks in prompts, in responses and at the first token."""
LOSSES = {
    "ppo": {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "calculate_entropy": True},
    "gspo": {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": "gspo"},
    "sft": {},
}


def configurations(folder: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    """verl's own configurations of a model, its engine, optimizer and checkpoints."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), options.pop("dtype", "fp32"))
    attention = {"attn_implementation": "sdpa"}  # verl asks for flash_attention_2 otherwise
    model = HFModelConfig(path=folder, load_tokenizer=False, override_config=attention, **options.pop("model", {}))
    config = FSDPEngineConfig(**{"strategy": "fsdp2", "mixed_precision": dtypes, "use_torch_compile": False} | options)
    # The constant schedule divides by the warm-up steps it is given.
    optimizer = FSDPOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=9)
    return model, config, optimizer, CheckpointConfig()


def make_engine(vendor: str, folder: str, **options: Any) -> Any:
    """An engine of verl in training mode, made as its workers make it."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

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


def make_batch(rank: int, loss: str, **settings: Any) -> Any:
    """A batch as verl's workers hand it to their engine: padded rows, made jagged by verl."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    rows = slice(None) if rank == 0 else slice(1, 4)
    prompts, responses = PROMPTS[rows], RESPONSES[rows]
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
    options |= {"calculate_entropy": loss == "ppo", "use_remove_padding": True, **settings}
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
    """Run both engines on a rank and put the differences into a queue."""
    started(rank, world, port)
    plain, tree = (make_engine(vendor, folder, **options) for vendor in ("", "treetrain"))
    assert type(tree).__name__ == "TreeFSDPEngine"
    found: dict[str, float] = {}
    own = {"max_token_len_per_gpu": 4096, "use_dynamic_bsz": True}
    scores = []
    for engine, over in ((plain, own), (tree, {})):
        with engine.eval_mode():
            batch = make_batch(rank, loss, **settings | over | {"calculate_entropy": True})
            scores.append(engine.infer_batch(batch)["model_output"])
    shape = make_batch(rank, loss)
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
        others = numbers(two["metrics"])
        for name, value in numbers(one["metrics"]).items():
            found[f"{name} {step}"] = difference(value, others[name])
    for engine in (plain, tree):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            over = own if engine is plain else {}
            engine.forward_backward_batch(make_batch(rank, loss, **settings | over), make_loss(loss))
            results.append({n: whole(p.grad) for n, p in engine.module.named_parameters() if p.requires_grad})
    one, two = results[-1], results[-2]
    scale = max(float(g.abs().max()) for g in two.values())
    found["gradients"] = max(float((one[n] - two[n]).abs().max()) for n in two) / scale
    queue.put(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model as verl loads it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
    path = str(tmp_path_factory.mktemp("verl") / "model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def on_ranks(function: Any, world: int, *args: Any) -> list[dict[str, Any]]:
    """Run a function on every rank and return what each puts into a queue."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(function, (world, port, *args, queue), nprocs=world)
    return [queue.get() for _ in range(world)]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that a user sets, and verl's platform for CPUs."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "support.verl_cpu,treetrain.integrations.verl")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


@pytest.mark.parametrize(
    ("world", "loss", "settings", "options"),
    [
        (1, "ppo", {}, {}),
        (2, "ppo", {"max_token_len_per_gpu": 8, "temperature": 0.7}, {}),
        (2, "gspo", {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}, {}),
        (2, "sft", {"calculate_sum_pi_squared": True}, {}),
        (1, "ppo", {}, {"model": {"lora_rank": 4, "lora_alpha": 8}}),
    ],
    ids=["ppo", "ppo-2-ranks-recomputed", "gspo-2-ranks", "sft-2-ranks", "ppo-lora"],
)
def test_log_probabilities_losses_metrics_weights_and_gradients_are_verls(
    folder: str, world: int, loss: str, settings: dict, options: dict
) -> None:
    of_ranks = on_ranks(compare, world, folder, loss, settings, options)
    found = {name: max(told[name] for told in of_ranks) for name in of_ranks[0]}
    assert {"log_probs", "gradients", "loss 2"} <= set(found)
    wrong = {name: value for name, value in found.items() if not value <= 2e-5}
    assert not wrong, found


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
    (errors,) = on_ranks(bfloat16_errors, 1, folder)
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

    (plain,) = on_ranks(steps_of_one, 1, folder)
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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "fsdp"}, "strategy=fsdp .*fsdp2"),
        ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size=2"),
        ({"dtype": "fp16"}, "param_dtype=fp16.*bf16"),
        ({"model": {"use_fused_kernels": True}}, "use_fused_kernels"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused_before_the_model_is_loaded(options: dict, named: str) -> None:
    from types import SimpleNamespace

    from treetrain.integrations.verl import check_settings

    model = SimpleNamespace(use_fused_kernels=False, mtp=None)
    vars(model).update(options.get("model", {}))
    mixed = {"param_dtype": options.get("dtype", "bf16")}
    engine = SimpleNamespace(strategy="fsdp2", ulysses_sequence_parallel_size=1, qat=None, mixed_precision=mixed)
    vars(engine).update({name: value for name, value in options.items() if name not in ("model", "dtype")})
    with pytest.raises(ValueError, match=named):
        check_settings(model, engine)


@pytest.mark.parametrize("name", ["distillation_use_topk", "routed_experts", "temperature"])
def test_batches_that_no_tree_supports_are_refused_by_name(name: str) -> None:
    from treetrain.errors import UnsupportedModel
    from treetrain.integrations.verl import TreeFSDPEngine

    batch = make_batch(0, "ppo")
    batch[name] = torch.arange(1.0, 1 + len(PROMPTS)) if name == "temperature" else torch.ones(len(PROMPTS), 1)
    with pytest.raises(UnsupportedModel, match=name):
        TreeFSDPEngine._tree_engine(object.__new__(TreeFSDPEngine), batch)
