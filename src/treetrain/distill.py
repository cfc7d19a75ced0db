"""Distillation from a teacher that runs over the same tree: its most likely ids, or its whole distributions.

A distribution belongs to a state: that of a token which some trained token follows, however many rows go through it. So
the tree is run for the inputs of the LM head alone, [R, hidden] for R states, and the heads run afterwards, over a few
states at a time. Of the logits [R, V] no more than such a chunk is ever in memory, of the student and of the teacher.

A state's loss counts as often as its rows count it: the loss weights of all predictions from it are added up. The
gradient of the student's states then runs through its tree once (`Scored.backward`).

Of several processes each has its own rows. Where FSDP2 has divided a model, its head is gathered before the head runs,
since no pass of the model does; the head's gradient is averaged as a whole, and every process keeps its shard of it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from treetrain.core.device_arrays import on_device
from treetrain.core.engine.engine import TreeEngine
from treetrain.core.engine.loss_gradients import Batch
from treetrain.core.engine.score import Scored, Scoring, States
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.core.hf.capability import causal_lm
from treetrain.core.losses.protocol import StepResult, summed
from treetrain.core.planning.cost import head_chunk_rows
from treetrain.core.tree.token_tree import Row, TokenTree
from treetrain.layers.trajectory import Trajectory
from treetrain.parallel.process_group import is_partitioned, is_shard, parameter_dtype, whole_tensor

Divergence = Literal["forward", "reverse", "jensen_shannon"]
LEAST_STATES = 4
"""States of a chunk but the last: a CPU's product of fewer rows adds up the vocabulary in order, with more rounding."""


class HeadInputs:
    """The inputs of a model's LM head at the R states of a batch that predict something trained.

    If FSDP2 has divided the model, making them is a collective call, also for a process without rows.

    Args:
        engine: gives the head's inputs as values.
        batch: of the same predictions for the teacher and the student.
        temperature: divides the logits before the softmax.
    """

    def __init__(self, name: str, engine: TreeEngine, batch: Batch, temperature: float):
        ranks = engine.sharing.passes_with
        with ranks.together(name):
            call = engine.prepared.call(logprobs=False, values=True)
            engine._check_device()
            engine._before_plan(call, batch.tree)
            plan = engine.plan_of(call, batch.layout)
            engine._compare_first_use(call, batch.tree)
            self._capabilities, self._temperature = engine.capabilities, temperature
            self.head: nn.Module = self._capabilities.head
            ranks.exchange(None)  # all ranks have a plan, or none runs a pass
            self._divided = any(map(is_shard, self.head.parameters()))
            if self._divided:
                _check_divided(name, self.head)
            self.weights = {name: _whole(p, engine.model) for name, p in self.head.named_parameters()}
            """The head's parameters, each as a whole, by name."""
            self._kernels = engine.prepared.registry.head
            self._linear = (self._capabilities.head_is_linear and "forward" not in vars(self.head)) or self._divided
            attach = functools.partial(call.extensions, batch.tree, balanced=False)
            scoring = Scoring(call, plan, attach, passes_type=engine.passes_type)
            count = len(batch.layout.rows)
            self.scored = Scored(name, scoring, batch.tree, States(np.arange(count), [count]), values=True)
        assert self.scored.values is not None
        (self.states,) = self.scored.values

    @torch.no_grad()
    def log_probabilities(self, states: Float[Tensor, "r hidden"]) -> Float[Tensor, "r V"]:
        """The distributions of the next tokens, in float32 or wider."""
        return self._log_softmax(self._made(states))[0]

    def add_gradients(
        self, some: slice, slope_of: Callable[[Float[Tensor, "r V"]], Tensor], of_head: dict[str, Tensor]
    ) -> Float[Tensor, "r hidden"]:
        """Return the gradient of a loss with respect to a chunk of states; add the head's own to `of_head`.

        Args:
            slope_of: maps log-probabilities, which it may overwrite, to the loss's gradient by the scaled logits.
            of_head: sums of the gradients of the head's trained parameters, by name.
        """
        own = self.states[some].detach().requires_grad_(not self._linear)
        with torch.set_grad_enabled(not self._linear):
            made = self._made(own)
        with torch.no_grad():
            log_p, of_map = self._log_softmax(made)
            slope = slope_of(log_p)
            del log_p
            slope = slope if self._temperature == 1.0 else slope.div_(self._temperature)
            slope = self._capabilities.logit_map.pull_back_(slope, of_map).to(made.dtype)
        if self._linear:  # autograd would make a matrix of the head's size in every chunk
            for name, total in of_head.items():
                if name == "bias":
                    total += slope.sum(0, dtype=total.dtype)
                else:
                    self._kernels.add_product(total, slope.t(), own.to(slope.dtype))
            return slope @ self.weights["weight"].detach()
        weights = [self.weights[name] for name in of_head]
        by_states, *grads = torch.autograd.grad(made, [own, *weights], slope, allow_unused=True)
        for total, grad in zip(of_head.values(), grads):
            if grad is not None:
                total += grad
        return by_states

    def _made(self, states: Float[Tensor, "r hidden"]) -> Float[Tensor, "r V"]:
        """Run the head on states, which its forward pre-hooks have changed already: these must not run twice."""
        states = states.to(next(iter(self.weights.values())).dtype)
        return nn.functional.linear(states, **self.weights) if self._divided else self.head.forward(states)

    def _log_softmax(self, made: Float[Tensor, "r V"]) -> tuple[Float[Tensor, "r V"], Tensor | None]:
        """Log-probabilities, and the slope of the logit map where it is not constant; a plain head's output is used up.

        In place, since each of these matrices is as large as a chunk's logits.
        """
        wide = torch.promote_types(made.dtype, torch.float32)
        logits = made.detach().to(wide, copy=not self._linear)
        of_map = self._capabilities.logit_map.apply_(logits, want_slope=True)
        logits = logits if self._temperature == 1.0 else logits.div_(self._temperature)
        return logits.log_softmax(-1), of_map

    def chunks(self) -> Iterator[slice]:
        """Slices of the states whose logits are in memory together, a quarter of those that the head scores at once.

        Of each logit there are four to six copies here. A tight budget bounds them, too.
        """
        step = head_chunk_rows(self._capabilities.vocab_size, self.states.device.type) // 4
        step = max(min(step, self.scored.plan.peak_tokens), LEAST_STATES)
        return (slice(start, start + step) for start in range(0, len(self.states), step))


def _batch_of(name: str, engine: TreeEngine, rows: Sequence[Row] | TokenTree) -> Batch:
    """The trained predictions of the rows.

    Raises:
        UnsupportedModel: processes that hold the same rows or weights under ZeRO-3, or routers with a loss of their
            own.
        DataError: rows with sampling masks, over which no whole distribution is.
    """
    _check_processes(name, engine)
    if engine.balanced:
        raise UnsupportedModel(f"{name} does not add the auxiliary loss of routers: set output_router_logits=False")
    tree = engine.tree_of(rows)
    if tree.id_sets:
        raise DataError(f"rows have sampling masks, and {name} is over the whole vocabulary; leave the masks out")
    return Batch.of(tree, weighted=True, every_token=False)


def _routed_anew(batch: Batch) -> Batch:
    """The same predictions for a teacher, whose routers choose for themselves: recorded experts are the student's."""
    special = {name: given for name, given in batch.tree.special.items() if name != "experts"}
    return replace(batch, tree=replace(batch.tree, special=special))


def _check_processes(name: str, engine: TreeEngine) -> None:
    """Refuse processes that divide a model in another way than FSDP2."""
    if not engine.sharing.same_rows.alone or any(map(is_partitioned, engine.model.parameters())):
        raise UnsupportedModel(
            f"{name} of a model under tensor or context parallel or ZeRO-3 has not been verified: take one process, "
            "group=, DistributedDataParallel or FSDP2, or record the teacher's ids in one process (TreeEngine.teach) "
            "and train with tt.losses.distill_topk"
        )


def _check_divided(name: str, head: nn.Module) -> None:
    """Refuse a head in shards that does more than multiply, since it runs as a whole, without FSDP2's hooks."""
    hooked = not isinstance(head, FSDPModule) and (head._forward_hooks or head._forward_pre_hooks)
    if hooked or not isinstance(head, nn.Linear):
        what = "forward hooks" if hooked else f"the class {type(head).__name__}"
        raise UnsupportedModel(
            f"{name}: the LM head is divided by FSDP2 and has {what}; give one that is a plain nn.Linear, or leave it "
            "whole"
        )


def _whole(parameter: nn.Parameter, model: nn.Module) -> Tensor:
    """A parameter as a whole, in the dtype that FSDP2 runs it in; a collective call where it is divided."""
    if not is_shard(parameter):
        return parameter
    with torch.no_grad():
        whole = whole_tensor(parameter)
    return whole.to(parameter_dtype(model) or whole.dtype).requires_grad_(parameter.requires_grad)


def _add_averaged(parameter: nn.Parameter, grad: Tensor, engine: TreeEngine) -> None:
    """Add to ``.grad`` the mean of a whole gradient over the ranks, or this rank's shard of it; a collective call."""
    ranks = engine.ranks
    if not ranks.alone:
        dist.all_reduce(grad, group=ranks.group)
        grad /= ranks.size
    grad = grad.to(parameter.dtype)
    if is_shard(parameter):
        from torch.distributed.tensor import distribute_tensor

        shard: Any = parameter
        grad = distribute_tensor(grad, shard.device_mesh, shard.placements, src_data_rank=None)
    grad = grad.to(parameter.device)
    # A tied head's weight has the gradient of the embedding already.
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def teach(engine: TreeEngine, of_states: TreeEngine, rows: Sequence[Row] | TokenTree, k: int) -> list[Trajectory]:
    """See `TreeEngine.teach`."""
    size = engine.capabilities.vocab_size
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= size:
        raise ValueError(f"k is {k!r}; give a number of ids, from 1 to the {size} of the vocabulary")
    made = list[Trajectory]()
    with engine.sharing.passes_with.together("TreeEngine.teach"):
        batch = _batch_of("TreeEngine.teach", engine, rows)
    with torch.no_grad():
        inputs = HeadInputs("TreeEngine.teach", of_states, _routed_anew(batch), engine.temperature)
        tops = [inputs.log_probabilities(inputs.states[some]).topk(k) for some in inputs.chunks()]
    empty = np.zeros((0, k))
    ids = np.concatenate([empty.astype(np.int64), *(top.indices.cpu().numpy() for top in tops)])
    logprobs = np.concatenate([empty, *(top.values.double().clamp(max=0).cpu().numpy() for top in tops)])
    for number, row in enumerate(batch.rows):
        of_row = np.full((len(row), k), -1, np.int64), np.zeros((len(row), k))
        used = np.flatnonzero(batch.used[batch.offsets[number] : batch.offsets[number + 1]]) + 1
        states = batch.edge_rows[batch.starts[number] : batch.starts[number + 1]]
        of_row[0][used], of_row[1][used] = ids[states], logprobs[states]
        made.append(Trajectory.of(row).replace(teacher_topk=of_row))
    return made


def distill(
    student: TreeEngine,
    student_states: TreeEngine,
    teacher: TreeEngine,
    teacher_states: TreeEngine,
    rows: Sequence[Row] | TokenTree,
    divergence: Divergence,
    normaliser: float | None,
) -> StepResult:
    """See `TreeEngine.distill`."""
    name = "TreeEngine.distill"
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence is {divergence!r}; give {', '.join(map(repr, get_args(Divergence)))}")
    sizes = [engine.capabilities.vocab_size for engine in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise UnsupportedModel(
            f"the student {type(student.model).__name__} has a vocabulary of {sizes[0]}, the teacher "
            f"{type(teacher.model).__name__} one of {sizes[1]}: distributions of one tokenizer are compared. Take a "
            "teacher of the student's family (if the tokenizer is the same and a checkpoint only pads it further, "
            f"teacher.resize_token_embeddings({sizes[0]})), or tt.losses.distill_topk on ids that both have"
        )
    check_tokenizers(student.model, teacher.model)
    if not torch.is_grad_enabled() or not student.prepared.trained:
        raise ValueError("gradients are switched off, or every parameter of the student is frozen: nothing is trained")
    ranks = student.ranks
    with ranks.together(name):
        batch = _batch_of(name, student, rows)
        _check_processes(name, teacher)
        if teacher.sharing.collective and teacher.ranks.size != ranks.size:
            raise UnsupportedModel(
                f"the teacher is divided over {teacher.ranks.size} processes, and {ranks.size} share the student's "
                "steps: give the student's engine group=, the same processes"
            )
        weights = _state_weights(batch)
        ranks.same({"the divergence": divergence, "a normaliser": normaliser, "the teacher's vocabulary": sizes[1]})
        whole = sum(ranks.exchange(float(weights.sum()))) if normaliser is None else float(normaliser)
        if not 0 < whole < float("inf"):
            raise DataError(
                f"the normaliser is {whole:g}, and must be above 0 and finite: give rows with loss weights, or a "
                "normaliser"
            )
        student.sharing.check_hooks(student.prepared.parameters)
        head = student.capabilities.head
        trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
        if head._backward_hooks or head._backward_pre_hooks:
            raise UnsupportedModel(f"{name} runs the LM head backward itself, which its backward hooks would not see")
        for parameter in trained.values():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UnsupportedModel(f"{name} adds the gradient of the LM head itself, which its hooks would not see")
        with torch.no_grad():
            taught = HeadInputs(name, teacher_states, _routed_anew(batch), teacher.temperature)
        inputs = HeadInputs(name, student_states, batch, student.temperature)

        device, states = inputs.states.device, inputs.states.detach()
        slopes = torch.zeros_like(states)
        of_head = {n: torch.zeros_like(inputs.weights[n], dtype=_wide(p)) for n, p in trained.items()}
        # Gradients are averaged over the ranks.
        shares = on_device(weights * (ranks.size / whole), device).to(states.dtype)
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for some in inputs.chunks():
            with torch.no_grad():
                p = taught.log_probabilities(taught.states[some].to(device))
            of_chunk = functools.partial(_slope, p, shares[some], divergence, totals)
            slopes[some] = inputs.add_gradients(some, of_chunk, of_head)

        def add_to_head() -> None:
            for n, parameter in trained.items():
                _add_averaged(parameter, of_head.pop(n), student)

        # A step that finds no gradients may start over if memory runs out, unless the head's are there already; beside
        # others it cannot, and has the memory of the head's sooner.
        if begun := any(ranks.exchange(any(p.grad is not None for p in student.prepared.parameters))):
            add_to_head()
        if len(states):
            inputs.states.backward(slopes)
        if len(states) or not ranks.alone:
            inputs.scored.backward()
        if not begun:
            add_to_head()
        scored = inputs.scored
        result = StepResult(
            loss_tensor=totals[0],
            metric_sums={"divergence": (totals[0], totals[1])},
            flat_tokens=scored.flat_tokens,
            unique_tokens=scored.unique_tokens,
            computed_tokens=scored.computed_tokens,
            recomputed_tokens=scored._scoring.tokens_without_graph,
            parts=scored.plan.num_parts,
            attention=scored._scoring.attention,
        )
        return summed(ranks.exchange(result.on_host()), over=ranks.size) if ranks.size > 1 else result


def check_tokenizers(student: nn.Module, teacher: nn.Module) -> None:
    """Raise UnsupportedModel if the checkpoints that two models come from have different tokens at an id.

    A model knows only where it was loaded from. Where no tokenizer.json is there, or in the hub's cache, nothing is
    compared; nor are added tokens, which a later checkpoint may name otherwise.
    """
    names = [
        str(getattr(getattr(causal_lm(model), "config", None), "name_or_path", "")) for model in (student, teacher)
    ]
    if names[0] != names[1] and (found := _first_different_token(*names)) is not None:
        number, ours, theirs = found
        raise UnsupportedModel(
            f"the student's tokenizer ({names[0]}) has {ours!r} at id {number}, the teacher's ({names[1]}) {theirs!r}: "
            "distributions of one tokenizer are compared. Take a teacher with the student's"
        )


@functools.lru_cache(maxsize=16)  # every step asks
def _first_different_token(student: str, teacher: str) -> tuple[int, str, str] | None:
    """The first id at which two checkpoints have different tokens, and these; None if there is none."""
    ours, theirs = _tokens_of(student), _tokens_of(teacher)
    different = (n for n in sorted(ours.keys() & theirs.keys()) if ours[n] != theirs[n])
    return next(((n, ours[n], theirs[n]) for n in different), None)


def _tokens_of(name: str) -> dict[int, str]:
    """The tokens of a checkpoint by id, without those that were added; empty where its tokenizer.json is not here."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from tokenizers import Tokenizer

    file: object = Path(name) / "tokenizer.json"
    if name and not Path(name).is_dir():
        with suppress(HFValidationError):  # a path that is gone
            file = try_to_load_from_cache(name, "tokenizer.json")
    if not name or not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    return {number: token for token, number in Tokenizer.from_file(str(file)).get_vocab(False).items()}


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _state_weights(batch: Batch) -> Float64[np.ndarray, " R"]:
    """The loss weights of all predictions from each state, added up."""
    of_rows = np.concatenate([np.zeros(0), *(row.weights[1:] for row in batch.rows)])[batch.used]
    return np.bincount(batch.edge_rows, of_rows, len(batch.layout.rows))


def _slope(p: Tensor, weights: Tensor, divergence: Divergence, totals: Tensor, q: Tensor) -> Float[Tensor, "r V"]:
    """The gradient of a chunk's weighted divergences by the logits of `q`; adds these and the weights to `totals` [2].

    Overwrites `p` and `q`.
    """
    each, slope = divergences(p, q, divergence)
    totals += torch.stack([(weights * each).sum(), weights.sum()]).double()
    return slope.mul_(weights[:, None])


def divergences(
    p: Float[Tensor, "r V"], q: Float[Tensor, "r V"], divergence: Divergence
) -> tuple[Float[Tensor, " r"], Float[Tensor, "r V"]]:
    """KL(p || q), KL(q || p), or the mean of KL(p || m) and KL(q || m), m = (p + q) / 2, from log-probabilities.

    The second result is the gradient by the logits whose log-softmax is `q`. Both arguments are overwritten: of the
    matrices, three or four are in memory at a time.
    """
    if divergence == "forward":
        share = p.exp()
        each = p.sub_(q).mul_(share).sum(-1)
        return each, q.exp_().sub_(share)
    if divergence == "reverse":
        above = p.neg_().add_(q)
        each = (above * q.exp_()).sum(-1)
        return each, above.sub_(each[:, None]).mul_(q)
    mean = torch.logaddexp(p, q).sub_(np.log(2))
    of_p = (p - mean).mul_(p.exp_()).sum(-1)
    above = mean.neg_().add_(q)
    of_q = (above * q.exp_()).sum(-1)
    return (of_p + of_q).mul_(0.5), above.sub_(of_q[:, None]).mul_(q).mul_(0.5)
