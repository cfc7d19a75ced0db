"""What a run has come to so far, and what it reports at its end."""

import dataclasses
from typing import Any

from treetrain.engine.step import StepResult


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run did."""

    output: str
    """Folder of the trained model."""
    steps: int
    losses: tuple[float, ...]
    """Loss of every step, before its update."""
    eval_nll: tuple[tuple[int, float], ...]
    """(step, nats per trained token) of every evaluation; step 0 is before the first update."""
    flat_tokens: int
    """Tokens of all rows of all steps."""
    unique_tokens: int
    """Tokens of all steps' trees."""
    seconds: float
    """Of forward, backward and update in all steps."""
    forward_backward_seconds: float
    other_seconds: float
    """Between the steps: choosing rows, records; evaluations, checkpoints and loading are not counted anywhere."""
    best_step: int | None
    """The step whose weights were saved, where the best ones are kept."""
    stopped_early: bool
    """There was no better evaluation for so long that the run ended before its last step."""
    peak_memory_bytes: int
    """Of the whole process."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(kw_only=True, slots=True)
class Progress:
    """What steps and evaluations have added up to: plain numbers, part of the state of a run."""

    step: int = 0
    """Steps that are done."""
    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """(step, nats per trained token)."""
    flat_tokens: int = 0
    unique_tokens: int = 0
    seconds: float = 0.0
    forward_backward_seconds: float = 0.0
    other_seconds: float = 0.0

    def add(
        self, result: StepResult, *, forward_backward_seconds: float, optimizer_seconds: float, other_seconds: float
    ) -> None:
        """Count one more step."""
        self.step += 1
        self.losses.append(result.loss)
        self.flat_tokens += result.flat_tokens
        self.unique_tokens += result.unique_tokens
        self.seconds += forward_backward_seconds + optimizer_seconds
        self.forward_backward_seconds += forward_backward_seconds
        self.other_seconds += other_seconds

    def state_dict(self) -> dict[str, Any]:
        """Every figure."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these figures."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])
        self.evaluations = [(step, nll) for step, nll in self.evaluations]

    def result(
        self, output: str, *, peak_memory_bytes: int, best_step: int | None = None, stopped_early: bool = False
    ) -> TrainResult:
        """What was done so far."""
        return TrainResult(
            output=output,
            steps=self.step,
            losses=tuple(self.losses),
            eval_nll=tuple(self.evaluations),
            flat_tokens=self.flat_tokens,
            unique_tokens=self.unique_tokens,
            seconds=self.seconds,
            forward_backward_seconds=self.forward_backward_seconds,
            other_seconds=self.other_seconds,
            best_step=best_step,
            stopped_early=stopped_early,
            peak_memory_bytes=peak_memory_bytes,
        )
