"""SkyRL's own policy worker, batches and losses, against the same with `TreePolicyWorker`, on CPUs with gloo."""

import copy
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.framework_runs import PROMPTS, RESPONSES, image_prompts, on_fresh_ranks, saved_model

pytest.importorskip("skyrl", reason="skyrl is not installed; it needs an environment of its own: make test-skyrl")

PLACE = slice(None), slice(None, None, -1)
"""The rows of each rank: SkyRL gives all ranks as many."""


def make_batch(rank: int, loss: str, images: bool = False) -> Any:
    """A batch as SkyRL's trainer sends it to its workers: every response ends at the right."""
    from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch

    prompts, responses = PROMPTS[PLACE[rank]], RESPONSES[PLACE[rank]]
    pictures: list[dict[str, Any]] = []
    if images:
        prompts, given = zip(*image_prompts()[PLACE[rank]])  # type: ignore[assignment]
        none = {name: array[:0] for name, array in given[0].items()}  # SkyRL's lists of tensors have one for each row
        pictures = [own or none for own in given]
    length = max(map(len, responses))
    total = max(len(p) + len(r) for p, r in zip(prompts, responses))
    ids, mask = torch.zeros(len(prompts), total, dtype=torch.long), torch.zeros(len(prompts), total, dtype=torch.long)
    response_mask = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        own = torch.tensor([*prompt, *response])
        ids[row, -len(own) :], mask[row, -len(own) :] = own, 1
        response_mask[row, -len(response) :] = 1
    draw = torch.Generator().manual_seed(rank)
    loss_mask = response_mask.clone()
    loss_mask[0, -2] = 0  # the output of a tool
    shape = response_mask.shape
    batch = TrainingInputBatch(
        {
            "sequences": ids,
            "attention_mask": mask,
            "response_mask": response_mask,
            "loss_mask": loss_mask.float() / 7 if loss == "cross_entropy" else loss_mask.float(),
            "advantages": torch.randn(shape, generator=draw),
            **{
                name: torch.randn(shape, generator=draw) * 0.1 - 3.5
                for name in ("action_log_probs", "base_action_log_probs", "rollout_logprobs")
            },
        }
    )
    for name in pictures[0] if images else ():
        batch[name] = TensorList([torch.from_numpy(own[name]) for own in pictures])
    batch.metadata = {"response_length": length}
    return batch


def make_worker(kind: type, rank: int, world: int, port: int, folder: str, settings: dict[str, Any]) -> Any:
    """A policy worker of SkyRL with its model, as SkyRL's trainer makes it."""
    from omegaconf import OmegaConf
    from skyrl.train.config import TrainerConfig

    config = TrainerConfig.from_dict_config(OmegaConf.create(settings))
    worker = kind(
        cfg=config,
        world_size=world,
        rank=rank,
        local_rank=rank,
        master_addr="127.0.0.1",
        master_port=port,
        sequence_parallel_size=1,
    )
    worker.init_worker_process_group()
    worker.init_model(folder, num_training_steps=9)
    return worker


SETTINGS: dict[str, Any] = {
    "flash_attn": False,
    "remove_microbatch_padding": False,
    "micro_train_batch_size_per_gpu": 2,
    "micro_forward_batch_size_per_gpu": 2,
    "use_expandable_segments": False,
    "algorithm": {"temperature": 1.0},
    "policy": {
        "fsdp_config": {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"}},
        "optimizer_config": {"lr": 1e-3, "num_warmup_steps": 0},
        "model": {"lora": {"rank": 0}},
    },
}


def compare(
    rank: int, world: int, port: int, folder: str, loss: str | None, images: bool, changes: dict, queue: Any
) -> None:
    """Run both workers on a rank and put the differences into a queue."""
    from omegaconf import OmegaConf

    import support.skyrl_cpu  # noqa: F401

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

    from treetrain.integrations.skyrl import TreePolicyWorker

    settings: Any = OmegaConf.to_container(OmegaConf.merge(SETTINGS, changes))
    workers = []
    for kind in (FSDPPolicyWorkerBase, TreePolicyWorker):
        torch.manual_seed(0)  # adapters start at random
        workers.append(make_worker(kind, rank, world, port, folder, settings))
    found: dict[str, float] = {}

    def difference(one: Any, other: Any) -> float:
        one, other = torch.as_tensor(one, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
        return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))

    real = make_batch(rank, "ppo")["response_mask"].bool()
    scores = [worker.forward(make_batch(rank, "ppo", images)).loss_fn_outputs for worker in workers]
    plain, tree = (torch.tensor([row["logprobs"] for row in score])[real] for score in scores)
    found["forward"] = difference(tree, plain)
    for step in range(3):
        batches = [make_batch(rank, loss or "ppo", images) for _ in workers]
        outputs = [worker.forward_backward(batch, loss_fn=loss) for worker, batch in zip(workers, batches)]
        plain, tree = outputs
        assert tree.metrics.pop("tree/overlap") > 0.2
        assert plain.metrics.keys() == tree.metrics.keys()
        for name, value in plain.metrics.items():
            found[f"{name} {step}"] = difference(tree.metrics[name], value)
        # The rows that SkyRL fills up with are random, and the tree leaves them out.
        rows = slice(len(PROMPTS[PLACE[rank]]))
        for one, other in zip(tree.loss_fn_outputs[rows], plain.loss_fn_outputs[rows], strict=True):
            for name, value in other.items():
                key = f"{name} of rows {step}"
                found[key] = max(found.get(key, 0.0), difference(one[name], value))
        plain, tree = (
            {n: p.grad.full_tensor() for n, p in worker.model.model.named_parameters() if p.requires_grad}
            for worker in workers
        )
        scale = max(float(g.abs().max()) for g in plain.values())
        found[f"gradients {step}"] = max(float((tree[n] - g).abs().max()) for n, g in plain.items()) / scale
        plain, tree = (worker.optim_step() for worker in workers)
        found[f"gradient norm {step}"] = difference(tree, plain)
    queue.put(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model as SkyRL loads it."""
    path = str(tmp_path_factory.mktemp("skyrl") / "model")
    # SkyRL fills micro-batches with ids below 100.
    return saved_model(path, vocab_size=128, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned processes import this test's support."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("SKYRL_DUMP_INFRA_LOG_TO_STDOUT", "1")


KL_AND_ENTROPY = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.2,
    "use_entropy_loss": True,
    "entropy_loss_coef": 0.1,
    "temperature": 0.7,
}


@pytest.mark.parametrize(
    ("world", "loss", "changes"),
    [
        (1, None, {"algorithm": KL_AND_ENTROPY}),
        (2, None, {"algorithm": KL_AND_ENTROPY, "max_tokens_per_microbatch": 8}),
        (2, "cross_entropy", {"policy": {"model": {"lora": {"rank": 4, "alpha": 8}}}}),
    ],
    ids=["ppo", "ppo-2-ranks-recomputed", "cross-entropy-2-ranks-lora"],
)
def test_log_probabilities_losses_metrics_and_gradients_are_skyrls(
    folder: str, world: int, loss: str | None, changes: dict
) -> None:
    check_differences(on_fresh_ranks(compare, world, folder, loss, False, changes))


@pytest.mark.parametrize(
    ("family", "world", "changes"),
    [
        ("Qwen2.5-VL", 1, {"algorithm": KL_AND_ENTROPY}),
        ("Qwen3-VL", 2, {"algorithm": KL_AND_ENTROPY, "policy": {"model": {"lora": {"rank": 4, "alpha": 8}}}}),
        ("Qwen3-VL", 2, {"max_tokens_per_microbatch": 28}),
    ],
    ids=["one-process", "2-ranks-lora", "2-ranks-recomputed"],
)
def test_rows_with_images_are_skyrls(tmp_path: Path, family: str, world: int, changes: dict) -> None:
    from support.images import image_model

    model = image_model(family, torch.float32, tokens={"tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    check_differences(on_fresh_ranks(compare, world, str(tmp_path), None, True, changes))


def refusing(rank: int, world: int, port: int, folder: str, queue: Any) -> None:
    """Put into the queue what a rank says of a batch of which the second rank's is refused."""
    from omegaconf import OmegaConf

    import support.skyrl_cpu  # noqa: F401

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    from treetrain.integrations.skyrl import TreePolicyWorker

    settings: Any = OmegaConf.to_container(OmegaConf.create(SETTINGS))
    worker, batch = make_worker(TreePolicyWorker, rank, world, port, folder, settings), make_batch(rank, "ppo")
    if rank:
        batch["sub_seq_lengths"] = torch.zeros(len(batch["sequences"]), 1)
    try:
        worker.forward_backward(batch, loss_fn=None)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    queue.put({"rank": rank, "said": said})
    torch.distributed.destroy_process_group()


def test_a_rank_whose_batch_is_refused_ends_the_others_too(folder: str) -> None:
    said = {found["rank"]: found["said"] for found in on_fresh_ranks(refusing, 2, folder)}
    assert said[1].startswith("UnsupportedModel: the batch has sub_seq_lengths")
    assert said[0].startswith("RanksDisagree: ") and "because of rank 1 of 2" in said[0], said


def check_differences(of_ranks: list[dict[str, float]]) -> None:
    found = {name: max(told[name] for told in of_ranks) for name in of_ranks[0]}
    assert {"forward", "gradients 2", "gradient norm 2"} <= set(found)
    wrong = {name: value for name, value in found.items() if not value <= 2e-5}
    assert not wrong, found


def test_settings_and_batches_that_no_tree_supports_are_refused_by_name() -> None:
    from types import SimpleNamespace

    import support.skyrl_cpu  # noqa: F401
    from treetrain.core.errors import UnsupportedModel
    from treetrain.integrations.skyrl import check_batch, check_settings

    policy = SimpleNamespace(sequence_parallel_size=2)
    with pytest.raises(ValueError, match=r"policy\.sequence_parallel_size=2.*set it to 1"):
        check_settings(SimpleNamespace(policy=policy, strategy="fsdp"))
    batch = make_batch(0, "ppo")
    batch["sub_seq_lengths"] = torch.zeros(len(PROMPTS), 1)
    with pytest.raises(UnsupportedModel, match="sub_seq_lengths"):
        check_batch(batch, None)
    for name in ("sampling_mask", "rollout_sample_support"):  # SkyRL's own name of the latter in later versions
        batch = make_batch(0, "ppo")
        batch[name] = batch["response_mask"][..., None]
        with pytest.raises(UnsupportedModel, match=f"the batch has {name}, and SkyRL's old and reference"):
            check_batch(batch, None)


def test_images_that_skyrl_leaves_out_or_gives_to_other_rows_are_refused() -> None:
    importlib.import_module("support.skyrl_cpu")
    from types import SimpleNamespace

    from support.images import IMAGE, image, image_model
    from treetrain import TreeEngine
    from treetrain.core.errors import DataError, UnsupportedModel
    from treetrain.integrations.skyrl import RowsOfBatch, ScoresOfRows, check_batch

    model, batch = image_model("Qwen3-VL", torch.float32), make_batch(0, "ppo", images=True)
    without = SimpleNamespace(model=model.model.language_model, is_vlm=False)
    with pytest.raises(
        UnsupportedModel, match=r"pixel_values and image_grid_thw.*Qwen3VLTextModel.*language_model_only=False"
    ):
        check_batch(batch, without)
    engine = TreeEngine(model)
    whole, tall, wide = image(1).inputs, image(1, 2, 4).inputs, image(1, 1, 4).inputs
    text = {name: array[:0] for name, array in whole.items()}
    # Row 0 has four tokens of an image, row 3 text alone.
    for row, images, last, message in (
        (0, whole | {"pixel_values": text["pixel_values"]}, None, r"row 0 of SkyRL's batch.*pixel_values does not fit"),
        (0, tall, None, r"an image with image_grid_thw \[1, 4, 8\] has 8 features, but 4 tokens"),
        (0, text, None, rf"row 0 of SkyRL's batch has 4 tokens {IMAGE}, which stand for images, and no images"),
        (3, text, IMAGE, rf"row 3 of SkyRL's batch has 1 tokens {IMAGE}"),
    ):
        with pytest.raises(DataError, match=message):
            given = with_images_of_row(batch, row, images, last)
            ScoresOfRows(engine, RowsOfBatch(model, given), entropies=False)
    given = with_images_of_row(batch, 1, wide)
    scored = ScoresOfRows(engine, RowsOfBatch(model, given), entropies=False).scored.logprobs
    assert (scored[0] - scored[1]).abs().max() > 1e-3  # equal pixels in another grid are another image


def with_images_of_row(batch: Any, row: int, images: dict[str, Any], last: int | None = None) -> Any:
    """The batch with other images of a row, and another last token."""
    changed = copy.deepcopy(batch)
    for name, array in images.items():
        changed[name].tensors[row] = torch.from_numpy(array)
    if last is not None:
        changed["sequences"][row, -1] = last
    return changed


def test_recorded_experts_replace_the_choices_of_routers_and_fill_does_not() -> None:
    """Scores are those of each row alone with its own record (which `tests/engine/test_moe_steps.py` holds to rows)."""
    importlib.import_module("support.skyrl_cpu")
    import numpy as np
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from treetrain import Trajectory, TreeEngine
    from treetrain.core.errors import DataError
    from treetrain.integrations.skyrl import RowsOfBatch, ScoresOfRows

    class Batch(dict):
        metadata: dict[str, int]

    # Two samples of one answer that were routed otherwise; a record that ends early; no record at all.
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 8]]
    records = np.array([[[0, 1], [2, 3]]] * 5), np.array([[[3, 2], [1, 0]]] * 5), np.array([[[0, 1], [2, 3]]] * 3)
    width, actions = 6, 3
    batch = Batch(sequences=torch.zeros(4, width, dtype=torch.long), attention_mask=torch.zeros(4, width).long())
    batch["rollout_expert_indices"] = torch.zeros(4, width, 2, 2, dtype=torch.uint8)
    batch.metadata = {"response_length": actions}
    rows = []
    for k, row in enumerate(ids):
        batch["sequences"][k, width - len(row) :] = torch.tensor(row)
        batch["attention_mask"][k, width - len(row) :] = 1
        experts = np.full((len(row), 2, 2), -1)
        if k < 3:
            experts[: len(records[k])] = records[k]
            place = slice(width - len(row), width - len(row) + len(records[k]))
            batch["rollout_expert_indices"][k, place] = torch.from_numpy(records[k]).byte()
        rows.append(Trajectory(row, experts=experts))
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 24, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2)).eval()
    with torch.no_grad():
        expected = [TreeEngine(model).score([row]).logprobs[0] for row in rows]
        chosen = TreeEngine(model).score([rows[0].replace(experts=None)]).logprobs[0]
    scores = ScoresOfRows(TreeEngine(model, budget=4), RowsOfBatch(model, batch), entropies=False)
    for order in ([0, 1, 2, 3], [1, 3, 0, 2]):
        scores.recorded = batch["rollout_expert_indices"][order]
        found = scores(batch["sequences"][order], actions, batch["attention_mask"][order])
        for row, k in zip(found, order):
            own = min(actions, len(ids[k]) - 1)
            torch.testing.assert_close(row[-own:], expected[k][-own:].float(), rtol=0, atol=2e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-3 and (expected[0] - chosen).abs().max() > 1e-3
    batch["rollout_expert_indices"] = batch["rollout_expert_indices"][..., :1]
    with pytest.raises(
        DataError, match=r"rollout_expert_indices of row 0 of SkyRL's batch: token 0 has 0 in layer 0.*switch the rec"
    ):
        RowsOfBatch(model, batch)


def test_steps_that_train_a_turn_again_count_it_once() -> None:
    """SkyRL's own tensors and scaling of the masks: each different token of a trajectory weighs 1 / their number."""
    importlib.import_module("support.skyrl_cpu")
    from types import SimpleNamespace

    from skyrl.backends.skyrl_train.utils.ppo_utils import apply_loss_reduction_to_advantages_minibatch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from skyrl.train.generators.base import TrajectoryID

    from treetrain.core.errors import DataError
    from treetrain.integrations.skyrl import once_masks

    prompts, responses = [[1, 2], [1], [1, 2], [1, 2]], [[7, 8], [2, 7, 8, 3, 9], [7, 5], [7, 8]]
    masks = [[1, 1], [0, 1, 1, 0, 1], [1, 1], [1, 1]]
    ids = [TrajectoryID("a", 0), TrajectoryID("a", 0), TrajectoryID("a", 0), TrajectoryID("a", 1)]
    output = {"prompt_token_ids": prompts, "response_ids": responses, "loss_masks": masks, "trajectory_ids": ids}
    logprobs = [[-1.0] * len(row) for row in responses]
    logprobs[1][2] -= 0.25
    once, numbers = once_masks(output | {"rollout_logprobs": logprobs})
    seen, expected = set(), []
    for prompt, response, mask, trajectory in zip(prompts, responses, masks, ids):
        own = []
        for at, trained in enumerate(mask):
            name = (trajectory.to_string(), *prompt, *response[: at + 1])
            own.append(int(trained and name not in seen))
            seen |= {name} if trained else set()
        expected.append(own)
    assert once == expected == [[1, 1], [0, 0, 0, 0, 1], [0, 1], [1, 1]]
    assert numbers == {"tree/repeated_tokens": 1 - 6 / 9, "tree/repeated_logprob_difference": 0.25}
    tokenizer = SimpleNamespace(pad_token_id=0)
    rewards = [[0.0] * len(row) for row in responses]
    tensors = convert_prompts_responses_to_batch_tensors(tokenizer, prompts, responses, rewards, once)
    mask = tensors[4]
    scaled = apply_loss_reduction_to_advantages_minibatch(torch.ones_like(mask), mask, "token_mean", 2, 8)
    assert float((scaled * mask).sum()) == pytest.approx(1.0) and float(scaled[0, -1]) == pytest.approx(1 / 6)
    with pytest.raises(DataError, match=r"no trajectory_ids.*step_wise_trajectories=True"):
        once_masks(output | {"trajectory_ids": None})


def sums_of_tokens() -> Any:
    """SkyRL's own settings of a loss that is a mean over tokens."""
    from skyrl.train.config.config import AlgorithmConfig

    algorithm = AlgorithmConfig(use_kl_loss=False)
    algorithm.off_policy_correction.tis_ratio_type = "token"
    return algorithm


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_reduction", "sequence_mean"),
        ("policy_loss_type", "gspo"),
        ("use_kl_loss", True),
        ("off_policy_correction.tis_ratio_type", "sequence"),
        ("off_policy_correction.sequence_mask_metric", "geometric"),
        ("off_policy_correction.outlier_token_is_threshold_high", 100.0),
        ("off_policy_correction.outlier_token_is_threshold_low", 1e-4),
    ],
)
def test_a_loss_that_reads_whole_responses_does_not_count_once(name: str, value: Any) -> None:
    importlib.import_module("support.skyrl_cpu")
    from treetrain.integrations.skyrl import check_sums_tokens

    algorithm = sums_of_tokens()
    check_sums_tokens(algorithm)
    *above, last = name.split(".")
    setattr(getattr(algorithm, above[0]) if above else algorithm, last, value)
    with pytest.raises(ValueError, match=rf"trainer\.algorithm\.{name}={value} is not; set it to"):
        check_sums_tokens(algorithm)


def test_steps_with_other_images_or_experts_sampled_other_tokens() -> None:
    importlib.import_module("support.skyrl_cpu")
    from skyrl.train.generators.base import TrajectoryID

    from treetrain.core.errors import DataError
    from treetrain.integrations.skyrl import once_masks

    output: dict[str, Any] = {
        "prompt_token_ids": [[1, 9, 2]] * 3,
        "response_ids": [[5, 6]] * 3,
        "loss_masks": [[1, 1]] * 3,
        "trajectory_ids": [TrajectoryID("a", 0)] * 3,
    }
    pixels = [torch.zeros(4, 8), torch.ones(4, 8), torch.zeros(4, 8)]
    images = {"pixel_values": pixels, "image_grid_thw": [torch.tensor([[1, 2, 2]])] * 3}
    assert once_masks(output | images, 9)[0] == [[1, 1], [1, 1], [0, 0]]
    with pytest.raises(DataError, match="images are given without image_token"):
        once_masks(output | images)
    # Experts of the second step differ at token 3; records end a token early, or with zeros.
    records = [[[[0, 1]]] * 4, [[[0, 1]]] * 3 + [[[2, 3]]] * 2, [[[0, 1]]] * 4 + [[[0, 0]]]]
    assert once_masks(output | {"rollout_expert_indices": records})[0] == [[1, 1], [0, 1], [0, 0]]


def test_the_trainer_gets_the_masks_that_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("support.skyrl_cpu")
    from types import SimpleNamespace

    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.trainer import RayPPOTrainer

    from treetrain.integrations.skyrl import count_tokens_once

    monkeypatch.setattr(
        RayPPOTrainer, "convert_to_training_input", lambda self, output, uids: (output["loss_masks"], uids)
    )
    count_tokens_once()
    settings = SimpleNamespace(algorithm=sums_of_tokens())
    trainer = SimpleNamespace(cfg=SimpleNamespace(trainer=settings), all_metrics={})
    output = {"prompt_token_ids": [[1], [1]], "response_ids": [[2], [2, 3]], "loss_masks": [[1], [1, 1]]}
    output["trajectory_ids"] = [TrajectoryID("a", 0)] * 2
    found = RayPPOTrainer.convert_to_training_input(trainer, output, ["a", "a"])
    assert found == ([[1], [0, 1]], ["a", "a"]) and trainer.all_metrics["tree/repeated_tokens"] == 1 - 2 / 3
    from treetrain.integrations import skyrl as module

    settings.policy = SimpleNamespace(model=SimpleNamespace(path="a model for images"))
    tokens = {"a model for images": SimpleNamespace(image_token_id=9)}
    monkeypatch.setattr(module, "AutoConfig", SimpleNamespace(from_pretrained=tokens.__getitem__))
    output |= {"prompt_token_ids": [[9], [9]], "image_grid_thw": [torch.tensor([[1, 2, 2]])] * 2}
    output["pixel_values"] = [torch.zeros(4, 8), torch.ones(4, 8)]
    assert RayPPOTrainer.convert_to_training_input(trainer, output, ["a", "a"])[0] == [[1], [1, 1]]
    assert trainer.all_metrics == {"tree/repeated_tokens": 0.0, "tree/repeated_logprob_difference": 0.0}


def test_the_worker_hands_on_the_records_of_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("support.skyrl_cpu")
    from types import SimpleNamespace

    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

    from treetrain.integrations.skyrl import TreePolicyWorker

    worker = object.__new__(TreePolicyWorker)
    worker.model = SimpleNamespace(recorded=None)
    for name in ("_forward_backward_micro", "_forward_micro_batch", "_forward_micro_with_loss"):
        monkeypatch.setattr(FSDPPolicyWorkerBase, name, lambda self, *args, **kwargs: (self.model.recorded, kwargs))
    experience, batch = SimpleNamespace(rollout_expert_indices="own"), {"rollout_expert_indices": "its"}
    assert worker._forward_backward_micro(experience, 1.0, loss_fn="x") == ("own", {"loss_fn": "x"})
    assert worker._forward_micro_batch(batch) == ("its", {})
    assert worker._forward_micro_with_loss({}, loss_fn="x") == (None, {"loss_fn": "x"})
