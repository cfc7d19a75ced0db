"""Public names, signatures and laziness cannot change unnoticed."""

import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import treetrain as tt

ROOT = Path(__file__).parents[1]

SIGNATURES = {
    "dispatch": "(rows, cost, ranks, *, whole_rows=False)",
    "load_model": "(name_or_path, *, dtype='float32', seed=0, **options)",
    "load_tokenizer": "(name_or_path, **options)",
    "stats": "(rows, shape=None)",
    "attention": (
        "(query, key, value, tree, *, scale=None, window=None, chunk=None, softcap=None, sinks=None, layer=None, "
        "backend=None)"
    ),
    "pack": "(rows, *, mask=None, device='cpu')",
    "prediction_logprobs": "(hidden, head, packed, *, temperature=1.0, return_entropy=False)",
    "build_tree": "(sequences, *, merge=True, apart=None)",
    "from_packed": "(input_ids, position_ids, **facts)",
    "from_padded": "(input_ids, attention_mask, **facts)",
    "share_prefixes": "(trainer, budget=None, *, check=True, count='per trajectory')",
    "SharePrefixesMixin": "(*args, budget=None, check=True, count='per trajectory', **kwargs)",
    "to_packed": "(rows, position_ids, fill=0.0)",
    "token_logprobs": "(model, inputs, *, temperature=1.0, return_entropy=False, ids=None)",
    "group_batches": "(trainer, key='input_ids')",
    "PrefixGroupSampler": "(dataset, batch_size, *, key='input_ids', accumulation=1, processes=1, seed=0)",
    "group_advantages": ("(trajectories, *, divide_by_std=True, eps=0.0001, leave_one_out=False)"),
    "load": (
        "(path, *, tokenizer=None, format='auto', view='transcript', train='all', tools=None, chat_template=None, "
        "map=None, where=None, images='refuse', on_error='stop', vocab_size=None, max_positions=None, limit=None, "
        "collect=<class 'list'>, count='per trajectory')"
    ),
    "logprobs": (
        "(model, sequences, budget=None, temperature=1.0, *, return_entropy=False, return_values=False, "
        "value_head=None, mask=None)"
    ),
    "make_plan": "(rows, cost, *, budget=None, free_bytes=None)",
    "rewards": "(model, sequences, budget=None, *, head=None)",
    "SafeCheckpointsMixin": "(*args, **kwargs)",
    "values": "(model, sequences, budget=None, *, head=None)",
    "to_padded": "(rows, attention_mask, fill=0.0)",
    "verify": (
        "(model, trajectories, *, loss=None, temperature=1.0, tolerance=None, budget=None, value_head=None, "
        "all_gradients=False)"
    ),
    "Trajectory": (
        "(ids, *, loss_weights=None, advantages=None, old_logprobs=None, ref_logprobs=None, rollout_logprobs=None, "
        "teacher_logprobs=None, values=None, returns=None, reward=None, group=None, pair=None, chosen=None, id=None, "
        "key=None, episode=None, experts=None, sampling_mask=None, teacher_topk=None, images=None, image_token=None)"
    ),
    "from_messages": (
        "(rows, *, tokenizer=None, format='auto', view='transcript', train='all', tools=None, chat_template=None, "
        "map=None, where=None, on_error='stop', count='per trajectory')"
    ),
    "ModelShape": (
        "(*, layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied, experts=0, experts_per_token=0)"
    ),
    "CostModel": "(*, counts, speeds, device='cpu', links=None, beside=None)",
    "Plan": "(*, layout, part_of, parent, attach, kept, exported, prefill, scores_first='no', purpose=None)",
    "TreeEngine": "(model, *, budget=None, temperature=1.0, value_head=None, group=None, context=None, "
    "compile_layers=None, check=True)",
    "TreeTrainer": (
        "(model, args, train_dataset=None, eval_dataset=None, *, loss=None, ref_model=None, peft_config=None, "
        "processing_class=None, callbacks=None, optimizers=(None, None), optimizer_cls_and_kwargs=None)"
    ),
    "StepResult": "(*, loss_tensor, metric_sums, flat_tokens, unique_tokens, computed_tokens, recomputed_tokens, "
    "parts, attention=<factory>)",
}
CLIP = "clip=0.2, clip_low=None, clip_high=None"
PENALTIES = (
    "kl=0.0, kl_estimator='k3', entropy=0.0, log_entropy=False, importance_cap=None, "
    "importance_floor=None, importance_mode='token_truncate', off_policy_kl=None, value_coefficient=0.0, value_clip=0.2"
)
METHODS = {
    "Packed.split": "(self, per_prediction)",
    "Packed.forward_backward": "(self, loss_of, budget=None)",
    "TreeEngine.forward_backward": (
        "(self, trajectories, loss, normaliser=None, balance=None, *, sync=True, mask=None, adapter_names=None)"
    ),
    "TreeEngine.score": (
        "(self, rows, *, entropies=False, values=False, rewards=False, statistics=False, mask=None, ids=None, "
        "images=None, adapter_names=None)"
    ),
    "Scored.backward": "(self, *, sync=True)",
    "TreeEngine.router_balance": "(self, trajectories)",
    "TreeEngine.logprobs": "(self, trajectories, *, return_entropy=False, mask=None)",
    "TreeEngine.plan": "(self, trajectories)",
    "TreeEngine.teach": "(self, rows, k)",
    "TreeEngine.distill": "(self, rows, teacher, divergence='forward', normaliser=None)",
    "TreeEngine.warm_up": "(self, plan=None)",
    "Plan.events": "(self)",
    "Plan.explain": "(self)",
    "Plan.explanation": "(self)",
    "CostModel.from_shape": "(shape, device='cpu', *, dtype_bytes=4, checkpointing=False)",
    "CostModel.peak_bytes": "(self, plan)",
    "CostModel.seconds": "(self, plan)",
    "TokenTree.path": "(self, number)",
    "TokenTree.paths": "(self)",
    "ModelShape.named": "(name)",
    "losses.sft": "(*, reduction='token')",
    "losses.reinforce": f"(*, reduction='token', {PENALTIES})",
    "losses.ppo": f"(*, reduction='token', {CLIP}, on_policy=False, {PENALTIES})",
    "losses.grpo": f"(*, reduction='trajectory', {CLIP}, on_policy=False, {PENALTIES})",
    "losses.dapo": f"(*, clip_low=0.2, clip_high=0.28, on_policy=False, {PENALTIES})",
    "losses.dr_grpo": f"(*, {CLIP}, on_policy=False, length, {PENALTIES})",
    "losses.gspo": f"(*, clip_low=0.0003, clip_high=0.0004, on_policy=False, {PENALTIES})",
    "losses.dpo": "(*, beta=0.1)",
    "losses.distill": "(*, reduction='token', estimator='k3')",
    "losses.distill_topk": "(*, reduction='token', divergence='forward')",
    "losses.value": "(*, reduction='token', clip=0.2)",
}
OTHERS = {
    "Packed",
    "PackedPart",
    "Scored",
    "TreeArguments",
    "DataError",
    "RanksDisagree",
    "UnsupportedModel",
    "TokenTree",
    "losses",
    "__version__",
}


def plain_signature(function) -> str:
    """Names, kinds and defaults; annotations may improve freely."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters))


def look_up(name: str):
    found = tt
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_the_public_names_are_these_and_no_others():
    assert set(tt.__all__) == set(SIGNATURES) | OTHERS
    assert set(dir(tt)) == set(tt.__all__)


@pytest.mark.parametrize("name", [*SIGNATURES, *METHODS])
def test_a_public_signature_is_the_one_that_was_promised(name):
    assert plain_signature(look_up(name)) == (SIGNATURES | METHODS)[name]


def test_errors_are_value_errors_so_that_a_plain_except_catches_them():
    assert issubclass(tt.DataError, ValueError)
    assert issubclass(tt.UnsupportedModel, ValueError)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'log_probs'"):
        _ = tt.log_probs


def imported_by(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after running some code."""
    probe = f"import sys; {code}; print(*[m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    assert imported_by("import treetrain") == set()


def test_data_trees_and_plans_work_without_torch():
    code = (
        "import treetrain as tt; tree = tt.build_tree([[1, 2], [1, 3]]); shape = tt.ModelShape.named('qwen3-8b'); "
        "tt.make_plan(tree, tt.CostModel.from_shape(shape), budget='8GiB').explain(); "
        "tt.dispatch(tree, 'qwen3-8b', 2); tt.stats([[1, 2], [1, 3]], 'qwen3-8b')"
    )
    assert imported_by(code) == {"numpy"}


def test_the_package_is_typed_and_its_version_a_version():
    assert resources.files("treetrain").joinpath("py.typed").is_file()
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab]\d+|rc\d+)?", tt.__version__)


def test_data_structures_cannot_be_changed_once_made():
    trajectory = tt.Trajectory([1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.reward = 1.0  # type: ignore[misc]


def test_the_core_dependencies_are_light():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=~! ]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {"jaxtyping", "jinja2", "numpy", "packaging", "rich"}


@pytest.mark.parametrize("name", sorted(set(tt.__all__) - {"__version__", "losses"}))
def test_a_public_docstring_has_a_summary_and_names_every_argument(name):
    pytest.importorskip("transformers")
    found = getattr(tt, name)
    doc = inspect.getdoc(found) or ""
    first = doc.split("\n")[0]
    assert first.endswith(".") and not re.match("(Of|What)\\b", first), first
    if inspect.isfunction(found):
        for argument in inspect.signature(found).parameters:
            assert re.search(rf"\b{argument}\b", doc), f"{name} does not say what {argument} is"
