"""Softmax attention within a sliding window: exact, and linear in length in time and memory.

Queries go in blocks of a window's length, and every block meets the keys within its reach in one
`scaled_dot_product_attention`. Blocks go through a stretch at a time, and what is kept for backward is what goes in.

The window counts tokens. Padding is none: it is moved aside first, so that tokens are as far apart as they would be
without it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .chunked import full_precision, in_full_precision, sequence_of_token


# Tokens, over all rows, whose blocks go through at a time on a CPU: what a block needs is several times its keys.
STRETCH = 4096


def windowed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    is_causal: bool = False,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    is_aligned: bool = False,
) -> torch.Tensor:
    """Softmax attention in which a token sees its own key and `window - 1` before it, and, unless causal, after it.

    Args:
        query, key, value: (B, H, N_q, d), (B, H, N_k, d) and (B, H, N_k, d_v). The queries are of the last N_q tokens.
        window: at least 1.
        is_causal: whether a token sees none after itself.
        key_mask: (B, N_k) bool, False for padding, which sees nothing, is not seen, and adds to no distance.
        cu_seqlens: (S + 1,) boundaries of sequences packed into the only row (B = 1); none sees another.
        is_aligned: whether padding is known to stand before all tokens of its row.

    Returns:
        (B, H, N_q, d_v) in value's dtype; zeros where nothing is seen.
    """
    if window < 1:
        raise ValueError(f"`window` must be at least 1, got {window}.")
    length, total = query.shape[2], key.shape[2]
    if length > total or (length < total and not is_causal):
        raise ValueError(
            f"`query` must have as many tokens as `key`, or with `is_causal=True` fewer, got {length} and {total}."
        )
    sequence = None if cu_seqlens is None else sequence_of_token(cu_seqlens, total).unsqueeze(0)
    padding = order = None
    if key_mask is not None:
        padding = ~key_mask[:, None, :, None]
        query = query.masked_fill(padding[:, :, total - length :], 0.0)
        key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
        if not is_aligned:
            order = alignment(key_mask[:, total - length :])
            all_of_it = order if length == total else alignment(key_mask)
            query, key, value = in_order(query, order), in_order(key, all_of_it), in_order(value, all_of_it)
            key_mask = key_mask.gather(1, all_of_it)
            sequence = None if sequence is None else sequence.gather(1, all_of_it)
    # Projections are of one dtype; positions, or a cache, may have changed that of keys.
    dtype = value.dtype
    query, key = query.to(dtype), key.to(dtype)
    options = (key_mask, sequence, window, is_causal)
    with full_precision(query.device):
        if torch.compiler.is_compiling():
            # The compiler recomputes by itself, and a loop over stretches would tie its graph to one length.
            output = _in_blocks(query, key, value, total - length, *options)
        else:
            output = _InStretches.apply(query, key, value, *options)
    if order is not None:
        output = in_order(output, order.argsort(-1))
    return output if padding is None else output.masked_fill(padding[:, :, total - length :], 0.0)


def windowed_attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    window: int,
    is_causal: bool = False,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights (B, H, N_q, N_k) of `windowed_attention`, in float32 or wider.

    Quadratic in length: for looking at, not for computing with.
    """
    length, total = query.shape[2], key.shape[2]
    if key_mask is None:
        key_mask = torch.ones(1, total, dtype=torch.bool, device=key.device)
    index = key_mask.long().cumsum(-1)
    distance = index[:, total - length :, None] - index[:, None]
    seen = (distance < window) & (distance >= 0 if is_causal else distance > -window)
    seen = seen & key_mask[:, None] & key_mask[:, total - length :, None]
    if cu_seqlens is not None:
        sequence = sequence_of_token(cu_seqlens, total)
        seen = seen & (sequence[total - length :, None] == sequence)
    seen = seen.unsqueeze(1)
    with full_precision(query.device):
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query.to(wide) * query.shape[-1] ** -0.5) @ key.to(wide).mT
        # Not the lowest number there is: rows that see nothing stay numbers.
        weights = scores.masked_fill(~seen, torch.finfo(wide).min).softmax(-1)
        return weights.masked_fill(~seen, 0.0)


def alignment(mask: torch.Tensor) -> torch.Tensor:
    """The order (B, N) that moves padding before all tokens and leaves both as they follow each other."""
    return mask.to(torch.uint8).argsort(dim=-1, stable=True)


def in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x (B, H, N, d) with the tokens of every row in the given order (B, N)."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def rotary_positions(position_ids: torch.Tensor, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (B, 1, N, dim / 2), in float32, of the angles that positions (B, N) turn by."""
    frequencies = theta ** (-torch.arange(0, dim, 2, device=position_ids.device, dtype=torch.float32) / dim)
    angles = position_ids[:, None, :, None].to(torch.float32) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (x[m], x[m + d / 2]) of x (B, H, N, d)."""
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class _InStretches(torch.autograd.Function):
    """`_in_blocks`, a stretch at a time, and once more in backward."""

    @staticmethod
    def forward(ctx, query, key, value, key_mask, sequence, window, is_causal):
        ctx.save_for_backward(query, key, value, key_mask, sequence)
        ctx.options = (window, is_causal)
        output = value.new_empty(*query.shape[:3], value.shape[3])
        for queries, keys, offset in _stretches(query, key, window, is_causal):
            output[:, :, queries] = _in_blocks(
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                offset,
                *(None if x is None else x[:, keys] for x in (key_mask, sequence)),
                window,
                is_causal,
            )
        return output

    @staticmethod
    @once_differentiable
    @in_full_precision
    def backward(ctx, gradient):
        query, key, value, key_mask, sequence = ctx.saved_tensors
        by_query, by_key, by_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for queries, keys, offset in _stretches(query, key, *ctx.options):
            with torch.enable_grad():
                inputs = [query[:, :, queries], key[:, :, keys], value[:, :, keys]]
                inputs = [x.detach().requires_grad_() for x in inputs]
                masks = (None if x is None else x[:, keys] for x in (key_mask, sequence))
                output = _in_blocks(*inputs, offset, *masks, *ctx.options)
            by_inputs = torch.autograd.grad(output, inputs, gradient[:, :, queries])
            by_query[:, :, queries] = by_inputs[0]
            by_key[:, :, keys] += by_inputs[1]
            by_value[:, :, keys] += by_inputs[2]
        return by_query, by_key, by_value, None, None, None, None


def _stretches(query, key, window, is_causal):
    """Slices of queries, whole blocks to each, those of the keys within their reach, and where among these the
    queries' own begin."""
    length, total = query.shape[2], key.shape[2]
    tokens = STRETCH if query.device.type == "cpu" else STRETCH << 6
    step = max(tokens // (query.shape[0] * window), 1) * window
    for start in range(0, length, step):
        stop, place = min(start + step, length), start + total - length
        first = max(place - window + 1, 0)
        last = stop + total - length if is_causal else min(stop + window - 1, total)
        yield slice(start, stop), slice(first, last), place - first


def _in_blocks(query, key, value, offset, key_mask, sequence, window, is_causal):
    """Query i is of the token of key i + offset; key_mask and sequence are (B or 1, N_k) or None."""
    batch, _, length = query.shape[:3]
    total = key.shape[2]
    # One key more than the window on each side, where there are several blocks: kernels like even numbers.
    if length > window:
        size, before, after = window, window, 0 if is_causal else window
    else:
        size, before = length, min(window - 1, offset)
        after = 0 if is_causal else min(window - 1, total - offset - length)
    count = -(-length // size)
    span = before + size + after
    left = before - offset
    right = (count - 1) * size + span - total - left

    def blocks(x):
        return F.pad(x, (0, 0, left, right)).unfold(2, span, size).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def of_keys(x, outside):
        return F.pad(x, (left, right), value=outside).unfold(1, span, size).unsqueeze(2)

    def of_queries(x):
        x = F.pad(x[:, offset : offset + length], (0, count * size - length))
        return x.unflatten(1, (count, size)).unsqueeze(3)

    device = query.device
    distance = torch.arange(span, device=device) - before - torch.arange(size, device=device).unsqueeze(1)
    seen = (distance > -window) & (distance <= 0 if is_causal else distance < window)
    inside = torch.ones(1, total, dtype=torch.bool, device=device) if key_mask is None else key_mask
    seen = seen & of_keys(inside, False)
    if sequence is not None:
        seen = seen & (of_queries(sequence) == of_keys(sequence, -1))
    seen = seen.expand(batch, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    # The softmax of nothing is not a number on every kernel: what sees nothing sees all, and is taken out again.
    blind = ~seen.any(-1, keepdim=True)
    padded = F.pad(query, (0, 0, 0, count * size - length)).unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)
    output = F.scaled_dot_product_attention(padded, blocks(key), blocks(value), attn_mask=seen | blind)
    output = output.masked_fill(blind, 0.0).unflatten(0, (batch, count)).transpose(1, 2)
    return output.flatten(2, 3)[:, :, :length]
