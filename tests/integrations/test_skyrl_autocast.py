"""SkyRL's rows are scored under the autocast of SkyRL's own calls, on the device of the model. Runs without SkyRL."""

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PLACE = "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker"


@pytest.fixture
def worker_module(monkeypatch) -> Any:
    """The worker's file, with an empty class in the place of SkyRL's worker."""
    parts = PLACE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[PLACE].FSDPPolicyWorkerBase = type("FSDPPolicyWorkerBase", (), {})  # type: ignore[attr-defined]
    name = "treetrain.integrations.skyrl"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize(("device", "enabled"), [("cpu", False), ("cuda", True), ("npu", True)])
def test_rows_are_scored_under_the_autocast_of_the_models_device(worker_module, monkeypatch, device, enabled):
    asked, scored = [], []

    def autocast(*given: object, **options: object) -> Any:
        asked.append((*given, options["enabled"]))
        return nullcontext()

    def score(rows: list, **_: object) -> None:
        assert asked, "scored outside of autocast"
        scored.append([row.ids.tolist() for row in rows])

    monkeypatch.setattr(torch, "autocast", autocast)
    engine: Any = SimpleNamespace(prepared=SimpleNamespace(device=SimpleNamespace(type=device)), score=score)

    class Batch(dict):
        """A batch of SkyRL: tensors by name, and numbers beside them."""

    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    data = Batch(sequences=torch.tensor([[0, 4, 5, 6], [1, 2, 3, 4], [0, 4, 5, 6]]), attention_mask=mask)
    data.metadata = {"response_length": 2}  # type: ignore[attr-defined]
    worker_module.ScoresOfRows(engine, worker_module.RowsOfBatch(None, data), entropies=False)
    assert asked == [(device, torch.bfloat16, enabled)]
    assert scored == [[[4, 5, 6], [1, 2, 3, 4]]]
