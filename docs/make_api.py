"""Writes docs/api.md, the reference of every public name, from signatures and docstrings: python docs/make_api.py"""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import treetrain as tt

PAGE = Path(__file__).with_name("api.md")
SECTIONS = {
    "Rows": [
        "Trajectory",
        "load",
        "from_messages",
        "group_advantages",
        "from_padded",
        "to_padded",
        "from_packed",
        "to_packed",
    ],
    "Trees": ["build_tree", "load_tree", "TokenTree", "Node", "NodeTrajectory", "stats"],
    "Models": ["load_model", "load_tokenizer"],
    "Gradients": ["logprobs", "values", "rewards", "TreeEngine", "StepResult", "Scored"],
    "A model of your own": ["pack", "attention", "prediction_logprobs", "Packed", "PackedPart"],
    "Inside the trainers people use": [
        "share_prefixes",
        "SharePrefixesMixin",
        "PrefixGroupSampler",
        "group_batches",
        "TreeTrainer",
        "TreeArguments",
        "SafeCheckpointsMixin",
    ],
    "Plans": ["make_plan", "Plan", "CostModel", "ModelShape", "dispatch"],
    "Proofs": ["verify"],
    "Losses": [f"losses.{name}" for name in (*tt.losses.LOSSES, "value", "PolicyLoss", "Loss")],
    "Errors": ["DataError", "RanksDisagree", "UnsupportedModel"],
}
"""Public names that are not there yet are left out; one that is in no section is an error."""
USED = {
    "TokenTree": "from_nodes count num_tokens num_flat_tokens num_trajectories trajectories path paths trained_edges",
    "TreeEngine": "forward_backward score logprobs plan router_balance attention cost",
    "Scored": "backward plan parts recomputed_tokens",
    "SharePrefixesMixin": "",
    "TreeTrainer": "",
    "TreeArguments": "",
    "SafeCheckpointsMixin": "train step_size",
    "Plan": "explain explanation events num_parts peak_tokens recomputed_tokens",
    "CostModel": "from_shape seconds seconds_by peak_bytes bytes_by",
    "ModelShape": "named parameters counts",
    "losses.Loss": "sums_tokens normaliser total_weight check evaluate coefficients",
}
"""Members that users of a class call; of a class that is not named here, all that are public. Fields are as well."""
MADE_FOR_YOU = {"Scored", "Plan", "StepResult", "Packed", "PackedPart"}
"""Classes whose constructor no user calls."""
NOT_SHOWN = {"losses", "__version__"}
HEADINGS = "Args", "Arguments", "Returns", "Raises", "Metrics"


def public(name: str) -> Any:
    """What a name such as "losses.sft" stands for."""
    found: Any = tt
    for part in name.split("."):
        found = getattr(found, part)
    return found


def definition(found: Any) -> Any:
    """The syntax of a function or class, as it is written."""
    return ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]


def signature(node: ast.FunctionDef, name: str) -> str:
    """`name(arguments) -> type`, with the annotations as they are written and without self."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    pieces = [argument(*pair) for pair in zip(plain, defaults) if pair[0].arg not in ("self", "cls")]
    if given.vararg:
        pieces.append(f"*{argument(given.vararg)}")
    elif given.kwonlyargs:
        pieces.append("*")
    pieces += [argument(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults)]
    pieces += [f"**{argument(given.kwarg)}"] if given.kwarg else []
    returns = "" if node.returns is None or node.name == "__init__" else f" -> {written(node.returns)}"
    return call(name, pieces, returns)


def call(name: str, pieces: list[str], returns: str) -> str:
    """`name(pieces) -> type`, on one line if that is short."""
    line = f"{name}({', '.join(pieces)}){returns}".replace("'", '"')
    if len(line) <= 110:
        return line
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces).replace("'", '"') + f"){returns}"


def argument(node: ast.arg, default: ast.expr | None = None) -> str:
    """`name: type = default`."""
    typed = node.arg if node.annotation is None else f"{node.arg}: {written(node.annotation)}"
    return typed if default is None else f"{typed} = {ast.unparse(default)}"


def written(annotation: ast.expr) -> str:
    """An annotation without the quotes that keep it from being evaluated."""
    return annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)


def prose(doc: str | None) -> str:
    """A docstring as Markdown: headings in bold, their entries as lists."""
    lines, out, listing = inspect.cleandoc(doc or "").splitlines(), [], False
    for line in lines:
        heading = re.fullmatch(rf"({'|'.join(HEADINGS)}):\s*(.*)", line)
        entry = re.fullmatch(r" {4}(\**\w+(?:, \**\w+)*): (.*)", line)
        if heading:
            listing = True
            out += ["", f"**{heading[1]}:** {heading[2]}".strip(), *([] if heading[2] else [""])]
        elif listing and entry:
            names = ", ".join(f"`{name.strip()}`" for name in entry[1].split(","))
            out.append(f"- {names}: {entry[2]}")
        elif listing and line.startswith("        "):
            out.append(f"  {line.strip()}")
        elif listing and line.startswith("    "):
            out.append(line.strip())
        else:
            listing = listing and not line
            out += [line]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def fields(node: ast.ClassDef) -> list[str]:
    """What a class holds: annotated names with the sentence below each, or in the metadata of its field."""
    found = []
    for statement, following in zip(node.body, [*node.body[1:], None]):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, said = statement.target.id, ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = str(following.value.value)
        elif isinstance(statement.value, ast.Call):
            given = {word.arg: word.value for word in statement.value.keywords}
            said = ast.literal_eval(given["metadata"])["help"] if "metadata" in given else ""
        if not name.startswith("_") and "ClassVar" not in ast.unparse(statement.annotation):
            said = f". {' '.join(said.split())}" if said else ""
            found.append(f"- `{name}: {ast.unparse(statement.annotation)}`{said}")
    return found


def members(node: ast.ClassDef, shown: str | None) -> list[str]:
    """A class's methods and properties: those named, else all that are public and say what they are for."""
    out = []
    for inner in node.body:
        if not isinstance(inner, ast.FunctionDef) or inner.name.startswith("_") or not ast.get_docstring(inner):
            continue
        if shown is not None and inner.name not in shown.split():
            continue
        decorators = {ast.unparse(decorator) for decorator in inner.decorator_list}
        if decorators & {"property", "cached_property"}:
            out.append(f"**`.{inner.name}`** {prose(ast.get_docstring(inner))}")
        else:
            out.append(f"```python\n.{signature(inner, inner.name)}\n```\n\n{prose(ast.get_docstring(inner))}")
    return out


def entry(name: str) -> str:
    """One public name: its signature, its docstring, and what a class holds and does."""
    found, parts = public(name), [f"### `tt.{name}`"]
    node = definition(found)
    if name.startswith("losses.") and name != "losses.Loss":  # options: fields of a class, or those that a preset takes
        options = [str(parameter) for parameter in inspect.signature(found).parameters.values()]
        parts.append(f"```python\n{call(f'tt.{name}', ['*', *options], '')}\n```")
    elif isinstance(node, ast.FunctionDef):
        return "\n\n".join([*parts, f"```python\n{signature(node, f'tt.{name}')}\n```", prose(found.__doc__)])
    if name == "TreeEngine":  # its settings, and some of what it tells, are those of its base
        node.body = [*definition(found.__base__).body, *node.body]
    if isinstance(node, ast.FunctionDef):
        return "\n\n".join([*parts, prose(found.__doc__)])
    makers = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
    makers = [] if name in MADE_FOR_YOU else makers
    parts += [f"```python\n{signature(maker, f'tt.{name}')}\n```" for maker in makers]
    parts.append(prose(found.__doc__))
    held = fields(node)
    parts += ["\n".join(held)] if held and not makers and name != "Plan" else []
    return "\n\n".join([*parts, *members(node, USED.get(name))])


def page() -> str:
    """The whole reference. Raises ValueError for a public name that is in no section."""
    known = {name.split(".")[0] for names in SECTIONS.values() for name in names} | NOT_SHOWN
    if unknown := set(tt.__all__) - known:
        raise ValueError(f"public names in no section of docs/make_api.py: {', '.join(sorted(unknown))}")
    out = [
        "# API reference",
        "Every public name of `import treetrain as tt`, written by `docs/make_api.py` from signatures and docstrings.",
    ]
    for title, names in SECTIONS.items():
        shown = [name for name in names if name.split(".")[0] in tt.__all__]
        out += [f"## {title}", *(entry(name) for name in shown)] if shown else []
    return "\n\n".join(out) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
