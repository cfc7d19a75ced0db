"""treetrain: train LLMs on branching agent trajectories, every shared prefix computed once, gradients exact."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Names are imported on first use: data and trees work without torch, and the command line starts fast.
_PUBLIC = {
    "DataError": "treetrain.core.errors",
    "RanksDisagree": "treetrain.core.errors",
    "UnsupportedModel": "treetrain.core.errors",
    "Trajectory": "treetrain.layers.trajectory",
    "group_advantages": "treetrain.logs.advantages",
    "from_messages": "treetrain.logs.load",
    "load": "treetrain.logs.load",
    "TokenTree": "treetrain.core.tree.token_tree",
    "build_tree": "treetrain.core.tree.token_tree",
    "ModelShape": "treetrain.shapes",
    "CostModel": "treetrain.core.planning.cost",
    "Plan": "treetrain.core.planning.plan",
    "dispatch": "treetrain.parallel.balance",
    "make_plan": "treetrain.shapes",
    "stats": "treetrain.models.work",
    "load_model": "treetrain.models.loading",
    "load_tokenizer": "treetrain.models.loading",
    "StepResult": "treetrain.core.losses.protocol",
    "TreeEngine": "treetrain.engine",
    "Scored": "treetrain.core.engine.score",
    "logprobs": "treetrain.autograd",
    "rewards": "treetrain.autograd",
    "values": "treetrain.autograd",
    "from_padded": "treetrain.trainers.batches",
    "from_packed": "treetrain.trainers.batches",
    "to_padded": "treetrain.trainers.batches",
    "to_packed": "treetrain.trainers.batches",
    "attention": "treetrain.own_model",
    "Packed": "treetrain.own_model",
    "PackedPart": "treetrain.own_model",
    "pack": "treetrain.own_model",
    "prediction_logprobs": "treetrain.own_model",
    "share_prefixes": "treetrain.trainers.share_prefixes",
    "SharePrefixesMixin": "treetrain.trainers.share_prefixes",
    "token_logprobs": "treetrain.trainers.token_logprobs",
    "PrefixGroupSampler": "treetrain.trainers.groups",
    "group_batches": "treetrain.trainers.group_batches",
    "SafeCheckpointsMixin": "treetrain.trainers.checkpoints",
    "TreeArguments": "treetrain.trainers.arguments",
    "TreeTrainer": "treetrain.trainers.tree_trainer",
    "verify": "treetrain.check.verify",
}
_MODULES = {"losses"}

__all__ = [
    "CostModel",
    "DataError",
    "ModelShape",
    "Packed",
    "PackedPart",
    "Plan",
    "PrefixGroupSampler",
    "RanksDisagree",
    "SafeCheckpointsMixin",
    "Scored",
    "SharePrefixesMixin",
    "StepResult",
    "TokenTree",
    "Trajectory",
    "TreeArguments",
    "TreeEngine",
    "TreeTrainer",
    "UnsupportedModel",
    "__version__",
    "attention",
    "build_tree",
    "dispatch",
    "from_messages",
    "from_packed",
    "from_padded",
    "group_advantages",
    "group_batches",
    "load",
    "load_model",
    "load_tokenizer",
    "logprobs",
    "losses",
    "make_plan",
    "pack",
    "prediction_logprobs",
    "rewards",
    "share_prefixes",
    "stats",
    "to_packed",
    "to_padded",
    "token_logprobs",
    "values",
    "verify",
]

if TYPE_CHECKING:
    from treetrain import losses as losses
    from treetrain.autograd import logprobs as logprobs
    from treetrain.autograd import rewards as rewards
    from treetrain.autograd import values as values
    from treetrain.check.verify import verify as verify
    from treetrain.core.engine.score import Scored as Scored
    from treetrain.core.errors import DataError as DataError
    from treetrain.core.errors import RanksDisagree as RanksDisagree
    from treetrain.core.errors import UnsupportedModel as UnsupportedModel
    from treetrain.core.losses.protocol import StepResult as StepResult
    from treetrain.core.planning.cost import CostModel as CostModel
    from treetrain.core.planning.plan import Plan as Plan
    from treetrain.core.tree.token_tree import TokenTree as TokenTree
    from treetrain.core.tree.token_tree import build_tree as build_tree
    from treetrain.engine import TreeEngine as TreeEngine
    from treetrain.layers.trajectory import Trajectory as Trajectory
    from treetrain.logs.advantages import group_advantages as group_advantages
    from treetrain.logs.load import from_messages as from_messages
    from treetrain.logs.load import load as load
    from treetrain.models.loading import load_model as load_model
    from treetrain.models.loading import load_tokenizer as load_tokenizer
    from treetrain.models.work import stats as stats
    from treetrain.own_model import Packed as Packed
    from treetrain.own_model import PackedPart as PackedPart
    from treetrain.own_model import attention as attention
    from treetrain.own_model import pack as pack
    from treetrain.own_model import prediction_logprobs as prediction_logprobs
    from treetrain.parallel.balance import dispatch as dispatch
    from treetrain.shapes import ModelShape as ModelShape
    from treetrain.shapes import make_plan as make_plan
    from treetrain.trainers.arguments import TreeArguments as TreeArguments
    from treetrain.trainers.batches import from_packed as from_packed
    from treetrain.trainers.batches import from_padded as from_padded
    from treetrain.trainers.batches import to_packed as to_packed
    from treetrain.trainers.batches import to_padded as to_padded
    from treetrain.trainers.checkpoints import SafeCheckpointsMixin as SafeCheckpointsMixin
    from treetrain.trainers.group_batches import group_batches as group_batches
    from treetrain.trainers.groups import PrefixGroupSampler as PrefixGroupSampler
    from treetrain.trainers.share_prefixes import SharePrefixesMixin as SharePrefixesMixin
    from treetrain.trainers.share_prefixes import share_prefixes as share_prefixes
    from treetrain.trainers.token_logprobs import token_logprobs as token_logprobs
    from treetrain.trainers.tree_trainer import TreeTrainer as TreeTrainer


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"treetrain.{name}")
    else:
        raise AttributeError(f"module 'treetrain' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
