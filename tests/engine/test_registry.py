"""The core by itself, and what is handed to it from outside."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

import treetrain as tt
from support.models import make_model
from treetrain import registry
from treetrain.check.contract import PureFloat64
from treetrain.check.linear import gradients, relative_error, score_row
from treetrain.core.engine.engine import TreeEngine as CoreEngine
from treetrain.core.engine.engine_model import Feature
from treetrain.core.engine.extension import Extension

ROWS = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("budget", [None, 3])
def test_the_core_by_itself_trains_a_dense_model_exactly(budget):
    model, loss = make_model("qwen3", dtype=torch.float64), tt.losses.sft()
    with PureFloat64():
        result = CoreEngine(model, budget=budget).forward_backward(ROWS, loss)
        found = gradients(model)
        alone = -torch.cat([score_row(model, row)[0] for row in ROWS]).sum() / sum(len(row) - 1 for row in ROWS)
        assert result.loss == pytest.approx(float(alone), rel=1e-12)
        assert relative_error(found, gradients(model, alone)) <= 1e-12


def test_the_core_refuses_rows_that_it_does_not_know_and_bytes_that_nobody_counts():
    model = make_model("qwen3")
    row = tt.Trajectory([1, 2, 3], experts=[[[0]], [[1]], [[0]]])
    with pytest.raises(tt.UnsupportedModel, match=r"rows have experts.*treetrain\.TreeEngine"):
        CoreEngine(model).forward_backward([row], tt.losses.sft())
    with pytest.raises(tt.UnsupportedModel, match="budget in tokens"):
        CoreEngine(model, budget="1GiB").forward_backward(ROWS, tt.losses.sft())
    with pytest.raises(tt.UnsupportedModel, match=r"of \d+ layers went through tree attention"):
        CoreEngine(make_model("qwen3_5_text")).forward_backward(ROWS, tt.losses.sft())


@pytest.fixture
def installed(monkeypatch):
    """Installs an entry point that loads as it is told."""

    def install(load):
        point = SimpleNamespace(name="theirs", value="theirs:Feature", load=load)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
        registry._features_of_others.cache_clear()

    yield install
    registry._features_of_others.cache_clear()


def test_a_package_adds_a_feature_by_an_entry_point(installed):
    begun = []

    class Counts(Extension):
        def begin(self, plan, *, gradients, idle_pass):
            begun.append((plan.layout.num_tokens, gradients))

    class Counting(Feature):
        def extension(self, model, tree, *, balanced, scale, balance):
            return Counts() if tree.num_trajectories > 1 else None

    installed(lambda: Counting)
    engine = tt.TreeEngine(make_model("qwen3"), check=False)
    engine.forward_backward(ROWS, tt.losses.sft())
    engine.forward_backward(ROWS[:1], tt.losses.sft())
    assert [gradients for _, gradients in begun] == [True], "once, for the call with several rows"
    assert not [*importlib.metadata.entry_points(group=registry.ENTRY_POINTS)], "this project needs none itself"


def test_an_entry_point_that_is_no_feature_or_does_not_load_is_named(installed):
    installed(lambda: dict)
    with pytest.raises(TypeError, match=r"'theirs' of the group treetrain\.features .*<class 'dict'>; expected"):
        tt.TreeEngine(make_model("qwen3"))

    def fails():
        raise ImportError("no module named theirs")

    installed(fails)
    with pytest.raises(ImportError) as caught:
        tt.TreeEngine(make_model("qwen3"))
    assert "entry point 'theirs' of the group treetrain.features: theirs:Feature" in caught.value.__notes__[0]
