"""Which backend is taken, how another is asked for, and what is said where it cannot run."""

import dataclasses
import importlib.util
import sys
import types
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex_module

from support.plans import attention_forest, star
from treetrain.engine.engine import TreeEngine
from treetrain.softmax_attention import attention, flex
from treetrain.softmax_attention.attention import (
    BACKENDS,
    ENVIRONMENT,
    AttentionTree,
    choose_backend,
    runnable,
    using,
    why_not,
)
from treetrain.softmax_attention.flex import FlexTreeAttention
from treetrain.softmax_attention.kv_cache import KVCache
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec, Forest
from treetrain.softmax_attention.varlen import VarlenAttention
from treetrain.tree.layout import AttentionRange

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_traced = torch.compile


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_each_device_has_its_own_unless_another_is_named(monkeypatch, with_triton):
    assert (choose_backend(CPU).name, choose_backend(CUDA).name) == ("rectangles", "varlen")
    assert "Triton kernels elsewhere" in str(choose_backend(CUDA))
    monkeypatch.setenv(ENVIRONMENT, "triton")
    choice = choose_backend(CUDA)
    assert choice.name == "triton" and f"{ENVIRONMENT}=triton" in choice.reason
    with using("flex"):
        assert choose_backend(CUDA).name == "flex" and "the program asks" in choose_backend(CUDA).reason
        with using(None):
            assert choose_backend(CUDA).name == "varlen" and choose_backend(CPU).name == "rectangles"
    assert choose_backend(CUDA).name == "triton"
    monkeypatch.setenv(ENVIRONMENT, "auto")
    assert choose_backend(CUDA).name == "varlen"


class _StandIn:
    """A backend of the GPU's that says its name."""

    def __init__(self, *given, **options):
        pass

    def __call__(self, query, *rest):
        return query


@pytest.fixture
def stand_ins(monkeypatch, with_triton):
    triton = type("Triton", (_StandIn,), {"name": "triton"})
    monkeypatch.setitem(
        sys.modules, "treetrain.softmax_attention.triton_attention", mock.Mock(TritonTreeAttention=triton)
    )
    varlen = type(
        "Varlen", (_StandIn,), {"name": "varlen", "takes": VarlenAttention.takes, "_dtypes": (torch.bfloat16,)}
    )
    monkeypatch.setattr(attention, "VarlenAttention", varlen)


def test_the_choice_belongs_to_the_forest_and_the_layer(stand_ins):
    def calls(forest, cache=None, specs=(PLAIN_ATTENTION,), dtype=torch.bfloat16):
        x = types.SimpleNamespace(device=CUDA, shape=(len(forest.ends), 2, 8), dtype=dtype)
        tree = AttentionTree(forest, cache)
        return Counter(tree.backend(x, x, spec).name for spec in specs)

    suitable, bushy = Forest.of(star(300, 64)), Forest.of(star(300, 3))
    windowed = [PLAIN_ATTENTION, AttentionSpec(AttentionRange(window=9)), PLAIN_ATTENTION]
    assert calls(suitable) == {"varlen": 1} and calls(bushy) == {"triton": 1}
    assert calls(suitable, specs=windowed) == {"varlen": 2, "triton": 1}, "flash attention has no window of a path"
    assert calls(suitable, dtype=torch.float32) == {"triton": 1}
    cache = KVCache(9, CPU, gradients=False)
    none = np.full(len(suitable.ends), -1)
    assert calls(suitable, cache.view(np.arange(0), none)) == {"varlen": 1}
    assert calls(suitable, cache.view(np.arange(4), none)) == {"triton": 1}, "gradients of a path stay in float32"
    with using("triton"):
        assert calls(suitable) == {"triton": 1}


def test_a_name_that_is_none_is_refused(monkeypatch):
    with (
        pytest.raises(ValueError, match=r"'flexx'.*auto, rectangles, varlen, triton, flex"),
        using("flexx"),
    ):
        pass
    monkeypatch.setenv(ENVIRONMENT, "dense")
    with pytest.raises(ValueError, match=f"{ENVIRONMENT}.*'dense'"):
        choose_backend(CPU)


def test_a_backend_that_cannot_run_says_why_and_what_can(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("flex", "varlen", "triton"):
        with using(name), pytest.raises(ValueError, match=r"CUDA device.*those that can: rectangles"):
            choose_backend(CPU)
    with pytest.raises(ValueError, match=r"'varlen' \(the default\) .*Triton is not installed; those that can: none"):
        choose_backend(CUDA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else None)
    with using("rectangles"), pytest.raises(ValueError, match=r"the CPU's.*varlen, triton, flex$"):
        choose_backend(CUDA)
    assert runnable(CPU) == ["rectangles"]


def test_triton_runs_on_a_cpu_in_its_interpreter_only(monkeypatch, with_triton):
    assert "TRITON_INTERPRET=1" in (why_not("triton", CPU) or "")
    assert why_not("triton", CUDA) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runnable(CPU) == ["rectangles", "triton"]


def test_an_engine_says_what_it_takes_and_takes_it(monkeypatch):
    from support.models import make_model

    engine = TreeEngine(make_model())
    assert engine.attention.name == "rectangles" and "CPU" in str(engine.attention)
    monkeypatch.setenv(ENVIRONMENT, "varlen")
    with pytest.raises(ValueError, match=r"'varlen' \(TREETRAIN_ATTENTION=varlen\) cannot run here"):
        engine.logprobs([_row()])


def _row():
    import treetrain as tt

    return tt.Trajectory([1, 2, 3])


def test_every_name_is_described_and_made():
    forest = attention_forest([[1, 2], [1, 3]])
    assert set(attention.DEFAULTS.values()) <= set(BACKENDS)
    x = torch.zeros(3, 2, 8)
    assert AttentionTree(forest).backend(x, x, PLAIN_ATTENTION).name == "rectangles"
    assert FlexTreeAttention(forest, CPU).name == "flex"


@pytest.mark.parametrize(
    "spec", [PLAIN_ATTENTION, AttentionSpec(AttentionRange(window=9)), AttentionSpec(softcap=5.0)], ids=str
)
def test_flexattention_is_compiled_once_for_all_lengths_and_paths(spec, monkeypatch):
    """By the tracer alone: what it would hand to the compiler is counted, and run as it is."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    flex._compiled.cache_clear()
    monkeypatch.setattr(flex.torch, "compile", lambda f, **options: _traced(f, backend=counter, **options))
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)  # no backward is run
    attend = flex._compiled()
    for count, path in ((300, 0), (301, 0), (128 * 3, 0), (1000, 0), (40, 0), (300, 7), (40, 300), (126, 254), (9, 2)):
        forest = attention_forest([list(range(count)), [0, 5]])
        forest = dataclasses.replace(forest, depth=forest.depth + path)
        cache = KVCache(path + 1, CPU, gradients=False)
        view = cache.view(np.arange(path), np.full(len(forest.ends), -1))
        attention = FlexTreeAttention(forest, CPU, cache=view)
        attention._attend = attend
        n = len(forest.ends)
        q, kv = torch.randn(n, 4, 16, requires_grad=True), torch.randn(n, 2, 16)
        attention(q, kv, kv, 0.25, 0, spec)
        assert (counter.frame_count, counter.op_count > 0) == (1, True), f"compiled again for {count} below {path}"
    flex._compiled.cache_clear()
    torch._dynamo.reset()


def test_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match="xpu"):
        choose_backend(torch.device("xpu"))
