"""`treetrain models`: which models are exact on a tree, and why others are refused."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from treetrain.cli.common import Parser, console, pairs, print_json, table

SUMMARY = (
    "Which models are exact on a tree, as the tests found for every causal LM class of transformers; or whether one "
    "model is, from its configuration, without reading its weights. Exit code 1 if that one is refused."
)
EXAMPLES = ("", "--model Qwen/Qwen3-Next-80B-A3B-Instruct", "--model ./my-model --json")
REFUSED = 1


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("models", SUMMARY, EXAMPLES)
    text = "Answer for one model: hub id, local folder or preset. Only its config.json is read."
    parser.option("model", text)
    parser.json_option()
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, look up or check, print; 1 if the one model asked for is refused."""
    options = make_parser().parse_args(argv)
    if options.model is None:
        _list(options.json)
        return 0
    answer = _one(options.model)
    if options.json:
        print_json(answer)
    else:
        parameters = answer["parameters"]
        rows = [
            ("model", f"{answer['model']} ({answer['model_type']})"),
            ("layers", ", ".join(f"{count} {kind}" for kind, count in answer["layers"].items())),
            ("cost", f"known; {parameters:,} parameters" if parameters else "cannot be counted"),
            ("verdict", f"{answer['verdict']}: {answer['reason']}"),
        ]
        console().print(pairs(rows))
    return REFUSED if answer["verdict"] == "refused" else 0


def _list(as_json: bool) -> None:
    from treetrain.models.loading import VERDICTS, FamilyTable

    found = FamilyTable.packaged()
    if as_json:
        print_json({"transformers": found.transformers, "classes": [dataclasses.asdict(one) for one in found.classes]})
        return
    out = console()
    made = table(
        ("model_type", "verdict", "float64", "float32", "bfloat16", "layers tested, or why not"),
        [
            (one.model_type, one.verdict, *one.errors, ", ".join(one.layers) if one.verdict == "exact" else one.reason)
            for one in found.classes
        ],
    )
    made.columns[1].justify = made.columns[-1].justify = "left"
    out.print(made)
    counts = ", ".join(f"{len(found.of(verdict))} {verdict}" for verdict in VERDICTS)
    out.print(
        f"causal LM classes of transformers {found.transformers}: {counts}. Layers decide, not names; --model asks for "
        "one model.\nErrors are of the gradient against every row by itself: relative in float64 and float32; in "
        "bfloat16 over that of the bfloat16 rows.",
        markup=False,
    )


def _one(name: str) -> dict[str, Any]:
    """The verdict on one model, and its parameter count if known."""
    from treetrain.engine.costs import count_config
    from treetrain.errors import UnsupportedModel
    from treetrain.models.loading import check_config, load_config

    config = load_config(name)
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ["unnamed"] * text.num_hidden_layers)
    try:
        made = check_config(config) is not None
        verdict, reason = _tested(config.model_type) if made else ("untried", "it is checked when it is loaded")
    except UnsupportedModel as error:
        verdict, reason = "refused", str(error)
    try:
        parameters = count_config(config).parameters
    except UnsupportedModel:
        parameters = None
    layers = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    answer = {"model": name, "model_type": text.model_type, "layers": layers}
    return answer | {"verdict": verdict, "reason": reason, "parameters": parameters}


def _tested(model_type: str) -> tuple[str, str]:
    """Verdict and reason for a model that passes the check, by what the tests found for its class."""
    from treetrain.models.loading import FamilyTable

    found = FamilyTable.packaged().find(model_type)
    if found is None or found.verdict != "exact":
        what = "is not among those tested" if found is None else f"was {found.verdict} in the tests: {found.reason}"
        return "untried", f"it passes the check, but its class {what}; treetrain verify proves it on your rows"
    double, single, ratio = found.errors
    low = f"; in bfloat16 {ratio} times that of the rows" if ratio else ""
    reason = "its layers pass the check, and the gradients of a small model of its class are those of the rows"
    return "exact", f"{reason} (relative error {double} in float64, {single} in float32{low})"
