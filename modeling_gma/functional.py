"""Gaussian Mixture Attention as functions of tensors: the mathematics without a model around it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .chunked import attention as chunked_attention
from .chunked import effective_decay, full_precision, responsibilities, sequence_of_token
from .reference import attention as reference_attention


BACKENDS = {"chunked": chunked_attention, "reference": reference_attention}


def gaussian_responsibilities(
    x: torch.Tensor, means: torch.Tensor, variances: torch.Tensor, log_priors: torch.Tensor
) -> torch.Tensor:
    """Posterior probability of each mixture component for each routing vector.

    Args:
        x: routing vectors (queries or keys), (B, H, N, d_r).
        means, variances: (H, K, d_r), the variances positive.
        log_priors: (H, K).

    Returns:
        (B, H, N, K), float32 or wider; every row sums to one.
    """
    _check_routing("x", x, means)
    _check_mixture(means, variances, log_priors)
    with full_precision(x.device):
        return responsibilities(*_to_common_dtype(x, means, variances, log_priors))


def gaussian_mixture_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    means: torch.Tensor,
    variances: torch.Tensor,
    log_priors: torch.Tensor,
    is_causal: bool = False,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    eps: float = 1e-6,
    backend: str | Callable | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write values into K memory slots by key responsibilities and read them back by query responsibilities.

    Time and memory are linear in length. Scores, responsibilities and state are float32 under any autocast and for
    any narrower input; float64 stays float64.

    Args:
        query, key, value: (B, H, N_q, d_r), (B, H, N_k, d_r) and (B, H, N_k, d_v).
        means, variances, log_priors: the mixture, (H, K, d_r), (H, K, d_r) and (H, K).
        is_causal: query i reads only what keys j <= i wrote; needs N_q = N_k.
        key_mask: (B, N_k) bool. A key with False writes nothing: no value, no mass, no gradient.
        cu_seqlens: (S + 1,) integers from 0 to N_k: S sequences packed into the only row (B = 1); no memory crosses
            a boundary.
        log_decay: (B, H, N_k), at most 0, causal only: memory and mass are scaled by exp(log_decay[i]) before token
            i writes. A masked position forgets nothing.
        initial_state: (B, H, K, d_v + 1), float32 or wider: memory, and the mass as its last column. Of packed
            sequences the first one continues from it.
        eps: added to the normaliser.
        backend: "chunked" (the default), "reference" (the equations literally: slow), or a function with the
            signature of `modeling_gma.chunked.attention`.

    Returns:
        The output (B, H, N_q, d_v) in value's dtype, and the state after the last token, shaped like
        `initial_state`; of packed sequences, the last one's.

    Example:

    ```python
    >>> import torch
    >>> from modeling_gma import gaussian_mixture_attention

    >>> query, key, value = torch.randn(3, 2, 4, 100, 16).unbind(0)  # batch 2, 4 heads, 100 tokens
    >>> means, variances = torch.randn(4, 32, 16), torch.ones(4, 32, 16)  # 32 components
    >>> log_priors = torch.zeros(4, 32).log_softmax(-1)
    >>> output, state = gaussian_mixture_attention(query, key, value, means, variances, log_priors, is_causal=True)
    >>> output.shape, state.shape
    (torch.Size([2, 4, 100, 16]), torch.Size([2, 4, 32, 17]))
    ```
    """
    _check_attention(
        query, key, value, means, variances, log_priors, is_causal, key_mask, cu_seqlens, log_decay, initial_state
    )
    if eps <= 0:
        raise ValueError(f"`eps` must be above 0, got {eps}.")
    if backend is None:
        backend = "chunked"
    if not callable(backend):
        if backend not in BACKENDS:
            raise ValueError(f"`backend` must be one of {sorted(BACKENDS)}, a function or None, got {backend!r}.")
        backend = BACKENDS[backend]
    # Queries, keys and values stay as they are, and are widened where they are used: what is kept for backward is not.
    with full_precision(query.device):
        _, _, _, means, variances, log_priors, log_decay, initial_state = _to_common_dtype(
            query, key, value, means, variances, log_priors, log_decay, initial_state
        )
        return backend(
            query,
            key,
            value,
            means,
            variances,
            log_priors,
            is_causal=is_causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            log_decay=log_decay,
            initial_state=initial_state,
            eps=eps,
        )


def gaussian_mixture_attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    means: torch.Tensor,
    variances: torch.Tensor,
    log_priors: torch.Tensor,
    is_causal: bool = False,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The weights A (B, H, N_q, N_k) that `gaussian_mixture_attention` applies without ever forming them.

    Quadratic in length: for looking at, not for computing with. With an `initial_state` the rows leave out what goes
    to its tokens, which it no longer tells apart.
    """
    _check_attention(query, key, key, means, variances, log_priors, is_causal, key_mask, cu_seqlens, log_decay, None)
    with full_precision(query.device):
        query, key, means, variances, log_priors, log_decay, initial_state = _to_common_dtype(
            query, key, means, variances, log_priors, log_decay, initial_state
        )
        read = responsibilities(query, means, variances, log_priors)
        write = responsibilities(key, means, variances, log_priors)
        weights = read @ write.transpose(-1, -2)
        carried = 0.0 if initial_state is None else read @ initial_state[..., -1:]
        if cu_seqlens is not None:
            sequence = sequence_of_token(cu_seqlens, key.shape[2])
            weights = weights * (sequence[:, None] == sequence)
            carried = carried * (sequence == sequence[:1])[:, None]
        if is_causal:
            weights = weights.tril()
        if log_decay is not None:
            total = effective_decay(log_decay, key_mask).cumsum(-1).unsqueeze(-1)
            weights = weights * (total - total.transpose(-1, -2)).clamp(max=0.0).exp()
            carried = carried * total.exp()
        if key_mask is not None:
            weights = weights.masked_fill(~key_mask[:, None, None], 0.0)
        return weights / (weights.sum(-1, keepdim=True) + carried + eps)


def _to_common_dtype(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """All in the widest dtype among them, and at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def _check_routing(name, x, means):
    if x.dim() != 4 or means.dim() != 3 or (x.shape[1], x.shape[3]) != (means.shape[0], means.shape[2]):
        raise ValueError(
            f"`{name}` must be (batch, heads, length, routing_dim) for means of (heads, components, routing_dim), got "
            f"{name} {tuple(x.shape)} and means {tuple(means.shape)}."
        )


def _check_mixture(means, variances, log_priors):
    if means.shape[1] == 0:
        raise ValueError(f"`means` must hold at least one component, got {tuple(means.shape)}.")
    if variances.shape != means.shape or log_priors.shape != means.shape[:2]:
        raise ValueError(
            f"`variances` must be shaped like `means` and `log_priors` must be (heads, components), got means "
            f"{tuple(means.shape)}, variances {tuple(variances.shape)}, log_priors {tuple(log_priors.shape)}."
        )
    if can_look_inside(variances) and (variances <= 0).any():
        raise ValueError(f"`variances` must be above 0, got {variances.min().item()}.")


def _check_attention(
    query, key, value, means, variances, log_priors, is_causal, key_mask, cu_seqlens, log_decay, initial_state
):
    _check_routing("query", query, means)
    _check_routing("key", key, means)
    _check_mixture(means, variances, log_priors)
    batch, heads, length = key.shape[:3]
    if not (query.is_floating_point() and key.is_floating_point() and value.is_floating_point()):
        raise ValueError(f"`query`, `key` and `value` must be floats, got {query.dtype}, {key.dtype}, {value.dtype}.")
    if query.shape[0] != batch or value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"`query`, `key` and `value` must share batch and heads, and `key` and `value` their length, got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}."
        )
    if (is_causal or cu_seqlens is not None) and query.shape[2] != length:
        which = "is_causal=True" if is_causal else "cu_seqlens"
        raise ValueError(
            f"`{which}` needs as many queries as keys, got N_q = {query.shape[2]} and N_k = {length}. To continue a "
            f"sequence, pass only its new tokens and the state so far as `initial_state`."
        )
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (batch, length)):
        raise ValueError(
            f"`key_mask` must be a bool tensor of shape {(batch, length)} with False for keys to leave out, got "
            f"{key_mask.dtype} of shape {tuple(key_mask.shape)}."
        )
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, batch, length)
    if log_decay is not None:
        if not is_causal:
            raise ValueError("`log_decay` needs is_causal=True: forgetting has a direction.")
        if log_decay.shape != (batch, heads, length):
            raise ValueError(f"`log_decay` must be {(batch, heads, length)}, got {tuple(log_decay.shape)}.")
        if can_look_inside(log_decay) and (log_decay > 0).any():
            raise ValueError(f"`log_decay` must be at most 0, got {log_decay.max().item()}.")
    if initial_state is not None:
        expected = (batch, heads, means.shape[1], value.shape[3] + 1)
        is_wide = torch.promote_types(initial_state.dtype, torch.float32) == initial_state.dtype
        if initial_state.shape != expected or not is_wide:
            raise ValueError(
                f"`initial_state` must be {expected} (batch, heads, components, value_dim + 1) in float32 or wider, "
                f"got {tuple(initial_state.shape)} in {initial_state.dtype}."
            )


def _check_cu_seqlens(cu_seqlens, batch, length):
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2 or batch != 1:
        raise ValueError(
            f"`cu_seqlens` must be a vector of integers, for sequences packed into one row (batch 1), got "
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)} and batch {batch}."
        )
    if can_look_inside(cu_seqlens) and (
        cu_seqlens[0] != 0 or cu_seqlens[-1] != length or (cu_seqlens.diff() < 1).any()
    ):
        raise ValueError(
            f"`cu_seqlens` must rise from 0 to the length {length} with no empty sequence, got {cu_seqlens.tolist()}."
        )


def can_look_inside(tensor: torch.Tensor) -> bool:
    """Whether looking at values is free: not while tracing, and not on a device that would have to catch up first."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
