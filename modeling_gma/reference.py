"""Gaussian Mixture Attention as the paper writes it: short, slow, and the oracle of every test.

And softmax attention in a window, as literally.
"""

import math

import torch


def scores(x, means, variances, log_priors):
    """Log of prior times density: x (B, H, N, d_r) -> (B, H, N, K)."""
    distance = (x.unsqueeze(-2) - means.unsqueeze(-3)).square() / variances.unsqueeze(-3)
    log_volume = x.shape[-1] * math.log(2 * math.pi) + variances.log().sum(-1)
    log_density = -0.5 * (log_volume.unsqueeze(-2) + distance.sum(-1))
    return log_priors.unsqueeze(-2) + log_density


def responsibilities(x, means, variances, log_priors):
    """Posterior over components: x (B, H, N, d_r) -> (B, H, N, K)."""
    return torch.softmax(scores(x, means, variances, log_priors), dim=-1)


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
):
    """One token at a time where causal, one sequence at a time where packed. Shapes as in `functional`."""
    mixture = (means, variances, log_priors)
    dtype = value.dtype
    query, key, value = (x.to(means.dtype) for x in (query, key, value))
    if cu_seqlens is not None:
        outputs, state = [], initial_state
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            piece = slice(start, end)
            output, state = attention(
                query[:, :, piece],
                key[:, :, piece],
                value[:, :, piece],
                *mixture,
                is_causal=is_causal,
                key_mask=None if key_mask is None else key_mask[:, piece],
                log_decay=None if log_decay is None else log_decay[:, :, piece],
                initial_state=initial_state if start == 0 else None,
                eps=eps,
            )
            outputs.append(output)
        return torch.cat(outputs, dim=2), state

    read, write = responsibilities(query, *mixture), responsibilities(key, *mixture)
    values = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
    if key_mask is not None:
        values = values.masked_fill(~key_mask[:, None, :, None], 0.0)
    if initial_state is None:
        initial_state = values.new_zeros(*values.shape[:2], means.shape[-2], values.shape[-1])

    if not is_causal:
        state = initial_state + write.transpose(-1, -2) @ values
        total = read @ state
    else:
        state, totals = initial_state, []
        for i in range(values.shape[2]):
            if log_decay is not None:
                decay = log_decay[:, :, i].exp()
                if key_mask is not None:
                    decay = decay.masked_fill(~key_mask[:, None, i], 1.0)
                state = state * decay[:, :, None, None]
            state = state + write[:, :, i, :, None] * values[:, :, i, None, :]
            totals.append(read[:, :, i, None, :] @ state)
        total = torch.cat(totals, dim=2) if totals else read @ state
    return (total[..., :-1] / (total[..., -1:] + eps)).to(dtype), state


def windowed_attention(query, key, value, window, is_causal=False, key_mask=None, cu_seqlens=None):
    """One query of one row at a time. Shapes as in `sliding`."""
    (batch, _, length), total = query.shape[:3], key.shape[2]
    mask = torch.ones(batch, total, dtype=torch.bool) if key_mask is None else key_mask
    ends = [total] if cu_seqlens is None else cu_seqlens[1:].tolist()
    sequence = [sum(end <= i for end in ends) for i in range(total)]
    rows = []
    for row in range(batch):
        outputs = []
        for i in range(total - length, total):
            tokens = [j for j in range(total) if mask[row, j] and sequence[j] == sequence[i]]
            place = tokens.index(i) if i in tokens else None
            last = None if place is None else place + (1 if is_causal else window)
            seen = [] if place is None else tokens[max(place - window + 1, 0) : last]
            scores = query[row, :, i - total + length, None] @ key[row][:, seen].mT / math.sqrt(query.shape[-1])
            outputs.append(scores.softmax(-1) @ value[row][:, seen])
        rows.append(torch.cat(outputs, dim=1))
    return torch.stack(rows)
