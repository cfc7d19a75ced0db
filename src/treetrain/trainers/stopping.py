"""How a run stops before its end: after a step, with a checkpoint, on all ranks.

Two things stop it: a signal that any rank received, and too many skipped steps in a row.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from treetrain.core.engine.ranks import Ranks
from treetrain.trainers.skipped_steps import SkippedSteps


class Resumes(Protocol):
    """A trainer whose runs can go on: a `SafeCheckpointsMixin`."""

    how_to_resume: str
    callback_handler: CallbackHandler

    def finish_save(self) -> None: ...


class StopWithCheckpoint(TrainerCallback):
    """Stops all ranks at the same step and times its checkpoint. Added last, so that it sees what others have decided.

    Args:
        trainer: its other callbacks are told of the end; it says how to resume.
        ranks: all processes of the run.
        signals: those that this process has received, see `catch_signals`.
        skipped: the steps that were skipped.
        most_skipped: the run stops after so many in a row.
    """

    def __init__(
        self, trainer: Resumes, ranks: Ranks, signals: Sequence[int], skipped: SkippedSteps, most_skipped: int
    ) -> None:
        self._trainer, self._ranks, self._signals = trainer, ranks, signals
        self._skipped, self._most_skipped = skipped, most_skipped
        self._signal = 0  # that any rank received; the same on all ranks
        self._stuck = 0  # skipped steps in a row, if they are too many
        self._postponed = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Ask for a checkpoint if the run must stop."""
        self._signal = max(self._ranks.gather([*self._signals, 0][0]))
        if self._skipped.in_a_row >= self._most_skipped:
            self._stuck, self._skipped.in_a_row = self._skipped.in_a_row, 0
        control.should_save |= self._signal > 0 or self._stuck > 0
        # An evaluation may follow the last step of an epoch. The checkpoint waits, to include its result.
        self._postponed = control.should_save and state.epoch.is_integer()
        control.should_save &= not self._postponed

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Ask for the checkpoint that has waited for the end of the epoch."""
        control.should_save |= self._postponed

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop, now that the checkpoint is written."""
        saved, resume = Path(args.output_dir or ".", f"checkpoint-{state.global_step}"), self._trainer.how_to_resume
        if self._signal or self._stuck:
            self._trainer.finish_save()
        if self._signal:
            self._trainer.callback_handler.on_train_end(args, state, control)  # trackers close their files
            if args.process_index == 0:
                print(
                    f"{signal.Signals(self._signal).name}: stopped after step {state.global_step} of "
                    f"{state.max_steps}; all of it is saved in {saved}. Go on with {resume}",
                    file=sys.stderr,
                )
            raise SystemExit(128 + self._signal)  # what shells expect: 130 after Ctrl-C, 143 after SIGTERM
        if self._stuck:
            raise FloatingPointError(
                f"the run stops after step {state.global_step}: {self._stuck} steps in a row had a NaN or infinite "
                f"gradient and were skipped. The weights are finite, and saved in {saved}. A lower learning_rate than "
                f"{args.learning_rate:g}, more warm-up or float32 may help; {resume} goes on with the next step"
            )


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Put Ctrl-C and SIGTERM into the yielded list instead of exiting; ignored ones stay ignored.

    A signal that no later step handles is raised again at the end. Outside the main thread Python cannot catch signals.
    """
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        os.write(2, b"\nstopping after this step, with a checkpoint\n")  # print may be in the middle of a line

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if main}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])
