"""A checkpoint of several ranks becomes a model folder, in one process without a group."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from support.ranked_runs import RankedRun
from support.saved import save_small_model
from treetrain.cli import main
from treetrain.train.export import export

SIZE = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows."""
    folder = tmp_path_factory.mktemp("base")
    save_small_model(folder / "model", vocabulary=64, positions=128)
    trunk = list(range(20))
    rows = [{"input_ids": [*trunk[:12], 30 + n, 31, n], "group_id": str(n % 3)} for n in range(9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(base: Path, folder: Path, *more: str) -> Path:
    sizes = ["--tokens-per-step", "60", "--steps", "3", "--lr", "1e-2", "--checkpoint-every-steps", "3", "--no-report"]
    argv = [str(base / "rows.jsonl"), "--model", str(base / "model"), *sizes, "--threads", "1", *more]
    run = RankedRun([*argv, "--output", str(folder / "out"), "--parallel", "fsdp"], folder, size=SIZE)
    assert run.wait() == [0] * SIZE, run.text
    return folder / "out"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_whole_model_and_its_average_are_those_that_the_run_saved(base, tmp_path, capsys) -> None:
    out = trained(base, tmp_path, "--ema-decay", "0.5")
    assert main(["export", str(out), "--output", str(tmp_path / "last"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 3 and not told["adapter"] and "no tokenizer" in told["notes"][0]
    assert equal(weights_of(tmp_path / "last"), weights_of(out))
    assert not dist.is_initialized()
    # The model that the run began with is not needed.
    gone = {"model": str(base / "another")}
    averaged = export(out / "checkpoints" / "step-00000003", tmp_path / "mean", weights="average", **gone)
    assert averaged.weights == "average"
    assert equal(weights_of(tmp_path / "mean"), weights_of(out / "ema"))
    assert not equal(weights_of(tmp_path / "mean"), weights_of(out))
    with pytest.raises(ValueError, match="no best weights: keep_best was not set"):
        export(out, tmp_path / "best", weights="best")
    with pytest.raises(ValueError, match="holds an earlier run or model"):
        export(out, tmp_path / "last")
    assert main(["export", str(base), "--output", str(tmp_path / "none")]) == 2 and not (tmp_path / "none").exists()


def test_an_adapter_is_saved_as_one_or_merged_and_belongs_to_its_base(base, tmp_path) -> None:
    from peft import PeftModel

    out = trained(base, tmp_path, "--lora-rank", "2")
    assert export(out, tmp_path / "adapter").adapter
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()

    def put_on(folder: Path) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(base / "model")
        return PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()

    assert equal(put_on(tmp_path / "adapter"), put_on(out))
    assert not export(out, tmp_path / "merged", merge=True).adapter
    assert equal(weights_of(tmp_path / "merged"), put_on(out))
    other = AutoModelForCausalLM.from_pretrained(base / "model")
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="is not the base model"):
        export(out, tmp_path / "wrong", model=str(tmp_path / "other"))
