"""The stand-ins for the real trajectories are the same at every run, with the files and keys of the real ones."""

import json
from pathlib import Path

from support import stand_in_data


def layout(folder: Path) -> dict[str, set[str]]:
    """Keys of the records of each file."""
    return {
        str(path.relative_to(folder)): {key for line in path.open(encoding="utf-8") for key in json.loads(line)}
        for path in folder.rglob("*.jsonl")
    }


def test_data_that_everybody_can_make_has_the_files_and_keys_of_the_real_one(shared_data, tmp_path):
    stand_in_data.write(tmp_path / "made")
    assert layout(tmp_path / "made") == layout(shared_data)
    for path in (tmp_path / "made").rglob("*.json*"):
        there = shared_data / path.relative_to(tmp_path / "made")
        if shared_data.name.startswith("stand-in"):
            assert path.read_bytes() == there.read_bytes(), path.name
