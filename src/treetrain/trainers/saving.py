"""Models that are in shards, saved as one process would save them."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from treetrain.engine.ranks import is_sharded


def save_whole(model: Any, folder: str | Path, processing_class: Any = None, *, write: bool) -> None:
    """Save a model, or its adapter, as a folder for `from_pretrained`; a collective call where it is in shards.

    Args:
        processing_class: saved beside it; None: nothing.
        write: whether this process writes the files; of several one must.
    """
    state = whole_state(model) if is_sharded(model) else None
    if write:
        model.save_pretrained(folder, **({} if state is None else {"state_dict": state}))
        if processing_class is not None:
            processing_class.save_pretrained(folder)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name in CPU memory on the first rank, nothing on the others; a collective call.

    What is frozen beside an adapter is left out.
    """
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=hasattr(model, "peft_config")
    )
    state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    # Tied weights have several names, of which the first is gathered whole.
    first: dict[nn.Parameter, str] = {}
    same = {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: state.get(same.get(name, name), tensor) for name, tensor in state.items()}
