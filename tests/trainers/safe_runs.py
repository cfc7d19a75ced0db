"""Small training runs with SafeCheckpointsMixin, here or in processes of their own that can be killed at any moment."""

import builtins
import io
import json
import os
import resource
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from support.processes import free_port, start
from treetrain.trainers.checkpoints import SafeCheckpointsMixin
from treetrain.trainers.run_folder import is_own

SECONDS = 120.0
"""A run that takes longer hangs."""
TIMES = ("runtime", "per_second", "seconds", "memory_bytes", "measured_speedup")
"""Parts of the names of what no two runs have in common."""


class SafeTrainer(SafeCheckpointsMixin, Trainer):
    """A trainer as users write it."""


class StopAt(TrainerCallback):
    """Sends the process a signal within a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


class Averages(TrainerCallback):
    """A moving average of the weights: a callback with tensors as its state."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, each in model.named_parameters():
            self.weights[name].lerp_(each.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in state.items():
            self.weights[name].copy_(each)


def tiny_model(dropout: float = 0.1) -> Qwen3ForCausalLM:
    """Two layers of random weights, the same ones every time; dropout draws random numbers in every step."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=64,
                attention_dropout=dropout,
                tie_word_embeddings=True,
            )
        )


def rows(count: int = 20) -> list[dict[str, Any]]:
    """Rows of equal length, so that the collator has nothing to pad."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 64, (count, 8), generator=draw).tolist()
    return [{"input_ids": each, "labels": each} for each in ids]


def shard(model: torch.nn.Module) -> torch.nn.Module:
    """The model under fully_shard, which accelerate then takes as it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model._is_accelerate_prepared = True  # it is not to be wrapped in DDP
    return model


def make_trainer(
    folder: Path,
    *,
    kind: type = SafeTrainer,
    sharded: bool = False,
    dropout: float = 0.1,
    callbacks: tuple = (),
    early: bool = False,
    async_save: bool = False,
    **settings: Any,
) -> Any:
    """A trainer of 12 steps over 2.4 epochs, a checkpoint after every second one, unless told otherwise."""
    settings = {
        "max_steps": 12,
        "save_steps": 2,
        "save_total_limit": 2,
        "logging_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "save_strategy": "steps",
    } | settings
    if settings.get("eval_strategy", "no") != "no":
        settings = {"eval_dataset": rows(4)} | settings
    eval_rows = settings.pop("eval_dataset", None)
    args = TrainingArguments(output_dir=str(folder), **settings)
    model = tiny_model(dropout)
    if sharded:
        assert args.device.type == "cpu"  # asking begins the process group, which sharding needs
        model = shard(model)
    chosen = [Averages(), *callbacks] + ([EarlyStoppingCallback(50)] if early else [])
    trainer = kind(model=model, args=args, train_dataset=rows(), eval_dataset=eval_rows, callbacks=chosen)
    trainer.async_save = async_save
    return trainer


def make_tree_trainer(
    folder: Path,
    *,
    sharded: bool = False,
    lora: bool = False,
    callbacks: tuple = (),
    kind_of: Callable[[type], type] = lambda kind: kind,
    **settings: Any,
) -> Any:
    """A TreeTrainer of 12 steps, four to a batch, whose old and reference log-probabilities are computed before."""
    from peft import LoraConfig

    from support.fsdp_on_cpus import let_accelerate_shard
    from support.tree_runs import branching_rows, make_arguments, small_model
    from treetrain.trainers.tree_trainer import TreeTrainer

    if settings.get("fsdp"):
        let_accelerate_shard()
    args = make_arguments(
        folder,
        **{
            "loss": "grpo",
            "loss_kwargs": {"kl": 0.1},
            "updates_per_batch": 2,
            "minibatches": 2,
            "max_steps": 12,
            "save_strategy": "steps",
            "save_steps": 2,
            "save_total_limit": 2,
            "logging_steps": 3,
        }
        | settings,
    )
    model, reference = small_model(), small_model(seed=2)
    if sharded:
        assert args.device.type == "cpu"
        model = shard(model)
    adapter = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0) if lora else None
    more = {"ref_model": reference, "peft_config": adapter, "callbacks": [Averages(), *callbacks]}
    return kind_of(TreeTrainer)(model, args, branching_rows(), **more)


def make_shared_trainer(folder: Path, **settings: Any) -> Any:
    """A trainer by `share_prefixes` whose rows begin alike; accelerate shards its model if `fsdp` is set."""
    from support.fsdp_on_cpus import let_accelerate_shard
    from treetrain.trainers.share_prefixes import share_prefixes

    if settings.get("fsdp"):
        let_accelerate_shard()
    trainer = make_trainer(folder, dropout=0.0, **settings)
    ids = [[5, 6, 7, 8, *row["input_ids"][4:]] for row in rows()]
    trainer.train_dataset = [{"input_ids": row, "labels": row} for row in ids]
    return share_prefixes(trainer, budget=64)


def outcome(trainer: Any) -> dict[str, Any]:
    """All of a finished run that an interruption must not change, as whole tensors."""

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: whole(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [whole(each) for each in value]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    averages = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Averages))
    history = [
        {name: value for name, value in record.items() if not any(part in name for part in TIMES)}
        for record in trainer.state.log_history
        if "train_loss" not in record  # of the steps of the last call only, by transformers' definition
    ]
    return {
        "weights": whole(dict(trainer.model.named_parameters())),
        "optimizer": whole(trainer.optimizer.state_dict()),
        "schedule": trainer.lr_scheduler.state_dict(),
        "averages": whole(averages.weights),
        "history": history,
        "random": torch.get_rng_state(),
        "callbacks": {
            name: value for name, value in trainer.state.stateful_callbacks.items() if name != "TrainerControl"
        },
        "progress": [trainer.state.global_step, trainer.state.epoch, trainer.state.total_flos],
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
    }


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two results are not the same bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        only = [f"{where}/{name}: only one has it" for name in sorted(map(str, one.keys() ^ other.keys()))]
        return only + [
            each for name in one if name in other for each in differences(one[name], other[name], f"{where}/{name}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for at, pair in pairs for found in differences(*pair, f"{where}/{at}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        equal = one.dtype == other.dtype and torch.equal(one, other)
        return [] if equal else [f"{where}: {one.flatten()[:3]} and {other.flatten()[:3]}"]
    equal = type(one) is type(other) and (one == other or repr(one) == repr(other) == "nan")
    return [] if equal else [f"{where}: {one!r:.80} and {other!r:.80}"]


class Run:
    """A run over one or several gloo processes.

    Args:
        folder: its output_dir; what it prints and its outcome (of rank 0) are put beside it.
        ranks: processes.
        resume: passed to `train`.
        kill_at: kill rank `kill_rank` with SIGKILL right before its so-manieth call that changes the disk in a save.
        slow: seconds that each step takes longer.
        full_at: a rank, and the step from which on its files cannot grow.
        settings: of `make_trainer`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int = 1,
        resume: Any = True,
        kill_at: int | None = None,
        kill_rank: int = 0,
        slow: float = 0.0,
        full_at: tuple[int, int] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.said = folder, folder.with_name(f"{folder.name}.said")
        self.result = folder.with_name(f"{folder.name}.result")
        self.steps = folder.with_name(f"{folder.name}.steps")
        self.result.unlink(missing_ok=True)
        self.said.unlink(missing_ok=True)
        self.steps.unlink(missing_ok=True)
        port = free_port()
        self.processes: list[Any] = []
        for rank in range(ranks):
            at = kill_at if rank == kill_rank else None
            full = full_at[1] if full_at and full_at[0] == rank else None
            self.processes.append(start(_run, folder, rank, ranks, port, resume, at, slow, full, settings))

    def wait(self) -> list[int]:
        """The exit codes. A rank whose peer has died is ended after some time."""
        end = time.monotonic() + SECONDS
        while any(process.is_alive() for process in self.processes):
            died = any(process.exitcode not in (0, None) for process in self.processes)
            if time.monotonic() > end or (died and not self._grace()):
                for process in self.processes:
                    process.kill()
            time.sleep(0.01)
        return [process.exitcode for process in self.processes]

    def _grace(self) -> bool:
        """Peers of a process that has died get five seconds to end by themselves."""
        self._died_at = getattr(self, "_died_at", time.monotonic())
        return time.monotonic() - self._died_at < 5

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 has done a step, or is gone."""
        end = time.monotonic() + SECONDS
        while self.processes[0].is_alive() and self.done < step:
            assert time.monotonic() < end, f"waited in vain; it said: {self.text}"
            time.sleep(0.005)

    @property
    def done(self) -> int:
        """The last step that rank 0 has done since the process began."""
        return int(lines[-1]) if self.steps.exists() and (lines := self.steps.read_text().split()) else 0

    def send(self, number: int, rank: int = 0) -> None:
        """A signal."""
        if self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, number)

    @property
    def text(self) -> str:
        """Output of all ranks."""
        return self.said.read_text() if self.said.exists() else ""

    @property
    def outcome(self) -> dict[str, Any]:
        """See the function `outcome`; of a run that came to its end."""
        return torch.load(self.result, weights_only=False)


class _Steps(TrainerCallback):
    """One line per step done, for those who wait for it."""

    def __init__(self, path: Path, slow: float, full_at: int | None) -> None:
        self.path, self.slow, self.full_at = path, slow, full_at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self.slow)
        with self.path.open("a") as file:
            file.write(f"{state.global_step}\n")
        if state.global_step == self.full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def _run(
    folder: Path,
    rank: int,
    ranks: int,
    port: int,
    resume: Any,
    kill_at: int | None,
    slow: float,
    full_at: int | None,
    settings: dict[str, Any],
) -> None:
    handle = os.open(folder.with_name(f"{folder.name}.said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        settings = {"ddp_backend": "gloo"} | settings
    settings = dict(settings)
    code = 0
    try:
        steps = _Steps(folder.with_name(f"{folder.name}.steps") if rank == 0 else Path(os.devnull), slow, full_at)
        kinds = {"tree": make_tree_trainer, "shared": make_shared_trainer}
        make = next((kinds[name] for name in kinds if settings.pop(name, False)), make_trainer)
        trainer = make(folder, callbacks=(steps,), **settings)
        if kill_at is not None:
            kill_before_call(kill_at)
        trainer.train(resume_from_checkpoint=resume)
        found = outcome(trainer)
        if rank == 0:
            result = folder.with_name(f"{folder.name}.result")
            torch.save(found, result)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def kill_before_call(number: int) -> None:
    """Die before the so-manieth call that changes a folder, opens a file or waits for the disk."""
    calls = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "truncate", "ftruncate"):
        setattr(os, name, watched(getattr(os, name)))
    builtins.open = io.open = watched(io.open)


class FolderBefore:
    """The files of a folder, to see later what has become of them.

    Args:
        folder: its files, links, pipes and empty folders are remembered.
        names: of some of them; None: all.
    """

    def __init__(self, folder: Path, names: list[str] | None = None) -> None:
        self.folder, self.names = folder, names
        self.before = self._now()

    def _now(self) -> dict[str, Any]:
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if self.names is None or name in self.names:
                found[name] = path.read_bytes() if path.is_file() else stat.S_IFMT(path.lstat().st_mode)
        return found

    def changes(self) -> list[str]:
        """Names of those that are gone or changed."""
        now = self._now()
        return [name for name, what in self.before.items() if now.get(name) != what]


def saved_steps(folder: Path, whole: bool = False) -> dict[int, int]:
    """Steps of the checkpoints of a folder with the orders in which they were written; `whole`: of ours alone."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        if whole and not is_own(path):
            continue
        manifest = json.loads((path / "manifest.json").read_text())["contents"]
        found[manifest["step"]] = manifest["order"]
    return found
