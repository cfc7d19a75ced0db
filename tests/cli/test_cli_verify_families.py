"""`treetrain verify` proves every family that is exact, from a folder, whole and in small parts."""

import json
from pathlib import Path

import numpy as np
import pytest

from support.models import FAMILIES, MAMBA, make_model
from treetrain.check.forests import VOCAB

EXACT = [name for name in FAMILIES if name not in MAMBA]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three rows that share 9 tokens, two of which share 4 more; windows of 5 tokens end in the shared part."""
    rng = np.random.default_rng(0)
    trunk, branch = rng.integers(0, VOCAB, 9).tolist(), rng.integers(0, VOCAB, 4).tolist()
    rows = [trunk + branch + rng.integers(0, VOCAB, 7).tolist() for _ in range(2)]
    rows.append(trunk + rng.integers(0, VOCAB, 6).tolist())
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """Folders of saved models, each written once."""
    made: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in made:
            path: Path = tmp_path_factory.mktemp(name)
            make_model(name).save_pretrained(path)
            made[name] = str(path)
        return made[name]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "budget"), [("float32", None), ("float64", "7")])
@pytest.mark.parametrize("name", EXACT)
def test_a_family_is_verified_from_its_folder(treetrain, rows_file, folder_of, name, dtype, budget):
    argv = ["verify", rows_file, "--model", folder_of(name), "--dtype", dtype, "--json"]
    report = treetrain(*argv, *(["--budget", budget] if budget else [])).json
    assert report["passed"], report["verdict"]
    assert report["unique_tokens"] < report["flat_tokens"]
    assert (report["parts"] > 3) == (budget is not None)


@pytest.mark.slow
def test_a_family_is_verified_in_bfloat16(treetrain, rows_file, folder_of):
    report = treetrain("verify", rows_file, "--model", folder_of("gemma2"), "--dtype", "bfloat16", "--json").json
    # One forest of 30 tokens is no pool: its error may by chance be above that of the linear run.
    assert report["gradient_error"] <= 3 * report["linear_error"], report["verdict"]
