"""The engine of a run: what its plans are made from is found once and kept, so that a resumed run makes the same."""

from typing import Any

from torch import nn

from treetrain.engine.calibrate import model_shape
from treetrain.engine.engine import TreeEngine
from treetrain.engine.linear import LinearEngine
from treetrain.engine.planning import formula_cost
from treetrain.plan.budget import Bytes
from treetrain.plan.constants import Constants
from treetrain.plan.price import CostModel
from treetrain.train.config import TrainConfig
from treetrain.train.parallel import World, from_main
from treetrain.train.sharding import local

LINEAR_PACK_TOKENS = 8_192  # beyond this, larger packs cost memory and gain no speed
ADAM_STATES = 2
"""Numbers that AdamW keeps for every trained weight; no optimiser here keeps more."""


class RunEngine(TreeEngine):
    """A `TreeEngine` of which one batch always gets the same plan.

    Two things beside the batch decide a plan: what the device has free, where no budget is given, and measured speeds
    and sizes, where bytes must be predicted. A plan changes rounding only, but so do all plans after it.
    """

    def __init__(self, model: nn.Module, *, budget: Any = None, temperature: float = 1.0, **sharing: Any):
        super().__init__(model, budget=budget, temperature=temperature, **sharing)
        self._free_bytes: int | None = None
        self._constants: Constants | None = None

    def settle(self) -> None:
        """Find what the device has free for plans now, with gradients and optimiser still to come.

        A collective call over several ranks: the memory is that of the rank with the least. What passes cost is
        measured by rank 0 for a budget of bytes, and taken from the model's shape where there is no budget.
        """
        free = super().free_bytes() if self.budget is None or self.in_lockstep else None
        trained = sum(local(p).numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        own = None if free is None else max(free - ADAM_STATES * trained, 0)
        found = self.ranks.gather(own)
        self._free_bytes = min((each for each in found if each is not None), default=None)
        if not (self.ranks.alone or self.in_lockstep):
            self._constants = self._agreed_constants()

    def _agreed_constants(self) -> Constants | None:
        """The same on all ranks; None where none are needed."""
        formula = formula_cost(self.model)
        if isinstance(self.budget, Bytes):
            return from_main(self.ranks, "measuring what passes cost", lambda: super(RunEngine, self).cost.constants)
        return None if formula is None or self.budget is not None else formula.constants

    @property
    def cost(self) -> CostModel:
        """See `TreeEngine.cost`; measured once."""
        if self._constants is None:
            self._constants = super().cost.constants
        return CostModel(shape=model_shape(self.model), constants=self._constants)

    def free_bytes(self) -> int | None:
        """See `TreeEngine.free_bytes`; as it was found at the beginning."""
        return super().free_bytes() if self._free_bytes is None else self._free_bytes

    def state_dict(self) -> dict[str, Any]:
        """What was found."""
        constants = None if self._constants is None else self._constants.as_dict()
        return {"budget": str(self.budget), "free_bytes": self._free_bytes, "constants": constants}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Plan as the run did that found this."""
        self._free_bytes, constants = state["free_bytes"], state["constants"]
        self._constants = None if constants is None else Constants.from_dict(constants)


def engine_of(model: nn.Module, config: TrainConfig, world: World | None = None) -> TreeEngine:
    """The engine that a run's settings ask for.

    Args:
        world: whose ranks share every step; a sharded model's are those of its mesh. None: this process is alone.
    """
    group = world.ranks.group if world is not None and config.parallel == "ddp" else None
    options: dict[str, Any] = {"temperature": config.temperature, "group": group, "reduce": config.reduce}
    if config.execution == "tree":
        return RunEngine(model, budget=config.budget, **options)
    pack_tokens = LINEAR_PACK_TOKENS if config.budget is None else int(config.budget)
    return LinearEngine(model, pack_tokens=pack_tokens, **options)
