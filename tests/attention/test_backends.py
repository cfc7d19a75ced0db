"""Which backend is taken, how another is asked for, and what is said where it cannot run."""

import importlib.util
import sys
import types
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch

from support.models import make_model
from support.plans import attention_forest, star
from treetrain.core.attention.attention import AttentionTree
from treetrain.core.attention.kv_cache import KVCache
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.core.tree.layout import AttentionRange
from treetrain.engine import TreeEngine
from treetrain.kernels import backends
from treetrain.kernels.backends import BACKENDS, ENVIRONMENT, DeviceBackends, choose_backends, runnable, why_not
from treetrain.kernels.flex import FlexTreeAttention
from treetrain.kernels.varlen import VarlenAttention
from treetrain.parallel.process_group import GroupRanks
from treetrain.parallel.sharing import GroupSharing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_each_device_has_its_own_unless_another_is_named(monkeypatch, with_triton):
    assert choose_backends(CPU) == ("rectangles",)
    assert choose_backends(CUDA) == ("varlen", "flex", "triton", "rectangles", "matmul")
    monkeypatch.setenv(ENVIRONMENT, "triton")
    assert choose_backends(CUDA) == ("triton",)
    assert choose_backends(CUDA, "varlen") == ("varlen", "flex", "triton", "rectangles", "matmul"), (
        "it serves some forests only"
    )
    assert choose_backends(CUDA, "flex") == ("flex", "triton", "rectangles", "matmul"), "it serves some layers only"
    assert choose_backends(CUDA, "cudnn") == ("cudnn", "varlen", "flex", "triton", "rectangles", "matmul")
    assert "cudnn" not in choose_backends(CUDA, "auto"), "only where it is named"
    monkeypatch.setenv(ENVIRONMENT, "auto")
    assert choose_backends(CUDA)[0] == "varlen"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backends(CUDA) == ("varlen", "rectangles", "matmul"), "without Triton"


class _StandIn:
    """A backend of the GPU's that says its name."""

    serves_sinks = True

    def __init__(self, *given, **options):
        pass

    def takes(self, query, value, spec):
        return True

    def __call__(self, query, *rest):
        return query


@pytest.fixture
def stand_ins(monkeypatch, with_triton):
    triton = type("Triton", (_StandIn,), {"name": "triton"})
    monkeypatch.setitem(sys.modules, "treetrain.kernels.triton_attention", mock.Mock(TritonTreeAttention=triton))
    varlen = type(
        "Varlen", (_StandIn,), {"name": "varlen", "takes": VarlenAttention.takes, "_dtypes": (torch.bfloat16,)}
    )
    monkeypatch.setattr("treetrain.kernels.varlen.VarlenAttention", varlen)
    flex = type("Flex", (_StandIn,), {"name": "flex", "takes": FlexTreeAttention.takes, "serves_sinks": False})
    monkeypatch.setattr("treetrain.kernels.flex.FlexTreeAttention", flex)
    monkeypatch.setattr(backends, "CHECKED", set())


def test_the_choice_belongs_to_the_forest_and_the_layer(stand_ins, monkeypatch):
    def calls(forest, cache=None, specs=(PLAIN_ATTENTION,), dtype=torch.bfloat16, sinks=None):
        x = types.SimpleNamespace(device=CUDA, shape=(len(forest.ends), 2, 8), dtype=dtype)
        tree = AttentionTree(forest, cache, DeviceBackends())
        return Counter(tree.backend(x, x, x, spec, sinks).name for spec in specs)

    suitable, bushy = Forest.of(star(300, 64)), Forest.of(star(300, 3))
    windowed = [PLAIN_ATTENTION, AttentionSpec(AttentionRange(window=9)), PLAIN_ATTENTION]
    assert calls(suitable) == {"varlen": 1} and calls(bushy) == {"flex": 1}
    assert calls(bushy, specs=windowed) == {"flex": 2, "triton": 1} and calls(bushy, dtype=torch.float32) == {
        "triton": 1
    }
    assert calls(bushy, sinks=torch.zeros(2)) == {"triton": 1} and calls(suitable, sinks=torch.zeros(2)) == {
        "varlen": 1
    }
    assert calls(suitable, specs=windowed) == {"varlen": 2, "triton": 1}, "flash attention has no window of a path"
    assert calls(suitable, dtype=torch.float32) == {"triton": 1}
    cache = KVCache(9, CPU, gradients=False)
    none = np.full(len(suitable.ends), -1)
    assert calls(suitable, cache.view_of_rows(np.arange(0), none)) == {"varlen": 1}
    for forest in (suitable, bushy):
        none = np.full(len(forest.ends), -1)
        assert calls(forest, cache.view_of_rows(np.arange(4), none)) == {"triton": 1}, (
            "gradients of a path stay in float32"
        )
    monkeypatch.setenv(ENVIRONMENT, "triton")
    assert calls(suitable) == {"triton": 1}


def test_a_name_that_is_none_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"'magi'.*auto, rectangles, varlen, flex, triton, matmul, cudnn"):
        choose_backends(CUDA, "magi")
    monkeypatch.setenv(ENVIRONMENT, "dense")
    with pytest.raises(ValueError, match=f"'dense'.*{ENVIRONMENT}"):
        choose_backends(CPU)


def test_a_backend_that_cannot_run_says_why_and_what_can(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("varlen", "flex", "triton"):
        with pytest.raises(ValueError, match=r"CUDA device.*those that can: rectangles, matmul"):
            choose_backends(CPU, name)
    with pytest.raises(ValueError, match=r"'triton' .*Triton is not installed; those that can: rectangles, varlen"):
        choose_backends(CUDA, "triton")
    with pytest.raises(ValueError, match=r"'flex' .*Triton is not installed"):
        choose_backends(CUDA, "flex")
    with pytest.raises(ValueError, match=r"'cudnn' .*nvidia-cudnn-frontend \(1.32 or newer\) is not installed"):
        choose_backends(CUDA, "cudnn")
    assert runnable(CPU) == ["rectangles", "matmul"]


def test_triton_runs_on_a_cpu_in_its_interpreter_only(monkeypatch, with_triton):
    assert "TRITON_INTERPRET=1" in (why_not("triton", CPU) or "")
    assert why_not("triton", CUDA) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runnable(CPU) == ["rectangles", "triton", "matmul"]


def test_an_engine_takes_what_the_environment_names(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "varlen")
    with pytest.raises(ValueError, match=r"'varlen' cannot run on 'cpu'"):
        TreeEngine(make_model()).logprobs([[1, 2, 3]])


def test_the_default_of_a_cpu_is_made():
    assert {name for order in backends.ORDER.values() for name in order} <= set(BACKENDS)
    x = torch.zeros(3, 2, 8)
    tree = AttentionTree(attention_forest([[1, 2], [1, 3]]), backends=DeviceBackends())
    assert tree.backend(x, x, x).name == "rectangles"


def test_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match="xpu"):
        choose_backends(torch.device("xpu"))


def test_ranks_compile_flex_attention_before_they_wait_for_one_another(monkeypatch):
    """So the first irregular forest of one rank meets a check that has been made."""
    checked = []
    monkeypatch.setattr(backends, "CHECKED", {"cpu"})
    monkeypatch.setitem(backends.ORDER, "cpu", ("varlen", "flex"))
    monkeypatch.setattr(backends, "why_not", lambda name, device: None)
    monkeypatch.setattr(
        "treetrain.kernels.attention_check.failure_of_backend",
        lambda name, make, q, k, v, spec, **options: checked.append(
            (name, q.dtype, q.shape, k.shape, v.shape, options)
        ),
    )
    model = make_model("qwen3", dtype=torch.bfloat16)
    text = model.config
    size, heads, groups = text.head_dim, text.num_attention_heads, text.num_key_value_heads
    for ranks, same_rows in ((False, True), (True, True), (False, False)):
        sharing = object.__new__(GroupSharing)
        sharing._model, sharing.context = model, GroupRanks(None)
        sharing.ranks, sharing.same_rows = types.SimpleNamespace(alone=ranks), types.SimpleNamespace(alone=same_rows)
        sharing.check_model(TreeEngine(model).prepared.capabilities)
    options = {"sinks": False, "below_path": False}
    shapes = (1, heads, size), (1, groups, size), (1, groups, size)
    assert checked == [("flex", torch.bfloat16, *shapes, options)], "several ranks, of which each has its own rows"
    monkeypatch.setenv(ENVIRONMENT, "varlen")
    backends.warm_up(CPU, torch.float32, (4, 2), (8, 8))
    assert len(checked) == 1
