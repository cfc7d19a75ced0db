"""A quarter of an hour on a rented GPU: is it right, how fast is it, and where does the time go?

    python3 benchmarks/quarter_hour.py --out runs/gpu                 # 8.6 minutes; the speed-up after three and a half
    python3 benchmarks/quarter_hour.py --out runs/gpu --only large --minutes 3     # a phase that was cut, again
    python3 benchmarks/quarter_hour.py --out runs/rehearsal --smoke   # tiny sizes, on a CPU too

Needs a checkout, torch, transformers and jaxtyping; nothing is installed or downloaded. Each phase is a process of its
own. Rows are appended to rows.jsonl in --out as they come, and log.txt has what was printed. A phase that says nothing
for `SILENCE` seconds or is beyond its limit is killed. One that ends with an error of the device, or is killed for its
silence, starts again once without the cases that it had begun. The table comes last.

phases, in order of value; what one leaves of its time goes to the next:
    right     rates of the card; self-checks; attention, LM head and whole steps against float64
    headline  Qwen3-0.6B on the calls of a tool agent: tree and linear baseline, with and without checkpointing
    flash     the same with FlashAttention 4 or 3 on both sides, if it is there
    sweep     TFLOP/s of all attention backends and of PyTorch's own kernels
    large     8B on a card of more than 120 GB, else 4B
    trl       a step of TRL's GRPOTrainer with and without share_prefixes, if TRL is there
    detail    profile by purpose, the tree without each of its features, budgets: memory predicted and measured
and, only if named by --only:
    tests     the tests of the kernels (needs pytest and hypothesis)
    blocks    every block size of each Triton kernel

Wheels in runs/wheels (of TRL, of FlashAttention) are unpacked into a temporary folder and come last on the path.
"""

# ruff: noqa: E402
import argparse
import contextlib
import datetime
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import gpu_table

PHASES = {"right": 110, "headline": 240, "flash": 80, "sweep": 70, "large": 150, "trl": 80, "detail": 120}
"""Seconds that each phase may take."""
ON_REQUEST = {"tests": 300, "blocks": 300}
MINUTES = 8.6
SILENCE = 150.0
"""Seconds without a line after which a phase counts as hanging; one compilation takes less."""
LEAST, GRACE = 15.0, 10.0
"""Seconds below which no phase is started, and by which one may exceed its limit, to end the case that it is in."""
DEVICE_FAILED, NO_DEVICE = 99, 98
"""Exit codes of a phase whose process can use its device no more, and of one that finds none."""
WHEELS = ROOT / "runs" / "wheels"
CHILD = [sys.executable, str(Path(__file__).resolve())]
"""The command of a phase; its flags follow."""


# ---- the parent: standard library only, so that it outlives whatever happens in a phase


class Run:
    """One call of the command: starts its phases and watches over them."""

    def __init__(self, out: Path, minutes: float, *, smoke: bool):
        self.out, self.end, self.smoke = out, time.time() + 60 * minutes, smoke
        self.scratch = Path(tempfile.mkdtemp(prefix="quarter_hour_"))
        self.rows, self.log = out / "rows.jsonl", out / "log.txt"
        out.mkdir(parents=True, exist_ok=True)
        self.before = len(self.rows.read_text().splitlines()) if self.rows.exists() else 0
        unpack(WHEELS, self.scratch / "site")
        sys.path += importable(self.scratch / "site")
        caches = Path(tempfile.gettempdir()) / "quarter_hour_caches"  # one for all runs on this machine
        self.environment = {
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_COMPILE_THREADS": "8",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        } | os.environ

    def write(self, kind: str, **row: Any) -> None:
        """Append a row."""
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind} | row | {"date": datetime.date.today().isoformat()}) + "\n")
        print(f"{kind}: " + " ".join(f"{name}={value}" for name, value in row.items()), flush=True)

    def phase(self, name: str, limit: float) -> None:
        """Run a phase, and once more without the cases that it had begun if it crashed or hung."""
        if name == "flash" and flash_impl() is None:
            return self.write("skipped", phase=name, why="neither flash-attn-4 nor flash_attn_3 is there (docs/gpu.md)")
        if name == "trl" and (missing := not_importable("trl", "datasets", "dill", "multiprocess")):
            why = f"no {missing}: install it, or put wheels into {WHEELS.relative_to(ROOT)} (docs/gpu.md)"
            return self.write("skipped", phase=name, why=why)
        for attempt in (1, 2):
            left = min(limit, self.end - time.time())
            if left < LEAST:
                return self.write("skipped", phase=name, why="no time was left")
            print(f"== {name}, attempt {attempt}: {left:.0f} s", flush=True)
            started = time.time()
            code, why = self._watch(name, left)
            print(f"== {name}: {why or 'done'} after {time.time() - started:.0f} s", flush=True)
            if code == NO_DEVICE:
                sys.exit("no CUDA device: nothing to measure here (--smoke rehearses with tiny sizes on a CPU)")
            if why:
                self.write("stopped", phase=name, case=running(self.scratch), note=why)
            if code == 0 or why.startswith("beyond"):
                return

    def _watch(self, name: str, limit: float) -> tuple[int, str]:
        """The exit code of a phase, and how it ended if it did not end by itself."""
        flags = ["--phase", name, "--out", str(self.out), "--minutes", str(limit / 60), "--scratch", str(self.scratch)]
        started, silence = time.time(), SILENCE if name in PHASES else limit
        child = subprocess.Popen(CHILD + flags + ["--smoke"] * self.smoke, env=self.environment, start_new_session=True)
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                now = time.time()
                silent = now - max(started, self.log.stat().st_mtime if self.log.exists() else 0)
                if now > started + limit + (GRACE if now < self.end else 0):
                    return -signal.SIGKILL, f"beyond its limit of {limit:.0f} s, killed"
                if silent > silence:
                    return -signal.SIGKILL, f"silent for {silent:.0f} s, killed"
        finally:  # whatever the phase has started ends with it, also if this process is stopped
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        code = child.returncode
        if code in (0, DEVICE_FAILED, NO_DEVICE):
            return code, ""
        return code, f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def unpack(wheels: Path, site: Path) -> None:
    """Unpack all wheels of a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)


def importable(site: Path) -> list[str]:
    """The folders that make the modules of unpacked wheels importable."""
    return [str(folder) for folder in (site, site / "nvidia_cutlass_dsl" / "python_packages") if folder.is_dir()]


def not_importable(*modules: str) -> str:
    """The first of some modules that is neither installed nor among the wheels; "" if all are there."""
    return next((name for name in modules if importlib.util.find_spec(name) is None), "")


def flash_impl() -> str | None:
    """The name by which PyTorch activates the newest FlashAttention that is there."""
    folders = [Path(folder) for folder in sys.path]
    if any((folder / "flash_attn" / "cute").is_dir() for folder in folders):
        return "FA4"
    return "FA3" if any((folder / "flash_attn_3").is_dir() for folder in folders) else None


def running(scratch: Path) -> str | None:
    """The case that had begun and not ended; None between two."""
    lines = (scratch / "cases").read_text().splitlines() if (scratch / "cases").exists() else []
    return lines[-1].removeprefix("begun ") if lines and lines[-1].startswith("begun ") else None


def parent(options: argparse.Namespace) -> int:
    """Run all phases; returns 1 if a case failed, was cut, or gave wrong numbers."""
    run = Run(options.out, options.minutes, smoke=options.smoke)
    limits = PHASES | ON_REQUEST
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
    try:
        for name in options.only.split(",") if options.only else PHASES:
            run.phase(name, 900 if options.smoke else limits[name])
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(run.scratch, ignore_errors=True)
        rows = gpu_table.read(run.rows) if run.rows.exists() else []
        print("\n" + gpu_table.report(rows), flush=True)
    return min(len(gpu_table.failed(rows[run.before :])), 1)


# ---- a phase: its cases, in order of value


class Phase:
    """Runs the cases of a phase, each once even if the phase is started again."""

    def __init__(self, out: Any, scratch: Path):
        self.out, self.scratch = out, scratch
        self._record = scratch / "cases"
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        self._begun = {line.removeprefix("begun ") for line in lines if line.startswith("begun ")}

    def case(self, name: str, call: Callable[[], None]) -> None:
        """Run a case unless an earlier process had begun it; an error of the device ends the process."""
        name = f"{self.out.every_row['phase']}: {name}"
        if name in self._begun:
            return
        with self._record.open("a") as file:
            file.write(f"begun {name}\n")
        self.out.say(f"-- {name}: {self.out.left:.0f} s left")
        try:
            call()
        except Exception as error:  # outside of what writes its row
            self.out.say(traceback.format_exc())
            self.out.write("stopped", case=name, note=f"{type(error).__name__}: {error}"[:300])
        with self._record.open("a") as file:
            file.write(f"ended {name}\n")
        if self.out.device_failed:
            sys.exit(DEVICE_FAILED)

    def step(self, model: str, rows: str, engine: str, *, checkpointed: bool = False, **options: Any) -> None:
        """Time a step (`gpu_cases.step_case`)."""
        import gpu_cases as gpu

        call = functools.partial(gpu.step_case, self.out, self.scratch, model, rows, engine)
        name = ", ".join([model, rows, engine, *["checkpointed"] * checkpointed])
        self.case(name, functools.partial(call, checkpointed=checkpointed, **options))

    def both(self, model: str, rows: str, *, tree: int, linear: int, **options: Any) -> None:
        """Time the baseline, with whose gradient all others are compared, and the tree; print the speed-up."""
        self.step(model, rows, "linear", repeats=linear, **options)
        self.step(model, rows, "tree", repeats=tree, **options)
        self.say_speedups()

    def say_speedups(self) -> None:
        """Print the table of all rows so far."""
        self.out.say("\n" + gpu_table.markdown(*gpu_table.table(gpu_table.read(self.out.path))))


def right(phase: Phase) -> None:
    import gpu_cases as gpu

    for name in ("environment", "ceilings", "self_checks", "attention_correctness", "head_correctness"):
        phase.case(name, functools.partial(getattr(gpu, name), phase.out))
    phase.case("steps", functools.partial(gpu.step_correctness, phase.out))


def headline(phase: Phase) -> None:
    phase.both("0.6b", "synthetic 0.847 4096", tree=4, linear=2)  # all rows are leaves: the plain case first
    phase.both("0.6b", "tau_airline 2", tree=4, linear=2)
    phase.step("0.6b", "tau_airline 2", "linear, every row", repeats=1)
    phase.both("0.6b", "tau_airline 2", tree=3, linear=1, checkpointed=True)
    phase.both("0.6b", "tau_airline 21", tree=5, linear=3)


def flash(phase: Phase) -> None:
    import gpu_cases as gpu

    phase.case("self_checks", functools.partial(gpu.self_checks, phase.out, ("varlen",)))
    last = [row for row in gpu_table.read(phase.out.path) if row["kind"] == "self_check"][-1]
    if last["right"]:  # else the steps would run another backend under this name
        phase.both("0.6b", "tau_airline 2", tree=3, linear=1)
        gpu.attention_sweep(phase.out, phase.case, only=("plain flash", "varlen"))


def sweep(phase: Phase) -> None:
    import gpu_cases as gpu

    gpu.attention_sweep(phase.out, phase.case)


def large(phase: Phase) -> None:
    import gpu_cases as gpu

    model = "8b" if gpu.memory_bytes() > 120e9 else "4b"
    phase.both(model, "tau_airline 21", tree=3, linear=1, checkpointed=True)
    phase.both(model, "tau_airline 21", tree=3, linear=1)
    phase.step(model, "tau_airline 2", "tree", repeats=2, checkpointed=True)


def trl(phase: Phase) -> None:
    def grpo() -> None:
        import gpu_trl

        gpu_trl.grpo(phase.out, phase.scratch)

    phase.case("grpo", grpo)


def detail(phase: Phase) -> None:
    import gpu_cases as gpu

    phase.case("profile", functools.partial(gpu.profile, phase.out))
    if "triton" in gpu.runnable(gpu.DEVICE):
        phase.step("0.6b", "tau_airline 2", "tree, triton", backend="triton")
    phase.step("0.6b", "tau_airline 2", "tree, eager layers", compile_layers=False)
    longest = max(map(len, gpu.batch("tau_airline 21", phase.out.smoke)))
    for budget in (None, longest, longest // 2, longest // 4):
        phase.step(
            "0.6b", "tau_airline 21", f"tree, budget {budget}", kind="memory", budget=budget, repeats=1, waits=True
        )
    phase.both("0.6b", "unshared 16", tree=2, linear=2)  # the control
    phase.both(gpu.MOE, "tau_airline 21", tree=2, linear=1)


def tests(phase: Phase) -> None:
    import gpu_cases as gpu

    phase.case("tests", functools.partial(gpu.kernel_tests, phase.out))


def blocks(phase: Phase) -> None:
    import gpu_cases as gpu

    phase.case("blocks", functools.partial(gpu.block_sizes, phase.out))


def child(options: argparse.Namespace) -> None:
    """Run one phase in this process."""
    if options.phase in ("flash", "trl"):
        sys.path += importable(options.scratch / "site")
    import torch

    import gpu_cases as gpu

    if not gpu.CUDA:
        if not options.smoke:
            sys.exit(NO_DEVICE)
        gpu.rehearse()
    if options.phase == "flash":
        torch.nn.attention.activate_flash_attention_impl(flash_impl())
    out = gpu.Out(options.out, options.minutes, smoke=options.smoke, phase=options.phase, **gpu.provenance())
    globals()[options.phase](Phase(out, options.scratch))


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--minutes", type=float, help=f"at most so many ({MINUTES}; a rehearsal takes what it takes)")
    parser.add_argument("--only", default="", help="phases, separated by commas")
    parser.add_argument("--smoke", action="store_true", help="a rehearsal with tiny sizes")
    parser.add_argument("--phase", choices=PHASES | ON_REQUEST, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.minutes = options.minutes or (60.0 if options.smoke else MINUTES)
    if unknown := set(filter(None, options.only.split(","))) - set(PHASES | ON_REQUEST):
        parser.error(f"--only {min(unknown)}: the phases are {', '.join(PHASES | ON_REQUEST)}")
    if options.phase:
        child(options)
        return 0
    return parent(options)


if __name__ == "__main__":
    sys.exit(main())
