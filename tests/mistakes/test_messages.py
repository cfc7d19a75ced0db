"""What users read when they make a mistake: `messages.txt` holds every mistake and its answer.

`python tests/mistakes/test_messages.py` writes the answers anew.
"""

import contextlib
import gzip
import importlib
import io
import json
import linecache
import os
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import treetrain as tt
from support.models import make_model
from treetrain.cli import main
from treetrain.models.loading import load_tokenizer

PAGE = Path(__file__).with_name("messages.txt")
LONGEST = 400
TRAIN = ("--output_dir", "out", "--use_cpu", "true", "--disable_tqdm", "true")
RAN = Path("the-code-of-a-model-ran")
CODE = f"import pathlib; pathlib.Path({RAN.name!r}).touch()"


class Hostile:
    """A pickle of this writes a file when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (CODE,)


def make_files() -> None:
    """Write the files and folders that the mistakes name to the working directory."""
    good = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    rows = [good | {"reward": float(k), "group_id": "a", "input_ids": [5, 6, 7, 8 + k]} for k in range(4)]
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    texts = {
        "rows.jsonl": [json.dumps(row) for row in rows],
        "bare.jsonl": [json.dumps(good)] * 2,
        "chat.jsonl": [json.dumps(chat)] * 2,
        "empty.jsonl": [],
        "torn.jsonl": [json.dumps(good), json.dumps(good)[:20]],
        "letters.jsonl": [json.dumps(good | {"input_ids": ["a", "b", "c", "d"]})],
        "role.jsonl": [json.dumps({"messages": [{"role": "asistant", "content": "hi"}]})],
        "nan.jsonl": [json.dumps(good | {"reward": float("nan")})],
        "unknown.jsonl": ['{"text": "a story"}'],
        "big_ids.jsonl": [json.dumps(good | {"input_ids": [5, 6, 7, 99_999]})],
        "long.jsonl": [json.dumps({"input_ids": [5] * 600})],
        "untrained.jsonl": [json.dumps(good | {"loss_mask": [0, 0, 0, 0]})],
        "bad.jinja": ["{% for message in messages %}"],
        "device.toml": ["flops = 'many'"],
        "list.yaml": ["- model"],
        "torn.yaml": ["model: ["],
        "misspelt.yaml": ["files: rows.jsonl", "model: model", "learning_rat: 1"],
        "values.yaml": ["files: rows.jsonl", "model: model", "max_steps: many"],
    }
    for name, lines in texts.items():
        Path(name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    Path("binary.jsonl").write_bytes(bytes(range(128, 256)))
    Path("rows.parquet").write_bytes(b"PAR1 and no more")
    Path("rows.jsonl.gz").write_bytes(gzip.compress(Path("rows.jsonl").read_bytes())[:60])

    torch.manual_seed(0)
    model = make_model(vocab_size=2048, max_position_embeddings=256)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def folder(name: str, config: dict[str, Any] | str | None = None) -> Path:
        """Save the model there, with changes of its configuration."""
        path = Path(name)
        model.save_pretrained(path)
        load_tokenizer("tiny").save_pretrained(path)
        if isinstance(config, dict):
            config = json.dumps(json.loads((path / "config.json").read_text()) | config)
        if config is not None:
            (path / "config.json").write_text(config)
        return path

    folder("model")
    Path("empty").mkdir()
    folder("torn_config", '{"model_type": "qwen3", ')
    file = folder("torn_weights") / "model.safetensors"
    file.write_bytes(b"not tensors at all" * 10)
    file = folder("cut_weights") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    (folder("no_weights") / "model.safetensors").unlink()
    half = dict(list(weights.items())[: len(weights) // 2])
    save_file(half, folder("half_weights") / "model.safetensors", metadata={"format": "pt"})
    folder("wrong_shapes", {"intermediate_size": 48})
    path = folder("missing_shard")
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: "model-00001-of-00002.safetensors" for name in weights}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    path = folder("pickled")
    (path / "model.safetensors").unlink()
    torch.save(weights | {"hostile": Hostile()}, path / "pytorch_model.bin")
    path = folder("own_code", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}})
    (path / "mine.py").write_text(CODE)
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    folder("unknown_type", {"model_type": "qwen99"})
    folder("impossible", {"hidden_size": -24, "num_attention_heads": "four"})
    folder("encoder", {"model_type": "t5"})
    mamba = AutoConfig.for_model("mamba2", num_hidden_layers=2, hidden_size=32, num_heads=4, head_dim=16)
    mamba.save_pretrained("mamba")
    (folder("torn_tokenizer") / "tokenizer.json").write_text("{")


def names() -> dict[str, Any]:
    """Names that the mistakes in Python use."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    model = make_model()
    lists = [[5, 6, 7, 8], [5, 6, 9]]
    quiet: dict[str, Any] = {"output_dir": "out", "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    dataset = Dataset.from_dict({"input_ids": lists, "task": ["a", "a"]})
    return {
        "tt": tt,
        "torch": torch,
        "peft": importlib.import_module("peft"),
        "model": model,
        "lists": lists,
        "dataset": dataset,
        "rows": [tt.Trajectory(ids, reward=float(k), group="a") for k, ids in enumerate(lists)],
        "cost": tt.CostModel.from_shape(tt.ModelShape.named("qwen3-0.6b")),
        "engine": tt.TreeEngine(model),
        "tokenizer": load_tokenizer("tiny"),
        "args": lambda **more: tt.TreeArguments(**quiet, **more),
        "TrainingArguments": TrainingArguments,
        "plain": lambda: Trainer(make_model(), TrainingArguments(**quiet), train_dataset=dataset),
    }


@contextlib.contextmanager
def world() -> Iterator[dict[str, Any]]:
    """The files in a temporary working directory, and the names; no network, whatever was imported before."""
    constants = importlib.import_module("huggingface_hub.constants")
    before = Path.cwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
        mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        os.chdir(folder)
        try:
            make_files()
            yield names()
        finally:
            os.chdir(before)


def answer_of(case: str, known: dict[str, Any]) -> str:
    """Make a mistake and return what the user reads."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.startswith("$ "):
            argv = shlex.split(case)[2:]
            try:
                main([*argv, *TRAIN] if argv[0] == "train" else argv)
            except (Exception, SystemExit):
                traceback.print_exc()
            # Said before every run; the folder of the test has another name each time.
            lines = shown.getvalue().strip().splitlines()
            return "\n".join(line for line in lines if not line.startswith("note: the run is written to"))
        try:
            exec(case.removeprefix(">>> "), dict(known))
        except Exception as error:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            file = frame.f_code.co_filename
            ours = "treetrain" in file and linecache.getline(file, line).strip().startswith("raise ")
            return f"{'' if ours else 'TRACEBACK '}{type(error).__name__}: {error}"
    return "nothing was raised"


def cases() -> list[tuple[str, str]]:
    """The mistakes of the page and the answers below them."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [(line, below) for line, below in zip(lines, [*lines[1:], ""]) if line.startswith(("$ ", ">>> "))]


@pytest.fixture(scope="module")
def known() -> Iterator[dict[str, Any]]:
    with world() as found:
        yield found


@pytest.mark.parametrize(("case", "expected"), cases(), ids=[case for case, _ in cases()])
def test_a_mistake_is_answered_as_the_page_says(case: str, expected: str, known: dict[str, Any]) -> None:
    if "support.shapes" in sys.modules:  # users have no checks of shapes
        sys.modules["support.shapes"].set_checked(False)  # type: ignore[attr-defined]
    assert answer_of(case, known) == expected
    assert not RAN.exists()


def test_every_answer_is_one_line_of_at_most_400_characters_and_no_traceback() -> None:
    found = cases()
    assert len(found) >= 100
    for case, answer in found:
        raised = ("ValueError: ", "TypeError: ", "DataError: ", "UnsupportedModel: ", "AttributeError: ")
        assert answer.startswith("treetrain: error: " if case.startswith("$ ") else raised), case
        assert len(answer) <= LONGEST, case


def renew() -> None:
    """Write the page with the answers of now."""
    text = PAGE.read_text(encoding="utf-8").splitlines()
    with world() as known:
        old = dict(cases())
        kept = [line for number, line in enumerate(text) if number == 0 or text[number - 1] not in old or line in old]
        lines = [line for case in kept for line in ((case, answer_of(case, known)) if case in old else (case,))]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    renew()
