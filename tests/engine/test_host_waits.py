"""Nothing in a step on one device waits for it: shown on meta, where there is nothing to wait for.

Tensors on meta have shapes and no values, so `.item()`, `.tolist()`, `bool()`, `.cpu()`, `nonzero` and boolean masks
raise by themselves. `noticed` looks for what a GPU would also wait for and meta would not: a copy from the host that is
not asynchronous, a tensor made of Python numbers, and an index that lies on the host. What does wait has a test at the
end.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import treetrain as tt
from support.models import make_model
from support.plans import planned
from treetrain.check import first_use
from treetrain.check.forests import whole_pairs, with_random_facts
from treetrain.check.linear_engine import LinearEngine
from treetrain.core.attention.attention import AttentionTree
from treetrain.core.attention.kv_cache import CachedAttention, Inputs
from treetrain.core.attention.schedule import Forest
from treetrain.core.device_arrays import on_device, to_device
from treetrain.core.engine import engine_model
from treetrain.core.tree.layout import FULL, AttentionRange, pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.kernels.tile_lists import keys_of, make_tile_lists
from treetrain.kernels.varlen import VarlenAttention, pieces_of
from treetrain.layers.recurrence.scans import Scans
from treetrain.losses import dpo, gspo, ppo, sft

META = torch.device("meta")


MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


class _Made(TorchFunctionMode):
    """Numbers of the host that become a tensor there, which no dispatcher sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        there = func in MADE_OF_NUMBERS and made.device == META
        assert not there or (isinstance(args[0], Tensor) and func is torch.as_tensor), f"waits: {func} of the host's"
        return made


class _Copied(TorchDispatchMode):
    """Copies from the host that are waited for, and what reads its tensors where they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        from_host = [x for x in tensors if x.device.type == "cpu" and x.dim()]
        there = any(x.device.type == "meta" for x in tensors) or torch.device(kwargs.get("device") or "cpu") == META
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        assert not (copies and from_host and there and not kwargs.get("non_blocking")), f"waits: {func} from the host"
        assert copies or not (from_host and there), f"waits: {func} reads a tensor of the host"
        return func(*args, **kwargs)


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Raise where a GPU in place of meta would be waited for, and meta itself does not see it."""
    with _Made(), _Copied():
        yield


class StandIn(CachedAttention):
    """In place of tree attention: the right shapes, and all of the cache."""

    name = "stand-in"

    def __init__(self, cache):
        self.cache = cache

    def takes(self, query, value, spec):
        return True

    def path_seen(self, spec):
        return 0 if self.cache is None else self.cache.path_tokens

    def forward(self, given, scale, spec):
        query, (key, value) = given.query, given.below_path()
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)

    def backward(self, grad_out, given, out, lse, scale, spec) -> Inputs:
        sinks = None if given.sinks is None else torch.zeros_like(given.sinks)
        key, value = (torch.zeros_like(x, dtype=torch.float32) for x in given.below_path())
        return given.gradients(torch.zeros_like(given.query), key, value, sinks)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Let steps run on meta; everything that is put out of the way for it is named here."""
    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, found: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, found))

        # What meta has not: weights, a backend, free memory, autocast.
        replace(tt.TreeEngine, "_check_device", lambda engine: None)
        replace(AttentionTree, "backend", lambda tree, *_: StandIn(tree._cache))
        replace(engine_model, "free_bytes", lambda device: 1 << 40)
        # Once for a model, before its first step: the comparison with its rows one by one.
        replace(first_use, "compare_first_use", lambda engine, call, tree: None)
        replace(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
        replace(torch, "is_autocast_enabled", lambda kind=None: False)
        replace(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
        stack.enter_context(noticed())
        yield


IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 9], [4], [], [9, 8, 7], [9, 8, 7, 7, 2], [5, 5, 5]]
ROWS = whole_pairs(with_random_facts(IDS, 5))
CHUNKS, SEGMENTS = planned("chunks of 2", "mixed"), planned("one segment per part", "none")
ENGINES = {"one part": tt.TreeEngine, "parts": CHUNKS, "parts, none kept": SEGMENTS}
LOSSES = {
    "sft": sft(),
    "sft by trajectory": sft(reduction="trajectory"),
    "ppo, entropy and kl": ppo(entropy=0.05, kl=0.1),
    "ppo, corrected": ppo(importance_cap=2.0, importance_mode="sequence_mask"),
    "gspo": gspo(),
    "dpo": dpo(),
}


def no_wait(model, loss, engine=tt.TreeEngine, rows=ROWS, **options) -> tt.StepResult:
    """A step in which a wait raises, and after which the numbers are still to come."""
    with on_meta():
        result = engine(model, **options).forward_backward(rows, loss)
    assert any(p.grad is not None for p in model.parameters())
    with pytest.raises(NotImplementedError, match="no data"):
        _ = result.loss
    return result


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3").to(META)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("loss", "engine"),
    [
        *((loss, "parts") for loss in LOSSES),
        ("sft", "one part"),
        ("ppo, entropy and kl", "one part"),
        ("sft", "parts, none kept"),
        ("dpo", "parts, none kept"),
    ],
)
def test_no_part_of_a_step_waits_for_the_device(model, loss, engine):
    result = no_wait(model, LOSSES[loss], ENGINES[engine])
    assert (result.parts > 3) == (engine != "one part")


@pytest.mark.slow
def test_a_budget_and_the_linear_baseline_make_no_wait(model):
    assert no_wait(model, sft(), budget=4).parts > 1
    assert no_wait(model, sft(), LinearEngine, pack_tokens=6).parts > 1


@pytest.mark.slow
def test_a_loss_of_the_users_own_makes_no_wait(model):
    def own(logprobs, entropies, trajectory):
        return -logprobs.sum(), {"mean": (logprobs.sum(), float(len(logprobs))), "rows": 1.0}

    own.normaliser = lambda rows: 3.0  # type: ignore[attr-defined]
    no_wait(model, own, CHUNKS)


@pytest.mark.slow
def test_values_adapters_and_checkpointed_layers_make_no_wait():
    from peft import LoraConfig, get_peft_model

    critic = [row.replace(values=np.zeros(len(row)), returns=np.ones(len(row))) for row in ROWS]
    plain = make_model("qwen3").to(META)
    head = torch.nn.Linear(plain.config.hidden_size, 1, device=META)
    no_wait(plain, ppo(value_coefficient=0.5), CHUNKS, rows=critic, value_head=head)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    no_wait(plain.train(), sft(), CHUNKS)
    adapted = get_peft_model(make_model("qwen3"), LoraConfig(r=2, target_modules=["q_proj", "lm_head"])).to(META)
    no_wait(adapted, sft(), CHUNKS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_sinks_and_experts_make_no_wait(family):
    made = make_model(family)
    if getattr(made.config, "num_experts", None) or getattr(made.config, "num_local_experts", None):
        made.set_experts_implementation("batched_mm")  # the eager one asks which experts were hit
    assert no_wait(made.to(META), sft(), CHUNKS).parts > 3


@pytest.mark.slow
def test_grouped_products_of_experts_make_no_wait():
    made = make_model("qwen3_moe", dtype=torch.bfloat16, hidden_size=32)
    made.set_experts_implementation("grouped_mm")  # what transformers takes where nothing is asked for
    no_wait(made.to(META), sft(), CHUNKS)


def test_the_balance_of_routers_makes_no_wait_but_where_the_models_own_loss_is_held_against_it(monkeypatch):
    made = make_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.1)
    made.set_experts_implementation("batched_mm")
    with pytest.raises(RuntimeError, match=r"(?i)meta"):
        no_wait(made.to(META), sft(), CHUNKS)
    monkeypatch.setattr("treetrain.layers.experts.experts.Experts.verified", True)
    no_wait(made, sft(), CHUNKS)


@pytest.mark.parametrize("path", [0, 300])
def test_tables_of_the_backends_of_a_gpu_make_no_wait(path):
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 9, 200).tolist()
    layout = pack(build_tree([[*trunk[:n], 10 + n, *trunk] for n in (0, 50, 120, 150)]))
    forest = Forest(
        ends=layout.ends,
        depth=layout.positions + path,
        segment_start=layout.segment_start,
        segment_parent=layout.segment_parent,
    )
    with noticed():
        for visible_range in (FULL, AttentionRange(window=70), AttentionRange(chunk=90)):
            lists = make_tile_lists(keys_of(forest.ends, forest.depth, path, visible_range))
            assert to_device([*lists.by_query, *lists.by_key], META)[0].device == META
        if not path:
            VarlenAttention(pieces_of(forest), META)
        Scans(layout, np.array([3, 60]), META)


# The tools themselves


def test_waits_are_noticed():
    there, here = torch.zeros(3, device=META), torch.zeros(3)
    blocking = {
        "a plain copy": lambda: here.to(META),
        "a copy in place": lambda: there.copy_(here),
        "an array": lambda: torch.as_tensor(np.zeros(3), device=META),
        "numbers": lambda: torch.tensor([1.0, 2.0], device=META),
        "numbers like": lambda: there.new_tensor(2.0),
        "an index of the host": lambda: there[torch.tensor([0, 1])],
        "a mask": lambda: there[there > 0],
        "one number": lambda: float(there.sum()),
        "a truth": lambda: bool(there.any()),
        "a list": lambda: there.tolist(),
        "the way back": lambda: there.cpu(),
        "a comparison": lambda: torch.equal(there, there),
    }
    for name, waits in blocking.items():
        with noticed(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            waits()
            pytest.fail(f"{name} was not noticed")
    with noticed():
        on_device(np.arange(3), META, torch.float64)
        assert (there * 2.0 + torch.full((), 3.0, device=META)).shape == (3,)


def test_what_goes_to_a_gpu_is_pinned_and_not_waited_for(monkeypatch):
    cuda, sent = torch.device("cuda"), []

    class Pinned(torch.Tensor):
        pass

    def to(self, device, non_blocking=False):
        sent.append((device, non_blocking, type(self)))
        return self.as_subclass(torch.Tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.as_subclass(Pinned))
    monkeypatch.setattr(torch.Tensor, "to", to)
    found = on_device(np.array([1.5, 2.5]), cuda, torch.float32)
    assert sent == [(cuda, True, Pinned)] and found.dtype == torch.float32 and found.tolist() == [1.5, 2.5]
