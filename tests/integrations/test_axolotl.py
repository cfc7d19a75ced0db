"""Axolotl's own trainer with and without the plugin, built by Axolotl from a configuration, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("axolotl", reason="axolotl is not installed; it needs an environment of its own: make test-axolotl")

from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from axolotl.utils.dict import DictDefault
from axolotl_runs import PLUGIN, trained

FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
        "reshard_after_forward": True,
        "state_dict_type": "FULL_STATE_DICT",
    },
}


def check(tree: list[dict[str, float]], plain: list[dict[str, float]], names: tuple[str, ...]) -> None:
    assert len(plain) > 3
    for ours, theirs in zip(tree[:3], plain[:3], strict=True):
        assert ours["tree/overlap"] > 0.3
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_losses_norms_and_weights_are_axolotls(tmp_path: Path) -> None:
    plain = trained(tmp_path)
    tree = trained(tmp_path, PLUGIN, tree_groups="input_ids", tree_budget=20)
    check(tree.state.log_history, plain.state.log_history, ("loss", "grad_norm", "tokens/trainable"))
    assert all(ours["tree/parts"] > 1 for ours in tree.state.log_history[:3])
    for ours, theirs in zip(tree.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def on_two_processes(folder: Path, **settings: Any) -> dict[str, Any]:
    """What process 0 logged, and the weights."""
    folder.mkdir()
    script = Path(__file__).with_name("axolotl_runs.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), str(folder), json.dumps(settings)]
    run = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return torch.load(folder / "outcome.pt", weights_only=True)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_of_torchrun_train_as_axolotls(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "optimizer": "adamw_torch"}
    settings |= {"max_grad_norm": 0.5, "max_steps": 3}
    settings |= FSDP2 if kind == "fsdp2" else {"ddp_backend": "gloo"}
    plain = on_two_processes(tmp_path / "plain", **settings)
    tree = on_two_processes(tmp_path / "tree", **settings, plugins=[PLUGIN], tree_groups="input_ids", tree_budget=20)
    check(tree["log"], plain["log"], ("loss", "grad_norm"))
    assert tree["weights"].keys() == plain["weights"].keys()
    for name, theirs in plain["weights"].items():
        torch.testing.assert_close(tree["weights"][name], theirs, rtol=1e-5, atol=1e-5)


def test_settings_are_part_of_axolotls_configuration_and_packing_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, PLUGIN, tree_groups=None, max_steps=1)
    settings = merge_input_args()[0].model_fields
    assert settings["tree_groups"].default == "input_ids" and settings["tree_budget"].default is None
    with pytest.raises(ValueError, match="sample_packing: true"):
        PluginManager.get_instance().post_trainer_create(DictDefault({"sample_packing": True}), None)
