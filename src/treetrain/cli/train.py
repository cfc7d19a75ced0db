"""`treetrain train`: from files of trajectories to a trained model folder, by `TreeTrainer`."""

import dataclasses
import difflib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from treetrain.models.rows import ReadRows
    from treetrain.trainers.tree_trainer import TreeTrainer

USAGE = """
  treetrain train config.yaml
  treetrain train config.yaml --learning_rate 1e-5 --output_dir out2
  treetrain train rollouts.jsonl --model Qwen/Qwen3-0.6B --output_dir out
  treetrain train rollouts.jsonl --model ./policy --loss grpo --updates_per_batch 2 --output_dir next
  torchrun --nproc-per-node 8 -m treetrain train rollouts.jsonl --model Qwen/Qwen3-8B --fsdp full_shard

A YAML file holds names and values of the arguments below; flags outweigh it. All arguments of
transformers.TrainingArguments are known, and mean what they mean there."""


def _field(text: str, default: Any = None, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **more})


@dataclasses.dataclass
class DataArguments:
    """What is trained on, and which model.

    Raises:
        ValueError: no data, no model, or arguments that contradict each other.
    """

    data: list[str] = dataclasses.field(
        default_factory=list,
        metadata={"help": "Files of token rows or of conversations: JSONL (plain or .gz), Parquet, Arrow."},
    )
    model: str = _field("Hub id, local folder, or a built-in random preset: tiny, small.", "")
    eval_data: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "Files held out for evaluation, read as the training files are."}
    )
    eval_fraction: float = _field("Share of the groups that is held out for evaluation, 0 to below 1.", 0.0)
    format: str = _field(
        "What the files hold; auto: what the first row looks like.", "auto", choices=["auto", "tokens", "chat"]
    )
    view: str = _field(
        "Conversations as whole transcripts, or every LLM call as its own row.",
        "transcript",
        choices=["transcript", "calls"],
    )
    tools: str | None = _field("JSON file of tool schemas for conversations that bring none.")
    chat_template: str | None = _field("Instead of the tokenizer's: chatml (built in, keeps prefixes) or a file.")
    tokenizer: str | None = _field("Tokenizer to use instead of the model's own; a hub id, a folder or a preset.")
    memory_map: str | None = _field("Arrow file to keep the rows in, for more rows than fit in memory.")
    ref_model: str | None = _field("The reference policy; not given: the model as it is before training.")
    lora_r: int = _field("Columns of LoRA's matrices (peft); 0 trains the whole model.", 0)
    lora_alpha: int | None = _field("LoRA's update is scaled by alpha / r; not given: r.")
    lora_target_modules: list[str] = dataclasses.field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Modules that get matrices, or all-linear."}
    )
    ema_decay: float | None = _field("Keep a moving average of the weights, and save it as a model too (0.999).")
    early_stopping_patience: int | None = _field(
        "Stop after so many evaluations without a better metric_for_best_model."
    )
    threads: int | None = _field("CPU threads; not given: torch's choice.")

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("no data file given; name at least one")
        if not self.model:
            raise ValueError("no model given; give --model a hub id, a folder or a preset (tiny, small)")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction is {self.eval_fraction}; give a number from 0 to below 1")
        if self.eval_fraction and (self.eval_data or self.memory_map):
            raise ValueError("eval_fraction goes with neither eval_data nor memory_map: give eval_data")


def run(argv: Sequence[str]) -> int:
    """Run the command; see `treetrain.cli.main`."""
    given, arguments = parse_arguments(argv)
    from transformers.trainer_utils import set_seed
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading and saving

    if given.threads is not None:
        import torch

        torch.set_num_threads(given.threads)
    set_seed(arguments.seed)
    trainer, notes = _trainer(given, arguments)
    if trainer.is_world_process_zero():
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    resume: Any = arguments.resume_from_checkpoint
    trainer.how_to_resume = _command_that_resumes(argv, trainer.args.world_size)
    trainer.train(resume_from_checkpoint=resume not in ("false", "False") and (resume in ("true", "True") or resume))
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        _print(trainer)
    return 0


def _command_that_resumes(argv: Sequence[str], ranks: int) -> str:
    if ranks > 1:  # how they were started is not known
        return "the same command and --resume_from_checkpoint true"
    words, flag = list(argv), "--resume_from_checkpoint"
    if flag in words:
        at = words.index(flag)
        del words[at : at + 2]
    return shlex.join(["treetrain", "train", *words, flag, "true"])


def parse_arguments(argv: Sequence[str]) -> tuple[DataArguments, Any]:
    """The arguments of a command line. Raises ValueError."""
    import torch  # noqa: F401  # where it is missing, this says so best
    from transformers import HfArgumentParser

    from treetrain.trainers.arguments import TreeArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; treetrain train --help lists what there is")

    parser = Parser(
        (DataArguments, TreeArguments),  # type: ignore[arg-type]
        prog="treetrain train",
        usage=f"treetrain train [FILE ... | config.yaml] [--NAME VALUE ...]\n{USAGE}",
        allow_abbrev=False,
    )
    words = list(argv)
    files = words[: next((at for at, word in enumerate(words) if word.startswith("-")), len(words))]
    words = words[len(files) :]
    # What stands later outweighs what stands before.
    for path in [file for file in files if file.endswith((".yaml", ".yml"))]:
        files.remove(path)
        words = _words_of(path, parser) + words
    words += ["--data", *files] if files else []
    given, arguments, *unknown = parser.parse_args_into_dataclasses(
        words, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown[-1]:
        raise ValueError(_no_argument(unknown[-1][0].lstrip("-").partition("=")[0], parser))
    return given, arguments


def _words_of(path: str, parser: Any) -> list[str]:
    """A file as a command line. Raises ValueError for a file that is no such mapping, or a name that is no argument."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no names with values; give lines such as `learning_rate: 1e-5`")
    words: list[str] = []
    for name, value in found.items():
        if name not in {action.dest for action in parser._actions}:
            raise ValueError(f"{path}: {_no_argument(str(name), parser)}")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(one if isinstance(one, str) else json.dumps(one) for one in values)]
    return words


def _no_argument(name: str, parser: Any) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), [action.dest for action in parser._actions], 1)
    return f"{name} is no argument{f'; did you mean {close[0]}?' if close else ''}; treetrain train --help lists all"


def _trainer(given: DataArguments, arguments: Any) -> "tuple[TreeTrainer, tuple[str, ...]]":
    """The trainer of a run, and what the user should know of its rows."""
    from transformers import EarlyStoppingCallback

    from treetrain.models.loading import load_model
    from treetrain.trainers.callbacks import WeightAverage
    from treetrain.trainers.run_page import RunPageCallback
    from treetrain.trainers.tree_trainer import TreeTrainer

    read, eval_rows = _rows(given, arguments)
    model = load_model(given.model, seed=arguments.seed)
    model.config.name_or_path = given.model
    callbacks: list[Any] = [RunPageCallback()]
    if given.ema_decay is not None:
        callbacks.append(WeightAverage(given.ema_decay))
    if given.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(given.early_stopping_patience))
    trainer = TreeTrainer(
        model,
        arguments,
        read.rows,
        eval_rows or None,
        ref_model=None if given.ref_model is None else load_model(given.ref_model, seed=arguments.seed),
        peft_config=_adapter(given),
        processing_class=_tokenizer(given, read),
        callbacks=callbacks,
    )
    return trainer, read.notes


def _rows(given: DataArguments, arguments: Any) -> "tuple[ReadRows, Sequence[Any]]":
    """Training rows and held-out ones; of several processes the first one reads first, for a mapped file."""
    from treetrain.models.rows import read_rows

    names = ("model", "tokenizer", "format", "view", "tools", "chat_template")
    how = {name: getattr(given, name) for name in names}
    with arguments.main_process_first(desc="reading rows"):
        read = read_rows(given.data, memory_map=given.memory_map, **how)
    if given.eval_data:
        return read, read_rows(given.eval_data, **how).rows
    if given.eval_fraction:
        kept, held = _hold_out(read.rows, given.eval_fraction, seed=arguments.seed)
        return dataclasses.replace(read, rows=kept), held
    return read, []


def _hold_out(rows: Sequence[Any], fraction: float, *, seed: int) -> tuple[list[Any], list[Any]]:
    """Rows kept and rows held out: whole groups (else whole trees), drawn by the seed, at least one each.

    Raises:
        DataError: there is only one group, so nothing can be held out without tearing it apart.
    """
    import numpy as np

    from treetrain.errors import DataError
    from treetrain.trainers.groups import make_groups

    groups = make_groups(rows)
    if len(groups) < 2:
        raise DataError(
            f"eval_fraction is {fraction}, but the {len(rows)} rows are one group or tree, which is never torn apart; "
            "give eval_data, files of their own"
        )
    count = min(max(round(fraction * len(groups)), 1), len(groups) - 1)
    drawn = np.random.default_rng([seed, len(groups)]).permutation(len(groups))[:count]
    held = set(groups.rows_of(drawn).tolist())
    return [row for n, row in enumerate(rows) if n not in held], [row for n, row in enumerate(rows) if n in held]


def _tokenizer(given: DataArguments, read: "ReadRows") -> Any:
    """What belongs beside the model, with the template it was trained on; token rows can do without any."""
    from treetrain.data.rendering import chat_template_text
    from treetrain.errors import DataError
    from treetrain.models.loading import load_tokenizer

    try:
        tokenizer = read.tokenizer or load_tokenizer(given.tokenizer or given.model)
    except DataError:
        if given.tokenizer is not None:
            raise
        return None
    if given.chat_template is not None:
        tokenizer.chat_template = chat_template_text(given.chat_template)
    return tokenizer


def _adapter(given: DataArguments) -> Any:
    """LoRA without dropout: a shared token would get one mask where every row has its own."""
    if not given.lora_r:
        return None
    from peft import LoraConfig

    targets = given.lora_target_modules
    return LoraConfig(
        r=given.lora_r,
        lora_alpha=given.lora_alpha or given.lora_r,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _print(trainer: "TreeTrainer") -> None:
    from treetrain.cli.output import console, megabytes, pairs

    steps = [record for record in trainer.state.log_history if "tree/flat_tokens" in record]
    evaluations = [record["eval_nll"] for record in trainer.state.log_history if "eval_nll" in record]
    flat, unique, seconds = (
        sum(step[f"tree/{name}"] for step in steps) for name in ("flat_tokens", "unique_tokens", "seconds")
    )
    rows = [("steps", f"{trainer.state.global_step:,}")]
    if steps:
        rows[0] = ("steps", f"{rows[0][1]}, loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}")
        rows += [
            ("tokens", f"{flat:,} flat, {unique:,.0f} unique, overlap {1 - unique / flat:.3f}"),
            ("speed", f"{flat / seconds:,.0f} flat tokens/s in forward and backward, {seconds:,.1f} s"),
            ("peak memory", megabytes(steps[-1]["tree/peak_memory_bytes"])),
        ]
    if evaluations:
        rows.insert(1, ("held out", f"{evaluations[0]:.4f} -> {evaluations[-1]:.4f} nats per token"))
    rows += [("execution", trainer.args.execution), ("model", os.path.abspath(trainer.args.output_dir or "."))]
    console().print(pairs(rows))
