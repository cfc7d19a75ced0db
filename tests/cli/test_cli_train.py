"""`treetrain train`: a file in, a model folder out; bad input leaves nothing behind."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "reward": 1.0, "group_id": "a"}


def loads(folder: str | Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_training_writes_a_folder_that_transformers_loads(treetrain, token_file, model_folder, tmp_path) -> None:
    out = tmp_path / "out"
    answer = treetrain("train", token_file, "--model", model_folder, "--output", out, "--steps", "3", "--lr", "1e-2")
    assert answer.code == 0 and str(out) in answer.out and "overlap" in answer.out and "step 3/3" in answer.err
    loads(out)
    assert AutoTokenizer.from_pretrained(out)("hello")["input_ids"]
    kinds = [json.loads(line)["kind"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["start", "train", "train", "train", "end"]


def test_tree_and_linear_runs_agree_on_conversations(treetrain, chat_file, model_folder, tmp_path) -> None:
    argv = ("train", chat_file, "--model", model_folder, "--view", "calls", "--tokens-per-step", "150", "--epochs", "2")
    runs = {}
    for execution in ("tree", "linear"):
        out = str(tmp_path / execution)
        runs[execution] = treetrain(*argv, "--lr", "1e-2", "--execution", execution, "--output", out, "--json").json
    assert runs["tree"]["losses"] == pytest.approx(runs["linear"]["losses"], abs=1e-4)
    assert runs["tree"]["unique_tokens"] < runs["linear"]["unique_tokens"] == runs["tree"]["flat_tokens"]
    one, other = loads(tmp_path / "tree").state_dict(), loads(tmp_path / "linear").state_dict()
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


def test_a_policy_loss_trains_on_recorded_rewards(treetrain, token_file, model_folder, tmp_path) -> None:
    argv = ("train", token_file, "--model", model_folder, "--loss", "grpo", "--clip-high", "0.28", "--steps", "1")
    answer = treetrain(*argv, "--output", tmp_path / "out", "--eval-fraction", "0.25", "--json")
    assert answer.code == 0 and len(answer.json["eval_nll"]) == 2
    assert "note: advantages: the rewards" in answer.err and "on-policy" in answer.err


def test_a_preset_is_trained_with_its_tokenizer_and_the_template_that_was_used(treetrain, chat_file, tmp_path) -> None:
    out = tmp_path / "out"
    argv = ("train", chat_file, "--model", "tiny", "--chat-template", "chatml", "--steps", "1", "--output", out)
    assert treetrain(*argv).code == 0
    assert loads(out).config.vocab_size == 2048
    from treetrain.data.rendering import chat_template_text

    assert AutoTokenizer.from_pretrained(out).chat_template == chat_template_text("chatml")


CONFIG = """
lr = 1e-2
epochs = 3
max_grad_norm = "None"

[data]
data = ["{file}"]

[model]
model = "{model}"

[output]
output = "{out}"
report = false
"""


@pytest.fixture
def config_file(token_file, model_folder, tmp_path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(file=token_file, model=model_folder, out=tmp_path / "out"))
    return path


def stored(folder: Path) -> dict:
    return json.loads((folder / "train_config.json").read_text())["config"]


def test_a_file_says_the_whole_run_and_flags_outweigh_it(
    treetrain, config_file, token_file, model_folder, tmp_path
) -> None:
    assert treetrain("train", "--config", config_file, "--lr", "5e-3", "--steps", "2").code == 0
    said = stored(tmp_path / "out")
    assert (said["lr"], said["steps"], said["epochs"], said["max_grad_norm"]) == (5e-3, 2, None, None)
    assert (said["data"], said["model"]) == ([token_file], model_folder)


def test_files_on_the_command_line_take_the_place_of_those_in_the_config(treetrain, config_file, tmp_path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(row() + "\n" + row(reward=0.5))
    assert treetrain("train", other, f"--config={config_file}").code == 0
    assert stored(tmp_path / "out")["data"] == [str(other)]


def test_the_stored_config_runs_the_same_run_again(treetrain, config_file, tmp_path) -> None:
    first = treetrain("train", "--config", config_file, "--seed", "3", "--json").json
    stored_file = tmp_path / "out" / "train_config.toml"
    again = treetrain("train", "--config", stored_file, "--output", tmp_path / "again", "--json").json
    assert again["losses"] == first["losses"] and again["output"] == str(tmp_path / "again")
    assert stored(tmp_path / "again") == stored(tmp_path / "out") | {"output": str(tmp_path / "again")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rate = 1.0", "unknown setting learning_rate = 1.0"),
        ("lora_rank = 2.5", "lora_rank is 2.5; allowed are whole numbers from 0"),
        ("schedule = 'step'", "schedule is 'step'; allowed are cosine, linear, constant, wsd"),
        ("[evaluations]", "unknown table [evaluations]"),
        ("lr = ", "is no TOML"),
    ],
)
def test_a_bad_config_is_one_line_that_names_the_file_and_nothing_is_written(
    treetrain, tmp_path, token_file, model_folder, line, message
) -> None:
    path, out = tmp_path / "bad.toml", tmp_path / "out"
    path.write_text(line)
    error = treetrain("train", token_file, "--model", model_folder, "--output", out, "--config", path).error
    assert message in error and str(path) in error and not out.exists()
    assert "missing.toml" in treetrain("train", token_file, "--config", "missing.toml").error


def test_the_help_shows_sections_and_what_a_config_changes(treetrain, config_file) -> None:
    shown = treetrain("train", "--config", config_file, "--help").out
    assert "(default: 0.01)" in shown and "adapter options" in shown and "FILE..." in shown
    assert "(required)" not in shown


def test_the_example_config_is_a_run(monkeypatch) -> None:
    from treetrain.cli.parse import parse
    from treetrain.cli.train import TrainOptions

    monkeypatch.chdir(Path(__file__).parents[2])
    argv = ["--config", "examples/countdown/train.toml"]
    options = parse(TrainOptions, argv, command="train", summary="", examples=())
    assert options.keep_best and options.schedule == "wsd" and all(Path(name).exists() for name in options.data)


def test_an_adapter_is_trained_and_the_best_weights_are_told(treetrain, token_file, model_folder, tmp_path) -> None:
    argv = ("--lora-rank", "2", "--lora-targets", "q_proj", "v_proj", "--eval-fraction", "0.3", "--keep-best")
    answer = treetrain(
        "train", token_file, "--model", model_folder, "--output", tmp_path / "out", *argv, "--steps", "2"
    )
    assert answer.code == 0 and "adapter" in answer.out and "the weights saved are those of step" in answer.out
    assert (tmp_path / "out" / "adapter_config.json").exists()


def row(**changes) -> str:
    return json.dumps(GOOD | changes)


def chat(role: str = "assistant") -> str:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": role, "content": "Ho"}]})


BAD = {
    "a broken line": ([row(), '{"input_ids": [5, 6'], 2, "broken JSON"),
    "an id outside the vocabulary": ([row(), row(), row(input_ids=[5, 6, 7, 2048])], 3, "2048"),
    "lengths that disagree": ([row(), row(loss_mask=[1])], 2, "loss_mask has 1 entries"),
    "a NaN weight": ([row(loss_mask=None, loss_weights=[0.0, float("nan"), 1.0, 1.0])], 1, "loss_weights[1]"),
    "a NaN reward": ([row(), row(reward=float("nan"))], 2, "reward"),
    "a row longer than the model's positions": ([row(input_ids=[5] * 300, loss_mask=[1] * 300)], 1, "256 positions"),
    "an unknown role": ([chat(), chat("robot")], 2, "unknown role 'robot'"),
    "an empty file": ([], None, "is empty"),
    "nothing trained": ([row(loss_mask=[0, 0, 0, 0])], None, "nothing to train"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_the_place_and_nothing_is_written(
    treetrain, tmp_path, model_folder, case
) -> None:
    lines, number, message = BAD[case]
    path, out = tmp_path / "bad.jsonl", tmp_path / "out"
    path.write_text("\n".join(lines))
    error = treetrain("train", path, "--model", model_folder, "--output", out).error
    assert message in error and not out.exists()
    assert number is None or f"{path} line {number}" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--frobnicate", "1"], "--frobnicate"),
        (["--loss", "sft", "--kl", "0.1"], "no option 'kl'"),
        (["--loss", "ppo", "--clip", "7"], "clip"),
        (["--budget", "0"], "budget=0"),
        (["--budget", "3XB"], "budget='3XB'"),
        (["--budget", "1GB", "--execution", "linear"], "linear execution packs tokens"),
        (["--tools", "missing.json"], "missing.json"),
        (["--eval-data", "missing.jsonl"], "missing.jsonl"),
        (["--lr", "0"], "lr is 0"),
        (["--loss", "dr_grpo"], "needs the option 'length'"),
        (["--loss", "dpo"], "has no pair"),
        (["--lora-dora"], "lora_dora is True, which needs a lora_rank above 0"),
        (["--keep-best"], "keep_best is True, which needs something held out"),
        (["--optimizer", "lion"], "--optimizer"),
    ],
)
def test_bad_settings_are_one_line_and_nothing_is_written(
    treetrain, tmp_path, token_file, model_folder, argv, message
) -> None:
    out = tmp_path / "out"
    assert message in treetrain("train", token_file, "--model", model_folder, "--output", out, *argv).error
    assert not out.exists()


def test_a_missing_file_and_a_missing_model_are_named(treetrain, tmp_path, token_file, model_folder) -> None:
    out = tmp_path / "out"
    assert "missing.jsonl" in treetrain("train", "missing.jsonl", "--model", model_folder, "--output", out).error
    assert "/no/model" in treetrain("train", token_file, "--model", "/no/model", "--output", out).error
    assert not out.exists()


def test_an_output_that_holds_a_model_needs_overwrite(treetrain, token_file, model_folder, tmp_path) -> None:
    argv = ("train", token_file, "--model", model_folder, "--output", tmp_path / "out", "--steps", "1")
    assert treetrain(*argv).code == 0
    assert "--overwrite" in treetrain(*argv).error
    assert treetrain(*argv, "--overwrite").code == 0
