"""The accelerate files of TRL and of the examples, as the launcher sets them up: each trains the same, or is refused.

Processes are on CPUs, and in float32 (`--mixed_precision no`), in which both trainings can be equal.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import trl
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from trainer_runs import BUILDERS, Run, difference, train
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from support.fsdp_on_cpus import let_accelerate_shard, needs_sharding_on_cpus
from treetrain.parallel.process_group import is_sharded

FILES = Path(trl.__file__).parent / "accelerate_configs"
EXAMPLES = Path(__file__).parents[2] / "examples"
OF_TRL = ("single_gpu", "multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
CUT_ROWS_APART = {
    "context_parallel": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
parallelism_config: {parallelism_config_cp_size: 2}
num_processes: 2
""",
    "alst_ulysses": """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_optimizer_device: none, offload_param_device: none, zero3_init_flag: false}
parallelism_config: {parallelism_config_sp_size: 2, parallelism_config_sp_backend: deepspeed}
num_processes: 2
""",
}
"""What counts in context_parallel_2gpu.yaml and alst_ulysses_4gpu.yaml, which TRL's package does not contain."""


def launched_by(file: Path) -> dict[str, str]:
    """The environment that ``accelerate launch --config_file`` gives the processes."""
    arguments = ["--config_file", str(file), "--mixed_precision", "no", "script.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, found = prepare_deepspeed_cmd_env(args)
    elif args.multi_gpu or args.use_fsdp:
        found = prepare_multi_gpu_env(args)
    else:
        _, found = prepare_simple_launcher_cmd_env(args)
    return {name: x for name, x in found.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


def run(file: Path, folder: Path, rank: int, size: int, **settings: Any) -> Run:
    """Train SFT as launched with this file."""
    environment = launched_by(file) | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    environment |= {"LOCAL_WORLD_SIZE": str(size), "DS_ACCELERATOR": "cpu"}
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    unset_hf_deepspeed_config()
    if environment.get("FSDP_VERSION") == "1":  # which looks for a GPU when it copies weights from the first process
        environment |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    if environment.get("ACCELERATE_USE_FSDP"):
        let_accelerate_shard()
    with mock.patch.dict(os.environ, environment if size > 1 else {}):
        if environment.get("ACCELERATE_USE_DEEPSPEED"):
            import deepspeed  # pyright: ignore[reportMissingImports]

            deepspeed.init_distributed("gloo")
        common = {"steps": 2, "per_device_train_batch_size": 8}  # zero1.yaml sets gradient_accumulation_steps: 1
        return train(BUILDERS["sft"], folder, **(common | ({"ddp_backend": "gloo"} if size > 1 else {}) | settings))


def both(group: Any, file: Path, folder: str) -> dict[str, Any]:
    """How far a training with shared prefixes is from one without, and how accelerate distributes it."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    shared, plain = (run(file, Path(folder), rank, size, shared=shared) for shared in (True, False))
    accelerator = shared.trainer.accelerator
    found = {"kind": accelerator.distributed_type.value, "sharded": is_sharded(shared.trainer.model)}
    if accelerator.state.deepspeed_plugin is not None:
        found["kind"] += str(shared.trainer.deepspeed.zero_optimization_stage())
    return found | vars(difference(shared, plain))


def assert_same(found: dict[str, Any], kind: str, *, sharded: bool) -> None:
    assert (found["kind"], found["sharded"]) == (kind, sharded)
    assert max(found["metrics"], found["weights"]) <= 1e-5 and found["updates"] <= 1e-4, found


def test_all_files_of_trl_are_known():
    assert {path.stem for path in FILES.glob("*.yaml")} == {*OF_TRL}


@pytest.mark.slow
def test_single_gpu_trains_the_same(tmp_path):
    assert_same(both(None, FILES / "single_gpu.yaml", str(tmp_path)), "NO", sharded=False)


DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-deepspeed"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "kind", "sharded"),
    [
        (FILES / "multi_gpu.yaml", "MULTI_CPU", False),
        (FILES / "fsdp2.yaml", "FSDP", True),
        pytest.param(FILES / "zero1.yaml", "DEEPSPEED1", False, marks=DEEPSPEED),
        pytest.param(FILES / "zero2.yaml", "DEEPSPEED2", False, marks=DEEPSPEED),
        pytest.param(FILES / "zero3.yaml", "DEEPSPEED3", True, marks=DEEPSPEED),
        (EXAMPLES / "accelerate_fsdp2.yaml", "FSDP", True),
        pytest.param(EXAMPLES / "accelerate_zero2.yaml", "DEEPSPEED2", False, marks=DEEPSPEED),
        pytest.param(EXAMPLES / "accelerate_zero3.yaml", "DEEPSPEED3", True, marks=DEEPSPEED),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_files_for_several_processes_train_the_same(two, file, kind, sharded, tmp_path):
    for found in two.run(both, file, str(tmp_path), timeout=400):
        assert_same(found, kind, sharded=sharded)


def refused(group: Any, file: str, folder: str) -> str:
    """The error of `share_prefixes`."""
    with pytest.raises(ValueError, match="share_prefixes cannot be exact") as caught:
        run(Path(file), Path(folder), dist.get_rank(group), dist.get_world_size(group), shared=True)
    return str(caught.value)


@pytest.mark.slow
def test_fsdp1_is_refused(two, tmp_path):
    for said in two.run(refused, str(FILES / "fsdp1.yaml"), str(tmp_path), timeout=200):
        assert "fsdp_version: 1" in said and "set fsdp_version: 2" in said


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("context_parallel", marks=[needs_sharding_on_cpus, pytest.mark.slow]),
        pytest.param("alst_ulysses", marks=[DEEPSPEED, pytest.mark.slow]),
    ],
)
def test_files_that_cut_rows_apart_are_refused(two, name, tmp_path):
    (file := tmp_path / f"{name}.yaml").write_text(CUT_ROWS_APART[name])
    for said in two.run(refused, str(file), str(tmp_path), timeout=200):
        assert "parallelism_config: context, sequence and tensor parallelism" in said
