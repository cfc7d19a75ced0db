"""Triton kernels of tree attention: forward with its log-sum-exp, and the gradients of queries and of keys and values.

One program owns one block of queries (or of keys) and loops over its list of tiles (`tile_lists.py`): first those that
are fully visible, without a mask, then the others, masked by the interval rule. No two programs write the same memory,
so there are no atomics and the same input gives the same bits.

Every step loads the tile number of the next step. If it loaded its own, the compiler would prefetch that number instead
of the keys and values, and every step would wait for these. So a list has one extra entry at its end.

Why this prefetch is no race, as read in the code that Triton 3.6 makes for sm_90 with three stages:

- Nothing that is read ahead is written by a kernel. Lists and keys are complete before the launch, on the same stream.
- Tile numbers are carried in registers. Step i reads that of step i + 3 only if there is a step i + 2, so it reads the
  extra entry at most.
- Step i copies the tiles of step i + 2 into the third buffer, which step i - 1 read. The last product of step i - 1 may
  still have read it when step i began, but step i waits for all products before its own softmax (wgmma wait 0), and all
  warps meet (bar.sync) between that wait and the copy.
- Log-sum-exps and deltas have two buffers, so step i copies those of step i + 2 into the buffer of its own. It has read
  them into registers before the same barrier.
- A step begins by waiting until the copies of its own tiles have arrived (cp.async wait), followed by another barrier.

Keys are numbered from the path above; query i is key ``path + i``. Lengths are not specialized: one compilation serves
all of them. Log-sum-exps are to base 2 inside.

Shape letters: N queries, K keys, H query heads, G key/value heads, D size of query and key heads, V of value heads.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LENGTHS = ["queries", "keys", "path"]
"""Arguments that differ from call to call; the compiler must not specialize on their values."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(pointer, row, count, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, BOUNDED: tl.constexpr):
    """[rows, BLOCK] from rows `row` of a matrix; zeros beyond its size, and beyond `count` rows where BOUNDED."""
    column = tl.arange(0, BLOCK)
    at = pointer + row[:, None].to(tl.int64) * STRIDE + column[None, :]
    if BOUNDED:
        return tl.load(at, mask=(row[:, None] < count) & (column[None, :] < SIZE), other=0.0)
    elif SIZE != BLOCK:
        return tl.load(at, mask=column[None, :] < SIZE, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _store(pointer, values, row, count, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = pointer + row[:, None].to(tl.int64) * STRIDE + column[None, :]
    kept = (row[:, None] < count) & (column[None, :] < SIZE)
    tl.store(at, values.to(pointer.dtype.element_ty), mask=kept)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, summed in float32. Triton's interpreter cannot multiply bfloat16; for it factors are widened."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _tanh(x):
    """tanh to full relative precision; near 0, where the quotient of exponentials loses digits, by its series."""
    e = tl.exp2(-2.0 * LOG2_E * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _scores(products, scale, cap, CAPPED: tl.constexpr):
    """(scores to base 2, derivative of the scores by the scaled products), from the plain products."""
    if CAPPED:
        bent = _tanh(products * (scale / cap))
        return bent * (cap * LOG2_E), 1.0 - bent * bent
    else:
        return products * (scale * LOG2_E), 1.0


@triton.jit
def _seen(query, key, end, lowest, depth, LOCAL: tl.constexpr):
    """The interval rule; the arguments broadcast against each other."""
    seen = (key <= query) & (query < end)
    if LOCAL:
        seen = seen & (depth >= lowest)
    return seen


@triton.jit
def _forward_tiles(
    acc, high, total, q, k_ptr, v_ptr, end_ptr, depth_ptr, list_ptr, begin, stop, query, lowest, keys, scale, cap,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, LOCAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles [begin, stop) of a list."""
    steps: tl.constexpr = TILE // BLOCK_N
    tile = tl.load(list_ptr + begin)
    for step in range(begin * steps, stop * steps):
        key = tile * TILE + (step % steps) * BLOCK_N + tl.arange(0, BLOCK_N)
        tile = tl.load(list_ptr + (step + 1) // steps)
        k = _rows(k_ptr, key, keys, KEY_STRIDE, SIZE, BLOCK_D, MASKED)
        scores, _ = _scores(_product(q, tl.trans(k), PRECISION), scale, cap, CAPPED)
        if MASKED:
            end = tl.load(end_ptr + key, mask=key < keys, other=0)
            depth = key
            if LOCAL:
                depth = tl.load(depth_ptr + key, mask=key < keys, other=0)
            seen = _seen(query[:, None], key[None, :], end[None, :], lowest[:, None], depth[None, :], LOCAL)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(high, tl.max(scores, 1))
        # A query that has seen nothing yet has no highest score to compare with.
        base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(high - base)
        total = total * shrink + tl.sum(weights, 1)
        v = _rows(v_ptr, key, keys, VALUE_STRIDE, VALUE_SIZE, BLOCK_V, MASKED)
        acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        high = highest
    return acc, high, total


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, out_ptr, lse_ptr, end_ptr, depth_ptr, lowest_ptr, order_ptr, bounds_ptr, list_ptr,
    queries, keys, path, scale, cap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, LOCAL: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q [N, H, D], k [K, G, D], v [K, G, V] -> out [N, H, V], lse [H, N]; grid (blocks of queries, H)."""
    blocks: tl.constexpr = TILE // BLOCK_M
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    tile = tl.load(order_ptr + tl.program_id(0) // blocks)
    row = tile * TILE + (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _rows(q_ptr + head * SIZE, row, queries, HEADS * SIZE, SIZE, BLOCK_D, True)
    lowest = row
    if LOCAL:
        lowest = tl.load(lowest_ptr + row, mask=row < queries, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if SINKS:  # a key without a value, seen first
        high = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
        total = tl.zeros([BLOCK_M], tl.float32) + 1.0
    else:
        high = tl.zeros([BLOCK_M], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_M], tl.float32)
    begin, middle = tl.load(bounds_ptr + tile * 3), tl.load(bounds_ptr + tile * 3 + 1)
    stop = tl.load(bounds_ptr + tile * 3 + 2)
    k_ptr += group * SIZE
    v_ptr += group * VALUE_SIZE
    acc, high, total = _forward_tiles(
        acc, high, total, q, k_ptr, v_ptr, end_ptr, depth_ptr, list_ptr, begin, middle, row + path, lowest, keys,
        scale, cap, GROUPS * SIZE, GROUPS * VALUE_SIZE, SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V, TILE, BLOCK_N,
        CAPPED, LOCAL, False, PRECISION,
    )  # fmt: skip
    acc, high, total = _forward_tiles(
        acc, high, total, q, k_ptr, v_ptr, end_ptr, depth_ptr, list_ptr, middle, stop, row + path, lowest, keys,
        scale, cap, GROUPS * SIZE, GROUPS * VALUE_SIZE, SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V, TILE, BLOCK_N,
        CAPPED, LOCAL, True, PRECISION,
    )  # fmt: skip
    total = tl.where(row < queries, total, 1.0)
    _store(out_ptr + head * VALUE_SIZE, acc / total[:, None], row, queries, HEADS * VALUE_SIZE, VALUE_SIZE, BLOCK_V)
    tl.store(lse_ptr + head.to(tl.int64) * queries + row, high + tl.log2(total), mask=row < queries)


@triton.jit(do_not_specialize=["queries"])
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, queries,
    HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta [H, N]: sum over V of out * grad_out; grid (blocks of queries, H)."""
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = _rows(out_ptr + head * VALUE_SIZE, row, queries, HEADS * VALUE_SIZE, VALUE_SIZE, BLOCK_V, True)
    grad = _rows(grad_ptr + head * VALUE_SIZE, row, queries, HEADS * VALUE_SIZE, VALUE_SIZE, BLOCK_V, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head.to(tl.int64) * queries + row, delta, mask=row < queries)


@triton.jit
def _query_tiles(
    acc, q, grad, lse, delta, k_ptr, v_ptr, end_ptr, depth_ptr, list_ptr, begin, stop, query, lowest, keys, scale, cap,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, LOCAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of key tiles [begin, stop) to the gradient of a block of queries."""
    steps: tl.constexpr = TILE // BLOCK_N
    tile = tl.load(list_ptr + begin)
    for step in range(begin * steps, stop * steps):
        key = tile * TILE + (step % steps) * BLOCK_N + tl.arange(0, BLOCK_N)
        tile = tl.load(list_ptr + (step + 1) // steps)
        k = _rows(k_ptr, key, keys, KEY_STRIDE, SIZE, BLOCK_D, MASKED)
        v = _rows(v_ptr, key, keys, VALUE_STRIDE, VALUE_SIZE, BLOCK_V, MASKED)
        scores, slope = _scores(_product(q, tl.trans(k), PRECISION), scale, cap, CAPPED)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            end = tl.load(end_ptr + key, mask=key < keys, other=0)
            depth = key
            if LOCAL:
                depth = tl.load(depth_ptr + key, mask=key < keys, other=0)
            seen = _seen(query[:, None], key[None, :], end[None, :], lowest[:, None], depth[None, :], LOCAL)
            weights = tl.where(seen, weights, 0.0)
        inner = _product(grad, tl.trans(v), PRECISION)
        change = weights * (inner - delta[:, None]) * slope
        acc = _dot(change.to(k.dtype), k, acc, PRECISION)
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, end_ptr, depth_ptr, lowest_ptr, order_ptr, bounds_ptr,
    list_ptr, queries, keys, path, scale, cap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, LOCAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [N, H, D]; grid (blocks of queries, H)."""
    blocks: tl.constexpr = TILE // BLOCK_M
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    tile = tl.load(order_ptr + tl.program_id(0) // blocks)
    row = tile * TILE + (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _rows(q_ptr + head * SIZE, row, queries, HEADS * SIZE, SIZE, BLOCK_D, True)
    grad = _rows(grad_ptr + head * VALUE_SIZE, row, queries, HEADS * VALUE_SIZE, VALUE_SIZE, BLOCK_V, True)
    lse = tl.load(lse_ptr + head.to(tl.int64) * queries + row, mask=row < queries, other=0.0)
    delta = tl.load(delta_ptr + head.to(tl.int64) * queries + row, mask=row < queries, other=0.0)
    lowest = row
    if LOCAL:
        lowest = tl.load(lowest_ptr + row, mask=row < queries, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, middle = tl.load(bounds_ptr + tile * 3), tl.load(bounds_ptr + tile * 3 + 1)
    stop = tl.load(bounds_ptr + tile * 3 + 2)
    k_ptr += group * SIZE
    v_ptr += group * VALUE_SIZE
    acc = _query_tiles(
        acc, q, grad, lse, delta, k_ptr, v_ptr, end_ptr, depth_ptr, list_ptr, begin, middle, row + path, lowest, keys,
        scale, cap, GROUPS * SIZE, GROUPS * VALUE_SIZE, SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V, TILE, BLOCK_N,
        CAPPED, LOCAL, False, PRECISION,
    )  # fmt: skip
    acc = _query_tiles(
        acc, q, grad, lse, delta, k_ptr, v_ptr, end_ptr, depth_ptr, list_ptr, middle, stop, row + path, lowest, keys,
        scale, cap, GROUPS * SIZE, GROUPS * VALUE_SIZE, SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V, TILE, BLOCK_N,
        CAPPED, LOCAL, True, PRECISION,
    )  # fmt: skip
    _store(dq_ptr + head * SIZE, acc * scale, row, queries, HEADS * SIZE, SIZE, BLOCK_D)


@triton.jit
def _key_tiles(
    dk, dv, k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, lowest_ptr, list_ptr, begin, stop, key, end, depth, queries,
    path, scale, cap,
    QUERY_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    CAPPED: tl.constexpr, LOCAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of query tiles [begin, stop) of one head to the gradients of a block of keys.

    Rows beyond the last query are zeros and contribute zero.
    """
    steps: tl.constexpr = TILE // BLOCK_M
    tile = tl.load(list_ptr + begin)
    for step in range(begin * steps, stop * steps):
        row = tile * TILE + (step % steps) * BLOCK_M + tl.arange(0, BLOCK_M)
        tile = tl.load(list_ptr + (step + 1) // steps)
        q = _rows(q_ptr, row, queries, QUERY_STRIDE, SIZE, BLOCK_D, True)
        grad = _rows(grad_ptr, row, queries, GRAD_STRIDE, VALUE_SIZE, BLOCK_V, True)
        lse = tl.load(lse_ptr + row, mask=row < queries, other=0.0)
        delta = tl.load(delta_ptr + row, mask=row < queries, other=0.0)
        scores, slope = _scores(_product(k, tl.trans(q), PRECISION), scale, cap, CAPPED)
        weights = tl.exp2(scores - lse[None, :])
        if MASKED:
            lowest = row
            if LOCAL:
                lowest = tl.load(lowest_ptr + row, mask=row < queries, other=0)
            seen = _seen(row[None, :] + path, key[:, None], end[:, None], lowest[None, :], depth[:, None], LOCAL)
            weights = tl.where(seen, weights, 0.0)
        dv = _dot(weights.to(grad.dtype), grad, dv, PRECISION)
        inner = _product(v, tl.trans(grad), PRECISION)
        change = weights * (inner - delta[None, :]) * slope
        dk = _dot(change.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, end_ptr, depth_ptr, lowest_ptr, order_ptr,
    bounds_ptr, list_ptr, queries, keys, path, scale, cap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, LOCAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [K, G, D] and dv [K, G, V], summed over the query heads of a group; grid (blocks of keys, G)."""
    blocks: tl.constexpr = TILE // BLOCK_N
    shared: tl.constexpr = HEADS // GROUPS
    group = tl.program_id(1)
    tile = tl.load(order_ptr + tl.program_id(0) // blocks)
    key = tile * TILE + (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _rows(k_ptr + group * SIZE, key, keys, GROUPS * SIZE, SIZE, BLOCK_D, True)
    v = _rows(v_ptr + group * VALUE_SIZE, key, keys, GROUPS * VALUE_SIZE, VALUE_SIZE, BLOCK_V, True)
    end = tl.load(end_ptr + key, mask=key < keys, other=0)
    depth = key
    if LOCAL:
        depth = tl.load(depth_ptr + key, mask=key < keys, other=0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    begin, middle = tl.load(bounds_ptr + tile * 3), tl.load(bounds_ptr + tile * 3 + 1)
    stop = tl.load(bounds_ptr + tile * 3 + 2)
    for member in range(shared):
        head = group * shared + member
        q_head, grad_head = q_ptr + head * SIZE, grad_ptr + head * VALUE_SIZE
        lse_head, delta_head = lse_ptr + head.to(tl.int64) * queries, delta_ptr + head.to(tl.int64) * queries
        dk, dv = _key_tiles(
            dk, dv, k, v, q_head, grad_head, lse_head, delta_head, lowest_ptr, list_ptr, begin, middle, key, end,
            depth, queries, path, scale, cap, HEADS * SIZE, HEADS * VALUE_SIZE, SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V,
            TILE, BLOCK_M, CAPPED, LOCAL, False, PRECISION,
        )  # fmt: skip
        dk, dv = _key_tiles(
            dk, dv, k, v, q_head, grad_head, lse_head, delta_head, lowest_ptr, list_ptr, middle, stop, key, end,
            depth, queries, path, scale, cap, HEADS * SIZE, HEADS * VALUE_SIZE, SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V,
            TILE, BLOCK_M, CAPPED, LOCAL, True, PRECISION,
        )  # fmt: skip
    _store(dk_ptr + group * SIZE, dk * scale, key, keys, GROUPS * SIZE, SIZE, BLOCK_D)
    _store(dv_ptr + group * VALUE_SIZE, dv, key, keys, GROUPS * VALUE_SIZE, VALUE_SIZE, BLOCK_V)
