"""Every causal LM class of transformers is exact on a tree or refused by name, and a packaged table says which.

Each class is made small and run on a tree. In every run a sample of the classes is judged on one forest; the slow tests
judge all of them and hold the exact ones to the numerics contract on random forests and on real trajectories.
"""

import contextlib
import functools
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import treetrain as tt
from support import models
from support.plans import planned
from support.real_rows import SETS, around_the_fork, renumbered
from treetrain.check import linear
from treetrain.check.contract import (
    DOUBLE,
    PPO,
    RATIO,
    SFT,
    SINGLE,
    Errors,
    PureFloat64,
    Rows,
    as_dtype,
    clear_of_bounds,
    errors_of,
    expected,
    measured,
)
from treetrain.check.forests import VOCAB, with_random_facts
from treetrain.core.attention.rectangles import RectangleAttention
from treetrain.core.attention.schedule import PLAIN_ATTENTION
from treetrain.core.errors import UnsupportedModel
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.finders import check_model
from treetrain.models.loading import FILE, VERDICTS, ClassFound, FamilyTable

ROWS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 11, 12, 3, 2], [5, 6, 13, 14], [5, 6, 7, 8, 9, 10, 3, 4], [20, 21, 22]]
EXACT = 1e-10
"""Relative error of the whole gradient in float64, the library's float32 casts lifted; rounding is 1e-15."""
EXACT_WITH_CASTS = 1e-5
"""Where lifting the casts breaks the model's own code."""
KEPT_CASTS = "the library's own float32 casts could not be lifted"
ROUGH = "the rows' own float32 error is above 3e-6"
LARGEST = 1_500_000
"""Parameters of a model that is run."""
NAMES: dict[str, str] = dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))
"""model_type -> class, as transformers' AutoModelForCausalLM has them."""

WIDTHS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "rotary_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
    "is_decoder": True,  # models that may be made either way
}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("ffn_hidden_size", "zero_expert_num"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
}
LOW_RANK = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 8}
PER_LAYER_INPUT = {  # Gemma 3n and 4
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "global_head_dim": 8,
}
RECURRENT = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_head_dim", "mamba_d_head", "chunk_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
}
WINDOWS: dict[str, Any] = {
    "sliding_window": models.WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}
_SMALL_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}
_INDEXER = {"indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_head_dim": 8, "indexer_kv_heads": 1}
_NGRAMS = {"ngram_vocab_size_base": 50, "split_ngram_parts": 1, "ple_embed_dim": 16, "hc_lowrank": 4}
_SIGNS = {f"{kind}_{size}": 40 for kind in ("pronunciation", "shape") for size in ("vocab_size", "embed_dim")}
_CODEBOOKS = {"num_codebooks": 2, "pad_token_id": 36, "bos_token_id": 36}
PARTICULAR: dict[str, dict[str, Any]] = {  # what a class needs that no other does
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": models.WINDOW,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "logit_scale": 0.5,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "max_seq_len": 64,
    },
    "git": {"vision_config": _SMALL_VISION},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
    "qwen4_exp": _INDEXER | _NGRAMS | {"indexer_n_heads": 2, "layer_types": ["linear_attention", "indexed_attention"]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "roc_bert": _SIGNS,
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
PARTICULAR["qwen4_exp_text"] = PARTICULAR["qwen4_exp"]
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


class Verdict(NamedTuple):
    """The finding about one model class."""

    model_type: str
    model_class: str
    verdict: str
    """exact, refused, untried (neither could be shown here), or wrong (a bug of ours)."""
    reason: str = ""
    """The refusal, or why nothing was shown."""
    error: float | None = None
    """Relative error of the whole gradient in float64, against every row by itself."""
    single: float | None = None
    """The same in float32."""
    layers: tuple[str, ...] = ()
    """Kinds of layers of the model that was run: as its attention was asked, and as its configuration names others."""


def judge(model_type: str) -> Verdict:
    """Make it small, run it on a tree in one part and in parts of 7 tokens, and compare with the rows."""
    found = Verdict(model_type, NAMES[model_type], "untried")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = small_model(model_type)
        if model is None:
            return _judge_unbuilt(found)
        text = model.config.get_text_config()
        found = found._replace(layers=tuple(dict.fromkeys(getattr(text, "layer_types", None) or ())))
        try:
            check_model(model)
        except UnsupportedModel as error:
            return found._replace(verdict="refused", reason=str(error))
        return _run(found, model)


def _run(found: Verdict, model: nn.Module) -> Verdict:
    for context, bound in ((PureFloat64, EXACT), (contextlib.nullcontext, EXACT_WITH_CASTS)):
        with context():
            try:
                expected = _of_rows(model)
            except Exception as error:  # whatever its own forward says about fields that do not suit it
                found = found._replace(reason=f"the small model's own forward fails: {_line(error)}")
                continue
            try:
                with seen_by_attention() as asked:
                    worst = max(_error(model, expected, budget) for budget in (None, 7))
            except UnsupportedModel as error:
                assert all(p.grad is None for p in model.parameters()), "refused after gradients were made"
                return found._replace(verdict="refused", reason=str(error))
            except Exception as error:
                found = found._replace(verdict="wrong", reason=f"fails on a tree: {_line(error)}")
                continue
        found = found._replace(error=worst, layers=kinds_of(model, found.layers, asked))
        reason = "" if context is PureFloat64 else KEPT_CASTS
        return _in_float32(
            found._replace(verdict="exact" if worst <= bound else "wrong", reason=reason), model, expected
        )
    return found


def _in_float32(found: Verdict, model: nn.Module, truth: torch.Tensor) -> Verdict:
    single = as_dtype(model, torch.float32)
    expected = _of_rows(single)
    error = max(_error(single, expected, budget) for budget in (None, 7))
    rounding = linear.relative_error(expected, truth)
    close = error <= max(SINGLE, 3 * rounding)
    reasons = [reason for reason in (found.reason, ROUGH if rounding > SINGLE / 3 else "") if reason]
    return found._replace(single=error, reason="; ".join(reasons), verdict=found.verdict if close else "wrong")


def _of_rows(model: nn.Module) -> torch.Tensor:
    scores, _ = linear.score_rows(model, ROWS)
    return linear.gradients(model, -torch.cat(scores).mean())


def _error(model: nn.Module, expected: torch.Tensor, budget: int | None) -> float:
    model.zero_grad(set_to_none=True)
    rows = [tt.Trajectory(row) for row in ROWS]
    tt.TreeEngine(model, budget=budget).forward_backward(rows, tt.losses.sft())
    return linear.relative_error(linear.gradients(model), expected)


Asked = set[str]


@contextlib.contextmanager
def seen_by_attention() -> Iterator[Asked]:
    """Collect the kinds of attention that tree attention is asked for in the block."""
    asked: Asked = set()
    call = RectangleAttention.__call__

    def noting(self, query, key, value, scale, layer=0, spec=PLAIN_ATTENTION, sinks=None):
        visible_range = spec.visible_range
        asked.add(
            "sliding_attention"
            if visible_range.window
            else "chunked_attention"
            if visible_range.chunk
            else "full_attention"
        )
        asked.update({"sinks"} if sinks is not None else (), {"soft-cap"} if spec.softcap else ())
        asked.update({"value heads of another size"} if key.shape[-1] != value.shape[-1] else ())
        return call(self, query, key, value, scale, layer, spec, sinks)

    with mock.patch.object(RectangleAttention, "__call__", noting):
        yield asked


def kinds_of(model: nn.Module, named: tuple[str, ...], asked: Asked) -> tuple[str, ...]:
    """Kinds of layers in the order that the configuration names them, then what it does not name."""
    kinds = [kind for kind in named if kind in asked or "attention" not in kind or kind == "linear_attention"]
    kinds += sorted(asked - set(kinds))
    return (*kinds, *(["experts"] if experts_of(check_model(model)) else []))


def _judge_unbuilt(found: Verdict) -> Verdict:
    """Too large, or too particular, to be run: the check alone, on a model without weights."""
    config = _default(found.model_type)
    if config is None:
        return found._replace(reason="its configuration cannot be made from its own defaults")
    try:
        with torch.device("meta"):
            model = getattr(transformers, found.model_class)(config).eval()
    except ImportError:  # which library it names first depends on what is installed
        return found._replace(reason="cannot be made without optional libraries that these tests do not install")
    except Exception as error:
        return found._replace(reason=f"cannot be made here: {_line(error)}")
    try:
        check_model(model)
    except UnsupportedModel as error:
        return found._replace(verdict="refused", reason=str(error))
    return found._replace(reason="passes the check, but cannot be made small enough to be run here")


def small_model(model_type: str, **sizes: Any) -> nn.Module | None:
    """A small float64 model, or None where no variant of the fields gives one.

    Args:
        sizes: of the vocabulary or of positions, or other fields of the configuration, beside those of `WIDTHS`.
    """
    model_class = getattr(transformers, NAMES[model_type], None)
    if model_class is None:
        return None
    for config in _small_configs(model_type, sizes):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size <= LARGEST:
                return models.build(model_class, config, dtype=torch.float64)
        except Exception:  # whatever a class says about fields that do not suit it
            continue
    return None


def windowed(model_type: str) -> nn.Module | None:
    """A small float64 model with windows in every other layer; None for a class that knows no windows.

    What `small_model` makes has them only where the class has them by default.
    """
    default = _default(model_type)
    if default is None or not hasattr(default, "sliding_window"):
        return None
    known = dir(default)
    return small_model(model_type, **{name: value for name, value in WINDOWS.items() if name in known})


def _small_configs(model_type: str, sizes: Mapping[str, int] | None = None) -> Iterator[Any]:
    widths = WIDTHS | dict(sizes or {})
    for name, family in models.FAMILIES.items():
        if name == model_type and family.model == NAMES[model_type]:
            yield models.make_config(name, **(sizes or {}))
    default = _default(model_type)
    if default is None:
        return
    known, plain = dir(default), default.to_dict()
    kinds = list(dict.fromkeys(plain.get("layer_types") or ()))
    windows = {} if plain.get("sliding_window") is None else {"sliding_window": models.WINDOW}
    fields = widths | EXPERTS | LOW_RANK | RECURRENT | PER_LAYER_INPUT | windows
    fields["vocab_size_per_layer_input"] = widths["vocab_size"]
    if "kv_lora_rank" in known:
        fields["num_key_value_heads"] = 4
    listed = {"layer_types": kinds} | dict.fromkeys(LAYERS, len(kinds)) if len(kinds) > 1 else {}
    particular = PARTICULAR.get(model_type, {})
    for changes in (
        *([fields | dict.fromkeys(LAYERS, 2) | particular] if particular else []),
        fields | dict.fromkeys(LAYERS, 2) | listed,
        fields | dict.fromkeys(LAYERS, 2) | listed | {"pad_token_id": 0},
        widths | windows | dict.fromkeys(LAYERS, 2),
        widths | dict.fromkeys(LAYERS, 2) | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        widths | EXPERTS | {"num_key_value_heads": 4} | dict.fromkeys(LAYERS, 2),
        {key: widths[key] for key in ("hidden_size", "vocab_size", "intermediate_size")} | dict.fromkeys(LAYERS, 2),
    ):
        with contextlib.suppress(Exception):
            given = {key: value for key, value in changes.items() if key in known or key in particular}
            yield type(default)(**given)
    if isinstance(plain.get("text_config"), dict):  # text beside images: the text part small, the others as they may be
        text_type = plain["text_config"]["model_type"]
        small = {key: value for key, value in (fields | dict.fromkeys(LAYERS, 2)).items()}
        texts = [{key: value for key, value in small.items() if key in dir(CONFIG_MAPPING[text_type]())}]
        if text_type in NAMES:
            texts += [config.to_dict() for config in _small_configs(text_type, sizes)]
        for text in texts:
            others = [name for name in default.sub_configs if name != "text_config"]
            for rest in (dict.fromkeys(others, _SMALL_VISION), dict.fromkeys(others)):
                with contextlib.suppress(Exception):
                    yield type(default)(text_config=text, **rest)


def _default(model_type: str) -> Any:
    """The configuration that the class takes, of its own defaults."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = getattr(transformers, NAMES[model_type], None)
    wanted = getattr(model_class, "config_class", None)
    parts = [part for part in getattr(config_class, "sub_configs", {}).values() if part is wanted]
    if isinstance(wanted, type) and "Decoder" in wanted.__name__:  # Musicgen's is part of no configuration
        parts.append(wanted)
    with contextlib.suppress(Exception):
        return parts[0]() if parts else config_class()
    return None


def _line(error: Exception) -> str:
    words = (str(error).strip() or type(error).__name__).splitlines()
    return f"{type(error).__name__}: {words[0][:160]}"


ERRORS = ("float64", "float32", "rows_float32", "bfloat16")


def stable(found: ClassFound) -> tuple[Any, ...]:
    """The part of an entry that every machine finds: all but the errors, whose digits are those of rounding."""
    return found.model_type, found.model_class, found.verdict, found.reason, found.layers


def to_json(table: FamilyTable) -> str:
    """Plain JSON, one class per line, so that a change is seen in a diff."""
    lines = ",\n".join(f"  {json.dumps(_plain(found))}" for found in table.classes)
    return f'{{"transformers": {json.dumps(table.transformers)}, "classes": [\n{lines}\n]}}\n'


def _plain(found: ClassFound) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name not in ERRORS or value is not None}


def markdown(table: FamilyTable) -> str:
    """The page of the documentation."""
    exact, refused, untried = ([one for one in table.classes if one.verdict == verdict] for verdict in VERDICTS)
    counts = {"all": len(table.classes), "exact": len(exact), "refused": len(refused)}
    parts = [
        _INTRODUCTION.format(version=table.transformers, **counts),
        f"## Exact ({len(exact)})\n",
        _lines(_EXACT_COLUMNS, [_exact(found) for found in exact]),
        f"\n## Refused ({len(refused)})\n",
        _lines(("model_type", "class", "why"), [_why(found) for found in refused]),
        f"\n## Not tried ({len(untried)})\n\nThese are checked when they are loaded, as every model is.\n",
        _lines(("model_type", "class", "why"), [_why(found) for found in untried]),
    ]
    return "\n".join(parts) + "\n"


_EXACT_COLUMNS = ("model_type", "class", "layers of the model tested", "float64", "float32", "bfloat16 / rows")


def _exact(found: ClassFound) -> tuple[str, ...]:
    name = f"{found.model_type} (1)" if found.reason else found.model_type
    double, single, ratio = found.errors
    if found.rows_float32 is not None:
        single = f"{single} (rows {found.rows_float32:.1e})"
    return name, found.model_class, ", ".join(found.layers), double, single, ratio


def _why(found: ClassFound) -> tuple[str, ...]:
    return found.model_type, found.model_class, found.reason


def _lines(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    return "\n".join(lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows])


_INTRODUCTION = """# Model families

The tests write this page (`tests/models/test_every_class.py`); do not edit it. transformers {version} has {all}
causal LM classes. The tests make a small model of each, with random weights, and run it on trees. Models that may be
encoders are made as decoders.

- *Exact* ({exact}): the gradient of all weights equals that of the rows run one by one, with the tree as one part and
  in several.
- *Refused* ({refused}): an error names the reason before any gradient. No class gave a wrong gradient.

**Errors.** They are relative errors of the gradient of all weights, the worst over random forests and parts, with SFT
and with PPO-clip and entropy. The bounds are 1e-12 in float64 and 1e-5 in float32. In float64 transformers' own float32
casts are lifted. The last column divides the tree's bfloat16 error by that of the rows, both against float64 and pooled
over the forests. Its bound is 1.5.

- Three forests are pooled, for ReLU models (OPT, CTRL) 24. A unit whose input is within rounding of zero passes all of
  its gradient or none, so few forests are not enough.
- In models with experts, tree and rows use the experts that the float32 rows choose. Otherwise a choice that rounding
  changes would count as an error.
- The last column is empty if the choice of experts cannot be set, or if the rows' own bfloat16 gradient is not finite
  (Gemma 3n).
- `(1)` marks a wider bound. Either the library's casts could not be lifted (1e-5 in float64), or the float32 rows are
  more than 3e-6 off the float64 gradient (three times their error, which is shown beside the tree's).

**Configurations.** Layers that share the keys and values of earlier layers are exact too (Gemma 4 with
`num_kv_shared_layers` above 0: `tests/models/test_attention_kinds.py`); the table's models have none.

**Models for images and text** are exact on rows of text: Qwen2.5-VL, Qwen3-VL, Qwen3.5, Gemma 3, Mistral 3 and Llama 4
(their `...ForConditionalGeneration` classes: `tests/trainers/test_text_rows.py`). [Images](models.md#images) are exact
on Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, dense and with experts, Mistral 3, InternVL, LLaVA and Pixtral; others
are refused by name.

**Other models.** The decision depends on what a layer is and asks for, not on the model's name. So another model of the
same layers is exact as well. `treetrain models --model NAME_OR_FOLDER` answers for one model from its configuration,
without weights. `treetrain verify` checks it on your rows.
"""


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
DATA = ROOT / "src" / "treetrain" / "models" / FILE
WRITE = "TREETRAIN_WRITE_FAMILIES"
COMMAND = f"{WRITE}=1 python -m pytest {Path(__file__).relative_to(ROOT)}"


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    transformers.logging.set_verbosity_error()
    return [judge(name) for name in NAMES]


@pytest.fixture(scope="module")
def table(verdicts) -> FamilyTable:
    known = tuple(as_found(verdict, measured=bool(os.environ.get(WRITE))) for verdict in verdicts)
    return FamilyTable(transformers=transformers.__version__, classes=known)


def as_found(verdict: Verdict, *, measured: bool) -> ClassFound:
    """An entry of the table, with errors over several forests only where it is to be written: that takes minutes."""
    errors = {}
    if measured and verdict.verdict == "exact":
        model, lifted = small_model(verdict.model_type), KEPT_CASTS not in verdict.reason
        assert model is not None
        found = on_random_forests(model, lifted=lifted)
        ratio = None if found.ratio is None else two_digits(found.ratio)
        errors = {"float64": two_digits(found.float64), "float32": two_digits(found.float32), "bfloat16": ratio}
        if ROUGH in verdict.reason:
            errors["rows_float32"] = two_digits(found.rows_float32)
    return ClassFound(
        model_type=verdict.model_type,
        model_class=verdict.model_class,
        verdict=verdict.verdict,  # type: ignore[arg-type]
        reason=verdict.reason,
        layers=verdict.layers,
        **errors,
    )


def two_digits(number: float) -> float:
    return float(f"{number:.1e}")


ENGINES = (tt.TreeEngine, planned("chunks of 7", "mixed"), planned("one segment per part", "none"))
PARTS = (planned("N/4", "mixed"), planned("chunks of 7", "none"))
FORESTS, FORESTS_OF_STEPS = 3, 24
STEPS = (nn.ReLU,)
"""Activations whose gradient jumps. Where a unit's input is within a rounding of the jump, the unit's whole gradient
comes or goes: on the tree's side or on that of the rows, by chance. One such unit outweighs all other roundings of a
forest several times, so over three forests the ratio says who was unlucky: OPT's is 2.6 over 3 forests, 1.2 over 6,
1.04 over 12 and 1.02 over 24; with GELU in the place of ReLU it is 0.97 over the same 3."""


def random_forests(count: int, seed: int = 0) -> list[Rows]:
    """Forests with forks at and after the first token, prefixes, duplicates, a comb, a star, one-token rows."""
    rng, forests = np.random.default_rng(seed), []
    for number in range(count):
        trunk = rng.integers(0, VOCAB, 13).tolist()
        rows = [trunk, [*trunk[:8], *rng.integers(0, VOCAB, 5).tolist()], trunk[:6], trunk, trunk[-1:]]
        if number % 3 == 0:
            rows += [[*trunk[: i + 1], int(rng.integers(0, VOCAB))] for i in range(5)]
        elif number % 3 == 1:
            rows += [[*trunk[:9], *rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()] for _ in range(5)]
        else:
            rows += [rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(6)]
        forests.append(with_random_facts(rows, seed + number))
    return forests


VOCABULARY = 512
LONGEST = 150
"""Tokens of a row of real data."""
SOURCES = {"tau_airline": (20, 150), "tot_game24_bfs": (12, 60), "codet_humaneval100": (16, 60)}
"""Of each set, the tokens of a row before the first fork and in all."""


@pytest.fixture(scope="module")
def load(shared_data: Path) -> Callable[[str], Rows]:
    """Gives a source's rows, made when they are first asked for."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizer-qwen3")

    def rows(name: str) -> Rows:
        return renumbered(around_the_fork(SETS[name](shared_data, tokenizer), *SOURCES[name]), VOCABULARY)

    return functools.cache(rows)


def with_facts(model, rows: Rows) -> Rows:
    """Advantages of both signs, and ratios around 1: some beyond the bounds of PPO, none where rounding decides."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        scores, _ = linear.score_rows(model, [row.ids.tolist() for row in rows], PPO.temperature)
    noisy = [np.append(0.0, np.minimum(logp.numpy() + rng.normal(0, 0.15, len(logp)), -0.2)) for logp in scores]
    dressed = [row.replace(advantages=float(rng.normal()), old_logprobs=old) for row, old in zip(rows, noisy)]
    return clear_of_bounds(dressed, scores)


EXACT_CLASSES = [one for one in FamilyTable.packaged().classes if one.verdict == "exact"]
EXACT_NAMES = [found.model_type for found in EXACT_CLASSES]
LIFTED = {found.model_type: KEPT_CASTS not in found.reason for found in EXACT_CLASSES}
WINDOWS_TO_TURN_ON = ["dots1", "laguna", "mellum", "ministral", "ministral3", "mistral", "mixtral", "phi3", "phimoe"]
WINDOWS_TO_TURN_ON += ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"]
"""Classes that know windows, but whose defaults have none of them, or nothing else."""
NO_USE_OF_ITS_WINDOW = ["moshi"]
"""Has the field, and masks as if it had not, in its own rows as well."""


def on_random_forests(model: nn.Module, *, lifted: bool, seed: int = 0) -> Errors:
    """Measure a class on the forests that are enough for it."""
    forests, more = forests_for(model, seed)
    return errors_of(model, forests, [SFT, PPO], ENGINES, lifted=lifted, only_bfloat16=more)


def forests_for(model: nn.Module, seed: int = 0) -> tuple[list[Rows], list[Rows]]:
    """Forests for all precisions, and further ones for bfloat16 alone."""
    steps = any(isinstance(module, STEPS) for module in model.modules())
    forests = random_forests(FORESTS_OF_STEPS if steps else FORESTS, seed)
    return forests[:FORESTS], forests[FORESTS:]


def a_small(name: str, **fields) -> nn.Module:
    """A small float64 model of a class that has one."""
    model = small_model(name, **fields)
    assert model is not None
    return model


@pytest.mark.slow
def test_a_sample_of_classes_is_as_the_table_says():
    packaged = FamilyTable.packaged()
    if packaged.transformers != transformers.__version__:
        pytest.skip(f"the table is of transformers {packaged.transformers}; here is {transformers.__version__}")
    transformers.logging.set_verbosity_error()
    known = {stable(found) for found in packaged.classes}
    for name in list(NAMES)[::96]:
        verdict = judge(name)
        assert verdict.verdict != "wrong", verdict
        assert stable(as_found(verdict, measured=False)) in known, f"the table is stale; write it by: {COMMAND}"


@pytest.mark.slow
def test_no_class_is_silently_wrong(verdicts):
    assert len(verdicts) >= 100
    assert [found for found in verdicts if found.verdict == "wrong"] == []


@pytest.mark.slow
def test_most_classes_are_judged_and_no_refusal_is_without_a_reason(verdicts):
    counts = Counter(found.verdict for found in verdicts)
    assert counts["exact"] >= 80 and counts["untried"] <= 25, counts
    assert all(found.reason for found in verdicts if found.verdict != "exact")


def test_the_errors_that_the_table_names_are_within_the_contract_and_all_are_named():
    for found in FamilyTable.packaged().classes:
        if found.verdict != "exact":
            assert (found.float64, found.float32, found.bfloat16) == (None, None, None), found
            continue
        assert found.float64 is not None and found.float32 is not None, found
        assert 0 < found.float64 <= (SINGLE if KEPT_CASTS in found.reason else DOUBLE), found
        assert (found.rows_float32 is not None) == (ROUGH in found.reason), found
        assert 0 < found.float32 <= max(SINGLE, 3 * (found.rows_float32 or 0.0)), found
        # Routers may be of a kind that cannot be told; Gemma 3n's rows have no finite gradient in bfloat16.
        assert found.bfloat16 is not None or "experts" in found.layers or found.model_type == "gemma3n_text", found
        assert found.bfloat16 is None or found.bfloat16 <= RATIO, found
        assert found.layers, found


@pytest.mark.slow
def test_the_table_and_its_page_say_what_was_found(table):
    if os.environ.get(WRITE):
        DATA.write_text(to_json(table), encoding="utf-8")
        PAGE.write_text(markdown(table), encoding="utf-8")
    packaged = FamilyTable.packaged()
    assert PAGE.read_text(encoding="utf-8") == markdown(packaged), f"docs/families.md is stale; write it by: {COMMAND}"
    if table.transformers != packaged.transformers:
        pytest.skip(f"the table is of transformers {packaged.transformers}; here is {table.transformers}")
    stale = {stable(found) for found in table.classes} ^ {stable(found) for found in packaged.classes}
    assert not stale, f"the table of families is stale; write it by: {COMMAND}\n{stale}"


def test_a_table_comes_back_from_its_file_and_the_page_is_written_from_it():
    packaged = FamilyTable.packaged()
    assert DATA.read_text(encoding="utf-8") == to_json(packaged)
    assert PAGE.read_text(encoding="utf-8") == markdown(packaged)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_NAMES)
def test_a_class_holds_the_contract_on_random_forests(name):
    on_random_forests(a_small(name), lifted=LIFTED[name], seed=100).check(lifted=LIFTED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS_TO_TURN_ON)
def test_a_class_holds_the_contract_with_the_windows_that_its_defaults_have_not(name):
    model = windowed(name)
    assert model is not None
    with seen_by_attention() as asked:
        errors = on_random_forests(model, lifted=LIFTED[name], seed=200)
    assert "sliding_attention" in asked
    errors.check(lifted=LIFTED[name])


@pytest.mark.slow
def test_no_class_has_windows_that_no_test_turns_on():
    missing = []
    for found in EXACT_CLASSES:
        if not {"sliding_attention", "full_attention"} <= set(found.layers) and windowed(found.model_type) is not None:
            missing.append(found.model_type)
    assert missing == sorted(WINDOWS_TO_TURN_ON + NO_USE_OF_ITS_WINDOW)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate(EXACT_NAMES)), ids=EXACT_NAMES)
def test_a_class_holds_the_contract_on_real_trajectories(number, name, load):
    sizes = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), LONGEST)
    model = a_small(name, vocab_size=VOCABULARY, **sizes)
    assert model.config.get_text_config().vocab_size == VOCABULARY
    single = as_dtype(model, torch.float32)
    first = number % len(SOURCES)
    rows, *others = (with_facts(single, load(source)) for source in [*SOURCES, *SOURCES][first : first + len(SOURCES)])
    # In float64 and float32 on one of the sets, in bfloat16 on all three.
    engines = (tt.TreeEngine, PARTS[number % len(PARTS)])
    errors_of(model, [rows], [PPO], engines, lifted=LIFTED[name], only_bfloat16=others).check(lifted=LIFTED[name])


FAST_ON_REAL_ROWS = {"tau_airline": "gpt_oss", "tot_game24_bfs": "gemma2", "codet_humaneval100": "qwen3_next_dense"}
"""Sinks and experts, windows and soft-caps, recurrent layers."""


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_real_trajectories_are_exact_in_float64_whole_and_in_parts(source, load):
    rows = load(source)
    tree = tt.build_tree(rows)
    stats = tt.stats(tree)
    assert tree.num_tokens < 0.75 * tree.num_flat_tokens and stats.forks >= 2
    assert stats.longest_path > 8 * models.WINDOW and max(len(row) for row in rows) <= LONGEST
    model = models.make_model(FAST_ON_REAL_ROWS[source], torch.float64, vocab_size=VOCABULARY)
    rows = with_facts(as_dtype(model, torch.float32), rows)
    with PureFloat64():
        [(loss, gradient)] = expected(model, rows, [PPO])
        for engine in (tt.TreeEngine, PARTS[0]):
            found = measured(model, rows, PPO, engine)
            assert found[0] == pytest.approx(loss, rel=1e-12, abs=1e-12)
            assert linear.relative_error(found[1], gradient) <= DOUBLE


@pytest.mark.slow
def test_a_window_that_is_left_out_would_be_seen_on_real_trajectories(load):
    # The same weights without the window have quite another gradient: the errors above are not small for want of use.
    model = models.make_model("gemma3_text", torch.float64, vocab_size=VOCABULARY)
    wide = models.make_model("gemma3_text", torch.float64, vocab_size=VOCABULARY, sliding_window=1000)
    wide.load_state_dict(model.state_dict())
    rows = load("tot_game24_bfs")
    [(_, gradient)], [(_, without)] = expected(model, rows, [SFT]), expected(wide, rows, [SFT])
    assert linear.relative_error(without, gradient) > 0.05


def test_errors_beyond_a_bound_are_seen():
    Errors(1e-15, ((1e-6, 1e-6), (2e-5, 1e-5)), 1.1, 1.0).check()
    Errors(1e-15, ((1e-6, 1e-6),), None, None).check()
    Errors(2e-12, ((1e-6, 1e-6),), 1.1, 1.0).check(lifted=False)
    for bad in (
        Errors(2e-12, ((1e-6, 1e-6),), 1.1, 1.0),
        Errors(1e-15, ((1e-6, 1e-6), (2e-5, 1e-6)), 1.1, 1.0),
        Errors(1e-15, ((1e-6, 1e-6),), 1.6, 1.0),
    ):
        with pytest.raises(AssertionError):
            bad.check()


def test_a_class_with_relu_is_pooled_over_more_forests_in_bfloat16():
    # The first ones are the same, so that float64 and float32 are measured on what other classes are.
    forests, more = forests_for(a_small("opt"))
    assert (len(forests), len(more)) == (3, 21)
    assert [[row.ids.tolist() for row in forest] for forest in forests] == [
        [row.ids.tolist() for row in forest] for forest in random_forests(3)
    ]
    assert [len(found) for found in forests_for(a_small("llama"))] == [3, 0]


@pytest.mark.slow
def test_it_is_relu_and_nothing_else_of_opt_that_three_forests_are_too_few_for():
    smooth, stepped = (
        errors_of(a_small("opt", **fields), random_forests(3), [SFT, PPO], ENGINES).ratio
        for fields in ({"activation_function": "gelu"}, {})
    )
    assert smooth is not None and stepped is not None and smooth <= 1.1 < RATIO < stepped
