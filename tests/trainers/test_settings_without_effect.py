"""Settings that would be ignored, or count as another value, are refused in words."""

from pathlib import Path
from typing import Any

import pytest

from support.tree_runs import branching_rows, make_arguments, small_model
from treetrain.trainers.arguments import TreeArguments
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
