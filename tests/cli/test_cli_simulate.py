"""`treetrain simulate`: figures of the library's own prediction, refusals, and no torch."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from treetrain.core.errors import DataError
from treetrain.core.planning.devices import DEVICES
from treetrain.core.tree.token_tree import build_tree
from treetrain.logs.load import load
from treetrain.models.loading import load_tokenizer
from treetrain.shapes import ModelShape
from treetrain.simulation.launch import launch_of
from treetrain.simulation.simulate import simulate
from treetrain.simulation.splits import splits_of


def test_the_figures_are_those_of_the_function_the_fastest_split_first(treetrain, token_file) -> None:
    argv = ["simulate", token_file, "--model", "qwen3-0.6b", "--ranks", "4", "--budget", "1000", "--nodes", "2"]
    said = treetrain(*argv, "--context", "1", "--json").json
    tree, device = build_tree(load(token_file).trajectories), dataclasses.replace(DEVICES["h100"], node_ranks=2)
    counts = ModelShape.named("qwen3-0.6b").counts(dtype_bytes=2)
    found = simulate(tree, counts, splits_of(counts, 4, device, context=1), device, budget=1000)
    seconds = sorted(one.step_seconds for one in found)
    assert [one["step_seconds"] for one in said["splits"]] == seconds and len(seconds) > 4
    assert {one["split"]["context"] for one in said["splits"]} == {1} and said["refused"] == []
    assert said["batch"] == {"trajectories": 12, "flat_tokens": 180, "unique_tokens": tree.num_tokens}
    assert said["model"]["name"] == "qwen3-0.6b" and said["device"]["name"] == "h100"
    linear = simulate(build_tree(tree.trajectories, merge=False), counts, splits_of(counts, 4, device, context=1),
                      device, budget=1000)  # fmt: skip
    ratio = min(one.step_seconds for one in linear) / seconds[0]
    assert any(f"extends take {ratio:.2f} times as long" in one for one in said["verdict"])
    again = treetrain(*argv, "--context", "1", "--checkpointing", "--json").json["splits"][0]
    assert again["work_seconds"] > said["splits"][0]["work_seconds"]


def test_the_table_says_which_split_is_fastest_which_do_not_fit_and_who_is_idle(treetrain, token_file) -> None:
    said = treetrain("simulate", token_file, "--model", "qwen3-32b", "--ranks", "64").out
    assert "Fastest: data" in said and "TreeEngine does not combine these yet" in said
    assert "does not fit: data 64; data 32 x context 2; data 16 x context 4; data 8 x context 8: weights" in said
    assert "need 524.2 GB of 72.0 GB usable on each rank" in said and "in every node of 8 ranks" in said
    argv = ["simulate", token_file, "--model", "qwen3-0.6b", "--ranks", "16", "--context", "1", "--tensor", "1"]
    assert "Without a tree, the rows that no other row extends take 1." in said
    assert "4 ranks of the fastest split have nothing to compute" in treetrain(*argv).out


def test_a_model_is_counted_from_its_configuration(treetrain, token_file) -> None:
    said = treetrain("simulate", token_file, "--model", "tiny", "--ranks", "4", "--device", "cpu", "--json").json
    assert said["model"]["name"] == "tiny" and {one["split"]["tensor"] for one in said["splits"]} >= {1, 2}


def test_a_device_may_be_described_in_a_file(treetrain, token_file, tmp_path) -> None:
    figures = {"flops": 1e12, "memory_bytes": 1e12, "memory_bandwidth": 1e11, "link_bandwidth": 1e9, "node_ranks": 4}
    path = tmp_path / "slow.toml"
    path.write_text("\n".join(f"{key} = {value!r}" for key, value in figures.items()))
    said = treetrain("simulate", token_file, "--json", "--device", str(path)).json
    assert said["device"]["name"] == "slow" and said["device"]["flops"] == 1e12


def launched(treetrain, token_file, *words: str) -> list[dict]:
    return treetrain("simulate", token_file, *words, "--json").json["launch"]


def test_the_command_of_the_fastest_split_parses_and_says_nodes_ranks_budget_and_shards(treetrain, token_file) -> None:
    from torch.distributed.run import parse_args

    from treetrain.cli.train import make_parser

    words = ["--ranks", "8", "--nodes", "2", "--context", "1", "--tensor", "1", "--budget", "500", "--checkpointing"]
    for device, model, sharded in (("cpu", "tiny", False), ("h100", "qwen3-8b", True)):
        (launch,) = launched(treetrain, token_file, "--device", device, "--model", model, *words)
        assert launch["mesh"] is None and ("--fsdp" in launch["command"]) == ("sharded" in launch["split"]) == sharded
        torchrun, *argv = shlex.split(launch["command"])
        args = parse_args(argv)
        assert (torchrun, args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("torchrun", "2", "4", "c10d")
        assert (args.module, args.training_script, args.training_script_args[0]) == (True, "treetrain", "train")
        if device == "cpu":
            options = make_parser().parse_args(args.training_script_args[1:])
            assert (options.files, options.model, options.budget) == ([token_file], "tiny", "500")
            assert options.gradient_checkpointing and options.use_cpu


def test_the_file_is_what_accelerate_s_launcher_reads(treetrain, token_file, tmp_path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    words = ["--context", "1", "--tensor", "1", "--checkpointing"]
    for ranks, nodes, device, model, kind in ((2, 1, "cpu", "tiny", "use_cpu"), (8, 2, "h100", "qwen3-8b", "use_fsdp")):
        given = ["--ranks", str(ranks), "--nodes", str(nodes), "--device", device, "--model", model]
        (launch,) = launched(treetrain, token_file, *given, *words)
        (file := tmp_path / f"{kind}.yaml").write_text(launch["accelerate"])
        args, *_ = _validate_launch_command(
            launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
        )
        assert (args.num_processes, args.num_machines, getattr(args, kind)) == (ranks, nodes, True)
        assert kind == "use_cpu" or (int(args.fsdp_version), str(args.fsdp_activation_checkpointing)) == (2, "True")


def test_a_split_that_trainers_do_not_take_comes_with_its_mesh_and_the_fastest_that_they_take(treetrain, token_file):
    said = treetrain(
        "simulate", token_file, "--model", "qwen3-8b", "--ranks", "16", "--nodes", "2", "--context", "2"
    ).out
    assert "in a loop of your own" in said and "--nproc-per-node 8 your_loop.py" in said
    assert 'init_device_mesh("cuda", (8, 2)' in said and 'context=mesh.get_group("context")' in said
    assert "A model: seconds and memory, from the figures of h100 (compared with no GPU)" in said


def test_every_split_of_the_engine_has_lines_that_compile() -> None:
    counts, device = ModelShape.named("qwen3-30b-a3b").counts(dtype_bytes=2), DEVICES["h100"]
    for split in splits_of(counts, 16, device):
        if split.in_engine:
            options = {"model": "m", "files": "f", "budget": "8GiB", "checkpointing": False, "cpu": False}
            launch = launch_of(split, 2, **options)
            assert (launch.accelerate is None) != (launch.mesh is None)
            compile(launch.mesh or "", str(split), "exec")
            assert "'8GiB'" in launch.mesh if launch.mesh else "--budget 8GiB" in launch.command


OTHERS = "memory_bytes = 1\nmemory_bandwidth = 1\nlink_bandwidth = 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops = 1", "lacks memory_bytes, memory_bandwidth, link_bandwidth;"),
        ("flop = 1", "no figure 'flop'; did you mean flops?"),
        ("{", "is no TOML file of a device's figures"),
        (f"flops = -1\n{OTHERS}", "flops is -1"),
        (f"flops = 1\n{OTHERS}kind = 'tpu'", "kind='tpu'"),
        (f"flops = 0\n{OTHERS}", "flops is 0"),
        (f"flops = 1\n{OTHERS}efficiency = 1.5", "efficiency is 1.5"),
    ],
)
def test_a_bad_description_is_refused_with_what_is_wrong(treetrain, token_file, tmp_path, text, message) -> None:
    path = tmp_path / "device.toml"
    path.write_text(text)
    assert message in treetrain("simulate", token_file, "--device", str(path)).error


def test_bad_options_and_untrained_files_are_refused(treetrain, token_file, tmp_path) -> None:
    assert "no device is named 'h900'" in treetrain("simulate", token_file, "--device", "h900").error
    assert "--ranks 8 cannot be spread evenly over --nodes 3" in treetrain("simulate", token_file, "--nodes", "3").error
    assert "--ranks: '0'" in treetrain("simulate", token_file, "--ranks", "0").error
    missing = str(tmp_path / "missing.jsonl")  # sizes are checked before any file is read
    assert "tensor 3: a model with 32 heads" in treetrain("simulate", missing, "--tensor", "3").error
    path = tmp_path / "untrained.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}))
    assert "nothing to simulate" in treetrain("simulate", str(path)).error


def test_torch_is_not_imported(token_file) -> None:
    code = (
        "import sys; from treetrain.cli import main; "
        f"code = main(['simulate', {token_file!r}, '--ranks', '2']); "
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent
    )
    assert run.returncode == 0, run.stderr


def test_chats_are_read_with_the_tokenizer_of_the_model(treetrain, chat_file, token_file, monkeypatch) -> None:
    tiny, asked = load_tokenizer("tiny"), []
    monkeypatch.setattr("treetrain.models.loading.load_tokenizer", lambda name: asked.append(name) or tiny)
    for file, argv, expected in (
        (chat_file, [], ["Qwen/Qwen3-8B"]),
        (chat_file, ["--model", "qwen3-30b-a3b"], ["Qwen/Qwen3-30B-A3B"]),
        (chat_file, ["--model", "llama-3.1-8b"], ["meta-llama/Llama-3.1-8B-Instruct"]),
        (chat_file, ["--model", "tiny"], ["tiny"]),
        (chat_file, ["--model", "qwen3-32b", "--tokenizer", "mine"], ["mine"]),
        (token_file, ["--model", "qwen3-32b"], []),
    ):
        assert treetrain("simulate", file, "--ranks", "1", *argv).code == 0
        assert asked == expected
        asked.clear()

    def unreachable(name: str) -> None:
        raise DataError(f"{name!r} cannot be had")

    monkeypatch.setattr("treetrain.models.loading.load_tokenizer", unreachable)
    said = treetrain("simulate", chat_file, "--model", "qwen3-32b").error
    assert "conversations need --tokenizer, or the model's: 'Qwen/Qwen3-32B' cannot be had" in said
