"""On a GPU a backend proves itself before its first use; one that fails is passed over, and the next takes its place.

There is no GPU here, so the CPU plays one: the order and the check are a GPU's, and stand-ins serve as its kernels.
"""

import itertools
import logging
import warnings

import numpy as np
import pytest
import torch
from test_varlen import WIDE, SequenceBySequence
from torch._subclasses import FakeTensorMode

from support.models import make_model
from support.plans import planned
from treetrain.check.linear import gradients, relative_error
from treetrain.check.linear_engine import LinearEngine
from treetrain.core.attention.rectangles import PlainKernel, RectangleAttention
from treetrain.core.attention.schedule import PLAIN_ATTENTION, AttentionSpec
from treetrain.core.tree.layout import AttentionRange
from treetrain.engine import TreeEngine
from treetrain.kernels import attention_check as self_check
from treetrain.kernels import backends
from treetrain.kernels import checks as kernel_checks
from treetrain.kernels.backends import BACKENDS, ENVIRONMENT
from treetrain.kernels.flash_kernel import FlashKernel, kernel_of
from treetrain.kernels.varlen import VarlenAttention, pieces_of, suits
from treetrain.losses import sft

CPU = torch.device("cpu")
ORDER = ("varlen", "triton", "rectangles", "matmul")
SPECS = {
    "full": PLAIN_ATTENTION,
    "window": AttentionSpec(AttentionRange(window=self_check.WINDOW)),
    "chunk": AttentionSpec(AttentionRange(chunk=self_check.CHUNK)),
    "cap": AttentionSpec(softcap=5.0),
}


def varlen(forest, cache, device, size):
    if cache is not None and cache.path_tokens:
        return None
    pieces = pieces_of(forest)
    kernel = SequenceBySequence()
    return VarlenAttention(pieces, device, cache=cache, kernel=kernel, dtypes=WIDE) if suits(pieces) else None  # type: ignore[arg-type]


def triton(forest, cache, device, size):
    made = RectangleAttention(forest, cache=cache, heads_times_size=size)
    made.name = "triton"
    return made


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The CPU with the order and the check of a GPU."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(backends, "CHECKED", {"cpu"})
    monkeypatch.setitem(backends.ORDER, "cpu", ORDER)
    monkeypatch.setattr(backends, "why_not", lambda name, device: None)
    monkeypatch.setattr(kernel_checks, "_FAILURES", {})
    monkeypatch.setitem(BACKENDS, "varlen", varlen)
    monkeypatch.setitem(BACKENDS, "triton", triton)


@pytest.fixture
def one_case(monkeypatch):
    """The Gaussian inputs alone, for tests of what follows from a check."""
    cases = self_check._cases
    monkeypatch.setattr(self_check, "_cases", lambda *given: itertools.islice(cases(*given), 1))


def step(engine):
    """Gradients of a step, and the backends that ran."""
    engine.model.zero_grad()
    result = engine.forward_backward(ROWS, sft())
    return gradients(engine.model), result.attention


def errors_of(make, spec=PLAIN_ATTENTION, dtype=torch.float64, **options):
    options = {"sinks": False, "below_path": False} | options
    runs = self_check._runs(make, (4, 2), (16, 8), dtype, CPU, spec, **options)
    return {name: error for run in runs for name, error in run().items()}


@pytest.mark.parametrize("below_path", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("spec", list(SPECS.values()), ids=list(SPECS))
@pytest.mark.parametrize("name", ["triton", "rectangles", "matmul"])
def test_a_backend_that_is_right_has_no_error(name, spec, sinks, below_path):
    found = errors_of(BACKENDS[name], spec, sinks=sinks, below_path=below_path)
    assert len(found) == 7 * (4 + sinks) and max(found.values()) <= 1e-12, found


def test_stock_varlen_calls_serve_the_forest_of_the_check():
    assert max(errors_of(varlen, sinks=True).values()) <= 1e-12


@pytest.mark.parametrize("below_path", [False, True])
def test_rectangles_on_a_gpu_take_flash_attention_for_all_but_tiles(below_path):
    flash = FlashKernel()
    flash._flash = SequenceBySequence()  # type: ignore[assignment]
    before = SequenceBySequence.calls

    def make(forest, cache, device, size):
        # Calls cost nothing, so there are many.
        return RectangleAttention(forest, cache=cache, call_pairs=0.0, kernel_of=lambda *_: flash)

    assert max(errors_of(make, below_path=below_path).values()) <= 1e-12
    assert SequenceBySequence.calls > before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gpu_takes_flash_attention_in_16_bits_only_and_products_for_the_rest(dtype):
    query, large = torch.zeros(1, 2, 8, device="meta", dtype=dtype), torch.zeros(1, 2, 264, device="meta", dtype=dtype)
    expected = PlainKernel if dtype == torch.float32 else FlashKernel
    assert type(kernel_of(query, query, PLAIN_ATTENTION)) is expected
    assert type(kernel_of(query, large, PLAIN_ATTENTION)) is PlainKernel
    assert type(kernel_of(query, query, SPECS["cap"])) is PlainKernel


# ---- broken backends


def broken(make, how):
    """The backend with a fault, as a wrong kernel or a compiler has it."""

    def made(forest, cache, device, size):
        if how == "does not compile":
            raise RuntimeError("ptxas: unsupported architecture\nmore lines")
        attend = make(forest, cache, device, size)
        if attend is None:
            return None
        forward, backward = attend.forward, attend.backward

        def wrong_forward(given, scale, spec):
            out, lse = forward(given, scale, spec)
            return (torch.full_like(out, torch.nan) if how == "nan" else out * 1.2), lse

        def wrong_backward(*given):
            grads = backward(*given)
            return grads._replace(key=grads.key * 0.8)

        if how in ("nan", "output"):
            attend.forward = wrong_forward
        else:
            attend.backward = wrong_backward
        return attend

    return made


_RANDOM = np.random.default_rng(0)
TRUNK, *BRANCHES = ([n, *_RANDOM.integers(0, 37, size)] for n, size in enumerate((149, 50, 100, 80, 70)))
ROWS = [TRUNK + BRANCHES[0], TRUNK + BRANCHES[1], TRUNK + BRANCHES[2], BRANCHES[3]]
"""Enough tokens in chains and rectangles for varlen calls."""
HOWS = ("does not compile", "nan", "output", "gradient of keys")


@pytest.mark.few(1)
@pytest.mark.parametrize("how", HOWS)
def test_the_next_backend_takes_the_place_of_a_broken_one_and_the_result_is_right(how, monkeypatch, one_case):
    model = make_model("gpt2", dtype=torch.float64)
    expected, _ = step(LinearEngine(model))
    for number, runs in enumerate(ORDER):
        if number:
            last = ORDER[number - 1]
            monkeypatch.setitem(BACKENDS, last, broken(BACKENDS[last], how))
        kernel_checks._FAILURES.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found, ran = step(TreeEngine(model))
        assert relative_error(found, expected) <= 1e-12 and set(ran) == {runs}
        passed_over = [str(w.message) for w in told if "passed over" in str(w.message)]
        assert len(passed_over) == number, "one warning each, though every layer asks"
        for name, said in zip(ORDER, passed_over):
            assert name in said and "benchmarks/quarter_hour.py --only right" in said
            assert ("ptxas" in said) == (how == "does not compile") and "more lines" not in said


def test_parts_below_a_path_prove_the_path_too(monkeypatch, one_case):
    """A backend that is right on whole trees only is passed over below a path."""

    def forgets_the_path(forest, cache, device, size):
        attend = triton(forest, cache, device, size)
        backward = attend.backward
        attend.backward = lambda *given: backward(*given)._replace(path=None)
        return attend

    monkeypatch.setitem(BACKENDS, "triton", forgets_the_path)
    model = make_model("gpt2", dtype=torch.float64)
    expected, _ = step(LinearEngine(model))
    with pytest.warns(RuntimeWarning, match=r"triton.*is off in .*of keys"):
        found, ran = step(planned("one segment per part", "none")(model))
    assert relative_error(found, expected) <= 1e-12
    assert set(ran) <= {"varlen", "triton", "rectangles"} and ran["rectangles"]


@pytest.mark.filterwarnings("ignore:tree attention")
def test_a_named_backend_that_is_wrong_raises_and_so_do_all_together(monkeypatch, one_case):
    model = make_model("gpt2", dtype=torch.float64)
    for name in ORDER:
        monkeypatch.setitem(BACKENDS, name, broken(BACKENDS[name], "output"))
    with pytest.raises(
        RuntimeError, match=r"no tree attention can run on cpu.*'varlen' is off in the output by 2\.0e-01"
    ):
        TreeEngine(model).logprobs(ROWS)
    monkeypatch.setenv(ENVIRONMENT, "triton")
    with pytest.raises(RuntimeError, match=rf"'triton' is off in the output.*{ENVIRONMENT}"):
        TreeEngine(model).logprobs(ROWS)


def test_a_kind_of_layer_is_checked_once_and_said_in_the_log(caplog, one_case):
    model = make_model("gpt2", dtype=torch.float64)
    with caplog.at_level(logging.INFO, logger="treetrain.kernels.checks"):
        for _ in range(2):
            TreeEngine(model).logprobs(ROWS)
    assert [record.message.split(" (")[0] for record in caplog.records] == ["tree attention 'varlen'"]


def test_the_check_leaves_the_random_state_and_the_callers_gradient_mode(one_case):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    x = torch.zeros(2, 4, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        given = ("matmul", BACKENDS["matmul"], x, x, x, PLAIN_ATTENTION)
        assert self_check.failure_of_backend(*given, sinks=False, below_path=True) is None
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.rand(3), expected)


def test_the_check_compares_numbers_where_the_caller_has_tensors_without_data(one_case):
    with FakeTensorMode():
        x = torch.zeros(2, 4, 16)
        given = ("matmul", BACKENDS["matmul"], x, x, x, PLAIN_ATTENTION)
        assert self_check.failure_of_backend(*given, sinks=False, below_path=True) is None


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_want_of_memory_says_nothing_about_the_backend(error, monkeypatch):
    def no_memory(*given):
        raise error

    monkeypatch.setitem(BACKENDS, "varlen", no_memory)
    x = torch.zeros(2, 4, 16)
    given = ("varlen", BACKENDS["varlen"], x, x, x, PLAIN_ATTENTION)
    with pytest.raises(type(error)):
        self_check.failure_of_backend(*given, sinks=False, below_path=False)
    assert not kernel_checks._FAILURES


def test_limits_tell_a_wrong_kernel_from_rounding():
    """A right backend in 16 bits is far below the limit, one wrong tile far above it."""
    for dtype, most in ((torch.float32, 3e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)):
        assert max(errors_of(BACKENDS["matmul"], dtype=dtype).values()) <= most

    def one_tile_is_zero(forest, cache, device, size):
        attend = BACKENDS["matmul"](forest, cache, device, size)
        assert attend is not None
        forward = attend.forward
        attend.forward = lambda *given: (
            forward(*given)[0].index_fill(0, torch.arange(min(16, len(given[0].query))), 0.0),
            forward(*given)[1],
        )
        return attend

    assert errors_of(one_tile_is_zero)["the output"] > np.sqrt(kernel_checks.LIMIT_16_BITS) / 2


# ---- faults that Gaussian inputs and one run do not show


def planted(fault):
    """The backend "matmul" with a fault: a function of the tensors given, the output, and the number of the call."""
    calls = iter(range(1_000_000))

    def made(forest, cache, device, size):
        attend = BACKENDS["matmul"](forest, cache, device, size)
        assert isinstance(attend, RectangleAttention)
        forward, number = attend.forward, next(calls)
        attend.forward = lambda given, *rest: (fault(given, forward(given, *rest)[0], number), forward(given, *rest)[1])
        return attend

    return made


def wrong_on_large_keys(given, out, number):
    """As if scores were summed in 16 bits: their error grows with the norm of keys."""
    large = given.key.double().square().mean().sqrt()
    return out * (1 + 1e-3 * (large - 1).clamp(min=0)).to(out.dtype)


def wrong_on_peaked_rows(given, out, number):
    scores = given.query[:, 0].double() @ given.key[:, 0].double().T * given.query.shape[2] ** -0.5
    return out * torch.where(scores.amax() > 30, 1.1, 1.0).to(out.dtype)


def wrong_on_equal_keys(given, out, number):
    return out * (1.1 if len(given.key) > 1 and (given.key == given.key[0]).all() else 1.0)


def wrong_on_one_token(given, out, number):
    return out * (1.1 if len(out) == 1 else 1.0)


def wrong_on_branches_of_one_token(given, out, number):
    """A call of one-token queries alone, as of the branch that ends a light depth."""
    alone = self_check._alone(self_check._layout(0, self_check._forks), 0)
    if len(out) == self_check._layout(0, self_check._forks).num_tokens:
        out = out.index_fill(0, torch.from_numpy(alone), 0.0)
    return out


def wrong_in_the_second_run(given, out, number):
    return out * (1.1 if number % 2 else 1.0)


FAULTS = {
    wrong_on_large_keys: "keys of large norm",
    wrong_on_peaked_rows: "nearly one-hot rows",
    wrong_on_equal_keys: "equal keys",
    wrong_on_one_token: "a single token",
    wrong_on_branches_of_one_token: "branches of one token",
    wrong_in_the_second_run: "in its second run",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", list(FAULTS), ids=lambda fault: fault.__name__)
def test_a_fault_that_gaussian_inputs_in_one_run_do_not_show_is_seen(fault, dtype):
    q, k = torch.zeros(1, 4, 16, dtype=dtype), torch.zeros(1, 2, 16, dtype=dtype)
    with pytest.warns(RuntimeWarning, match="passed over"):
        failure = self_check.failure_of_backend(
            "matmul", planted(fault), q, k, k, PLAIN_ATTENTION, sinks=False, below_path=False
        )
    assert failure is not None and FAULTS[fault] in failure
    if "run" not in FAULTS[fault]:
        assert "in the output by" not in failure or "token" in FAULTS[fault], "Gaussian inputs alone do not show it"


def test_a_forest_that_a_backend_leaves_to_others_is_not_held_against_it():
    """Varlen calls do not take a single token."""
    found = errors_of(varlen)
    assert not [name for name in found if "single token" in name] and len(found) == 6 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rectangles", "matmul"])
def test_a_right_backend_has_at_most_half_of_the_error_that_is_allowed(name, dtype):
    """In 16 bits, where gradients of large and of equal keys cancel: by itself up to 0.35 relative."""
    assert max(errors_of(BACKENDS[name], dtype=dtype).values()) <= kernel_checks.LIMIT_16_BITS / 2


def test_the_plain_formulas_are_the_reference_where_nothing_is_rounded():
    case, spec = next(iter(self_check._cases(0, (4, 2), (16, 8)))), AttentionSpec(softcap=5.0)
    sinks = [torch.randn(4, dtype=torch.float64)]
    truth, plain = self_check._expected(case, 0, (torch.float64, False), CPU, spec, sinks)
    assert len(truth) == len(plain) == 5
    assert max(relative_error(a, b) for a, b in zip(plain, truth)) <= 1e-12
