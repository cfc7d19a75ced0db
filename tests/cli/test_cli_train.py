"""`treetrain train`: a file in, a model folder out; bad input is one line."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from treetrain.cli import train

QUIET = ("--report_to", "none", "--use_cpu", "true", "--save_strategy", "no", "--disable_tqdm", "true")
GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "reward": 1.0, "group_id": "a"}


def loads(folder: str | Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def logged(folder: Path, name: str = "loss") -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [record[name] for record in history if name in record]


@pytest.mark.slow
def test_training_writes_a_folder_that_transformers_loads(treetrain, token_file, model_folder, tmp_path) -> None:
    out = tmp_path / "out"
    argv = ("train", token_file, "--model", model_folder, "--output_dir", out, "--max_steps", "3", *QUIET)
    answer = treetrain(*argv, "--logging_steps", "1", "--eval_data", token_file)
    assert answer.code == 0 and f"the model is in {out}" in answer.out
    assert "train_loss" in answer.out and "eval_nll" in answer.out
    loads(out)
    assert AutoTokenizer.from_pretrained(out)("hello")["input_ids"]
    assert len(logged(out)) == 3


def test_the_default_loss_refuses_the_pairs_of_the_shared_data(treetrain, model_folder, tmp_path, shared_data) -> None:
    path = shared_data / "log_faults" / "f0_rejected_trained.jsonl"
    argv = ("train", path, "--model", model_folder, "--chat_template", "chatml", "--output_dir", tmp_path / "out")
    assert "is rejected (chosen=False)" in treetrain(*argv, "--max_steps", "1", *QUIET).error


def test_the_default_loss_trains_no_rejected_answer(treetrain, model_folder, tmp_path) -> None:
    said = {"prompt": "Name a tree", "chosen": "An oak.", "rejected": "A bus."}
    for name, row in {"pairs": said, "labels": {"prompt": "a", "completion": "b", "label": False}}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row))
        argv = ("train", path, "--model", model_folder, "--output_dir", tmp_path / name, "--max_steps", "1", *QUIET)
        error = treetrain(*argv).error
        assert "is rejected (chosen=False)" in error and "--loss dpo" in error and "--where chosen=True" in error


@pytest.mark.slow
def test_tree_and_linear_runs_agree_on_conversations(treetrain, chat_file, model_folder, tmp_path) -> None:
    argv = ("train", chat_file, "--model", model_folder, "--view", "calls", "--tokens_per_step", "150", *QUIET)
    for execution in ("tree", "linear"):
        more = ("--execution", execution, "--output_dir", tmp_path / execution, "--logging_steps", "1")
        assert treetrain(*argv, *more, "--num_train_epochs", "2", "--learning_rate", "1e-2").code == 0
    tree, linear = tmp_path / "tree", tmp_path / "linear"
    assert logged(tree) == pytest.approx(logged(linear), abs=1e-4)
    assert sum(logged(tree, "tree/unique_tokens")) < sum(logged(linear, "tree/unique_tokens"))
    one, other = loads(tree).state_dict(), loads(linear).state_dict()
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


@pytest.mark.slow
def test_a_stopped_run_says_how_to_go_on_and_it_does(
    treetrain, token_file, model_folder, tmp_path, monkeypatch
) -> None:
    make = train._trainer

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    def stops(*given: Any) -> Any:
        trainer, notes = make(*given)
        trainer.add_callback(Stop())
        return trainer, notes

    argv = ("train", token_file, "--model", model_folder, "--max_steps", "3", "--logging_steps", "1", *QUIET)
    assert treetrain(*argv, "--output_dir", tmp_path / "whole").code == 0
    monkeypatch.setattr(train, "_trainer", stops)
    stopped = treetrain(*argv, "--output_dir", tmp_path / "out")
    assert stopped.code == 143 and "the same command and --resume_from_checkpoint true" in stopped.err
    monkeypatch.setattr(train, "_trainer", make)
    assert treetrain(*argv, "--output_dir", tmp_path / "out", "--resume_from_checkpoint", "true").code == 0
    assert logged(tmp_path / "out") == logged(tmp_path / "whole")


@pytest.fixture
def config_file(token_file, model_folder, tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    lines = {
        "files": token_file,
        "model": model_folder,
        "output_dir": str(tmp_path / "out"),
        "loss": "grpo",
        "loss_kwargs": {"clip": 0.1},
        "updates_per_batch": 2,
        "lora": {"r": 2},
        "learning_rate": 1e-5,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    path.write_text(json.dumps(lines), encoding="utf-8")  # JSON is YAML
    return path


@pytest.mark.slow
def test_a_yaml_file_says_everything_and_flags_outweigh_it(treetrain, config_file, tmp_path) -> None:
    assert treetrain("train", config_file, "--max_steps", "3").code == 0
    out = tmp_path / "out"
    assert len(logged(out, "approx_kl")) == 3
    assert (out / "adapter_model.safetensors").is_file() and not (out / "model.safetensors").exists()
    arguments = torch.load(out / "training_args.bin", weights_only=False)
    assert arguments.learning_rate == 1e-5 and arguments.loss_kwargs == {"clip": 0.1}


def test_resume_from_checkpoint_false_begins_anew(treetrain, token_file, model_folder, tmp_path) -> None:
    argv = ("train", token_file, "--model", model_folder, "--output_dir", tmp_path / "out", "--max_steps", "1", *QUIET)
    assert treetrain(*argv, "--resume_from_checkpoint", "false").code == 0


ALIASES = b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 31))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: tiny\nseed: 1\nmodel: small", "run.yaml: 'model' is there twice, in lines 1 and 3"),
        (b"lora: {r: 1, r: 2}", "run.yaml: 'r' is there twice, in lines 1 and 1"),
        ("model: tiny".encode("utf-16"), "run.yaml: byte 0 is not UTF-8; save the file as UTF-8"),
        (b"model: \xff", "run.yaml: byte 7 is not UTF-8"),
        (b"model: !!python/object/apply:os.system [touch ran]", "could not determine a constructor"),
        (ALIASES, "run.yaml line 2: *a0 is an alias; write the value out"),
        (b"model: " + b"[" * 3000 + b"]" * 3000, "run.yaml line 1: values are nested more than 20 deep"),
        (b"model: 2020-13-45", "run.yaml: month must be in 1..12"),
        (b"model: tiny\nseed: 1" + b"#" * (1 << 20), "run.yaml has more than 1,048,576 bytes"),
    ],
)
def test_a_wrong_yaml_file_is_refused_in_one_line_and_runs_no_code(treetrain, tmp_path, content, message) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert message in treetrain("train", path, "--use_cpu", "true").error
    assert not (tmp_path / "ran").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("metric", ["nll", "eval_loss", "trained_tokens"])
def test_a_metric_that_evaluations_give_is_no_mistake(treetrain, token_file, model_folder, tmp_path, metric) -> None:
    argv = ("train", token_file, "--model", model_folder, "--output_dir", tmp_path / "out", "--max_steps", "2", *QUIET)
    more = ("--eval_data", token_file, "--eval_strategy", "steps", "--eval_steps", "1")
    answer = treetrain(*argv, *more, "--early_stopping_patience", "1", "--metric_for_best_model", metric)
    assert answer.code == 0, answer.err


def test_the_folder_is_named_before_the_run_also_if_none_is_given(
    treetrain, token_file, model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = treetrain("train", token_file, "--model", model_folder, "--max_steps", "1", *QUIET)
    assert answer.code == 0 and f"note: the run is written to {tmp_path / 'trainer_output'}\n" in answer.err
    assert f"the model is in {tmp_path / 'trainer_output'}\n" in answer.out


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "output_dir '' is blank"),
        ("/", "holds more than a run"),
        ("/etc/run", "in a folder of the system"),
        ("rows.jsonl", "is a file"),
        ("link", "which does not exist"),
        ("a\x07b", "control characters"),
    ],
)
def test_what_is_no_folder_for_a_run_is_refused_before_any_work(treetrain, tmp_path, monkeypatch, output, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("no row, and never read")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    argv = ("train", "rows.jsonl", "--model", "no/such-model", "--output_dir", output, *QUIET)
    assert message in treetrain(*argv).error


def test_models_and_earlier_runs_are_not_overwritten_unless_that_is_said(
    treetrain, token_file, model_folder, tmp_path
) -> None:
    argv = ("train", token_file, "--model", model_folder, "--max_steps", "1", *QUIET, "--output_dir")
    refusal = treetrain(*argv, model_folder).error
    assert f"{model_folder} is the folder of the model" in refusal and "--overwrite_output_dir true" in refusal
    out = tmp_path / "out"
    assert treetrain(*argv, out).code == 0
    before = (out / "model.safetensors").stat().st_mtime_ns
    refusal = treetrain(*argv, out).error
    assert f"such as {tmp_path / 'out-2'}" in refusal and "would overwrite at its end" in refusal
    assert treetrain(*argv, out, "--resume_from_checkpoint", "true").code == 2
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    assert treetrain(*argv, out, "--overwrite_output_dir", "true").code == 0


def test_a_resumed_run_with_another_learning_rate_is_refused_and_confirmed_by_a_flag(
    treetrain, token_file, model_folder, tmp_path
) -> None:
    argv = ("train", token_file, "--model", model_folder, "--output_dir", tmp_path / "out", *QUIET, "--save_strategy")
    argv = (*argv, "steps", "--save_steps", "1")
    assert treetrain(*argv, "--max_steps", "1").code == 0
    again = (*argv, "--max_steps", "2", "--resume_from_checkpoint", "true", "--learning_rate", "1e-3")
    with pytest.warns(RuntimeWarning, match="another length"):
        refusal = treetrain(*again)
    assert refusal.code == 2 and "learning_rate was 5e-05 and is 0.001" in refusal.err
    assert "--accept_changes true" in refusal.err
    with pytest.warns(RuntimeWarning, match="goes on with changes"):
        assert treetrain(*again, "--accept_changes", "true").code == 0


def test_weights_that_are_not_finite_at_the_end_are_no_success(treetrain, token_file, model_folder, tmp_path) -> None:
    argv = ("train", token_file, "--model", model_folder, "--output_dir", tmp_path / "out", *QUIET)
    answer = treetrain(*argv, "--max_steps", "1", "--learning_rate", "1e39", "--warmup_steps", "0")
    assert answer.code == 2 and "the weights are not finite after step 1" in answer.err.splitlines()[-1]
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_bad_row_is_named_by_file_and_line(treetrain, model_folder, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"input_ids": [5, -6]}) + "\n", encoding="utf-8")
    assert "rows.jsonl line 2" in treetrain("train", path, "--model", model_folder, *QUIET).error


def test_help_lists_the_arguments_of_both_libraries(treetrain) -> None:
    said = treetrain("train", "--help").out
    assert "--tokens_per_step" in said and "--learning_rate" in said and "YAML file" in said
