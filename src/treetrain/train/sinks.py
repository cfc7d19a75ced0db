"""Where a run's records go besides metrics.jsonl: observers given by the caller, TensorBoard, Weights & Biases.

Records are what metrics.jsonl holds, one dict each, told apart by "kind": start, train, eval, interrupted, failed,
end; a reader must bear kinds and names that it does not know.
"""

import importlib.util
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from treetrain.train.config import TrainConfig

Record = Mapping[str, Any]
HELD_OUT = "held_out"
"""Folder of the evaluations' charts in TensorBoard and Weights & Biases."""
WANDB_ID = "wandb_run_id.txt"
"""In the run's folder, so that a resumed run goes on as the same one there."""


class Observer(Protocol):
    """Something that follows a run. What it raises never ends the run."""

    def open(self, folder: Path) -> None:
        """The run begins, or goes on, in this output folder."""
        ...

    def record(self, record: Record) -> None:
        """One record; it is in metrics.jsonl already."""
        ...

    def close(self) -> None:
        """No record will follow."""
        ...


class Observers:
    """Hands records to several observers; one that raises is told about once and left out from then on."""

    def __init__(self, members: Sequence[Observer], folder: Path) -> None:
        self._members = list(members)
        self._each("open", folder)

    def record(self, record: Record) -> None:
        """To every one of them."""
        self._each("record", record)

    def close(self) -> None:
        """Every one of them."""
        self._each("close")
        self._members = []

    def _each(self, method: str, *arguments: Any) -> None:
        for member in list(self._members):
            try:
                getattr(member, method)(*arguments)
            except Exception as error:
                # Days of training must not end because a picture of them cannot be written.
                self._members.remove(member)
                name = type(member).__name__
                what = f"{name} failed ({type(error).__name__}: {error}); the run goes on without it"
                warnings.warn(what, stacklevel=4)


class TensorBoardSink:
    """Scalars of every step and evaluation for TensorBoard, in the run's `tensorboard` folder."""

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: Any = None

    def open(self, folder: Path) -> None:
        """The event file is made with the first step, so that a run that does nothing leaves none."""
        self._folder = folder / "tensorboard"

    def record(self, record: Record) -> None:
        """Numbers as they are, one tag each."""
        scalars = _scalars(record)
        if not scalars:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What an interrupted run has written at this step and later is replaced by what comes now.
            self._writer = SummaryWriter(str(self._folder), purge_step=int(record["step"]))
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, int(record["step"]))

    def close(self) -> None:
        """Everything on disk."""
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """Scalars of every step and evaluation for Weights & Biases; WANDB_MODE=offline keeps them in the run's folder.

    Args:
        project: its name there.
        config: shown with the run.
    """

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        self._project, self._config = project, dict(config)
        self._folder = Path()
        self._run: Any = None
        self._continued = True

    def open(self, folder: Path) -> None:
        """The run there begins with the first step or evaluation."""
        self._folder = folder

    def record(self, record: Record) -> None:
        """Numbers as they are; charts are drawn over `step`, since an evaluation and a step may share one."""
        if record.get("kind") == "start":  # which a run that is resumed does not write again
            self._continued = False
        scalars = _scalars(record)
        if scalars:
            self._started().log({"step": int(record["step"]), **scalars})
        elif self._run is not None and record.get("kind") in ("end", "failed", "interrupted"):
            self._run.summary["state"] = record["kind"]

    def close(self) -> None:
        """Sends what is left."""
        if self._run is not None:
            self._run.finish()

    def _started(self) -> Any:
        if self._run is None:
            import wandb  # pyright: ignore[reportMissingImports]

            known = self._folder / WANDB_ID
            same = self._continued and known.is_file()
            run_id = known.read_text(encoding="utf-8").strip() if same else uuid.uuid4().hex[:12]
            self._run = wandb.init(
                project=self._project,
                config=self._config,
                name=self._folder.resolve().name,
                dir=str(self._folder),
                id=run_id,
                resume="allow" if same else None,
            )
            self._run.define_metric("*", step_metric="step")
            known.write_text(run_id + "\n", encoding="utf-8")
        return self._run


def make_sinks(config: "TrainConfig") -> list[Observer]:
    """The sinks that a run's settings ask for.

    Raises:
        ValueError: what one needs is not installed; to be called before the model is loaded.
    """
    sinks: list[Observer] = []
    if config.tensorboard:
        _require("tensorboard", "tensorboard is on")
        sinks.append(TensorBoardSink())
    if config.wandb is not None:
        if not config.wandb.strip():
            raise ValueError("wandb is empty; give the name of a Weights & Biases project")
        _require("wandb", f"wandb is {config.wandb!r}")
        sinks.append(WandbSink(config.wandb, config.as_dict()))
    return sinks


def _require(package: str, setting: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{setting}, but the package {package} is not installed: pip install {package}")


def _scalars(record: Record) -> dict[str, float]:
    """The numbers of a step (by their names) or of an evaluation (under `held_out/`); nothing of other records."""
    prefix = {"train": "", "eval": f"{HELD_OUT}/"}.get(str(record.get("kind")))
    if prefix is None or "step" not in record:
        return {}
    numbers = {name: value for name, value in record.items() if name not in ("kind", "step")}
    return {
        prefix + name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
