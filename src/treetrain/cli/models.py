"""`treetrain models`: which models are exact on a tree, and why others are refused."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treetrain.cli.common import Parser, console, pairs, print_json, table

if TYPE_CHECKING:
    from treetrain.models.loading import FamilyTable

SUMMARY = (
    "Which models are exact on a tree, as the tests found for every causal LM class of transformers; or whether one "
    "model is, from its configuration, without reading its weights. Exit code 1 if that one is refused."
)
REFUSED = 1


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("models", SUMMARY)
    text = "Answer for one model: hub id, local folder or preset. Only its config.json is read."
    parser.option("model", text)
    parser.json_option()
    return parser


def run(argv: Sequence[str]) -> int:
    """Parse, look up or check, print; 1 if the one model asked for is refused."""
    options = make_parser().parse_args(argv)
    from treetrain.models.loading import FamilyTable

    found = FamilyTable.packaged()
    if options.model is not None:
        answer = _one(options.model, found)
        if options.json:
            print_json(answer)
        else:
            console().print(pairs(answer.items()))
        return REFUSED if answer["verdict"] == "refused" else 0
    if options.json:
        print_json(dataclasses.asdict(found))
        return 0
    made = table(
        ("model_type", "verdict", "float64", "float32", "bfloat16", "layers tested, or why not"),
        [
            (one.model_type, one.verdict, *one.errors, ", ".join(one.layers) if one.verdict == "exact" else one.reason)
            for one in found.classes
        ],
        title=f"causal LM classes of transformers {found.transformers}; layers decide, not names: ask with --model",
    )
    made.columns[1].justify = made.columns[-1].justify = "left"
    made.caption = (
        "errors of the gradient against every row by itself: relative in float64 and float32, in bfloat16 over that of "
        "the bfloat16 rows"
    )
    console().print(made)
    return 0


def _one(name: str, families: "FamilyTable") -> dict[str, str]:
    """The verdict on one model, and the reason; for one that passes the check, what the tests found for its class."""
    from treetrain.core.errors import UnsupportedModel
    from treetrain.models.loading import check_config, load_config

    config = load_config(name)
    answer = {"model": name, "model_type": config.get_text_config().model_type}
    try:
        checked = check_config(config) is not None
    except UnsupportedModel as error:
        return answer | {"verdict": "refused", "reason": str(error)}
    found = families.find(config.model_type)
    if not checked or found is None or found.verdict != "exact":
        reason = "its class is not among those that the tests found exact; treetrain verify proves it on your rows"
        return answer | {"verdict": "untried", "reason": reason}
    reason = "its layers pass the check, and the gradients of a small model of its class are those of the rows"
    errors = f"relative error {found.errors[0]} in float64, {found.errors[1]} in float32"
    return answer | {"verdict": "exact", "reason": f"{reason} ({errors})"}
