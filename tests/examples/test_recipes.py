"""The recipes for real models run as they are, with the built-in model in place of theirs."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from treetrain.cli import main
from treetrain.cli.train import parse_arguments, read_yaml
from treetrain.models.loading import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SHORT = {
    "dpo": (),
    "grpo_tools": ("--max_steps", "1", "--tokens_per_step", "20000"),
    "sft_lora": ("--max_steps", "1", "--tokens_per_step", "4096", "--eval_strategy", "no", "--save_strategy", "no"),
}
"""What makes a recipe shorter; the rest of its settings runs."""


@pytest.fixture
def here(monkeypatch):
    """The folder that the recipes' paths are seen from."""
    monkeypatch.chdir(ROOT)


def test_there_are_three_recipes_for_a_model_of_the_hub(here) -> None:
    assert [path.stem for path in RECIPES] == sorted(SHORT)
    for path in RECIPES:
        options, arguments = parse_arguments([str(path)])  # also where there is no GPU
        assert "/" in options.model and Path(options.files[0]).is_file()
        assert arguments.loss == path.stem.split("_")[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "sft_lora" else name for name in SHORT]
)
def test_a_recipe_trains_the_built_in_model(name, here, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    argv = [str(FOLDER / f"{name}.yaml"), "--model", "tiny", "--output_dir", str(out)]
    assert main(["train", *argv, *SHORT[name], "--disable_tqdm", "true"]) == 0, capsys.readouterr().err
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert any(entry.get("tree/overlap", 0) > 0.3 for entry in history), "the rows of its data share prefixes"
    settings = read_yaml(str(FOLDER / f"{name}.yaml"))
    assert isinstance(settings, dict)
    card = (out / "README.md").read_text()
    assert f"| loss | `{settings['loss']}`" in card and Path(settings["files"]).name in card
    assert (out / "adapter_model.safetensors").is_file() == ("lora" in settings)
    if "lora" in settings:
        merged(out, tmp_path / "merged")


def merged(adapter: Path, folder: Path) -> None:
    """The README's way to merge an adapter gives a model with the adapter's scores."""
    from peft import PeftModel

    ids = torch.tensor([[5, 6, 7, 8]])
    model = PeftModel.from_pretrained(load_model("tiny", seed=42), adapter)  # weights of a preset come from the seed
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if "lora_B" in name):
            parameter.normal_(std=0.02)  # one step has hardly moved it
        expected = model(input_ids=ids).logits
    model.merge_and_unload().save_pretrained(folder)
    load_tokenizer(str(adapter)).save_pretrained(folder)
    with torch.no_grad():
        assert torch.allclose(load_model(folder)(input_ids=ids).logits, expected, atol=1e-4)
    assert "im_start" in load_tokenizer(folder).chat_template, "the template that was trained is served"


def test_the_pairs_are_what_the_script_makes_of_the_games(tmp_path) -> None:
    from examples.recipes.make_pairs import PAIRS
    from examples.recipes.make_pairs import main as make

    assert make(tmp_path / "pairs.gz") == 11
    with gzip.open(PAIRS, "rt") as kept, gzip.open(tmp_path / "pairs.gz", "rt") as made:
        assert kept.read() == made.read()
