"""Bytes that tensors take, and bytes that the system has free."""

from types import SimpleNamespace

import psutil
import torch

from treetrain.core.engine import memory
from treetrain.core.engine.memory import expandable_segments
from treetrain.models.meters import CountStorages

CPU = torch.device("cpu")


def test_live_bytes_are_those_of_tensors_that_live():
    with CountStorages() as meter:
        kept = torch.zeros(1000)
        view = kept[10:].add_(1.0)
        assert meter.now == 4000
        torch.ones(500).sum()
        assert meter.now < 4100 and 6000 <= meter.peak < 6100
        meter.peak = meter.now
        assert meter.peak == meter.now
        del kept
        assert meter.now >= 4000  # the view still holds it
        del view
    assert meter.now < 100


def test_live_bytes_are_counted_in_backward_too():
    weight = torch.ones(1000, requires_grad=True)
    with CountStorages() as meter:
        weight.exp().sum().backward()
        assert weight.grad is not None and meter.now >= 4000
    assert meter.peak >= 8000


def test_free_bytes_are_what_the_tightest_control_group_leaves(monkeypatch, tmp_path):
    everything = memory.free_bytes(CPU)
    assert 0 < everything <= memory.USABLE["cpu"] * psutil.virtual_memory().available * 1.2  # other work goes on
    group = tmp_path / "group"
    group.mkdir()
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000, total=20_000))
    monkeypatch.setattr(memory, "_control_groups", lambda _listing: [group])
    assert memory.free_bytes(CPU) == 8000
    (group / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    (group / "memory.current").write_text("4500\n")
    (group / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) == 8000
    (group / "memory.max").write_text("5000\n")
    assert memory.free_bytes(CPU) == 800  # 5000 - 4500, and the cache that can go


def test_the_cuda_allocator_grows_its_segments_unless_the_environment_configures_it(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    expandable_segments()
    assert said == []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    expandable_segments()
    assert said == ["expandable_segments:True"]
