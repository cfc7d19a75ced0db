"""`treetrain train`: from files of trajectories to a trained model folder, by `TreeTrainer`."""

import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetrain.cli.common import Parser, ReadRows, at_least, console, pairs, print_notes, read

if TYPE_CHECKING:
    from treetrain.trainers.tree_trainer import TreeTrainer

SUMMARY = """From files of trajectories to a trained model folder; every shared prefix is computed once.

A YAML file before the flags holds names and values of the arguments below; flags outweigh it. All arguments of
transformers.TrainingArguments are known, and mean what they mean there. On several processes:

  torchrun --nproc-per-node 8 -m treetrain train rollouts.jsonl --model Qwen/Qwen3-8B --output_dir out --fsdp"""
EXAMPLES = (
    "rollouts.jsonl --model Qwen/Qwen3-0.6B --output_dir out",
    "rollouts.jsonl --model ./policy --loss grpo --updates_per_batch 2 --output_dir next",
    "config.yaml --learning_rate 1e-5 --output_dir out2",
)


def run(argv: Sequence[str]) -> int:
    """Run the command; see `treetrain.cli.main`."""
    options, arguments = parse_arguments(argv)
    import torch
    from transformers.trainer_utils import set_seed
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading and saving
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    set_seed(arguments.seed)
    trainer, notes = _trainer(options, arguments)
    first, resume = trainer.is_world_process_zero(), arguments.resume_from_checkpoint
    if first:
        print_notes(notes)
    trainer.how_to_resume = "the same command and --resume_from_checkpoint true"
    if trainer.args.world_size == 1:  # else the launcher is not known; the last flag of a name counts
        trainer.how_to_resume = shlex.join(["treetrain", "train", *argv, "--resume_from_checkpoint", "true"])
    words: Any = {"true": True, "false": False, None: False}
    trainer.train(resume_from_checkpoint=words.get(resume and resume.lower(), resume))
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if first:
        _print(trainer)
    return 0


def make_parser() -> Any:
    """The options of the command and all `TreeArguments`: a `transformers.HfArgumentParser`."""
    import torch  # noqa: F401  # gives the clearest error if it is missing
    from transformers import HfArgumentParser

    from treetrain.trainers.arguments import TreeArguments

    parser = Parser("train", SUMMARY, EXAMPLES, add_help=False)
    parser.row_options(nargs="*")
    parser.option("memory_map", "Arrow file to keep the rows in, for more rows than fit in memory.")
    parser.option("eval_data", "Files of rows to evaluate on.", [], nargs="+")
    parser.option(
        "eval_fraction", "Part of the groups (else trees) to evaluate on instead of training.", 0.0, type=float
    )
    parser.option("model", "Hub id, local folder, or a built-in random preset: tiny, small.")
    parser.option("ref_model", "The reference policy; not given: the model as it is before training.")
    parser.option("lora_r", "Rank of LoRA's matrices (peft); 0 trains the whole model.", 0, type=at_least(0))
    parser.option("lora_alpha", "LoRA's update is scaled by alpha / r; not given: r.", type=int)
    parser.option("lora_target_modules", "Modules that get matrices, or all-linear.", ["all-linear"], nargs="+")
    parser.option("ema_decay", "Keep a moving average of the weights, and save it as a model too (0.999).", type=float)
    text = "Stop after so many evaluations without a better metric_for_best_model."
    parser.option("early_stopping_patience", text, type=at_least(1))
    parser.option("threads", "CPU threads; not given: torch's choice.", type=at_least(1))

    class TrainParser(Parser, HfArgumentParser):
        """`Parser` with the arguments of a dataclass."""

    return TrainParser("train", SUMMARY, EXAMPLES, parents=[parser], dataclass_types=[TreeArguments])


def parse_arguments(argv: Sequence[str]) -> tuple[Namespace, Any]:
    """Options of data and model, and the `TreeArguments`. Raises ValueError."""
    parser, words = make_parser(), list(argv)
    for path in takewhile(lambda word: not word.startswith("-"), argv):
        if path.endswith((".yaml", ".yml")):
            words.remove(path)
            parser.set_defaults(**_read_yaml(path, parser))
    arguments, options, unknown = parser.parse_args_into_dataclasses(
        words, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        parser.error(f"{unknown[0].partition('=')[0]} is no argument")
    if not options.files:
        parser.error("no data file given; name at least one")
    if not options.model:
        parser.error("no model given; give --model a hub id, a folder or a preset (tiny, small)")
    if not 0 <= options.eval_fraction < 1:
        parser.error(f"eval_fraction is {options.eval_fraction}; give a number from 0 to below 1")
    if options.eval_fraction and (options.eval_data or options.memory_map):
        parser.error("eval_fraction goes with neither eval_data nor memory_map: give eval_data")
    return options, arguments


def _read_yaml(path: str, parser: Any) -> dict[str, Any]:
    """Values by argument name. Raises ValueError for a file with other contents."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no names with values; give lines such as `learning_rate: 1e-5`")
    actions = {action.dest: action for action in parser._actions}
    for name, value in values.items():
        if name not in actions:
            raise ValueError(f"{path}: {name} is no argument; treetrain train --help lists all")
        if actions[name].nargs in ("*", "+") and not isinstance(value, list):
            values[name] = [value]
    return {name: value for name, value in values.items() if value is not None}


def _trainer(options: Namespace, arguments: Any) -> "tuple[TreeTrainer, Sequence[str]]":
    """The trainer of a run, and notes on its rows."""
    from transformers import EarlyStoppingCallback

    from treetrain.models.loading import load_model
    from treetrain.trainers.groups import hold_out
    from treetrain.trainers.run_page import RunPageCallback
    from treetrain.trainers.tree_trainer import TreeTrainer, WeightAverage

    with arguments.main_process_first(desc="reading rows"):  # only the main process writes a mapped file
        found = read(options, memory_map=options.memory_map)
    rows, eval_rows = found.rows, read(options, options.eval_data).rows if options.eval_data else None
    if options.eval_fraction:
        rows, eval_rows = hold_out(rows, options.eval_fraction, seed=arguments.seed)
    model = load_model(options.model, seed=arguments.seed)
    model.config.name_or_path = options.model
    callbacks: list[Any] = [RunPageCallback()]
    if options.ema_decay is not None:
        callbacks.append(WeightAverage(options.ema_decay))
    if options.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(options.early_stopping_patience))
    adapter, targets = None, options.lora_target_modules
    if options.lora_r:
        from peft import LoraConfig

        adapter = LoraConfig(
            r=options.lora_r,
            lora_alpha=options.lora_alpha or options.lora_r,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            lora_dropout=0.0,  # a shared token would get one mask where every row has its own
            task_type="CAUSAL_LM",
        )
    trainer = TreeTrainer(
        model,
        arguments,
        rows,
        eval_rows,
        ref_model=None if options.ref_model is None else load_model(options.ref_model, seed=arguments.seed),
        peft_config=adapter,
        processing_class=_tokenizer(options, found),
        callbacks=callbacks,
    )
    return trainer, found.notes


def _tokenizer(options: Namespace, found: "ReadRows") -> Any:
    """The tokenizer to save beside the model, with the chat template of the rows; None is fine for token rows."""
    from treetrain.data.chat import chat_template_text
    from treetrain.errors import DataError
    from treetrain.models.loading import load_tokenizer

    try:
        tokenizer = found.tokenizer or load_tokenizer(options.tokenizer or options.model)
    except DataError:
        if options.tokenizer is not None:
            raise
        return None
    if options.chat_template is not None:
        tokenizer.chat_template = chat_template_text(options.chat_template)
    return tokenizer


def _print(trainer: "TreeTrainer") -> None:
    history = trainer.state.log_history
    losses = [record["loss"] for record in history if "loss" in record]
    evaluations = [record["eval_nll"] for record in history if "eval_nll" in record]
    flat, unique, seconds = (
        sum(record.get(f"tree/{name}", 0) for record in history) for name in ("flat_tokens", "unique_tokens", "seconds")
    )
    rows = [("steps", f"{trainer.state.global_step:,}")]
    if evaluations:
        rows.append(("held out", f"{evaluations[0]:.4f} -> {evaluations[-1]:.4f} nats per token"))
    if losses and flat:
        rows.append(("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
        rows.append(("tokens", f"{flat:,} flat, {unique:,.0f} unique, overlap {1 - unique / flat:.3f}"))
        rows.append(("speed", f"{flat / seconds:,.0f} flat tokens/s in forward and backward, {seconds:,.1f} s"))
    rows += [("execution", trainer.args.execution), ("model", os.path.abspath(trainer.args.output_dir or "."))]
    console().print(pairs(rows))
