"""The first use of a model: a small forest as a tree, and each of its rows by itself in the plain model.

On a tree, one call of a layer holds tokens of many rows, and a shared token has the gradients of several. So whatever
users put on a model must treat every token alone, and its gradients linearly: adapters, hooks, replaced forwards,
patched classes, modules and attention functions of their own. No list of these is complete, and none is needed. The
whole model runs on a forest of a few dozen tokens, whose rows have different lengths, as a whole and in parts. Its
scores must be those of the plain model on each row alone, and so must gradients, of which a slice is compared. This is
done once for each state of classes, forwards, hooks and adapters, in training mode or not, with gradients or without.

If they differ, the plain model and the tree run once more, and the inputs and outputs of all modules are compared in
the order of their calls. The first difference names the module.

What this cannot see:

- An adapter that has learned nothing often adds zero. So random numbers are added to its weights in the meantime.
- A module, hook or forward that acts differently later, for instance by a flag in a closure, or only in calls of more
  tokens than the forest has.
- Gradients that are wrong by no more than rounding in 16 bits makes them, which is much in some tiny models.
- Images: the forest is text. Of the first batch with images, two go through the encoder together and alone.
- Models that several processes divide among them (FSDP2, ZeRO-3, tensor and context parallel): all of them would have
  to make every call together, and the plain model does not know in which order. The first step of `share_prefixes`
  compares them, and `treetrain.verify` on the model before it is divided.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from treetrain.check.row_scores import scores_of_logits
from treetrain.check.stock import hook_name, is_stock
from treetrain.core.engine.deferred import gradients_aside
from treetrain.core.engine.engine_model import Call, EngineModel, Sharing
from treetrain.core.engine.loss_gradients import Batch, last_states
from treetrain.core.engine.snapshot import HOOK_FIELDS, global_hooks
from treetrain.core.errors import UnsupportedModel
from treetrain.core.hf.capability import Capabilities, causal_lm
from treetrain.core.hf.tree_mode import replaced
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.kernels.checks import relative_error
from treetrain.kernels.compiled import CompiledFeature, buffers_kept
from treetrain.layers.experts.routers import experts_of
from treetrain.layers.images.image_rows import tree_images
from treetrain.parallel.process_group import compute_dtype

if TYPE_CHECKING:
    from treetrain.layers.images.image_rows import Image

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}
LIMIT_16_BITS = 0.1
"""Largest relative difference of scores and of gradients, by dtype of the computation; as in a trainer's first step.

In 16 bits gradients may differ by more where rounding changes those of the plain rows as much (`_error_of_rounding`).
"""
BUDGET = 10
"""Tokens whose graph is alive at once where the forest runs in parts."""
SLICE = 255
"""Numbers of each parameter's gradient that are compared: signed sums over its rows."""
_REMEMBERED = 16
"""States remembered for each model. Hooks that are set anew in every step make more."""
_ACCEPTED: "WeakKeyDictionary[nn.Module, list[_State]]" = WeakKeyDictionary()


class Engine(Protocol):
    """The part of a `TreeEngine` that is needed here."""

    merge: bool
    check: bool
    prepared: EngineModel
    sharing: Sharing
    accepted: dict[object, object]

    @property
    def model(self) -> nn.Module: ...
    def score(self, rows: TokenTree, *, values: bool = False, rewards: bool = False) -> Any: ...


class _State(NamedTuple):
    """All that decides whether a comparison would be another one."""

    code: dict[tuple[int, str], object]
    switches: dict[tuple[int, str], object]
    mode: tuple[object, ...]

    def weak(self) -> "_State":
        """The same without strong references, since the functions of a model may hold the model."""
        return self._replace(code={at: _weak(value) for at, value in self.code.items()})


def _weak(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_weak, value))
    try:
        if isinstance(value, MethodType):  # a `WeakMethod` that goes in one collection with its function complains
            return ref(value.__self__), ref(value.__func__)
        return ref(value)
    except TypeError:  # a number, or a function in C, which nobody deletes
        return value


def _state_of(engine: Engine, asked: Capabilities) -> _State:
    model = engine.prepared
    mode = (
        engine.merge,
        torch.is_grad_enabled(),
        model.model.training,
        compute_dtype(model.model, model.device, model.parameters),
        asked.scores_tokens,
        asked.scalar is not None,
    )
    return _State(model.state.code, model.state.switches, mode)


def accept(engine: Engine) -> None:
    """Take the state of the model as it is now for exact, since the caller compares it."""
    engine.prepared.check()
    states = _ACCEPTED.setdefault(engine.model, [])
    states.append(_state_of(engine, engine.prepared.capabilities).weak())
    del states[:-_REMEMBERED]


def compare_first_use(engine: Engine, call: Call, tree: TokenTree) -> None:
    """Compare a small forest with its rows one by one, unless the model's state has been compared before.

    Args:
        tree: of the call; two of its images are compared, if it has any.

    Raises:
        UnsupportedModel: they differ by more than rounding; names the module where it can be found.
    """
    sharing, now = engine.sharing, _state_of(engine, call.capabilities)
    if sharing.collective or not sharing.same_rows.alone:
        return
    mode = now.mode
    images = tree_images(tree)
    if images is not None and len(images.distinct) > 1:
        mode = (*mode, "images")
    if engine.accepted.get(mode) == now:
        return
    state, accepted = now.weak(), _ACCEPTED.setdefault(engine.model, [])
    with_images = state._replace(mode=mode)
    if state not in accepted:
        with _undisturbed(engine.prepared):
            with _random_adapters(engine.model) as random:
                finite = _compare(engine, call)
            if random and not finite:  # adapters that make matrices orthogonal by a series are finite only when small
                _compare(engine, call)
        accepted.append(state)
    if with_images not in accepted:
        assert images is not None
        with _undisturbed(engine.prepared):
            _compare_images(engine.prepared, images.distinct)
        accepted.append(with_images)
    engine.accepted[mode] = now
    del accepted[:-_REMEMBERED]


# ---- the forest


def _rows(call: Call) -> list[list[int]]:
    """Rows of a trunk with branches, and one of a tree of its own; without the special tokens of the configuration."""
    capabilities, configs = call.capabilities, [causal_lm(call.model).config]
    configs.append(configs[0].get_text_config())
    numbers = [(name, number) for config in configs for name, number in vars(config).items()]
    special = {number for name, number in numbers if "token" in name and isinstance(number, int)}
    ids = [number for number in range(min(capabilities.vocab_size, 5000)) if number not in special]
    random = torch.Generator().manual_seed(0)
    trunk, left, right, first, second, alone = (
        [ids[k] for k in torch.randint(0, len(ids), (length,), generator=random)] for length in (5, 8, 4, 6, 3, 9)
    )
    rows = [trunk + left, trunk + right + first, trunk + right + second, alone]
    longest = min(x for x in (capabilities.max_positions, capabilities.rotary_positions, 16) if x)
    return [row[:longest] for row in rows]


@contextmanager
def _undisturbed(engine: EngineModel) -> Iterator[None]:
    """Buffers, gradients and the configuration are restored after the block."""
    model = engine.model
    config = causal_lm(model).config.get_text_config()
    # transformers collects the routers' logits by hooks.
    routed = {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}
    with (
        gradients_aside(engine.parameters),
        replaced(config, **routed),
        torch.compiler.set_stance("force_eager"),
        buffers_kept(model),
    ):
        yield


@contextmanager
def _random_adapters(model: nn.Module) -> Iterator[bool]:
    """Add random numbers to the weights of adapters inside the block; yields whether there are any."""
    kept, random = [], torch.Generator().manual_seed(0)
    for module in model.modules():
        if "_active_adapter" not in vars(module) or "base_layer" not in module._modules:
            continue
        for name, p in module.named_parameters():
            if p.is_floating_point() and not name.startswith("base_layer."):
                kept.append((p, p.data.clone()))
    try:
        for p, _ in kept:
            size = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1  # as large as what the layer itself computes
            p.data.add_(torch.randn(p.shape, generator=random).mul_(size).to(p))  # versions stay as they are
        torch.clear_autocast_cache()  # of the weights in 16 bits, as they were before
        yield bool(kept)
    finally:
        for p, values in kept:
            p.data.copy_(values)
        torch.clear_autocast_cache()


# ---- both sides

Found = tuple[list[Tensor], list[Tensor]]
"""Scores, row by row, and slices of gradients."""


def _compare(engine: Engine, call: Call) -> bool:
    """Compare both sides; returns whether the plain model's numbers were finite, since others tell nothing."""
    model, rows = engine.prepared, _rows(call)
    live = model.live and engine.sharing.ranks.alone
    trained = [p for p in model.parameters if p.requires_grad] if live else []
    # Also in a call under autocast, or within a call of the model.
    plain = _slices(trained, partial(_run_plain, call, rows, live=live))
    if not plain[0] or not all(bool(x.isfinite().all()) for side in plain for x in side):
        return False
    limit = LIMITS.get(compute_dtype(model.model, model.device, model.parameters), LIMIT_16_BITS)
    for budget in (None, BUDGET):
        tree = _slices(trained, partial(_run_tree, engine, call, rows, budget, live=live))
        apart = _apart(tree[0], plain[0], typical=experts_of(call.capabilities) is not None and limit == LIMIT_16_BITS)
        if not apart <= limit:
            raise UnsupportedModel(_message_of_scores(engine, call, rows, apart))
        apart = relative_error(tree[1], plain[1]) if live else 0.0
        allowed = limit
        if not apart <= limit and limit == LIMIT_16_BITS:
            allowed = max(limit, 1.5 * _error_of_rounding(call, rows, trained, plain[1]))
        if not apart <= allowed:
            raise UnsupportedModel(_message_of_gradients(model.model, apart))
    return True


def _error_of_rounding(
    call: Call, rows: list[list[int]], trained: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> float:
    """The relative change of the plain rows' own gradients if modules' 16-bit outputs are rounded otherwise.

    The root mean square of four tries. In 16 bits gradients of some small models lose most digits, on a tree and in
    rows alike, such as those of recurrent layers with heads of eight numbers.
    """
    random, errors = torch.Generator().manual_seed(2), []

    def round_otherwise(_module: nn.Module, _args: object, out: object) -> Tensor | None:
        if not isinstance(out, Tensor) or out.dtype not in (torch.bfloat16, torch.float16):
            return None
        noise = torch.rand(out.shape, generator=random).sub_(0.5).mul_(torch.finfo(out.dtype).eps)
        return (out.float() * noise.add_(1).to(out.device)).to(out.dtype)

    with ExitStack() as hooks:
        for module in call.model.modules():
            if not module._modules:
                hooks.callback(module.register_forward_hook(round_otherwise).remove)
        for _ in range(4):
            moved = _slices(trained, partial(_run_plain, call, rows, live=True))[1]
            errors.append(relative_error(moved, gradients))
    return float(np.sqrt(np.mean(np.square(errors))))


def _apart(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, typical: bool) -> float:
    """The relative difference, or that of most tokens: in 16 bits rounding changes a router's choice for a few."""
    if not typical:
        return relative_error(ours, theirs)
    a, b = (torch.cat([x.flatten() for x in side]).double() for side in (ours, theirs))
    return float((a - b).abs().median() / b.abs().median().clamp(min=1e-30))


def _slices(parameters: Sequence[nn.Parameter], run: Callable[[], list[Tensor]]) -> Found:
    """The scores of a run, and slices of the gradients that it leaves in ``.grad``, which is cleared."""
    scores, slices = run(), []
    for p in parameters:
        grad, p.grad = p.grad, None
        if grad is None:
            slices.append(torch.zeros(1, dtype=torch.float64, device=p.device))
            continue
        matrix = (grad.to_dense() if grad.is_sparse else grad).reshape(len(grad) if grad.dim() > 1 else 1, -1)
        signs = torch.arange(len(matrix), device=grad.device).mul(7).remainder(5).sub(2).to(grad.dtype)
        slices.append((signs @ matrix if len(matrix) > 1 else matrix[0]).double()[:SLICE])
    return scores, slices


def _weights(scores: Sequence[Tensor]) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in scores]


def _run_tree(engine: Engine, call: Call, rows: list[list[int]], budget: int | None, *, live: bool) -> list[Tensor]:
    probe = copy(engine)
    probe.check, probe.prepared = False, copy(engine.prepared)
    probe.prepared.budget = budget
    registry = engine.prepared.registry
    uncompiled = [feature for feature in registry.features if not isinstance(feature, CompiledFeature)]
    probe.prepared.registry = replace(registry, features=uncompiled)
    capabilities = call.capabilities
    scalar = capabilities.scalar
    pooled = scalar is not None and scalar.pooled
    scored = probe.score(build_tree(rows, merge=engine.merge), values=scalar is not None and not pooled, rewards=pooled)
    logprobs = scored.logprobs if capabilities.scores_tokens else ()
    kinds = logprobs, scored.values or (), () if scored.rewards is None else (scored.rewards,)
    scores = [x for kind in kinds for x in kind if x.numel()]
    if live:
        torch.autograd.backward([(x * w).sum() for x, w in zip(scores, _weights(scores))])
        scored.backward(sync=False)
    return [x.detach() for x in scores]


def _run_plain(call: Call, rows: list[list[int]], *, live: bool) -> list[Tensor]:
    scalar, found = call.capabilities.scalar, []
    for ids in rows:
        seen: dict[str, Any] = {}
        with _head_seen(call, seen):
            logits = _plain_forward(call.model, torch.tensor([ids], device=call.device))
        if scalar is None and logits.shape[:2] != (1, len(ids)):
            return []  # the tree's own pass says what is wrong with such logits
        own = []
        if call.capabilities.scores_tokens:
            target = torch.tensor(ids[1:], device=call.device)
            own.append(scores_of_logits(logits[0, :-1], target, call.temperature)[0])
        if scalar is not None and scalar.pooled:
            own.append(scalar.values(partial(_given, logits), logits))
        elif scalar is not None:
            states = seen["hidden"][0, :-1]
            forward = partial(_given, logits[0, :-1]) if scalar.is_models_own else scalar.module
            own.append(scalar.values(forward, states))
        found.append(own)
    # As the leaves of a score: all log-probabilities, then all values; rewards are one tensor.
    kinds = [list(kind) for kind in zip(*found)]
    if scalar is not None and scalar.pooled:
        kinds[-1] = [torch.cat(kinds[-1])]
    scores = [x for kind in kinds for x in kind if x.numel()]
    if live:  # a row may hold nothing that is trained, such as a soft token
        trained = [(x * w).sum() for x, w in zip(scores, _weights(scores)) if x.requires_grad]
        torch.autograd.backward(trained)
    return [x.detach() for x in scores]


def _given(values: Tensor, _states: Tensor) -> Tensor:
    """The values that the model itself has computed of states."""
    return values


@contextmanager
def _head_seen(call: Call, seen: dict[str, Any]) -> Iterator[None]:
    """Keep the input of the model's head, for a value head."""
    if call.capabilities.scalar is None:
        yield
        return
    handle = call.capabilities.head.register_forward_hook(lambda _, given, __: seen.update(hidden=given[0]))
    try:
        yield
    finally:
        handle.remove()


def _plain_forward(model: nn.Module, ids: Tensor) -> Tensor:
    """The plain model's logits for a row by itself."""
    forward = vars(model).get("forward")
    # See `ModelPasses.call`: accelerate's autocast cannot be entered twice.
    if "_original_forward" in vars(model) and torch.is_autocast_enabled(ids.device.type):
        forward = vars(model)["_original_forward"]
    plain = {"forward": forward, "_call_impl": vars(model).get("_call_impl")}
    for name, call in plain.items():
        while (inner := getattr(call, "plain", None)) is not None:  # a trainer's, which answers calls from trees
            plain[name] = call = inner
    with replaced(model, **{name: call for name, call in plain.items() if call is not None}):
        return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def _compare_images(engine: EngineModel, images: "Sequence[Image]") -> None:
    """Compare the features of two images in one call of the encoder with those of each by itself."""
    from treetrain.layers.images.encoders import encode_images, image_encoder, joined_images

    inner = image_encoder(engine.model)
    assert inner is not None
    two = sorted(images, key=lambda image: sum(x.size for x in image.inputs.values()))[:2]
    together, *alone = (
        encode_images(inner, joined_images(some, engine.device)).kinds for some in (two, two[:1], two[1:])
    )
    apart = max(relative_error([both], [torch.cat(each)]) for both, *each in zip(together, *alone))
    if not apart <= LIMITS.get(compute_dtype(engine.model, engine.device), LIMIT_16_BITS):
        raise UnsupportedModel(
            f"the image encoder mixes the images of a call: the features of two images together differ from those of "
            f"each by itself by {apart:.1g}. On a tree a call holds the images of many rows: "
            f"{advice(engine.model, 'train without treetrain')}."
        )


# ---- which module it is


class _Key(NamedTuple):
    """A call of a module, or its return."""

    module: str
    number: int
    """How often it was called before."""
    end: bool


Events = dict[_Key, tuple[str, list[Tensor]]]
"""In the order of a run: the module that was running, and what was given or returned, as `_by_token` has it."""


def _events(model: nn.Module, head: nn.Module, tokens: int, run: Callable[[], object]) -> Events:
    """All calls of modules in a run, by what they were given before their hooks and returned after them."""
    names = {module: name for name, module in model.named_modules()}
    stack = [""]
    events = Events()

    def add(module: nn.Module, given: object, *, end: bool) -> None:
        number = sum(key.module == names[module] and key.end == end for key in events)
        events[_Key(names[module], number, end)] = stack[-1], _by_token(given, tokens)

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        add(module, (args, list(kwargs.values())), end=False)
        stack.append(names[module])

    def leave(module: nn.Module, _args: object, output: object) -> None:
        stack.pop()
        add(module, output, end=True)

    with ExitStack() as hooks:
        for module in names:
            if module is not model and module is not head:  # the tree calls these otherwise
                before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(module.register_forward_hook(leave).remove)
        run()
    return events


def _by_token(given: object, tokens: int) -> list[Tensor]:
    """Up to 64 numbers, [tokens, 64], of each tensor that has an entry for every token."""
    if isinstance(given, Tensor) and given.is_floating_point() and given.dim() > 1:
        if given.shape[:2] != (1, tokens) or given.dim() < 3:
            return []
        flat = given.detach()[0].flatten(1)
        return [flat[:, :: max(flat.shape[1] // 64, 1)].clone()]
    values = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else ()
    return [x for value in values for x in _by_token(value, tokens)]


def _first_different(engine: Engine, call: Call, rows: list[list[int]]) -> tuple[str, float] | None:
    """The module whose forward or hooks first give something else on a tree, and by how much; None if not found."""
    model = engine.prepared
    tree = build_tree(rows, merge=engine.merge)
    scalar = call.capabilities.scalar
    offsets, index = tree.paths()
    pooled = scalar is not None and scalar.pooled
    layout = last_states(tree, call.capabilities)[0] if pooled else Batch.of(tree, weighted=False).layout
    place = np.full(tree.num_tokens, -1)
    place[layout.tree_index] = np.arange(layout.num_tokens)
    limit = LIMITS.get(compute_dtype(model.model, model.device, model.parameters), LIMIT_16_BITS) / 3
    head = call.capabilities.head
    on_tree = _events(
        model.model, head, layout.num_tokens, lambda: _run_tree(engine, call, rows, layout.num_tokens, live=False)
    )
    alone = []
    for number, ids in enumerate(rows):
        given, own = torch.tensor([ids], device=model.device), place[index[offsets[number] : offsets[number + 1]]]
        events = _events(model.model, head, len(ids), lambda given=given: _plain_forward(model.model, given))
        alone.append((torch.from_numpy(own[own >= 0]), torch.from_numpy(np.flatnonzero(own >= 0)), events))
    for key, (caller, ours) in on_tree.items():
        for on_path, in_row, events in alone:
            _, theirs = events.get(key, ("", []))
            for a, b in zip(ours, theirs):
                apart = relative_error([a[on_path.to(a.device)]], [b[in_row.to(b.device)]])
                if not apart <= limit:
                    return (key.module if key.end else caller), apart
    return None


# ---- what to say


def users_hooks(model: nn.Module, module: nn.Module | None = None) -> list[str]:
    """The hooks and forwards that users have put on a model, or on one module."""
    found, whole = [], (model, causal_lm(model))  # trainers have forwards of their own for these
    for name, each in model.named_modules() if module is None else [("", module)]:
        fields, place = vars(each), f" on {name}" if name else ""
        hooks = [hook for kind in HOOK_FIELDS for hook in fields[kind].values()]
        found += [f"the hook {hook_name(hook)}{place}" for hook in hooks if not is_stock(hook)]
        forward = fields.get("forward")
        if forward is not None and each not in whole and not is_stock(forward) and "_hf_hook" not in fields:
            found.append(f"a forward of its own{place}")
    if any(global_hooks()):
        found.append("PyTorch's hooks on all modules")
    return found


def users_own(model: nn.Module, module: nn.Module | None = None) -> list[str]:
    """The additions of users to a model, or to one module: hooks, forwards, modules and attention of their own."""
    found = users_hooks(model, module)
    for name, each in model.named_modules() if module is None else [("", module)]:
        kind, place = type(each), f" on {name}" if name else ""
        if not is_stock(kind) and "transformers_modules" not in kind.__module__:
            found.append(f"the class {kind.__qualname__}{place}")
        elif not is_stock(kind.forward):
            found.append(f"another forward of the class {kind.__qualname__}")
    attention = getattr(causal_lm(model).config.get_text_config(), "_attn_implementation", None)
    function = AttentionInterface().get(attention) if attention and module is None else None
    if function is not None and not is_stock(function):
        found.append(f"the attention {attention!r}")
    return list(dict.fromkeys(found))


def advice(model: nn.Module, without: str) -> str:
    """Advice on a model that is not exact on a tree."""
    own = users_own(model)
    if not own:
        return f"{without} and report this model"
    shown = f"{', '.join(own[:3])}{f' and {len(own) - 3} more' if len(own) > 3 else ''}"
    return f"remove what is not the model's own ({shown}), or {without}"


def _message_of_scores(engine: Engine, call: Call, rows: list[list[int]], apart: float) -> str:
    model = engine.model
    found = _first_different(engine, call, rows)
    if found is None:
        return (
            f"the model's scores of a small forest differ from those of its rows by themselves by {apart:.1e}: "
            f"{advice(model, 'train without treetrain')}. TreeEngine(..., check=False) does not compare."
        )
    name, apart = found
    module = model.get_submodule(name)
    kind = f"{type(module).__module__}.{type(module).__qualname__}".removeprefix("peft.tuners.")
    own = users_own(model, module)
    if "_active_adapter" in vars(module):
        what, cure = f"the adapter layer {name} ({kind})", "Use an adapter that treats every token alone, such as LoRA."
    elif own:
        what, cure = f"{name} ({kind}) with {', '.join(own)}", "Remove it, or let it treat every token alone."
    else:
        what, cure = f"{name or 'the model'} ({kind})", f"{advice(model, 'train without treetrain').capitalize()}."
    return (
        f"{what} mixes tokens: in a tree its output for the tokens of a row is another one than in the row by itself "
        f"(by {apart:.1g} of its size). On a tree a call holds the tokens of many rows. {cure}"
    )


def _message_of_gradients(model: nn.Module, apart: float) -> str:
    return (
        f"gradients of a small forest differ from those of its rows by themselves by {apart:.1e}, though the scores "
        "agree. A hook that changes gradients must be linear and treat every token alone, and the head's own are not "
        f"run on a tree: {advice(model, 'train without treetrain')}."
    )
