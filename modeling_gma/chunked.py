"""Gaussian Mixture Attention as matrix products: linear in length, with no tensor of N x N or N x K x d_v.

A causal (or packed) sequence is cut into chunks of C tokens. Inside a chunk the tokens meet as a C x C product of
responsibilities; between chunks only the state (K x (d_v + 1), the mass being the last column) is handed on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


CHUNK_SIZE = 128

# Scores this far below their row's maximum (4e-18 of it) are dropped. Float32 cannot see them in any result, but
# their products would be subnormal numbers, on which CPUs are several times slower.
SCORE_CUTOFF = -40.0

# A decay below this is forgetting everything; finite, so that differences of its sums stay numbers.
LOG_DECAY_MIN = -100.0


def responsibilities(x, means, variances, log_priors):
    """Posterior over components: x (B, H, N, d_r) -> (B, H, N, K), rows summing to one.

    Scores are taken relative to one wide Gaussian at the centre of the mixture. That changes no posterior, and it
    cancels the part of x^2 that all components share before it can cost precision. As the score gradients of a
    token sum to zero over the components, that Gaussian needs no gradient.
    """
    precisions = variances.reciprocal()
    shared_precision = precisions.amin(dim=-2, keepdim=True).detach()
    centre = means.mean(dim=-2, keepdim=True).detach()
    linear = precisions * means - shared_precision * centre
    quadratic = -0.5 * (precisions - shared_precision)
    constant = (
        log_priors
        - 0.5 * variances.log().sum(-1)
        - 0.5 * (precisions * means.square() - shared_precision * centre.square()).sum(-1)
    )
    scores = torch.cat([x, x.square()], dim=-1) @ torch.cat([linear, quadratic], dim=-1).transpose(-1, -2)
    scores = scores + constant.unsqueeze(-2)
    faint = scores - scores.detach().amax(dim=-1, keepdim=True) < SCORE_CUTOFF
    return scores.masked_fill(faint, -torch.inf).softmax(dim=-1)


def attention(
    query,
    key,
    value,
    means,
    variances,
    log_priors,
    is_causal=False,
    key_mask=None,
    cu_seqlens=None,
    log_decay=None,
    initial_state=None,
    eps=1e-6,
    chunk_size=CHUNK_SIZE,
):
    """The fast path behind `functional.gaussian_mixture_attention`; shapes as there, all tensors of one dtype."""
    if key_mask is not None:
        unwritten = ~key_mask[:, None, :, None]
        key = key.masked_fill(unwritten, 0.0)
    read = responsibilities(query, means, variances, log_priors)
    write = responsibilities(key, means, variances, log_priors)
    values = F.pad(value, (0, 1), value=1.0)
    if key_mask is not None:
        values = values.masked_fill(unwritten, 0.0)

    if is_causal or cu_seqlens is not None:
        if log_decay is not None:
            log_decay = effective_decay(log_decay, key_mask)
        total, state = _read_in_chunks(
            read, write, values, is_causal, cu_seqlens, log_decay, initial_state, chunk_size
        )
    else:
        state = write.transpose(-1, -2) @ values
        if initial_state is not None:
            state = state + initial_state
        total = read @ state
    return total[..., :-1] / (total[..., -1:] + eps), state


def effective_decay(log_decay, key_mask):
    """log_decay (B, H, N), finite, and zero where a masked token forgets nothing."""
    log_decay = log_decay.clamp(min=LOG_DECAY_MIN)
    return log_decay if key_mask is None else log_decay.masked_fill(~key_mask[:, None], 0.0)


class _Carry(NamedTuple):
    """Factors by which a state crosses chunks; None is one. Shapes (.., T, C, 1), (.., T, C, 1) and (.., T, 1, 1)."""

    enter: torch.Tensor | None = None  # what each token sees of the state that enters its chunk
    leave: torch.Tensor | None = None  # what is left of each token's write where its chunk ends
    keep: torch.Tensor | None = None  # what is left of the entering state where the chunk ends


def _read_in_chunks(read, write, values, is_causal, cu_seqlens, log_decay, initial_state, chunk_size):
    """Numerator and normaliser (B, H, N, d_v + 1) for every query, and the state after the last token."""
    length = values.shape[2]
    if length == 0:
        if initial_state is None:
            initial_state = values.new_zeros(*values.shape[:2], write.shape[-1], values.shape[-1])
        return read @ initial_state, initial_state
    chunk_size = min(chunk_size, length)
    padding = -length % chunk_size
    read, write, values = (_split(F.pad(x, (0, 0, 0, padding)), chunk_size) for x in (read, write, values))

    # Inside a chunk. Padding at the end has no value and no mass, so it writes nothing.
    weights = read @ write.transpose(-1, -2)
    backward = None
    if cu_seqlens is None:
        forward = _Carry()
        weights = weights.tril()
    else:
        sequence = sequence_of_token(cu_seqlens, length, padding).view(-1, chunk_size)
        forward = _carry_within_sequences(sequence, towards_end=True)
        weights = weights * (sequence.unsqueeze(-1) == sequence.unsqueeze(-2))
        if is_causal:
            weights = weights.tril()
        else:
            backward = _carry_within_sequences(sequence, towards_end=False)
    if log_decay is not None:
        decay, between_tokens = _carry_with_decay(_split(F.pad(log_decay, (0, padding)).unsqueeze(-1), chunk_size))
        weights = weights * between_tokens
        forward = _Carry(*(_product(a, b) for a, b in zip(forward, decay)))
    total = weights @ values

    # Between chunks.
    carried, state = _carried_read(read, write, values, forward, initial_state)
    total = total + carried
    if backward is not None:
        reverse = tuple(x.flip(2) for x in (read, write, values))
        total = total + _carried_read(*reverse, backward, None)[0].flip(2)
    return total.flatten(2, 3)[:, :, :length], state


def _carried_read(read, write, values, carry, initial_state):
    """What every token reads of earlier chunks, and the state after the last chunk."""
    read, write = _product(read, carry.enter), _product(write, carry.leave)
    written = write.transpose(-1, -2) @ values  # (B, H, T, K, d_v + 1)
    if initial_state is None:
        initial_state = torch.zeros_like(written[:, :, 0])
    if carry.keep is None:
        states = torch.cat([initial_state.unsqueeze(2), written], dim=2).cumsum(dim=2)
        return read @ states[:, :, :-1], states[:, :, -1]
    states = [initial_state]
    for t in range(written.shape[2]):
        states.append(states[-1] * carry.keep[..., t, :, :] + written[:, :, t])
    return read @ torch.stack(states[:-1], dim=2), states[-1]


def sequence_of_token(cu_seqlens, length, padding=0):
    """Index of the packed sequence of every token; padding counts to the last one."""
    tokens = torch.arange(length + padding, device=cu_seqlens.device).clamp(max=length - 1)
    return torch.searchsorted(cu_seqlens.long(), tokens, right=True)


def _carry_within_sequences(sequence, towards_end):
    """A state crosses into the next chunk only with the sequence it belongs to. sequence: (T, C)."""
    if not towards_end:
        sequence = sequence.flip(0)
    border = sequence[:, -1] if towards_end else sequence[:, 0]
    # The initial state belongs to the first sequence; nothing comes in from behind the end.
    before = sequence[:1, 0] if towards_end else torch.full_like(border[:1], -1)
    before = torch.cat([before, border[:-1]])
    factors = (sequence == before[:, None], sequence == border[:, None], (before == border)[:, None])
    return _Carry(*(factor.unsqueeze(-1) for factor in factors))


def _carry_with_decay(log_decay):
    """log_decay (B, H, T, C, 1): the carry, and the decay (B, H, T, C, C) from token j to token i >= j."""
    total = log_decay.cumsum(dim=-2)
    last = total[..., -1:, :]
    difference = total - total.transpose(-1, -2)
    later = torch.ones(difference.shape[-2:], dtype=torch.bool, device=difference.device).triu(1)
    between_tokens = difference.masked_fill(later, -torch.inf).exp()
    return _Carry(total.exp(), (last - total).exp(), last.exp()), between_tokens


def _split(x, chunk_size):
    return x.unflatten(2, (-1, chunk_size))


def _product(a, b):
    return a if b is None else b if a is None else a * b
