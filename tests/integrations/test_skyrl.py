"""SkyRL's own policy worker, batches and losses, against the same with `TreePolicyWorker`, on CPUs with gloo."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.framework_runs import PROMPTS, RESPONSES, on_fresh_ranks, saved_model

pytest.importorskip("skyrl", reason="skyrl is not installed; it needs an environment of its own: make test-skyrl")

PLACE = slice(None), slice(None, None, -1)
"""The rows of each rank: SkyRL gives all ranks as many."""


def make_batch(rank: int, loss: str) -> Any:
    """A batch as SkyRL's trainer sends it to its workers: every response ends at the right."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    prompts, responses = PROMPTS[PLACE[rank]], RESPONSES[PLACE[rank]]
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


def compare(rank: int, world: int, port: int, folder: str, loss: str | None, changes: dict, queue: Any) -> None:
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
    scores = [worker.forward(make_batch(rank, "ppo")).loss_fn_outputs for worker in workers]
    plain, tree = (torch.tensor([row["logprobs"] for row in score])[real] for score in scores)
    found["forward"] = difference(tree, plain)
    for step in range(3):
        outputs = [worker.forward_backward(make_batch(rank, loss or "ppo"), loss_fn=loss) for worker in workers]
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
    of_ranks = on_fresh_ranks(compare, world, folder, loss, changes)
    found = {name: max(told[name] for told in of_ranks) for name in of_ranks[0]}
    assert {"forward", "gradients 2", "gradient norm 2"} <= set(found)
    wrong = {name: value for name, value in found.items() if not value <= 2e-5}
    assert not wrong, found


def test_settings_and_batches_that_no_tree_supports_are_refused_by_name() -> None:
    from types import SimpleNamespace

    import support.skyrl_cpu  # noqa: F401
    from treetrain.core.errors import UnsupportedModel
    from treetrain.integrations.skyrl import TreePolicyWorker, check_settings

    policy = SimpleNamespace(sequence_parallel_size=2)
    with pytest.raises(ValueError, match=r"policy\.sequence_parallel_size=2.*set it to 1"):
        check_settings(SimpleNamespace(policy=policy, strategy="fsdp"))
    worker = object.__new__(TreePolicyWorker)
    worker.cfg = SimpleNamespace(micro_train_batch_size_per_gpu=2, max_tokens_per_microbatch=-1)
    batch = make_batch(0, "ppo")
    batch["rollout_expert_indices"] = torch.zeros(len(PROMPTS), 11, 2, 2)
    with pytest.raises(UnsupportedModel, match="rollout_expert_indices"):
        worker.forward_backward(batch)
