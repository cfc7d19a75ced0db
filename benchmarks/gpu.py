"""The GPU benchmark: correctness and speed of tree attention, speed and memory of whole steps.

Run: make bench-gpu, or python benchmarks/gpu.py [--minutes 8.7] [--stages correctness,attention,...] [--out FOLDER].
Every stage is a separate process with a share of the remaining time, so one that crashes or hangs does not affect the
others. Rows are appended to FOLDER (benchmarks/results) as they are measured; a row records what was skipped for lack
of time. Earlier stages write which backends are correct and fast to gpu_tuned.json in FOLDER. Nothing is
downloaded: weights are random, trees have the shapes in benchmarks/shapes. --smoke runs all of it with tiny sizes, on a
CPU too.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SHARES = {
    "correctness": 0.2,
    "attention": 0.22,
    "head": 0.04,
    "steps": 0.34,
    "nothing_shared": 0.05,
    "memory": 0.08,
    "ablation": 0.07,
}
"""Stages in their order, and how much of the time each may take; what one leaves goes to those after it."""
GRACE = 10
"""Seconds after which a stage that does not look at the clock is ended."""


def stage(name: str, folder: Path, until: float, smoke: bool, group: str | None) -> None:
    """One stage, or one group of its cases, in this process."""
    from gpu_rows import Out

    out = Out(folder, until)
    if name == "correctness":
        from gpu_correctness import run, run_group

        if group:
            sys.exit(0 if run_group(out, group, smoke) else 3)
    elif name == "attention":
        from gpu_attention import run
    elif name == "head":
        from gpu_head import run
    else:
        import gpu_steps

        run = getattr(gpu_steps, name)
    run(out, smoke)


def within(command: list[str], timeout: float) -> int | None:
    """Run a command; returns its exit code, or None if it took too long and was ended with its children."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def all_stages(names: list[str], folder: Path, minutes: float, smoke: bool) -> int:
    """Run every stage in a separate process; returns the number of failed ones."""
    end, failed = time.time() + 60 * minutes, 0
    for number, name in enumerate(names):
        shares = sum(SHARES[other] for other in names[number:])
        left = end - time.time()
        limit = left * SHARES[name] / shares
        print(f"== {name}: {limit:.0f} s of {left:.0f} s", flush=True)
        if limit < 5:
            print(f"== {name}: skipped, no time left", flush=True)
            continue
        command = [sys.executable, __file__, "--stage", name, "--until", str(time.time() + limit), "--out", str(folder)]
        start = time.time()
        code = within(command + ["--smoke"] * smoke, limit + GRACE)
        said = "ended: it took too long" if code is None else f"failed with code {code}" if code else "done"
        failed += code != 0
        print(f"== {name}: {said} after {time.time() - start:.0f} s", flush=True)
    return failed


def one_memory_pool() -> None:
    """Let the CUDA allocator grow its segments (expandable segments), if the driver supports it."""
    if "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return
    trial = "import torch; assert torch.ones(1 << 28, device='cuda').sum() > 0"
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if within([sys.executable, "-c", trial], 60) != 0:
        del os.environ["PYTORCH_ALLOC_CONF"]
        print("expandable segments do not work here: the allocator is left as it is", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.7, help="for everything")
    parser.add_argument("--stages", default=",".join(SHARES), help=", ".join(SHARES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the rows")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--stage", choices=SHARES, help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        stage(options.stage, options.out, options.until, options.smoke, options.group)
        return 0
    names = options.stages.split(",")
    unknown = [name for name in names if name not in SHARES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; there are {', '.join(SHARES)}")
    import torch

    if not torch.cuda.is_available() and not options.smoke:
        print("no CUDA device: nothing to measure here (--smoke runs it with tiny sizes on a CPU)", file=sys.stderr)
        return 2
    # Later stages and runs reuse compiled kernels.
    for variable, name in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(variable, str(Path.home() / ".cache" / "treetrain" / name))
    # Each stage compiles a few small graphs; worker processes would take longer to start and stop.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if torch.cuda.is_available():
        one_memory_pool()
    return min(all_stages(names, options.out, options.minutes, options.smoke), 1)


if __name__ == "__main__":
    sys.exit(main())
