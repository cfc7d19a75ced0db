"""Every class of transformers that is exact holds the numerics contract in all precisions, on two kinds of data."""

from collections.abc import Callable

import pytest
import torch

from support.every_class import KEPT_CASTS, seen_by_attention, small_model, windowed
from support.every_class_contract import (
    RATIO,
    Errors,
    errors_of,
    forests_for,
    on_random_forests,
    random_forests,
)
from support.plans import planned
from support.real_rows import LONGEST, SOURCES, VOCABULARY, loader, with_facts
from treetrain.engine.engine import TreeEngine
from treetrain.models.loading import FamilyTable
from treetrain.testing.contract import PPO, Rows, as_dtype

EXACT = FamilyTable.packaged().of("exact")
NAMES = [found.model_type for found in EXACT]
LIFTED = {found.model_type: KEPT_CASTS not in found.reason for found in EXACT}
WINDOWS_TO_TURN_ON = ["dots1", "laguna", "mellum", "ministral", "ministral3", "mistral", "mixtral", "phi3", "phimoe"]
WINDOWS_TO_TURN_ON += ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"]
"""Classes that know windows, but whose defaults have none of them, or nothing else."""
NO_USE_OF_ITS_WINDOW = ["moshi"]
"""Has the field, and masks as if it had not, in its own rows as well."""
PARTS = (planned("N/4", "mixed"), planned("chunks of 7", "none"))


@pytest.fixture(scope="module")
def load(shared_data) -> Callable[[str], Rows]:
    """A source's rows."""
    return loader(shared_data)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_class_holds_the_contract_on_random_forests(name, record_property):
    model = small_model(name)
    assert model is not None
    errors = on_random_forests(model, lifted=LIFTED[name], seed=100)
    record_property("errors", errors)
    assert errors.within(lifted=LIFTED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS_TO_TURN_ON)
def test_a_class_holds_the_contract_with_the_windows_that_its_defaults_have_not(name, record_property):
    model = windowed(name)
    assert model is not None
    with seen_by_attention() as asked:
        errors = on_random_forests(model, lifted=LIFTED[name], seed=200)
    record_property("errors", errors)
    assert "sliding_attention" in asked
    assert errors.within(lifted=LIFTED[name])


@pytest.mark.slow
def test_no_class_has_windows_that_no_test_turns_on():
    missing = []
    for found in EXACT:
        if not {"sliding_attention", "full_attention"} <= set(found.layers) and windowed(found.model_type) is not None:
            missing.append(found.model_type)
    assert missing == sorted(WINDOWS_TO_TURN_ON + NO_USE_OF_ITS_WINDOW)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)), ids=NAMES)
def test_a_class_holds_the_contract_on_real_trajectories(number, name, load, record_property):
    sizes = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), LONGEST)
    model = small_model(name, vocab_size=VOCABULARY, **sizes)
    assert model is not None and model.config.get_text_config().vocab_size == VOCABULARY
    single = as_dtype(model, torch.float32)
    first = number % len(SOURCES)
    rows, *others = (with_facts(single, load(source)) for source in [*SOURCES, *SOURCES][first : first + len(SOURCES)])
    engines = (TreeEngine, PARTS[number % len(PARTS)])
    options = {"lifted": LIFTED[name], "cases": [PPO], "engines": engines}
    # In float64 and float32 on one of the sets, in bfloat16 on all three.
    errors = errors_of(model, [rows], also_bfloat16=others, **options)
    record_property("errors", errors)
    assert errors.within(lifted=LIFTED[name])


def test_errors_beyond_a_bound_are_seen():
    good = Errors(1e-15, 1e-6, 1e-6, 1.1)
    assert good.within(lifted=True) and Errors(1e-15, 1e-6, 1e-6, None).within(lifted=True)
    assert not Errors(2e-12, 1e-6, 1e-6, 1.1).within(lifted=True) and Errors(2e-12, 1e-6, 1e-6, 1.1).within(
        lifted=False
    )
    assert not Errors(1e-15, 2e-5, 1e-6, 1.1).within(lifted=True) and Errors(1e-15, 2e-5, 1e-5, 1.1).within(lifted=True)
    assert not Errors(1e-15, 1e-6, 1e-6, 1.6).within(lifted=True)


def test_a_class_with_relu_is_pooled_over_more_forests_in_bfloat16():
    # The first ones are the same, so that float64 and float32 are measured on what other classes are.
    forests, more = forests_for(a_small("opt"))
    assert (len(forests), len(more)) == (3, 21)
    assert [[row.ids.tolist() for row in forest] for forest in forests] == [
        [row.ids.tolist() for row in forest] for forest in random_forests(3)
    ]
    assert [len(found) for found in forests_for(a_small("llama"))] == [3, 0]
    assert [len(found) for found in forests_for(a_small("opt", activation_function="gelu"))] == [3, 0]


@pytest.mark.slow
def test_it_is_relu_and_nothing_else_of_opt_that_three_forests_are_too_few_for():
    smooth = errors_of(a_small("opt", activation_function="gelu"), random_forests(3)).bfloat16
    stepped = errors_of(a_small("opt"), random_forests(3)).bfloat16
    assert smooth is not None and stepped is not None and smooth <= 1.1 < RATIO < stepped


def a_small(name: str, **fields) -> torch.nn.Module:
    """A small float64 model of a class."""
    model = small_model(name, **fields)
    assert model is not None
    return model


def test_an_engine_that_is_a_little_wrong_is_seen():
    class Cut(TreeEngine):
        def forward_backward(self, trajectories, loss, normaliser=None, balance=None, **options):
            return super().forward_backward(trajectories[:-1], loss, normaliser or loss.normaliser(trajectories))

    model = small_model("llama")
    assert model is not None
    assert not errors_of(model, random_forests(1), engines=[Cut]).within(lifted=True)
