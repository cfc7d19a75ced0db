"""Runs that survive: a mixin for any transformers.Trainer.

transformers writes a checkpoint in place, file by file, and resumes from the folder with the highest number, whatever
is in it (its issues 35525 and 35782). Here transformers and torch.distributed.checkpoint still write the files, but
into a temporary folder. When every file is on the disk, a manifest with the SHA-256 of all files (and of itself) is
added, and one rename gives the folder its name. So a kill at any moment leaves a complete checkpoint or none. Loading
detects later changes by a disk, a copy or an editor.

A step whose gradient is NaN or infinite is skipped (`skipped_steps.py`), and weights that are not finite are never
saved. So the newest checkpoint is always a good one. Signals stop a run after a step (`stopping.py`).
"""

import datetime
import json
import math
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as distributed_load
from torch.distributed.checkpoint.state_dict_saver import save as distributed_save
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, Trainer, TrainerCallback

from treetrain.adapters import trained_kept
from treetrain.core.engine.ranks import Ranks
from treetrain.core.errors import RanksDisagree, quoted, shortened
from treetrain.core.hf.tree_mode import replaced
from treetrain.logs.columns import Json
from treetrain.parallel.process_group import GroupRanks, check_same, limit_waits
from treetrain.trainers import run_folder
from treetrain.trainers.checkpoint_files import (
    CheckpointNotWritten,
    TornCheckpoint,
    check_files,
    commit,
    hashes,
    newest_first,
    read_manifest,
    rotate,
)
from treetrain.trainers.plain_loading import check_random_state, load_metadata, without_code
from treetrain.trainers.relied_on import TESTED, Members, missing_members, versions_of, warn_if_untested
from treetrain.trainers.run_facts import (
    FIXED,
    LENGTH,
    MAY_BE_UNKNOWN,
    differences,
    facts_of_arguments,
    facts_of_loss,
    facts_of_model,
    facts_of_rows,
)
from treetrain.trainers.run_folder import (
    LOCK,
    OWN,
    FolderRefused,
    check_contents,
    check_links,
    check_name,
    delete,
    locked,
    mark,
)
from treetrain.trainers.settings import Refusal, refuse
from treetrain.trainers.skipped_steps import SkippedSteps, not_finite, skip_next_step
from treetrain.trainers.stopping import StopWithCheckpoint, catch_signals

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from peft import PeftConfig
    from torch.distributed.checkpoint.stateful import Stateful

T = TypeVar("T")


class Promise(Enum):
    """The promises of `SafeCheckpointsMixin` for a run."""

    WHOLE = "a checkpoint is complete or not there"
    EXACT = "a resumed run is bit-identical"
    FINITE = "a step whose gradient is NaN or infinite is skipped"


PROMISES: Mapping[Promise, Members] = {
    Promise.WHOLE: {
        "_save_checkpoint": ("model", "trial"),
        "_get_output_dir": ("trial",),
        "save_model": ("output_dir",),
    },
    Promise.EXACT: {
        "_run_epoch": (),
        "_finalize_training": (),
        "_load_best_model": (),
        "_load_rng_state": ("checkpoint",),
        "_load_from_checkpoint": ("resume_from_checkpoint",),
        "_load_optimizer_and_scheduler": ("checkpoint",),
    },
    Promise.FINITE: {"_get_grad_norm": ("model", "grad_norm")},
}
"""The methods of `transformers.Trainer` that are overridden, by what rests on them."""
CALLBACKS = "callbacks"
SHARDS = "pytorch_model_fsdp_0"
"""The folder of a checkpoint in which accelerate writes the shards of a model."""
SEEN_WITHIN = 10.0
"""Seconds within which a network file system shows to one host what another has written."""
WORKING = os.path.join(OWN, run_folder.WORKING)
"""The folder, within that of the run, in which checkpoints are written and deleted."""


class SafeCheckpointsMixin(Trainer if TYPE_CHECKING else object):
    """Makes the runs of a `transformers.Trainer` survive kills, full disks, altered files and NaN gradients.

    ```python
    class SafeTrainer(SafeCheckpointsMixin, Trainer):  # or any of TRL's trainers; the mixin stands first
        pass

    SafeTrainer(...).train(resume_from_checkpoint=True)
    ```

    A checkpoint gets its name only when it is complete, with the SHA-256 of every file in a manifest. Older ones are
    deleted (`save_total_limit`) only after that. Ctrl-C and SIGTERM on any rank stop all ranks after the step, with a
    checkpoint. A resumed run is bit-identical on the same number of ranks, and equal within rounding on another.
    Callbacks get their state back if they are `ExportableState` or have `state_dict` and `load_state_dict`. Sharded
    models (FSDP2) are saved in shards. All ranks must share `output_dir`; two runs cannot.

    A step whose gradient is NaN or infinite is skipped: weights, optimizer and schedule stay as they are. Weights that
    are not finite are never saved. A run does not start where it would replace what others or earlier runs have left,
    and goes on only with the model, data, loss and settings that it began with.

    Raises:
        TypeError: the mixin comes after the Trainer in the list of bases.
        ValueError: DeepSpeed, `save_on_each_node`, checkpoints on the hub, or a version of transformers without the
            methods that write checkpoints.
    """

    how_to_resume = "trainer.train(resume_from_checkpoint=True)"
    """The command for resuming, shown in messages."""
    also_saved: tuple[str, ...] = ("_metrics", "_total_train_tokens", "_step", "_buffered_inputs", "prefix_sharing")
    """Attributes that every rank saves, and restores on the same number of ranks; objects by their `state_dict` and
    `load_state_dict`. In TRL's trainers: the metrics since the last log and the completions that are not trained on
    yet. With `share_prefixes`: its counts since the last log."""

    max_skipped_steps: int = 3
    """The run stops after so many skipped steps in a row, with a checkpoint, so that it can go on behind them."""
    async_save: bool = False
    """Whether training goes on while a checkpoint is brought to the disk, hashed and given its name. A step waits until
    the files are written to the page cache, or for FSDP2's shards, until they are copied to the memory of the CPU. The
    next checkpoint and the end of the run wait for the rest, and raise its errors. `on_save` of callbacks comes before
    the folder has its name."""
    overwrite_output_dir: bool = False
    """Whether a new run may replace what is in `output_dir`."""
    accept_changes: bool = False
    """Whether a run may go on with other data, another loss or other settings than its checkpoint was made with."""
    how_to_set = "trainer.{} = True"
    """How the two settings above are given, shown in messages."""

    model: PreTrainedModel
    optimizer: "AcceleratedOptimizer"
    lr_scheduler: LRScheduler
    _last_good: Path | None = None
    _resumed: Path | None = None
    _never_finite: "set[tuple[str, str]]"
    _began_at = 0
    _writing = False
    _card: Callable[[], None] | None = None
    _saving: "Future[None] | None" = None
    """The rest of a checkpoint, which another thread does."""
    _saver: ThreadPoolExecutor | None = None
    """Its thread, while the trainer trains."""
    skipped_steps: SkippedSteps
    _facts: "dict[str, Json]"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__ and cls.__mro__.index(Trainer) < cls.__mro__.index(SafeCheckpointsMixin):
            raise TypeError(f"{cls.__name__}: SafeCheckpointsMixin must stand before the Trainer in the list of bases")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.skipped_steps = SkippedSteps()
        own, lost = self.args, {name: missing_members(Trainer, members) for name, members in PROMISES.items()}
        unsafe = ", ".join(lost.pop(Promise.WHOLE)) if own.save_strategy != "no" else ""
        lacks = f"transformers {transformers.__version__} lacks {unsafe}, by which checkpoints are written"
        refusals: list[Refusal] = [
            (unsafe, f"{lacks}: install another version, or set save_strategy='no'"),
            (
                self.is_deepspeed_enabled,
                "DeepSpeed writes and reads checkpoints itself, as pickles of its own classes for one number of ranks, "
                "so that neither a resume without running their code nor another number of ranks can be promised: use "
                "DDP or FSDP2, or the trainer without SafeCheckpointsMixin",
            ),
            (own.save_on_each_node, "save_on_each_node=True: set it to False, and share one output_dir"),
            (own.push_to_hub and own.hub_strategy != "end", "checkpoints are not pushed: set hub_strategy='end'"),
        ]
        refuse("SafeCheckpointsMixin: ", refusals)
        for promise, missing in lost.items():
            if missing:
                self._withdraw(promise, ", ".join(missing))
        warn_if_untested("transformers")

    def _withdraw(self, promise: Promise, missing: str) -> None:
        oldest, newest = TESTED["transformers"]
        warnings.warn(
            f"transformers {transformers.__version__} lacks {missing}: it is not promised that {promise.value}; "
            f"{oldest} to {newest} are tested",
            RuntimeWarning,
            stacklevel=3,
        )

    def step_size(self) -> str:
        """The data of an optimiser step over all ranks, as text. Override it in a trainer that counts differently."""
        return f"{self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size} samples"

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does.

        Args:
            resume_from_checkpoint: True resumes the newest complete checkpoint of `output_dir`, or starts the run if
                there is none yet; a folder resumes that one.

        Raises:
            TornCheckpoint: the named checkpoint, or every one in `output_dir`, is not as it was written.
            CheckpointNotWritten: a checkpoint could not be written; the message names the last good one.
            FolderRefused: `output_dir` is no folder for a run, another run writes there, or this one would replace
                what it holds.
            ValueError: the run would go on with another model, optimiser, data, loss or settings than before; the
                checkpoint has no optimiser state, or cannot be loaded.
            FloatingPointError: `max_skipped_steps` in a row had no finite gradient, or the weights are not finite.
            SystemExit: Ctrl-C or SIGTERM, with its exit code; a checkpoint of the last step is written.
        """
        check_name(self.args.output_dir or "")
        limit_waits(self.args.ddp_timeout)
        folder, wanted, restoring = Path(self.args.output_dir or ""), resume_from_checkpoint, _Restoring(self)
        self.skipped_steps = SkippedSteps()
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self._never_finite = {each for each in not_finite(self.model) if each[1] not in trained}
        with ExitStack() as stack:
            stack.callback(vars(self).update, _resumed=None)
            self._on_first(lambda: self._check_folder(folder, wanted))
            self._on_first(lambda: stack.enter_context(locked(folder)))
            self._check_shared(folder)
            self._on_first(lambda: delete([], folder / WORKING))  # left by a killed run
            self._resumed = self._last_good = self._choose(wanted, folder)
            self._facts = self._compare_facts()
            stack.enter_context(replaced(self.args, restore_callback_states_from_checkpoint=True))
            signals = stack.enter_context(catch_signals())
            stopping = StopWithCheckpoint(self, self._ranks, signals, self.skipped_steps, self.max_skipped_steps)
            for callback in (restoring, stopping):
                self.add_callback(callback)
                stack.callback(self.remove_callback, callback)
            stack.callback(vars(self).update, _saver=None)
            self._saver = stack.enter_context(ThreadPoolExecutor(1, "checkpoint"))
            stack.callback(self.finish_save)
            with _named_misfits(self._resumed, restoring):
                try:
                    return super().train(str(self._resumed) if self._resumed else None, *args, **kwargs)
                except RuntimeError as error:
                    self._ranks.explain(error)
                    raise

    def _check_folder(self, folder: Path, wanted: str | bool | None) -> None:
        """Refuse a folder with anything that the run would replace. Raises FolderRefused."""
        config = getattr(self.model, "config", None)
        adapters: dict[str, PeftConfig] = getattr(self.model, "peft_config", {})
        models = [getattr(config, "_name_or_path", ""), *(one.base_model_name_or_path for one in adapters.values())]
        check_contents(
            folder,
            resume=wanted,
            overwrites=self.overwrite_output_dir,
            models=[model for model in models if model],
            how=self.how_to_set.format("overwrite_output_dir"),
        )

    def _check_shared(self, folder: Path) -> None:
        """Raise FolderRefused on all ranks unless each sees the lock that the first has just written."""
        path = folder / OWN / LOCK
        (written, *_) = self._together(lambda: path.read_bytes() if self.args.process_index == 0 else b"")

        def look() -> None:
            end = time.monotonic() + SEEN_WITHIN
            while not (path.is_file() and path.read_bytes() == written):
                if time.monotonic() > end:
                    raise FolderRefused(
                        f"{folder} on {socket.gethostname()} is not the folder of the first rank, which wrote "
                        f"{quoted(written.decode(errors='replace'))} to {path}: give an output_dir on a file system "
                        "that all hosts share"
                    )
                time.sleep(0.1)

        self._together(look)

    def _choose(self, wanted: str | bool | None, folder: Path) -> Path | None:
        """The checkpoint to resume; None to start anew. Raises TornCheckpoint, and ValueError if it does not fit."""
        if not wanted:
            return None
        torn: list[str] = []
        for path in self._together(lambda: list(newest_first(folder)) if wanted is True else [Path(wanted)])[0]:
            try:
                self._check_whole(path)
            except (TornCheckpoint, RanksDisagree) as error:  # found by this rank or by another
                torn.append(str(error))
                warnings.warn(f"not resumed, since it is not whole: {error}", RuntimeWarning, stacklevel=3)
                continue
            manifest, now = read_manifest(path), self.step_size()
            if manifest["step_size"] != now and not (self.args.ignore_data_skip or self.args.auto_find_batch_size):
                raise ValueError(
                    f"cannot go on from {path}: a step took {manifest['step_size']} (on {manifest['ranks']} ranks) and "
                    f"now takes {now} (on {self.args.world_size}, with gradient_accumulation_steps="
                    f"{self.args.gradient_accumulation_steps}). Make it the same, or set ignore_data_skip=True"
                )
            if not any(name.startswith("optimizer") for name in manifest["files"]):
                raise ValueError(f"cannot go on from {path}: with save_only_model=True it holds no optimiser state")
            return path
        if torn:
            more = f" (and {len(torn) - 1} more)" if len(torn) > 1 else ""
            raise TornCheckpoint(f"no checkpoint is whole{more}: {shortened(torn[0], 300)}")
        warnings.warn(f"no checkpoint in {folder} yet: the run begins at step 0", RuntimeWarning, stacklevel=3)
        return None

    def run_facts(self) -> dict[str, Json]:
        """Return all that the weights depend on, by name. Override it in a trainer that has more to compare."""
        facts = facts_of_model(self.model) | facts_of_arguments(self.args)
        facts["data"] = facts_of_rows(self.train_dataset)
        if self.compute_loss_func is not None:
            facts["loss"] = facts_of_loss(self.compute_loss_func)
        return facts

    def _compare_facts(self) -> dict[str, Json]:
        """The facts of this run, which all ranks and a resumed checkpoint must have.

        Raises:
            RanksDisagree: the ranks differ.
            ValueError: on all ranks; the checkpoint differs.
        """
        of_ranks = self._together(lambda: (versions_of(self), json.loads(json.dumps(self.run_facts()))))
        _, facts = of_ranks[0]
        with self._ranks.together("the start of the run"):
            compared = [versions | facts_there for versions, facts_there in of_ranks]
            for name in compared[0]:
                values = [one.get(name) for one in compared]
                if not (name in MAY_BE_UNKNOWN and None in values):
                    check_same(name, values, "be started with the same settings, model and rows")

        def compare() -> None:
            if self._resumed is None:
                return
            changed = differences(read_manifest(self._resumed)["facts"], facts)
            if length := [changed.pop(name) for name in LENGTH if name in changed]:
                warnings.warn(f"the run goes on at another length: {'; '.join(length)}", RuntimeWarning, stacklevel=2)
            fixed = [text for name, text in changed.items() if name in FIXED]
            said = shortened("; ".join(fixed or changed.values()), 240)
            if fixed:
                raise ValueError(f"cannot go on from {self._resumed}: {said}. Start a new run from its weights instead")
            if changed and not self.accept_changes:
                how = self.how_to_set.format("accept_changes")
                raise ValueError(f"cannot go on from {self._resumed}: {said}. If this is meant, say so with {how}")
            if changed:
                warnings.warn(f"the run goes on with changes: {said}", RuntimeWarning, stacklevel=2)

        self._on_first(compare)
        return facts

    def _check_whole(self, path: Path) -> None:
        """Read every byte of a checkpoint, each rank a part of it. All ranks raise if one finds it torn."""
        self._together(lambda: check_files(path, self.args.process_index, self.args.world_size))

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # transformers would do one more step of a complete run
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm, which transformers computes before every step; the step is skipped if it is not finite."""
        norm: Any = super()._get_grad_norm(model, grad_norm)
        if self.accelerator.scaler is None:  # a scaler of float16 does this itself
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            skip = not math.isfinite(whole)  # on all ranks, which have the norm of the same gradients
            self.optimizer._is_overflow = skip  # accelerate's own mark of a skipped step: no schedule step follows
            self.skipped_steps.count(skip)
            if skip:
                self._check_weights("before")
                why = (
                    f"step {self.state.global_step + 1} is skipped, since its gradient norm is {float(whole)}: the "
                    f"weights stay as they are ({self.skipped_steps.in_a_row} in a row; the run stops after "
                    f"{self.max_skipped_steps})"
                )
                skip_next_step(self.optimizer, why)
        return norm

    def _check_weights(self, when: str) -> None:
        """Raise FloatingPointError on all ranks if a weight, a buffer or optimizer state is NaN or infinite on any.

        Frozen weights and buffers that were so when the run began are as they should be, such as a mask of -inf.
        """

        def first() -> tuple[str, str] | None:
            return next(
                (each for each in not_finite(self.model, self.optimizer) if each not in self._never_finite), None
            )

        if found := next(filter(None, self._together(first)), None):
            what, name = found
            step = self.state.global_step + (when == "before")
            good = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            raise FloatingPointError(
                f"the {what} are not finite {when} step {step} ({name}), and are not saved; {good}. A lower "
                f"learning_rate than {self.args.learning_rate:g}, more warm-up or float32 may help "
                f"({self.how_to_set.format('accept_changes')} lets a resumed run change them)"
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the number of steps that were skipped so far if there are any."""
        if self.skipped_steps.total and "loss" in logs:
            logs["skipped_steps"] = self.skipped_steps.total
        super().log(logs, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.finish_save()
        self._check_weights("after")
        if self._resumed and self.state.global_step == self._began_at:  # there was nothing left to do
            self._load_rng_state(str(self._resumed))
        # With save_total_limit=1 transformers would delete the newest checkpoint here and leave the best one.
        with replaced(self.args, save_total_limit=None):
            output = super()._finalize_training(*args, **kwargs)
        self._check_weights("after")  # callbacks may have changed them when training ended
        return output

    # ---- Saving

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Write a checkpoint to a temporary folder, move it to its place when complete, then delete older ones."""
        self.finish_save()
        state, rank = self.state, self.args.process_index
        folder, sharded = Path(super()._get_output_dir(trial)), _is_sharded(self.model)
        place, best = folder / f"checkpoint-{state.global_step}", folder / f"checkpoint-{state.best_global_step}"
        working = folder / WORKING
        temporary = working / place.name
        callbacks = {name: callback.state_dict() for name, callback in self._callbacks().items()}
        shards: list[Callable[[Any], object]] = []  # that are still to be written
        saver = self._saver if self.async_save else None

        def write() -> None:
            # transformers would look for the best checkpoint beside the temporary folder.
            later = nullcontext() if saver is None else _staged(shards)
            with replaced(state, best_global_step=None), replaced(self, _writing=True), self._in_shards(sharded), later:
                super(SafeCheckpointsMixin, self)._save_checkpoint(model, trial)
            if best == place or best.is_dir():
                state.best_model_checkpoint = str(best)
            saved = {
                name: _state(getattr(self, name)) for name in (*OWN_STATE, *self.also_saved) if hasattr(self, name)
            }
            torch.save(saved, temporary / f"trainer_{rank}.pt")
            if rank == 0:
                state.save_to_json(str(temporary / "trainer_state.json"))
                if not sharded:
                    torch.save(callbacks, temporary / f"{CALLBACKS}.pt")

        self._check_weights("after")
        with self._named_failure(place, working):
            self._on_first(lambda: (delete([], working), mark(temporary)))
            if sharded:  # before anything that can fail on one rank alone: this is a collective call
                distributed_save(callbacks, checkpoint_id=temporary / CALLBACKS)
            self._together(write)
        contents = {"step": state.global_step, "ranks": self.args.world_size, "step_size": self.step_size()}
        # Before a skipped step the weights may be ruined and finite: the older checkpoints may be the good ones.
        limit = None if self.skipped_steps.last else self.args.save_total_limit
        contents, best_one = contents | {"facts": self._facts}, state.best_model_checkpoint
        complete = partial(self._complete, place, working, contents, shards, limit, best_one)
        if saver is None:
            complete(self._ranks)
            self._write_card(folder)
        else:
            self._saving = saver.submit(complete, self._ranks_of_saver)

    def _complete(
        self,
        place: Path,
        working: Path,
        contents: dict[str, Json],
        shards: list[Callable[[Any], object]],
        limit: int | None,
        best: str | None,
        ranks: Ranks,
    ) -> None:
        """Bring the written files of a checkpoint to the disk, give it its name, and delete older ones."""
        temporary, files = working / place.name, {}
        with self._named_failure(place, working):
            for write_shards in shards:
                write_shards(getattr(ranks, "group", None))
            with ranks.together("the checkpoint"):
                for hashed in ranks.exchange(hashes(temporary, self.args.process_index, self.args.world_size)):
                    files |= hashed
            with ranks.together("the checkpoint"):
                if self.args.process_index == 0:
                    commit(temporary, place.parent, contents | {"files": files}, overwrites=self.overwrite_output_dir)
        self._last_good = place
        if self.args.process_index == 0:
            with suppress(OSError, FolderRefused):  # the new checkpoint is good; a full disk fails at the next one
                rotate(place.parent, limit, best, working)

    def _write_card(self, folder: Path) -> None:
        write_card, self._card = self._card, None
        if write_card is not None and self.args.process_index == 0:
            with suppress(OSError, FolderRefused):
                check_links(folder)
                write_card()

    def finish_save(self) -> None:
        """Wait until the last checkpoint of a run with `async_save` is complete; a collective call.

        Raises:
            CheckpointNotWritten: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            self._write_card(Path(self.args.output_dir or "."))

    @contextmanager
    def _named_failure(self, place: Path, working: Path) -> Iterator[None]:
        """Turn an error of writing a checkpoint into CheckpointNotWritten, and delete what is written of it."""
        folder = place.parent
        try:
            yield
        except (Exception, CheckpointException) as error:
            if self.args.process_index == 0:
                shutil.rmtree(working, ignore_errors=True)
            room = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there" if folder.is_dir() else "no folder"
            good = f"the last good checkpoint is {self._last_good}" if self._last_good else "there is no checkpoint yet"
            said = _in_a_line(error) if isinstance(error, CheckpointException) else error
            raise CheckpointNotWritten(
                f"{place} could not be written ({said}; {room}); {good}. Make room or make the folder writable, and "
                f"go on with {self.how_to_resume}"
            ) from error

    def _get_output_dir(self, trial: object) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, WORKING) if self._writing else folder

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`; shards in a checkpoint are written with the optimiser instead."""
        if self._writing:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir or "."
        check_links(Path(folder))
        try:
            if _is_sharded(self.model):
                save_whole(self.model, folder, self.processing_class, write=self.args.should_save)
            else:
                super().save_model(output_dir, _internal_call)
        except Exception as error:
            if isinstance(error, RanksDisagree | torch.OutOfMemoryError) or not os.path.isdir(folder):
                raise
            room = shutil.disk_usage(folder).free / 1e6
            raise CheckpointNotWritten(
                f"the model could not be written to {folder} ({_in_a_line(error)}; {room:,.1f} MB are free there)"
            ) from error

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """See `Trainer`. TRL's first rank writes a card into the output folder before each checkpoint. It is written
        after it: a run that dies in its first checkpoint leaves nothing that a restart would refuse to replace, and
        other ranks do not wait for one that cannot write it."""
        if self._writing:
            self._card = partial(super().create_model_card, *args, **kwargs)
        else:
            check_links(Path(self.args.output_dir or "."))
            super().create_model_card(*args, **kwargs)

    @contextmanager
    def _in_shards(self, wanted: bool) -> Iterator[None]:
        """Inside the block, if wanted, transformers writes and reads shards by torch.distributed.checkpoint.

        Every rank writes and reads its own shards, and the number of ranks may differ between writing and reading. This
        serves models that accelerate wrapped, models given to `fully_shard`, and reading shards into a whole model.
        """
        if not wanted:
            yield
            return
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        with replaced(self.accelerator.state, fsdp_plugin=plugin), replaced(self, is_fsdp_enabled=True):
            yield

    # ---- Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        sharded = _holds_shards(resume_from_checkpoint, SHARDS)
        with without_code(), self._in_shards(sharded), trained_kept(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        wanted = [dict(group) for group in self.optimizer.param_groups]
        sharded = checkpoint is not None and _holds_shards(checkpoint, SHARDS)
        with without_code(), self._in_shards(sharded):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.accept_changes:
            self._apply_changes(wanted)

    def _apply_changes(self, wanted: list[dict[str, Json]]) -> None:
        """Give optimizer and schedule the options of this run again: loading has given them the checkpoint's."""
        for number, (group, own) in enumerate(zip(self.optimizer.param_groups, wanted, strict=True)):
            group |= {name: own[name] for name in ("weight_decay", "betas", "eps", "momentum") if name in own}
            rate, before = own.get("initial_lr", own["lr"]), group.get("initial_lr", group["lr"])
            if rate != before and before:
                group |= {"initial_lr": rate, "lr": group["lr"] * rate / before}
                if hasattr(self.lr_scheduler, "base_lrs"):
                    self.lr_scheduler.base_lrs[number] = rate
                    self.lr_scheduler._last_lr[number] = group["lr"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _named_misfits(checkpoint), without_code():
            for path in Path(checkpoint).glob("rng_state*.pth") if checkpoint else ():
                if path.name in ("rng_state.pth", f"rng_state_{self.args.process_index}.pth"):
                    check_random_state(path)
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        self._check_whole(best)
        if len(getattr(self.model, "peft_config", ())) > 1:  # transformers would look for the active adapter alone
            self._load_from_checkpoint(str(best))
            return
        with without_code(), self._in_shards(_holds_shards(best, SHARDS)):
            super()._load_best_model()

    def _restore_progress(self) -> None:
        """Restore state that transformers does not: the loss since the last log, `also_saved`, stateful callbacks."""
        self._began_at = self.state.global_step
        absent = [name for name in (*OWN_STATE, "_total_loss_scalar") if not hasattr(self, name)]
        if absent:
            self._withdraw(Promise.EXACT, ", ".join(absent))
        if (path := self._resumed) is None:
            return
        if read_manifest(path)["ranks"] == self.args.world_size:
            own = path / f"trainer_{self.args.process_index}.pt"
            # The device's type, since torch cannot load to cpu:0.
            with without_code():
                saved = torch.load(own, map_location=self.args.device.type)
            for name, value in saved.items():
                old: Any = getattr(self, name, None)
                if hasattr(old, "load_state_dict"):
                    old.load_state_dict(value)
                else:
                    setattr(self, name, _filled(old, value))
            if not absent:
                self._total_loss_scalar -= float(self._tr_loss)  # train() returns the mean over the steps of this call
        callbacks = self._callbacks()
        if _holds_shards(path, CALLBACKS):
            states = {name: callback.state_dict() for name, callback in callbacks.items()}
            planner = DefaultLoadPlanner(allow_partial_load=True)
            with without_code():
                distributed_load(states, checkpoint_id=path / CALLBACKS, planner=planner)
        else:
            with without_code():
                states = torch.load(path / f"{CALLBACKS}.pt", map_location="cpu")
        for name in callbacks.keys() & states.keys():
            callbacks[name].load_state_dict(states[name])

    # ---- Helpers

    @cached_property
    def _ranks(self) -> Ranks:
        return GroupRanks(dist.group.WORLD) if self.args.world_size > 1 else Ranks()

    @cached_property
    def _ranks_of_saver(self) -> Ranks:
        """All processes, in a group of the thread that saves: its calls must not mix with those of training."""
        if self.args.world_size == 1:
            return Ranks()
        timeout = datetime.timedelta(seconds=self.args.ddp_timeout)
        return GroupRanks(cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)))

    def _callbacks(self) -> "dict[str, Stateful]":
        """Callbacks with `load_state_dict`, by number and class name."""
        stateful = [each for each in self.callback_handler.callbacks if hasattr(each, "load_state_dict")]
        return {f"{number}.{type(each).__name__}": each for number, each in enumerate(stateful)}

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the results by rank. If it fails on one rank, all raise.

        It must not use collectives that a failure would skip.
        """
        with self._ranks.together("the checkpoint"):
            return self._ranks.exchange(work())

    def _on_first(self, work: Callable[[], object]) -> None:
        self._together(work if self.args.process_index == 0 else lambda: None)


class _Restoring(TrainerCallback):
    """Restores the progress of a resumed run when transformers has loaded the rest."""

    def __init__(self, trainer: SafeCheckpointsMixin) -> None:
        self._trainer, self.done = trainer, False

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        self._trainer._restore_progress()
        self.done = True


@contextmanager
def _named_misfits(checkpoint: str | Path | None, restoring: _Restoring | None = None) -> Iterator[None]:
    """Turn errors of the libraries that load a checkpoint into a ValueError that names it; until training begins."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        ours = type(error).__module__.startswith("treetrain.") or isinstance(error, OSError | torch.OutOfMemoryError)
        if checkpoint is None or ours or (restoring is not None and restoring.done):
            raise
        raise ValueError(f"cannot go on from {checkpoint}, which does not fit: {_in_a_line(error)}") from error


def _in_a_line(error: BaseException) -> str:
    """An error of a library with its class; of one that torch.distributed.checkpoint collected, the first cause."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    return f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}"


def _holds_shards(checkpoint: str | Path, name: str) -> bool:
    """Whether a folder of a checkpoint is one that torch.distributed.checkpoint wrote, by the manifest.

    Raises UnpicklingError if its `.metadata` is not plain data: torch would log each of its tries.
    """
    written = f"{name}/.metadata" in read_manifest(Path(checkpoint))["files"]
    if written:
        with Path(checkpoint, name, ".metadata").open("rb") as file:
            load_metadata(file)
    return written


OWN_STATE = ("_tr_loss", "_globalstep_last_logged", "skipped_steps")
"""Attributes of every trainer that transformers does not save."""


def _state(value: Any) -> Any:
    """The state of an attribute, in plain dictionaries: `torch.load(weights_only=True)` knows no `defaultdict`."""
    value = value.state_dict() if hasattr(value, "state_dict") else value
    return {key: _state(each) for key, each in value.items()} if isinstance(value, dict) else value


def _filled(old: object, new: object) -> object:
    """The new value; a dictionary is filled in place, so that a `defaultdict` stays one."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    filled = {key: _filled(old.get(key), each) for key, each in new.items()}
    old.clear()
    old.update(filled)
    return old


@contextmanager
def _staged(shards: list[Callable[[Any], object]]) -> Iterator[None]:
    """Inside the block, `torch.distributed.checkpoint.save` copies what it is given, and puts the writing off."""

    def copy(state_dict: dict[str, Any], **options: Any) -> None:
        kept = BlockingAsyncStager().stage(state_dict)
        shards.append(lambda group: distributed_save(kept, process_group=group, **options))

    with replaced(distributed_checkpoint, save=copy):
        yield


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def save_whole(model: Any, folder: str | Path, processing_class: Any = None, *, write: bool) -> None:
    """Save a model, or its adapter, as a folder for `from_pretrained`; a collective call if it is sharded.

    Args:
        processing_class: saved beside it if given.
        write: whether this process writes the files; of several, one must.
    """
    options = {"state_dict": whole_state(model)} if _is_sharded(model) else {}
    if write:
        model.save_pretrained(folder, **options)
        if processing_class is not None:
            processing_class.save_pretrained(folder)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name (without frozen ones under an adapter) in CPU memory on the first rank; a collective call."""
    adapter = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
    state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    # Tied weights have several names, of which the first is gathered whole.
    first: dict[nn.Parameter, str] = {}
    same = {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: state.get(same.get(name, name), tensor) for name, tensor in state.items()}
