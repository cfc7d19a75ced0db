"""Several adapters of peft in one step: every row names the adapter that it goes through.

The hidden state of a token depends on the adapter, so rows share prefixes with rows of their own adapter alone. A call
runs one tree for each adapter, with that adapter active, and all losses are divided by one normaliser. What is active,
and which parameters have ``requires_grad``, is afterwards as before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from treetrain.core.engine.engine import TreeEngine
from treetrain.core.engine.loss_gradients import Mask
from treetrain.core.engine.memory import Rollback
from treetrain.core.engine.score import Scored
from treetrain.core.errors import DataError, UnsupportedModel, nearest
from treetrain.core.losses.facts import describe
from treetrain.core.losses.protocol import StepResult, UserLoss, as_loss, summed
from treetrain.core.planning.plan import Plan
from treetrain.core.tree.trajectory import Trajectory

BASE = "__base__"
"""The name that peft gives the model without an adapter."""


def named_by_keys(model: Any, rows: Sequence[Trajectory]) -> list[str]:
    """The adapter that each row's `key` names; a row without one takes the active adapter.

    Raises:
        DataError: a key that names no adapter of the model, or none where several adapters are active.
    """
    known, active = [*model.peft_config, BASE], list(model.active_adapters)
    for number, row in enumerate(rows):
        if row.key not in known and (row.key is not None or len(active) != 1):
            raise DataError(
                f"{describe(row, number)} has key={row.key!r}, and the model has several adapters, of which a row's "
                f"key names its own; {nearest(str(row.key), known)}"
            )
    return [active[0] if row.key is None else str(row.key) for row in rows]


def _with_one_key(rows: Sequence[Any], name: str) -> Sequence[Any]:
    """Rows of one adapter that share: those whose key names it get the key None where others have that."""
    keys = {getattr(row, "key", None) for row in rows}
    if not {None, name} <= keys:
        return rows
    return [row.replace(key=None) if getattr(row, "key", None) == name else row for row in rows]


@contextmanager
def trained_kept(model: nn.Module) -> Iterator[dict[str, bool]]:
    """After the block the same parameters are trained; yields whether each is, by name.

    peft freezes all adapters but the active one when it switches or loads them.
    """
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        yield trained
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(trained.get(name, p.requires_grad))


class Groups:
    """The rows of each adapter of a call; in a training step the same adapters in the same order on every rank.

    Args:
        engine: of a `peft.PeftModel`.
        rows: K rows of this rank, or their number.
        names: K names of adapters, or `BASE`.
        trains: whether adapters must have weights to train.

    Raises:
        TypeError: a model without adapters of peft.
        DataError: another number of names than rows, or an adapter that the model does not have.
        ValueError: rows of an adapter that has nothing to train.
        UnsupportedModel: a model that processes divide among them, or with a loss of its routers.
    """

    def __init__(self, engine: TreeEngine, rows: int, names: Sequence[str], *, trains: bool):
        model: Any = engine.model
        if not hasattr(model, "peft_config") or not hasattr(model, "set_adapter"):
            raise TypeError(f"adapter_names is for a peft.PeftModel, and the model is a {type(model).__name__}")
        if engine.sharing.collective or not engine.sharing.passes_with.alone:
            raise UnsupportedModel(
                "adapter_names with a model that processes divide among them (FSDP2, ZeRO-3, tensor or context "
                "parallel) has not been verified: use one process or DistributedDataParallel, or one adapter in a step"
            )
        if engine.balanced:
            raise UnsupportedModel(
                "adapter_names with the routers' auxiliary loss, which is over all tokens of a step, has not been "
                "verified: set output_router_logits=False in the model's configuration"
            )
        names = list(names)
        if isinstance(names, str) or len(names) != rows:
            raise DataError(f"there are {rows} rows and {len(names)} adapter_names; give one name for each row")
        known = [*model.peft_config, BASE]
        for number, name in enumerate(names):
            if name not in known:
                raise DataError(f"row {number} has the adapter {name!r}; {nearest(str(name), known)}")
        self.model = model
        # A training step is a collective call, a score is none.
        of_ranks = engine.ranks.exchange(sorted(set(names))) if trains else [names]
        everywhere = {name for own in of_ranks for name in own}
        self.rows = {name: [k for k, own in enumerate(names) if own == name] for name in known if name in everywhere}
        """Row numbers by adapter."""
        self._own = {name: parameters_of(model, name) for name in model.peft_config}
        adapted = {p for own in self._own.values() for p in own}
        self._own[BASE] = {p for p in model.parameters() if p not in adapted}
        if trains:
            self.check_trained()

    def check_trained(self) -> None:
        """Raise ValueError for rows of an adapter that has nothing to train."""
        for name in self.rows:
            reads = self._own[BASE] | self._own[name]
            if not any(p.requires_grad for p in reads):
                first = next(iter(self.rows[name]), 0)
                cure = (
                    "leave such rows out"
                    if name == BASE
                    else f"call model.set_requires_grad({name!r}, True) before the optimizer is made (and after each "
                    "set_adapter and disable_adapter of peft, which freeze all but the active one)"
                )
                raise ValueError(
                    f"row {first} has the adapter {name!r}, whose weights are all frozen (requires_grad=False), so the "
                    f"row trains nothing: {cure}, or score it under torch.no_grad()"
                )

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        """One adapter is active inside the block, and no other has ``requires_grad``."""
        model = self.model
        before, first = list(model.active_adapters), model.active_adapter
        with trained_kept(model) as trained:
            try:
                if name != BASE:
                    model.set_adapter(name)
                    self._restrict(trained, name)
                    yield
                else:
                    with model.disable_adapter():
                        self._restrict(trained, name)
                        yield
            finally:
                model.base_model.set_adapter(before)
                model.active_adapter = first

    def _restrict(self, trained: dict[str, bool], name: str) -> None:
        reads = self._own[BASE] | self._own[name]
        for at, p in self.model.named_parameters():
            p.requires_grad_(trained[at] and p in reads)


def parameters_of(model: nn.Module, name: str) -> set[nn.Parameter]:
    """The weights of one adapter: of its layers, and copies of modules that are trained whole beside it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            held = [getattr(module, attribute, None) for attribute in module.adapter_layer_names]
        elif isinstance(module, AuxiliaryTrainingWrapper):
            held = [getattr(module, "modules_to_save", None)]
        else:
            continue
        for of_adapters in held:
            if isinstance(of_adapters, nn.ModuleDict | nn.ParameterDict) and name in of_adapters:
                own = of_adapters[name]
                found |= {own} if isinstance(own, nn.Parameter) else set(own.parameters())
    return found


def forward_backward(
    engine: TreeEngine,
    rows: Sequence[Trajectory],
    loss: Any,
    normaliser: float | None,
    names: Sequence[str],
    *,
    sync: bool,
    mask: Mask | None,
) -> StepResult:
    """`TreeEngine.forward_backward` on rows of several adapters."""
    rows, loss = list(rows), as_loss(loss, normaliser)
    with engine.ranks.together("forward_backward"):
        groups = Groups(engine, len(rows), names, trains=True)
        if isinstance(loss, UserLoss) and loss.scope == "batch" and len(groups.rows) > 1:
            raise ValueError(
                "a loss of your own over all rows (scope='batch') cannot be computed adapter by adapter: take "
                "scored = engine.score(rows, adapter_names=...), or one adapter in a step"
            )
        if normaliser is None:
            call = engine.prepared.call()
            known, weight = engine.sharing.rows_of_all_ranks(call, type(engine).__name__, rows, loss, None)
            normaliser = weight if known is None else loss.normaliser(known)
    results, parameters = [], engine.prepared.parameters
    with Rollback(parameters, engine.sharing):
        for name, numbers in groups.rows.items():
            own = None if mask is None else [mask[k] for k in numbers]
            with groups.active(name):
                of_adapter = _with_one_key([rows[k] for k in numbers], name)
                results.append(engine.forward_backward(of_adapter, loss, normaliser, sync=False, mask=own))
    if sync:
        engine.sharing.average_gradients(parameters)
    return summed(results)


class ScoredAdapters(Scored):
    """Scores of rows of several adapters, by row as they were given; made by ``TreeEngine.score(adapter_names=...)``.

    Args:
        engine: of a `peft.PeftModel`.
        rows, names: K rows, and the adapter of each.
        options: the other arguments of `TreeEngine.score`.
    """

    def __init__(self, engine: TreeEngine, rows: Sequence[Any], names: Sequence[str], options: dict[str, Any]):
        self._engine = engine
        with engine.sharing.passes_with.together("TreeEngine.score"):
            self._groups = Groups(engine, len(rows), names, trains=False)
        self.by_adapter: dict[str, Scored] = {}
        """The scores of each adapter's rows, in their order."""
        by_row = {name: options.pop(name) for name in ("mask", "ids")}
        for name, numbers in self._groups.rows.items():
            own = {kind: None if given is None else [given[k] for k in numbers] for kind, given in by_row.items()}
            with self._groups.active(name):
                of_adapter = _with_one_key([rows[k] for k in numbers], name)
                self.by_adapter[name] = engine.score(of_adapter, **own, **options)
        self.logprobs, self.id_logprobs = self._arranged("logprobs") or (), self._arranged("id_logprobs")
        self.entropies, self.values = self._arranged("entropies"), self._arranged("values")
        self.is_top1, self.mean_logits = self._arranged("is_top1"), self._arranged("mean_logits")
        self.log_sum_sq_probs = self._arranged("log_sum_sq_probs")
        self.rewards = self.aux_loss = None
        for name in ("flat_tokens", "unique_tokens", "computed_tokens"):
            setattr(self, name, sum(getattr(scored, name) for scored in self.by_adapter.values()))
        self.live = any(scored.live for scored in self.by_adapter.values())

    def _arranged(self, kind: str) -> tuple[Tensor, ...] | None:
        found: dict[int, Tensor] = {}
        for name, numbers in self._groups.rows.items():
            scores = getattr(self.by_adapter[name], kind)
            if scores is None:
                return None
            found |= dict(zip(numbers, scores, strict=True))
        return tuple(found[k] for k in sorted(found))

    @property
    def plan(self) -> Plan:
        raise AttributeError("rows of several adapters have a plan for each: scored.by_adapter[name].plan")

    @property
    def recomputed_tokens(self) -> int:
        return sum(scored.recomputed_tokens for scored in self.by_adapter.values())

    @property
    def parts(self) -> int:
        return sum(scored.parts for scored in self.by_adapter.values())

    @property
    def runs_again(self) -> bool:
        return any(scored.runs_again for scored in self.by_adapter.values())

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self._engine.prepared.parameters

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for scored in self.by_adapter.values() for leaf in scored.leaves]

    def drop_gradients(self) -> None:
        for scored in self.by_adapter.values():
            scored.drop_gradients()

    def backward(self, *, sync: bool = True) -> None:
        """Run the leaves' gradients backward through the tree of each adapter; see `Scored.backward`."""
        arrived = any(leaf.grad is not None for leaf in self.leaves)
        for name, scored in self.by_adapter.items():
            if arrived and scored.live and all(leaf.grad is None for leaf in scored.leaves):
                scored.zero_gradients()  # the loss left this adapter's rows out
            if scored.live or not arrived:  # rows of a frozen adapter have no graph
                with torch.enable_grad(), self._groups.active(name):
                    scored.backward(sync=False)
        if sync:
            self._engine.sharing.average_gradients(self.parameters)
