"""Settings that would be ignored, or count as another value, are refused in words."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import treetrain as tt
from support.tree_runs import branching_rows, make_arguments, small_model
from treetrain.core.engine.loss_gradients import predictions_of
from treetrain.core.errors import DataError
from treetrain.core.tree.layout import AttentionRange
from treetrain.trainers.arguments import TreeArguments
from treetrain.trainers.run_folder import FolderRefused, check_contents
from treetrain.trainers.tree_trainer import TreeTrainer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overwrite_output_dir": "false"}, "overwrite_output_dir is 'false'; give True or False"),
        ({"accept_changes": 1}, "accept_changes is 1; give True or False"),
        ({"compile_layers": "x"}, "compile_layers is 'x'; give True or False"),
        ({"dataloader_prefetch_factor": 0}, "dataloader_prefetch_factor is 0; give a whole number from 1"),
        ({"dataloader_num_workers": 1.5}, "dataloader_num_workers is 1.5; give a whole number from 0"),
    ],
)
def test_values_of_another_kind_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        TreeArguments(str(tmp_path), use_cpu=True, report_to="none", **settings)


def test_a_folder_may_be_given_as_a_path(tmp_path: Path) -> None:
    assert TreeArguments(tmp_path / "out", use_cpu=True, report_to="none").output_dir == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("optim", "options", "ignored"),
    [("adamw_torch", "a=b", "a"), ("sgd", "momentum=0.5,x=1", "x"), ("sgd", "momentum=0.5", "")],
)
def test_options_that_the_optimizer_does_not_take_are_refused(optim, options, ignored, tmp_path: Path) -> None:
    def make() -> TreeTrainer:
        return TreeTrainer(small_model(), make_arguments(tmp_path, optim=optim, optim_args=options), branching_rows())

    if not ignored:
        assert make().create_optimizer().defaults["momentum"] == 0.5
        return
    with pytest.raises(ValueError, match=f"the optimizer {optim} takes no {ignored}; take it out"):
        make()


def test_modules_to_train_beside_an_adapter_that_match_nothing_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for name, message in (("lm_heads", "did you mean lm_head"), ("lm_head", "")):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[name])
        if message:
            with pytest.raises(ValueError, match=f"has no module '{name}', so none would be trained; {message}"):
                TreeTrainer(small_model(), make_arguments(tmp_path), branching_rows(), peft_config=config)
        else:
            TreeTrainer(small_model(), make_arguments(tmp_path), branching_rows(), peft_config=config)


@pytest.mark.parametrize("size", [1.5, "x", True, 0])
def test_a_window_that_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="give one size, a whole number of at least 1, or none"):
        AttentionRange(window=size)


def test_a_mask_with_anything_but_zeros_and_ones_is_refused() -> None:
    ids = torch.ones(1, 3, dtype=torch.int64)
    for wrong in (math.nan, 0.5, 2.0):
        with pytest.raises(DataError, match=r"attention_mask\[0, 1\] is .*; give 1 for tokens and 0 for padding"):
            tt.from_padded(ids, torch.tensor([[1.0, wrong, 1.0]]))
    assert len(tt.from_padded(ids, torch.tensor([[0.0, 1.0, 1.0]]))[0]) == 2


def test_a_mask_of_predictions_with_nan_is_refused() -> None:
    tree = tt.build_tree([[1, 2, 3], [1, 2]])
    assert predictions_of(tree, [[0.5, 0], [1]]).tolist() == [False, True, False, False, True]
    for mask in ([[1, 1], [math.nan]], [torch.ones(2), torch.tensor([math.nan])]):
        with pytest.raises(DataError, match=r"mask\[1\]\[0\] is nan"):
            predictions_of(tree, mask)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    other = torch.optim.SGD(small_model(seed=2).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="the optimizer has parameters that are not the model's"):
        TreeTrainer(small_model(), make_arguments(tmp_path), branching_rows(), optimizers=(other, None))


def test_a_run_in_the_folder_that_one_is_in_says_what_is_in_the_way(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FolderRefused, match=rf"new output_dir such as {tmp_path}-2"):
        check_contents(Path("."), resume=None, overwrites=False, models=[], how="overwrite")
