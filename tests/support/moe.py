"""The linear reference of mixtures of experts with their auxiliary loss, and rows that name experts."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from treetrain.check import linear
from treetrain.check.contract import Case, Routes
from treetrain.layers.trajectory import Trajectory

EXPERTS, TOP_K = 4, 2
"""Of every family in `support.models`."""
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
COEFFICIENT = 0.7


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers, by what their classes are called, in the order of the layers."""
    return [m for m in model.modules() if "router" in type(m).__name__.lower()]


def score_rows(model: nn.Module, rows: Sequence[Trajectory], temperature: float = 1.0):
    """Scores as `linear.score_rows` returns them, and all rows' router logits [layers, M, E]."""
    wide = torch.promote_types(model.dtype, torch.float32)
    scores, logits = [], []
    for row in rows:
        if not len(row):
            scores.append((torch.zeros(0, dtype=wide), torch.zeros(0, dtype=wide)))
            continue
        ids = torch.tensor(row.ids.tolist())
        with Routes(EXPERTS, TOP_K, row.experts):
            output = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
        log_p = (output.logits[0, :-1].to(wide) / temperature).log_softmax(-1)
        scores.append((log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
        if getattr(output, "router_logits", None) is not None:  # Llama 4 gives none
            logits.append(torch.stack(output.router_logits))
    return ([s[0] for s in scores], [s[1] for s in scores]), torch.cat(logits, 1) if logits else torch.zeros(0)


def auxiliary_loss(logits: Tensor) -> Tensor:
    """Experts * sum over them of how often each is chosen times its mean probability (Switch Transformer, eq. 4-6)."""
    p = logits.flatten(0, 1).softmax(-1).to(torch.promote_types(logits.dtype, torch.float32))
    chosen = torch.zeros_like(p).scatter(1, p.detach().topk(TOP_K, dim=-1).indices, 1.0).mean(0)
    return p.shape[-1] * (chosen * p.mean(0)).sum()


def expected(model, rows, cases: list[Case], coefficient: float) -> list[tuple[float, Tensor]]:
    """Loss and gradient of every case by the linear reference."""
    results = []
    for case in cases:
        scores, logits = score_rows(model, rows, case.temperature)
        loss = linear.batch_loss(scores, rows, case.per_token, case.reduction)
        if coefficient:
            loss = loss + coefficient * auxiliary_loss(logits)
        results.append((float(loss), linear.gradients(model, loss)))
    return results


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
