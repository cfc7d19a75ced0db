"""Rows of several adapters in one step: each adapter's gradients are those of its own rows, one by one."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import treetrain as tt
from support.models import make_model
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.core.errors import DataError

# Two tasks with equal beginnings; equal rows of two adapters are not the same.
IDS = [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 4, 5], [1, 2, 7, 8], [1, 2, 3, 4], [1, 2, 7, 9, 3]]
NAMES = ["one", "two", "one", "one", "two", "__base__", "two"]
ADVANTAGES = [1.0, -0.5, 2.0, 0.7, 1.5, -1.2, 0.3]


def rows(count: int = 7) -> list[tt.Trajectory]:
    return [tt.Trajectory(ids, advantages=one) for ids, one in zip(IDS[:count], ADVANTAGES)]


def adapted(dtype: torch.dtype = torch.float64, *, base: bool = True, whole: bool = False) -> Any:
    """A model with the adapters one and two, trained; `base`: its first norm too; `whole`: a head of each."""
    own: dict[str, Any] = {"modules_to_save": ["lm_head"]} if whole else {}
    config = LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **own)
    lm = make_model("qwen3", dtype=dtype, **({"tie_word_embeddings": False} if whole else {}))
    model: Any = get_peft_model(lm, config, adapter_name="one")
    model.add_adapter("two", config)
    model.set_requires_grad(["one", "two"], True)
    model.to(dtype)
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data.add_(0.3 * torch.randn_like(p))
        if base and "layers.0.input_layernorm" in name:
            p.requires_grad_(True)
    return model


def by_hand(model: Any, used: list[int], normaliser: float | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of REINFORCE, each row alone through its own adapter in the plain model."""
    count = sum(len(IDS[k]) - 1 for k in used) if normaliser is None else normaliser
    found: dict[str, torch.Tensor] = {}
    total = 0.0
    with PureFloat64():
        for k in used:
            flags = {p: p.requires_grad for p in model.parameters()}
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if NAMES[k] == "__base__":
                with model.disable_adapter():
                    for p, flag in flags.items():
                        p.requires_grad_(flag)
                    logits = model(torch.tensor([IDS[k]])).logits[0]
            else:
                model.set_adapter(NAMES[k])
                for p, flag in flags.items():
                    p.requires_grad_(flag)
                logits = model(torch.tensor([IDS[k]])).logits[0]
            logprobs = logits[:-1].log_softmax(-1).gather(1, torch.tensor(IDS[k])[1:, None])
            loss = -ADVANTAGES[k] * logprobs.sum() / count
            total += loss.item()
            for p, flag in flags.items():
                p.requires_grad_(flag)
            for name, g in zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True)):
                if g is not None:
                    found[name] = found.get(name, 0) + g
    model.set_adapter("one")
    for p, flag in flags.items():
        p.requires_grad_(flag)
    return total, found


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: g for name, g in found.items() if g.any()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative difference of all gradients together."""
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=0, atol=1e-12 * max(1.0, g.abs().max().item()), msg=name)
    return linear.relative_error([found[name] for name in expected], list(expected.values()))


@pytest.mark.parametrize(("budget", "whole"), [(None, False), (2, False), (4, True)])
def test_each_adapter_gets_the_gradients_of_its_own_rows(budget, whole, record_property):
    model = adapted(whole=whole)
    total, expected = by_hand(model, list(range(7)))
    assert any(".one." in name for name in expected) and any(".two." in name for name in expected)
    assert (
        not whole
        or {f"base_model.model.lm_head.modules_to_save.{name}.weight" for name in NAMES[:2]} <= expected.keys()
    )
    state = model.active_adapters, [p.requires_grad for p in model.parameters()]
    engine = tt.TreeEngine(model, budget=budget)
    with PureFloat64():
        result = engine.forward_backward(rows(), tt.losses.reinforce(), adapter_names=NAMES)
        assert result.loss == pytest.approx(total, rel=1e-12)
        assert result.flat_tokens == sum(map(len, IDS)) and result.unique_tokens == 6 + 9 + 4  # one, two, base
        record_property("errors", {"float64": same(grads(model), expected)})
        scored = engine.score(IDS, adapter_names=NAMES, entropies=True)
        count = sum(len(x) for x in scored.logprobs)
        assert [len(x) for x in scored.logprobs] == [len(ids) - 1 for ids in IDS] and len(scored.entropies) == 7
        loss = -sum(a * x.sum() for a, x in zip(ADVANTAGES, scored.logprobs)) / count
        loss.backward()
        scored.backward()
    assert loss.item() == pytest.approx(total, rel=1e-12)
    same(grads(model), expected)
    assert state == (model.active_adapters, [p.requires_grad for p in model.parameters()])


def test_scores_without_gradient_and_losses_that_leave_an_adapter_out():
    model = adapted()
    engine = tt.TreeEngine(model)
    with PureFloat64():
        apart = []
        for ids, name in zip(IDS, NAMES):
            with torch.no_grad():
                apart.append(engine.score([ids], adapter_names=[name]).logprobs[0])
        with torch.no_grad():
            together = engine.score(IDS, adapter_names=NAMES).logprobs
        torch.testing.assert_close(list(together), apart, rtol=0, atol=1e-13)
        assert not torch.allclose(together[1], together[3])  # equal ids, two and one
        scored = engine.score(IDS, adapter_names=NAMES)
        (-ADVANTAGES[0] * scored.logprobs[0].sum()).backward()
        scored.backward()
        same(grads(model), by_hand(model, [0], normaliser=1.0)[1])


def test_further_ids_go_with_their_rows():
    engine = tt.TreeEngine(adapted())
    asked = [None if k == 2 else [[k, 7]] * (len(ids) - 1) for k, ids in enumerate(IDS)]
    with torch.no_grad(), PureFloat64():
        together = engine.score(IDS, adapter_names=NAMES, ids=asked).id_logprobs
        for ids, name, own, found in zip(IDS, NAMES, asked, together, strict=True):
            (alone,) = engine.score([ids], adapter_names=[name], ids=[own]).id_logprobs
            assert found.numel() == (0 if own is None else 2 * (len(ids) - 1))
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def test_a_mask_goes_with_its_rows_and_an_error_leaves_no_gradient():
    model = adapted()
    engine = tt.TreeEngine(model)
    weights = [[0.0] * (len(ids) - 1) if k in (1, 4) else [1.0] * (len(ids) - 1) for k, ids in enumerate(IDS)]
    with PureFloat64():
        masked = engine.score(IDS, adapter_names=NAMES, mask=weights)
        assert [not x.any() for x in masked.logprobs] == [k in (1, 4) for k in range(7)]
        masked.drop_gradients()
        broken = [*rows(5), tt.Trajectory([1, 10**6], advantages=1.0)]
        with pytest.raises(DataError, match="1000000"):
            engine.forward_backward(broken, tt.losses.reinforce(), adapter_names=[*NAMES[:5], "two"])
    assert all(p.grad is None for p in model.parameters()) and model.active_adapters == ["one"]


def test_frozen_unknown_and_missing_adapters_are_one_error_each():
    model, loss = adapted(torch.float32, base=False), tt.losses.reinforce()
    engine = tt.TreeEngine(model)
    with pytest.raises(DataError, match=r"row 1 has the adapter 'c'; known: one, two, __base__"):
        engine.forward_backward(rows(2), loss, adapter_names=["one", "c"])
    with pytest.raises(DataError, match="2 rows and 1 adapter_names; give one name for each row"):
        engine.forward_backward(rows(2), loss, adapter_names=["one"])
    with pytest.raises(ValueError, match=r"row 1 has the adapter '__base__', whose weights are all frozen.*leave such"):
        engine.forward_backward(rows(2), loss, adapter_names=["one", "__base__"])
    model.set_requires_grad("two", False)
    with pytest.raises(ValueError, match=r"row 1 has the adapter 'two', .*frozen.*set_requires_grad\('two', True\)"):
        engine.forward_backward(rows(2), loss, adapter_names=["one", "two"])
    scored = engine.score(IDS[:2], adapter_names=["one", "two"])
    assert scored.logprobs[0].requires_grad and not scored.logprobs[1].requires_grad
    scored.logprobs[0].sum().backward()
    scored.backward()
    assert {name.split(".")[-2] for name in grads(model)} == {"one"}
    with pytest.raises(TypeError, match=r"adapter_names is for a peft.PeftModel, and the model is a Qwen3ForCausalLM"):
        tt.TreeEngine(make_model("qwen3")).score(IDS, adapter_names=NAMES)
    with pytest.raises(ValueError, match="scope='batch'"):
        whole = lambda logprobs, entropies, rows: (sum(x.sum() for x in logprobs), {})  # noqa: E731
        whole.scope = "batch"  # type: ignore[attr-defined]
        model.set_requires_grad("two", True)
        engine.forward_backward(rows(2), whole, 1.0, adapter_names=["one", "two"])


def of_ranks(group: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients where rank 0 has rows of one adapter and rank 1 of both."""
    model = adapted(base=False)
    own = [[0, 2, 3], [1, 4, 6]][torch.distributed.get_rank(group)]
    engine = tt.TreeEngine(model, group=group)
    with PureFloat64():
        result = engine.forward_backward(
            [rows()[k] for k in own], tt.losses.reinforce(), adapter_names=[NAMES[k] for k in own]
        )
    return result.loss, grads(model)


def test_ranks_with_rows_of_different_adapters_train_as_one_process(two):
    model = adapted(base=False)
    total, expected = by_hand(model, [0, 1, 2, 3, 4, 6])
    for loss, found in two.run(of_ranks, timeout=300):
        assert math.isclose(loss, total, rel_tol=1e-12)
        same(found, expected)
