"""Throughput of two processes under FSDP2 against two independent ones that each train half of the batch.

Run: python benchmarks/fsdp_throughput.py. Two processes of one thread each, gloo, the 30M-parameter model of the
other benchmarks in float32, steps of sampled answers, no optimiser. Rounds alternate between the two ways, so that a
machine that slows down slows both; medians are compared. Independent processes start each step together and the slower
one counts. The target is 0.9 of their throughput. A row goes to results/fsdp_throughput.csv.
"""

import argparse
import statistics
import time

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import rows as result_rows
import treetrain as tt
from treetrain.losses import sft
from treetrain.models.costs import cost_if_countable
from treetrain.parallel.balance import dispatch
from workloads import model_30m, shaped

SIZE, WARMUP = 2, 1
BAR = 0.9


def batch(count: int) -> list[tt.Trajectory]:
    """About `count` of the sampled answers of the CPU benchmarks, evenly spaced."""
    rows = shaped("codet_humaneval")
    return rows[:: max(len(rows) // count, 1)]


def measure(rank: int, size: int, options: argparse.Namespace) -> tuple[dict[str, list[float]], int, int, int]:
    """Measure both ways alternately, in one of the two processes."""
    rows = batch(options.rows)
    model = model_30m()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    together = tt.TreeEngine(model, budget=options.budget)
    by_itself = tt.TreeEngine(model_30m(), budget=options.budget)
    shares = dispatch(tt.build_tree(rows), cost_if_countable(by_itself.model), SIZE)
    own = [rows[number] for number in shares[rank].tolist()]
    seconds: dict[str, list[float]] = {"together": [], "apart": []}
    for number in range(WARMUP + options.repeats):
        for name, engine in (("together", together), ("apart", by_itself)):
            engine.model.zero_grad(set_to_none=True)
            dist.barrier()
            started = time.perf_counter()
            result = engine.forward_backward(own, sft())
            took = max(together.ranks.gather(time.perf_counter() - started))
            if number >= WARMUP:
                seconds[name].append(took)
            if name == "together":
                computed = result.computed_tokens
    return seconds, computed, len(rows), sum(map(len, rows))


def main() -> None:
    """Measure, print and append a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a part")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="append no row")
    options = parser.parse_args()
    seconds, computed, count, flat = result_rows.on_ranks(measure, SIZE, options)[0]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = statistics.median(apart / one for one, apart in zip(seconds["together"], seconds["apart"]))
    print(f"together {medians['together']:.3f} s, apart {medians['apart']:.3f} s: {ratio:.3f} of the throughput")
    if not options.dry:
        result_rows.append(
            "fsdp_throughput",
            {
                "model": "model_30m",
                "processes": SIZE,
                "trajectories": count,
                "flat_tokens": flat,
                "computed_tokens": computed,
                "budget": options.budget,
                "together_seconds": f"{medians['together']:.3f}",
                "apart_seconds": f"{medians['apart']:.3f}",
                "repeats": options.repeats,
                "throughput_ratio": f"{ratio:.3f}",
                "bar": BAR,
            },
        )


if __name__ == "__main__":
    main()
