"""Several losses in one step: weighted on the same rows, or each on rows of its own."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.engine.loss import Facts, Loss, LossSum, Reduction, Scope, check_number, describe
from treetrain.errors import DataError

Select = Callable[[Trajectory], str | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(Loss):
    """Sum over losses of weight * (sum over the loss's rows / its normaliser over the whole step). Made by `mix`.

    Every loss has its own normaliser, so call `for_step` with the whole step before passing parts of it. The
    mixture's normaliser over the whole step is 1.
    """

    reduction: Reduction = dataclasses.field(default="token", init=False, repr=False)

    losses: Mapping[str, Loss]
    weights: Mapping[str, float]
    select: Select | None
    """Maps a row to the name of its loss, or None for no loss; without it every loss sees every row."""
    totals: tuple[float, ...] | None = None
    """Normaliser of every loss over the whole step, 0 if it has no row; None before `for_step`."""

    @property
    def scope(self) -> Scope:
        return "batch" if any(loss.scope == "batch" for loss in self.losses.values()) else "trajectory"

    @property
    def sums_tokens(self) -> bool:
        return self.select is None and all(loss.sums_tokens for loss in self.losses.values())

    @property
    def needs(self) -> tuple[str, ...]:
        needs = dict.fromkeys(need for loss in self.losses.values() for need in loss.needs)
        return (*needs, *(("step",) if self.totals is None else ()))

    @property
    def identity(self) -> str:
        """See `Loss.identity`. `select` appears by name, since its repr differs between processes."""
        select = getattr(self.select, "__qualname__", type(self.select).__qualname__)
        losses = ", ".join(f"{name}: {loss.identity}" for name, loss in self.losses.items())
        return f"Mixture({losses}, weights={dict(self.weights)}, select={select}, totals={self.totals})"

    def for_step(self, trajectories: Sequence[Trajectory]) -> "Mixture":
        """The mixture with every loss's normaliser over these rows, which are the whole step.

        Raises:
            DataError: a row lacks a fact that its loss needs.
        """
        self.check(trajectories)
        own = [[trajectories[number] for number in rows] for rows in self._assign(trajectories)]
        losses = {name: loss.for_step(rows) for (name, loss), rows in zip(self.losses.items(), own)}
        totals = tuple(loss.total_weight(rows) for loss, rows in zip(self.losses.values(), own))
        return dataclasses.replace(self, losses=losses, totals=totals)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError if a row lacks what its loss needs, ValueError if `select` returns an unknown name."""
        for (name, loss), rows in zip(self.losses.items(), self._assign(trajectories)):
            try:
                loss.check([trajectories[number] for number in rows])
            except DataError as error:
                counted = "" if len(rows) == len(trajectories) else f" (rows are counted among its own {len(rows)})"
                raise DataError(f"loss {name!r} of the mixture: {error}{counted}") from error

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """These rows' fraction of the step, averaged over losses by weight; over a step it sums to 1."""
        parts = zip(self.losses.values(), self.weights.values(), self._known_totals(), self._assign(trajectories))
        present = [
            (weight, loss.total_weight([trajectories[number] for number in rows]) / whole)
            for loss, weight, whole, rows in parts
            if weight * whole > 0
        ]
        return sum(weight * share for weight, share in present) / max(sum(weight for weight, _ in present), 1e-300)

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        total, metrics = logprobs.new_zeros(()), {}
        for name, loss, scale, own, places in self._parts(facts):
            scores = [x if x is None or places is None else x[places] for x in (logprobs, entropies, values)]
            given = scores[2] if "predicted_values" in loss.needs else None
            value, watched = loss.evaluate(scores[0], scores[1], own, given)  # type: ignore[arg-type]
            total = total + scale * value
            metrics |= {f"{name}/{metric}": pair for metric, pair in watched.items()}
            metrics[f"{name}/loss"] = (value.detach(), loss.total_weight(own.trajectories))
        return total, metrics

    def coefficients(self, facts: Facts) -> Float[Tensor, "T"] | None:
        total = torch.zeros(len(facts), dtype=facts.dtype, device=facts.device)
        for _, loss, scale, own, places in self._parts(facts):
            known = loss.coefficients(own)
            if known is None:
                return None
            total = total + scale * known if places is None else total.index_add(0, places, scale * known)
        return total

    def _parts(self, facts: Facts) -> Iterator[tuple[str, Loss, float, Facts, Int64[Tensor, "t"] | None]]:
        """For every loss with rows here: name, loss, factor, facts, and indices of its predictions (None: all)."""
        parts = zip(self.losses.items(), self.weights.values(), self._known_totals(), self._assign(facts.trajectories))
        for (name, loss), weight, whole, rows in parts:
            if whole == 0 or not len(rows):
                continue
            own, places = facts, None
            if len(rows) < len(facts.trajectories):
                own, at = facts.of_rows(rows)
                places = on_device(at, facts.device)
            yield name, loss, weight / whole, own, places

    def _known_totals(self) -> tuple[float, ...]:
        if self.totals is None:
            raise ValueError(
                f"a mixture of {', '.join(self.losses)} divides each loss by its own normaliser, that of the whole "
                "step: call mixture.for_step(all trajectories of the step) and use what it returns"
            )
        return self.totals

    def _assign(self, trajectories: Sequence[Trajectory]) -> list[Int64[np.ndarray, "_"]]:
        """Numbers of the rows of every loss, ascending."""
        if self.select is None:
            return [np.arange(len(trajectories))] * len(self.losses)
        names = np.array([self.select(row) for row in trajectories], object)
        for number, name in enumerate(names):
            if name is not None and name not in self.losses:
                raise ValueError(
                    f"select gave {name!r} for {describe(trajectories[number], number)}; the mixed losses are "
                    f"{', '.join(self.losses)}, and None leaves the row to none of them"
                )
        return [np.flatnonzero(names == name) for name in self.losses]


def mix(
    losses: Mapping[str, Loss], *, weights: Mapping[str, float] | None = None, select: Select | None = None
) -> Mixture:
    """Combine several losses in one step: the weighted sum of their means, each over its own rows of the step.

    A mean is a loss's sum over its rows divided by its own normaliser. A loss without rows in a step counts 0. The
    engine calls `for_step`. If you split a step over calls, call `mixture = mixture.for_step(all rows of the step)`
    first, and pass `mixture.normaliser(...)` of the same rows, which is 1.

    Args:
        losses: name -> loss, such as {"policy": grpo(), "sft": sft()}. Names appear in messages and metrics.
        weights: name -> weight, 0 or more; 1 where not given.
        select: a function of a trajectory that returns the name of its loss, or None for none. Without it every loss
            sees every row.

    Metrics: those of every loss as "name/metric", and "name/loss".

    Raises:
        ValueError: no loss, an unknown name, a weight below 0, or a loss that is a mixture or no `Loss`.
    """
    given = dict(weights or {})
    unknown = [name for name in given if name not in losses]
    if unknown or not losses:
        raise ValueError(
            f"weights name {unknown}, the losses are {list(losses)}; give a mapping such as {{'sft': sft()}}"
        )
    for name, loss in losses.items():
        if not isinstance(loss, Loss) or isinstance(loss, Mixture):
            raise ValueError(f"{name!r} is a {type(loss).__name__}; mix takes losses of tt.losses.Loss, no mixtures")
        check_number(f"the weight of {name!r}", given.get(name, 1.0), 0.0)
    if select is not None and not callable(select):
        raise ValueError(f"select is {select!r}; give a function of a trajectory, or None")
    in_full = {name: float(given.get(name, 1.0)) for name in losses}
    return Mixture(losses=dict(losses), weights=in_full, select=select)
