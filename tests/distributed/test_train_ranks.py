"""A run over several ranks is the run of one process: losses, norms, weights, evaluations, counts, files."""

from typing import Any

import pytest
import torch

from support.saved import save_small_model
from support.train_work import compare_all, failures, loaded_by_shards, resumed, stop_one
from train.branching import VOCABULARY, branching_rows, write_rows

DPO = {"loss": "dpo", "sft_weight": 0.1}
SHORT: dict[str, dict[str, Any]] = {
    "sft": {"eval_fraction": 0.3, "eval_every_steps": 2, "ema_decay": 0.7},
    "grpo": {"loss": "grpo", "updates_per_batch": 2, "minibatches": 2, "kl": 0.1, "log_entropy": True, "steps": 4},
    "dpo": DPO,
    "lora": {"lora_rank": 2},
    "several calls": {"tokens_per_call": 60, "max_grad_norm": 0.05},
    "best": {"eval_fraction": 0.3, "eval_every_steps": 1, "keep_best": True, "best_metric": "nll", "lr": 0.3},
}
"""Runs by name."""
LONG: dict[str, dict[str, Any]] = {
    "another reference": {"loss": "grpo", "kl": 0.1, "reference_model": "tiny", "tokens_per_step": 300, "steps": 1},
    "lora against the bare model": {"lora_rank": 2, "loss": "grpo", "kl": 0.1, "updates_per_batch": 2},
    "dora": {"lora_rank": 2, "lora_dora": True},
    "kto": {"loss": "kto"},
    "gspo": {"loss": "gspo", "updates_per_batch": 2},
    "linear": {"execution": "linear"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon", "schedule": "linear"},
    "adafactor": {"optimizer": "adafactor"},
    "checkpointed": {"gradient_checkpointing": True},
    "bytes": {"budget": "64MB"},
    "no budget": {"budget": None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small_model(tmp_path_factory.mktemp("model"), vocabulary=VOCABULARY, positions=128)


@pytest.fixture
def compared(run_on_ranks, folder, tmp_path):
    """Runs named cases over ranks and by one process; how far they are apart, by name."""

    def run(names: list[str], parallel: str, *, size: int = 2, dtype=torch.float64, **changes: Any) -> dict[str, Any]:
        rows = branching_rows()
        for number, row in enumerate(rows):
            row |= {"pair": number // 3, "chosen": number % 3 == 0} if number % 3 < 2 else {"chosen": True}
        data = write_rows(tmp_path / "rows.jsonl", rows)
        pairs = [row for row in rows if "pair" in row]
        preferences = write_rows(tmp_path / "pairs.jsonl", pairs)
        shared = {"model": folder, "tokens_per_step": 120, "lr": 1e-2, "steps": 3, "budget": 48, "parallel": parallel}
        cases = []
        for name in names:
            file = preferences if name == "dpo" else data
            where = tmp_path / name
            where.mkdir()
            cases.append((name, {"data": (file,)} | shared | (SHORT | LONG)[name] | changes, str(where)))
        told = run_on_ranks(compare_all, cases, dtype, size=size)
        for name in names:
            assert all(each[name]["losses"] == told[0][name]["losses"] for each in told), name
        return {name: told[0][name]["errors"] for name in names}

    return run


def check(found: dict[str, Any], bound: float) -> None:
    for name, errors in found.items():
        assert "failed" not in errors, (name, errors["failed"])
        assert errors.pop("differ") == "", name
        assert all(error <= bound for error in errors.values()), (name, errors)


@pytest.mark.parametrize(("parallel", "size"), [("fsdp", 2), ("ddp", 4)])
def test_runs_over_ranks_are_those_of_one_process(compared, parallel, size) -> None:
    check(compared(list(SHORT), parallel, size=size), 1e-11)


@pytest.mark.parametrize(("parallel", "size"), [("ddp", 2), ("fsdp", 4)])
def test_runs_in_float32(compared, parallel, size) -> None:
    found = compared(["sft", "grpo"], parallel, size=size, dtype=torch.float32)
    for errors in found.values():
        errors.pop("weights")  # Adam makes whole steps of gradients that are rounding alone
    check(found, 1e-5)


@pytest.mark.parametrize("changes", [{"replicas": 2}, {"meta_init": True, "reduce": "step"}], ids=str)
def test_ways_to_lay_out_the_shards_change_nothing(compared, changes) -> None:
    check(compared(["sft", "lora"], "fsdp", size=4, dtype=torch.float32, **changes), 1e-3)


def test_more_ranks_than_rows(compared) -> None:
    check(compared(["sft"], "fsdp", size=4, tokens_per_step=1, tokens_per_call=None), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "size"), [("fsdp", 2), ("fsdp", 4), ("ddp", 2), ("ddp", 4)])
def test_more_runs_over_ranks_are_those_of_one_process(compared, parallel, size) -> None:
    # torch's Adafactor fails on shards: refused by name. Its Muon makes its matrices orthogonal in bfloat16.
    left_out = {"adafactor", "muon"} if parallel == "fsdp" else set()
    check(compared([name for name in LONG if name not in left_out], parallel, size=size), 1e-11)
    if parallel == "fsdp":
        check(compared(["muon"], parallel, size=size), 1e-2)


def test_runs_that_cannot_be_are_refused_on_every_rank(run_on_ranks, folder, tmp_path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", branching_rows())
    other = write_rows(tmp_path / "other.jsonl", branching_rows(seed=1))
    base = {"data": (data,), "model": folder, "output": str(tmp_path / "out"), "parallel": "fsdp", "steps": 1}
    cases = {
        "does not divide the 2 processes": (base | {"replicas": 3}, {}),
        "are there anyway: leave it out": (base | {"cpu_offload": True}, {}),
        "the ranks differ in the rows": (base, {"data": (other,)}),
        "no such file": (base, {"data": (str(tmp_path / "none.jsonl"),)}),
        "the loss is": (base | {"lr": 1e30, "steps": 3, "tokens_per_step": 60, "max_grad_norm": None}, {}),
    }
    said = run_on_ranks(failures, list(cases.values()))
    for number, message in enumerate(cases):
        for rank in (0, 1):
            assert message.lower() in said[rank][number].lower(), (message, said[rank][number])
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(("parallel", "rank"), [("ddp", 0), ("fsdp", 1)])
def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_step(
    run_on_ranks, folder, tmp_path, parallel, rank
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", branching_rows())
    settings = {"data": (data,), "model": folder, "output": str(tmp_path / "out"), "parallel": parallel, "budget": 48}
    settings |= {"steps": 4, "tokens_per_step": 120, "lr": 1e-2}
    stopped = run_on_ranks(stop_one, settings, rank, 1)
    for said, code, step in stopped:
        assert "stopped after step 2 of 4; all of it is saved" in said and (code, step) == (143, 2)
    whole = run_on_ranks(resumed, settings)
    apart = run_on_ranks(resumed, settings | {"output": str(tmp_path / "whole")})
    assert whole == apart and len(whole[0]) == 4


def test_weights_are_read_shard_by_shard(run_on_ranks, folder, tmp_path) -> None:
    settings = {"data": ("none",), "model": folder, "output": "none", "parallel": "fsdp", "meta_init": True}
    for changes, handed in (({}, False), ({"model": "tiny"}, True)):
        told = run_on_ranks(loaded_by_shards, settings | changes, size=4)
        assert all(each["handed out"] == handed for each in told)
        assert sum(each["local"] for each in told) == told[0]["all"]
        assert told[0]["same"] and told[0]["buffers"] and told[0]["tied"]
        assert all(each["tied here"] for each in told)
