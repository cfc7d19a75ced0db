"""A run goes on with what it began with: other models, data and settings are named, and odd files are one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_runs import SafeTrainer, StopAt, make_trainer, make_tree_trainer, rows, tiny_model
from transformers import Qwen3ForCausalLM

from treetrain.core.errors import RanksDisagree
from treetrain.trainers import checkpoint_files, run_facts
from treetrain.trainers.checkpoints import TornCheckpoint


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 3, with checkpoints 2 and 3."""
    folder = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.raises(SystemExit):
        make_trainer(folder, callbacks=(StopAt(3),)).train()
    return folder


@pytest.fixture
def copied(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "out")


def refused(trainer: Any, which: Any = True) -> str:
    """The one line of a refusal."""
    with pytest.raises(ValueError, match=r"cannot go on from .*checkpoint-3") as told:
        trainer.train(resume_from_checkpoint=which)
    assert trainer.state.global_step == 0 and len(str(told.value)) <= 400 and "\n" not in str(told.value)
    return str(told.value)


SETTINGS: dict[str, Any] = {
    "learning_rate": (0.02, "learning_rate was 0.01 and is 0.02"),
    "seed": (4, "seed was 3 and is 4"),
    "data_seed": (4, "data_seed was None and is 4"),
    "weight_decay": (0.1, "weight_decay was 0.0 and is 0.1"),
    "lr_scheduler_type": ("cosine", "lr_scheduler_type was linear and is cosine"),
    "warmup_steps": (1, "warmup_steps was 2 and is 1"),
    "max_grad_norm": (0.5, "max_grad_norm was 1.0 and is 0.5"),
    "label_smoothing_factor": (0.1, "label_smoothing_factor was 0.0 and is 0.1"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_named_with_both_values(name: str, copied) -> None:
    value, said = SETTINGS[name]
    text = refused(make_trainer(copied, **{name: value}))
    assert said in text and "say so with trainer.accept_changes = True" in text


def test_another_optimizer_is_refused_whatever_is_accepted(copied) -> None:
    trainer = make_trainer(copied, optim="sgd")
    trainer.accept_changes = True
    assert "optim was adamw_torch" in refused(trainer) and "is sgd" in refused(trainer)


def changed_model(**changes: Any) -> Any:
    config = tiny_model().config
    for name, value in changes.items():
        setattr(config, name, value)
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("changes", [{"intermediate_size": 32}, {"num_hidden_layers": 1}], ids=str)
def test_another_model_is_refused_before_its_sizes_mismatch(changes: dict, copied) -> None:
    trainer = make_trainer(copied)
    trainer.model = trainer.model_wrapped = changed_model(**changes)
    trainer.accept_changes = True
    assert "parameters was" in refused(trainer)


def test_another_configuration_of_the_model_is_named(copied) -> None:
    trainer = make_trainer(copied, dropout=0.2)
    assert "config.attention_dropout was 0.1 and is 0.2" in refused(trainer)


@pytest.mark.parametrize("change", ["token", "order", "fewer"])
def test_other_data_are_refused(change: str, copied) -> None:
    trainer = make_trainer(copied)
    data = rows()
    if change == "token":
        data[7]["input_ids"][3] ^= 1
    elif change == "order":
        data[0], data[1] = data[1], data[0]
    else:
        data = data[:-1]
    trainer.train_dataset = data
    assert f"data was 20 rows, SHA-256 {'':.0}" in refused(trainer)


def test_a_changed_learning_rate_that_is_accepted_takes_effect(copied) -> None:
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 4}
    shutil.rmtree(copied)
    with pytest.raises(SystemExit):
        make_trainer(copied, callbacks=(StopAt(3),), **settings).train()
    trainer = make_trainer(copied, learning_rate=1e-3, weight_decay=0.5, logging_steps=1, **settings)
    trainer.accept_changes = True
    with pytest.warns(RuntimeWarning, match="goes on with changes: learning_rate was 0.01 and is 0.001"):
        trainer.train(resume_from_checkpoint=True)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([1e-3, 1e-3])
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.5, 0.0]


def test_another_length_is_a_warning(copied) -> None:
    with pytest.warns(RuntimeWarning, match="goes on at another length: max_steps was 12 and is 4"):
        make_trainer(copied, max_steps=4).train(resume_from_checkpoint=True)


def test_the_loss_and_the_rows_of_a_tree_trainer_are_compared(tmp_path) -> None:
    folder = tmp_path / "out"
    make_tree_trainer(folder, max_steps=1, save_steps=1).train()
    for settings, said in (
        ({"loss_kwargs": {"kl": 0.2}}, r"loss was .*0\.1.* and is .*0\.2"),
        ({"temperature": 0.5}, "temperature was 1.0 and is 0.5"),
        ({"budget": 100, "execution": "linear"}, None),  # changes no weights but by rounding
    ):
        trainer = make_tree_trainer(folder, max_steps=1, **settings)
        if said is None:
            trainer.train(resume_from_checkpoint=True)
        else:
            with pytest.raises(ValueError, match=said):
                trainer.train(resume_from_checkpoint=True)
    trainer = make_tree_trainer(folder, max_steps=1)
    trainer.train_dataset = [row.replace(reward=0.5) for row in trainer.train_dataset]
    with pytest.raises(ValueError, match="data was 18 rows"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_another_base_model_under_an_adapter_is_refused(tmp_path) -> None:
    peft = pytest.importorskip("peft")

    def make(scale: float) -> Any:
        trainer = make_trainer(tmp_path / "out", max_steps=2)
        model = tiny_model()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(scale)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        return SafeTrainer(model=model, args=trainer.args, train_dataset=rows())

    make(1.0).train()
    make(1.0).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"frozen weights was SHA-256 .* and is SHA-256"):
        make(1.5).train(resume_from_checkpoint=True)


def test_rows_that_draw_random_numbers_are_not_compared_and_cost_the_run_none() -> None:
    class Draws:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"x": torch.rand(2)}

    before = torch.get_rng_state()
    assert run_facts.facts_of_rows(Draws()) is None and torch.equal(before, torch.get_rng_state())
    with pytest.raises(ArithmeticError), run_facts._random_state_kept():
        torch.rand(3)
        raise ArithmeticError
    assert torch.equal(before, torch.get_rng_state())
    assert run_facts.facts_of_rows(iter([1])) is None and run_facts.facts_of_rows(None) is None


# ---- Forged and odd files


def forge(checkpoint: Path, **changes: Any) -> None:
    """Change a manifest and sign it again; None takes an entry away."""
    contents = json.loads((checkpoint / "manifest.json").read_text())["contents"] | changes
    contents = {name: value for name, value in contents.items() if value is not None}
    stored = {"contents": contents, "sha256": checkpoint_files._digest(contents)}
    (checkpoint / "manifest.json").write_text(json.dumps(stored))


def resign(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file, and its hash in the manifest."""
    (checkpoint / name).write_bytes(content)
    files = checkpoint_files.read_manifest(checkpoint)["files"]
    forge(checkpoint, files=files | {name: checkpoint_files._sha256(checkpoint / name)})


FORGED: dict[str, Any] = {
    "no order": lambda path: forge(path, order=None),
    "order of text": lambda path: forge(path, order="3"),
    "no files": lambda path: forge(path, files=None),
    "list of files": lambda path: forge(path, files=[]),
    "no facts": lambda path: forge(path, facts=None),
    "ranks of text": lambda path: forge(path, ranks="two"),
    "file elsewhere": lambda path: forge(path, files={"../../../etc/passwd": "0"}),
    "file of the system": lambda path: forge(path, files={"/etc/passwd": "0"}),
    "no object": lambda path: (path / "manifest.json").write_text("[]"),
    "deep": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    "no text": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "empty": lambda path: (path / "manifest.json").write_text(""),
    "pipe": lambda path: ((path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")),
    "link": lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_or_incomplete_manifest_is_one_line(name: str, copied) -> None:
    FORGED[name](copied / "checkpoint-3")
    with pytest.raises(TornCheckpoint, match=r"checkpoint-3: manifest\.json is missing or altered") as told:
        make_trainer(copied).train(resume_from_checkpoint=str(copied / "checkpoint-3"))
    assert "\n" not in str(told.value) and len(str(told.value)) <= 500


ODD: dict[str, Any] = {
    "state of text": lambda path: resign(path, "trainer_state.json", b"no json"),
    "state without steps": lambda path: resign(path, "trainer_state.json", b"{}"),
    "state of another type": lambda path: resign(path, "trainer_state.json", b'{"global_step": "x"}'),
    "optimizer of garbage": lambda path: resign(path, "optimizer.pt", b"garbage"),
    "weights of garbage": lambda path: resign(path, "model.safetensors", b"garbage" * 10),
    "schedule of garbage": lambda path: resign(path, "scheduler.pt", b""),
    "progress of garbage": lambda path: resign(path, "trainer_0.pt", b"garbage"),
    "callbacks of garbage": lambda path: resign(path, "callbacks.pt", b"garbage"),
    "random state of garbage": lambda path: resign(path, "rng_state.pth", b"garbage"),
}


@pytest.mark.parametrize("name", ODD)
def test_files_that_are_signed_but_make_no_sense_are_one_line(name: str, copied) -> None:
    ODD[name](copied / "checkpoint-3")
    refused_or_begun = make_trainer(copied)
    with pytest.raises((ValueError, TornCheckpoint), match="checkpoint-3") as told:
        refused_or_begun.train(resume_from_checkpoint=True)
    assert "\n" not in str(told.value) and len(str(told.value)) <= 500


@pytest.mark.slow
def test_a_pickle_that_would_run_code_is_not_run(copied, tmp_path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("optimizer.pt", "trainer_0.pt", "callbacks.pt", "scheduler.pt", "rng_state.pth"):
        path = shutil.copytree(copied, tmp_path / name)
        torch.save(Runs(), tmp_path / "pickle")
        resign(path / "checkpoint-3", name, (tmp_path / "pickle").read_bytes())
        with pytest.raises(ValueError, match="checkpoint-3"):
            make_trainer(path).train(resume_from_checkpoint=True)
    assert not (tmp_path / "ran").exists()


EXTRA: dict[str, Any] = {
    "file": lambda path: (path / "adapter_model.safetensors").write_text("more"),
    "folder": lambda path: (path / "pytorch_model_fsdp_0").mkdir(),
    "pipe": lambda path: os.mkfifo(path / "odd"),
    "link": lambda path: (path / "odd").symlink_to(path),
    "socket-like name": lambda path: (path / "odd\nname").write_text("x"),
}


@pytest.mark.parametrize("name", EXTRA)
def test_what_was_not_written_is_named_and_not_loaded_or_deleted(name: str, copied) -> None:
    EXTRA[name](copied / "checkpoint-3")
    before = sorted((copied / "checkpoint-3").iterdir())
    with pytest.raises(ValueError, match=r"checkpoint-3 holds .*, which a checkpoint does not: move it away") as told:
        make_trainer(copied).train(resume_from_checkpoint=True)
    assert "\n" not in str(told.value) and sorted((copied / "checkpoint-3").iterdir()) == before


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_file_that_is_no_file_is_torn(kind: str, copied) -> None:
    path = copied / "checkpoint-3" / "optimizer.pt"
    path.rename(copied / "aside")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(copied / "aside")
    else:
        path.mkdir()
    with pytest.warns(RuntimeWarning, match=r"not whole: .*optimizer\.pt"):
        make_trainer(copied, max_steps=3).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", ["file", "pipe", "nothing", "folder"])
def test_what_is_no_checkpoint_is_one_line_when_it_is_named(kind: str, tmp_path) -> None:
    path = tmp_path / "checkpoint-9"
    if kind == "file":
        path.write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(TornCheckpoint, match=r"checkpoint-9: manifest\.json is missing or altered"):
        make_trainer(tmp_path / "new").train(resume_from_checkpoint=str(path))


@pytest.mark.parametrize(
    ("of_versions", "of_facts", "said"),
    [
        ({"transformers": "5.0.0"}, {}, r"the ranks differ in transformers: rank 0 has '5.*', rank 1 '5.0.0'"),
        ({}, {"learning_rate": 0.5}, r"the ranks differ in learning_rate: rank 0 has .*, rank 1 0.5"),
        ({}, {"data": "other rows"}, "the ranks differ in data"),
        ({}, {"data": None}, None),  # streamed rows are not known
    ],
)
def test_ranks_that_begin_with_something_else_are_named(tmp_path, of_versions, of_facts, said) -> None:
    trainer = make_trainer(tmp_path / "out")
    trainer._resumed = None
    alone = trainer._together

    def with_another(work: Any) -> list[Any]:
        (found,) = alone(work)
        if not isinstance(found, tuple):
            return [found]
        versions, facts = found
        return [found, (versions | of_versions, facts | of_facts)]

    trainer._together = with_another
    if said is None:
        trainer._compare_facts()
    else:
        with pytest.raises(RanksDisagree, match=said):
            trainer._compare_facts()
