"""TRL's trainers that compare the distributions of a student and a teacher.

`DistillationTrainer` takes the inputs of both LM heads from ``_get_last_hidden_state``, and computes the divergence and
its gradient from them chunk by chunk. Here these states come from a tree, as one node of autograd for each call, whose
backward runs the tree (`treetrain.autograd`). The heads, the divergence and the metrics stay the trainer's.

The experimental ones (`LOGITS`) call their models for logits within ``compute_loss``. These are made of such states by
the model's head, as the plain model makes them, and as many.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput

from treetrain.autograd import within_autograd
from treetrain.core.hf.capability import causal_lm
from treetrain.core.hf.tree_mode import replaced
from treetrain.core.planning.make import Bytes
from treetrain.distill import check_tokenizers
from treetrain.engine import TreeEngine
from treetrain.parallel.process_group import compute_dtype
from treetrain.trainers.patches import OwnForward, is_fused
from treetrain.trainers.settings import check_trainer, classes_of_trl, columns_of_rows, refuse

COMPARED_ROWS = 3
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference from the plain model's in the first step, over the largest number, by the dtype of the
computation; 0.1 in 16 bits."""


LOGITS = {"GKDTrainer", "GOLDTrainer", "IWOPDTrainer", "SDFTTrainer", "SDPOTrainer", "ServerDistillationTrainer"}
"""TRL's trainers that read logits of `model` and `teacher_model` in `compute_loss`."""
KNOWN = {"input_ids", "attention_mask", "logits_to_keep", "use_cache", "return_dict"}
"""Arguments of such a call on which the logits depend in no other way than is followed here, or not at all."""


def reads_logits(trainer: Trainer) -> bool:
    """Whether this is one of `LOGITS`, or a subclass."""
    return not LOGITS.isdisjoint(classes_of_trl(trainer))


def reads_distributions(trainer: Trainer) -> bool:
    """Whether this is TRL's `DistillationTrainer`, one of `LOGITS`, or a subclass that asks its models as they do."""
    states = "DistillationTrainer" in classes_of_trl(trainer) and hasattr(type(trainer), "_get_last_hidden_state")
    return states or reads_logits(trainer)


class SharesLastStates:
    """The method that `share_prefixes` puts around that of a `DistillationTrainer`."""

    last_states: "LastStates"

    def _get_last_hidden_state(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **inputs: Any
    ) -> Tensor:
        """The inputs of the head before the completion's tokens, [B, logits_to_keep, hidden]."""
        plain = super()._get_last_hidden_state  # type: ignore[misc]
        return self.last_states.of(plain, model, input_ids, attention_mask, logits_to_keep, inputs)


class SharesLogits:
    """The method that `share_prefixes` puts around that of the trainers in `LOGITS`."""

    last_states: "LastStates"

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the trainer's loss; the logits of its models come from trees."""
        with self.last_states.answering():
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]


class LastStates:
    """Computes the states of a trainer's models on trees.

    Raises:
        ValueError: a setting of the trainer that cannot be exact.
        UnsupportedModel: a model that would not be exact on a tree.
    """

    def __init__(self, trainer: Any, budget: int | str | Bytes | None, check: bool | Literal["rows"]):
        check_trainer(trainer)
        self._trainer, self._name = trainer, type(trainer).__name__
        beginning = f"share_prefixes cannot be exact with {self._name} and "
        columns = columns_of_rows(trainer)
        refuse(
            beginning,
            [
                (columns, f"the column {', '.join(columns)} of train_dataset, which it does not read; remove it"),
                (
                    trainer.accelerator.num_processes > 1,
                    f"{trainer.accelerator.num_processes} processes, which has not been verified; launch one",
                ),
                (getattr(trainer, "_is_vlm", False), "a model for images and text; give a causal LM"),
            ],
        )
        self._budget, self._check = budget, bool(check)
        self._engines: dict[nn.Module, TreeEngine] = {}
        self._compared: set[nn.Module] = set()
        teacher = getattr(trainer, "teacher_model", None)
        models = [trainer.model, *([] if teacher is None else [trainer.accelerator.unwrap_model(teacher)])]
        self._models: list[nn.Module] = list(dict.fromkeys(models))  # a model may be its own teacher
        for model in self._models:
            if is_fused((inner := causal_lm(model)).forward):  # of a subclass of `SFTTrainer`
                inner.forward = OwnForward(inner)
            self._engine(model)  # raises before training
        if teacher is not None and hasattr(trainer, "_get_last_hidden_state"):  # which compares distributions id by id
            check_tokenizers(*models)

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
            raise ValueError(f"rows have {', '.join(inputs)}, which {self._name} does not share on a tree")
        # TRL runs the model's layers within a forward that it has put in the place of accelerate's, so that no autocast
        # of mixed precision is around them.
        beneath = vars(model).get("_original_forward")
        within = nullcontext if beneath is None else partial(replaced, model, forward=beneath)
        with within():
            made = self._states(model, input_ids, attention_mask.bool(), within)[:, :-1][:, -keep:]
        made = made.to(model.get_output_embeddings().weight.dtype)  # type: ignore[operator]
        if self._check and model not in self._compared:
            some = slice(0, COMPARED_ROWS)
            with torch.no_grad():
                own = plain(model, input_ids[some], attention_mask[some], keep)
            there = attention_mask[some].bool()
            self._compare(model, "hidden states", own, made[some], (there[:, 1:] & there[:, :-1])[:, -keep:])
        return made

    def _states(
        self,
        model: nn.Module,
        input_ids: Integer[Tensor, "B L"],
        there: Bool[Tensor, "B L"],
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Float[Tensor, "B L hidden"]:
        """The inputs of the head at every token; 0 at padding. `within`: see `within_autograd`."""
        rows = [ids[own].tolist() for ids, own in zip(input_ids, there)]
        scored = self._engine(model)._scored("share_prefixes", rows, logprobs=False, values="states", in_autograd=True)
        states = torch.cat(within_autograd(scored, within))
        return states.new_zeros(*there.shape, states.shape[-1]).masked_scatter(there[..., None], states)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside the block, calls of the models give logits from trees."""
        with ExitStack() as stack:
            for model in self._models:
                answer = partial(self.logits, model, vars(model).get("forward"))
                stack.enter_context(replaced(model, forward=answer))
            yield

    def logits(self, model: nn.Module, plain: Any, *args: Any, **inputs: Any) -> CausalLMOutput:
        """The output of a call of a model: its logits [B, L, V], or those of the last ``logits_to_keep`` tokens.

        Args:
            plain: the forward that is set on the model outside of `answering`; None: that of its class.

        Raises:
            ValueError: the call has arguments that are not known here.
            RuntimeError: in the first call of a model, logits differ from the plain model's by more than rounding.
        """
        unknown = sorted(name for name, value in inputs.items() if name not in KNOWN and value is not None)
        if args or unknown or "input_ids" not in inputs:
            what = ", ".join(unknown) or "arguments without names"
            raise ValueError(f"{self._name} calls its model with {what}, which it does not share on a tree")
        ids, keep, accelerator = inputs["input_ids"], inputs.get("logits_to_keep") or 0, self._trainer.accelerator
        mask = inputs.get("attention_mask")
        there = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        with _as_outside(model, plain), accelerator.autocast():
            states, capabilities = self._states(model, ids, there)[:, -keep:], self._engine(model).capabilities
            states = states.to(next(capabilities.head.parameters()).dtype)
            made = capabilities.logit_map(capabilities.head(states))
            made = made if accelerator.mixed_precision == "no" else made.float()  # as accelerate's wrapper does
            if self._check and model not in self._compared:
                some = {name: x[:COMPARED_ROWS] if isinstance(x, Tensor) else x for name, x in inputs.items()}
                with torch.no_grad():
                    own = model(**some).logits
                self._compare(model, "logits", own, made[:COMPARED_ROWS], there[:COMPARED_ROWS, -keep:])
        return CausalLMOutput(logits=made)  # type: ignore[arg-type]

    def _compare(
        self,
        model: nn.Module,
        what: str,
        own: Float[Tensor, "b L n"],
        made: Float[Tensor, "b L n"],
        read: Bool[Tensor, "b L"],
    ) -> None:
        """Compare a few rows with the plain model's, where they are read."""
        self._compared.add(model)
        difference = float((own - made.detach())[read].abs().max()) if read.any() else 0.0
        # The output of accelerate's mixed precision is in float32.
        largest, allowed = float(own.abs().max()), TOLERANCE.get(compute_dtype(model, own.device), 0.1)
        if not difference <= allowed * largest:
            raise RuntimeError(
                f"share_prefixes: {what} of {type(model).__name__} differ from the plain model's by {difference:.1e}, "
                f"of {largest:.1e} at most: its rows depend on their padding or on one another. Pad the prompts on the "
                "right, or train without share_prefixes"
            )


@contextmanager
def _as_outside(model: nn.Module, forward: Any) -> Iterator[None]:
    """Inside the block, the model has its own forward, which its parts that run again in a backward find later."""
    answering = vars(model).pop("forward")
    try:
        if forward is not None:
            vars(model)["forward"] = forward
        yield
    finally:
        vars(model)["forward"] = answering


def share_distributions(trainer: Any, budget: int | str | Bytes | None, check: bool | Literal["rows"]) -> Any:
    """Make a trainer of `reads_distributions` compute shared prefixes once; see `share_prefixes`."""
    from treetrain.trainers.relied_on import warn_if_untested

    states = LastStates(trainer, budget, check)
    for package in ("transformers", "trl"):
        warn_if_untested(package)
    plain = type(trainer)
    shares = SharesLogits if reads_logits(trainer) else SharesLastStates
    trainer.__class__ = type(plain.__name__, (shares, plain), {"__doc__": plain.__doc__})
    trainer.last_states = states
    return trainer
