"""Compares a kernel of flash-linear-attention with its rule's specification on a small forest, forward and backward.

The forest has two roots, runs longer and shorter than a chunk of the kernel, a fork, and exported states within and at
the end of a run; its roots start from a state. Heads, dtypes and device are those of the layer that asks.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from treetrain.core.tree.layout import pack
from treetrain.core.tree.token_tree import build_tree
from treetrain.kernels.checks import failure_of, relative_error
from treetrain.layers.recurrence.reference import reference_gated_delta, reference_state_space
from treetrain.layers.recurrence.scans import (
    GATED_DELTA_KERNEL,
    STATE_SPACE_KERNEL,
    Kernel,
    Scan,
    Scans,
    scanned,
)

REFERENCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    GATED_DELTA_KERNEL.rule: reference_gated_delta,
    STATE_SPACE_KERNEL.rule: reference_state_space,
}


def failure_of_kernel(
    kernel: Kernel,
    scan: Scan,
    key: Float[Tensor, "n J K"],
    value: Float[Tensor, "n H V"],
    *by_head: Float[Tensor, "n H"],
) -> str | None:
    """Say why the kernel must not serve a layer; None if it is right. Each kind of layer is checked once per process.

    Only shapes, dtypes and device of the layer's tensors are read.

    Args:
        scan: the kernel, bound to its options.
        by_head: decay, and what else the rule takes.
    """
    heads, sizes = (key.shape[1], value.shape[1]), (key.shape[2], value.shape[2])
    dtypes, device = (key.dtype, *(x.dtype for x in by_head)), key.device

    def errors() -> dict[str, float]:
        return _errors(REFERENCES[kernel.rule], scan, heads, sizes, dtypes, device)

    case = str(device), f"heads {heads}", f"sizes {sizes}", *(f"by head {x.dtype}" for x in by_head)
    return failure_of(f"flash-linear-attention's {kernel.rule}", case, key.dtype, lambda: [errors])


def _errors(
    reference: Callable[..., tuple[Tensor, Tensor]],
    scan: Scan,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> dict[str, float]:
    """Compute the relative errors of outputs with exported states, and of all gradients, each tensor by its norm."""
    trunk = range(70)
    layout = pack(build_tree([[*trunk, *range(100, 140)], [*trunk, *range(200, 205)], [*range(300, 366)]]), trim=False)
    count, exported = layout.num_tokens, np.array([30, 109])
    (key_heads, value_heads) = heads
    (key_size, value_size) = sizes
    (dtype, *by_head) = dtypes
    # Drawn on the CPU: the device's own random state belongs to the user's run.
    generator = torch.Generator().manual_seed(0)
    keys, values = (count, key_heads, key_size), (count, value_heads, value_size)
    state = (value_heads, key_size, value_size)
    q, k, v, before, by_out, by_states = (
        torch.randn(shape, generator=generator)
        for shape in (keys, keys, values, state, values, (len(exported), *state))
    )
    decay, *others = (torch.rand(count, value_heads, generator=generator) for _ in by_head)
    wide = torch.promote_types(dtype, torch.float32)
    kinds = (dtype, dtype, dtype, *by_head, wide)
    given = [x.to(device, kind) for x, kind in zip((q, k, v, -0.2 * decay, *others, before), kinds)]
    by_out, by_states = by_out.to(device, dtype), by_states.to(device, wide)

    leaves = [x.clone().requires_grad_() for x in given]
    out, states = scanned(leaves[:-1], Scans(layout, exported, device), leaves[-1], scan)
    assert states is not None
    grads = torch.autograd.grad([out, states], leaves, [by_out.to(out.dtype), by_states.to(states.dtype)])
    exact = [x.double().requires_grad_() for x in given]
    right_out, every = reference(*exact[:-1], layout.parent, exact[-1])
    right_states = every[torch.from_numpy(exported).to(device)]
    right = torch.autograd.grad([right_out, right_states], exact, [by_out.double(), by_states.double()])
    return {
        "outputs and states": _together((out, states), (right_out, right_states)),
        "the gradients": _together(grads, right),
    }


def _together(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the root mean square of the tensors' errors: in 16 bits the smallest gradient alone has a larger error."""
    errors = [relative_error(a.detach(), b.detach()) for a, b in zip(found, expected)]
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5
