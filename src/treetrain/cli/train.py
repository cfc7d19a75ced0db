"""`treetrain train`: from files of trajectories to a trained model folder, by `TreeTrainer`."""

import argparse
import copy
import dataclasses
import json
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetrain.cli.common import Parser, at_least, console, json_object, pairs, print_notes, read
from treetrain.core.errors import nearest, quoted

if TYPE_CHECKING:
    import yaml
    from peft import LoraConfig
    from transformers import HfArgumentParser

    from treetrain.logs.records import Json
    from treetrain.trainers.arguments import TreeArguments
    from treetrain.trainers.tree_trainer import TreeTrainer

SUMMARY = (
    "From files of trajectories to a trained model folder; every shared prefix is computed once. A YAML file before "
    "the flags holds names and values of these arguments; flags outweigh it. The other arguments of "
    "transformers.TrainingArguments mean what they mean there. On several processes: torchrun --nproc-per-node 8 -m "
    "treetrain train rollouts.jsonl --model Qwen/Qwen3-8B --output_dir out --fsdp"
)
FIRST = {
    "data": ("files", "view", "train", "eval_data"),
    "model": ("model", "lora", "ref_model", "bf16", "gradient_checkpointing"),
    "loss": ("loss", "loss_kwargs", "temperature", "updates_per_batch", "minibatches"),
    "budget": ("budget", "tokens_per_step"),
    "run": (
        *("output_dir", "dry_run", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type"),
        *("eval_strategy", "logging_steps", "report_to", "save_steps", "resume_from_checkpoint"),
    ),
}
"""The arguments that `--help` shows, by group; `--help-all` shows the others behind them."""
SHORTER = {
    "files": "Logs: JSONL, JSON, Parquet, Arrow, plain or packed, or folders.",
    "view": "Conversations whole, or a row per call.",
    "train": "The answers that are trained.",
    "model": "Hub id, folder, or a built-in random preset: tiny, small.",
    "lora": """Train an adapter: peft.LoraConfig as JSON, '{"r": 16}'.""",
    "ref_model": "The reference policy; not given: the model before training.",
    "bf16": "Compute in bfloat16; weights stay in float32.",
    "gradient_checkpointing": "Keep the inputs of layers alone; run layers again in backward.",
    "temperature": "The sampler's temperature, for policy losses.",
    "updates_per_batch": "Passes over a batch before the next one.",
    "minibatches": "Optimizer steps of a pass over a batch.",
    "budget": "Tokens alive at once (4096), or bytes beside model, gradients and optimizer state (8GiB). Not given: "
    "what the device has free.",
    "tokens_per_step": "Tokens of a step, about: groups stay whole.",
    "output_dir": "Folder of the run: checkpoints, logs, the trained model.",
    "dry_run": "Print steps, tokens, plan and memory; train and write nothing.",
    "num_train_epochs": "Passes over the data.",
    "max_steps": "Optimizer steps; above 0 they outweigh num_train_epochs.",
    "learning_rate": "The largest learning rate of the schedule.",
    "lr_scheduler_type": "linear, cosine, warmup_stable_decay, ...",
    "eval_strategy": "When eval_data is evaluated.",
    "logging_steps": "Log every so many steps.",
    "report_to": "tensorboard, wandb, trackio, mlflow, ...",
    "save_steps": "A checkpoint every so many steps.",
    "resume_from_checkpoint": "true: the newest checkpoint of output_dir; or a folder.",
}
"""What `--help` says in a line; `--help-all` has the whole texts."""
WIDEST = 100
"""Columns of the help."""


YAML_BYTES, YAML_DEPTH = 1 << 20, 20
"""A file of options that is larger, or nested deeper, is an error."""


def run(argv: Sequence[str]) -> int:
    """Run the command; see `treetrain.cli.main`."""
    options, arguments = parse_arguments(argv)
    from transformers.utils import logging

    from treetrain.trainers.run_folder import check_contents

    folder = Path(str(arguments.output_dir))
    resume = arguments.resume_from_checkpoint
    resume = {"true": True, "false": None}.get(str(resume).lower(), resume)
    how_to_set = "--{} true"
    check_contents(
        folder,
        resume=resume,
        overwrites=arguments.overwrite_output_dir,
        models=[model for model in (options.model, options.ref_model) if model],
        how=how_to_set.format("overwrite_output_dir"),
    )
    if arguments.process_index == 0:
        print_notes([f"the run {'would be' if options.dry_run else 'is'} written to {folder.absolute()}"])
    logging.disable_progress_bar()  # for loading and saving
    if options.dry_run:
        return _dry_run(options, arguments, folder, resume)
    trainer, notes = _trainer(options, arguments)
    if trainer.is_world_process_zero():
        print_notes(notes)
    trainer.how_to_resume = "the same command and --resume_from_checkpoint true"
    trainer.how_to_set = how_to_set
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.log_metrics("train", result.metrics)
    if trainer.eval_dataset is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.trained_on = options.files
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        what = "model" if options.lora is None else "adapter"
        console().print(f"the {what} is in {folder.absolute()}", markup=False, soft_wrap=True)
    return 0


def make_parser() -> "HfArgumentParser":
    """Make the parser of the command's own options and of all `TreeArguments`."""
    import torch  # noqa: F401  # gives the clearest error if it is missing
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.hf_argparser import string_to_bool

    from treetrain.trainers.arguments import REFUSED, TreeArguments

    class TrainParser(Parser, HfArgumentParser):
        """`Parser` with the arguments of a dataclass; its help comes in groups."""

        lists_all = "--help-all"

        def format_help(self, *, everything: bool = False) -> str:
            """The arguments of `FIRST` alone, or all but those that are refused."""
            named = {action.dest: action for action in reversed(self._actions)}  # not the `--no_...` of a flag
            formatter = _HelpFormatter(self.prog)
            formatter.add_usage("%(prog)s [CONFIG.yaml] FILE [FILE ...] --model MODEL [options]", [], [])
            formatter.add_text(self.description)
            groups = {title: [named[name] for name in names if name in named] for title, names in FIRST.items()}
            if everything:
                shown = [action for actions in groups.values() for action in actions]
                hidden = (*REFUSED, "save_on_each_node", "help", "help_all")  # SafeCheckpointsMixin refuses it
                rest = [action for action in self._actions if action not in shown and action.dest not in hidden]
                of_transformers = {field.name for field in dataclasses.fields(TrainingArguments)}
                groups["more of treetrain"] = [action for action in rest if action.dest not in of_transformers]
                groups["more of transformers.TrainingArguments"] = [a for a in rest if a.dest in of_transformers]
            for title, actions in groups.items():
                formatter.start_section(title)
                formatter.add_arguments(actions if everything else map(_shorter, actions))
                formatter.end_section()
            if not everything:
                formatter.add_text(f"{self.prog} {self.lists_all} shows the other arguments.")
            return formatter.format_help()

    class HelpAll(argparse.Action):
        """Prints the whole help."""

        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            assert isinstance(parser, TrainParser)
            print(parser.format_help(everything=True), end="")
            parser.exit()

    parser = TrainParser("train", SUMMARY, dataclass_types=[TreeArguments])
    parser.add_argument("--help-all", "--help_all", action=HelpAll, nargs=0, default=argparse.SUPPRESS)
    parser.row_options()
    parser.option("eval_data", "Files of rows to evaluate on.", [], nargs="+")
    parser.option("model", "Hub id, local folder, or a built-in random preset: tiny, small.", required=True)
    parser.option("ref_model", "The reference policy; not given: the model as it is before training.")
    text = """Train an adapter: options of peft.LoraConfig as JSON, '{"r": 16, "lora_alpha": 32}'."""
    parser.option("lora", text, type=json_object)
    text = "Stop after so many evaluations without a better metric_for_best_model."
    parser.option("early_stopping_patience", text, type=at_least(1))
    text = "Check everything and print steps, tokens, sharing, plan and predicted memory; train and write nothing."
    parser.option("dry_run", text, False, nargs="?", const=True, type=string_to_bool)
    next(action for action in parser._actions if action.dest == "report_to").nargs = "+"  # a list is allowed too
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """An option on a line or two: its first name, a short word for its value, its text and its default."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((WIDEST, 50)).columns, WIDEST)
        super().__init__(prog, max_help_position=36, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = self._format_args(action, self._get_default_metavar_for_optional(action)) if action.nargs != 0 else ""
        return f"{action.option_strings[0]} {value}" if action.option_strings else str(action.metavar)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.choices is not None and len(",".join(map(str, action.choices))) > 24:
            return lambda size: (default_metavar,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind = getattr(action.type, "__name__", "")
        return {"int": "N", "whole_number": "N", "float": "X", "string_to_bool": "BOOL"}.get(kind, "VALUE")

    def _get_help_string(self, action: argparse.Action) -> str:
        plain = action.default is None or action.default is False or action.default in ([], "", -1, argparse.SUPPRESS)
        return f"{action.help or ''}{'' if plain else ' (default: %(default)s)'}"


def _shorter(action: argparse.Action) -> argparse.Action:
    """The action with our text, if it has one."""
    shorter = copy.copy(action)
    shorter.help = SHORTER.get(action.dest, action.help)
    return shorter


def parse_arguments(argv: Sequence[str]) -> "tuple[Namespace, TreeArguments]":
    """Options of data and model, and the `TreeArguments`. Raises ValueError."""
    parser = make_parser()
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    files = [name for name in names if not name.endswith((".yaml", ".yml"))]
    configured = [word for name in names if name not in files for word in _words(name)]
    words = [*files, *configured, *argv[len(names) :]]  # the last value of an argument counts
    arguments, options = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    return options, arguments


def read_yaml(path: str) -> object:
    """Read a YAML file of plain values.

    Raises:
        ValueError: no YAML, no UTF-8, a key that is there twice, an alias, or more than a file of options needs.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            content = file.read(YAML_BYTES + 1)
        if len(content) > YAML_BYTES:
            raise ValueError(f"{path} has more than {YAML_BYTES:,} bytes, which no file of options needs")
        text = content.decode("utf-8-sig")
        _check_events(yaml.parse(text, yaml.SafeLoader), path)
        _check_keys(yaml.compose(text, yaml.SafeLoader), path)
        try:
            return yaml.safe_load(text)
        except ValueError as error:  # a date or a number that Python does not have
            raise ValueError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error


def _check_events(events: "Iterable[yaml.Event]", path: str) -> None:
    """Refuse aliases, of which a few lines stand for more than any memory, and values that are nested without bound."""
    import yaml

    depth = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{path} line {line}: *{event.anchor} is an alias; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > YAML_DEPTH:
            raise ValueError(f"{path} line {line}: values are nested more than {YAML_DEPTH} deep")


def _check_keys(node: "yaml.Node | None", path: str) -> None:
    import yaml

    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(f"{path}: {quoted(name)} is there twice, in lines {lines[name]} and {line}; keep one")
            lines[name] = line
            _check_keys(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value, path)


def _words(path: str) -> list[str]:
    """Turn the names and values of a YAML file into command-line words; see `read_yaml` for errors.

    As words they are converted and checked like flags. `HfArgumentParser.parse_yaml_file` passes values as YAML reads
    them, so that `learning_rate: 1e-5` is a text, and it knows none of the options beside `TreeArguments`.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no names with values; give lines such as `learning_rate: 1e-5`")
    words: list[str] = []
    for name, value in values.items():
        if value is not None:
            several = value if isinstance(value, list) else [value]
            each = [json.dumps(one) if isinstance(one, dict) else str(one) for one in several]
            words = [*each, *words] if name == "files" else [*words, f"--{name}", *each]
    return words


LORA_NAMES = {"rank": "r", "lora_r": "r", "alpha": "lora_alpha"}
"""Names of LoRA options elsewhere, and in peft."""


def _adapter(options: "dict[str, Json]") -> "LoraConfig":
    from peft import LoraConfig

    known = {field.name: field.default for field in dataclasses.fields(LoraConfig)}
    settings: dict[str, Json] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    for name, value in options.items():
        if name not in known:
            meant = LORA_NAMES.get(name)
            meant = nearest(name, known) if meant is None else f"did you mean {meant}?"
            raise ValueError(f"--lora: peft.LoraConfig has no option {name!r}; {meant}")
        if isinstance(value, str) and isinstance(known[name], int | float):
            raise ValueError(f"--lora: {name} is {value!r}; give one like {json.dumps(known[name])}, without quotes")
    try:
        return LoraConfig(**settings)
    except Exception as error:
        raise ValueError(f"--lora: {error}") from error


def _dry_run(options: Namespace, arguments: "TreeArguments", folder: Path, resume: str | bool | None) -> int:
    """Print what the run would do, after the checks of a run."""
    from treetrain.trainers.dry_run import DryTrainer, predict

    if arguments.world_size > 1:
        raise ValueError(
            f"--dry_run is one process, and these are {arguments.world_size}: leave torchrun out, or predict a step "
            "over ranks with treetrain simulate"
        )
    with tempfile.TemporaryDirectory() as scratch:
        arguments.output_dir, arguments.report_to = scratch, []  # the trainer makes its folder
        trainer, notes = _trainer(options, arguments, DryTrainer)
        print_notes(notes)
        trainer.how_to_resume, trainer.how_to_set = "the same command without --dry_run", "--{} true"
        found = predict(trainer, folder, resume)
    out = console()
    out.print(pairs(found.facts()))
    if found.plan is not None:
        out.print(f"\nthe plan of the largest call:\n\n{found.plan}", markup=False)
    out.print("\nnothing was trained or written")
    return 0


def _trainer(
    options: Namespace, arguments: "TreeArguments", kind: "type[TreeTrainer] | None" = None
) -> "tuple[TreeTrainer, Sequence[str]]":
    """Make the trainer of a run, a `TreeTrainer` or of another class; also return notes on its rows."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    from treetrain.core.errors import DataError
    from treetrain.logs.chat import chat_template_text
    from treetrain.models.loading import load_model, load_tokenizer
    from treetrain.trainers.tree_trainer import TreeTrainer

    metric, when = arguments.metric_for_best_model, getattr(arguments.eval_strategy, "value", "no")
    if when != "no" and not options.eval_data:
        raise ValueError(f"--eval_strategy is {when}, and there are no rows to evaluate: give --eval_data")
    if options.early_stopping_patience is not None and (metric is None or when == "no"):
        raise ValueError(
            "--early_stopping_patience counts evaluations without a better metric: give --eval_data, "
            f"--eval_strategy (now {when}) and --metric_for_best_model (now {metric}), such as nll"
        )
    found = read(options)
    eval_rows = read(options, options.eval_data).rows if options.eval_data else None
    tokenizer = found.tokenizer
    if tokenizer is None:
        with suppress(DataError):  # token rows need none; it is saved beside the model
            tokenizer = load_tokenizer(options.model)
    if tokenizer is not None and options.chat_template is not None:
        tokenizer.chat_template = chat_template_text(options.chat_template)
    model = load_model(options.model, seed=arguments.seed)
    model.config.name_or_path = options.model
    callbacks: list[TrainerCallback] = []
    if options.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(options.early_stopping_patience))
    adapter = None
    if options.lora is not None:
        adapter = _adapter(options.lora)
    trainer = (kind or TreeTrainer)(
        model,
        arguments,
        found.rows,
        eval_rows,
        ref_model=None if options.ref_model is None else load_model(options.ref_model, seed=arguments.seed),
        peft_config=adapter,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    return trainer, found.notes
