"""Every class of transformers that is exact holds the numerics contract in all precisions, on two kinds of data."""

from collections.abc import Callable

import pytest
import torch

from support.contract import PPO, Rows
from support.every_class import KEPT_CASTS, small_model
from support.every_class_contract import Errors, errors_of, random_forests
from support.models import as_dtype
from support.plans import planned
from support.real_rows import LONGEST, SOURCES, VOCABULARY, loader, with_facts
from treetrain.engine.engine import TreeEngine
from treetrain.models.table import FamilyTable

EXACT = FamilyTable.packaged().of("exact")
NAMES = [found.model_type for found in EXACT]
LIFTED = {found.model_type: KEPT_CASTS not in found.reason for found in EXACT}
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
    errors = errors_of(model, random_forests(3, seed=100), lifted=LIFTED[name])
    record_property("errors", errors)
    assert errors.within(lifted=LIFTED[name])


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


def test_an_engine_that_is_a_little_wrong_is_seen():
    class Cut(TreeEngine):
        def forward_backward(self, trajectories, loss, normaliser=None, balance=None, **options):
            return super().forward_backward(trajectories[:-1], loss, normaliser or loss.normaliser(trajectories))

    model = small_model("llama")
    assert model is not None
    assert not errors_of(model, random_forests(1), engines=[Cut]).within(lifted=True)
