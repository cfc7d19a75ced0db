"""The settings of a run are checked when they are made."""

import inspect
import json
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from treetrain.cli.train import TrainOptions
from treetrain.losses import LOSSES, by_name
from treetrain.train.checks import HINTS
from treetrain.train.config import LOSS_OPTIONS, NO_SETTINGS, TrainConfig
from treetrain.train.config_file import read_settings
from treetrain.train.settings import LossName

BASE: dict[str, Any] = {"data": ("rows.jsonl",), "model": "tiny", "output": "out"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr", -1e-3),
        ("weight_decay", -0.1),
        ("beta1", 1.0),
        ("beta2", 1.5),
        ("min_lr_ratio", 2.0),
        ("warmup_fraction", -0.1),
        ("warmup_steps", -1),
        ("eval_fraction", 1.0),
        ("temperature", 0.0),
        ("max_grad_norm", 0.0),
        ("epochs", 0),
        ("epochs", 1.5),
        ("steps", True),
        ("tokens_per_step", 0),
        ("budget", 0),
        ("threads", 0),
        ("seed", -1),
        ("schedule", "step"),
        ("loss", "mse"),
        ("dtype", "float16"),
        ("execution", "both"),
        ("view", "turns"),
        ("device", "tpu"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as error:
        TrainConfig(**BASE, **{name: value})
    assert f"{value!r}".rstrip("0").rstrip(".") in str(error.value)


@pytest.mark.parametrize(
    "both",
    [
        {"epochs": 1, "steps": 10},
        {"warmup_steps": 3, "warmup_fraction": 0.1},
        {"eval_data": ("held.jsonl",), "eval_fraction": 0.1},
    ],
)
def test_one_thing_said_in_two_ways_is_refused_and_both_are_named(both: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        TrainConfig(**BASE, **both)
    assert all(name in str(error.value) for name in both)


def test_evaluating_every_so_often_needs_something_held_out() -> None:
    with pytest.raises(ValueError, match="needs something held out"):
        TrainConfig(**BASE, eval_every_steps=5)


@pytest.mark.parametrize("name", ["data", "model", "output"])
def test_a_run_without_data_model_or_output_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TrainConfig(**{**BASE, name: "" if name != "data" else ()})


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        TrainConfig(**BASE, learning_rate=1.0)  # type: ignore[call-arg]


def test_a_config_survives_json_unchanged() -> None:
    config = TrainConfig(**BASE, eval_data=("a", "b"), steps=3, kl=0.1, loss="grpo", budget=100)
    assert TrainConfig(**json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize("budget", [1, 4096, "4096", "8GiB", "900 MB", None])
def test_a_budget_is_tokens_or_bytes_and_survives_json_as_given(budget: Any) -> None:
    config = TrainConfig(**BASE, budget=budget)
    assert TrainConfig(**json.loads(json.dumps(config.as_dict()))).budget == budget


@pytest.mark.parametrize("budget", [True, 1.5, "", "eight", "-1", "0GB"])
def test_a_budget_that_is_neither_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=f"budget={budget!r}"):
        TrainConfig(**BASE, budget=budget)


def test_linear_execution_packs_tokens_and_takes_no_bytes() -> None:
    assert TrainConfig(**BASE, execution="linear", budget="4096").budget == "4096"
    with pytest.raises(ValueError, match=r"budget is '1GB', but linear execution packs tokens"):
        TrainConfig(**BASE, execution="linear", budget="1GB")


def test_one_file_may_be_given_without_a_tuple() -> None:
    assert TrainConfig(**{**BASE, "data": "one.jsonl"}).data == ("one.jsonl",)


def test_every_loss_and_no_other_can_be_named_and_every_option_of_one_is_a_setting() -> None:
    assert set(get_args(LossName)) == set(LOSSES)
    options = {option for factory in LOSSES.values() for option in inspect.signature(factory).parameters}
    assert set(LOSS_OPTIONS).isdisjoint(NO_SETTINGS) and set(NO_SETTINGS) <= options
    assert options == set(LOSS_OPTIONS) | set(NO_SETTINGS)


@pytest.mark.parametrize("name", ["on_policy", "value_coefficient", "value_clip"])
def test_options_of_losses_that_no_run_takes_are_refused_by_name_with_what_to_do(name: str, tmp_path, capsys) -> None:
    told = f"{name} is an option of a loss, but no setting of a run: .*(value_head|old_logprobs)"
    with pytest.raises(ValueError, match=told):
        TrainConfig(**BASE, loss="ppo", **{name: 0.5})
    file = tmp_path / "run.toml"
    file.write_text(f"{name} = 0.5\n")
    with pytest.raises(ValueError, match=told):
        read_settings(file)
    with pytest.raises(ValueError, match=told):
        TrainOptions.defaults(["rows.jsonl", f"--{name.replace('_', '-')}", "0.5"])


def test_choices_are_those_of_the_losses() -> None:
    for name, factory in LOSSES.items():
        hints = get_type_hints(factory)
        for option in set(hints) & set(LOSS_OPTIONS):
            theirs, ours = (
                {value for part in (hint, *get_args(hint)) if get_origin(part) is Literal for value in get_args(part)}
                for hint in (hints[option], HINTS[option])
            )
            assert theirs == ours, (name, option)


def test_kto_in_several_calls_is_refused_unless_its_reference_point_is_a_number() -> None:
    with pytest.raises(ValueError, match=r"tokens_per_call is 64, but kto"):
        TrainConfig(**BASE, loss="kto", tokens_per_call=64)
    TrainConfig(**BASE, loss="kto", tokens_per_call=64, reference_point=0.5)
    with pytest.raises(ValueError, match="reference_point is 'row'; allowed are rows, mismatched and numbers"):
        TrainConfig(**BASE, loss="kto", reference_point="row")  # type: ignore[arg-type]


def test_the_options_of_a_loss_reach_it() -> None:
    values = {"clip": 0.1, "clip_low": 0.1, "clip_high": 0.1, "kl": 0.1, "kl_estimator": "k2", "entropy": 0.1}
    loss = by_name("ppo", **TrainConfig(**BASE, loss="ppo", reduction="trajectory", **values).loss_options)
    assert (loss.kl, loss.kl_estimator, loss.reduction) == (0.1, "k2", "trajectory")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"optimizer": "sgd", "beta1": 0.5}, "beta1 is 0.5, which needs optimizer adamw"),
        ({"optimizer": "adafactor", "beta2": 0.9}, "beta2 is 0.9, which needs optimizer adamw"),
        ({"schedule": "constant", "min_lr_ratio": 0.5}, "min_lr_ratio is 0.5, which needs a schedule that falls"),
        (
            {"loss": "grpo", "importance_mode": "token_mask"},
            "importance_mode is 'token_mask', which needs importance_cap",
        ),
        ({"best_metric": "nll"}, "best_metric is 'nll', which needs early_stop_patience or keep_best"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes: dict[str, Any], needs: str) -> None:
    with pytest.raises(ValueError, match=needs):
        TrainConfig(**BASE, **changes)


def test_options_that_are_not_given_are_left_to_the_loss() -> None:
    assert TrainConfig(**BASE, loss="grpo", clip=0.3).loss_options == {"clip": 0.3}


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 3), ({"warmup_fraction": 0.5}, 50), ({"warmup_steps": 7}, 7), ({"warmup_steps": 0}, 0)]
)
def test_warm_up_is_given_in_steps_or_as_a_share(given: dict[str, Any], expected: int) -> None:
    assert TrainConfig(**BASE, **given).warmup(100) == expected
