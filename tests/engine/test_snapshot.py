"""A model is read when something has changed, and looked at otherwise: the look sees all that a fresh read would."""

from collections import OrderedDict
from copy import deepcopy

import peft
import pytest
import torch
from torch import nn

import treetrain as tt
from support.models import make_model
from treetrain.core.engine.model_state import ModelState
from treetrain.core.engine.snapshot import Snapshot

ROWS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8]]


def adapted():
    model = make_model("qwen3", dtype=torch.float64)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0))


def layer(model):
    return model.base_model.model.model.layers[1]


def adapter(model):
    return layer(model).self_attn.q_proj


def new_weight(model):
    layer(model).mlp.up_proj.weight = nn.Parameter(layer(model).mlp.up_proj.weight.detach().clone())


def equal_number(model):
    layer(model).gate = nn.Parameter(torch.ones(1))
    yield
    layer(model).gate = nn.Parameter(torch.ones(1))


def new_module(model):
    layer(model).mlp.up_proj = deepcopy(layer(model).mlp.up_proj)


def another_module(model):
    layer(model).extra = nn.Dropout(0.0)
    yield
    layer(model).extra.p = 0.5


def frozen(model):
    adapter(model).lora_A["default"].weight.requires_grad_(False)


def other_dtype(model):
    adapter(model).lora_A["default"].weight.data = adapter(model).lora_A["default"].weight.data.float()


def a_forward(model):
    mlp = layer(model).mlp
    mlp.forward = mlp.forward


def a_hook_in_new_hooks(model):
    layer(model)._forward_hooks = OrderedDict()
    yield
    layer(model).register_forward_hook(lambda *_: None)


def a_setting(model):
    model.config.rms_norm_eps = 0.1


def a_dict_of_the_configuration(model):
    model.config.rope_parameters["rope_theta"] = 7.0


def an_equal_configuration(model):
    layer(model).self_attn.config = deepcopy(layer(model).self_attn.config)
    yield
    layer(model).self_attn.config.sliding_window = 3


def another_adapter(model):
    adapter(model).lora_A["other"] = nn.Linear(4, 2, dtype=torch.float64)


def a_first_parameter(model):
    adapter(model).lora_embedding_A["default"] = nn.Parameter(torch.ones(1))


def a_parameter_among_adapters(model):
    adapter(model).lora_A.scale = nn.Parameter(torch.ones(1))


def other_adapters(model):
    adapter(model).lora_A = nn.ModuleDict(adapter(model).lora_A)


def an_adapters_class(model):
    adapter(model).lora_A.__class__ = type("Other", (nn.ModuleDict,), {})


def scaling(model):
    adapter(model).scaling["default"] = 3.0


def an_equal_list(model):
    adapter(model).merged_adapters = []
    yield
    adapter(model).merged_adapters.append("default")


def evaluation(model):
    layer(model).mlp.train(not layer(model).mlp.training)


def another_class(model):
    layer(model).mlp.__class__ = type("Other", (type(layer(model).mlp),), {})


def a_field_that_was_a_tensor(model):
    layer(model).kept = torch.ones(2)
    yield
    layer(model).kept = 1.0


def renamed(model):
    mlp = layer(model).mlp
    mlp.other_proj = mlp._modules.pop("up_proj")


CHANGES = [
    new_weight,
    equal_number,
    new_module,
    another_module,
    frozen,
    other_dtype,
    a_forward,
    a_hook_in_new_hooks,
    a_setting,
    a_dict_of_the_configuration,
    an_equal_configuration,
    another_adapter,
    a_first_parameter,
    a_parameter_among_adapters,
    other_adapters,
    an_adapters_class,
    scaling,
    an_equal_list,
    evaluation,
    another_class,
    a_field_that_was_a_tensor,
    renamed,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_has_changed_is_read_again(change):
    model = adapted()
    prepared = tt.TreeEngine(model).prepared
    before = prepared.read()
    for _ in change(model) or ():  # what stands after a yield changes what has been set before it
        before = prepared.read()
    now, fresh = prepared.read(), ModelState.of(model, None)
    assert now[:4] == fresh[:4] and now is not before
    assert [*map(id, prepared.parameters)] == [*map(id, model.parameters())]
    assert [*map(id, prepared.modules)] == [*map(id, model.modules())]


def test_a_method_of_a_class_that_has_been_replaced_is_a_change(monkeypatch):
    model = make_model("qwen3")
    snapshot = Snapshot([model])
    assert snapshot.unchanged()
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: x)
    assert not snapshot.unchanged()


def test_a_tensor_that_a_module_keeps_is_not_kept_alive():
    import weakref

    model = make_model("qwen3")
    model.kept, model.listed = torch.ones(2), [torch.ones(2)]
    snapshot, kept = Snapshot([model]), [weakref.ref(x) for x in (model.kept, model.listed[0])]
    model.kept, model.listed[0] = torch.ones(2), torch.ones(2)
    assert snapshot.unchanged() and all(x() is None for x in kept)


def test_steps_neither_read_a_model_again_nor_walk_its_modules(monkeypatch):
    model = adapted()
    engine, walks = tt.TreeEngine(model), []
    walk, read = nn.Module.named_modules, ModelState.of

    def walked(module, *given, **options):
        if module is model:
            walks.append("walk")
        return walk(module, *given, **options)

    def was_read(*given):
        walks.append("read")
        return read(*given)

    monkeypatch.setattr(ModelState, "of", was_read)
    monkeypatch.setattr(nn.Module, "named_modules", walked)
    engine.forward_backward(ROWS, tt.losses.sft())
    walks.clear()
    engine.forward_backward(ROWS, tt.losses.sft())
    scored = engine.score(ROWS)
    sum(row.sum() for row in scored.logprobs).backward()
    scored.backward()
    assert not walks
    model.train(not model.training)
    engine.forward_backward(ROWS, tt.losses.sft())
    assert walks.count("read") == 1
