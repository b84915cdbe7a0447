"""Gaussian Mixture Attention as matrix products: linear in length, with no tensor of N x N or N x K x d_v.

A causal (or packed) sequence is cut into chunks of C tokens. Inside a chunk the tokens meet as a C x C product of
responsibilities; between chunks only states (K x (d_v + 1), the mass being the last column) are handed on.

The work goes through in tiles: a few heads, and a stretch of tokens, at a time, so that responsibilities stay in the
processor's cache. What is kept for backward is what goes in, what comes out, and one state for every stretch;
responsibilities are computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


CHUNK_SIZE = 128

# Responsibilities below this are dropped: float32 cannot see them in any result, but their products would be subnormal
# numbers, on which CPUs are several times slower.
FAINTEST = 4e-18

# A decay below this is forgetting everything; finite, so that differences of its sums stay numbers.
LOG_DECAY_MIN = -30.0

# Tokens to a stretch, and numbers in a tile of responsibilities. On two cores, tiles eight times smaller cost 5 to
# 30 %, and tiles sixteen times larger were between 9 % slower and 6 % faster.
STRETCH = 2048
TILE = 1 << 20


def responsibilities(x, means, variances, log_priors):
    """Posterior over components: x (B, H, N, d_r) -> (B, H, N, K), rows summing to one."""
    return MixtureMap.forward(x, *_score_weights(means, variances, log_priors))


def attention(query, key, value, means, variances, log_priors, **options):
    """The fast path behind `functional.gaussian_mixture_attention`; `options` are those of `linear_attention`."""
    parameters = _score_weights(means, variances, log_priors)
    return linear_attention(query, key, value, MixtureMap, parameters, means.shape[-2], dtype=means.dtype, **options)


def _score_weights(means, variances, log_priors):
    """Weights (H, K, 2 d_r) on x and x^2, and constants (H, K), whose sum is the log-density of every component.

    Up to a term that all components share: scores are taken relative to one wide Gaussian at the centre of the
    mixture. That changes no posterior, and it cancels the part of x^2 that all components share before it can cost
    precision. As the score gradients of a token sum to zero over the components, that Gaussian needs no gradient.
    """
    precisions = variances.reciprocal()
    shared_precision = precisions.amin(dim=-2, keepdim=True).detach()
    centre = means.mean(dim=-2, keepdim=True).detach()
    linear = precisions * means - shared_precision * centre
    quadratic = -0.5 * (precisions - shared_precision)
    constants = (
        log_priors
        - 0.5 * variances.log().sum(-1)
        - 0.5 * (precisions * means.square() - shared_precision * centre.square()).sum(-1)
    )
    return torch.cat([linear, quadratic], dim=-1), constants


class MixtureMap:
    """From routing vectors to responsibilities. Parameters: score weights (H, K, 2 d_r) and constants (H, K)."""

    @staticmethod
    def forward(x, weights, constants):
        scores = torch.cat([x, x.square()], dim=-1) @ weights.transpose(-1, -2) + constants.unsqueeze(-2)
        return F.threshold(scores.softmax(dim=-1), FAINTEST, 0.0)

    @staticmethod
    def backward(x, gamma, gradient, weights, constants):
        """Gradients of x and, summed over batch and tokens, of the parameters."""
        by_scores = torch._softmax_backward_data(gradient, gamma, -1, gamma.dtype)
        by_weights = by_scores.transpose(-1, -2) @ torch.cat([x, x.square()], dim=-1)
        by_x, by_square = (by_scores @ weights).chunk(2, dim=-1)
        return torch.addcmul(by_x, x, by_square, value=2.0), (by_weights.sum(0), by_scores.sum((0, 2)))


def linear_attention(
    query,
    key,
    value,
    feature_map,
    parameters,
    num_features,
    is_causal=False,
    key_mask=None,
    cu_seqlens=None,
    log_decay=None,
    initial_state=None,
    eps=1e-6,
    chunk_size=CHUNK_SIZE,
    dtype=torch.float32,
):
    """Attention through a memory of `num_features` slots, written and read by features of keys and queries.

    `feature_map` has `forward(x, *parameters)` and `backward(x, features, gradient, *parameters)` as `MixtureMap` has
    them; the parameters are indexed by head. All is computed in `dtype`, and causal attention by `chunk_size` tokens.
    The rest is as in `functional.gaussian_mixture_attention`.
    """
    if log_decay is not None:
        log_decay = effective_decay(log_decay, key_mask)
    if key_mask is not None:
        unwritten = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(unwritten, 0.0), value.masked_fill(unwritten, 0.0)
    if initial_state is None:
        initial_state = torch.zeros(
            *value.shape[:2], num_features, value.shape[-1] + 1, dtype=dtype, device=value.device
        )
    if is_causal and value.shape[2] == 1:
        read, write = (feature_map.forward(x.to(dtype), *parameters) for x in (query, key))
        state = initial_state if log_decay is None else initial_state * log_decay.exp().unsqueeze(-1)
        state = state + write.transpose(-1, -2) * _with_mass(value.to(dtype), key_mask)
        total = read @ state
        return (total[..., :-1] / (total[..., -1:] + eps)).to(value.dtype), state
    options = (key_mask, cu_seqlens, is_causal, eps, chunk_size)
    if torch.compiler.is_compiling():
        # The compiler tiles and recomputes by itself, and loops over tiles would tie its graph to one length.
        return _in_one_piece(feature_map, query, key, value, log_decay, initial_state, *options, parameters)
    if is_causal or cu_seqlens is not None:
        return _InChunks.apply(feature_map, query, key, value, log_decay, initial_state, *options, *parameters)
    return _AtOnce.apply(feature_map, query, key, value, initial_state, key_mask, eps, *parameters)


def effective_decay(log_decay, key_mask):
    """log_decay (B, H, N), finite, and zero where a masked token forgets nothing."""
    log_decay = log_decay.clamp(min=LOG_DECAY_MIN)
    return log_decay if key_mask is None else log_decay.masked_fill(~key_mask[:, None], 0.0)


def sequence_of_token(cu_seqlens, length):
    """Index (N,) of the packed sequence of every token."""
    return torch.searchsorted(cu_seqlens.long(), torch.arange(length, device=cu_seqlens.device), right=True)


def _in_one_piece(
    feature_map, query, key, value, log_decay, state, key_mask, cu_seqlens, is_causal, eps, chunk, parameters
):
    """What `_AtOnce` and `_InChunks` do, without tiles and with PyTorch's own gradients."""
    length = query.shape[2]
    read, write = (feature_map.forward(x.to(state.dtype), *parameters) for x in (query, key))
    values = _with_mass(value.to(state.dtype), key_mask)
    if is_causal or cu_seqlens is not None:
        sequence = None if cu_seqlens is None else sequence_of_token(cu_seqlens, length)
        crossings = _crossings(length, chunk, is_causal, log_decay, sequence, sequence, state)
        total, state = _read_chunks(*(_chunks(x, chunk) for x in (read, write, values)), state, *crossings)
        total = total.flatten(2, 3)[:, :, :length]
    else:
        state = state + write.transpose(-1, -2) @ values
        total = read @ state
    return (total[..., :-1] / (total[..., -1:] + eps)).to(value.dtype), state


class _AtOnce(torch.autograd.Function):
    """Every query reads what all keys wrote."""

    @staticmethod
    def forward(ctx, feature_map, query, key, value, initial_state, key_mask, eps, *parameters):
        state = initial_state.clone()
        for tile in _tiles(key, state):
            write = feature_map.forward(tile.of(key, state.dtype), *tile.of_heads(parameters))
            state[tile.heads] += write.transpose(-1, -2) @ tile.values(value, key_mask, state.dtype)
        output = _empty_like_heads(value, query.shape[2])
        normaliser = state.new_empty(query.shape[:3])
        for tile in _tiles(query, state):
            read = feature_map.forward(tile.of(query, state.dtype), *tile.of_heads(parameters))
            tile.normalise(read @ state[tile.heads], eps, output, normaliser)
        ctx.feature_map = feature_map
        ctx.save_for_backward(query, key, value, key_mask, state, output, normaliser, *parameters)
        return output, state

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient, state_gradient):
        query, key, value, key_mask, state, output, normaliser, *parameters = ctx.saved_tensors
        gradients = _Gradients(ctx.feature_map, query, key, value, parameters)
        state_gradient = state_gradient.clone()
        for tile in _tiles(query, state):
            x = tile.of(query, state.dtype)
            read = ctx.feature_map.forward(x, *tile.of_heads(parameters))
            by_total = tile.total_gradient(output_gradient, output, normaliser)
            state_gradient[tile.heads] += read.transpose(-1, -2) @ by_total
            gradients.add(tile, "query", x, read, by_total @ state[tile.heads].transpose(-1, -2))
        for tile in _tiles(key, state):
            x = tile.of(key, state.dtype)
            write = ctx.feature_map.forward(x, *tile.of_heads(parameters))
            by_state = state_gradient[tile.heads]
            tile.put(gradients.value, (write @ by_state)[..., :-1])
            by_write = tile.values(value, key_mask, state.dtype) @ by_state.transpose(-1, -2)
            gradients.add(tile, "key", x, write, by_write)
        by_query, by_key, by_value, by_parameters = gradients.result()
        return None, by_query, by_key, by_value, state_gradient, None, None, *by_parameters


class _InChunks(torch.autograd.Function):
    """Every query reads what keys up to it wrote, or keys of its own packed sequence, chunk by chunk."""

    @staticmethod
    def forward(
        ctx,
        feature_map,
        query,
        key,
        value,
        log_decay,
        initial_state,
        key_mask,
        cu_seqlens,
        is_causal,
        eps,
        chunk,
        *parameters,
    ):
        length = value.shape[2]
        chunk = max(min(chunk, length), 1)
        stretches = _stretches(length, chunk, whole=not is_causal)
        sequence = None if cu_seqlens is None else sequence_of_token(cu_seqlens, length)
        output = _empty_like_heads(value, length)
        normaliser = initial_state.new_empty(query.shape[:3])
        state = initial_state.clone()
        entering = state.new_empty(len(stretches), *state.shape)
        for number, stretch in enumerate(stretches):
            entering[number] = state
            for tile in _tiles(query, state, stretch):
                read, write = (
                    _chunks(feature_map.forward(tile.of(x, state.dtype), *tile.of_heads(parameters)), chunk)
                    for x in (query, key)
                )
                values = _chunks(tile.values(value, key_mask, state.dtype), chunk)
                inner, carries = tile.crossings(chunk, is_causal, log_decay, sequence, state)
                total, state[tile.heads] = _read_chunks(read, write, values, state[tile.heads], inner, carries)
                tile.normalise(tile.unchunk(total), eps, output, normaliser)
        ctx.feature_map, ctx.is_causal, ctx.eps = feature_map, is_causal, eps
        ctx.stretches, ctx.chunk = stretches, chunk
        ctx.save_for_backward(
            query, key, value, log_decay, key_mask, sequence, output, normaliser, entering, state, *parameters
        )
        return output, state

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient, state_gradient):
        query, key, value, log_decay, key_mask, sequence, output, normaliser, entering, state, *parameters = (
            ctx.saved_tensors
        )
        gradients = _Gradients(ctx.feature_map, query, key, value, parameters)
        decay_gradient = None if log_decay is None else torch.empty_like(log_decay)
        state_gradient = state_gradient.clone()
        leaving = state
        for number, stretch in reversed(list(enumerate(ctx.stretches))):
            for tile in _tiles(query, state, stretch):
                query_x, key_x = tile.of(query, state.dtype), tile.of(key, state.dtype)
                read, write = (
                    _chunks(ctx.feature_map.forward(x, *tile.of_heads(parameters)), ctx.chunk)
                    for x in (query_x, key_x)
                )
                values = _chunks(tile.values(value, key_mask, state.dtype), ctx.chunk)
                by_total = _chunks(tile.total_gradient(output_gradient, output, normaliser), ctx.chunk)
                inner, carries = tile.crossings(ctx.chunk, ctx.is_causal, log_decay, sequence, state)

                affinities = read @ write.transpose(-1, -2)
                affinities *= inner
                by_values = affinities.transpose(-1, -2) @ by_total
                by_affinities = by_total @ values.transpose(-1, -2)
                by_affinities *= inner
                by_read = by_affinities @ write
                by_write = by_affinities.transpose(-1, -2) @ read
                by_leaving = state_gradient[tile.heads].clone()
                for carry in carries:
                    states = carry.states(entering[number][tile.heads], write, values)
                    by_read += _scaled(by_total @ states[:, :, :-1].transpose(-1, -2), carry.enter)
                    by_states = _scaled(read, carry.enter).transpose(-1, -2) @ by_total
                    by_last = by_leaving if carry.is_forward else torch.zeros_like(by_leaving)
                    by_first, by_written = carry.back(torch.cat([by_states, by_last.unsqueeze(2)], dim=2))
                    by_values += _scaled(write, carry.leave) @ by_written
                    by_write += _scaled(values @ by_written.transpose(-1, -2), carry.leave)
                    if carry.is_forward:
                        state_gradient[tile.heads] = by_first

                if log_decay is not None:
                    # The sum of decays up to a token scales its read up and its write down. The normaliser cancels the
                    # first but for eps. The state that leaves has all the sums in it.
                    by_sum = tile.of(output_gradient, state.dtype) * tile.of(output, state.dtype)
                    by_sum = by_sum.sum(-1) * (ctx.eps / normaliser[tile.heads][:, :, tile.tokens])
                    by_sum -= tile.unchunk(by_values * values).sum(-1)
                    by_sum[..., -1] += (by_leaving * leaving[tile.heads]).sum((-1, -2))
                    tile.put(decay_gradient, by_sum.flip(-1).cumsum(-1).flip(-1))
                tile.put(gradients.value, tile.unchunk(by_values)[..., :-1])
                gradients.add(tile, "query", query_x, tile.unchunk(read), tile.unchunk(by_read))
                gradients.add(tile, "key", key_x, tile.unchunk(write), tile.unchunk(by_write))
            leaving = entering[number]
        by_query, by_key, by_value, by_parameters = gradients.result()
        return None, by_query, by_key, by_value, decay_gradient, state_gradient, *[None] * 5, *by_parameters


def _read_chunks(read, write, values, first, inner, carries):
    """What every token reads, (B, H, T, C, d_v + 1), and the state after the last chunk."""
    affinities = read @ write.transpose(-1, -2)
    affinities *= inner
    total = affinities @ values
    for carry in carries:
        states = carry.states(first, write, values)
        total += _scaled(read, carry.enter) @ states[:, :, :-1]
        if carry.is_forward:
            last = states[:, :, -1]
    return total, last


class _Gradients:
    """Gradients of the inputs and of the feature map's parameters, gathered tile by tile."""

    def __init__(self, feature_map, query, key, value, parameters):
        self.feature_map, self.parameters = feature_map, parameters
        self.query, self.key, self.value = (_empty_like_heads(x, x.shape[2]) for x in (query, key, value))
        self.by_parameters = [torch.zeros_like(parameter) for parameter in parameters]

    def add(self, tile, name, x, features, gradient):
        by_x, by_parameters = self.feature_map.backward(x, features, gradient, *tile.of_heads(self.parameters))
        tile.put(getattr(self, name), by_x)
        for target, gradient in zip(tile.of_heads(self.by_parameters), by_parameters):
            target += gradient

    def result(self):
        return self.query, self.key, self.value, self.by_parameters


class _Tile(NamedTuple):
    """A few heads of a few rows, and a stretch of tokens: few enough for features to stay in the processor's cache."""

    heads: tuple[slice, slice]
    tokens: slice

    def of(self, x, dtype):
        return x[self.heads][:, :, self.tokens].to(dtype)

    def of_heads(self, parameters):
        return [parameter[self.heads[1]] for parameter in parameters]

    def values(self, value, key_mask, dtype):
        return _with_mass(self.of(value, dtype), None if key_mask is None else key_mask[self.heads[0], self.tokens])

    def put(self, target, x):
        target[self.heads][:, :, self.tokens] = x.to(target.dtype)

    def crossings(self, chunk, is_causal, log_decay, sequence, state):
        start, stop = self.tokens.start, self.tokens.stop
        log_decay = None if log_decay is None else log_decay[self.heads][:, :, self.tokens]
        before = None if sequence is None else sequence[max(start - 1, 0) :]
        sequence = None if sequence is None else sequence[self.tokens]
        return _crossings(stop - start, chunk, is_causal, log_decay, sequence, before, state)

    def unchunk(self, x):
        return x.flatten(2, 3)[:, :, : self.tokens.stop - self.tokens.start]

    def normalise(self, total, eps, output, normaliser):
        """Divide by the mass read, into `output` and `normaliser`."""
        below = total[..., -1] + eps
        self.put(normaliser, below)
        self.put(output, total[..., :-1] / below.unsqueeze(-1))

    def total_gradient(self, output_gradient, output, normaliser):
        """Gradient of numerator and normaliser, (.., d_v + 1)."""
        gradient = self.of(output_gradient, normaliser.dtype)
        inward = (gradient * self.of(output, normaliser.dtype)).sum(-1, keepdim=True)
        below = normaliser[self.heads][:, :, self.tokens].unsqueeze(-1)
        return torch.cat([gradient, -inward], dim=-1) / below


class _Carry(NamedTuple):
    """How states cross chunks. None is one."""

    # (.., T + 1, T + 1): states entering each chunk, and the last one, of the first state and the writes. None: sums.
    crossing: torch.Tensor | None = None
    enter: torch.Tensor | None = None  # (.., T, C, 1): what each token sees of the state that enters its chunk
    leave: torch.Tensor | None = None  # (.., T, C, 1): what is left of each token's write where its chunk ends
    is_forward: bool = True

    def states(self, first, write, values):
        written = _scaled(write, self.leave).transpose(-1, -2) @ values  # (.., T, K, d_v + 1)
        before = torch.cat([first.unsqueeze(2), written], dim=2)
        if self.crossing is None:
            return before.cumsum(dim=2)
        return (self.crossing @ before.flatten(3)).view_as(before)

    def back(self, states_gradient):
        if self.crossing is None:
            before = states_gradient.flip(2).cumsum(dim=2).flip(2)
        else:
            before = (self.crossing.transpose(-1, -2) @ states_gradient.flatten(3)).view_as(states_gradient)
        return before[:, :, 0], before[:, :, 1:]


def _crossings(length, chunk, is_causal, log_decay, sequence, before, like):
    """Factors (.., C, C) on affinities inside a chunk, and the carries between chunks.

    log_decay: (B, H, N) or None. sequence: (N,), what `sequence_of_token` says of these tokens, or None; `before`
    begins with the token before them, or with the first of all.
    """
    dtype, device = like.dtype, like.device
    padding = -length % chunk
    count = (length + padding) // chunk
    inner = torch.ones(chunk, chunk, dtype=dtype, device=device)
    if is_causal:
        inner = inner.tril()
    forward, carries = _Carry(), []
    if sequence is not None or log_decay is not None:
        crossing = torch.ones(count + 1, count + 1, dtype=dtype, device=device).tril()
    if sequence is not None:
        # Padding counts to the last sequence, so that its state goes on.
        inside = F.pad(sequence, (0, padding), value=-1)
        inside = torch.where(inside < 0, sequence[-1], inside).view(count, chunk)
        borders = torch.cat([before[:1], inside[:, -1]])
        inner = inner * (inside.unsqueeze(-1) == inside.unsqueeze(-2))
        enter, leave = inside == borders[:-1, None], inside == borders[1:, None]
        crossing = crossing * (borders[:, None] == borders)
        forward = _Carry(crossing, *(x.unsqueeze(-1).to(dtype) for x in (enter, leave)))
        if not is_causal:
            # What comes from later chunks: nothing enters the last one, and the row of the last state is empty.
            following = F.pad(inside[1:, 0], (0, 1), value=-1)
            enter, leave = inside == following[:, None], inside == inside[:, :1]
            later = torch.ones(count, count, dtype=dtype, device=device).triu(1)
            later *= following[:, None] == inside[:, 0]
            crossing = F.pad(later, (1, 0, 0, 1))
            carries = [_Carry(crossing, *(x.unsqueeze(-1).to(dtype) for x in (enter, leave)), is_forward=False)]
    if log_decay is not None:
        decay = F.pad(log_decay, (0, padding)).unflatten(-1, (count, chunk))
        sums = decay.cumsum(-1)
        last = sums[..., -1:]
        inner = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).clamp(max=0.0).exp() * inner
        ends = F.pad(last.squeeze(-1).cumsum(-1), (1, 0))
        crossing = (ends.unsqueeze(-1) - ends.unsqueeze(-2)).clamp(max=0.0).exp() * crossing
        enter, leave = sums.exp().unsqueeze(-1), (last - sums).exp().unsqueeze(-1)
        forward = _Carry(crossing, _scaled(enter, forward.enter), _scaled(leave, forward.leave))
    return inner, [forward, *carries]


def _stretches(length, chunk, whole):
    """Slices of the tokens, whole chunks to each, that are worked on together."""
    if whole:
        return [slice(0, length)]
    step = max(STRETCH // chunk, 1) * chunk
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _tiles(x, state, stretch=None):
    """Tiles of x (B, H, N, ..) over a stretch of tokens, or over all."""
    batch, heads, length = x.shape[:3]
    size = TILE if x.device.type == "cpu" else TILE << 10
    stretches = _stretches(length, 1, whole=False) if stretch is None else [stretch]
    one_head = max(min(length, STRETCH) if stretch is None else stretch.stop - stretch.start, 1) * state.shape[2]
    head_step = min(heads, max(1, size // one_head))
    batch_step = max(1, size // (one_head * heads)) if head_step == heads else 1
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            for tokens in stretches:
                yield _Tile((slice(b, b + batch_step), slice(h, h + head_step)), tokens)


def _with_mass(value, key_mask):
    """Values and, as a last column, the mass of their tokens: one, or zero where masked."""
    if key_mask is None:
        return F.pad(value, (0, 1), value=1.0)
    mass = key_mask[:, None, :, None].to(value.dtype).expand(*value.shape[:3], 1)
    return torch.cat([value, mass], dim=-1)


def _empty_like_heads(x, length):
    """(B, H, N, d) as a view of (B, N, H, d), which is how projections have it."""
    batch, heads, _, dim = x.shape
    return torch.empty(batch, length, heads, dim, dtype=x.dtype, device=x.device).transpose(1, 2)


def _chunks(x, size):
    padding = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, padding)) if padding else x).unflatten(2, (-1, size))


def _scaled(x, factor):
    return x if factor is None else x * factor
