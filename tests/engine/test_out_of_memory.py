"""Out of memory is a plan that was too large: results stay exact, and the budget that is named does avoid it."""

import re
import warnings

import numpy as np
import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.passes import watched
from support.plans import on_plan, planned
from support.shortage import ERRORS, IDS, Shortage, freed_at_once, named_budget
from treetrain.check import linear
from treetrain.check.contract import PPO, SFT, PureFloat64
from treetrain.check.forests import with_random_facts
from treetrain.core.engine.memory import is_out_of_memory
from treetrain.core.planning.plan import Plan

ROWS = with_random_facts(IDS, 4)
CASES = {"sft": SFT, "ppo": PPO}


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3", dtype=torch.float64)


@pytest.fixture(autouse=True)
def clean(model):
    with freed_at_once(model):
        yield


@pytest.fixture(scope="module")
def truth(model):
    """Loss and gradient of the rows by case."""
    found = {}
    with PureFloat64():
        for name, case in CASES.items():
            scores = linear.score_rows(model, IDS, case.temperature)
            loss = linear.batch_loss(scores, ROWS, case.per_token)
            found[name] = float(loss.detach()), linear.gradients(model, loss)
    return found


def step(engine, case: str):
    model = engine.model
    model.zero_grad()
    with PureFloat64():
        result = engine.forward_backward(ROWS, CASES[case].loss)
    return result, linear.gradients(model)


def check_step(model, truth, case: str, engine=tt.TreeEngine, error: str = "cuda", **limits) -> int:
    """A step with little memory: exact, told once, freed in time, and silent under the budget named; returns that."""
    temperature = CASES[case].temperature
    plain, _ = step(tt.TreeEngine(model, temperature=temperature), case)
    with Shortage(model, error, **limits) as shortage, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, gradient = step(engine(model, temperature=temperature), case)
    assert shortage.failures > 0 and shortage.leaks == 0
    assert linear.relative_error(gradient, truth[case][1]) <= 1e-12
    assert result.loss == pytest.approx(truth[case][0], rel=1e-12)
    assert result.metrics == pytest.approx(plain.metrics, rel=1e-10)
    for name, (_, weight) in plain.metric_sums.items():
        assert float(result.metric_sums[name][1]) == pytest.approx(float(weight)), "counted twice"
    budget = named_budget(caught)
    with Shortage(model, error, **limits) as shortage, warnings.catch_warnings():
        warnings.simplefilter("error")
        _, gradient = step(tt.TreeEngine(model, temperature=temperature, budget=budget), case)
    assert shortage.failures == 0, f"budget={budget} does not avoid it"
    assert linear.relative_error(gradient, truth[case][1]) <= 1e-12
    return budget


# What runs out, and by how much: each limit with the largest budget that could avoid it.
FORWARD = [("graph", 9), ("graph", 1), ("alive", 4)]
BACKWARD = [("backward", 7), ("backward_alive", 3)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("limit", "tokens", "case"),
    [
        pytest.param(*limit, case, marks=() if number % 2 == (case == "ppo") else pytest.mark.slow)
        for number, limit in enumerate(FORWARD + BACKWARD)
        for case in CASES
    ],
)
def test_one_part_that_does_not_fit_is_run_in_smaller_ones(model, truth, limit, tokens, case):
    budget = check_step(model, truth, case, **{limit: tokens})
    assert budget <= tokens
    if limit in ("graph", "alive"):
        assert budget > tokens // 8


def stem(kept: bool):
    """The first ten tokens of the long tree as a part; all below it, and the other tree, in small ones."""

    def plan(layout):
        top = (layout.positions < 10) & np.isin(layout.input_ids, IDS[0])
        starts = (layout.parent < 0) | (top[layout.parent] & ~top)
        part_of = np.where(top, 0, np.cumsum(starts & ~top))
        return Plan.of_parts(layout, part_of, np.full(int(part_of.max()) + 1, kept))

    return on_plan(plan)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("error", ERRORS)
def test_a_kept_part_that_does_not_fit_is_run_in_smaller_ones(model, truth, case, error):
    assert check_step(model, truth, case, stem(kept=True), error, graph=6) <= 6


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("limits", "case"),
    [
        pytest.param(limits, case, marks=() if number % 2 == (case == "ppo") else pytest.mark.slow)
        for number, limits in enumerate([{"plain": 8, "graph": 3}, {"total": 6}])
        for case in CASES
    ],
)
def test_a_prefill_that_does_not_fit_is_run_in_smaller_ones(model, truth, limits, case):
    assert check_step(model, truth, case, stem(kept=False), **limits) <= min(limits.values())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("limit", "tokens", "case"),
    [
        pytest.param(*limit, case, marks=() if number % 2 == (case == "ppo") else pytest.mark.slow)
        for number, limit in enumerate([("graph", 1), ("backward", 6)])
        for case in CASES
    ],
)
def test_a_recomputed_part_that_does_not_fit_is_run_in_smaller_ones(model, truth, limit, tokens, case):
    assert check_step(model, truth, case, stem(kept=False), **{limit: tokens}) <= tokens


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("limits", "shape", "keep"),
    [
        pytest.param(limits, *plan, marks=() if number % 3 == at else pytest.mark.slow)
        for number, limits in enumerate([{"graph": 3, "plain": 9}, {"alive": 3}, {"backward_alive": 5}])
        for at, plan in enumerate([("N/2", "none"), ("N/2", "all"), ("chunks of 7", "mixed")])
    ],
)
def test_any_plan_that_does_not_fit_stays_exact(model, truth, limits, shape, keep):
    assert check_step(model, truth, "ppo", planned(shape, keep), **limits) <= max(limits.values())


def test_a_part_that_fits_by_itself_but_not_beside_what_is_kept_starts_the_step_over(model, truth):
    # Eleven tokens cannot be alive: ten are kept, and below them not even one of two fits... so fewer are kept.
    assert check_step(model, truth, "ppo", stem(kept=True), alive=10) <= 10


@pytest.mark.parametrize("limits", [{"graph": 0}, {"graph": 0, "plain": 0}, {"backward": 0}], ids=str)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kept", [False, True])
def test_where_not_even_one_token_fits_the_error_is_the_allocators_own(model, kept, error, limits):
    kind = type(ERRORS[error]())
    with Shortage(model, error, **limits) as shortage, pytest.raises(kind, match="memory") as caught:
        stem(kept)(model).forward_backward(ROWS, PPO.loss)
    assert shortage.failures > 1 and not str(caught.value).startswith("out of memory with")
    assert all(p.grad is None for p in model.parameters())
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_metric_counts_every_row_once_in_a_step_that_started_over(model):
    def loss(logprobs, entropies, trajectory):
        return -logprobs.sum(), {"rows": (1.0, 1.0)}

    loss.normaliser = lambda rows: 1.0
    with Shortage(model, graph=3), pytest.warns(RuntimeWarning):
        result = tt.TreeEngine(model).forward_backward(ROWS, loss)
    assert result.metric_sums["rows"] == (len(ROWS), len(ROWS))


class Pairs:
    """A user's own loss over several rows at once."""

    scope = "batch"

    def __init__(self):
        self.calls = 0

    def normaliser(self, rows):
        return 2.0

    def __call__(self, logprobs, entropies, rows):
        self.calls += 1
        sums = torch.stack([row.sum() for row in logprobs])
        return torch.nn.functional.softplus(sums[1:] - sums[:-1]).sum(), {"calls": 1.0}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("limits", "before"),
    [
        pytest.param(limits, before, marks=pytest.mark.slow if before and number % 2 else ())
        for number, limits in enumerate([{"backward": 9}, {"graph": 3}, {"plain": 4, "graph": 3}])
        for before in (False, True)
    ],
)
def test_a_loss_over_several_rows_goes_backward_only_when_all_are_scored(model, limits, before):
    with PureFloat64():
        sums = Pairs()(linear.score_rows(model, IDS)[0], None, ROWS)[0] / 2.0
        expected = linear.gradients(model, sums)
        if before:
            tt.TreeEngine(model).forward_backward(ROWS, Pairs())
        loss = Pairs()
        with Shortage(model, **limits) as shortage, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if before and "backward" in limits:
                with pytest.raises(RuntimeError, match="incomplete"):
                    tt.TreeEngine(model).forward_backward(ROWS, loss)
                return
            result = tt.TreeEngine(model).forward_backward(ROWS, loss)
    assert linear.relative_error(linear.gradients(model), expected * (1 + before)) <= 1e-12
    assert result.loss == pytest.approx(float(sums.detach()), rel=1e-12) and result.metric_sums == {"calls": (1.0, 1.0)}
    assert shortage.failures and shortage.leaks == 0
    budget = named_budget(caught[-1:])  # scores and their backward each start over by themselves
    with Shortage(model, **limits) as shortage, warnings.catch_warnings():
        warnings.simplefilter("error")
        tt.TreeEngine(model, budget=budget).forward_backward(ROWS, Pairs())
    assert not shortage.failures


def test_a_step_in_which_nothing_has_gone_backward_starts_over_beside_earlier_gradients(model, truth):
    engine = stem(kept=True)(model, temperature=PPO.temperature)
    with PureFloat64():
        engine.forward_backward(ROWS, PPO.loss)
        # The stem of ten is kept; no token below it fits beside it, and nothing has gone backward before that.
        with Shortage(model, alive=10), pytest.warns(RuntimeWarning, match="started over"):
            engine.forward_backward(ROWS, PPO.loss)
    assert linear.relative_error(linear.gradients(model), 2 * truth["ppo"][1]) <= 1e-12


@pytest.mark.parametrize(
    ("limits", "shape", "keep"),
    [
        ({"backward": 6}, "1 part", "none"),
        ({"backward": 4}, "chunks of 7", "all"),
        ({"backward_alive": 6}, "chunks of 7", "none"),
    ],
)
def test_the_warning_tells_how_many_tokens_were_alive(model, limits, shape, keep):
    with Shortage(model, **limits) as shortage, pytest.warns(RuntimeWarning) as caught:
        planned(shape, keep)(model).forward_backward(ROWS, PPO.loss)
    pattern = r"with (\d+) tokens alive; .* started over in smaller parts (once|\d+ times)"
    told = re.search(pattern, str(caught[0].message))
    times = len(shortage.alive_in_backward)
    assert told and int(told[1]) == max(shortage.alive_in_backward)
    assert told[2] == ("once" if times == 1 else f"{times} times")


def test_the_result_counts_the_passes_of_the_last_try(model):
    with Shortage(model, graph=5), watched(model) as seen, pytest.warns(RuntimeWarning):
        result = tt.TreeEngine(model).forward_backward(ROWS, PPO.loss)
    last = seen.graph[-result.parts :]
    assert max(map(len, last)) <= 5 and sum(map(len, last)) == result.computed_tokens
    assert 0 < result.recomputed_tokens <= sum(map(len, seen.plain))


@pytest.mark.parametrize("case", CASES)
def test_a_backward_beside_gradients_of_earlier_calls_says_that_they_are_incomplete(model, case):
    engine = tt.TreeEngine(model)
    engine.forward_backward(ROWS, CASES[case].loss)
    with (
        Shortage(model, backward=5) as shortage,
        pytest.raises(RuntimeError, match=r"gradients of earlier calls.*incomplete.*budget=\d+") as caught,
    ):
        engine.forward_backward(ROWS, CASES[case].loss)
    assert shortage.failures == 1 and isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_first_forward_beside_gradients_of_earlier_calls_starts_over(model, truth):
    engine = tt.TreeEngine(model, temperature=PPO.temperature)
    with PureFloat64():
        engine.forward_backward(ROWS, PPO.loss)
        with Shortage(model, graph=5), pytest.warns(RuntimeWarning):
            engine.forward_backward(ROWS, PPO.loss)
    assert linear.relative_error(linear.gradients(model), 2 * truth["ppo"][1]) <= 1e-12


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_step_that_starts_over_calls_hooks_once_with_the_whole_gradient(model, truth, kind):
    calls = []
    handle = getattr(model.model.norm.weight, kind)(lambda _: calls.append(1))
    engine = tt.TreeEngine(model, temperature=PPO.temperature)
    with Shortage(model, backward=5), pytest.warns(RuntimeWarning), PureFloat64():
        engine.forward_backward(ROWS, PPO.loss)
    handle.remove()
    assert len(calls) == 1
    assert linear.relative_error(linear.gradients(model), truth["ppo"][1]) <= 1e-12


@pytest.mark.slow
def test_the_warning_points_at_the_callers_line(model):
    with Shortage(model, graph=5, plain=5), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tt.TreeEngine(model).forward_backward(ROWS, PPO.loss)
        tt.TreeEngine(model).logprobs(IDS)
        rows = tt.logprobs(model, IDS)
        rows[0].sum().backward()
    assert [w.filename for w in caught] == [__file__] * 4
    assert len({w.lineno for w in caught}) == 4


def test_an_error_of_another_kind_is_not_taken_for_a_lack_of_memory(model):
    def fail(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    handle = model.model.layers[1].register_forward_hook(fail)
    for run in (
        lambda: tt.TreeEngine(model).forward_backward(ROWS, PPO.loss),
        lambda: tt.TreeEngine(model).logprobs(IDS),
        lambda: tt.logprobs(model, IDS),
    ):
        with pytest.raises(RuntimeError, match="mat1"):
            run()
    handle.remove()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("out of resource: shared memory, Required: 263168, Hardware limit: 232448"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA out of memory"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_devices_say_when_memory_runs_out_is_known(error, expected):
    assert is_out_of_memory(error) is expected
