"""The linear reference of mixtures of experts, written out: the auxiliary loss, and routes that are used again."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import treetrain as tt
from support.families import make_family
from treetrain.data.trajectory import Trajectory
from treetrain.engine.routing import RouterBalance
from treetrain.testing import linear
from treetrain.testing.contract import PPO, Case, PureFloat64, as_dtype, clear_of_bounds
from treetrain.testing.forests import runs, seeded, trajectories

TOP_K = 2
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
COEFFICIENT = 0.7


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers, by what their classes are called, in the order of the layers."""
    return [m for m in model.modules() if "router" in type(m).__name__.lower()]


def weights_of(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Weights that a router gives the chosen experts, as each family's paper and code have them."""
    kind = type(router).__name__.removeprefix("Parametrized")  # an adapter's
    if kind.startswith("GptOss"):
        return logits.gather(1, chosen).softmax(-1)
    if kind.startswith(("Glm4Moe", "DeepseekV3")):
        weights = logits.sigmoid().gather(1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    assert kind.startswith(("Qwen3Moe", "Qwen3Next", "Qwen3_5Moe", "Mixtral")), kind
    weights = logits.float().softmax(-1).gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype) if kind.startswith("Qwen3") else weights


def chosen_by(router: nn.Module, output: tuple[Tensor, ...]) -> Tensor:
    """int64 [L, k]: the experts that a router's output names; Llama 4's names them by its scores alone."""
    return output[1].topk(TOP_K, dim=-1).indices if _is_llama4(router) else output[2]


def sent_to(router: nn.Module, output: tuple[Tensor, ...], chosen: Tensor) -> tuple[Tensor, ...]:
    """A router's output for the same logits, had it chosen these experts [L, k]."""
    if not _is_llama4(router):
        return output[0], weights_of(router, output[0], chosen), chosen
    logits = output[1]  # scores [L, experts]: a sigmoid at the chosen, 0 elsewhere
    wide = torch.promote_types(logits.dtype, torch.float32)
    gates = logits.gather(1, chosen).to(wide).sigmoid().to(logits.dtype)
    return torch.zeros_like(logits).scatter(1, chosen, gates), logits


def _is_llama4(router: nn.Module) -> bool:
    return type(router).__name__ == "Llama4Router"


@contextmanager
def replayed(model: nn.Module, routes: np.ndarray | None) -> Iterator[None]:
    """Every router takes the experts [L, routers, k] of one row, wherever they are not -1."""
    with ExitStack() as stack:
        for place, router in enumerate(routers_of(model) if routes is not None else []):
            given = torch.from_numpy(routes[:, place].astype(np.int64))  # type: ignore[index]

            def hook(module, args, output, given=given):
                return sent_to(module, output, torch.where(given < 0, chosen_by(module, output), given))

            stack.callback(router.register_forward_hook(hook).remove)
        yield


def routes_of(model: nn.Module, row: Trajectory) -> np.ndarray:
    """int64 [L, routers, k]: the experts that a row goes to by itself, where it does not say itself."""
    found: list[Tensor] = []
    ids = row.ids.tolist()
    with replayed(model, row.experts), ExitStack() as stack, torch.no_grad():
        for router in routers_of(model):
            stack.callback(router.register_forward_hook(lambda m, a, output: found.append(chosen_by(m, output))).remove)
        if len(ids):
            model(input_ids=torch.tensor([ids]), use_cache=False)
    if not found:
        return np.zeros((0, len(routers_of(model)), TOP_K), np.int64)
    return torch.stack(found, 1).numpy()


def with_routes(model: nn.Module, rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The rows with the experts that a model sends them to, where they do not say themselves."""
    return [row.replace(experts=routes_of(model, row)) for row in rows]


def score_rows(model: nn.Module, rows: Sequence[Trajectory], temperature: float = 1.0):
    """Scores as `linear.score_rows` returns them, and all rows' router logits [layers, M, E]."""
    wide = torch.promote_types(model.dtype, torch.float32)
    scores, logits = [], []
    for row in rows:
        if not len(row):
            scores.append((torch.zeros(0, dtype=wide), torch.zeros(0, dtype=wide)))
            continue
        ids = torch.tensor(row.ids.tolist())
        with replayed(model, row.experts):
            output = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
        log_p = (output.logits[0, :-1].to(wide) / temperature).log_softmax(-1)
        scores.append((log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
        if getattr(output, "router_logits", None) is not None:  # Llama 4 gives none
            logits.append(torch.stack(output.router_logits))
    return ([s[0] for s in scores], [s[1] for s in scores]), torch.cat(logits, 1) if logits else torch.zeros(0)


def frequencies(logits: Tensor) -> Tensor:
    """[E]: how often each expert is chosen, over all tokens and layers."""
    p = logits.detach().flatten(0, 1).softmax(-1)
    wide = torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p, dtype=wide).scatter(1, p.topk(TOP_K, dim=-1).indices, 1.0).mean(0)


def auxiliary_loss(logits: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Experts * sum over them of how often each is chosen times its mean probability (Switch Transformer, eq. 4-6).

    Args:
        chosen: takes the place of the frequencies of these logits.
    """
    p = logits.flatten(0, 1).softmax(-1).to(torch.promote_types(logits.dtype, torch.float32))
    return p.shape[-1] * ((frequencies(logits) if chosen is None else chosen) * p.mean(0)).sum()


def expected(
    model, rows, cases: list[Case], coefficient: float, chosen: Tensor | None = None
) -> list[tuple[float, Tensor]]:
    """Loss and gradient of every case by the linear reference."""
    results = []
    for case in cases:
        scores, logits = score_rows(model, rows, case.temperature)
        loss = linear.batch_loss(scores, rows, case.per_token, case.reduction)
        if coefficient:
            loss = loss + coefficient * auxiliary_loss(logits, chosen)
        results.append((float(loss), linear.gradients(model, loss)))
    return results


def measured(model, rows, case: Case, engine=tt.TreeEngine, balance=None) -> tuple[float, Tensor]:
    """Loss and gradient by an engine."""
    model.zero_grad()
    result = engine(model, temperature=case.temperature).forward_backward(rows, case.loss, balance=balance)
    return result.loss, linear.gradients(model)


@dataclasses.dataclass(frozen=True)
class Side:
    """The models of one contract."""

    low: nn.Module
    single: nn.Module
    double: nn.Module
    coefficient: float


def side(family: str, *, auxiliary: bool, **changes) -> Side:
    """A family's model in bfloat16, float32 and float64."""
    low = make_family(family, torch.bfloat16, **(AUXILIARY if auxiliary else {}), **changes)
    return Side(low, as_dtype(low, torch.float32), as_dtype(low, torch.float64), COEFFICIENT if auxiliary else 0.0)


def check_experts_contract(
    family: str,
    cases: list[Case],
    examples: int,
    *,
    engines: Sequence[type[tt.TreeEngine]] = (tt.TreeEngine,),
    auxiliary: bool = False,
    recorded: bool = False,
    **changes,
) -> dict[str, float]:
    """The numerics contract of `treetrain.testing.contract`.

    In bfloat16 both sides take the experts of the float32 rows, and count those in the auxiliary loss; no token's ratio
    is close to where PPO clips it: choices that rounding turns over are neither side's error.

    Args:
        recorded: in float64 and float32, too, experts are given: a part at random, a part left to the router.
    """
    models, worst = side(family, auxiliary=auxiliary, **changes), {"float64": 0.0, "float32": 0.0}
    tree_errors: list[float] = []
    linear_errors: list[float] = []

    @seeded(f"{family} {[case.loss for case in cases]} {[e.__name__ for e in engines]} {auxiliary} {recorded}")
    @runs(examples, derandomize=False)
    @given(trajectories())
    def every_forest(rows):
        rows = at_random(rows, len(routers_of(models.low))) if recorded else rows
        with torch.no_grad():
            rows = clear_of_bounds(rows, score_rows(models.single, rows, PPO.temperature)[0][0])
        with PureFloat64():
            truth = expected(models.double, rows, cases, models.coefficient)
            pure = [[measured(models.double, rows, case, engine) for case in cases] for engine in engines]
        plain = expected(models.single, rows, cases, models.coefficient)
        routed = with_routes(models.single, rows)
        chosen, balance = float32_choices(models, rows)
        bfloat = expected(models.low, routed, cases, models.coefficient, chosen)
        for number, case in enumerate(cases):
            loss, gradient = truth[number]
            linear_errors.append(linear.relative_error(bfloat[number][1], gradient))
            for engine, found in zip(engines, pure):
                assert found[number][0] == pytest.approx(loss, rel=1e-12, abs=1e-12)
                worst["float64"] = max(worst["float64"], linear.relative_error(found[number][1], gradient))
                assert worst["float64"] <= 1e-12
                got = measured(models.single, rows, case, engine)
                assert got[0] == pytest.approx(plain[number][0], rel=1e-5, abs=1e-5)
                worst["float32"] = max(worst["float32"], linear.relative_error(got[1], plain[number][1]))
                assert worst["float32"] <= 1e-5
                rounded = measured(models.low, routed, case, engine, balance)
                tree_errors.append(linear.relative_error(rounded[1], gradient))

    every_forest()
    worst["bfloat16 tree"], worst["bfloat16 linear"] = linear.rms(tree_errors), linear.rms(linear_errors)
    assert worst["bfloat16 tree"] <= 1.5 * worst["bfloat16 linear"]
    return worst


def float32_choices(models: Side, rows: Sequence[Trajectory]) -> tuple[Tensor | None, RouterBalance | None]:
    """How often the float32 rows choose each expert, as both sides are told it."""
    if not models.coefficient:
        return None, None
    with torch.no_grad():
        logits = score_rows(models.single, rows)[1]
    tokens = logits.shape[0] * logits.shape[1]
    chosen = frequencies(logits)
    return chosen, RouterBalance(
        choices=chosen.double() * tokens, probabilities=torch.zeros(len(chosen), dtype=torch.float64), tokens=tokens
    )


def at_random(rows: Sequence[Trajectory], places: int) -> list[Trajectory]:
    """Rows with experts that depend on the row now and then, so that some equal tokens go different ways."""
    routed = []
    for number, row in enumerate(rows):
        routes = np.zeros((len(row), places, TOP_K), np.int64)
        for t, token in enumerate(row.ids.tolist()):
            rng = np.random.default_rng([token, t, number if (t + number) % 7 == 0 else 0])
            for place in range(places):
                routes[t, place] = -1 if rng.random() < 0.3 else rng.permutation(4)[:TOP_K]
        routed.append(row.replace(experts=routes) if number % 4 != 3 else row)
    return routed
