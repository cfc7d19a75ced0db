"""Runs of `TreeTrainer` over several processes are those of one process on the same rows."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.processes import Processes
from support.tree_run_ranks import CASES, column, made, run_on_rank
from support.tree_runs import SKIPPED, error, weights

FAST = {("grpo", "fsdp"), ("sft in three calls within a budget", "accelerate")}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def check(found: list[dict[str, Any]], truth: dict[str, Any], tolerance: float) -> None:
    first, other = found
    names = {n for record in truth["log"] for n in record if not any(part in n for part in SKIPPED)}
    apart = {name: error(column(first["log"], name), column(truth["log"], name)) for name in names}
    assert "eval_nll" in names and "grad_norm" in names
    assert column(other["log"], "loss").tolist() == column(first["log"], "loss").tolist()
    whole = [np.concatenate([each["weights"][name].ravel() for name in truth["weights"]]) for each in (first, truth)]
    apart["weights"] = error(*whole)
    assert max(apart.values()) < tolerance, {name: value for name, value in apart.items() if value >= tolerance}
    assert column(first["log"], "tree/flat_tokens").tolist() == column(truth["log"], "tree/flat_tokens").tolist()
    assert column(first["log"], "tree/unique_tokens").tolist() == column(truth["log"], "tree/unique_tokens").tolist()


WAYS = [(case, way) for case in CASES for way in ("ddp", "fsdp", "accelerate")]


@pytest.mark.parametrize(
    ("case", "way"), [pair if pair in FAST else pytest.param(*pair, marks=pytest.mark.slow) for pair in WAYS]
)
def test_two_processes_train_as_one_in_float64(two, case, way) -> None:
    steps = 3 if (case, way) in FAST else 20
    found = two.run(run_on_rank, case, way, torch.float64, steps, timeout=180)
    # Muon orthogonalises in bfloat16, and sums over shards in another order.
    tolerance = 1e-2 if case == "muon" and way != "ddp" else TOLERANCE[torch.float64]
    check(found, made(case, "alone", torch.float64, steps=steps), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp", "accelerate"])
def test_a_model_trained_in_shards_or_copies_is_saved_as_one(two, way, tmp_path) -> None:
    found = two.run(run_on_rank, "sft", way, torch.float32, 4, tmp_path / "out", timeout=180)
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert all(error(saved[name], found[0]["weights"][name]) == 0 for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_four_processes_train_as_one(way) -> None:
    four = Processes(4)
    try:
        found = four.run(run_on_rank, "grpo", way, torch.float64, 8, size=4, timeout=240)
    finally:
        four.stop()
    check([found[0], found[3]], made("grpo", "alone", torch.float64, steps=8), TOLERANCE[torch.float64])
