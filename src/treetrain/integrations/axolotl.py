# pyright: reportMissingImports=false
"""Axolotl: every prefix that the rows of an optimizer step share is computed once, in Axolotl's own trainer.

Three lines of its configuration switch it on::

    plugins: [treetrain.integrations.axolotl.TreePlugin]
    tree_groups: input_ids   # rows with a common prefix meet in one step; a column may name the groups instead
    tree_budget: 8192        # tokens whose graph is alive at once, or "8GiB"; left out: the free memory
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from treetrain.trainers.group_batches import group_batches
from treetrain.trainers.share_prefixes import share_prefixes


class TreeArgs(BaseModel):
    """The plugin's settings."""

    tree_groups: str | None = "input_ids"
    """The `key` of `tt.group_batches`; null keeps Axolotl's order of rows."""
    tree_budget: int | str | None = None
    """The `budget` of `tt.share_prefixes`."""


class TreePlugin(BasePlugin):
    """Makes the trainer that Axolotl has built share prefixes."""

    def get_input_args(self) -> str:
        """Name the plugin's settings, which Axolotl adds to its own."""
        return f"{__name__}.{TreeArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Call `tt.group_batches` and `tt.share_prefixes` on the trainer.

        Raises:
            ValueError, UnsupportedModel, DataError: as these, and for sample_packing.
        """
        if cfg.sample_packing:
            raise ValueError(
                "sample_packing: true packs rows that share nothing; set it to false (padding costs nothing)"
            )
        if cfg.tree_groups:
            group_batches(trainer, cfg.tree_groups)
        share_prefixes(trainer, cfg.tree_budget)
