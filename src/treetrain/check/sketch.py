"""Gradients in bounded memory: of every parameter a few thousand random sums, into which every element goes.

Why it is right. Element i of a gradient is added to sum i % k, with a random sign that depends on i alone. Sums are
linear, so the sums of two gradients differ by the sums of their difference d. The signs are independent, so the
squared norm of these sums is |d|^2 on average: every product of two different elements has mean 0. If d is spread
evenly over the sums, its standard deviation is sqrt(2 / k) |d|^2. k is odd, so that rows and columns of a matrix are
spread evenly too. A gradient with no more than k elements is kept as it is.

A sample of elements would do the same for gradients that are spread out. It would miss a few wrong rows of an
embedding, which are what most mistakes in an embedding or head look like.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor, nn

from treetrain.core.engine.deferred import gradients_aside

BYTES, SHARE = 32 * 2**20, 1 / 800
"""A sketch of a model's gradients has at most this many bytes, and this many numbers for each weight; so two of them
take 64 MB, and 1% of the weights in bfloat16."""
MOST, LEAST = 4095, 255
"""Numbers for each parameter, odd and within `BYTES`. A small model's sketch may exceed `SHARE` for the least."""
CHUNK, CHUNKS = 2**17, 64
"""Elements that get their signs at once; more where a gradient would have more chunks than this."""
Take = Callable[[int, nn.Parameter], None]
"""Called with a parameter and its number, when its gradient is complete."""


def sketch_size(parameters: Sequence[nn.Parameter]) -> int:
    """How many numbers the sketch of each parameter's gradient has at most."""
    count, weights = max(len(parameters), 1), sum(p.numel() for p in parameters)
    size = min(MOST, max(LEAST, int(weights * SHARE) // count), BYTES // 8 // count)
    return max(size - 1 + size % 2, 1)


@torch.no_grad()
def sketch(gradient: Shaped[Tensor, " ..."], size: int, seed: int) -> Float64[Tensor, " _"]:
    """Random sums of all elements of a gradient, or its elements where there are no more than `size`.

    Args:
        seed: chooses the signs. Sketches of one seed, size and kind of device can be subtracted and added.
    """
    if hasattr(gradient, "device_mesh"):
        from treetrain.parallel.process_group import whole_tensor

        gradient = whole_tensor(gradient)
    flat = (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
    if len(flat) <= size:
        return flat.double()
    random, sums = torch.Generator(flat.device).manual_seed(seed), flat.new_zeros(size, dtype=torch.float64)
    wide = torch.promote_types(flat.dtype, torch.float32)
    for chunk in flat.split(-(-max(CHUNK, len(flat) // CHUNKS) // size) * size):
        signed = torch.empty_like(chunk, dtype=wide).random_(0, 2, generator=random).mul_(2).sub_(1).mul_(chunk)
        whole = len(chunk) // size * size
        sums += signed[:whole].view(-1, size).sum(0, dtype=torch.float64)
        sums[: len(chunk) - whole] += signed[whole:]
    return sums


@contextmanager
def gradients_as_they_come(parameters: Sequence[nn.Parameter], take: Take | None = None) -> Iterator[None]:
    """Inside the block, give every gradient to `take` as soon as a backward has added it to ``.grad``, and free it.

    ``.grad`` is None at the start of the block and restored after it; no hook of the parameters runs.
    """

    def arrived(number: int, parameter: Tensor) -> None:
        if take is not None:
            take(number, parameter)  # type: ignore[arg-type]
        parameter.grad = None

    with gradients_aside(parameters):
        handles = [
            p.register_post_accumulate_grad_hook(partial(arrived, number))
            for number, p in enumerate(parameters)
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def sketched(parameters: Sequence[nn.Parameter], size: int, *, streamed: bool = False) -> Iterator[list[Tensor]]:
    """Sketch the gradients that a block adds to ``.grad``, which is restored.

    Args:
        size: the most numbers for each parameter.
        streamed: sketch and free each gradient as it comes, so that they are never held together. For blocks in which
            most parameters get theirs once; a later one is added. Otherwise all gradients are held until the end.

    Yields:
        A list that has a sketch of each parameter's gradient after the block; zeros where it adds none.
    """
    sketches: dict[int, Tensor] = {}
    by_number: list[Tensor] = []

    def take(number: int, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            own, parameter.grad = sketch(parameter.grad, size, number), None
            sketches[number] = sketches[number] + own if number in sketches else own

    with gradients_as_they_come(parameters, take) if streamed else gradients_aside(parameters):
        yield by_number
        for number, parameter in enumerate(parameters):  # an engine's buffers go into .grad without autograd
            take(number, parameter)
    for number, p in enumerate(parameters):
        zeros = torch.zeros(min(p.numel(), size), dtype=torch.float64, device=p.device)
        by_number.append(sketches.get(number, zeros))
