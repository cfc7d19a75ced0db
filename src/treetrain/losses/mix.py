"""Several losses in one step: weighted on the same rows, or each on rows of its own."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treetrain.data.trajectory import Trajectory
from treetrain.device_arrays import on_device
from treetrain.errors import DataError
from treetrain.losses.base import LARGEST, Loss, Metrics, check_number
from treetrain.losses.facts import Facts, PackedFacts, Reduction, describe

Int64s = NDArray[np.int64]
Select = Literal["all", "facts"] | Callable[[Trajectory], str | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixture(Loss):
    """sum of weight * (unnormalised sum of a loss on its rows / its normaliser of the whole step). Made by `mix`.

    Every loss has a normaliser of its own, so the mixture must know the whole step (`for_step`) before it is given
    parts of it; its own normaliser is then 1.
    """

    reduction: Reduction = dataclasses.field(default="token", init=False, repr=False)

    names: tuple[str, ...]
    losses: tuple[Loss, ...]
    weights: tuple[float, ...]
    select: Select
    totals: tuple[float, ...] | None = None
    """Normaliser of every loss over the whole step, 0 where the step has no row of it; None before `for_step`."""

    @property
    def scope(self) -> Literal["trajectory", "batch"]:
        return "batch" if any(loss.scope == "batch" for loss in self.losses) else "trajectory"

    @property
    def sums_tokens(self) -> bool:
        return self.select == "all" and all(loss.sums_tokens for loss in self.losses)

    @property
    def needs_entropy(self) -> bool:
        return any(loss.needs_entropy for loss in self.losses)

    @property
    def needs_facts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for loss in self.losses for name in loss.needs_facts))

    @property
    def needs_step(self) -> bool:
        return self.totals is None

    def for_step(self, trajectories: Sequence[Trajectory]) -> "Mixture":
        """The mixture with every loss's normaliser over these rows, which are the whole step.

        Raises:
            DataError: a row lacks a fact that its loss needs, or nothing is trained.
        """
        numbers = self._assign(trajectories)
        self._check_all(trajectories, numbers)
        totals = self._totals(trajectories, numbers)
        if not any(weight * total > 0 for weight, total in zip(self.weights, totals)):
            raise DataError(
                f"nothing to train: none of the {len(trajectories)} trajectories has a loss weight above 0 in a loss "
                f"of weight above 0 ({', '.join(self.names)})"
            )
        parts = [loss.for_step(_picked(trajectories, own)) for loss, own in zip(self.losses, numbers)]
        return dataclasses.replace(self, losses=tuple(parts), totals=totals)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise DataError where a row lacks what its loss needs, or no loss takes it."""
        self._check_all(trajectories, self._assign(trajectories))

    def normaliser(self, trajectories: Sequence[Trajectory]) -> float:
        """1: every loss is divided by its own. Checks the rows, as `for_step` does."""
        if self.totals is None:
            self.for_step(trajectories)
        else:
            self.check(trajectories)
        return 1.0

    def total_weight(self, trajectories: Sequence[Trajectory]) -> float:
        """The share of the step's losses that these rows have, by weight: it adds up to 1 over the step."""
        totals = self._known_totals()
        own = self._totals(trajectories, self._assign(trajectories))
        present = [(w, part / whole) for w, part, whole in zip(self.weights, own, totals) if whole > 0]
        return sum(w * share for w, share in present) / sum(w for w, _ in present)

    def evaluate(self, logprobs: Tensor, entropies: Tensor | None, facts: Facts) -> tuple[Tensor, Metrics]:
        assert isinstance(facts, PackedFacts)
        total, metrics = logprobs.new_zeros(()), {}
        for name, loss, scale, numbers in self._parts(facts):
            own, places = _own(facts, numbers)
            value, seen = loss.evaluate(_at(logprobs, places), _at(entropies, places), own)
            total = total + scale * value
            metrics |= {f"{name}/{metric}": pair for metric, pair in seen.items()}
            metrics[f"{name}/loss"] = (value.detach(), loss.total_weight(own.trajectories))
        return total, metrics

    def coefficients(self, facts: Facts) -> Tensor | None:
        assert isinstance(facts, PackedFacts)
        total = torch.zeros(len(facts), dtype=facts.dtype, device=facts.device)
        for _, loss, scale, numbers in self._parts(facts):
            own, places = _own(facts, numbers)
            found = loss.coefficients(own)
            if found is None:
                return None
            total = total + scale * found if places is None else total.index_add(0, places, scale * found)
        return total

    def _parts(self, facts: PackedFacts) -> list[tuple[str, Loss, float, Int64s]]:
        """Name, loss, factor and rows of every loss that has a say in these rows."""
        totals = self._known_totals()
        parts = zip(self.names, self.losses, self.weights, totals, self._assign(facts.trajectories))
        return [(name, loss, weight / whole, own) for name, loss, weight, whole, own in parts if whole > 0 and len(own)]

    def _known_totals(self) -> tuple[float, ...]:
        if self.totals is None:
            raise ValueError(
                f"a mixture of {', '.join(self.names)} divides each loss by its own normaliser, that of the whole "
                "step: call mixture.for_step(all trajectories of the step) and use what it returns"
            )
        return self.totals

    def _assign(self, trajectories: Sequence[Trajectory]) -> list[Int64s]:
        """Numbers of the rows of every loss, ascending."""
        if self.select == "all":
            return [np.arange(len(trajectories))] * len(self.losses)
        rows: list[list[int]] = [[] for _ in self.losses]
        for number, row in enumerate(trajectories):
            owner = self._by_facts(row, number) if self.select == "facts" else self._by_name(row, number)
            if owner is not None:
                rows[owner].append(number)
        return [np.array(own, np.int64) for own in rows]

    def _by_facts(self, row: Trajectory, number: int) -> int | None:
        for place, loss in enumerate(self.losses):
            if loss.takes(row):
                return place
        if not row.weights.any():
            return None
        needs = "; ".join(f"{name}: {', '.join(loss.needed(row))}" for name, loss in zip(self.names, self.losses))
        raise DataError(f"{describe(row, number)} has the facts of none of the mixed losses; it lacks {needs}")

    def _by_name(self, row: Trajectory, number: int) -> int | None:
        assert callable(self.select)
        name = self.select(row)
        if name is not None and name not in self.names:
            raise ValueError(
                f"select gave {name!r} for {describe(row, number)}; the mixed losses are {', '.join(self.names)}, and "
                "None leaves the row to none of them"
            )
        return None if name is None else self.names.index(name)

    def _check_all(self, trajectories: Sequence[Trajectory], numbers: list[Int64s]) -> None:
        for name, loss, own in zip(self.names, self.losses, numbers):
            try:
                loss.check(_picked(trajectories, own))
            except DataError as error:
                counted = "" if len(own) == len(trajectories) else f" (rows are counted among its own {len(own)})"
                raise DataError(f"loss {name!r} of the mixture: {error}{counted}") from error

    def _totals(self, trajectories: Sequence[Trajectory], numbers: list[Int64s]) -> tuple[float, ...]:
        return tuple(loss.total_weight(_picked(trajectories, own)) for loss, own in zip(self.losses, numbers))


def _picked(trajectories: Sequence[Trajectory], numbers: Int64s) -> list[Trajectory]:
    return [trajectories[number] for number in numbers.tolist()]


def _own(facts: PackedFacts, numbers: Int64s) -> tuple[PackedFacts, Tensor | None]:
    """The facts of some rows, and int64 [t] their predictions' places; None for all of them."""
    if len(numbers) == len(facts.trajectories):
        return facts, None
    own, places = facts.of_rows(numbers)
    return own, on_device(places, facts.device)


def _at(values: Any, places: Tensor | None) -> Any:
    return values if values is None or places is None else values.index_select(0, places)


def mix(losses: Mapping[str, Loss], *, weights: Mapping[str, float] | None = None, select: Select = "all") -> Mixture:
    """Several losses in one step: the sum of weight times each one's mean over its rows of the step.

    A mean is what the loss would be by itself: its sum over its rows, divided by its own normaliser. A loss of which a
    step has no row counts 0. The engine tells the mixture of the step; where you split a step over calls, do
    `mixture = mixture.for_step(all rows of the step)` first, and pass `mixture.normaliser(...)`, which is 1.

    Args:
        losses: name -> loss, such as {"policy": grpo(), "sft": sft()}. Names stand in messages and metrics.
        weights: name -> weight, 0 or more; 1 where not given.
        select: "all": every loss sees every row. "facts": a row goes to the first loss, in order, whose facts it has
            (of a pair loss also pair and chosen, of kto chosen), so put sft, which needs none, last. A function of a
            trajectory: the name of its loss, or None for none.

    Metrics: those of every loss as "name/metric", and "name/loss".

    Raises:
        ValueError: no loss, an unknown name, a weight below 0, what is no loss of this library's protocol, a mixture.
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
        if loss.needs_values:
            raise ValueError(
                f"{name!r} needs values, which a mixture does not hand on; make the mixture's policy part an "
                "actor_critic by itself, in a step of its own"
            )
        check_number(f"the weight of {name!r}", given.get(name, 1.0), 0.0, LARGEST)
    if select not in ("all", "facts") and not callable(select):
        raise ValueError(f"select is {select!r}; allowed are 'all', 'facts' and a function of a trajectory")
    return Mixture(
        names=tuple(losses),
        losses=tuple(losses.values()),
        weights=tuple(float(given.get(name, 1.0)) for name in losses),
        select=select,
    )
