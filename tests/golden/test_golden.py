"""Losses and gradient norms of fifty steps are those of the release before, but for rounding."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from golden import runs  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", runs.RUNS)
def test_a_training_gives_the_losses_and_gradient_norms_of_its_file(name):
    if name == "dpo_lora":
        pytest.importorskip("peft")
    assert (fault := runs.faults(name, runs.run(name))) is None, fault


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense_sft", "grpo", "moe_sft", "hybrid_sft"])
def test_a_temperature_that_is_wrong_by_a_thousandth_is_seen(name, monkeypatch):
    monkeypatch.setattr(runs, "TEMPERATURE", 1.001 * runs.TEMPERATURE)
    assert "differs from tests/golden/values" in (runs.faults(name, runs.run(name)) or "")


def test_every_training_has_a_file_of_as_many_steps_and_learns():
    assert {path.stem for path in runs.FOLDER.glob("*.json")} == set(runs.RUNS) == set(runs.TOLERANCE)
    for path in runs.FOLDER.glob("*.json"):
        values = json.loads(path.read_text(encoding="utf-8"))
        assert len(values["losses"]) == len(values["gradient_norms"]) == runs.STEPS
        first, last = sum(values["losses"][:4]), sum(values["losses"][-4:])
        assert last < first - 0.1, path.name
