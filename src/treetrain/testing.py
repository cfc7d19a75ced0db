"""Prove exactness in your own tests: the linear reference, the numerics contract, random forests of rows.

Needs pytest and hypothesis. For a model, a loss or an engine of your own:

```python
from treetrain.testing import PPO, SFT, check_contract

def test_my_model_is_exact():
    check_contract(my_small_model(), [SFT, PPO], examples=20)
```

`treetrain.verify` answers the same question for one model and your own rows, and needs no test library.
"""

from treetrain.check.contract import (
    PPO,
    SFT,
    Case,
    Errors,
    PureFloat64,
    RoundsToFloat32,
    as_dtype,
    check_contract,
    errors_of,
)
from treetrain.check.forests import bushy_rows, forests, trajectories, with_random_facts
from treetrain.check.linear import batch_loss, gradients, relative_error, score_row, score_rows

__all__ = [
    "PPO",
    "SFT",
    "Case",
    "Errors",
    "PureFloat64",
    "RoundsToFloat32",
    "as_dtype",
    "batch_loss",
    "bushy_rows",
    "check_contract",
    "errors_of",
    "forests",
    "gradients",
    "relative_error",
    "score_row",
    "score_rows",
    "trajectories",
    "with_random_facts",
]
