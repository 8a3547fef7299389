"""What runs on the device: the Triton programs, nothing else. Importing this module imports triton.

`advance` moves the step counters and prepares what is one number a tensor; `update_many` and `update_one` do the pass
over memory. Everything is computed in float32, the bias corrections in float64, and rounded once when it is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "KINDS", "advance", "update_many", "update_one"]

INTERPRETED = bool(triton.knobs.runtime.interpret)  # decided here: what the decorator makes is one or the other
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=("count",))
def advance(
    steps: tl.tensor,  # int64: addresses of the step counters, float32
    scalars: tl.tensor,  # float32 (3, count), written: step size, 1 / sqrt of the second bias correction, lr * decay
    log_betas: tl.tensor,  # float64 (2,)
    lr: tl.tensor,
    weight_decay: tl.tensor,
    veto: tl.tensor,
    count: tl.tensor,
    LR_ON_DEVICE: tl.constexpr,
    HAS_VETO: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Count the step of every tensor, unless there is a veto, and compute what follows from the count."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    counters = tl.load(steps + place, mask=there, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(counters, mask=there, other=1.0) + 1.0
    if HAS_VETO:
        step -= tl.load(veto)
    tl.store(counters, step, mask=there)
    rate = tl.full((BLOCK,), 0.0, tl.float64)
    if LR_ON_DEVICE:
        rate += tl.load(lr)
    else:
        rate += lr
    first = 1.0 - tl.exp(step.to(tl.float64) * tl.load(log_betas))
    second = 1.0 - tl.exp(step.to(tl.float64) * tl.load(log_betas + 1))
    tl.store(scalars + place, (rate / first).to(tl.float32), mask=there)
    tl.store(scalars + count + place, (1.0 / tl.sqrt(second)).to(tl.float32), mask=there)
    tl.store(scalars + 2 * count + place, (rate * weight_decay).to(tl.float32), mask=there)


@triton.jit
def _at(address: tl.tensor, offsets: tl.tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """Return pointers to elements of a tensor; the compiler may read 16 bytes at once where it is told of alignment."""
    start = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start + offsets


@triton.jit
def _update_block(
    p: tl.tensor,
    g: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    e: tl.tensor,
    r: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor | None,
    step_size: tl.tensor,
    root: tl.tensor,
    shrink: tl.tensor,
    divisor: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    share: tl.tensor,
    KIND: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AVERAGES: tl.constexpr,
    ROUNDS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Update some elements of one tensor: every operand is read once and written once."""
    p_at = _at(p, offsets, KIND, ALIGNED)
    m_at = _at(m, offsets, KIND, ALIGNED)
    v_at = _at(v, offsets, KIND, ALIGNED)
    param = tl.load(p_at, mask=mask).to(tl.float32)
    grad = tl.load(_at(g, offsets, KIND, ALIGNED), mask=mask).to(tl.float32)
    first = tl.load(m_at, mask=mask).to(tl.float32)
    second = tl.load(v_at, mask=mask).to(tl.float32)
    if AVERAGES:
        e_at = _at(e, offsets, tl.float32, ALIGNED)
        average = tl.load(e_at, mask=mask)
    if HAS_DIVISOR:
        grad = grad / divisor
    if MAXIMIZE:
        grad = -grad
    if DECOUPLED:
        param -= shrink * param
    else:
        grad += weight_decay * param
    first = beta1 * first + rest1 * grad
    second = beta2 * second + rest2 * grad * grad
    param -= step_size * first / (tl.sqrt(second) * root + eps)
    stored = param.to(KIND)
    tl.store(p_at, stored, mask=mask)
    tl.store(m_at, first.to(KIND), mask=mask)
    tl.store(v_at, second.to(KIND), mask=mask)
    if AVERAGES:
        live = stored.to(tl.float32)  # the average follows the weights as they are stored
        nearest = tl.where(share < 0.5, average, live)  # as torch's lerp, which is exact at both ends
        average = nearest + tl.where(share < 0.5, share, share - 1.0) * (live - average)
        tl.store(e_at, average, mask=mask)
        if ROUNDS:
            tl.store(_at(r, offsets, KIND, ALIGNED), average.to(KIND), mask=mask)


@triton.jit
def _update_chunk(
    p: tl.tensor,
    g: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    e: tl.tensor,
    r: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    scalars: tl.tensor,
    stride: tl.tensor,
    divisor: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    share: tl.tensor,
    KIND: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AVERAGES: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Update one chunk of one tensor: whole blocks 16 bytes at a time, what is left, or not aligned, one by one."""
    step_size = tl.load(scalars)
    root = tl.load(scalars + stride)
    shrink = tl.load(scalars + 2 * stride)
    by = 1.0
    if HAS_DIVISOR:
        by = tl.load(divisor).to(tl.float32)
    addresses = p | g | m | v
    if AVERAGES:
        addresses |= e
    if ROUNDS:
        addresses |= r
    end = tl.minimum(start + CHUNK, size)
    whole = tl.where(addresses % 16 == 0, start + (end - start) // BLOCK * BLOCK, start)
    for at in range(start, whole, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        _update_block(
            p, g, m, v, e, r, offsets, None, step_size, root, shrink, by, beta1, rest1, beta2, rest2, eps,
            weight_decay, share, KIND, HAS_DIVISOR, MAXIMIZE, DECOUPLED, AVERAGES, ROUNDS, True,
        )  # fmt: skip
    for at in range(whole, end, TAIL):
        offsets = at + tl.arange(0, TAIL)
        _update_block(
            p, g, m, v, e, r, offsets, offsets < end, step_size, root, shrink, by, beta1, rest1, beta2, rest2, eps,
            weight_decay, share, KIND, HAS_DIVISOR, MAXIMIZE, DECOUPLED, AVERAGES, ROUNDS, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=("count",))
def update_many(
    tensors: tl.tensor,  # int64 (6, count): addresses of p, m, v, e, r, and the number of elements
    gradients: tl.tensor,  # int64 (count,): addresses
    chunks: tl.tensor,  # int32 (programs, 2): which tensor, and which chunk of it
    scalars: tl.tensor,
    divisor: tl.tensor,
    veto: tl.tensor,
    count: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    share: tl.tensor,
    KIND: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    HAS_VETO: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AVERAGES: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Update many tensors in one launch, one chunk a program; a veto leaves everything unread."""
    if HAS_VETO:  # noqa: SIM102 - known when the program is compiled, unlike what follows
        if tl.load(veto) != 0.0:
            return
    chunk = chunks + 2 * tl.program_id(0)
    place = tl.load(chunk)
    start = tl.load(chunk + 1).to(tl.int64) * CHUNK
    column = tensors + place
    _update_chunk(
        tl.load(column), tl.load(gradients + place), tl.load(column + count), tl.load(column + 2 * count),
        tl.load(column + 3 * count), tl.load(column + 4 * count), start, tl.load(column + 5 * count),
        scalars + place, count, divisor, beta1, rest1, beta2, rest2, eps, weight_decay, share,
        KIND, HAS_DIVISOR, MAXIMIZE, DECOUPLED, AVERAGES, ROUNDS, CHUNK, BLOCK, TAIL,
    )  # fmt: skip


@triton.jit(do_not_specialize=("p", "m", "v", "e", "r", "g", "place", "size", "count"))
def update_one(
    p: tl.tensor,  # int64, as the next five: addresses
    m: tl.tensor,
    v: tl.tensor,
    e: tl.tensor,
    r: tl.tensor,
    g: tl.tensor,
    place: tl.tensor,
    size: tl.tensor,
    scalars: tl.tensor,
    divisor: tl.tensor,
    veto: tl.tensor,
    count: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    share: tl.tensor,
    KIND: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    HAS_VETO: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    AVERAGES: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Update one tensor, whose addresses come with the launch and so become part of a CUDA graph."""
    if HAS_VETO:  # noqa: SIM102 - known when the program is compiled, unlike what follows
        if tl.load(veto) != 0.0:
            return
    start = tl.program_id(0).to(tl.int64) * CHUNK
    _update_chunk(
        p.to(tl.int64), g.to(tl.int64), m.to(tl.int64), v.to(tl.int64), e.to(tl.int64), r.to(tl.int64),
        start, size.to(tl.int64), scalars + place, count, divisor,
        beta1, rest1, beta2, rest2, eps, weight_decay, share,
        KIND, HAS_DIVISOR, MAXIMIZE, DECOUPLED, AVERAGES, ROUNDS, CHUNK, BLOCK, TAIL,
    )  # fmt: skip
