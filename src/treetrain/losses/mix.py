"""Several losses in one step: weighted on the same rows, or each on rows of its own."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.engine.loss import Scope, describe
from treetrain.errors import DataError
from treetrain.losses.loss import Facts, Loss, LossSum, Reduction, check_number

Int64s = NDArray[np.int64]
Select = Callable[[Trajectory], str | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(Loss):
    """Sum over losses of weight * (sum over the loss's rows / its normaliser over the whole step). Made by `mix`.

    Every loss has its own normaliser, so call `for_step` with the whole step before passing parts of it. The
    mixture's normaliser is 1.
    """

    reduction: Reduction = dataclasses.field(default="token", init=False, repr=False)

    names: tuple[str, ...]
    losses: tuple[Loss, ...]
    weights: tuple[float, ...]
    select: Select | None
    """Maps a row to the name of its loss, or None for no loss; without it every loss sees every row."""
    totals: tuple[float, ...] | None = None
    """Normaliser of every loss over the whole step, 0 if it has no row; None before `for_step`."""

    @property
    def scope(self) -> Scope:
        return "batch" if any(loss.scope == "batch" for loss in self.losses) else "trajectory"

    @property
    def sums_tokens(self) -> bool:
        return self.select is None and all(loss.sums_tokens for loss in self.losses)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(need for loss in self.losses for need in loss.needs), "step"]))

    @property
    def needs_step(self) -> bool:
        return self.totals is None

    @property
    def identity(self) -> str:
        """See `Loss.identity`. `select` appears by name, since its repr differs between processes."""
        select = getattr(self.select, "__qualname__", type(self.select).__qualname__)
        losses = ", ".join(f"{name}: {loss.identity}" for name, loss in zip(self.names, self.losses))
        return f"Mixture({losses}, weights={self.weights}, select={select}, totals={self.totals})"

    def for_step(self, trajectories: Sequence[Trajectory]) -> "Mixture":
        """The mixture with every loss's normaliser over these rows, which are the whole step.

        Raises:
            DataError: a row lacks a fact that its loss needs, or nothing is trained.
        """
        self.check(trajectories)
        own = self._own_rows(trajectories)
        totals = tuple(loss.total_weight(rows) for loss, rows in zip(self.losses, own))
        if not any(weight * total > 0 for weight, total in zip(self.weights, totals)):
            raise DataError(
                f"nothing to train: none of the {len(trajectories)} trajectories has a loss weight above 0 in a loss "
                f"of weight above 0 ({', '.join(self.names)})"
            )
        parts = tuple(loss.for_step(rows) for loss, rows in zip(self.losses, own))
        return dataclasses.replace(self, losses=parts, totals=totals)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError if a row lacks what its loss needs, ValueError if `select` returns an unknown name."""
        for name, loss, rows in zip(self.names, self.losses, self._own_rows(trajectories)):
            try:
                loss.check(rows)
            except DataError as error:
                counted = "" if len(rows) == len(trajectories) else f" (rows are counted among its own {len(rows)})"
                raise DataError(f"loss {name!r} of the mixture: {error}{counted}") from error

    def normaliser(self, trajectories: Sequence[Trajectory]) -> float:
        """1, since every loss is divided by its own normaliser. Checks the rows as `for_step` does."""
        if self.totals is None:
            self.for_step(trajectories)
        else:
            self.check(trajectories)
        return 1.0

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """These rows' fraction of the step, averaged over losses by weight; over a step it sums to 1."""
        parts = zip(self.weights, self._known_totals(), self.losses, self._own_rows(trajectories))
        present = [(weight, loss.total_weight(rows) / whole) for weight, whole, loss, rows in parts if whole > 0]
        return sum(weight * share for weight, share in present) / sum(weight for weight, _ in present)

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts, values: Tensor | None) -> LossSum:
        total, metrics = logprobs.new_zeros(()), {}
        for name, loss, scale, own, places in self._parts(facts):
            at = (lambda x: x) if places is None else (lambda x, places=places: x.index_select(0, places))
            value, watched = loss.evaluate(at(logprobs), None if entropies is None else at(entropies), own, None)
            total = total + scale * value
            metrics |= {f"{name}/{metric}": pair for metric, pair in watched.items()}
            metrics[f"{name}/loss"] = (value.detach(), loss.total_weight(own.trajectories))
        return total, metrics

    def coefficients(self, facts: Facts) -> Tensor | None:
        total = torch.zeros(len(facts), dtype=facts.dtype, device=facts.device)
        for _, loss, scale, own, places in self._parts(facts):
            known = loss.coefficients(own)
            if known is None:
                return None
            total = total + scale * known if places is None else total.index_add(0, places, scale * known)
        return total

    def _parts(self, facts: Facts) -> list[tuple[str, Loss, float, Facts, Tensor | None]]:
        """For every loss with rows here: name, loss, factor, facts, int64 [t] indices of predictions (None: all)."""
        totals, parts = self._known_totals(), []
        for name, loss, weight, whole, numbers in zip(
            self.names, self.losses, self.weights, totals, self._assign(facts.trajectories)
        ):
            if whole == 0 or not len(numbers):
                continue
            own, places = facts, None
            if len(numbers) < len(facts.trajectories):
                own, at = facts.of_rows(numbers)
                places = on_device(at, facts.device)
            parts.append((name, loss, weight / whole, own, places))
        return parts

    def _known_totals(self) -> tuple[float, ...]:
        if self.totals is None:
            raise ValueError(
                f"a mixture of {', '.join(self.names)} divides each loss by its own normaliser, that of the whole "
                "step: call mixture.for_step(all trajectories of the step) and use what it returns"
            )
        return self.totals

    def _own_rows(self, trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
        return [[trajectories[number] for number in numbers.tolist()] for numbers in self._assign(trajectories)]

    def _assign(self, trajectories: Sequence[Trajectory]) -> list[Int64s]:
        """Numbers of the rows of every loss, ascending."""
        if self.select is None:
            return [np.arange(len(trajectories))] * len(self.losses)
        rows: dict[str, list[int]] = {name: [] for name in self.names}
        for number, row in enumerate(trajectories):
            name = self.select(row)
            if name is not None and name not in rows:
                raise ValueError(
                    f"select gave {name!r} for {describe(row, number)}; the mixed losses are {', '.join(self.names)}, "
                    "and None leaves the row to none of them"
                )
            if name is not None:
                rows[name].append(number)
        return [np.array(own, np.int64) for own in rows.values()]


def mix(
    losses: Mapping[str, Loss], *, weights: Mapping[str, float] | None = None, select: Select | None = None
) -> Mixture:
    """Combine several losses in one step: the weighted sum of their means, each over its own rows of the step.

    A mean is a loss's sum over its rows divided by its own normaliser. A loss without rows in a step counts 0. The
    engine calls `for_step`. If you split a step over calls, call `mixture = mixture.for_step(all rows of the step)`
    first, and pass `mixture.normaliser(...)`, which is 1.

    Args:
        losses: name -> loss, such as {"policy": grpo(), "sft": sft()}. Names appear in messages and metrics.
        weights: name -> weight, 0 or more; 1 where not given.
        select: a function of a trajectory that returns the name of its loss, or None for none. Without it every loss
            sees every row.

    Metrics: those of every loss as "name/metric", and "name/loss".

    Raises:
        ValueError: no loss, an unknown name, a weight below 0, or a loss that is a mixture, needs values or is no
            `Loss`.
    """
    if not losses:
        raise ValueError("no loss to mix; give a mapping such as {'policy': grpo(), 'sft': sft()}")
    given = dict(weights or {})
    unknown = [name for name in given if name not in losses]
    if unknown:
        raise ValueError(f"weights name {unknown[0]!r}, which is not mixed; the losses are {', '.join(losses)}")
    for name, loss in losses.items():
        if not isinstance(loss, Loss) or isinstance(loss, Mixture):
            kind = "a mixture: put its losses in this one" if isinstance(loss, Mixture) else "no treetrain.losses.Loss"
            raise ValueError(f"{name!r} is {kind}" + ("" if isinstance(loss, Loss) else f" but {type(loss).__name__}"))
        if "predicted_values" in loss.needs:
            raise ValueError(f"{name!r} needs values, which a mixture does not hand on; give it a step of its own")
        check_number(f"the weight of {name!r}", given.get(name, 1.0), 0.0)
    if select is not None and not callable(select):
        raise ValueError(f"select is {select!r}; give a function of a trajectory, or None")
    return Mixture(
        names=tuple(losses),
        losses=tuple(losses.values()),
        weights=tuple(float(given.get(name, 1.0)) for name in losses),
        select=select,
    )
