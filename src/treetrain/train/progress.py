"""What a run shows while it goes on: a progress bar on a terminal, a line now and then elsewhere."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINES = 20  # printed over a run where there is no terminal


class RunDisplay:
    """Shows steps and evaluations of a run of `total` steps on a console."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[shown]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console)

    def start(self, done: int = 0) -> None:
        """Begin after `done` steps; to be followed by `stop` whatever happens."""
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self.total, completed=done, shown="")
            self._bar.start()

    def stop(self) -> None:
        """End, leaving the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        """One optimiser step."""
        shown = (
            f"loss {record['loss']:.4f}  {record['flat_tokens_per_second']:,.0f} tok/s  overlap {record['overlap']:.2f}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], shown=shown)
        elif record["step"] in (1, self.total) or record["step"] % max(self.total // LINES, 1) == 0:
            self.say(f"step {record['step']}/{self.total}  {shown}")

    def say(self, text: str) -> None:
        """One line above the bar."""
        (self._bar.console if self._bar is not None else self.console).print(text, highlight=False, soft_wrap=True)
