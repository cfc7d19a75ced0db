"""Models in the hands of transformers' tensor parallelism."""

from typing import Any

import treetrain as tt
from treetrain.errors import UnsupportedModel


def refusals(group: Any, folder: str, size: int) -> dict[str, str]:
    """What every entry says to a model that is loaded by its own `tp_plan`."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    cut = DistributedConfig(tp_plan="auto", tp_size=size)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=cut)
    rows = [tt.Trajectory([1, 2, 3]), tt.Trajectory([1, 2, 4])]
    calls = {
        "engine": lambda: tt.TreeEngine(model),
        "logprobs": lambda: tt.logprobs(model, rows),
        "verify": lambda: tt.verify(model, rows),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except UnsupportedModel as error:
            said[name] = str(error)
    return said
