"""A trainer of TRL with shared prefixes inside Ray Train's `TorchTrainer`; see `ray_tree_trainer.py`.

    python -m examples.cluster.ray_trl --workers 2 --output /shared/runs/first

Any trainer of TRL or transformers goes in the place of `SFTTrainer`. The mixin makes its checkpoints whole, so that a
worker that is lost in a save costs no more than the steps since the one before.
"""

import ray
from datasets import Dataset
from examples.cluster.ray_tree_trainer import launch, make_parser
from examples.trl_sft import recorded_games, tokenizer_of_games
from trl import SFTConfig, SFTTrainer

import treetrain as tt


class SafeSFTTrainer(tt.SafeCheckpointsMixin, SFTTrainer):
    """TRL's trainer, with checkpoints that survive kills."""


def train(config: dict) -> None:
    """Run in every worker."""
    args = SFTConfig(
        config["output"],
        max_steps=config["steps"],
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        assistant_only_loss=True,
        max_length=None,
        save_steps=config["save_steps"],
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=not config["gpus"],
        ddp_backend=None if config["gpus"] else "gloo",
    )
    rows = Dataset.from_dict({"messages": [game["messages"] for game in recorded_games()]})
    trainer = SafeSFTTrainer(tt.load_model("tiny"), args, train_dataset=rows, processing_class=tokenizer_of_games())
    tt.share_prefixes(trainer)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    ray.train.report(trainer.state.log_history[-1] | {"step": trainer.state.global_step})


if __name__ == "__main__":
    launch(train, **vars(make_parser("TRL's SFTTrainer on a Ray cluster.").parse_args()))
