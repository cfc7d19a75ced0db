"""TRL's `DistillationTrainer`: it asks student and teacher for hidden states, and compares them through their heads.

The trainer takes the inputs of both LM heads from ``_get_last_hidden_state``, and computes the divergence and its
gradient from them chunk by chunk. Here these states come from a tree, as one node of autograd for each call, whose
backward runs the tree (`treetrain.autograd`). The heads, the divergence and the metrics stay the trainer's.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from transformers import Trainer

from treetrain.autograd import within_autograd
from treetrain.core.planning.make import Bytes
from treetrain.engine import TreeEngine
from treetrain.trainers.settings import check_trainer, refuse

COMPARED_ROWS = 3
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of states from the plain model's in the first step, over the largest state; 0.1 in 16 bits."""


def reads_last_states(trainer: Trainer) -> bool:
    """Whether this is TRL's `DistillationTrainer`, or a subclass that asks for hidden states as it does."""
    names = {kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")}
    return "DistillationTrainer" in names and hasattr(type(trainer), "_get_last_hidden_state")


class SharesLastStates:
    """The method that `share_prefixes` puts around that of a `DistillationTrainer`."""

    last_states: "LastStates"

    def _get_last_hidden_state(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **inputs: Any
    ) -> Tensor:
        """The inputs of the head before the completion's tokens, [B, logits_to_keep, hidden]."""
        plain = super()._get_last_hidden_state  # type: ignore[misc]
        return self.last_states.of(plain, model, input_ids, attention_mask, logits_to_keep, inputs)


class LastStates:
    """Computes the states of a trainer's models on trees.

    Raises:
        ValueError: a setting of the trainer that cannot be exact.
        UnsupportedModel: a model that would not be exact on a tree.
    """

    def __init__(self, trainer: Any, budget: int | str | Bytes | None, check: bool | Literal["rows"]):
        check_trainer(trainer)
        beginning = "share_prefixes cannot be exact with DistillationTrainer and "
        refuse(
            beginning,
            [
                (
                    trainer.accelerator.num_processes > 1,
                    f"{trainer.accelerator.num_processes} processes, which has not been verified; launch one",
                ),
                (trainer._is_vlm, "a model for images and text; give a causal LM"),
            ],
        )
        self._budget, self._check = budget, bool(check)
        self._engines: dict[nn.Module, TreeEngine] = {}
        self._compared: set[nn.Module] = set()
        teacher = trainer.teacher_model
        models = [trainer.model, *([] if teacher is None else [trainer.accelerator.unwrap_model(teacher)])]
        for model in models:
            self._engine(model)  # raises before training

    def _engine(self, model: nn.Module) -> TreeEngine:
        if model not in self._engines:
            self._engines[model] = TreeEngine(model, budget=self._budget, value_head=nn.Identity(), check=self._check)
        return self._engines[model]

    def of(
        self,
        plain: Any,
        model: nn.Module,
        input_ids: Integer[Tensor, "B L"],
        attention_mask: Integer[Tensor, "B L"],
        keep: int,
        inputs: dict[str, Any],
    ) -> Float[Tensor, "B keep hidden"]:
        """The states before the last `keep` tokens; 0 at padding.

        Args:
            plain: the trainer's own method.
            inputs: its further arguments, such as images.

        Raises:
            RuntimeError: in the first call of a model, states differ from the plain model's by more than rounding.
        """
        if any(value is not None for value in inputs.values()):
            raise ValueError(f"rows have {', '.join(inputs)}, which DistillationTrainer does not share on a tree")
        there = attention_mask.bool()
        rows = [ids[own].tolist() for ids, own in zip(input_ids, there)]
        scored = self._engine(model)._scored("share_prefixes", rows, logprobs=False, values="states", in_autograd=True)
        states = torch.cat(within_autograd(scored))
        of_batch = states.new_zeros(*there.shape, states.shape[-1])
        of_batch = of_batch.masked_scatter(there[..., None], states)[:, :-1][:, -keep:]
        made = of_batch.to(model.get_output_embeddings().weight.dtype)  # type: ignore[operator]
        if self._check and model not in self._compared:
            self._compare(plain, model, input_ids, attention_mask, keep, made.detach())
            self._compared.add(model)
        return made

    def _compare(
        self, plain: Any, model: nn.Module, ids: Tensor, mask: Tensor, keep: int, made: Float[Tensor, "B keep hidden"]
    ) -> None:
        """Compare a few rows with the plain model, where the states are read."""
        some = slice(0, COMPARED_ROWS)
        with torch.no_grad():
            own = plain(model, ids[some], mask[some], keep)
        read = mask[some, 1:].bool()[:, -keep:] & mask[some, :-1].bool()[:, -keep:]
        difference = float((own - made[some])[read].abs().max()) if read.any() else 0.0
        largest, allowed = float(own.abs().max()), TOLERANCE.get(own.dtype, 0.1)
        if not difference <= allowed * largest:
            raise RuntimeError(
                f"share_prefixes: hidden states of {type(model).__name__} differ from the plain model's by "
                f"{difference:.1e}, of {largest:.1e} at most: its rows depend on their padding or on one another. Pad "
                "the prompts on the right, or train without share_prefixes"
            )


def share_last_states(trainer: Any, budget: int | str | Bytes | None, check: bool | Literal["rows"]) -> Any:
    """Make a `DistillationTrainer` compute shared prefixes once; see `share_prefixes`."""
    from treetrain.trainers.relied_on import warn_if_untested

    states = LastStates(trainer, budget, check)
    for package in ("transformers", "trl"):
        warn_if_untested(package)
    plain = type(trainer)
    trainer.__class__ = type(plain.__name__, (SharesLastStates, plain), {"__doc__": plain.__doc__})
    trainer.last_states = states
    return trainer
