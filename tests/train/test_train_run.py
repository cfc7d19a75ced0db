"""The trainer end to end, on a model of 20 thousand weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from branching import branching_rows, write_rows
from small_runs import records
from transformers import AutoModelForCausalLM

from treetrain.data.advantages import group_advantages
from treetrain.data.load import load
from treetrain.engine.engine import TreeEngine
from treetrain.errors import DataError, UnsupportedModel
from treetrain.models.loading import load_model
from treetrain.train.config import TrainConfig
from treetrain.train.objective import ObjectiveSettings, make_objective
from treetrain.train.signals import Interrupted
from treetrain.train.trainer import Trainer, train

RUN_SETTINGS = {"steps": 4}
"""Of `make_config`."""


def weights(folder: str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def largest_difference(one: str, other: str) -> float:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("changes", [{}, {"loss": "grpo"}, {"dtype": "bfloat16"}])
def test_tree_and_linear_take_the_same_steps_to_the_same_weights(make_config, tmp_path, changes) -> None:
    tree = train(make_config(**changes, output=str(tmp_path / "tree"), execution="tree"))
    linear = train(make_config(**changes, output=str(tmp_path / "linear"), execution="linear"))
    loose = "dtype" in changes
    assert np.allclose(tree.losses, linear.losses, atol=2e-2 if loose else 1e-4)
    assert loose or largest_difference(tree.output, linear.output) < 1e-4
    same = ("trajectories", "flat_tokens", "lr", "epoch")
    for one, other in zip(records(tree), records(linear), strict=True):
        assert [one[name] for name in same] == [other[name] for name in same]
        assert one["unique_tokens"] < other["unique_tokens"] == other["flat_tokens"]


def test_a_run_is_what_a_flat_loop_over_the_plain_model_does(make_config, model_folder) -> None:
    config = make_config(steps=5, lr=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5, schedule="constant")
    prepared = Trainer(config).prepared
    result = train(config)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], weight_decay=0.1)
    losses, norms = [], []
    for (_, numbers), lr in zip(prepared.plan.steps(5), [5e-4, 1e-3, 1e-3, 1e-3, 1e-3], strict=True):
        rows = [prepared.rows[number] for number in numbers]
        total = torch.zeros(())
        for row in rows:
            ids = torch.from_numpy(row.ids).long()
            losses_of_row = torch.nn.functional.cross_entropy(
                model(ids[None]).logits[0, :-1], ids[1:], reduction="none"
            )
            total = total + (losses_of_row * torch.from_numpy(row.weights[1:])).sum()
        loss = total / sum(row.weights.sum() for row in rows)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        losses.append(float(loss.detach()))
    assert result.losses == pytest.approx(losses, abs=1e-5)
    assert [step["grad_norm"] for step in records(result)] == pytest.approx(norms, rel=1e-4)
    trained = weights(result.output)
    assert all(torch.allclose(trained[name], value, atol=1e-5) for name, value in model.state_dict().items())


def test_every_step_is_measured(make_config) -> None:
    result = train(make_config())
    steps = records(result)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and result.steps == 4
    assert tuple(step["loss"] for step in steps) == result.losses
    for step in steps:
        assert step["flat_tokens"] == 120 and step["overlap"] == 1 - step["unique_tokens"] / 120
        assert 0 < step["computed_tokens"] <= step["unique_tokens"]
        assert step["flat_tokens_per_second"] == pytest.approx(120 / step["seconds"])
        assert 0 < step["forward_backward_seconds"] < step["seconds"]
        assert step["grad_norm"] > 0 and step["lr"] > 0 and step["nll"] == pytest.approx(step["loss"], rel=1e-5)
        assert step["peak_memory_bytes"] > 50e6
    assert len(records(result, "start")) == len(records(result, "end")) == 1


def test_the_output_loads_as_the_trained_model_with_its_settings_beside_it(make_config, model_folder) -> None:
    config = make_config()
    result = train(config)
    assert largest_difference(result.output, model_folder) > 1e-3
    stored = json.loads((Path(result.output) / "train_config.json").read_text())
    assert TrainConfig(**stored["config"]) == config and stored["versions"]["torch"] == torch.__version__
    assert not list(Path(result.output).glob(".saving*"))


def test_the_loss_falls_and_what_is_held_out_gets_likelier(make_config) -> None:
    result = train(make_config(steps=20, eval_fraction=0.2, eval_every_steps=8))
    assert [step for step, _ in result.eval_nll] == [0, 8, 16, 20]
    assert result.eval_nll[-1][1] < result.eval_nll[0][1] - 0.5
    assert result.losses[-1] < result.losses[0] - 0.5


def test_the_evaluation_is_the_mean_over_trained_tokens_of_the_held_out_rows(
    make_config, tmp_path, model_folder
) -> None:
    held = write_rows(tmp_path / "held.jsonl", branching_rows(groups=4, seed=9))
    result = train(make_config(steps=1, eval_data=(held,), tokens_per_step=50))
    rows = load(held).trajectories
    scores = TreeEngine(load_model(model_folder)).logprobs(rows)
    taken = torch.cat([score[torch.from_numpy(row.weights[1:] > 0)] for row, score in zip(rows, scores)])
    assert result.eval_nll[0] == (0, pytest.approx(-float(taken.mean()), rel=1e-5))
    assert records(result, "eval")[0]["trained_tokens"] == taken.numel() == 4 * 3 * 8


def test_held_out_rows_are_not_trained_on(make_config) -> None:
    prepared = Trainer(make_config(eval_fraction=0.5)).prepared
    kept, held = ({row.group for row in rows} for rows in (prepared.rows, prepared.eval_rows))
    assert len(kept) == len(held) == 3 and not kept & held


def test_a_file_for_evaluation_is_not_trained_on(make_config, tmp_path, data_file) -> None:
    held = write_rows(tmp_path / "held.jsonl", branching_rows(groups=2, seed=9))
    prepared = Trainer(make_config(eval_data=(held,))).prepared
    trained, kept_out = ([row.ids.tolist() for row in rows] for rows in (prepared.rows, prepared.eval_rows))
    assert trained == [row.ids.tolist() for row in load(data_file).trajectories]
    assert kept_out == [row.ids.tolist() for row in load(held).trajectories]


def test_the_same_seed_gives_the_same_run_bit_for_bit(make_config, tmp_path) -> None:
    one = train(make_config(output=str(tmp_path / "one")))
    two = train(make_config(output=str(tmp_path / "two")))
    other = train(make_config(output=str(tmp_path / "other"), seed=1))
    assert one.losses == two.losses != other.losses
    assert largest_difference(one.output, two.output) == 0.0


def test_the_seed_draws_the_weights_of_a_preset(make_config) -> None:
    drawn = [Trainer(make_config(model="tiny", seed=seed))._load() for seed in (0, 0, 1)]
    first, again, other = (next(model.parameters()) for model in drawn)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_bfloat16_is_autocast_over_float32_weights(make_config, tmp_path) -> None:
    exact = train(make_config(output=str(tmp_path / "exact"), steps=1, eval_fraction=0.2))
    rounded = train(make_config(output=str(tmp_path / "rounded"), steps=1, eval_fraction=0.2, dtype="bfloat16"))
    for one, other in ((exact.losses[0], rounded.losses[0]), (exact.eval_nll[0][1], rounded.eval_nll[0][1])):
        assert one != other and one == pytest.approx(other, abs=2e-2)
    assert all(value.dtype == torch.float32 for value in weights(rounded.output).values())


def test_a_record_is_on_disk_when_its_step_is_done(make_config, monkeypatch, tmp_path) -> None:
    original, seen = TreeEngine.forward_backward, []

    def forward_backward(self, *args, **kwargs):
        there = (tmp_path / "out" / "metrics.jsonl").exists()
        seen.append(len(records(tmp_path / "out")) if there else 0)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TreeEngine, "forward_backward", forward_backward)
    train(make_config())
    assert seen == [0, 1, 2, 3]


def test_epochs_decide_the_steps_where_no_steps_are_given(make_config) -> None:
    result = train(make_config(steps=None, epochs=2))
    assert result.steps == 6 and [step["epoch"] for step in records(result)] == [0, 0, 0, 1, 1, 1]
    assert result.flat_tokens == 2 * 6 * 3 * 20


def test_gradient_checkpointing_changes_nothing_but_memory(make_config, tmp_path) -> None:
    loaded = Trainer(make_config(gradient_checkpointing=True))._load()
    assert loaded.training and loaded.is_gradient_checkpointing
    plain = train(make_config(output=str(tmp_path / "plain")))
    again = train(make_config(output=str(tmp_path / "again"), gradient_checkpointing=True))
    assert np.allclose(plain.losses, again.losses, atol=1e-6)


def test_the_gradient_is_clipped_to_its_norm(make_config, tmp_path) -> None:
    free = train(make_config(steps=1, output=str(tmp_path / "free"), max_grad_norm=None))
    held = train(make_config(steps=1, output=str(tmp_path / "held"), max_grad_norm=1e-9, weight_decay=0.0))
    assert records(free)[0]["grad_norm"] == pytest.approx(records(held)[0]["grad_norm"])
    assert largest_difference(free.output, held.output) > 1e-3  # eps outweighs so small a gradient


def test_rewards_become_group_advantages_where_a_loss_needs_them(data_file) -> None:
    rows = load(data_file).trajectories
    made = make_objective("grpo", {}, rows)
    expected = group_advantages(rows)
    assert all((one.advantages == other.advantages).all() for one, other in zip(made.rows, expected))
    assert any("rewards" in note for note in made.notes)
    plain = make_objective("reinforce", {}, rows, ObjectiveSettings(advantage_mean=False, advantage_std=False))
    assert all((row.advantages == row.reward).all() for row in plain.rows)


def test_groups_with_nothing_to_compare_are_counted(data_file) -> None:
    rows = load(data_file).trajectories
    assert not any("equal rewards" in note for note in make_objective("grpo", {}, rows).notes)
    level = [row.replace(reward=1.0) if row.group in (0, 1) else row for row in rows]
    assert any(note.startswith("2 of 6 groups") for note in make_objective("grpo", {}, level).notes)


def test_recorded_advantages_are_left_alone_and_sft_needs_none(data_file) -> None:
    rows = [row.replace(advantages=2.0) for row in load(data_file).trajectories]
    assert all((row.advantages == 2.0).all() for row in make_objective("grpo", {}, rows).rows)
    assert all(row.advantages is None for row in make_objective("sft", {}, load(data_file).trajectories).rows)


def test_recorded_log_probabilities_are_used_and_missing_ones_mean_on_policy(data_file) -> None:
    rows = load(data_file).trajectories
    made = make_objective("ppo", {"clip": 0.1}, rows)
    assert made.loss.inner.on_policy and made.loss.inner.clip_high == 0.1  # type: ignore
    assert any("on-policy" in note for note in made.notes) and not made.computed
    recorded = [row.replace(old_logprobs=np.full(len(row), -1.0)) for row in rows]
    made = make_objective("ppo", {}, recorded)
    assert not made.loss.inner.on_policy and not any("on-policy" in note for note in made.notes)  # type: ignore
    with pytest.raises(DataError, match="old_logprobs"):
        make_objective("ppo", {}, [*recorded[:-1], rows[-1]])


def test_on_policy_is_the_same_as_log_probabilities_computed_before_the_update(data_file, model_folder) -> None:
    model = load_model(model_folder)
    engine = TreeEngine(model)
    rows = group_advantages(load(data_file).trajectories)
    gradients = []
    old = engine.logprobs(rows)
    before = [row.replace(old_logprobs=np.append(0.0, score.numpy())) for row, score in zip(rows, old)]
    for given in (rows, before):
        model.zero_grad()
        made = make_objective("grpo", {}, given)
        engine.forward_backward(made.rows, made.loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, atol=1e-7)


def test_an_interrupted_run_keeps_its_metrics_and_saves_no_model(make_config, monkeypatch, tmp_path) -> None:
    interrupt_at(monkeypatch, 3)
    with pytest.raises(Interrupted, match="after step 2 of 4"):
        train(make_config())
    assert [step["step"] for step in records(tmp_path / "out")] == [1, 2]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    original, calls = TreeEngine.forward_backward, []

    def forward_backward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TreeEngine, "forward_backward", forward_backward)


def test_a_run_that_fails_before_its_first_step_leaves_no_metrics_and_an_earlier_runs_as_they_were(
    make_config, monkeypatch, tmp_path
) -> None:
    def refuse(self, *args, **kwargs):
        raise UnsupportedModel("no")

    folder = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(TreeEngine, "forward_backward", refuse)
        with pytest.raises(UnsupportedModel):
            train(make_config())
    assert not folder.exists()
    train(make_config(steps=1))
    before = (folder / "metrics.jsonl").read_text()
    monkeypatch.setattr(TreeEngine, "forward_backward", refuse)
    with pytest.raises(UnsupportedModel):
        train(make_config(overwrite=True))
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_run_that_diverges_stops_and_saves_no_model(make_config, tmp_path) -> None:
    with pytest.raises(FloatingPointError, match=r"step \d"):
        train(make_config(lr=1e30, warmup_steps=0))
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("held", ["config.json", "model.safetensors", "metrics.jsonl"])
def test_an_output_folder_that_holds_a_model_or_a_run_is_refused_untouched(make_config, tmp_path, held) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / held).write_text("mine")
    with pytest.raises(ValueError, match=f"{held}.*--overwrite"):
        Trainer(make_config())
    assert (tmp_path / "out" / held).read_text() == "mine"


def test_overwrite_replaces_the_model_and_leaves_everything_else(make_config, tmp_path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (folder / name).write_text("old")
    result = train(make_config(overwrite=True))
    assert (folder / "notes.txt").read_text() == "old"
    assert not (folder / "model-00001-of-00002.safetensors").exists()
    assert not (folder / "model.safetensors.index.json").exists()
    weights(result.output)


def test_a_save_that_fails_leaves_the_old_model_whole_and_nothing_half_written(
    make_config, tmp_path, monkeypatch, model_folder
) -> None:
    before = train(make_config(steps=1))

    def fail(self, folder, **kwargs):
        (Path(folder) / "model.safetensors").write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    kept = {path.name: path.read_bytes() for path in Path(before.output).iterdir()}
    with pytest.raises(OSError, match="no space"):
        train(make_config(steps=2, overwrite=True))
    after = {path.name: path.read_bytes() for path in Path(before.output).iterdir()}
    assert {name for name in kept if kept[name] != after.get(name)} == {"metrics.jsonl"} and kept.keys() == after.keys()


def test_a_model_without_a_tokenizer_is_trained_on_token_rows_and_it_is_said(make_config) -> None:
    assert any("no tokenizer" in note for note in Trainer(make_config()).prepared.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ("missing.jsonl",)}, "missing.jsonl"),
        ({"loss": "sft", "kl": 0.1}, "no option 'kl'"),
        ({"loss": "grpo", "kl": 0.1, "reference_model": "/no/such/model"}, "/no/such/model"),
        ({"loss": "grpo", "reference_model": "tiny"}, "give kl above 0"),
        ({"loss": "grpo", "clip": 2.0}, "clip"),
        ({"device": "cuda"}, "no GPU"),
        ({"model": "no/such/model/anywhere"}, "no/such/model/anywhere"),
        ({"tokenizer": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_nothing_is_loaded_or_written_for_a_run_that_cannot_be(
    make_config, monkeypatch, tmp_path, changes, message
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    loaded: list[str] = []
    monkeypatch.setattr("treetrain.train.model.load_model", lambda *args, **kwargs: loaded.append("model"))
    with pytest.raises(ValueError, match=message):
        train(make_config(**changes))
    assert not loaded and not (tmp_path / "out").exists()


@pytest.mark.parametrize("budget", [40, 5, "100MB"])
def test_any_budget_gives_the_same_steps(make_config, tmp_path, budget) -> None:
    whole = train(make_config(output=str(tmp_path / "whole")))
    parts = train(make_config(output=str(tmp_path / "parts"), budget=budget))
    assert np.allclose(whole.losses, parts.losses, atol=1e-5)


def test_policy_losses_report_what_people_watch(make_config) -> None:
    step = records(train(make_config(loss="grpo", entropy=0.01, steps=1)))[0]
    assert {"policy_loss", "advantage", "ratio", "clip_fraction", "approx_kl", "entropy"} <= step.keys()
    assert step["ratio"] == pytest.approx(1.0)
