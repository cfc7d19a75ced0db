"""`treetrain simulate`: figures of the library's own prediction, refusals, and no torch."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from treetrain.data.load import load
from treetrain.planning.cost import ModelShape
from treetrain.planning.devices import DEVICES
from treetrain.planning.simulate import simulate
from treetrain.tree.build import build_tree


def test_the_figures_are_those_of_the_function_for_every_number_of_ranks(treetrain, token_file) -> None:
    said = treetrain("simulate", token_file, "--shape", "qwen3-0.6b", "--ranks", "4", "2", "2", "--json").json
    tree = build_tree(load(token_file).trajectories)
    shape = ModelShape.named("qwen3-0.6b")
    own = [dataclasses.asdict(simulate(tree, shape, ranks, DEVICES["h100"])) for ranks in (2, 4)]
    assert said["ranks"] == own
    assert said["batch"] == {"trajectories": 12, "flat_tokens": 180, "unique_tokens": tree.num_tokens}
    assert said["shape"]["name"] == "qwen3-0.6b" and said["device"]["name"] == "h100"


def test_options_reach_the_prediction(treetrain, token_file) -> None:
    argv = ["simulate", token_file, "--shape", "qwen3-0.6b", "--ranks", "4", "--json", "--device-description", "cpu"]
    plain = treetrain(*argv, "--budget", "1000").json["ranks"][0]
    assert (
        treetrain(*argv, "--budget", "1000", "--parallel", "ddp").json["ranks"][0]["state_bytes"] > plain["state_bytes"]
    )
    assert treetrain(*argv, "--budget", "1000", "--sync", "step").json["ranks"][0]["peak_bytes"] > plain["peak_bytes"]
    assert treetrain(*argv, "--budget", "8").json["ranks"][0]["passes"] > plain["passes"]
    again = treetrain(*argv, "--budget", "1000", "--checkpointing").json["ranks"][0]
    assert again["slowest_rank_seconds"] > plain["slowest_rank_seconds"]


def test_the_table_has_a_line_for_every_number_of_ranks_and_says_who_is_idle(treetrain, token_file) -> None:
    answer = treetrain("simulate", token_file, "--model", "tiny", "--ranks", "4", "16")
    assert answer.code == 0
    lines = [line.split() for line in answer.out.splitlines() if line.split()[:1] in (["4"], ["16"])]
    assert [line[0] for line in lines] == ["4", "16", "16"]
    assert "16 ranks: 4 have nothing to compute" in answer.out


def test_a_number_of_ranks_that_cannot_hold_the_model_says_so_beside_the_others(treetrain, token_file) -> None:
    argv = ["simulate", token_file, "--shape", "qwen3-32b", "--ranks", "2", "64"]
    answer = treetrain(*argv)
    assert answer.code == 0 and "2 ranks: 2 ranks of h100" in answer.out and "more memory" in answer.out
    few, many = treetrain(*argv, "--json").json["ranks"]
    assert few["ranks"] == 2 and "refused" in few and many["fits"]


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_device_may_be_described_in_a_file(treetrain, token_file, tmp_path, suffix) -> None:
    figures = {"flops": 1e12, "memory_bytes": 1e12, "memory_bandwidth": 1e11, "link_bandwidth": 1e9, "node_ranks": 4}
    path = tmp_path / f"slow{suffix}"
    lines = [f"{key} = {value!r}" for key, value in figures.items()]
    path.write_text(json.dumps(figures) if suffix == ".json" else "\n".join(lines))
    said = treetrain("simulate", token_file, "--ranks", "8", "--json", "--device-description", str(path)).json
    assert said["device"]["name"] == "slow" and said["device"]["flops"] == 1e12
    faster = treetrain("simulate", token_file, "--ranks", "8", "--json").json
    assert said["ranks"][0]["step_seconds"] > 10 * faster["ranks"][0]["step_seconds"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"flops": 1}', "missing 3 required keyword-only arguments: 'memory_bytes', 'memory_bandwidth', and"),
        ('{"speed": 1}', "unexpected keyword argument 'speed'"),
        ("{", "is no device's description"),
        ("[1]", "is no device's description"),
        ('{"flops": -1, "memory_bytes": 1, "memory_bandwidth": 1, "link_bandwidth": 1}', "flops is -1"),
        ('{"flops": 1, "memory_bytes": 1, "memory_bandwidth": 1, "link_bandwidth": 1, "kind": "tpu"}', "kind='tpu'"),
    ],
)
def test_a_bad_description_is_refused_with_what_is_wrong(treetrain, token_file, tmp_path, text, message) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    assert message in treetrain("simulate", token_file, "--device-description", str(path)).error


def test_bad_options_and_untrained_files_are_refused(treetrain, token_file, tmp_path) -> None:
    assert "no device is named 'h900'" in treetrain("simulate", token_file, "--device-description", "h900").error
    assert "--ranks: 0" in treetrain("simulate", token_file, "--ranks", "8", "0").error
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
