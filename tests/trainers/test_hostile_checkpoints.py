"""A checkpoint of others runs no code and ends no process, even if its manifest was written anew."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safe_runs import make_trainer
from torch.distributed.checkpoint import FileSystemReader, save
from torch.distributed.checkpoint.api import CheckpointException

from treetrain.trainers import checkpoint_files
from treetrain.trainers.checkpoint_files import MANIFEST, hashes
from treetrain.trainers.plain_loading import check_random_state, without_code


class Touch:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "out"
    make_trainer(folder, max_steps=2).train()
    return folder


@pytest.fixture
def checkpoint(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(stopped, tmp_path / "out") / "checkpoint-2"


def write_manifest_anew(checkpoint: Path) -> None:
    """What anybody can do who writes into the folder."""
    contents = json.loads((checkpoint / MANIFEST).read_text())["contents"]
    (checkpoint / MANIFEST).unlink()
    contents["files"] = hashes(checkpoint)
    digest = checkpoint_files._digest(contents)
    (checkpoint / MANIFEST).write_text(json.dumps({"contents": contents, "sha256": digest}))


def resume(checkpoint: Path) -> None:
    make_trainer(checkpoint.parent, max_steps=3).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["callbacks", "pytorch_model_fsdp_0", "optimizer_0"])
def test_a_folder_of_shards_runs_no_code_from_its_metadata(name: str, checkpoint: Path) -> None:
    (checkpoint / name).mkdir()
    (checkpoint / name / ".metadata").write_bytes(pickle.dumps(Touch()))
    write_manifest_anew(checkpoint)
    if name == "optimizer_0":  # of a run that is not sharded: nothing reads it
        resume(checkpoint)
    else:
        with pytest.raises(ValueError, match=r"cannot go on from .*UnpicklingError.*posix.system, which no checkpoint"):
            resume(checkpoint)
    assert not Path("ran").exists()


def test_an_error_of_the_reader_of_shards_is_one_line(checkpoint: Path) -> None:
    states = {f"{number}.Averages": {"model.norm.weight": torch.ones(16)} for number in range(9)}
    save(states, checkpoint_id=checkpoint / "callbacks")
    os.truncate(next((checkpoint / "callbacks").glob("*.distcp")), 10)
    write_manifest_anew(checkpoint)
    with pytest.raises(ValueError, match=r"^cannot go on from .*, which does not fit: [^\n]*$"):
        resume(checkpoint)


def test_values_beside_the_tensors_of_shards_run_no_code_either(tmp_path: Path, monkeypatch: Any) -> None:
    from torch.distributed.checkpoint import load

    monkeypatch.chdir(tmp_path)
    save({"a": torch.ones(2), "value": Touch()}, checkpoint_id=tmp_path / "shards")
    with without_code(), pytest.raises(CheckpointException, match="Weights only load failed"):
        load({"a": torch.zeros(2), "value": 0}, checkpoint_id=tmp_path / "shards")
    assert not Path("ran").exists()
    load({"a": torch.zeros(2), "value": 0}, checkpoint_id=tmp_path / "shards")  # the attack is one
    assert Path("ran").exists()


def test_shards_name_no_file_elsewhere(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "shards")
    found = FileSystemReader(tmp_path / "shards").read_metadata()
    for stored in found.storage_data.values():
        stored.relative_path = "../elsewhere"
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(found))
    with without_code(), pytest.raises(pickle.UnpicklingError, match=r"names the file '\.\./elsewhere'"):
        FileSystemReader(tmp_path / "shards").read_metadata()


CRASH = """
import sys, numpy as np, torch
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from safe_runs import make_trainer
checkpoint = Path(sys.argv[1])
try:
    make_trainer(checkpoint.parent, max_steps=3).train(resume_from_checkpoint=True)
except ValueError as error:
    print(error)
"""


class Objects:
    """Pickled as an array of Python objects, whose bytes are taken for addresses."""

    def __reduce__(self) -> Any:
        make, empty, _ = np.zeros(4, np.uint32).__reduce__()
        return make, empty, (1, (624,), Dtype(), False, b"\1" * 624 * 8)


class Dtype:
    def __reduce__(self) -> Any:
        return np.dtype, ("O8", False, True)


@pytest.mark.parametrize("kind", ["objects", "place"])
def test_a_random_state_that_would_end_the_process_is_refused(kind: str, checkpoint: Path) -> None:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}  # noqa: NPY002
    if kind == "objects":
        state["numpy"] = ("MT19937", Objects(), *state["numpy"][2:])
    else:
        state["numpy"] = (*state["numpy"][:2], 10**9, 0, 0.0)
    torch.save(state, checkpoint / "rng_state.pth")
    write_manifest_anew(checkpoint)
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", CRASH, checkpoint, *folders], capture_output=True, text=True)
    assert done.returncode == 0 and "does not fit: UnpicklingError" in done.stdout, (
        done.returncode,
        done.stderr[-900:],
    )


def test_the_random_state_of_a_run_is_accepted(stopped: Path) -> None:
    check_random_state(stopped / "checkpoint-2" / "rng_state.pth")
