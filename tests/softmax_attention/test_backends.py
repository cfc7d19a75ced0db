"""Which backend is taken, how another is asked for, and what is said where it cannot run."""

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex_module

from support.attention_forests import attention_forest
from treetrain.engine.engine import TreeEngine
from treetrain.softmax_attention import backends, flex
from treetrain.softmax_attention.backends import (
    BACKENDS,
    ENVIRONMENT,
    choose_backend,
    make_attention,
    runnable,
    using,
    why_not,
)
from treetrain.softmax_attention.flex import FlexTreeAttention
from treetrain.softmax_attention.kv_cache import KVCache
from treetrain.softmax_attention.schedule import PLAIN_ATTENTION, AttentionSpec
from treetrain.tree.attention_range import AttentionRange

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
_traced = torch.compile


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_each_device_has_its_own_unless_another_is_named(monkeypatch):
    assert (choose_backend(CPU).name, choose_backend(CUDA).name) == ("rectangles", "flex")
    monkeypatch.setenv(ENVIRONMENT, "varlen")
    choice = choose_backend(CUDA)
    assert choice.name == "varlen" and f"{ENVIRONMENT}=varlen" in choice.reason
    with using("flex"):
        assert choose_backend(CUDA).name == "flex" and "the program asks" in choose_backend(CUDA).reason
        with using(None):
            assert choose_backend(CUDA).name == "flex" and choose_backend(CPU).name == "rectangles"
    assert choose_backend(CUDA).name == "varlen"
    monkeypatch.setenv(ENVIRONMENT, "auto")
    assert choose_backend(CUDA).name == "flex"


def test_a_name_that_is_none_is_refused(monkeypatch):
    with (
        pytest.raises(ValueError, match=r"'flexx'.*auto, rectangles, flex, flex-flash, triton, varlen"),
        using("flexx"),
    ):
        pass
    monkeypatch.setenv(ENVIRONMENT, "dense")
    with pytest.raises(ValueError, match=f"{ENVIRONMENT}.*'dense'"):
        choose_backend(CPU)


def test_a_backend_that_cannot_run_says_why_and_what_can(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = {"flex": "CUDA device", "flex-flash": "CUDA device", "varlen": "CUDA device", "triton": "Triton is not inst"}
    for name, words in said.items():
        with using(name), pytest.raises(ValueError, match=f"{words}.*rectangles"):
            choose_backend(CPU)
    with using("rectangles"), pytest.raises(ValueError, match=r"the CPU's.*flex, varlen"):
        choose_backend(CUDA)
    assert why_not("flex-flash", CUDA) == "the package flash-attn-4 (module flash_attn.cute) is not installed"
    assert runnable(CPU) == ["rectangles"]


def test_triton_runs_on_a_cpu_in_its_interpreter_only(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "TRITON_INTERPRET=1" in (why_not("triton", CPU) or "")
    assert why_not("triton", CUDA) is None and why_not("flex-flash", CUDA) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runnable(CPU) == ["rectangles", "triton"]


def test_a_missing_parent_package_is_a_missing_package(monkeypatch):
    def find(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert not backends._has_flash_attention_4()


def test_an_engine_says_what_it_takes_and_takes_it(monkeypatch):
    from support.models import make_model

    engine = TreeEngine(make_model())
    assert engine.attention.name == "rectangles" and "CPU" in str(engine.attention)
    monkeypatch.setenv(ENVIRONMENT, "varlen")
    with pytest.raises(ValueError, match="'varlen' cannot run here"):
        engine.logprobs([_row()])


def _row():
    import treetrain as tt

    return tt.Trajectory([1, 2, 3])


def test_every_name_is_described_and_made():
    forest = attention_forest([[1, 2], [1, 3]])
    assert set(backends.DEFAULTS.values()) <= set(BACKENDS)
    assert make_attention(forest, CPU, 64).name == "rectangles"
    assert FlexTreeAttention(forest, CPU).name == "flex"
    flash = FlexTreeAttention(forest, CPU, kernels="FLASH")
    assert flash.name == "flex-flash" and flash._kernels == "FLASH"


@pytest.mark.parametrize(
    "spec", [PLAIN_ATTENTION, AttentionSpec(AttentionRange(window=9)), AttentionSpec(softcap=5.0)], ids=str
)
def test_flexattention_is_compiled_once_for_all_lengths_and_paths(spec, monkeypatch):
    """By the tracer alone: what it would hand to the compiler is counted, and run as it is."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    flex._compiled.cache_clear()
    monkeypatch.setattr(
        flex.torch, "compile", lambda f, dynamic: _traced(f, backend=counter, dynamic=dynamic, fullgraph=True)
    )
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
