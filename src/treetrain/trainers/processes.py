"""How the processes of a trainer hold its weights, and how the gradients of trees reach the parameters there.

`PrefixSharing` makes one of these by accelerate's distributed type (`PROCESSES`). `Processes` here is for processes
that hold all weights: one alone, or several in DistributedDataParallel. Another way to hold them is a subclass in a
file of its own (`sharded_processes.py` has FSDP2).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.distributed as dist
from torch import nn
from transformers import Trainer

from treetrain.core.engine.ranks import Ranks
from treetrain.core.engine.score import Scored
from treetrain.engine import TreeEngine
from treetrain.trainers.relied_on import versions_of
from treetrain.trainers.step_scores import Step, StepScores


class Processes:
    """Processes that each hold all weights. They run passes by themselves, and average gradients once in a step.

    Args:
        trainer: a `transformers.Trainer`.

    Raises:
        ValueError: a setting that cannot be exact; the message names what to change.
    """

    call = "forward"
    """The attribute of the model that is replaced, so that trees answer its calls."""

    def __init__(self, trainer: Trainer):
        self.accelerator = trainer.accelerator
        self._averaged: tuple[Step, int, Sequence[object]] | None = None
        """The gradients as they were averaged last: of this micro-batch of this step."""
        self.check(trainer)

    def check(self, trainer: Trainer) -> None:
        """Raise ValueError for settings that cannot be exact."""
        if dist.is_available() and dist.is_initialized():
            from treetrain.parallel.process_group import is_sharded

            if trainer.model is not None and is_sharded(trainer.model):
                raise ValueError(
                    "share_prefixes cannot be exact with a model that is sharded already; let accelerate shard it "
                    "(accelerate launch with fsdp_version: 2), or train it with tt.TreeTrainer"
                )

    def check_prepared(self, model: nn.Module) -> None:
        """Raise ValueError for a model that cannot be exact in the way in which accelerate has prepared it."""

    def compare(self, ranks: Ranks, trainer: Trainer, model: nn.Module, **settings: object) -> None:
        """Raise RanksDisagree on all ranks, before the first step, unless they have the same settings.

        Args:
            model: as accelerate has prepared it.
            settings: those that `share_prefixes` adds, by name.
        """
        with ranks.together("share_prefixes"):
            self.check_prepared(model)
            if not ranks.alone:
                accumulated, trained = "gradient_accumulation_steps", sum(p.requires_grad for p in model.parameters())
                settings |= {accumulated: getattr(trainer.args, accumulated), "trained weights": trained}
                ranks.same({**versions_of(trainer), "the trainer": type(trainer).__name__, **settings})

    def autocast(self) -> AbstractContextManager[None]:
        """The autocast under which this trainer's model runs."""
        return self.accelerator.autocast()

    def begin(self, model: nn.Module, settle: Callable[..., None]) -> None:
        """A micro-batch of training begins.

        Args:
            model: as accelerate has prepared it.
            settle: `PrefixSharing.settle`, for processes whose optimizer steps within the trainer's backward.
        """

    def comparison(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside the block the plain model and a tree run backward, and their gradients are compared."""
        return nullcontext()

    def scored(self, scored: Scored, settle: Callable[..., None]) -> None:
        """A tree was scored for training.

        Args:
            settle: runs the gradients that wait through their trees; for code that reads ``.grad`` before.
        """
        scored.deferral.settle = settle
        # In one process a tree of one micro-batch runs within the trainer's own backward: the weights may be others
        # after it (FGM, AWP, SAM, weight noise). Several average its gradients when these are read.
        if self.accelerator.num_processes == 1:
            scored.deferral.at_end = partial(settle, everything=False, last=False)

    def settle(self, engine: TreeEngine, steps: StepScores, *, everything: bool, last: bool) -> list[Scored]:
        """Run gradients that wait through their trees; returns the `Scored` of these trees.

        Args:
            engine: that of the trained model.
            everything: also trees that hold rows of micro-batches to come, which are then scored again.
            last: the optimizer steps next: gradients become those of all processes, unless they are already.
        """
        if engine.ranks.alone or not last:
            return steps.settle(everything=everything)
        if not steps.gradients_wait and self._averaged == self._gradients(engine, steps):
            return []
        with engine.ranks.together("the backward of the step's trees"):
            done = steps.settle(everything=everything)
        engine.sharing.average_gradients(engine.parameters)
        self._averaged = self._gradients(engine, steps)
        return done

    def _gradients(self, engine: TreeEngine, steps: StepScores) -> tuple[Step, int, Sequence[object]]:
        """The gradients of a micro-batch by their identity, which changes with their values."""
        versions = [None if p.grad is None else (id(p.grad), p.grad._version) for p in engine.parameters]
        return steps.step, steps.step.number, versions

    def engine_key(self, model: nn.Module) -> object:
        """The key of the engine for this model: it needs another one if this changes."""
        return id(model)
