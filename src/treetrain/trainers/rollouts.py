"""Facts that a run computes for its rollouts (advantages, old and reference log-probabilities), and what it logs."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from numpy.typing import NDArray
from torch import nn
from transformers import TrainerCallback

from treetrain import losses
from treetrain.data.advantages import advantages_of_groups
from treetrain.data.columns import RowColumns, columns_of
from treetrain.data.trajectory import PER_TOKEN_FACTS, LazyTrajectories, Trajectory
from treetrain.engine.costs import cost_if_countable
from treetrain.engine.distributed import is_sharded
from treetrain.engine.engine import LinearEngine, TreeEngine
from treetrain.engine.loss import as_loss, describe
from treetrain.engine.packed import model_device
from treetrain.errors import DataError
from treetrain.losses.losses import PolicyLoss
from treetrain.planning.balance import dispatch
from treetrain.planning.make import PART_TOKENS
from treetrain.trainers.arguments import TreeArguments
from treetrain.tree.build import as_tree

OLD, REFERENCE = "old_logprobs", "ref_logprobs"


def step_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of a step's rows: advantages (over trained tokens), answers and groups."""
    trained = [(row, row.weights != 0) for row in rows if row.weights.any() and row.advantages is not None]
    if not trained:
        return {}
    advantages = [row.advantages[mask] for row, mask in trained]  # type: ignore[index]
    lengths = [len(each) for each in advantages]
    signal: dict[Any, bool] = {}
    for number, ((row, _), each) in enumerate(zip(trained, advantages, strict=True)):
        name = ("row", number) if row.group is None else ("group", row.group)
        signal[name] = signal.get(name, False) or bool(each.any())
    together = np.concatenate(advantages)
    return {
        "advantage_mean": float(together.mean()),
        "advantage_std": float(together.std()),
        "response_tokens_mean": float(np.mean(lengths)),
        "response_tokens_max": float(max(lengths)),
        "groups": float(len(signal)),
        "groups_without_signal": float(sum(not each for each in signal.values())),
    }


def engine_of(model: nn.Module, args: TreeArguments) -> TreeEngine:
    """The engine of a run, on its model or on the reference policy."""
    group = dist.group.WORLD if args.world_size > 1 and not is_sharded(model) else None
    options: dict[str, Any] = {"temperature": args.temperature, "group": group, "compile_layers": args.compile_layers}
    if args.execution == "tree":
        return TreeEngine(model, budget=args.budget, **options)
    size = PART_TOKENS["cuda" if model_device(model).type == "cuda" else "cpu"]
    pack_tokens = size if args.budget is None else int(args.budget)
    return LinearEngine(model, pack_tokens=pack_tokens, **options)


def checked_loss(args: TreeArguments, loss: Any) -> Any:
    """The loss that is given, or that the arguments name. Raises ValueError."""
    if loss is not None and (args.loss != "sft" or args.loss_kwargs):
        raise ValueError(f"a loss is given, and args name {args.loss!r} with {args.loss_kwargs}; give one of them")
    loss = losses.by_name(args.loss, **(args.loss_kwargs or {})) if loss is None else loss  # type: ignore[arg-type]
    loss, name = as_loss(loss), type(loss).__name__
    if "predicted_values" in loss.needs:
        raise ValueError(
            f"{name} needs values, and this trainer has no value head; use TreeEngine(model, value_head=...) in a loop "
            "of your own"
        )
    if args.target_kl is not None and not (isinstance(loss, PolicyLoss) and loss.clipped):
        raise ValueError(f"target_kl is {args.target_kl}, but {name} measures no KL from an old policy")
    return loss


def needed_facts(loss: Any) -> tuple[str, ...]:
    """Names of the per-token facts that a loss needs."""
    return tuple(name for name in loss.needs if name in PER_TOKEN_FACTS)


def with_advantages(rows: Sequence[Trajectory], loss: Any, options: dict[str, Any] | None) -> Sequence[Trajectory]:
    """The rows with advantages from their rewards, if the loss needs advantages and no row has any.

    Args:
        rows: in memory or not.
        options: of `group_advantages`, or None.

    Raises:
        ValueError: options that the rows or the loss have no use for.
    """
    columns = columns_of(rows)
    wanted = "advantages" in needed_facts(loss) and not columns.given["advantages"].any()
    if not wanted or np.isnan(columns.reward).all():
        if options:
            why = "the rows have no rewards" if wanted else "the rows have advantages, or the loss needs none"
            raise ValueError(f"advantage_kwargs is {options}, but no advantages are made of rewards: {why}")
        return rows
    values = advantages_of_groups(rows, **(options or {}))
    if hasattr(rows, "columns"):
        return _WithAdvantages(rows, columns, values)
    return [row.replace(advantages=value) for row, value in zip(rows, values.tolist(), strict=True)]


class _WithAdvantages(LazyTrajectories):
    """Rows that are not in memory, with an advantage each."""

    def __init__(self, rows: Sequence[Trajectory], columns: RowColumns, values: NDArray[np.float64]) -> None:
        given = columns.given | {"advantages": np.ones(len(rows), bool)}
        self.columns = dataclasses.replace(columns, given=given, signal=values != 0)
        self._rows, self._values = rows, values

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Trajectory:
        return self._rows[number].replace(advantages=float(self._values[number]))


def missing_facts(rows: Sequence[Trajectory], loss: Any) -> frozenset[str]:
    """Those of old_logprobs and ref_logprobs that the loss needs and no trained row has.

    Raises:
        DataError: only some of the rows have them, or a row lacks another fact.
    """
    columns = columns_of(rows)
    missing = set()
    for fact in needed_facts(loss):
        with_it = np.flatnonzero(columns.trained & columns.given[fact])
        without = np.flatnonzero(columns.trained & ~columns.given[fact])
        if not len(without):
            continue
        if fact not in (OLD, REFERENCE):
            loss.check([rows[int(without[0])]])
        if len(with_it):
            one, other = (describe(rows[int(number)], int(number)) for number in (with_it[0], without[0]))
            raise DataError(
                f"{one} has {fact}, {other} has none: {len(with_it)} of {len(with_it) + len(without)} rows have them, "
                "and computing the others would mix two policies; give all rows theirs, or none"
            )
        missing.add(fact)
    if isinstance(rows, list) and loss.scope == "batch":  # pairs, which are not in the columns
        loss.check([row.replace(**{fact: np.zeros(len(row)) for fact in missing}) for row in rows])
    return frozenset(missing)


def on_policy(loss: Any) -> Any:
    """The loss with on-policy updates (ratio 1), which need no old log-probabilities; None if it has no such form."""
    return dataclasses.replace(loss, on_policy=True) if isinstance(loss, PolicyLoss) else None


@torch.no_grad()
def logprobs(engine: TreeEngine, rows: Sequence[Trajectory], *, entropies: bool = False, every: bool = False) -> Any:
    """`TreeEngine.logprobs` of rows that every rank has: each rank scores a share of them, all get all.

    Args:
        entropies: whether they are wanted too.
        every: score every prediction; False gives 0 for those without a loss weight, which built-in losses do not read.

    Returns:
        one float tensor [L - 1] per row; with `entropies` a second list; in CPU memory where there are several ranks.
    """
    ranks = engine.ranks

    def scores(rows: Sequence[Trajectory]) -> Any:
        mask = None if every else [row.weights[1:] != 0 for row in rows]
        found = engine.logprobs(rows, return_entropy=entropies, mask=mask)
        return found if entropies else (found,)

    def own_scores() -> list[list[NDArray[np.floating]]]:
        own = [rows[number] for number in shares[ranks.rank].tolist()]
        found = scores(own) if own or engine.collective else ([],) * (1 + entropies)
        return [[one.cpu().numpy() for one in each] for each in found]

    if ranks.alone:
        found = scores(rows)
    else:
        tree = as_tree(rows, merge=engine.merge)
        shares = dispatch(tree, cost_if_countable(engine.model), ranks.size, whole_rows=every)
        if engine.collective:
            everywhere = ranks.gather(own_scores())  # passes are collective: no rank waits here for one that failed
        else:
            _, everywhere = ranks.agree("scoring", lambda: (None, own_scores()))
        order = np.argsort(np.concatenate(shares))
        columns = ([one for of_rank in everywhere for one in of_rank[column]] for column in range(1 + entropies))
        found = tuple([torch.from_numpy(column[number]) for number in order] for column in columns)
    return found if entropies else found[0]


def with_fact(row: Trajectory, fact: str, scores: Float[np.ndarray, "predictions"]) -> Trajectory:
    """A row with log-probabilities that were computed for it."""
    values = np.zeros(len(row))
    # An untrained token may be impossible under the policy; no loss reads it.
    values[1:] = np.where(row.weights[1:] != 0, scores, 0.0)
    return row.replace(**{fact: values})


class RunningBatch(TrainerCallback):
    """The current batch, with log-probabilities computed before its first update; a callback, so that it is saved."""

    def __init__(self) -> None:
        self.number = -1
        self.stopped = False
        """The policy is too far from the old one: the remaining updates of the batch are skipped."""
        self.scores: dict[str, dict[int, NDArray[np.floating]]] = {}
        """Name of the fact -> number of the row -> log-probabilities."""

    def start_step(self, number: int) -> None:
        """Start a step of this batch; its first step clears the state of the previous batch."""
        if number != self.number:
            self.number, self.stopped, self.scores = number, False, {}

    def add(self, fact: str, numbers: Sequence[int], scores: Sequence[Float[torch.Tensor, "_"]]) -> None:
        """Add log-probabilities of rows."""
        self.scores[fact] = {n: one.cpu().numpy() for n, one in zip(numbers, scores, strict=True)}

    def with_facts(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A call (see `StepDataset`) with the facts computed for its rows; the structure of its tree stays."""
        rows = list(inputs["rows"])
        for fact, scores in self.scores.items():
            rows = [with_fact(row, fact, scores[n]) for row, n in zip(rows, inputs["call"].rows.tolist(), strict=True)]
        own = [rows[number] for number in inputs["own"].tolist()]
        return inputs | {"rows": rows, "tree": dataclasses.replace(inputs["tree"], rows=own)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start without a batch."""
        self.start_step(-1)

    def state_dict(self) -> dict[str, str]:
        """The state as text: its shapes differ in every batch, so it cannot be loaded into tensors in place."""
        scores = {fact: {n: one.tolist() for n, one in rows.items()} for fact, rows in self.scores.items()}
        return {"json": json.dumps([self.number, self.stopped, scores])}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Restore a batch."""
        self.number, self.stopped, scores = json.loads(state["json"])
        self.scores = {fact: {int(n): np.array(one) for n, one in rows.items()} for fact, rows in scores.items()}
