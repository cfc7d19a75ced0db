"""`TreeTrainer`: a `transformers.Trainer` on trajectories that share prefixes, with streamed losses."""

import contextlib
import copy
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, set_seed
from transformers.trainer_utils import EvalLoopOutput

from treetrain.data.trajectory import Trajectory
from treetrain.engine.distributed import is_sharded
from treetrain.engine.engine import TreeEngine
from treetrain.engine.loss import Facts, Metrics, StepResult, add_metrics, mean_metrics, summed
from treetrain.engine.routing import RouterBalance
from treetrain.engine.runtime import expandable_segments
from treetrain.errors import DataError
from treetrain.losses.losses import PolicyLoss
from treetrain.trainers.arguments import MUON, TreeArguments, muon_and_options
from treetrain.trainers.checkpoints import SafeCheckpointsMixin, save_whole
from treetrain.trainers.groups import Call, StepSampler, step_loader
from treetrain.trainers.rollouts import (
    OLD,
    REFERENCE,
    RunningBatch,
    checked_loss,
    engine_of,
    logprobs,
    missing_facts,
    needed_facts,
    on_policy,
    step_metrics,
    with_advantages,
    with_fact,
)

logger = logging.getLogger(__name__)
EXECUTION = "tree/"
"""Name prefix of numbers about the execution of steps."""
COUNTS = ("flat_tokens", "unique_tokens", "computed_tokens", "recomputed_tokens", "parts")
SUMMED = (*COUNTS, "seconds", "scoring_seconds", "tree_flops", "linear_flops")
"""Numbers that add up over steps."""


class TreeTrainer(SafeCheckpointsMixin, Trainer):
    """Trains a causal LM on trajectories, computing every shared prefix once in forward and backward.

    Loop, schedules, optimisers, callbacks, logging and the hub are those of `transformers.Trainer`. A step has whole
    groups of rows, and its loss is streamed through `TreeEngine.forward_backward`, so that memory stays within the
    budget. Advantages, old and reference log-probabilities are computed if the loss needs them and rows lack them.
    Checkpoints are those of `SafeCheckpointsMixin`.

    Args:
        model: a causal LM or a `PeftModel`. A model that was given to `fully_shard` is trained in its shards.
        args: see `TreeArguments`.
        train_dataset: trajectories.
        eval_dataset: trajectories, or a dictionary of several sets.
        loss: of `treetrain.losses`, or of your own by the same protocol; None: the one that `args.loss` names.
        ref_model: the reference policy of losses that need one; None: the model without its adapter, or a copy of the
            model as it is now.
        peft_config: of an adapter to train in place of the model.
        processing_class, callbacks, optimizers, optimizer_cls_and_kwargs: see `transformers.Trainer`.

    Raises:
        DataError: nothing to train, or a row that lacks a fact that cannot be computed.
        ValueError: unsupported arguments or an unsupported loss.
        UnsupportedModel: the model would not be exact on a tree.
    """

    args: TreeArguments
    model: Any
    model_wrapped: Any
    optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        args: TreeArguments,
        train_dataset: Sequence[Trajectory] | None = None,
        eval_dataset: Sequence[Trajectory] | dict[str, Sequence[Trajectory]] | None = None,
        *,
        loss: Any = None,
        ref_model: nn.Module | None = None,
        peft_config: Any = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
    ) -> None:
        if not isinstance(args, TreeArguments):
            raise ValueError(
                f"args is a {type(args).__name__}; give TreeArguments, which has the same arguments and more"
            )
        expandable_segments()
        self.loss = checked_loss(args, loss)
        self._compute: frozenset[str] = frozenset()
        self._batch, self._log = RunningBatch(), StepLog()
        if train_dataset is not None:
            train_dataset = self._prepare_rows(args, train_dataset)
        if peft_config is not None:
            from peft import get_peft_model

            set_seed(args.seed)  # for the adapter's initial weights: Trainer sets it too late
            model = get_peft_model(model, peft_config)  # type: ignore[arg-type]
        if is_sharded(model):
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # accelerate must not wrap it again
        super().__init__(
            model,  # type: ignore[arg-type]
            args,
            train_dataset=train_dataset,  # type: ignore[arg-type]
            eval_dataset=eval_dataset,  # type: ignore[arg-type]
            processing_class=processing_class,
            callbacks=[*(callbacks or []), self._batch, self._log],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self._engine: TreeEngine | None = None
        self._engine_of(self.model)  # refuses a model before anything is computed
        self._ref_engine = self._reference(ref_model)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="treetrain-next-step")
        self._next: tuple[Any, Future[list[dict[str, Any]]]] | None = None
        self._balance: RouterBalance | None = None
        self._calls: list[StepResult] = []
        self._numbers: dict[str, float] = {}
        self._left_out = 0

    # ---- Rows and losses ----

    def _prepare_rows(self, args: TreeArguments, rows: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The rows with advantages; also decides which other facts the run must compute."""
        rows = with_advantages(rows, self.loss, args.advantage_kwargs)  # type: ignore[arg-type]
        self._compute = missing_facts(rows, self.loss)
        if OLD in self._compute and not args.several_updates and (policy := on_policy(self.loss)) is not None:
            self.loss, self._compute = policy, self._compute - {OLD}
        return rows

    def _reference(self, model: Any) -> TreeEngine | None:
        """The engine of the reference policy; None where there is none, or it is the model without its adapter."""
        if model is None:
            if REFERENCE not in self._compute or hasattr(self.model, "disable_adapter"):
                return None
            if is_sharded(self.model):
                raise ValueError("the model is in shards, of which no copy is made as reference policy: give ref_model")
            model = copy.deepcopy(self.model)
        elif REFERENCE not in needed_facts(self.loss):
            raise ValueError("ref_model is given, but the loss, as it is set, has no reference policy")
        model = model.requires_grad_(False).eval()
        return engine_of(model if is_sharded(model) else model.to(self.args.device), self.args)

    # ---- Data ----

    def get_train_dataloader(self) -> Any:
        """The steps of a pass over the data, call by call."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        self._next = None
        names = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        return step_loader(self.train_dataset, self._sampler, self.model, self.args, **options)  # type: ignore[arg-type]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The held-out rows in calls of whole groups."""
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows  # type: ignore[index]
        if rows is None:
            raise ValueError("evaluation needs an eval_dataset")
        sampler = StepSampler(rows, tokens_per_step=self.args.tokens_per_step)
        return step_loader(rows, sampler, self.model, self.args)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """See `get_eval_dataloader`."""
        return self.get_eval_dataloader(test_dataset)

    @cached_property
    def _sampler(self) -> StepSampler:
        args = self.args
        return StepSampler(
            self.train_dataset,  # type: ignore[arg-type]
            tokens_per_step=args.tokens_per_step,
            updates_per_batch=args.updates_per_batch,
            minibatches=args.minibatches,
            calls=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a step, on average."""
        return max(round(len(self.train_dataset) * self.args.updates_per_batch / self._sampler.steps), 1)  # type: ignore[arg-type]

    def step_size(self) -> str:
        """See `SafeCheckpointsMixin`; the number of processes does not enter."""
        args, rows = self.args, len(self.train_dataset)  # type: ignore[arg-type]
        return (
            f"{self.get_total_train_batch_size(args)} of {rows} rows (tokens_per_step={args.tokens_per_step}, "
            f"updates_per_batch={args.updates_per_batch}, minibatches={args.minibatches})"
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The calls of a step with all facts that its loss needs, and the normaliser of the loss.

        The trees of the next step are built in the background.
        """
        if self._next is not None and self._next[0] is epoch_iterator:
            calls = self._next[1].result()
        else:
            calls = list(islice(epoch_iterator, num_batches))
        self._next = epoch_iterator, self._worker.submit(lambda: list(islice(epoch_iterator, num_batches)))
        if not calls:
            return [], None
        first: Call = calls[0]["call"]
        self._batch.start_step(first.batch)
        if self._batch.stopped:
            return [inputs | {"left_out": True} for inputs in calls], None
        started = time.perf_counter()
        self._compute_facts(first)
        self._numbers = {"scoring_seconds": time.perf_counter() - started} if self._compute else {}
        calls = [self._batch.with_facts(inputs) for inputs in calls]
        rows = [row for inputs in calls for row in inputs["rows"]]
        self._balance = self._routing(calls)
        self._numbers |= step_metrics(rows) if isinstance(self.loss, PolicyLoss) else {}
        return calls, self.loss.normaliser(rows)

    def _compute_facts(self, call: Call) -> None:
        """Old and reference log-probabilities of a batch, before its first update."""
        numbers = call.batch_rows.tolist()
        for fact in self._compute - self._batch.scores.keys():
            rows = [self.train_dataset[number] for number in numbers]  # type: ignore[index]
            with self._scoring(fact) as engine:
                self._batch.add(fact, numbers, logprobs(engine, rows))

    @contextlib.contextmanager
    def _scoring(self, fact: str) -> Iterator[TreeEngine]:
        """The engine of the old or the reference policy, depending on the fact."""
        engine = self._engine_of(self.model_wrapped)
        adapter = contextlib.nullcontext()
        if fact == REFERENCE and self._ref_engine is None:
            adapter = self.accelerator.unwrap_model(self.model).disable_adapter()
        elif fact == REFERENCE:
            engine = self._ref_engine
        with adapter, self._precision(engine):  # type: ignore[arg-type]
            yield engine  # type: ignore[misc]

    # ---- Steps ----

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Accumulate the gradients of a call.

        Args:
            model: as accelerate has prepared it.
            inputs: of `get_batch_samples`.
            num_items_in_batch: the normaliser of the loss of the whole step.

        Returns:
            the call's part of the loss.

        Raises:
            FloatingPointError: the loss is no finite number; the weights are not updated.
        """
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if not inputs["rows"] or inputs.get("left_out"):
            self._left_out += inputs.get("left_out", False) and self.accelerator.sync_gradients
            return torch.zeros((), device=self.args.device)
        engine, started = self._engine_of(model), time.perf_counter()
        last = self.accelerator.sync_gradients
        with self._precision(engine):
            result = engine.forward_backward(inputs["tree"], self.loss, num_items_in_batch, self._balance, sync=last)
        loss = result.loss  # waits for the device
        self._calls.append(result)
        for name, value in {**inputs, "seconds": time.perf_counter() - started}.items():
            if name in ("unique_tokens", "tree_flops", "linear_flops", "seconds"):
                self._numbers[name] = self._numbers.get(name, 0.0) + value
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"step {self.state.global_step + 1}: the loss is {loss}; the weights were not updated. A lower "
                f"learning_rate than {self.args.learning_rate:g}, more warm-up or float32 may help"
            )
        if last:
            self._step_done()
        return torch.tensor(loss, device=self.args.device)

    def _step_done(self) -> None:
        """End a step: keep its numbers for the next log, and stop the batch if its KL is above `target_kl`."""
        result = self._calls[0] if len(self._calls) == 1 else summed(self._calls)
        self._calls = []
        self._log.add(result, self._numbers)
        self._numbers = {}
        limit = self.args.target_kl
        self._batch.stopped = limit is not None and result.metrics.get("approx_kl", 0.0) > limit

    def _routing(self, calls: list[dict[str, Any]]) -> RouterBalance | None:
        """Router choices over all tokens of a step of several calls; None for one call or no auxiliary loss."""
        engine = self._engine_of(self.model_wrapped)
        if not engine.capabilities.auxiliary or len(calls) == 1:
            return None
        with self._precision(engine):
            return reduce(add, [engine.router_balance(inputs["tree"]) for inputs in calls if inputs["rows"]])

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """FLOPs of a call on this process: an equal share of those of the tree of all rows."""
        return int(inputs.get("tree_flops", 0) / self.args.world_size)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the numbers of the steps since the last log; their loss is in full precision."""
        if "loss" in logs:
            found, ranks = self._log.read(), self._engine_of(self.model_wrapped).ranks
            if self.args.target_kl is not None:
                found["steps_left_out"], self._left_out = self._left_out, 0
            if "loss" not in found:  # every step was left out
                logs = {name: value for name, value in logs.items() if name not in ("loss", "grad_norm")}
            logs |= found
            logs[EXECUTION + "peak_memory_bytes"] = max(ranks.gather(peak_memory_bytes(self.args.device)))
        super().log(logs, start_time)

    # ---- Evaluation ----

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate held-out rows, call by call, so that memory does not grow with their number.

        Returns:
            metrics: `nll`, the mean negative log-likelihood of the weighted tokens in nats; `trained_tokens`; and where
            the rows have, or can be given, the facts that the loss needs, `loss` and its metrics.
        """
        model = self.model_wrapped.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        engine = self._engine_of(model)
        rows, loss, reference = self._held_out(dataloader.dataset.rows)
        entropies, every = loss is not None and "entropies" in loss.needs, loss is not None and loss.reads_untrained
        nll = weight = tokens = total = 0.0
        sums: Metrics = {}
        self.callback_handler.eval_dataloader = dataloader
        for inputs in dataloader:
            members = [rows[number] for number in inputs["call"].rows.tolist()]
            if reference:
                with self._scoring(REFERENCE) as scorer:
                    scores = logprobs(scorer, members)
                members = [with_fact(row, REFERENCE, x.cpu().numpy()) for row, x in zip(members, scores)]
            with self._precision(engine), torch.no_grad():
                scores = logprobs(engine, members, entropies=entropies, every=every)
                scored, entropy_rows = scores if entropies else (scores, None)
                flat, weights = torch.cat(scored), np.concatenate([row.weights[1:] for row in members])
                used = weights != 0
                # An untrained token may be impossible, and 0 times infinity is not a number.
                nll -= float(weights[used] @ flat.double().cpu().numpy()[used])
                weight, tokens = weight + float(weights.sum()), tokens + int(used.sum())
                if loss is not None and (every or used.any()):
                    facts = Facts(members, device=flat.device, dtype=flat.dtype, used=None if every else used)
                    read = torch.from_numpy(np.flatnonzero(used | every)).to(flat.device)
                    entropy = None if entropy_rows is None else torch.cat(entropy_rows)[read]
                    part, metrics = loss.packed(flat[read], entropy, facts)
                    total, sums = total + float(part), add_metrics(sums, metrics)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        found = mean_metrics(sums) | {"nll": nll / weight, "trained_tokens": tokens}
        found |= {} if loss is None else {"loss": total / loss.normaliser(rows)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in engine.ranks.gather(found)[0].items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(rows))  # type: ignore[arg-type]

    def _held_out(self, rows: Sequence[Trajectory]) -> tuple[Sequence[Trajectory], Any, bool]:
        """Held-out rows with advantages, and the loss to evaluate them by: on-policy if they lack old_logprobs.

        Returns:
            the rows; the loss, None if they lack a fact that it needs; whether the reference must still score them
            (their ref_logprobs are zeros until then).
        """
        loss = self.loss
        try:
            rows = with_advantages(rows, loss, None)
            missing = missing_facts(rows, loss)
        except DataError as error:
            logger.warning("held-out rows are evaluated by their log-likelihood alone: %s", error)
            return rows, None, False
        loss = on_policy(loss) if OLD in missing else loss
        if REFERENCE not in missing:
            return rows, loss, False
        if self._ref_engine is None and not hasattr(self.model, "disable_adapter"):
            return rows, None, False
        return [row.replace(**{REFERENCE: np.zeros(len(row))}) for row in rows], loss, True

    # ---- Models, engines, optimisers ----

    def _engine_of(self, model: nn.Module) -> TreeEngine:
        """The engine on the model, as it is wrapped now."""
        # FSDP2 shards a model in place: it stays the same object and gets another class.
        if self._engine is None or self._engine_model != (model, type(model)):
            self._engine, self._engine_model = engine_of(model, self.args), (model, type(model))
        return self._engine

    def _precision(self, engine: TreeEngine) -> contextlib.AbstractContextManager[Any]:
        # FSDP2 casts by itself.
        return contextlib.nullcontext() if engine.collective else self.accelerator.autocast()

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """See `transformers.Trainer`; knows `optim="muon"` too."""
        return muon_and_options(args) if args.optim == MUON else Trainer.get_optimizer_cls_and_kwargs(args, model)


# ---- Callbacks with state in checkpoints


class StepLog(TrainerCallback):
    """Collects the numbers of steps; each log gives their sums, means and extremes since the last one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def add(self, result: StepResult, numbers: dict[str, float]) -> None:
        """Add a step.

        Args:
            result: of all its calls.
            numbers: further numbers of the step. Those in `SUMMED` add up; names ending in `_max` and `_min` are
                extremes; the others are averaged, as the loss and its metrics are.
        """
        counts = {name: getattr(result, name) for name in COUNTS}
        self.steps.append({"loss": result.loss} | result.metrics | counts | numbers)

    def read(self) -> dict[str, float]:
        """Return the numbers of these steps and clear them; empty if there was no step."""
        logs: dict[str, float] = {}
        for name in dict.fromkeys(name for step in self.steps for name in step):
            values = [step[name] for step in self.steps if name in step]
            if name in SUMMED:
                logs[EXECUTION + name] = sum(values)
            elif name.endswith(("_max", "_min")):
                logs[name] = (max if name.endswith("_max") else min)(values)
            else:
                logs[name] = sum(values) / len(values)
        if self.steps:
            logs[EXECUTION + "overlap"] = 1 - logs[EXECUTION + "unique_tokens"] / logs[EXECUTION + "flat_tokens"]
        if work := logs.get(EXECUTION + "tree_flops"):
            logs[EXECUTION + "ideal_speedup"] = logs[EXECUTION + "linear_flops"] / work
        self.steps = []
        return logs

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the steps of an earlier training."""
        self.steps = []

    def state_dict(self) -> dict[str, str]:
        """The numbers, as text."""
        return {"json": json.dumps(self.steps)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Restore the numbers."""
        self.steps = json.loads(state["json"])


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that the process has held so far: resident on a CPU, allocated by torch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class WeightAverage(TrainerCallback):
    """Keeps an exponential moving average of the trained weights in float32, and saves it at the end as a model.

    After every step: average <- decay * average + (1 - decay) * weights. It starts as the weights at the start of
    training. `SafeCheckpointsMixin` saves it in checkpoints.

    Args:
        decay: 0 to below 1; 0.999 looks back about 1000 steps.
        folder: within the output folder, for the averaged model.

    Raises:
        ValueError: a decay out of this range.
    """

    def __init__(self, decay: float, folder: str = "ema") -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; give a number from 0 to below 1")
        self.decay, self.folder = decay, folder
        self.values: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Start from the current weights."""
        self.values = {name: p.detach().to(torch.float32, copy=True) for name, p in _trained(model).items()}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Add the weights of this step to the average."""
        for name, parameter in _trained(model).items():
            self.values[name].lerp_(parameter.float(), 1 - self.decay)

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **given: Any) -> None:
        """Save the averaged model; the average replaces the model's weights meanwhile."""
        trained = _trained(model)
        before = {name: parameter.clone() for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.copy_(self.values[name])
            save_whole(model, Path(args.output_dir, self.folder), given.get("processing_class"), write=args.should_save)
        finally:
            for name, parameter in trained.items():
                parameter.copy_(before[name])

    def state_dict(self) -> dict[str, Any]:
        """The average by parameter name."""
        return {"values": self.values}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore an average."""
        for name, value in self.values.items():
            value.copy_(state["values"][name])


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
