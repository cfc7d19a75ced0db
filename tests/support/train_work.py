"""What tests of the trainer run on several ranks: a run there, and the same run by one process."""

import contextlib
import json
import os
import signal
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from support.pure import PureFloat64
from treetrain.engine.ranks import is_shard
from treetrain.models.loading import load_model
from treetrain.train import model as run_model
from treetrain.train.config import TrainConfig
from treetrain.train.loop import TrainLoop
from treetrain.train.save import save_result
from treetrain.train.sharding import whole_state
from treetrain.train.signals import Interrupted
from treetrain.train.trainer import Trainer

Settings = dict[str, Any]
COUNTED = ("flat_tokens", "unique_tokens", "trajectories", "trained_tokens", "calls")


class _Watched(Trainer):
    """Keeps the weights that a run ends with."""

    def _loop(self, model: nn.Module, *args: Any) -> TrainLoop:
        self.loop = super()._loop(model, *args)
        return self.loop

    def weights(self) -> dict[str, np.ndarray] | None:
        """By name, whole; on the first rank."""
        model = self.loop.model
        if any(is_shard(p) for p in model.parameters()):
            state = whole_state(model)
        else:
            frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
            state = {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
        return None if state is None else {name: t.double().numpy() for name, t in state.items()}


@contextlib.contextmanager
def _dtype(dtype: torch.dtype):
    """Models of a run are loaded in this dtype; float64 is pure."""

    def load(name, *, dtype: torch.dtype, seed: int):
        return load_model(name, seed=seed, dtype=wanted)

    wanted = dtype
    pure = PureFloat64() if dtype == torch.float64 else contextlib.nullcontext()
    with mock.patch.object(run_model, "load_model", load), pure:
        yield


def train(group: Any, settings: Settings, dtype: torch.dtype) -> tuple[Trainer, dict[str, Any]]:
    """A run, and what it came to."""
    with _dtype(dtype):
        trainer = _Watched(TrainConfig(**settings), group=group)
        result = trainer.run()
        found: dict[str, Any] = {"losses": result.losses, "nll": result.eval_nll, "best": result.best_step}
        found["weights"] = trainer.weights()
    if trainer.world.main:
        lines = (Path(settings["output"]) / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        steps = [record for record in records if record["kind"] == "train"]
        found["norms"] = [record["grad_norm"] for record in steps]
        found["counts"] = [[record.get(name) for name in COUNTED] for record in steps]
        found["names"] = [sorted(record) for record in records]
        found["ratios"] = [record.get("ratio_max", 0.0) for record in steps]
    return trainer, found


def compare(group: Any, settings: Settings, folder: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """How far a run over several ranks is from that of one process; rank 0 tells."""
    several = settings | {"output": f"{folder}/{settings['parallel']}"}
    _, found = train(group, several, dtype)
    if dist.get_rank(group):
        assert found["weights"] is None or settings["parallel"] == "ddp"
        return {"losses": found["losses"]}
    # Nothing of this may raise: the other ranks go on to the next run.
    try:
        return {"losses": found["losses"], "errors": _apart(found, settings, several["output"], folder, dtype)}
    except Exception:
        return {"losses": found["losses"], "errors": {"failed": traceback.format_exc()}}


def _apart(
    found: dict[str, Any], settings: Settings, output: str, folder: str, dtype: torch.dtype
) -> dict[str, float | str]:
    """How far what a run came to is from the run of one process, and what differs in kind."""
    alone = {"parallel": "none", "reduce": "auto", "meta_init": False, "replicas": 1, "output": f"{folder}/one"}
    _, truth = train(None, settings | alone, dtype)
    told: dict[str, Any] = {name: _error(found[name], truth[name]) for name in ("losses", "norms", "nll", "ratios")}
    told["weights"] = _error(*([x.ravel() for x in each["weights"].values()] for each in (found, truth)))
    differ = [name for name in ("counts", "names", "best") if found[name] != truth[name]]
    differ += ["names of weights"] * (found["weights"].keys() != truth["weights"].keys())
    differ += map(str, _files(output) ^ _files(f"{folder}/one"))
    told["differ"] = ", ".join(differ)
    return told


def compare_all(group: Any, cases: list[tuple[str, Settings, str]], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """`compare` of several runs, by name."""
    return {name: compare(group, settings, folder, dtype) for name, settings, folder in cases}


def _error(found: Any, truth: Any) -> float:
    one, other = (np.concatenate([np.ravel(x) for x in each]) if len(each) else np.zeros(0) for each in (found, truth))
    assert one.shape == other.shape, (one.shape, other.shape)
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-300))


def _files(folder: str) -> set[Path]:
    return {path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()}


def failures(group: Any, runs: list[tuple[Settings, Settings]]) -> list[str]:
    """What runs that cannot be raise; each with settings of all ranks, and more of the last rank."""
    found = []
    for settings, last in runs:
        more = last if dist.get_rank(group) == dist.get_world_size(group) - 1 else {}
        try:
            Trainer(TrainConfig(**settings | more), group=group).run()
            found.append("nothing")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def stop_one(group: Any, settings: Settings, rank: int, number: int) -> tuple[str, int, int]:
    """A run of which one rank gets SIGTERM in the middle of a step: what is said, the exit code, steps done."""
    trainer = _Watched(TrainConfig(**settings), group=group)
    before = TrainLoop._update

    def update(loop: TrainLoop, loss: float) -> float:
        if loop.step == number and dist.get_rank(group) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return before(loop, loss)

    with mock.patch.object(TrainLoop, "_update", update):
        try:
            trainer.run()
        except Interrupted as stopped:
            return str(stopped), stopped.exit_code, trainer.loop.step
    return "it was not stopped", 0, trainer.loop.step


def resumed(group: Any, settings: Settings) -> list[float]:
    """The losses of a run that goes on."""
    return list(Trainer(TrainConfig(**settings | {"resume": "auto"}), group=group).run().losses)


def loaded_by_shards(group: Any, settings: Settings) -> dict[str, Any]:
    """A model that is loaded on meta: which way was taken, and whether weights and buffers are those of the folder."""
    from treetrain.train import meta_init
    from treetrain.train.parallel import join

    config = TrainConfig(**settings)
    with mock.patch.object(meta_init, "_handed_out", wraps=meta_init._handed_out) as handed:
        made = run_model.placed_model(config.model, config, join(config, group))
    state = whole_state(made)
    told: dict[str, Any] = {"handed out": handed.called}
    told["local"] = sum(p.to_local().numel() for p in made.parameters())
    if state is not None:
        truth = load_model(config.model, dtype=torch.float32, seed=config.seed)
        told["all"] = sum(p.numel() for p in truth.parameters())
        told["same"] = all(torch.equal(state[name], t) for name, t in truth.state_dict().items())
        buffers = dict(made.named_buffers())
        told["buffers"] = all(torch.equal(buffers[name], t) for name, t in truth.named_buffers())
        told["tied"] = truth.get_input_embeddings().weight is truth.get_output_embeddings().weight
    embeddings = made.get_input_embeddings(), made.get_output_embeddings()
    told["tied here"] = embeddings[0].weight is embeddings[1].weight
    return told


__all__ = ["compare", "compare_all", "failures", "loaded_by_shards", "resumed", "save_result", "stop_one", "train"]
