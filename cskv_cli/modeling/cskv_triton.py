"""Triton kernels of the decode step, for GPUs: what it does with old tokens, in one launch each for keys and values.

key_scores     of a tile of tokens: dequantize the latents, rebuild keys, rotate them, multiply them with the queries
weighted_sum   p c_V with codes, for all heads of a group at once, since they share the latents

Scores are written out, a number for each head and token; keys and dequantized latents never leave the chip.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if TYPE_CHECKING:
    from torch import nn

    from .cskv_latents import Latents

TOLERANCE = 0.05  # relative difference of a kernel's first result from that of torch, both in 16 bits
LEAST = 16  # of a dimension of tl.dot
SPLITS = 512  # programs that `weighted_sum` aims at

Work = Callable[[], torch.Tensor]

_trusted: dict[tuple, bool] = {}


def usable(tensor: torch.Tensor) -> bool:
    """Whether there is Triton, and a tensor that these kernels are for: 32-bit products would not fit the registers."""
    return triton is not None and tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)


def checked(kind: tuple, kernel: Work, plainly: Work) -> torch.Tensor:
    """What `kernel` gives, where it can be trusted, or else what `plainly` gives.

    The first result of each `kind` is held against `plainly`'s; a kernel that fails or differs is not asked again.
    """
    if kind in _trusted:
        return kernel() if _trusted[kind] else plainly()
    expected, problem = plainly(), None
    try:
        error = (kernel().float() - expected.float()).norm() / expected.float().norm()
        if not error <= TOLERANCE:
            problem = f"its result is off by {error:.1%}"
    except Exception as failure:  # of the compiler, the driver, or for want of the chip's memory
        problem = f"{type(failure).__name__}: {failure}"
    _trusted[kind] = problem is None
    if problem:
        warnings.warn(f"CSKV decodes without its Triton kernel for {kind}: {problem}", stacklevel=2)
    return expected


def key_scores(
    latents: Latents, up: nn.Module, query: torch.Tensor, factors: torch.Tensor | None, length: int
) -> torch.Tensor:
    """Scores of the first `length` tokens.

    Args:
        latents: of keys; all tokens packed where there is a quantizer.
        up: B and the bias of the keys.
        query: [batch, key heads, queries of a key head, head_dim], times 2 where `factors` turn it (see `Turn`).
        factors: cos and sin of the tokens, [1 or batch, 1, 2, head_dim, tokens]; None where nothing is rotated.

    Returns:
        [batch, key heads, queries of a key head, length] in float32.
    """
    batch, heads, queries = query.shape[:3]
    dim, width = up.weight.shape[0] // heads, up.weight.shape[1]
    heads_of_group, block_dim = heads * width // latents.rank, _block(dim)
    block_tokens = 128 if block_dim <= 128 else 64
    scores = query.new_empty(batch, heads, queries, length, dtype=torch.float32)
    held, strides = _held(latents)
    turn = query if factors is None else factors
    turn_strides = (0, 0, 0) if factors is None else (turn.stride(0) * (len(turn) > 1), turn.stride(2), turn.stride(3))
    _key_scores[(heads * triton.cdiv(length, block_tokens), batch)](
        *(scores, query.contiguous(), up.weight, query if up.bias is None else up.bias, turn, *held),
        *(length, heads, heads_of_group, queries, width, up.weight.stride(0), *turn_strides, *strides),
        DIM=dim,
        ROTATES=factors is not None,
        BIAS=up.bias is not None,
        BITS=0 if latents.quantizer is None else latents.quantizer.bits,
        GROUP=1 if latents.quantizer is None else latents.quantizer.group,
        BLOCK_QUERIES=_block(queries),
        BLOCK_DIM=block_dim,
        BLOCK_TOKENS=block_tokens,
        BLOCK_RANK=32,
        num_warps=8,
    )
    return scores


def weighted_sum(latents: Latents, weights: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum of the first tokens' packed value latents with weights [batch, heads, tokens].

    Returns:
        [batch, heads, rank / groups] in float32: of each head, the latents of its group.
    """
    batch, heads, length = weights.shape
    width, of_group = latents.rank // groups, heads // groups
    block_heads, block_rank, block_tokens = min(_block(of_group), 64), 64, 64
    tiles = groups * triton.cdiv(width, block_rank), triton.cdiv(of_group, block_heads)
    splits = max(min(triton.cdiv(length, block_tokens), SPLITS // (tiles[0] * tiles[1] * batch)), 1)
    tokens = triton.cdiv(triton.cdiv(length, splits), block_tokens) * block_tokens
    splits = triton.cdiv(length, tokens)
    sums = weights.new_empty(splits, batch, heads, width, dtype=torch.float32)
    held, strides = _held(latents)
    _weighted_sum[(tiles[0], tiles[1] * splits, batch)](
        *(sums, weights, *held, length, tokens, splits, of_group, width, *weights.stride(), *sums.stride()[:3]),
        *strides,
        DTYPE={torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(latents.dtype, tl.float32),
        BITS=latents.quantizer.bits,
        GROUP=latents.quantizer.group,
        BLOCK_HEADS=block_heads,
        BLOCK_RANK=block_rank,
        BLOCK_TOKENS=block_tokens,
        num_warps=8,
    )
    return sums.sum(0)


def _block(size: int) -> int:
    return max(triton.next_power_of_2(size), LEAST)


def _held(latents: Latents) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Tensors to read latents from, and their strides along batch, group of tokens or token, and row or channel."""
    if latents.packed is None:
        tensor = latents.recent
        return (tensor,) * 3, (*tensor.stride(), 0, 0, 0)
    codes, minimum, _ = latents.packed
    return tuple(latents.packed), (*codes.stride()[:3], *minimum.stride()[:3])


def _jit(function):
    """Compile it where Triton is; what grows with each token makes no kernel of its own."""
    return function if triton is None else triton.jit(function, do_not_specialize=("length", "splits"))


@_jit
def _key_scores(
    scores,
    query,
    up,
    bias,
    turn,
    codes,
    minimum,
    step,
    length,
    heads,
    heads_of_group,
    queries,
    width,
    up_row,
    turn_batch,
    turn_sin,
    turn_dim,
    codes_batch,
    codes_group,
    codes_row,
    range_batch,
    range_group,
    range_row,
    DIM: tl.constexpr,
    ROTATES: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """One program: a tile of tokens, one key head. Neighbours share the tile, so that its latents are in the cache."""
    head, batch = tl.program_id(0) % heads, tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) // heads).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[None, :]
    dim = tl.arange(0, BLOCK_DIM)
    there, real = token < length, dim < DIM
    codes += batch * codes_batch
    minimum += batch * range_batch
    step += batch * range_batch
    keys = tl.zeros([BLOCK_DIM, BLOCK_TOKENS], tl.float32)
    for start in range(0, width, BLOCK_RANK):
        channel = start + tl.arange(0, BLOCK_RANK)
        inside = channel < width
        rows = up + (head * DIM + dim)[:, None] * up_row + channel[None, :]
        block = tl.load(rows, mask=real[:, None] & inside[None, :], other=0.0)
        row, mask = ((head // heads_of_group) * width + channel).to(tl.int64)[:, None], inside[:, None] & there
        if BITS == 0:
            latents = tl.load(codes + token * codes_group + row * codes_row, mask=mask, other=0.0)
        else:
            group = token // GROUP
            at, range_at = group * codes_group + row * codes_row, group * range_group + row * range_row
            latents = _dequantized(codes + at, minimum + range_at, step + range_at, token % GROUP, mask, BITS)
            latents = _rounded(latents, block.dtype)
        keys = tl.dot(block, latents, keys)
    if BIAS:
        keys += tl.load(bias + head * DIM + dim, mask=real, other=0.0)[:, None].to(tl.float32)

    line = tl.arange(0, BLOCK_QUERIES)[:, None]
    asked, first = line < queries, (batch * heads + head) * queries
    if ROTATES:
        asks = query + (first + line) * (2 * DIM) + dim[None, :]
        factor, known = turn + batch * turn_batch + dim[:, None] * turn_dim + token, real[:, None] & there
        cos = tl.load(factor, mask=known, other=0.0).to(tl.float32)
        sin = tl.load(factor + turn_sin, mask=known, other=0.0).to(tl.float32)
        plain = tl.load(asks, mask=asked & real[None, :], other=0.0)
        turned = tl.load(asks + DIM, mask=asked & real[None, :], other=0.0)
        result = tl.dot(plain, (keys * cos).to(plain.dtype))
        result = tl.dot(turned, (keys * sin).to(plain.dtype), result)
    else:
        plain = tl.load(query + (first + line) * DIM + dim[None, :], mask=asked & real[None, :], other=0.0)
        result = tl.dot(plain, keys.to(plain.dtype))
    tl.store(scores + (first + line) * length + token, result, mask=asked & there)


@_jit
def _weighted_sum(
    sums,
    weights,
    codes,
    minimum,
    step,
    length,
    tokens,
    splits,
    heads,
    width,
    weights_batch,
    weights_head,
    weights_token,
    sums_split,
    sums_batch,
    sums_head,
    codes_batch,
    codes_group,
    codes_row,
    range_batch,
    range_group,
    range_row,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One program: some channels of one group of heads, some heads of it, some tokens."""
    tiles = tl.cdiv(width, BLOCK_RANK)
    group, batch = tl.program_id(0) // tiles, tl.program_id(2).to(tl.int64)
    split = (tl.program_id(1) % splits).to(tl.int64)
    channel = (tl.program_id(0) % tiles) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)[None, :]
    line = (tl.program_id(1) // splits) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    head, asked, inside = (group * heads + line).to(tl.int64), line < heads, channel < width
    weights += batch * weights_batch + head * weights_head
    codes += batch * codes_batch
    minimum += batch * range_batch
    step += batch * range_batch
    total = tl.zeros([BLOCK_HEADS, BLOCK_RANK], tl.float32)
    for start in range(0, tokens, BLOCK_TOKENS):
        token = split * tokens + start + tl.arange(0, BLOCK_TOKENS)
        there = token < length
        weight = tl.load(weights + token[None, :] * weights_token, mask=asked & there[None, :], other=0.0)
        place, row = (token // GROUP)[:, None], (token % GROUP)[:, None]
        at, range_at = place * codes_group + row * codes_row, place * range_group + row * range_row
        mask = there[:, None] & inside
        latents = _dequantized(codes + at, minimum + range_at, step + range_at, group * width + channel, mask, BITS)
        total = tl.dot(weight.to(DTYPE), _rounded(latents, DTYPE), total)
    tl.store(sums + split * sums_split + batch * sums_batch + head * sums_head + channel, total, mask=asked & inside)


@_jit
def _dequantized(codes, minimum, step, position, mask, BITS: tl.constexpr):
    """Numbers of rows of codes, in float32: bits lie lowest first, and with 3 bits a code may lie in two bytes."""
    bit = position * BITS
    byte, shift = codes + bit // 8, (bit % 8).to(tl.int32)
    word = tl.load(byte, mask=mask, other=0).to(tl.int32)
    if BITS == 3:
        word |= tl.load(byte + 1, mask=mask & (shift > 5), other=0).to(tl.int32) << 8
    code = (word >> shift) & (2**BITS - 1)
    low, width = tl.load(minimum, mask=mask, other=0.0), tl.load(step, mask=mask, other=0.0)
    return low.to(tl.float32) + code.to(tl.float32) * width.to(tl.float32)


@_jit
def _rounded(numbers, DTYPE: tl.constexpr):
    """Numbers in the precision of the model, not beyond what it holds."""
    if DTYPE == tl.float16:
        numbers = tl.minimum(tl.maximum(numbers, -65504.0), 65504.0)
    return numbers.to(DTYPE)
