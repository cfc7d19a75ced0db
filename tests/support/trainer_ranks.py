"""Functions that tests of trainers run on two processes."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.trainer_runs import BUILDERS, difference, train


def both(
    group: Any, name: str, folder: str, dtype: torch.dtype, steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Train with shared prefixes and without on these processes; how far they are apart, and rank 0's weights."""
    import datasets
    from accelerate.state import AcceleratorState, GradientState, PartialState

    datasets.disable_progress_bars()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    runs = []
    for shared in (True, False):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        runs.append(
            train(
                BUILDERS[name],
                Path(folder),
                shared=shared,
                dtype=dtype,
                steps=steps,
                evaluate=True,
                ddp_backend="gloo",
                **settings,
            )
        )
    assert runs[0].trainer.accelerator.num_processes == size
    found = difference(*runs)
    updates = torch.cat([x.flatten() for x in runs[0].updates.values()])
    return {"metrics": found.metrics, "weights": found.weights, "updates": found.updates, "own": updates.tolist()}
