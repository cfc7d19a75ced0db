"""`treetrain train`: a file in, a model folder out; bad input is one line."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from treetrain.cli import train
from treetrain.models.loading import load_model
from treetrain.trainers.arguments import REFUSED, TreeArguments

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


def options_of(text: str) -> list[str]:
    """The options that a help lists, each once, without those in its sentences."""
    return [line.split()[0].removeprefix("--") for line in text.splitlines() if line.startswith("  --")]


def test_the_first_help_has_five_groups_on_a_screen(treetrain, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = treetrain("train", "--help").out
    lines = said.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    titles = [line for line in lines if re.fullmatch("[a-z]+:", line)]
    assert titles == ["data:", "model:", "loss:", "budget:", "run:"]
    assert "--tokens_per_step" in said and "--learning_rate" in said and "YAML" in said
    assert lines[-1] == "treetrain train --help-all shows the other arguments."
    first = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert first[0] == "FILE" and len(first) == len(set(first))


def test_the_whole_help_lists_every_argument_once_but_those_that_are_refused(treetrain, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = treetrain("train", "--help-all").out
    assert max(map(len, said.splitlines())) <= 100
    listed = options_of(said)
    known = {field.name for field in dataclasses.fields(TreeArguments)}
    own = {"view", "train", "eval_data", "model", "lora", "ref_model", "dry_run", "early_stopping_patience"}
    own |= {"format", "map", "where", "on_error", "tools", "chat_template", "tokenizer"}
    assert len(listed) == len(set(listed))
    assert {name for name in listed if not name.startswith("no_")} == (known - {*REFUSED, "save_on_each_node"}) | own


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_arguments_that_no_help_lists_are_refused(name, tmp_path) -> None:
    other = {"train_sampling_strategy": "group_by_length", "torch_compile_backend": "inductor"}
    value = other.get(name, {} if name == "liger_kernel_config" else 1)
    value = True if TreeArguments.__dataclass_fields__[name].default is False else value
    with pytest.raises(ValueError, match=f"{name} is .*, which TreeTrainer does not take"):
        TreeArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


# ---- A dry run


def value_of(text: str, name: str) -> str:
    """What a report says of something."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}  "))
    return line.removeprefix(name).strip()


def test_a_dry_run_says_what_the_run_then_does_and_writes_nothing(
    treetrain, token_file, model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("train", token_file, "--model", model_folder, "--output_dir", "out", "--tokens_per_step", "50", *QUIET)
    argv = (*argv, "--num_train_epochs", "1.5", "--logging_steps", "1", "--loss", "grpo", "--updates_per_batch", "2")
    before = sorted(tmp_path.rglob("*"))
    dry = treetrain(*argv, "--dry_run")
    assert dry.code == 0 and sorted(tmp_path.rglob("*")) == before
    assert dry.err.startswith(f"note: the run would be written to {tmp_path / 'out'}\n")
    assert treetrain(*argv).code == 0
    flat, unique = (logged(tmp_path / "out", f"tree/{name}_tokens") for name in ("flat", "unique"))
    assert value_of(dry.out, "steps").startswith(f"{len(flat)}, of about {sum(flat):,} tokens in all; a pass has 8,")
    assert value_of(dry.out, "data").endswith(f", {sum(flat[:8]) // 2:,} tokens")  # each row twice a pass
    said = value_of(dry.out, "sharing")
    assert said.startswith(f"{sum(flat[:8]):,} tokens in rows, {int(sum(unique[:8])):,} computed, overlap ")
    assert "old_logprobs: by the policy" in value_of(dry.out, "computed first")
    assert "alive at once" in dry.out and dry.out.endswith("nothing was trained or written\n")
    logs = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert logs["global_step"] == 12


def test_a_dry_run_counts_the_bytes_of_weights_and_of_the_adapter_alone(treetrain, token_file, tmp_path) -> None:
    argv = ("train", token_file, "--model", "tiny", "--output_dir", tmp_path / "out", "--dry_run", *QUIET)
    whole = sum(p.nbytes for p in load_model("tiny").parameters()) / 2**20
    said = value_of(treetrain(*argv).out, "predicted memory")
    parts = f"weights {whole:.1f} MiB, gradients {whole:.1f} MiB, optimizer state {2 * whole:.1f} MiB, activations"
    assert parts in said and "not counted" not in said
    said = value_of(treetrain(*argv, "--lora", '{"r": 8}').out, "predicted memory")
    assert f"gradients {whole:.1f} MiB" not in said
    said = treetrain(*argv, "--optim", "adafactor", "--execution", "linear").out
    assert "not counted: optimizer state" in value_of(said, "predicted memory")
    assert value_of(said, "sharing") == "none: --execution linear computes every row by itself"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model", "no/such-model"), "no/such-model"),
        (("--output_dir", "/etc/run"), "in a folder of the system"),
        (("--loss", "dpo"), "is trained but has no pair"),
        (("--minibatches", "9"), "minibatches is 9, but the rows are 4 groups"),
        (("--resume_from_checkpoint", "nothing"), "nothing"),
        (("--optim", "sgd", "--optim_args", "foo=1"), "takes no foo"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    treetrain, token_file, model_folder, tmp_path, more, message, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ("train", token_file, "--model", model_folder, "--output_dir", "out", *QUIET, *more)
    dry = treetrain(*argv, "--dry_run", "true")
    assert dry.code == 2 and message in dry.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert treetrain(*argv, "--max_steps", "1").err.splitlines()[-1] == dry.err.splitlines()[-1]


def test_a_dry_run_lists_no_skipped_records(treetrain, token_file, model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open(token_file, "a", encoding="utf-8") as file:
        file.write("\nno record")
    argv = ("train", token_file, "--model", model_folder, "--output_dir", "out", *QUIET, "--on_error", "skip")
    said = treetrain(*argv, "--dry_run")
    assert said.code == 0 and "would be listed in treetrain-skipped.txt" in said.err
    assert not (tmp_path / "treetrain-skipped.txt").exists()


# ---- What a run leaves


def test_a_card_says_what_was_trained_and_replaces_no_file(
    treetrain, token_file, model_folder, tmp_path, caplog
) -> None:
    out = tmp_path / "out"
    argv = ("train", token_file, "--model", model_folder, "--output_dir", out, "--max_steps", "1", *QUIET)
    assert treetrain(*argv, "--loss", "grpo", "--loss_kwargs", '{"clip": 0.3}', "--lora", '{"r": 2}').code == 0
    card = (out / "README.md").read_text()
    for words in ("library_name: peft", "| `rows.jsonl` (12 rows) |", '`grpo` with `{"clip": 0.3}`', "LORA, r=2"):
        assert words in card, words
    assert f"torch {torch.__version__}" in card and "More Information Needed" not in card
    assert "stays" not in caplog.text
    (out / "README.md").write_text("---\ntags: [mine]\n---\nMy own words.\n")
    assert treetrain(*argv, "--overwrite_output_dir", "true").code == 0
    assert (out / "README.md").read_text() == "---\ntags: [mine]\n---\nMy own words.\n"
    assert f"{out}/README.md is there and stays" in caplog.text


def test_logs_go_to_several_places(treetrain, token_file, model_folder, tmp_path) -> None:
    argv = ("train", token_file, "--model", model_folder, "--output_dir", tmp_path / "out", "--use_cpu", "true")
    error = treetrain(*argv, "--report_to", "tensorboard", "nowhere").error
    assert "report_to is 'nowhere'" in error or "report_to is 'tensorboard', which is not installed" in error
