"""However a trainer is customised, it learns with shared prefixes what it learns without, or is refused in words.

Every customisation trains twice, with shared prefixes and without. Logged numbers (losses, gradient norms), what the
customisation saw, and weights must be equal.
"""

import contextlib
import copy
import functools
import io
import json
import os
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainer_runs as runs
from trainer_runs import BUILDERS, Run, difference, train
from transformers import TrainerCallback
from trl import DPOTrainer, SFTTrainer

import treetrain as tt

ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
BOUND, BOUND_OF_UPDATES = 1e-5, 1e-4


class Seen:
    """A trainer that keeps what its customisation has seen."""

    def see(self, number: Any) -> None:
        vars(self).setdefault("seen", []).append(float(number))

    @property
    def number(self) -> int:
        """How many training steps have begun before this one; 4 make an optimizer step."""
        before = self.state.global_step * self.args.gradient_accumulation_steps  # of a run that goes on
        self.began = vars(self).get("began", before - 1) + 1
        return self.began


def norm(trainer: Any) -> torch.Tensor:
    """The norm of the gradients so far."""
    grads = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    return torch.stack(grads).norm() if grads else torch.zeros(())


NOTHING = torch.zeros(())


# ---- training_step


def calls_backward_of_the_loss(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            loss.backward()
            return loss.detach()

    return Custom


def runs_backward_twice(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(0.3 * loss, retain_graph=True)
            self.accelerator.backward(0.7 * loss)
            return loss.detach()

    return Custom


def has_a_penalty_of_its_own_backward(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            penalty = 0.01 * sum(p.square().sum() for p in self.model.parameters())
            self.accelerator.backward(penalty)
            return loss + penalty.detach()

    return Custom


def skips(which):
    def customise(*bases):
        class Custom(*bases):
            def training_step(self, model, inputs, num_items_in_batch=None):
                if self.number % 4 == which:
                    return NOTHING
                return super().training_step(model, inputs, num_items_in_batch)

        return Custom

    return customise


def skips_the_backward(which):
    def customise(*bases):
        class Custom(*bases):
            def training_step(self, model, inputs, num_items_in_batch=None):
                loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
                if self.number % 4 != which:
                    self.accelerator.backward(loss)
                return loss.detach()

        return Custom

    return customise


def repeats(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            first = super().training_step(model, dict(inputs), num_items_in_batch)
            return first + super().training_step(model, dict(inputs), num_items_in_batch)

    return Custom


def calls_itself(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None, inner=False):
            if inner:
                return super().training_step(model, inputs, num_items_in_batch)
            return self.training_step(model, inputs, num_items_in_batch, inner=True)

    return Custom


def divides_the_batch(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            parts = [{name: x[k : k + 1] for name, x in inputs.items()} for k in range(len(inputs["input_ids"]))]
            return sum(super(Custom, self).training_step(model, part, num_items_in_batch) for part in parts)

    return Custom


def after_each(change: Callable[[Any], Any]):
    """Do something with the gradients after every micro-batch."""

    def customise(*bases):
        class Custom(*bases):
            def training_step(self, model, inputs, num_items_in_batch=None):
                loss = super().training_step(model, inputs, num_items_in_batch)
                change(self)
                return loss

        return Custom

    return customise


def clip(trainer):
    trainer.see(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1))


def clip_values(trainer):
    torch.nn.utils.clip_grad_value_(trainer.model.parameters(), 0.01)


def read(trainer):
    trainer.see(norm(trainer))


def scale(trainer):
    for p in trainer.model.parameters():
        p.grad.mul_(0.5)


def add_noise(trainer):
    for p in trainer.model.parameters():
        p.grad.add_(torch.full_like(p, 0.01))


def replace_gradients(trainer):
    for p in trainer.model.parameters():
        p.grad = 0.5 * p.grad


def zero_every_second(set_to_none, some=False):
    def change(trainer):
        if trainer.number % 4 == 1:
            if some:
                for p in list(trainer.model.parameters())[::2]:
                    p.grad = None
            else:
                trainer.model.zero_grad(set_to_none=set_to_none)

    return change


def step_by_hand(trainer):
    trainer.optimizer.optimizer.step()
    trainer.model.zero_grad()


def catches(where):
    """The second micro-batch of each step fails, in the loss or after its backward, and is skipped."""

    def customise(*bases):
        class Custom(*bases):
            def compute_loss(self, *args, **kwargs):
                loss = super().compute_loss(*args, **kwargs)
                if self.number % 4 == 1 and where == "loss":
                    raise ArithmeticError("loss")
                return loss

            def training_step(self, model, inputs, num_items_in_batch=None):
                try:
                    loss = super().training_step(model, inputs, num_items_in_batch)
                    if self.began % 4 == 1 and where == "after":
                        raise ArithmeticError("after")
                    return loss
                except ArithmeticError:
                    self.model.zero_grad()
                    return NOTHING

        return Custom

    return customise


# ---- training_step with other weights for a while


@contextlib.contextmanager
def moved(moves):
    """Inside the block some weights are others: each is moved by a tensor."""
    before = [(p, p.detach().clone()) for p, _ in moves]
    for p, by in moves:
        p.data.add_(by)
    yield
    for p, value in before:
        p.data.copy_(value)


def along_gradients(parameters):
    return [(p, 0.1 * p.grad / p.grad.norm()) for p in parameters if p.grad is not None and p.grad.any()]


def trains_with_perturbed_embeddings(*bases):
    """FGM: gradients of the embeddings say how they are perturbed for a second backward."""

    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            with moved(along_gradients([self.model.get_input_embeddings().weight])):
                return loss + super().training_step(model, dict(inputs), num_items_in_batch)

    return Custom


def trains_with_perturbed_weights(*bases):
    """AWP: the same for all weights."""

    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            with moved(along_gradients(self.model.parameters())):
                return loss + super().training_step(model, dict(inputs), num_items_in_batch)

    return Custom


def minimises_sharpness(*bases):
    """SAM: only the gradients at the perturbed weights count."""

    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            super().training_step(model, dict(inputs), num_items_in_batch)
            moves = along_gradients(self.model.parameters())
            self.model.zero_grad()
            with moved(moves):
                return super().training_step(model, dict(inputs), num_items_in_batch)

    return Custom


def adds_noise_to_weights(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            draws = torch.Generator().manual_seed(self.number)
            noise = [(p, 0.01 * torch.randn(p.shape, generator=draws)) for p in self.model.parameters()]
            with moved(noise):
                return super().training_step(model, inputs, num_items_in_batch)

    return Custom


# ---- compute_loss


def loss_as(change: Callable[[Any, Any], Any]):
    def customise(*bases):
        class Custom(*bases):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
                return change(self, loss)

        return Custom

    return customise


def scaled(trainer, loss):
    return 0.5 * loss


def regularised(trainer, loss):
    return loss + 0.01 * sum(p.square().sum() for p in trainer.model.parameters())


def calls_the_model_twice(*bases):
    class Custom(*bases):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = [super().compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)]
            loss.append(super().compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch))
            return 0.3 * loss[0] + 0.7 * loss[1].square()

    return Custom


def reads_logits_too(*bases):
    class Custom(*bases):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            penalty = 1e-3 * logits.logsumexp(-1).square().mean()
            return penalty + super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    return Custom


def runs_a_backward_in_compute_loss(*bases):
    class Custom(*bases):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            (0.2 * loss).backward(retain_graph=True)
            return loss

    return Custom


# ---- callbacks


def at(event: str, action: Callable[[Any], Any]):
    """A callback that does something with the trainer at an event."""

    def customise(*bases):
        class Custom(*bases):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                trainer = self

                def call(self, *args, **kwargs):
                    action(trainer)

                self.add_callback(type("Calls", (TrainerCallback,), {event: call})())

        return Custom

    return customise


def evaluate(trainer):
    trainer.see(trainer.evaluate()["eval_loss"])
    trainer.model.train()


def save(trainer):
    trainer.save_model(trainer.args.output_dir + "/between")


def generate(trainer):
    trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


def clamp_by_hooks(*bases):
    class Custom(*bases):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for p in self.model.parameters():
                p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    return Custom


# ---- a model that changes between two calls, or has hooks


def asks_twice(changed: Callable[..., Any], *, gradients: bool = True):
    """The loss of a batch, and in the same micro-batch its loss once more with a model that was changed."""

    def customise(*bases):
        class Custom(*bases):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                loss = super().compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
                with changed(self.model, self.number), torch.set_grad_enabled(gradients):
                    other = super().compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
                self.see(other)
                return loss * (1 + other.detach()) if not gradients else 0.3 * loss + 0.7 * other

        return Custom

    return customise


def layers_of(model):
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


@contextmanager
def steered(model, number):
    hook = layers_of(model)[0].register_forward_hook(lambda module, args, output: output * 1.5)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def swapped_by_data(model, number):
    kept = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    try:
        yield
    finally:
        for p, values in zip(model.parameters(), kept):
            p.data.copy_(values)


@contextmanager
def shifted(model, number):
    """Shift weights as MeZO does, in another direction for each micro-batch."""
    kept, random = [p.data.clone() for p in model.parameters()], torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=random), alpha=0.05)
    try:
        yield
    finally:
        for p, values in zip(model.parameters(), kept):
            p.data.copy_(values)


@contextmanager
def scaled_attention(model, number):
    attention = layers_of(model)[0].self_attn
    attention.scaling *= 3
    try:
        yield
    finally:
        attention.scaling /= 3


def other_autocast(model, number):
    return torch.autocast("cpu", dtype=torch.bfloat16)


def estimates_by_shifts(*bases):
    """MeZO's estimate: the difference of two losses without gradients, in a direction of the micro-batch."""

    class Custom(*bases):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            number, losses = self.number, []
            kept = [p.detach().clone() for p in self.model.parameters()]
            with torch.no_grad():
                for sign in (1, -1):
                    random = torch.Generator().manual_seed(number)
                    for p, values in zip(self.model.parameters(), kept):
                        p.data.copy_(values).add_(sign * 0.05 * torch.randn(p.shape, generator=random))
                    losses.append(super().compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch))
                for p, values in zip(self.model.parameters(), kept):
                    p.data.copy_(values)
            self.see(losses[0] - losses[1])
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    return Custom


def steers_by_micro_batch(*bases):
    """A hook reads what the loss sets for each micro-batch."""

    class Custom(*bases):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.strength = 1.0
            layers_of(self.model)[0].register_forward_hook(lambda module, args, output: output * self.strength)

        def compute_loss(self, *args, **kwargs):
            self.strength = 1.0 + 0.2 * (self.number % 4)
            return super().compute_loss(*args, **kwargs)

    return Custom


def on_model(put_on: Callable[[Any], Any]):
    """What a user puts on the model before training."""

    def customise(*bases):
        class Custom(*bases):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                put_on(self.model)

        return Custom

    return customise


def wraps_forwards(model):
    for layer in layers_of(model):
        layer.mlp.forward = functools.partial(lambda plain, x: 0.5 * plain(x), layer.mlp.forward)


def scales_gradients(model):
    def hook(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: 0.5 * gradient)

    layers_of(model)[0].mlp.register_forward_hook(hook)


def clamps_gradients(model):
    def hook(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))

    layers_of(model)[0].mlp.register_forward_hook(hook)


def centres(model):
    layers_of(model)[0].mlp.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))


CHANGING: dict[str, Callable[..., Any]] = {
    "model: steered in a second call": asks_twice(steered),
    "model: steered without gradients": asks_twice(steered, gradients=False),
    "model: teacher by .data": asks_twice(swapped_by_data, gradients=False),
    "model: teachers of micro-batches": asks_twice(shifted, gradients=False),
    "model: attention scaled": asks_twice(scaled_attention),
    "model: another autocast": asks_twice(other_autocast, gradients=False),
    "model: estimates by shifts": estimates_by_shifts,
    "model: steered by micro-batch": steers_by_micro_batch,
    "model: forwards wrapped": on_model(wraps_forwards),
    "model: gradients scaled by a hook": on_model(scales_gradients),
}
REFUSED = {
    "gradients clamped by a hook": on_model(clamps_gradients),
    "tokens mixed by a hook": on_model(centres),
}
CUSTOMISATIONS: dict[str, Callable[..., Any]] = {
    **CHANGING,
    "step: loss.backward": calls_backward_of_the_loss,
    "step: two backwards": runs_backward_twice,
    "step: penalty apart": has_a_penalty_of_its_own_backward,
    **{f"step: skips {k}": skips(k) for k in range(4)},
    "step: skips a backward": skips_the_backward(3),
    "step: repeats": repeats,
    "step: calls itself": calls_itself,
    "step: divides": divides_the_batch,
    "step: clips": after_each(clip),
    "step: clips values": after_each(clip_values),
    "step: reads": after_each(read),
    "step: scales": after_each(scale),
    "step: adds": after_each(add_noise),
    "step: replaces": after_each(replace_gradients),
    "step: zeroes": after_each(zero_every_second(True)),
    "step: fills with zeros": after_each(zero_every_second(False)),
    "step: zeroes some": after_each(zero_every_second(True, some=True)),
    "step: steps by hand": after_each(step_by_hand),
    "step: catches in the loss": catches("loss"),
    "step: catches after backward": catches("after"),
    "loss: scaled": loss_as(scaled),
    "loss: regularised": loss_as(regularised),
    "loss: two calls": calls_the_model_twice,
    "loss: logits too": reads_logits_too,
    "loss: backward within": runs_a_backward_in_compute_loss,
    **{
        f"callback: {action.__name__} at {event}": at(f"on_{event}", action)
        for event in ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end")
        for action in (evaluate, save, generate)
    },
    **{
        f"callback: {name} at {event}": at(f"on_{event}", action)
        for event in ("substep_end", "pre_optimizer_step")
        for name, action in {
            "clip": clip,
            "read": read,
            "zero": lambda trainer: trainer.model.zero_grad(),
            "zero by the optimizer": lambda trainer: trainer.optimizer.optimizer.zero_grad(set_to_none=False),
        }.items()
    },
    "hooks: clamp": clamp_by_hooks,
}
FAST = (
    "step: two backwards",
    "step: skips 3",
    "step: clips",
    "loss: regularised",
    "callback: evaluate at substep_end",
)
"""One of each class; two more run below, by the mixin and across a resume."""


def run(name: str, folder: Any, patch: Any, *, form: str, kind: str = "sft", steps: int = 2, **settings: Any) -> Run:
    """Train a customised trainer; `form` is how it shares prefixes: by the call, the mixin, or not at all."""
    plain = {"sft": SFTTrainer, "dpo": DPOTrainer}[kind]
    bases = (tt.SharePrefixesMixin, Seen, plain) if form == "mixin" else (Seen, plain)
    bases = (tt.SafeCheckpointsMixin, *bases) if settings.get("save_strategy") else bases
    patch.setattr(runs, plain.__name__, ON_RANKS[name](*bases))
    settings = {**ACCUMULATED, "train_sampling_strategy": "sequential", **settings}
    return train(BUILDERS[kind], folder, shared=form == "call", steps=steps, **settings)


def assert_same(shared: Run, plain: Run, resumed: bool = False, bound: float = BOUND) -> None:
    """Compare two runs; the first may have gone on from a checkpoint after half of the steps."""
    logs = [[each for each in run_.logs if not (resumed and "train_loss" in each)] for run_ in (shared, plain)]
    apart = difference(*(replace(each, logs=own) for each, own in zip((shared, plain), logs)))
    assert max(apart.metrics, apart.weights) <= bound, apart
    assert resumed or apart.updates <= BOUND_OF_UPDATES, apart
    ours, theirs = (vars(each.trainer).get("seen", []) for each in (shared, plain))
    assert ours == pytest.approx(
        theirs[-len(ours) or len(theirs) :] if resumed else theirs, rel=max(1e-4, bound), abs=1e-6
    )
    assert not resumed or len(ours) * 2 == len(theirs)


def bound_of(name: str) -> float:
    return 1e-3 if "autocast" in name else BOUND


def compare(name: str, folder: Any, patch: Any, *, form: str = "call", **settings: Any) -> None:
    shared, plain = (run(name, folder, patch, form=each, **settings) for each in (form, "none"))
    assert shared.trainer.prefix_sharing.gains.line
    assert_same(shared, plain, bound=bound_of(name))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAST)
def test_a_customised_trainer_learns_the_same(name, tmp_path, monkeypatch):
    compare(name, tmp_path, monkeypatch)


MOVES: dict[str, Callable[..., Any]] = {
    "FGM": trains_with_perturbed_embeddings,
    "AWP": trains_with_perturbed_weights,
    "SAM": minimises_sharpness,
    "weight noise": adds_noise_to_weights,
}
"""Customisations that change weights around a backward and restore them."""
ONE_MICRO_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("name", MOVES)
def test_weights_may_be_others_around_a_backward(name, tmp_path, monkeypatch):
    compare(name, tmp_path, monkeypatch, **ONE_MICRO_BATCH)


def test_weights_that_are_others_around_a_backward_are_refused_in_a_tree_of_several_micro_batches(
    tmp_path, monkeypatch
):
    with pytest.raises(RuntimeError, match=r"rows of other micro-batches.*gradient_accumulation_steps=1"):
        run("weight noise", tmp_path, monkeypatch, form="call")


@pytest.mark.few(3)
@pytest.mark.parametrize("accumulation", [2, 1])
@pytest.mark.parametrize("name", CHANGING)
def test_a_call_is_answered_by_the_model_as_it_is_then(name, accumulation, tmp_path, monkeypatch):
    settings = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    compare(name, tmp_path, monkeypatch, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_on_a_tree_is_refused_in_words_that_name_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(ON_RANKS, name, REFUSED[name])
    with pytest.raises(RuntimeError, match="first step") as error:
        run(name, tmp_path, monkeypatch, form="call", steps=1)
    assert "the hook" in str(error.value) and "report" not in str(error.value)


def uses_an_adapter_for_each_micro_batch(*bases):
    class Custom(*bases):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if "other" not in self.model.peft_config:
                torch.manual_seed(1)
                self.model.add_adapter("other", runs.adapter())
            self.model.set_adapter("other" if self.number % 2 else "default")
            return super().training_step(model, inputs, num_items_in_batch)

    return Custom


def test_each_micro_batch_may_have_an_adapter_if_it_is_a_step(tmp_path, monkeypatch):
    monkeypatch.setitem(ON_RANKS, "adapters", uses_an_adapter_for_each_micro_batch)
    compare("adapters", tmp_path, monkeypatch, lora=True, **ONE_MICRO_BATCH)
    with pytest.raises(RuntimeError, match=r"was switched .*rows of other micro-batches.*_steps=1"):
        run("adapters", tmp_path, monkeypatch, form="call", lora=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step: loss.backward"])
def test_the_mixin_does_what_the_call_does(name, tmp_path, monkeypatch):
    compare(name, tmp_path, monkeypatch, form="mixin")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["call", "mixin"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", CUSTOMISATIONS)
def test_every_customised_trainer_learns_the_same(name, accumulation, form, tmp_path, monkeypatch):
    settings = {} if accumulation == 4 else {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    steps = 2 if accumulation == 4 else 5
    compare(name, tmp_path, monkeypatch, form=form, steps=steps, **settings)


def compare_resumed(name: str, folder: Path, patch: Any) -> None:
    """A run that stops after half an epoch and goes on ends like one without shared prefixes that does not stop."""
    saved = {"save_strategy": "steps", "save_steps": 2, "steps": 4}
    plain = run(name, folder / "plain", patch, form="none", steps=4)
    run(name, folder / "shared", patch, form="call", **saved)
    resumed = run(name, folder / "shared", patch, form="call", resume=folder / "shared" / "checkpoint-2", **saved)
    assert json.loads((folder / "shared" / "checkpoint-2" / "trainer_state.json").read_text())["epoch"] == 0.5
    assert getattr(resumed.trainer, "_initial_global_step", 2) == 2  # transformers 5.3 keeps no such number
    assert_same(resumed, plain, resumed=True, bound=bound_of(name))


@pytest.mark.parametrize("name", ["step: zeroes some"])
def test_a_customised_trainer_that_resumes_within_an_epoch_learns_the_same(name, tmp_path, monkeypatch):
    compare_resumed(name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUSTOMISATIONS)
def test_every_customised_trainer_that_resumes_within_an_epoch_learns_the_same(name, tmp_path, monkeypatch):
    compare_resumed(name, tmp_path, monkeypatch)


# ---- outside of training steps


def batches_of(trainer, *numbers):
    """Micro-batches of four rows each."""
    rows = [{k: v for k, v in row.items() if k != "messages"} for row in trainer.train_dataset]
    return [trainer.data_collator([rows[4 * n + k] for k in range(4)]) for n in numbers]


def own_loop(folder: Any, shared: bool, *, steps: int = 3, how: str = "torch") -> tuple[list[float], dict[str, Any]]:
    """A loop of one's own around `compute_loss`; returns losses with gradient norms, and weights."""
    settings = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = BUILDERS["sft"](settings, torch.float32, folder)
    if shared:
        tt.share_prefixes(trainer)
    model, seen = trainer.model.train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        for inputs in batches_of(trainer, 2 * step, 2 * step + 1):
            loss = trainer.compute_loss(model, inputs)
            loss.backward() if how == "torch" else trainer.accelerator.backward(loss)
            seen.append(float(loss.detach()))
        assert all(p.grad is not None for p in model.parameters())
        if step == 1:  # a step that only reads the gradients when the optimizer does
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", [pytest.param("torch", marks=pytest.mark.slow), "accelerate"])
def test_compute_loss_and_backward_outside_of_training_step_give_all_gradients(how, tmp_path):
    (seen, weights), (expected, plain) = (own_loop(tmp_path, shared, how=how) for shared in (True, False))
    assert seen == pytest.approx(expected, rel=1e-5)
    for name, weight in plain.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def test_losses_that_get_no_backward_keep_no_graphs(tmp_path, monkeypatch):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = tt.share_prefixes(BUILDERS["sft"](settings, torch.float32, tmp_path), check=False)
    made, score = [], tt.TreeEngine.score

    def remembered(*args, **kwargs):
        scored = score(*args, **kwargs)
        made.append(weakref.ref(scored))
        return scored

    monkeypatch.setattr(tt.TreeEngine, "score", remembered)
    losses = [trainer.compute_loss(trainer.model, inputs) for inputs in batches_of(trainer, 0, 1, 2)]
    assert all(scored() is not None for scored in made) and len(made) == 3
    del losses[1:]
    assert [scored() is not None for scored in made] == [True, False, False]
    losses[0].backward()
    assert all(p.grad is not None for p in trainer.model.parameters())


@pytest.mark.slow
def test_methods_that_are_set_on_the_object_are_run_too(tmp_path):
    """They go past those that `share_prefixes` puts around the class's."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return 2 * loss.detach()

    found = []
    for share in (tt.share_prefixes, lambda trainer, budget: trainer):

        def build(*args, share=share, **kwargs):
            trainer = share(BUILDERS["sft"](*args, **kwargs), None)
            trainer.training_step = MethodType(training_step, trainer)
            return trainer

        found.append(train(build, tmp_path, shared=False, steps=2, **ACCUMULATED))
    assert_same(*found)


# ---- copies


@pytest.mark.parametrize(
    "kind, settings",
    [
        *(("plain", {}), ("sft", {"lora": True})),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("sft", {}), ("reward", {}), ("plain", {"lora": True}))
        ),
    ],
)
def test_copies_and_pickles_of_the_model_are_whole(kind, settings, tmp_path):
    common = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = BUILDERS[kind](common, torch.float32, tmp_path, **settings)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = trainer.model(input_ids=ids).logits.detach()
    tt.share_prefixes(trainer)
    copied, file = copy.deepcopy(trainer.model), io.BytesIO()
    if kind == "sft" and settings:  # a hook of transformers for adapters, which cannot be pickled with TRL alone either
        with pytest.raises(AttributeError, match="enable_input_require_grads"):
            torch.save(trainer.model, io.BytesIO())
        trainer.model.disable_input_require_grads()
    torch.save(trainer.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(2.0)
    assert not torch.allclose(trainer.model(input_ids=ids).logits, before)
    for whole in (copied, loaded):
        assert torch.equal(whole(input_ids=ids).logits, before)
        with torch.no_grad():
            for p in whole.parameters():
                p.zero_()
        assert not whole(input_ids=ids).logits.any()


# ---- two processes


def only_on(rank: int, customise: Any) -> Any:
    """A customisation that one rank alone has."""
    return lambda *bases: customise(*bases) if dist.get_rank() == rank else type("Custom", bases, {})


def replaces_training_step_on_the_object(*bases):
    class Custom(*bases):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            own = super().training_step
            vars(self)["training_step"] = lambda *args, **kwargs: own(*args, **kwargs)

    return Custom


ON_RANKS = {
    **CUSTOMISATIONS,
    **MOVES,
    "rank 1 skips 3": only_on(1, skips_the_backward(3)),
    "rank 1 skips 0": only_on(1, skips_the_backward(0)),
    "rank 0 reads": only_on(0, after_each(lambda trainer: norm(trainer))),
    "rank 0 fails": only_on(0, catches("loss")),
    "step: on the object": replaces_training_step_on_the_object,
}


def on_ranks(group: Any, name: str, folder: str, form: str, steps: int, kind: str) -> dict[str, Any]:
    """Train on these processes; logs, what was seen, and weights."""
    import datasets
    from accelerate.state import AcceleratorState, GradientState, PartialState

    datasets.disable_progress_bars()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        found = run(name, Path(folder), patch, form=form, kind=kind, steps=steps, ddp_backend="gloo")
    assert found.trainer.accelerator.num_processes == size
    seen = vars(found.trainer).get("seen", [])
    return {"logs": found.logs, "weights": {k: v.tolist() for k, v in found.updates.items()}, "seen": seen}


def of_ranks(two: Any, name: str, folder: Any, form: str, steps: int = 2, kind: str = "sft") -> dict[str, Any]:
    """What the ranks found; they must hold the same weights."""
    ranks = two.run(on_ranks, name, str(folder), form, steps, kind, timeout=400)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    return ranks[0]


def check_ranks(two: Any, name: str, folder: Any, form: str, **options: Any) -> None:
    """Compare two processes with shared prefixes to two without."""
    shared, plain = (of_ranks(two, name, folder, each, **options) for each in (form, "none"))
    runs_ = [
        Run(r["logs"], *2 * [{k: torch.tensor(v) for k, v in r["weights"].items()}], None) for r in (shared, plain)
    ]
    found = difference(*runs_)
    assert max(found.metrics, found.updates) <= BOUND_OF_UPDATES, found
    assert shared["seen"] == pytest.approx(plain["seen"], rel=1e-4, abs=1e-6)


def assert_like_one_process(two: Any, name: str, folder: Any, patch: Any, form: str) -> None:
    """Two processes learn what one learns without shared prefixes, whose micro-batches are twice as large."""
    found = of_ranks(two, name, folder, form)
    plain = run(name, folder, patch, form="none", per_device_train_batch_size=4)
    for key, update in plain.updates.items():
        torch.testing.assert_close(torch.tensor(found["weights"][key]), update, rtol=1e-3, atol=1e-6)
    norms = [[logs["grad_norm"] for logs in logs_ if "grad_norm" in logs] for logs_ in (found["logs"], plain.logs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_two_processes_read_averaged_gradients(two, tmp_path):
    check_ranks(two, "step: clips", tmp_path, "call")


@pytest.mark.slow
def test_two_processes_average_all_gradients_of_a_loss_of_its_own(two, tmp_path):
    check_ranks(two, "loss: logits too", tmp_path, "mixin")


@pytest.mark.slow
def test_two_processes_average_gradients_if_the_last_micro_batch_is_skipped(two, tmp_path, monkeypatch):
    assert_like_one_process(two, "step: skips 3", tmp_path, monkeypatch, "mixin")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank 1 skips 3", "rank 1 skips 0", "rank 0 fails", "step: on the object"])
def test_ranks_whose_steps_differ_stay_together(name, two, tmp_path):
    of_ranks(two, name, tmp_path, "call")


UNLIKE_DDP = ("step: skips a backward", "step: two backwards", "step: steps by hand", "loss: backward within")
"""Customisations under which DistributedDataParallel itself goes wrong, as `skips 3` does."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step: skips 3", *UNLIKE_DDP])
def test_two_processes_learn_what_one_does_where_plain_ones_do_not(name, two, tmp_path, monkeypatch):
    """DistributedDataParallel averages in the last micro-batch's first backward, whatever comes before or after it."""
    assert_like_one_process(two, name, tmp_path, monkeypatch, "call")
    with pytest.raises(AssertionError):
        assert_like_one_process(two, name, tmp_path, monkeypatch, "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in [*CUSTOMISATIONS, "rank 0 reads"] if name not in ("step: skips 3", *UNLIKE_DDP)]
)
def test_every_customised_trainer_learns_the_same_in_two_processes(name, two, tmp_path):
    check_ranks(two, name, tmp_path, "call")
