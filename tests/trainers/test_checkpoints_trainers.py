"""SafeCheckpointsMixin under TreeTrainer, TRL's trainers and with adapters of peft: bit for bit there too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_runs import (
    Averages,
    SafeTrainer,
    StopAt,
    differences,
    make_trainer,
    make_tree_trainer,
    outcome,
    rows,
    tiny_model,
)
from transformers import PreTrainedTokenizerFast, TrainingArguments

from treetrain.trainers import checkpoints
from treetrain.trainers.checkpoints import SafeCheckpointsMixin, check_files

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "save_steps": 2,
    "logging_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
}


def check_resume(make: Any, folder: Path, stop: int = 3) -> None:
    whole = make(folder / "whole", ())
    whole.train()
    with pytest.raises(SystemExit):
        make(folder / "out", (StopAt(stop),)).train()
    again = make(folder / "out", ())
    again.train(resume_from_checkpoint=True)
    found = [each for each in differences(outcome(again), outcome(whole)) if "_time:" not in each]
    assert found == []


def tokenizer() -> PreTrainedTokenizerFast:
    """Numbers as words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(number): number for number in range(62)} | {"<unk>": 62, "<eos>": 63}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")


@pytest.mark.slow
def test_an_adapter_resumes_bit_for_bit_and_its_checkpoint_holds_no_base_model(tmp_path) -> None:
    peft = pytest.importorskip("peft")

    def make(folder: Path, callbacks: tuple) -> Any:
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        args = TrainingArguments(output_dir=str(folder), **SETTINGS)
        return SafeTrainer(model=model, args=args, train_dataset=rows(), callbacks=[Averages(), *callbacks])

    check_resume(make, tmp_path)
    names = {path.name for path in (tmp_path / "out" / "checkpoint-6").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names


@pytest.mark.slow  # the next test has shared prefixes beside it
def test_trl_sft_resumes_bit_for_bit_with_its_metrics(tmp_path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    kind = type("SafeSFT", (SafeCheckpointsMixin, trl.SFTTrainer), {})

    def make(folder: Path, callbacks: tuple) -> Any:
        return kind(
            model=tiny_model(),
            args=trl.SFTConfig(output_dir=str(folder), **SETTINGS),
            train_dataset=datasets.Dataset.from_list(rows()),
            processing_class=tokenizer(),
            callbacks=[Averages(), *callbacks],
        )

    check_resume(make, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3])
def test_trl_with_shared_prefixes_logs_the_same_after_a_resume(stop: int, tmp_path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from treetrain.trainers.share_prefixes import share_prefixes

    kind = type("SafeSFT", (SafeCheckpointsMixin, trl.SFTTrainer), {})
    shared = [{"input_ids": [5, 6, 7, 8, *row["input_ids"][: 2 + number % 5]]} for number, row in enumerate(rows())]

    def make(folder: Path, callbacks: tuple) -> Any:
        trainer = kind(
            model=tiny_model(dropout=0.0),
            args=trl.SFTConfig(output_dir=str(folder), **SETTINGS),
            train_dataset=datasets.Dataset.from_list(shared),
            processing_class=tokenizer(),
            callbacks=[Averages(), *callbacks],
        )
        return share_prefixes(trainer, budget=64)

    check_resume(make, tmp_path, stop)
    logs = [record for record in make_history(tmp_path / "out") if "loss" in record]
    assert all("tree/overlap" in record for record in logs)
    assert [any("difference" in name for name in record) for record in logs] == [True, False, False]


def make_history(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]


def test_a_model_card_that_cannot_be_written_is_left_out_of_a_checkpoint(tmp_path, monkeypatch) -> None:
    # TRL's first rank writes it before the shards: the other ranks would wait for it.
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    kind = type("SafeSFT", (SafeCheckpointsMixin, trl.SFTTrainer), {})

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(trl.SFTTrainer, "create_model_card", full)
    args = trl.SFTConfig(output_dir=str(tmp_path / "out"), **SETTINGS | {"max_steps": 2})
    data = datasets.Dataset.from_list(rows())
    trainer = kind(model=tiny_model(), args=args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    check_files(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(OSError, match="No space"):
        trainer.create_model_card()


def test_a_model_that_cannot_be_written_at_the_end_is_one_line_with_its_folder(tmp_path, monkeypatch) -> None:
    trainer = make_trainer(tmp_path / "out", max_steps=1, save_strategy="no")
    trainer.train()

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"the model could not be written to .*out \(RuntimeError: .*unexpected pos.* MB are"
    ):
        trainer.save_model()


def test_a_trl_run_that_dies_in_its_first_checkpoint_starts_again(tmp_path, monkeypatch) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    kind = type("SafeSFT", (SafeCheckpointsMixin, trl.SFTTrainer), {})

    def make() -> Any:
        args = trl.SFTConfig(output_dir=str(tmp_path / "out"), **SETTINGS | {"max_steps": 2})
        data = datasets.Dataset.from_list(rows())
        return kind(model=tiny_model(), args=args, train_dataset=data, processing_class=tokenizer())

    class Killed(BaseException):
        """As if the process ended here."""

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoints, "commit", dies)
        make().train()
    make().train(resume_from_checkpoint=True)
    check_files(tmp_path / "out" / "checkpoint-2")
    assert (tmp_path / "out" / "README.md").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("cycle", [{"num_iterations": 2}, {"steps_per_generation": 4}], ids=str)
def test_trl_grpo_resumes_bit_for_bit_between_a_generation_and_its_last_update(cycle: dict, tmp_path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    kind = type("SafeGRPO", (SafeCheckpointsMixin, trl.GRPOTrainer), {})
    prompts = [{"prompt": " ".join(map(str, row["input_ids"][:4]))} for row in rows()]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) % 5) for completion in completions]

    def make(folder: Path, callbacks: tuple) -> Any:
        args = trl.GRPOConfig(output_dir=str(folder), num_generations=2, max_completion_length=4, **SETTINGS, **cycle)
        return kind(
            model=tiny_model(),
            reward_funcs=reward,
            args=args,
            train_dataset=datasets.Dataset.from_list(prompts),
            processing_class=tokenizer(),
            callbacks=[Averages(), *callbacks],
        )

    check_resume(make, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_a_tree_trainer_resumes_bit_for_bit_between_the_updates_of_a_batch(step: int, tmp_path) -> None:
    # Four updates of a batch share the old and reference log-probabilities that were computed before the first one.
    check_resume(lambda folder, callbacks: make_tree_trainer(folder, callbacks=callbacks), tmp_path, step)


@pytest.mark.slow
def test_a_tree_trainer_is_not_resumed_on_steps_of_another_size(tmp_path) -> None:
    make_tree_trainer(tmp_path / "out", max_steps=2).train()
    with pytest.raises(ValueError, match=r"tokens_per_step=120, .* now takes .*tokens_per_step=240"):
        make_tree_trainer(tmp_path / "out", tokens_per_step=240).train(resume_from_checkpoint=True)
