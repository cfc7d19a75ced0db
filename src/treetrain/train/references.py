"""The reference policy of a run: its log-probabilities of the rows, computed once, before the first step.

Before the first step the weights that are trained are the initial ones, so no second model is needed for them; nor for
an adapter, which is switched off. Only another model is loaded, and dropped again when the rows are scored.
"""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from treetrain.data.trajectory import Trajectory
from treetrain.engine.batch import check_batch
from treetrain.engine.engine import TreeEngine
from treetrain.train.batches import Int64s
from treetrain.train.config import TrainConfig
from treetrain.train.model import placed_model
from treetrain.train.parallel import World
from treetrain.train.run_engine import RunEngine, engine_of
from treetrain.train.scores import RowScores
from treetrain.tree.build import build_tree


class ReferencePolicy:
    """Gives an engine of the reference policy.

    Args:
        config: of the run.
        model, engine: of the run.
        world: whose ranks share what is scored.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, engine: TreeEngine, world: World) -> None:
        self._config, self._model, self._engine, self._world = config, model, engine, world

    @contextlib.contextmanager
    def engine(self, *, untouched: bool) -> Iterator[TreeEngine]:
        """For the length of a block.

        Args:
            untouched: the run's weights are still its initial ones.
        """
        named = self._config.reference_model
        if named is None and self._config.lora_rank:
            with self._model.disable_adapter():  # type: ignore[operator]
                yield self._engine
        elif named is None and untouched:
            yield self._engine
        else:
            yield self._load(named or self._config.model)
            gc.collect()
            if self._world.device.type == "cuda":
                torch.cuda.empty_cache()

    def _load(self, name: str) -> TreeEngine:
        model = placed_model(name, self._config, self._world, trained=False)
        engine = engine_of(model.eval(), self._config, self._world)
        if isinstance(engine, RunEngine):
            engine.settle()
        return engine


def score_references(
    policy: ReferencePolicy,
    parts: Iterable[tuple[RowScores, Sequence[Trajectory], Int64s]],
    *,
    untouched: bool,
    between: Callable[[], None],
) -> int:
    """Score the rows that have no reference log-probabilities yet.

    Args:
        policy: to score them under.
        parts: where scores go, all rows, and the numbers of those of a call.
        untouched: the run's weights are still its initial ones.
        between: called before every part.

    Returns:
        Rows that were scored.

    Raises:
        DataError: rows that are not for the reference model: a token outside its vocabulary, a row that is too long.
    """
    scored, given = 0, iter(parts)
    first = next((part for part in given if len(part[0].missing(part[2]))), None)
    if first is None:
        return 0
    with policy.engine(untouched=untouched) as engine:
        for scores, rows, numbers in itertools.chain([first], given):
            missing = scores.missing(numbers)
            if not len(missing):
                continue
            between()
            check_batch(build_tree([rows[number] for number in missing.tolist()]), engine.capabilities)
            scores.compute(engine, rows, missing)
            scored += len(missing)
    return scored
