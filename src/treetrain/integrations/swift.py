# pyright: reportMissingImports=false
"""ms-swift: every prefix that the rows of an optimizer step share is computed once, in its trainer of fine-tuning.

`TreeSeq2SeqTrainer` takes the place of `swift.trainers.Seq2SeqTrainer`. For `swift sft --external_plugins plugin.py` a
file of two lines does it::

    from swift.trainers import TrainerFactory
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = "treetrain.integrations.swift.TreeSeq2SeqTrainer"
"""

from typing import Any

from swift.trainers import Seq2SeqTrainer

from treetrain.core.hf.tree_mode import replaced
from treetrain.trainers.outputs import TreeOutput
from treetrain.trainers.share_prefixes import SharePrefixesMixin


class TreeSeq2SeqTrainer(SharePrefixesMixin, Seq2SeqTrainer):
    """ms-swift's trainer with shared prefixes. It logs no `token_acc` in training, which would need logits.

    Raises:
        ValueError: use_logits_to_keep=True, which cuts logits that no tree computes; and as `tt.share_prefixes`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.use_logits_to_keep:
            raise ValueError("use_logits_to_keep is True, which cuts logits: no tree computes any; leave it out")
        self.args.use_logits_to_keep = False  # None would be True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as ms-swift does, without the accuracy that it reads of logits beside the model's loss."""
        own = self.template.compute_sft_loss

        def compute_sft_loss(model: Any, inputs: Any, **options: Any) -> Any:
            outputs = own(model, inputs, **options)
            if isinstance(outputs, TreeOutput) and "labels" in inputs:
                outputs.logits = None  # type: ignore[attr-defined]
            return outputs

        with replaced(self.template, compute_sft_loss=compute_sft_loss):
            return super().compute_loss(model, inputs, *args, **kwargs)
