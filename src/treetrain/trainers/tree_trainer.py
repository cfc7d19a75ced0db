"""`TreeTrainer`: a `transformers.Trainer` on trajectories that share prefixes, with streamed losses."""

import contextlib
import copy
import dataclasses
import json
import logging
import math
import resource
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import EvalLoopOutput

from treetrain import adapters, losses
from treetrain.check.linear_engine import LinearEngine
from treetrain.core.engine.memory import expandable_segments
from treetrain.core.errors import DataError, UnsupportedModel, expect, nearest, shortened
from treetrain.core.hf.capability import model_device
from treetrain.core.hf.tree_mode import replaced
from treetrain.core.losses.facts import REMEDIES, Facts, Metrics, add_metrics, describe, mean_metrics
from treetrain.core.losses.protocol import Loss, LossProtocol, StepResult, as_loss, summed
from treetrain.core.planning.make import PART_TOKENS
from treetrain.core.tree import trajectory as core
from treetrain.core.tree.token_tree import as_tree
from treetrain.core.tree.trajectory import PER_TOKEN_FACTS
from treetrain.engine import TreeEngine, loaded
from treetrain.layers.experts.experts import RouterBalance
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.advantages import advantages_of_groups
from treetrain.logs.columns import Json, RowColumns
from treetrain.logs.once import count_once
from treetrain.losses import PolicyLoss
from treetrain.models.costs import cost_if_countable
from treetrain.parallel.balance import dispatch
from treetrain.parallel.process_group import is_sharded
from treetrain.trainers.arguments import TreeArguments
from treetrain.trainers.checkpoints import SafeCheckpointsMixin
from treetrain.trainers.gains import STEPS, line_of_steps
from treetrain.trainers.groups import Call, CallInputs, StepDataset, StepSampler, make_groups, step_loader
from treetrain.trainers.model_card import CARD, write_card
from treetrain.trainers.relied_on import is_tested
from treetrain.trainers.run_facts import facts_of_loss
from treetrain.trainers.run_folder import check_links

if TYPE_CHECKING:
    from peft import PeftConfig

OLD, REFERENCE = "old_logprobs", "ref_logprobs"
logger = logging.getLogger(__name__)
EXECUTION = "tree/"
"""Name prefix of numbers about the execution of steps."""
COUNTS = ("flat_tokens", "unique_tokens", "computed_tokens", "recomputed_tokens", "parts")
SUMMED = (*COUNTS, "seconds", "scoring_seconds", "tree_flops", "linear_flops")
"""Numbers that add up over steps."""


class TreeTrainer(SafeCheckpointsMixin, Trainer):
    """Trains a causal LM on trajectories, computing every shared prefix once in forward and backward.

    `transformers.Trainer` provides loop, schedules, optimisers, callbacks, logging and the hub. A step has whole
    groups of rows, and its loss is streamed through `TreeEngine.forward_backward`, so that memory stays within the
    budget. Advantages, old and reference log-probabilities are computed if the loss needs them and rows lack them.
    `SafeCheckpointsMixin` writes the checkpoints.

    Args:
        model: a causal LM or a `PeftModel`. A model that was given to `fully_shard` is trained in its shards.
        args: see `TreeArguments`.
        train_dataset: trajectories. If the model has several adapters, a row's `key` names the one that it trains, and
            rows without a key train the active one. All that are named are trained, by one optimizer.
        eval_dataset: trajectories, or a dictionary of several sets.
        loss: one of `treetrain.losses`, or your own with the same protocol; None takes the one that `args.loss` names.
        ref_model: the reference policy of losses that need one; None takes the model without its adapter, or a copy
            of the model as it is now.
        peft_config: configures an adapter to train in place of the model.
        processing_class, callbacks, optimizers, optimizer_cls_and_kwargs: see `transformers.Trainer`.

    Raises:
        DataError: nothing to train, or a row that lacks a fact that cannot be computed.
        ValueError: unsupported arguments or an unsupported loss.
        UnsupportedModel: the model would not be exact on a tree.
    """

    also_saved = (*SafeCheckpointsMixin.also_saved, "_steps")
    trained_on: Sequence[str] = ()
    """Names of the data's files, for the model card."""
    args: TreeArguments
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        args: TreeArguments,
        train_dataset: Sequence[Trajectory] | None = None,
        eval_dataset: Sequence[Trajectory] | dict[str, Sequence[Trajectory]] | None = None,
        *,
        loss: Loss | LossProtocol | None = None,
        ref_model: nn.Module | None = None,
        peft_config: "PeftConfig | None" = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, object]] | None = None,
    ) -> None:
        if not isinstance(args, TreeArguments):
            raise ValueError(
                f"args is a {type(args).__name__}; give TreeArguments, which has the same arguments and more"
            )
        loaded(model)
        if optimizers[0] is not None:
            own = set(model.parameters())
            if not all(p in own for group in optimizers[0].param_groups for p in group["params"]):
                raise ValueError(
                    "optimizers: the optimizer has parameters that are not the model's; make it of this model"
                )
        expandable_segments()
        self.loss = checked_loss(args, loss)
        self._compute: frozenset[str] = frozenset()
        self._batch = RunningBatch()
        self._steps: list[dict[str, float]] = []
        """Numbers of the steps since the last log."""
        sets = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
        _check_rows("train_dataset", train_dataset, self.loss)
        for name, rows in sets.items():
            _check_rows(f"eval_dataset[{name!r}]" if name else "eval_dataset", rows, self.loss)
        if train_dataset is not None:
            train_dataset = self._counted(args.count, train_dataset, model, args.advantage_kwargs)
            self._find_facts(args, train_dataset)
        if peft_config is not None:
            from peft import PeftConfig, get_peft_model

            expect("peft_config", peft_config, PeftConfig, "a configuration of peft, such as peft.LoraConfig(r=16)")
            set_seed(args.seed)  # the adapter's initial weights need it; Trainer sets it too late
            _check_saved(peft_config, model)
            try:
                model = get_peft_model(model, peft_config)  # type: ignore[arg-type]
            except Exception as error:
                said = shortened(" ".join(str(error).split()), 240)
                raise ValueError(f"peft_config does not fit {type(model).__name__}: {said}") from error
        if is_sharded(model):
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # accelerate must not wrap it again
        super().__init__(
            model,  # type: ignore[arg-type]
            args,
            train_dataset=train_dataset,  # type: ignore[arg-type]
            eval_dataset=eval_dataset,  # type: ignore[arg-type]
            processing_class=processing_class,
            callbacks=[*(callbacks or []), self._batch],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        _check_optimizer_options(self)
        self.max_skipped_steps, self.accept_changes = args.max_skipped_steps, args.accept_changes
        self.async_save = args.async_save
        self.overwrite_output_dir, self.how_to_set = args.overwrite_output_dir, "{}=True in TreeArguments"
        self._engine: TreeEngine | None = None
        self._compared = args.execution != "tree" or is_tested("transformers")
        self._engine_of(self.model)  # refuses a model before anything is computed
        self._by_adapter = self._train_adapters(sets)
        self._ref_engine = self._reference(ref_model)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="treetrain-next-step")
        self._next: tuple[Iterator[CallInputs], Future[list[CallInputs]]] | None = None
        self._balance: RouterBalance | None = None
        self._calls: list[StepResult] = []
        self._numbers: dict[str, float] = {}
        self._left_out = 0
        self._first: list[dict[str, float]] | None = []
        """Numbers of the first steps, until a line is printed about them."""
        self._cards: set[str] = set()
        """Folders in which this trainer has written a model card."""

    # ---- Rows and losses ----

    def _counted(self, count: str, rows: Sequence[Trajectory], model: Any, options: Any = None) -> Sequence[Trajectory]:
        """Give the rows the weights of `TreeArguments.count`; with "once" the result is a list in memory."""
        if count != "once":
            return rows
        rows = list(rows)
        if (names := _named(model, rows)) is not None:  # a row without a key is one of the active adapter
            rows = [row if row.key is not None else row.replace(key=name) for row, name in zip(rows, names)]
        return count_once(rows, computed_advantages(rows, self.loss, options))

    def _find_facts(self, args: TreeArguments, rows: Sequence[Trajectory]) -> None:
        """Compute advantages from rewards, and decide which other facts the run must compute."""
        advantages = computed_advantages(rows, self.loss, args.advantage_kwargs)  # type: ignore[arg-type]
        self._batch.advantages = advantages
        self._compute = missing_facts(rows, self.loss, () if advantages is None else ("advantages",))
        if (
            OLD in self._compute
            and args.updates_per_batch * args.minibatches == 1
            and (policy := on_policy(self.loss)) is not None
        ):
            self.loss, self._compute = policy, self._compute - {OLD}

    def _reference(self, given: nn.Module | None) -> TreeEngine | None:
        """Make the engine of the reference policy; None without one, or if it is the model without its adapter."""
        if given is None:
            if REFERENCE not in self._compute or hasattr(self.model, "disable_adapter"):
                return None
            if is_sharded(self.model):
                raise ValueError("the model is in shards, of which no copy is made as reference policy: give ref_model")
        elif REFERENCE not in needed_facts(self.loss):
            raise ValueError("ref_model is given, but the loss, as it is set, has no reference policy")
        model: nn.Module = copy.deepcopy(self.model) if given is None else given
        model.requires_grad_(False).eval()
        return engine_of(model if is_sharded(model) else model.to(self.args.device), self.args)

    # ---- Adapters ----

    def _train_adapters(self, held_out: Mapping[str, Sequence[Trajectory] | None]) -> bool:
        """Unfreeze the adapters that rows name, since peft freezes all but the active one; False if none is named.

        Raises:
            DataError: a key that names no adapter.
            ValueError: a given optimizer that lacks weights of a named adapter, or one without weights to train.
            UnsupportedModel: a model on which several adapters have not been verified.
        """
        rows: Any = () if self.train_dataset is None else self.train_dataset
        if not [names for given in (rows, *held_out.values()) if (names := _named(self.model, given or ()))]:
            return False
        model: Any = self.model
        if self.is_fsdp_enabled:
            raise UnsupportedModel("rows name adapters, which has not been verified under FSDP: take one, or use DDP")
        names = adapters.named_by_keys(model, rows)
        model.set_requires_grad([name for name in dict.fromkeys(names) if name != adapters.BASE], True)
        engine = self._engine_of(model)
        with engine.ranks.together("the adapters of the rows"):
            adapters.Groups(engine, len(names), names, trains=True)
        if self.optimizer is not None:
            held = {p for group in self.optimizer.param_groups for p in group["params"]}
            for name in dict.fromkeys(names):
                if not adapters.parameters_of(model, name) <= held:
                    raise ValueError(
                        f"optimizers: rows train the adapter {name!r}, of which the optimizer lacks weights; make it "
                        "of the parameters of all adapters that rows name"
                    )
        return True

    def _adapters_of(self, rows: Sequence[core.Trajectory]) -> list[str] | None:
        """The adapter of each row; None if all go through the active one."""
        return adapters.named_by_keys(self.accelerator.unwrap_model(self.model), rows) if self._by_adapter else None

    # ---- Data ----

    def run_facts(self) -> dict[str, Json]:
        """See `SafeCheckpointsMixin`."""
        return super().run_facts() | {"loss": facts_of_loss(self.loss)}

    def get_train_dataloader(self) -> DataLoader:
        """The steps of a pass over the data; an item is one call."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        self._next, self._steps = None, []
        names = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")
        options = {name: getattr(self.args, f"dataloader_{name}", None) for name in names}  # the last came after 5.3
        return step_loader(self.train_dataset, self._sampler, self.model, self.args, **options)  # type: ignore[arg-type]

    def get_eval_dataloader(self, eval_dataset: str | Sequence[Trajectory] | None = None) -> DataLoader:
        """The held-out rows in calls of whole groups."""
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows  # type: ignore[index]
        if rows is None:
            raise ValueError("evaluation needs an eval_dataset")
        sampler = StepSampler(rows, tokens_per_step=self.args.tokens_per_step)
        return step_loader(rows, sampler, self.model, self.args)

    @cached_property
    def _sampler(self) -> StepSampler:
        args = self.args
        sampler = StepSampler(
            self.train_dataset,  # type: ignore[arg-type]
            tokens_per_step=args.tokens_per_step,
            updates_per_batch=args.updates_per_batch,
            minibatches=args.minibatches,
            calls=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
        if len(larger := np.flatnonzero(sampler.tokens > args.tokens_per_step)) and self.is_world_process_zero():
            largest = int(sampler.tokens.argmax())
            row = int(sampler.groups[largest][0])
            logger.warning(
                "%d of %d groups have more tokens than tokens_per_step=%d; groups are never torn apart, so that their "
                "steps are larger, up to %d tokens (the group of %s). A budget bounds their memory all the same",
                *(len(larger), len(sampler.groups), args.tokens_per_step, sampler.tokens[largest]),
                describe(self.train_dataset[row], row),  # type: ignore[index]
            )
        return sampler

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of a step, on average."""
        return max(round(len(self.train_dataset) * self.args.updates_per_batch / self._sampler.steps), 1)  # type: ignore[arg-type]

    def step_size(self) -> str:
        """See `SafeCheckpointsMixin`; it does not depend on the number of processes."""
        args, rows = self.args, len(self.train_dataset)  # type: ignore[arg-type]
        return (
            f"{self.get_total_train_batch_size(args)} of {rows} rows (tokens_per_step={args.tokens_per_step}, "
            f"updates_per_batch={args.updates_per_batch}, minibatches={args.minibatches})"
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[CallInputs], num_batches: int, device: torch.device
    ) -> tuple[list[CallInputs], float | None]:
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
            return [{**inputs, "left_out": True} for inputs in calls], None
        started = time.perf_counter()
        for fact in sorted(self._compute - self._batch.scores.keys()):  # in the same order on every rank
            members = [self.train_dataset[number] for number in first.batch_rows.tolist()]  # type: ignore[index]
            with self._scoring(fact) as engine:
                names = None if fact == REFERENCE else self._adapters_of(members)
                scores = (one.numpy() for one in logprobs(engine, members, names)[0])
                self._batch.scores[fact] = dict(zip(first.batch_rows.tolist(), scores, strict=True))
        self._numbers = {"scoring_seconds": time.perf_counter() - started} if self._compute else {}
        calls = [self._batch.with_facts(inputs) for inputs in calls]
        rows = [row for inputs in calls for row in inputs["rows"]]
        self._balance = self._routing(calls)
        return calls, self.loss.normaliser(rows)

    @contextlib.contextmanager
    def _scoring(self, fact: str) -> Iterator[TreeEngine]:
        """Give the engine of the old or the reference policy, depending on the fact."""
        engine = self._engine_of(self.model_wrapped)
        with contextlib.ExitStack() as stack:
            if fact == REFERENCE and self._ref_engine is None:
                model = self.accelerator.unwrap_model(self.model)
                stack.enter_context(adapters.trained_kept(model))
                stack.enter_context(model.disable_adapter())
            elif fact == REFERENCE:
                engine = self._ref_engine
            stack.enter_context(self._precision(engine))  # type: ignore[arg-type]
            yield engine  # type: ignore[misc]

    # ---- Steps ----

    def training_step(
        self, model: nn.Module, inputs: CallInputs, num_items_in_batch: float | None = None
    ) -> torch.Tensor:
        """Accumulate the gradients of a call.

        Args:
            model: as prepared by accelerate.
            inputs: from `get_batch_samples`.
            num_items_in_batch: the normaliser of the loss of the whole step.

        Returns:
            the call's part of the loss.
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
            self._compare_first_step(engine, inputs["rows"])
            names = self._adapters_of(inputs["tree"].trajectories)
            result = engine.forward_backward(
                inputs["tree"], self.loss, num_items_in_batch, self._balance, sync=last, adapter_names=names
            )
        loss = result.loss  # waits for the device
        self._calls.append(result)
        for name, value in {**inputs, "seconds": time.perf_counter() - started}.items():
            if name in ("unique_tokens", "tree_flops", "linear_flops", "seconds"):
                self._numbers[name] = self._numbers.get(name, 0.0) + float(value)
        if last:
            self._step_done()
        return torch.tensor(loss, device=self.args.device)

    def _compare_first_step(self, engine: TreeEngine, rows: Sequence[Trajectory]) -> None:
        """Compare a few rows with the plain model, once, in a version of transformers that is not tested."""
        if self._compared:
            return
        self._compared = True
        if engine.sharing.collective or any(row.experts is not None for row in rows):
            warnings.warn(
                "rows are not compared with the plain model in the first step, since it is sharded or the rows have "
                "recorded experts; run tt.verify on one process",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        from treetrain.trainers.first_step import compare_rows

        with engine.ranks.together("the comparison in the first step"):
            compare_rows(TreeEngine(self.accelerator.unwrap_model(self.model), budget=self.args.budget), rows)

    def _step_done(self) -> None:
        """End a step: keep its numbers for the next log, and stop the batch if its KL is above `target_kl`."""
        result = summed(self._calls)
        counts = {name: getattr(result, name) for name in COUNTS}
        self._steps.append({"loss": result.loss} | result.metrics | counts | self._numbers)
        self._calls, self._numbers = [], {}
        if self._first is not None:
            self._first.append(self._steps[-1])
            if len(self._first) == STEPS:
                if self.args.execution == "tree" and self.is_world_process_zero():
                    print(line_of_steps(self._first))
                self._first = None
        limit = self.args.target_kl
        self._batch.stopped = limit is not None and result.metrics.get("approx_kl", 0.0) > limit

    def _routing(self, calls: list[CallInputs]) -> RouterBalance | None:
        """Count the routers' choices over a step of several calls; None for one call or without an auxiliary loss."""
        engine = self._engine_of(self.model_wrapped)
        if not engine.capabilities.auxiliary or len(calls) == 1:
            return None
        with self._precision(engine):
            return reduce(add, [engine.router_balance(inputs["tree"]) for inputs in calls if inputs["rows"]])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and add the numbers of the steps since the last log, with their loss in full precision."""
        if "loss" in logs:
            numbers, ranks = self._numbers_since_log(), self._engine_of(self.model_wrapped).ranks
            if self.args.target_kl is not None:
                numbers["steps_left_out"], self._left_out = self._left_out, 0
            if "loss" not in numbers:  # every step was left out
                logs = {name: value for name, value in logs.items() if name not in ("loss", "grad_norm")}
            logs |= numbers
            logs[EXECUTION + "peak_memory_bytes"] = max(ranks.gather(peak_memory_bytes(self.args.device)))
        super().log(logs, start_time)

    def _numbers_since_log(self) -> dict[str, float]:
        """Summarise the steps since the last log: sums, extremes (names ending in `_max` and `_min`) and means."""
        steps, self._steps = self._steps, []
        logs: dict[str, float] = {}
        for name in dict.fromkeys(name for step in steps for name in step):
            values = [step[name] for step in steps if name in step]
            if self.args.logging_nan_inf_filter:  # as transformers does: a skipped step leaves a mean as it is
                values = [value for value in values if math.isfinite(value)] or values
            if name in SUMMED:
                logs[EXECUTION + name] = sum(values)
            elif name.endswith(("_max", "_min")):
                logs[name] = (max if name.endswith("_max") else min)(values)
            else:
                logs[name] = sum(values) / len(values)
        if steps:
            logs[EXECUTION + "overlap"] = 1 - logs[EXECUTION + "unique_tokens"] / logs[EXECUTION + "flat_tokens"]
            spent = logs[EXECUTION + "seconds"] + logs.get(EXECUTION + "scoring_seconds", 0.0)
            logs[EXECUTION + "tokens_per_second"] = logs[EXECUTION + "flat_tokens"] / spent
        if work := logs.get(EXECUTION + "tree_flops"):
            logs[EXECUTION + "ideal_speedup"] = logs[EXECUTION + "linear_flops"] / work
        return logs

    # ---- Evaluation ----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.Trainer.train`; refuses an unknown `metric_for_best_model` before the first step."""
        self._check_best_metric()
        return super().train(*args, **kwargs)

    def _check_best_metric(self) -> None:
        """Compare `metric_for_best_model` with the names that an evaluation of some rows would give.

        Raises:
            ValueError: it is none of them. transformers would say so after the first evaluation.
        """
        wanted, sets = self.args.metric_for_best_model, cast(Any, self.eval_dataset)
        ours = type(self).evaluate is Trainer.evaluate and type(self).evaluation_loop is TreeTrainer.evaluation_loop
        if wanted is None or not sets or not ours:
            return
        known: list[str] = []
        for name, rows in sets.items() if isinstance(sets, dict) else [("", sets)]:
            groups = ([rows[number] for number in group] for group in make_groups(rows))
            group = next((group for group in groups if any(row.weights.any() for row in group)), [])
            members, loss, _ = self._held_out(group)
            metrics = {"nll": 0.0, "trained_tokens": 0.0}
            if loss is not None and group:
                scores = torch.full((sum(max(len(row) - 1, 0) for row in members),), -1.0)
                facts = Facts(members, dtype=scores.dtype)
                if "id_logprobs" in loss.needs:
                    given = [row.teacher_topk for row in members if row.teacher_topk is not None]
                    facts.id_logprobs = scores.new_full((sum(int(sets.counts[1:].sum()) for sets in given),), -9.0)
                metrics |= {"loss": 0.0} | loss.packed(scores, -scores, facts)[1]
            known += [f"{name}_{metric}" if name else metric for metric in metrics]
        if wanted.removeprefix("eval_") not in (*known, "runtime", "samples_per_second", "steps_per_second"):
            raise ValueError(f"no evaluation gives metric_for_best_model={wanted!r}; {nearest(wanted, known)}")

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate held-out rows, call by call, so that memory does not grow with their number.

        Returns:
            metrics: `nll`, the mean negative log-likelihood of the weighted tokens in nats; `trained_tokens`; `loss`
            and its metrics, if the rows have the facts that the loss needs or these can be computed.
        """
        model = self.model_wrapped.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        engine = self._engine_of(model)
        rows, loss, reference = self._held_out(cast(StepDataset, dataloader.dataset).rows)
        by_adapter = self._by_adapter or _named(self.model, rows) is not None
        needs, every = () if loss is None else loss.needs, loss is not None and loss.reads_untrained
        entropies, ids = "entropies" in needs, "id_logprobs" in needs
        nll = weight = tokens = total = 0.0
        sums: Metrics = {}
        self.callback_handler.eval_dataloader = dataloader  # type: ignore[assignment]
        for inputs in dataloader:
            members = [rows[number] for number in inputs["call"].rows.tolist()]
            if reference:
                with self._scoring(REFERENCE) as scorer:
                    scores = logprobs(scorer, members)[0]
                members = [with_fact(row, REFERENCE, one.numpy()) for row, one in zip(members, scores)]
            with self._precision(engine):
                names = adapters.named_by_keys(self.model, members) if by_adapter else None
                found = logprobs(engine, members, names, entropies=entropies, ids=ids, every=every)
                scored = [torch.cat(x) for x in found]
            weights = np.concatenate([row.weights[1:] for row in members])
            # An untrained token may have probability 0, and 0 * infinity is NaN.
            used = weights != 0
            nll -= float(weights[used] @ scored[0].double().numpy()[used])
            weight, tokens = weight + float(weights.sum()), tokens + int(used.sum())
            if loss is not None and (every or used.any()):
                facts = Facts(members, dtype=scored[0].dtype)
                facts.id_logprobs = scored[-1] if ids else None
                part, metrics = loss.packed(scored[0], scored[1] if entropies else None, facts)
                total, sums = total + float(part), add_metrics(sums, metrics)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        numbers = mean_metrics(sums) | {"nll": nll / weight, "trained_tokens": tokens}
        numbers |= {} if loss is None else {"loss": total / loss.normaliser(rows)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in engine.ranks.gather(numbers)[0].items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(rows))  # type: ignore[arg-type]

    def _held_out(self, rows: Sequence[Trajectory]) -> tuple[Sequence[Trajectory], Loss | None, bool]:
        """Held-out rows with advantages, and the loss to evaluate: its on-policy form if they lack old_logprobs.

        Returns:
            the rows; the loss, or None if they lack a fact that it needs; whether the reference must still score them
            (their ref_logprobs are zeros until then).
        """
        loss = self.loss
        try:
            rows = self._counted(self.args.count, rows, self.model)
            if (advantages := computed_advantages(rows, loss, None)) is not None:
                rows = [row.replace(advantages=one) for row, one in zip(rows, advantages.tolist(), strict=True)]
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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `SafeCheckpointsMixin`; beside a trained model there is a card, README.md, unless one is there."""
        if not (self._writing or _internal_call):
            self._write_card(output_dir or self.args.output_dir or ".")
        super().save_model(output_dir, _internal_call)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card if there is none; transformers', for the hub, would replace it by a draft."""
        self._write_card(self.args.output_dir or ".")

    def _write_card(self, folder: str) -> None:
        check_links(Path(folder))
        if self.is_world_process_zero():
            with suppress(OSError):  # a full disk fails at the weights, with a message
                if write_card(self, Path(folder)):
                    self._cards.add(folder)
                elif folder not in self._cards:
                    logger.warning("%s/%s is there and stays; it may tell of another run", folder, CARD)

    def _engine_of(self, model: nn.Module) -> TreeEngine:
        """Return the engine of the model in its present wrapper."""
        # FSDP2 shards a model in place: it stays the same object but changes its class.
        if self._engine is None or self._engine_model != (model, type(model)):
            self._engine, self._engine_model = engine_of(model, self.args), (model, type(model))
        return self._engine

    def _precision(self, engine: TreeEngine) -> contextlib.AbstractContextManager[object]:
        # FSDP2 casts by itself.
        return contextlib.nullcontext() if engine.sharing.collective else self.accelerator.autocast()


# ---- Losses, and the facts that they need


class _Options(dict[str, str]):
    """Options that know which of them were asked for."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.unread = set(options)

    def __getitem__(self, name: str) -> str:
        self.unread.discard(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.unread -= {name}
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # this is `get`

    def pop(self, name: str, *default: Any) -> Any:
        self.unread.discard(name)
        return super().pop(name, *default)


def _check_optimizer_options(trainer: Trainer) -> None:
    """Raise ValueError for options in `optim_args` that transformers' optimizer of this name does not take."""
    args, module = trainer.args, sys.modules[Trainer.__module__]
    parse = getattr(module, "_parse_optim_args", None)  # transformers may rename it
    if not args.optim_args or parse is None or trainer.optimizer_cls_and_kwargs is not None:
        return
    options = _Options(parse(args.optim_args))
    with replaced(module, _parse_optim_args=lambda _: options):
        _, given = Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, trainer.model))
    taken = {name for one in (given, given.get("optim_args")) if isinstance(one, dict) for name in one}
    if ignored := sorted(options.unread - taken):
        name = getattr(args.optim, "value", args.optim)
        raise ValueError(f"optim_args: the optimizer {name} takes no {', '.join(ignored)}; take it out")


def _check_saved(config: Any, model: nn.Module) -> None:
    """Raise ValueError for modules to be trained whole beside an adapter that the model does not have."""
    names = [name for name, _ in model.named_modules()]
    for wanted in getattr(config, "modules_to_save", None) or ():
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
            near = nearest(wanted, {name.rsplit(".")[-1] for name in names if name})
            raise ValueError(f"modules_to_save: the model has no module {wanted!r}, so none would be trained; {near}")


def _check_rows(name: str, rows: Sequence[Trajectory] | None, loss: Loss) -> None:
    """Raise DataError if there are no rows, one is no trajectory, or the loss would imitate one that is rejected."""
    if rows is None:
        return
    if not len(rows):
        raise DataError(f"{name} is empty; give trajectories, such as tt.load(path).trajectories")
    try:
        columns = RowColumns(rows)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    if not isinstance(loss, losses.SFTLoss):
        return
    if (wrong := columns.trained & columns.rejected).any():
        number = int(wrong.argmax())
        raise DataError(
            f"{name}: {describe(rows[number], number)} is rejected (chosen=False), as {int(wrong.sum())} of "
            f"{len(rows)} rows are, and the loss sft would train the model to write it. Compare pairs (--loss dpo), or "
            "take only what is not rejected (--where chosen=True; in Python row.chosen is not False)"
        )
    rewards = columns.reward[columns.trained & ~np.isnan(columns.reward)]
    if name == "train_dataset" and len(rewards) and (rewards.min() < rewards.max() or rewards.min() < 0):
        logger.warning(
            "rows have rewards from %g to %g, and the loss sft does not read them: every row is imitated alike. A "
            "policy loss (--loss reinforce) reads them, or leave rows with low rewards out",
            rewards.min(),
            rewards.max(),
        )


def engine_of(model: nn.Module, args: TreeArguments) -> TreeEngine:
    """Make the engine of a run for its model or for the reference policy."""
    group = dist.group.WORLD if args.world_size > 1 and not is_sharded(model) else None
    options: dict[str, Any] = {"temperature": args.temperature, "group": group, "compile_layers": args.compile_layers}
    if args.execution == "tree":
        return TreeEngine(model, budget=args.budget, **options)
    size = PART_TOKENS["cuda" if model_device(model).type == "cuda" else "cpu"]
    pack_tokens = size if args.budget is None else int(args.budget)
    return LinearEngine(model, pack_tokens=pack_tokens, **options)


def checked_loss(args: TreeArguments, given: Loss | LossProtocol | None) -> Loss:
    """Return the given loss, or make the one that the arguments name. Raises ValueError."""
    if given is not None and (args.loss != "sft" or args.loss_kwargs):
        raise ValueError(f"a loss is given, and args name {args.loss!r} with {args.loss_kwargs}; give one of them")
    if given is None:
        given = losses.by_name(args.loss, **(args.loss_kwargs or {}))  # type: ignore[arg-type]
    loss, name = as_loss(given), type(given).__name__
    if "predicted_values" in loss.needs:
        raise ValueError(
            f"{name} needs values, and this trainer has no value head; use TreeEngine(model, value_head=...) in a loop "
            "of your own"
        )
    if args.count == "once" and not loss.sums_tokens:
        raise ValueError(
            f"count is 'once', but {name} is no sum over tokens, each with its weight, divided by the sum of weights. "
            "Take a loss that is (sft, dapo; reinforce, ppo or distill with reduction='token'), or count='per "
            "trajectory'; a loss of your own that is one says sums_tokens = True"
        )
    if args.target_kl is not None and not (isinstance(loss, PolicyLoss) and loss.clipped):
        raise ValueError(f"target_kl is {args.target_kl}, but {name} measures no KL from an old policy")
    return loss


def _named(model: Any, rows: Sequence[Trajectory]) -> list[str] | None:
    """The adapters that rows name by their keys; None if the model has no choice of them, or no row a key."""
    if len(getattr(model, "peft_config", ())) < 2 or all(row.key is None for row in rows):
        return None
    return adapters.named_by_keys(model, rows)


def needed_facts(loss: Loss) -> tuple[str, ...]:
    """Name the per-token facts that a loss needs."""
    return tuple(name for name in loss.needs if name in PER_TOKEN_FACTS)


def computed_advantages(
    rows: Sequence[Trajectory], loss: Loss, options: dict[str, Any] | None
) -> NDArray[np.float64] | None:
    """Compute advantages from rewards if the loss needs advantages and no row has any; else return None.

    Raises ValueError for options of `group_advantages` if no advantages are computed.
    """
    columns = RowColumns(rows)
    wanted = "advantages" in needed_facts(loss) and not columns.given["advantages"].any()
    if wanted and not np.isnan(columns.reward).all():
        return advantages_of_groups(rows, **(options or {}))
    if options:
        why = "the rows have no rewards" if wanted else "the rows have advantages, or the loss needs none"
        raise ValueError(f"advantage_kwargs is {options}, but no advantages are made of rewards: {why}")
    return None


def missing_facts(rows: Sequence[Trajectory], loss: Loss, computed: Collection[str] = ()) -> frozenset[str]:
    """The subset of old_logprobs and ref_logprobs that the loss needs and no trained row has.

    Raises DataError if only some of the rows have them, or a row lacks another fact that is not in `computed`.
    """
    columns = RowColumns(rows)
    missing = set()
    for fact in (fact for fact in needed_facts(loss) if fact not in computed):
        with_it = np.flatnonzero(columns.trained & columns.given[fact])
        without = np.flatnonzero(columns.trained & ~columns.given[fact])
        if not len(without):
            continue
        if fact not in (OLD, REFERENCE):
            name = describe(rows[int(without[0])], int(without[0]))
            raise DataError(f"{name} has no {fact}, which the loss needs; {REMEDIES[fact]}")
        if len(with_it):
            one, other = (describe(rows[int(number)], int(number)) for number in (with_it[0], without[0]))
            raise DataError(
                f"{one} has {fact}, {other} has none: {len(with_it)} of {len(with_it) + len(without)} rows have them, "
                "and computing the others would mix two policies; give all rows theirs, or none"
            )
        missing.add(fact)
    if "teacher_topk" in loss.needs:  # which is not in the columns
        loss.check(rows)
    if isinstance(rows, list) and loss.scope == "batch":  # pairs, which are not in the columns
        known = missing | set(computed)
        loss.check([row.replace(**{fact: np.zeros(len(row)) for fact in known}) for row in rows])
    return frozenset(missing)


def on_policy(loss: Loss) -> PolicyLoss | None:
    """Return the loss with ratio 1, which needs no old log-probabilities; None if it has no such form."""
    return dataclasses.replace(loss, on_policy=True) if isinstance(loss, PolicyLoss) else None


@torch.no_grad()
def logprobs(
    engine: TreeEngine,
    rows: Sequence[Trajectory],
    names: Sequence[str] | None = None,
    *,
    entropies: bool = False,
    ids: bool = False,
    every: bool = False,
) -> list[list[torch.Tensor]]:
    """`TreeEngine.logprobs` of rows that every rank has: each rank scores a share of them, all get all.

    Args:
        names: the adapter of each row; None: the active one.
        entropies: whether they are wanted too.
        ids: whether the log-probabilities of the ids of `teacher_topk` are wanted too.
        every: score every prediction; False gives 0 for those without a loss weight, which built-in losses do not read.

    Returns:
        one tensor [L - 1] in CPU memory per row; with `entropies` a second list; with `ids` a last one, as
        `Scored.id_logprobs`.
    """
    ranks = engine.ranks
    shares = [np.arange(len(rows))]
    if not ranks.alone:
        tree = as_tree(rows, merge=engine.merge)
        shares = dispatch(tree, cost_if_countable(engine.model), ranks.size, whole_rows=every)

    def own_scores() -> list[list[torch.Tensor]]:
        numbers = shares[ranks.rank].tolist()
        own, of_own = [rows[number] for number in numbers], None if names is None else [names[n] for n in numbers]
        mask = None if every else [row.weights[1:] != 0 for row in own]
        asked = [row.teacher_topk and row.teacher_topk.select(np.arange(1, len(row))) for row in own] if ids else None
        scores: Any = ([],) * (1 + entropies + ids)
        if own or engine.sharing.collective:
            made = engine.score(own, entropies=entropies, mask=mask, ids=asked, adapter_names=of_own)
            scores = made.logprobs, *[made.entropies] * entropies, *[made.id_logprobs] * ids
        return [[one.cpu() for one in column] for column in scores]

    if engine.sharing.collective:
        everywhere = ranks.gather(own_scores())  # passes are collective: no rank waits here for one that failed
    else:
        with ranks.together("scoring"):
            everywhere = ranks.exchange(own_scores())
    order = np.argsort(np.concatenate(shares)).tolist()
    columns = ([one for of_rank in everywhere for one in of_rank[column]] for column in range(1 + entropies + ids))
    return [[column[number] for number in order] for column in columns]


def with_fact(row: Trajectory, fact: str, scores: Float[np.ndarray, " predictions"]) -> Trajectory:
    """Add log-probabilities that were computed for a row."""
    values = np.zeros(len(row))
    # An untrained token may have probability 0 under the policy; no loss reads it.
    values[1:] = np.where(row.weights[1:] != 0, scores, 0.0)
    return row.replace(**{fact: values})


class RunningBatch(TrainerCallback):
    """The current batch, with log-probabilities computed before its first update. Checkpoints save it as a callback."""

    def __init__(self) -> None:
        self.number = -1
        self.stopped = False
        """Whether the policy is too far from the old one, so that the batch's remaining updates are skipped."""
        self.scores: dict[str, dict[int, NDArray[np.floating]]] = {}
        """Name of the fact -> number of the row -> log-probabilities."""
        self.advantages: NDArray[np.float64] | None = None
        """The advantages of all rows, if they are computed from rewards."""

    def start_step(self, number: int) -> None:
        """Start a step of this batch; its first step clears the state of the previous batch."""
        if number != self.number:
            self.number, self.stopped, self.scores = number, False, {}

    def with_facts(self, inputs: CallInputs) -> CallInputs:
        """A call (see `StepDataset`) with the facts computed for its rows; its tree keeps its structure."""
        rows, numbers = list(inputs["rows"]), inputs["call"].rows.tolist()
        for fact, scores in self.scores.items():
            rows = [with_fact(row, fact, scores[n]) for row, n in zip(rows, numbers, strict=True)]
        if self.advantages is not None:
            rows = [row.replace(advantages=float(self.advantages[n])) for row, n in zip(rows, numbers, strict=True)]
        own = [rows[number] for number in inputs["own"].tolist()]
        return {**inputs, "rows": rows, "tree": dataclasses.replace(inputs["tree"], rows=own)}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start without a batch."""
        self.start_step(-1)

    def state_dict(self) -> dict[str, str]:
        """The state as text: shapes differ between batches, so tensors could not be loaded in place."""
        scores = {fact: {n: one.tolist() for n, one in rows.items()} for fact, rows in self.scores.items()}
        return {"json": json.dumps([self.number, self.stopped, scores])}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.number, self.stopped, scores = json.loads(state["json"])
        self.scores = {fact: {int(n): np.array(one) for n, one in rows.items()} for fact, rows in scores.items()}


# ---- Numbers


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that the process has held so far: resident on a CPU, allocated by torch on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
