"""The page of a run that is going on, and the other places that records go to."""

import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
from recorded import step_record

from treetrain.report import live
from treetrain.report.live import LivePage
from treetrain.train.config import TrainConfig
from treetrain.train.metrics import MetricsFile
from treetrain.train.sinks import TensorBoardSink, WandbSink, make_sinks

START = {"kind": "start", "steps": 3, "config": {"loss": "sft"}}


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(live, "time", made)
    return made


def state(folder: Path) -> str:
    text = (folder / "report.html").read_text()
    return text.split('data-state="')[1].split('"')[0]


def test_the_page_appears_with_the_first_step_and_again_when_it_is_due_and_at_the_end(tmp_path, clock) -> None:
    page = tmp_path / "report.html"
    with MetricsFile(tmp_path, [LivePage(every_seconds=10)]) as metrics:
        metrics.write(START)
        metrics.write({"kind": "eval", "step": 0, "nll": 3.0})
        assert not page.exists()
        metrics.write(step_record(1))
        assert state(tmp_path) == "running" and "step 1 of 3" in page.read_text()
        clock.now += 9
        metrics.write(step_record(2))
        assert "step 1 of 3" in page.read_text()
        clock.now += 2
        metrics.write(step_record(3))
        assert "step 3 of 3" in page.read_text()
        metrics.write({"kind": "end"})
        assert state(tmp_path) == "finished"


def test_a_page_that_takes_long_is_made_more_rarely(tmp_path, clock, monkeypatch) -> None:
    pages = []

    def slow(run) -> str:
        clock.now += 5.0
        pages.append(run.step)
        return ""

    monkeypatch.setattr(live, "run_page", slow)
    with MetricsFile(tmp_path, [LivePage(every_seconds=10)]) as metrics:
        for step in range(1, 101):
            clock.now += 10
            metrics.write(step_record(step))
    assert pages == [1, 26, 51, 76, 100]  # five seconds every 250, and once at the end


def test_the_page_of_a_run_that_dies_of_an_error_says_why(tmp_path) -> None:
    with pytest.raises(FloatingPointError), MetricsFile(tmp_path, [LivePage()]) as metrics:
        metrics.write(START)
        metrics.write(step_record(1))
        raise FloatingPointError("the loss is nan")
    assert state(tmp_path) == "failed" and "the loss is nan" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["kind"] == "failed"


def test_a_run_that_fails_before_its_first_step_leaves_nothing(tmp_path) -> None:
    with pytest.raises(ValueError), MetricsFile(tmp_path, [LivePage(), TensorBoardSink()]) as metrics:
        metrics.write(START)
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["open", "record", "close"])
def test_an_observer_that_raises_is_told_about_once_and_never_ends_the_run(tmp_path, method) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.calls = []

        def open(self, folder) -> None:
            self.calls.append("open")

        def record(self, record) -> None:
            self.calls.append(record["kind"])

        def close(self) -> None:
            self.calls.append("close")

    class Broken(Watcher):
        pass

    def fail(self, *_) -> None:
        raise OSError("disk full")

    setattr(Broken, method, fail)
    good = Watcher()
    warning = "Broken failed .*disk full.*goes on without it"
    with pytest.warns(UserWarning, match=warning) as told, MetricsFile(tmp_path, [Broken(), good]) as metrics:
        metrics.write(step_record(1))
        metrics.write(step_record(2))
    assert len(told) == 1 and good.calls == ["open", "train", "train", "close"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


class FakeWriter:
    """In place of TensorBoard's writer."""

    made: ClassVar[list["FakeWriter"]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_every_number_of_steps_and_evaluations(tmp_path, monkeypatch) -> None:
    FakeWriter.made.clear()
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with MetricsFile(tmp_path, [TensorBoardSink()]) as metrics:
        metrics.write(START)
        metrics.write({"kind": "train", "step": 7, "loss": 1.5, "kl": float("nan"), "name": "x"})
        metrics.write({"kind": "eval", "step": 7, "nll": 2.0})
    (writer,) = FakeWriter.made
    assert writer.scalars == [("loss", 1.5, 7), ("held_out/nll", 2.0, 7)]
    assert writer.purge_step == 7 and writer.closed and writer.folder == str(tmp_path / "tensorboard")


class FakeWandb(types.ModuleType):
    """In place of wandb: one run, which is remembered."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started, self.logged, self.summary, self.finished = [], [], {}, 0

    def init(self, **given) -> "FakeWandb":
        self.started.append(given)
        return self

    def define_metric(self, *names, **more) -> None:
        pass

    def log(self, numbers) -> None:
        self.logged.append(numbers)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_one_run_and_goes_on_with_it_when_the_run_is_resumed(tmp_path, monkeypatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsFile(tmp_path, [WandbSink("mine", {"lr": 1.0})]) as metrics:
        metrics.write(START)
        assert fake.started == []
        metrics.write({"kind": "train", "step": 1, "loss": 1.5})
        metrics.write({"kind": "interrupted", "step": 1})
    with MetricsFile(tmp_path, [WandbSink("mine", {"lr": 1.0})]) as metrics:
        metrics.write({"kind": "train", "step": 2, "loss": 1.0})
    with MetricsFile(tmp_path, [WandbSink("mine", {"lr": 1.0})]) as metrics:
        metrics.write(START)
        metrics.write({"kind": "eval", "step": 0, "nll": 1.0})
        metrics.write({"kind": "end"})
    first, resumed, new = fake.started
    assert first["project"] == "mine" and first["config"] == {"lr": 1.0} and first["dir"] == str(tmp_path)
    assert resumed["id"] == first["id"] != new["id"]
    assert (first["resume"], resumed["resume"], new["resume"]) == (None, "allow", None)
    assert fake.logged == [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.0}, {"step": 0, "held_out/nll": 1.0}]
    assert fake.summary == {"state": "end"} and fake.finished == 3


@pytest.mark.parametrize("setting", [{"tensorboard": True}, {"wandb": "mine"}])
def test_a_sink_whose_package_is_missing_is_refused_with_the_command_that_installs_it(setting, monkeypatch) -> None:
    (package,) = setting
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = TrainConfig(data=("rows.jsonl",), model="tiny", output="out", **setting)
    with pytest.raises(ValueError, match=f"{package} is .*not installed: pip install {package}"):
        make_sinks(config)
    assert make_sinks(TrainConfig(data=("rows.jsonl",), model="tiny", output="out")) == []


def test_an_empty_project_is_refused() -> None:
    with pytest.raises(ValueError, match="wandb is empty"):
        make_sinks(TrainConfig(data=("rows.jsonl",), model="tiny", output="out", wandb=" "))
