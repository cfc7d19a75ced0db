"""Time of `score` and its backward against `forward_backward`, on the works of the CPU benchmark.

Run: python benchmarks/score.py [work ...] [--repeats 5] [--dry-run]. Five minutes on two cores.

Both compute the same cross-entropy. `forward_backward` knows it beforehand, so its head computes gradients together
with log-probabilities; `score` returns log-probabilities first. They alternate in one process, a fresh one for each
work; ratios of neighbours, medians of processor time. Further rows have budgets of a quarter and a half of the tree,
under which `score` runs the parts again whose graphs do not fit. Rows are appended to results/score.csv; a work that
has its rows at this commit is left out.
"""

import os
import statistics
import time

import rows
from workloads import load_workload, model_30m

WORKS = ("tool agent, think blocks dropped", "sampled answers")


def measure(name: str, repeats: int, dry_run: bool) -> None:
    """Both ways on one work, in this process."""
    if not dry_run and rows.has("score", work=name):
        return print(f"{name}: has its rows at this commit")
    import torch

    import treetrain as tt

    rows.keep_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, batch = model_30m(), load_workload(name)
    tree = tt.build_tree(batch)
    loss = tt.losses.sft()
    normaliser = loss.normaliser(batch)
    weights = [torch.from_numpy(row.weights[1:].copy()).float() for row in batch]
    tokens = tt.TreeEngine(model).plan(tree).layout.num_tokens
    for budget in (None, tokens // 4, tokens // 2):
        engine = tt.TreeEngine(model, budget=budget)

        def streamed(engine=engine) -> None:
            engine.forward_backward(tree, loss)

        def scored(engine=engine) -> tt.Scored:
            found = engine.score(tree, mask=weights)
            total = -sum((w * row).sum() for w, row in zip(weights, found.logprobs)) / normaliser
            total.backward()  # type: ignore[union-attr]
            found.backward()
            return found

        seconds: dict[str, list[float]] = {"streamed": [], "scored": []}
        for _ in range(repeats + 1):
            for way, run in (("streamed", streamed), ("scored", scored)):
                model.zero_grad(set_to_none=False)
                start = time.process_time()
                last = run()
                seconds[way].append(time.process_time() - start)
        pairs = list(zip(seconds["streamed"][1:], seconds["scored"][1:]))
        ratios = [streamed / scored for streamed, scored in pairs]
        assert isinstance(last, tt.Scored)
        row = {
            "work": name,
            "budget": budget or "",
            "computed_tokens": last.computed_tokens,
            "parts": last.parts,
            "graphs": last.plan.scores_first,
            "recomputed_tokens": last.recomputed_tokens,
            "forward_backward_seconds": f"{statistics.median(a for a, _ in pairs):.3f}",
            "score_seconds": f"{statistics.median(b for _, b in pairs):.3f}",
            "speedup": f"{statistics.median(ratios):.3f}",
            "speedup_min": f"{min(ratios):.3f}",
            "speedup_max": f"{max(ratios):.3f}",
            "rounds": repeats,
        }
        rows.report("score", row, dry_run=dry_run)


if __name__ == "__main__":
    rows.run_each(WORKS, measure, __doc__, repeats=rows.count(5), dry_run=rows.DRY_RUN)
