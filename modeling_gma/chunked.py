"""Gaussian Mixture Attention as matrix products: linear in length, with no tensor of N x N or N x K x d_v.

A causal (or packed) sequence is cut into chunks of C tokens. Inside a chunk the tokens meet as a C x C product of
responsibilities; between chunks only states (K x (d_v + 1), the mass being the last column) are handed on.

The work goes through in tiles: a few heads, and a stretch of tokens, at a time, so that responsibilities stay in the
processor's cache, in memory that every tile uses again. What is kept for backward is what goes in, what comes out, and
the state between any two stretches; responsibilities are computed again.

Inside, heads come first: x (h, b, n, ..) is then a batch of matrices for the weights of h heads, with rows and tokens
as one dimension, and a batch of h * b matrices for the states, both without a copy.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


CHUNK_SIZE = 64

# Responsibilities below this are dropped: float32 cannot see them in any result, but their products would be subnormal
# numbers, on which CPUs are several times slower.
FAINTEST = 4e-18

# A decay below this is forgetting everything; finite, so that differences of its sums stay numbers.
LOG_DECAY_MIN = -30.0

# Tokens between two states that are kept for backward, at least; and numbers in a tile of responsibilities for each
# thread. On two cores, tiles from half to four times as large come out within 7 %; much smaller ones are up to 30 %
# slower.
STRETCH = 512
TILE = 1 << 18


def responsibilities(x, means, variances, log_priors):
    """Posterior over components: x (B, H, N, d_r) -> (B, H, N, K), rows summing to one."""
    return MixtureMap.features(x, *MixtureMap.prepare(means, variances, log_priors))


def attention(query, key, value, means, variances, log_priors, **options):
    """The fast path behind `functional.gaussian_mixture_attention`; `options` are those of `linear_attention`."""
    mixture = (means, variances, log_priors)
    return linear_attention(query, key, value, MixtureMap, mixture, means.shape[-2], dtype=means.dtype, **options)


class MixtureMap:
    """From routing vectors to responsibilities. Parameters: means and variances (H, K, d_r), log_priors (H, K)."""

    @staticmethod
    def prepare(means, variances, log_priors):
        """Weights (H, 2 d_r + 1, K) on x, x^2 and one, whose sum is the log-density of every component.

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
        return (torch.cat([linear.mT, quadratic.mT, constants.unsqueeze(-2)], dim=-2),)

    @staticmethod
    def features(x, weights):
        inputs = torch.cat([x, x.square(), torch.ones_like(x[..., :1])], dim=-1)
        return F.threshold((inputs @ weights).softmax(dim=-1), FAINTEST, 0.0)

    @staticmethod
    def fill(features, x, scratch, weights):
        inputs = MixtureMap._inputs(features, x, scratch)
        dim, length = x.shape[-1], x.shape[2]
        inputs[:, :, :length, :dim].copy_(x)
        if features.shape[2] > length:
            inputs[:, :, length:] = 0.0
        torch.mul(inputs[..., :dim], inputs[..., :dim], out=inputs[..., dim:-1])
        inputs[..., -1] = 1.0
        scores = features.flatten(1, 2)
        torch.bmm(inputs.flatten(1, 2), weights, out=scores)
        torch.softmax(scores, dim=-1, out=scores)
        F.threshold_(scores, FAINTEST, 0.0)

    @staticmethod
    def backward(features, gradient, scratch, by_x, by_weights, weights):
        inputs = MixtureMap._inputs(features, by_x, scratch)
        dim, length = by_x.shape[-1], by_x.shape[2]
        by_scores = gradient.flatten(1, 2)
        torch.ops.aten._softmax_backward_data.out(
            by_scores, features.flatten(1, 2), -1, features.dtype, grad_input=by_scores
        )
        by_weights.baddbmm_(inputs.flatten(1, 2).mT, by_scores)
        by_inputs = scratch("by inputs", *features.shape[:3], 2 * dim)
        torch.bmm(by_scores, weights[:, :-1].mT, out=by_inputs.flatten(1, 2))
        inputs, by_inputs = inputs[:, :, :length], by_inputs[:, :, :length]
        torch.addcmul(by_inputs[..., :dim], inputs[..., :dim], by_inputs[..., dim:], value=2.0, out=by_x)

    @staticmethod
    def _inputs(features, x, scratch):
        """Memory for x, x^2 and one, the rows aligned."""
        width = 2 * x.shape[-1] + 1
        return scratch("inputs", *features.shape[:3], width + -width % 16)[..., :width]


class PreparedMixtureMap(MixtureMap):
    """The same with what `MixtureMap.prepare` gave as its only parameter."""

    @staticmethod
    def prepare(weights):
        return (weights,)


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

    `feature_map` is a class with four static methods, like `MixtureMap`:
        prepare(*parameters): tensors indexed by head, computed once for all tokens. Differentiable.
        features(x, *prepared): (B, H, N, d) -> (B, H, N, num_features). Differentiable.
        fill(features, x, scratch, *prepared): the same for a tile, x (h, b, n, d), into the first n rows of features
            (h, b, >= n, num_features). `scratch("inputs", *shape)` is memory that `backward` finds again, and that of
            another name is for the moment.
        backward(features, gradient, scratch, by_x, *by_prepared, *prepared): from the gradient of features, which it
            may overwrite, write that of x and add those of what `prepare` gave.

    All is computed in `dtype`, and causal attention by `chunk_size` tokens. The rest is as in
    `functional.gaussian_mixture_attention`.
    """
    if log_decay is not None:
        log_decay = effective_decay(log_decay, key_mask)
    if key_mask is not None:
        unwritten = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(unwritten, 0.0), value.masked_fill(unwritten, 0.0)
    state = initial_state
    if state is None:
        state = torch.zeros(*value.shape[:2], num_features, value.shape[-1] + 1, dtype=dtype, device=value.device)
    if is_causal and value.shape[2] == 1:
        prepared = feature_map.prepare(*parameters)
        both = torch.cat([query, key], dim=2).to(dtype)
        read, write = feature_map.features(both, *prepared).split(1, dim=2)
        state = state if log_decay is None else state * log_decay.exp().unsqueeze(-1)
        state = state + write.transpose(-1, -2) * _with_mass(value.to(dtype), key_mask)
        total = read @ state
        return (total[..., :-1] / (total[..., -1:] + eps)).to(value.dtype), state
    options = (key_mask, cu_seqlens, is_causal, eps, chunk_size)
    if torch.compiler.is_compiling():
        # The compiler tiles and recomputes by itself, and loops over tiles would tie its graph to one length.
        return _in_one_piece(feature_map, query, key, value, log_decay, state, *options, parameters)
    is_fresh = initial_state is None
    if is_causal or cu_seqlens is not None:
        return _InChunks.apply(feature_map, query, key, value, log_decay, state, is_fresh, *options, *parameters)
    return _AtOnce.apply(feature_map, query, key, value, state, is_fresh, key_mask, eps, *parameters)


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
    prepared = feature_map.prepare(*parameters)
    read, write = (feature_map.features(x.to(state.dtype), *prepared) for x in (query, key))
    values = _with_mass(value.to(state.dtype), key_mask)
    if not (is_causal or cu_seqlens is not None):
        state = state + write.transpose(-1, -2) @ values
        total = read @ state
    else:
        sequence = None if cu_seqlens is None else sequence_of_token(cu_seqlens, length)
        inner, carries = _crossings(length, chunk, is_causal, log_decay, sequence, sequence, state, at_once=True)
        read, write, values = (_chunks(x, chunk) for x in (read, write, values))
        total = (read @ write.transpose(-1, -2) * inner) @ values
        for carry in carries:
            states, last = carry.states_at_once(state, write.transpose(-1, -2) @ _scaled(values, carry.leave))
            total = total + _scaled(read @ states, carry.enter)
            state = last if carry.is_forward else state
        total = total.flatten(2, 3)[:, :, :length]
    return (total[..., :-1] / (total[..., -1:] + eps)).to(value.dtype), state


def full_precision(device: torch.device):
    """Autocast off, where it is on."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def in_full_precision(backward):
    """Forward runs with autocast off; backward may be called where it is on."""

    def wrapped(ctx, *gradients):
        with full_precision(gradients[0].device):
            return backward(ctx, *gradients)

    return wrapped


class _AtOnce(torch.autograd.Function):
    """Every query reads what all keys wrote."""

    @staticmethod
    def forward(ctx, feature_map, query, key, value, initial_state, is_fresh, key_mask, eps, *parameters):
        state = _inside(initial_state)
        work = _Work(feature_map, parameters, state)
        work.write_all(state, key, value, key_mask)
        output = _empty_like_heads(value, query.shape[2])
        normaliser = state.new_empty(query.shape[:3])
        for tile in _tiles(query, state):
            read = work.features("features", tile, query)
            tile.normalise(work.matmul("total", read, state[tile.groups].mT), eps, output, normaliser)
        ctx.feature_map = feature_map
        # A state that is not small beside the inputs is written again.
        kept = None if is_fresh and key.shape[2] < _shortest_stretch(state, value) else state
        ctx.save_for_backward(query, key, value, key_mask, kept, output, normaliser, *parameters)
        return output, _outside(state)

    @staticmethod
    @once_differentiable
    @in_full_precision
    def backward(ctx, output_gradient, state_gradient):
        query, key, value, key_mask, state, output, normaliser, *parameters = ctx.saved_tensors
        by_query, by_key, by_value = (_empty_like_heads(x, x.shape[2]) for x in (query, key, value))
        by_state = _inside(state_gradient)
        work = _Work(ctx.feature_map, parameters, by_state, is_backward=True)
        if state is None:
            state = torch.zeros_like(by_state)
            work.write_all(state, key, value, key_mask)
        for tile in _tiles(query, state):
            read = work.features("features", tile, query)
            by_total = work.total_gradient(tile, output_gradient, output, normaliser)
            by_state[tile.groups] += _matmul(by_total.mT, read)
            by_read = work.matmul("gradient", by_total, state[tile.groups])
            work.back("features", tile, read, by_read, by_query)
        for tile in _tiles(key, state):
            write = work.features("features", tile, key, key_mask=key_mask)
            by_memory, by_mass = by_state[tile.groups].tensor_split([-1], dim=-2)
            tile.put(by_value, work.matmul("by values", write, by_memory.mT))
            by_write = work.matmul("gradient", tile.of(value).to(state.dtype), by_memory, by_mass)
            work.back("features", tile, write, by_write, by_key)
        by_parameters = work.parameter_gradients()
        return None, by_query, by_key, by_value, _outside(by_state), *[None] * 3, *by_parameters


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
        is_fresh,
        key_mask,
        cu_seqlens,
        is_causal,
        eps,
        chunk,
        *parameters,
    ):
        length = value.shape[2]
        chunk = max(min(chunk, length), 1)
        sequence = None if cu_seqlens is None else sequence_of_token(cu_seqlens, length)
        output = _empty_like_heads(value, length)
        normaliser = initial_state.new_empty(query.shape[:3])
        state = _inside(initial_state)
        step = max(STRETCH, _shortest_stretch(state, value), chunk) // chunk * chunk if is_causal else max(length, 1)
        stretches = [slice(start, min(start + step, length)) for start in range(0, length, step)]
        entering = []
        work = _Work(feature_map, parameters, state)
        for stretch in stretches:
            # Nothing enters the first: no state is needed to say so.
            entering.append(None if is_fresh and stretch.start == 0 else state.clone())
            for tile in _tiles(query, state, stretch):
                read = work.features("query", tile, query, chunk)
                write = work.features("key", tile, key, chunk, key_mask)
                values = work.values(tile, value, chunk)
                inner, carries = tile.crossings(chunk, is_causal, log_decay, sequence, state)
                affinities = work.matmul("affinities", read, write.mT).mul_(inner)
                total = work.matmul("total", affinities, values)
                for carry in carries:
                    states, last = carry.states(work, state[tile.groups], write, values)
                    work.add_matmul(total, read, states.mT, carry.enter)
                    if carry.is_forward:
                        state[tile.groups] = last
                tile.normalise(tile.unchunk(total), eps, output, normaliser)
        ctx.feature_map, ctx.is_causal, ctx.eps = feature_map, is_causal, eps
        ctx.stretches, ctx.chunk = stretches, chunk
        ctx.save_for_backward(
            query, key, value, log_decay, key_mask, sequence, output, normaliser, *entering, *parameters
        )
        return output, _outside(state)

    @staticmethod
    @once_differentiable
    @in_full_precision
    def backward(ctx, output_gradient, state_gradient):
        query, key, value, log_decay, key_mask, sequence, output, normaliser, *rest = ctx.saved_tensors
        entering, parameters = rest[: len(ctx.stretches)], rest[len(ctx.stretches) :]
        by_query, by_key, by_value = (_empty_like_heads(x, x.shape[2]) for x in (query, key, value))
        by_decay = None if log_decay is None else torch.empty_like(log_decay)
        by_state = _inside(state_gradient)
        work = _Work(ctx.feature_map, parameters, by_state, is_backward=True)
        for stretch, state in zip(reversed(ctx.stretches), reversed(entering)):
            state = torch.zeros_like(by_state) if state is None else state
            for tile in _tiles(query, state, stretch):
                read = work.features("query", tile, query, ctx.chunk)
                write = work.features("key", tile, key, ctx.chunk, key_mask)
                values = work.values(tile, value, ctx.chunk)
                by_total = work.total_gradient(tile, output_gradient, output, normaliser, ctx.chunk)
                inner, carries = tile.crossings(ctx.chunk, ctx.is_causal, log_decay, sequence, state)

                affinities = work.matmul("affinities", read, write.mT).mul_(inner)
                # The gradient of the mass that tokens bring is of use to decays alone.
                columns = slice(-1 if log_decay is None else None)
                by_values = work.matmul("by values", affinities.mT, by_total[..., columns])
                by_affinities = work.matmul("affinities", by_total, values.mT).mul_(inner)
                by_read = work.matmul("by read", by_affinities, write)
                by_write = work.matmul("by write", by_affinities.mT, read)
                by_leaving = by_state[tile.groups].clone()
                for carry in carries:
                    states, last = carry.states(work, state[tile.groups], write, values)
                    by_entering = _scaled(by_total, carry.enter)
                    work.add_matmul(by_read, by_entering, states)
                    by_states = work.matmul("states", by_entering.mT, read)
                    by_first, by_written = carry.back(work, by_states, by_leaving)
                    work.add_matmul(by_write, _scaled(values, carry.leave), by_written)
                    work.add_matmul(by_values, write, by_written[..., columns, :].mT, carry.leave)
                    if carry.is_forward:
                        leaving, by_state[tile.groups] = last, by_first

                tile.put(by_value, tile.unchunk(by_values)[..., : value.shape[-1]])
                if log_decay is not None:
                    # The sum of decays up to a token scales its read up and its write down. The normaliser cancels the
                    # first but for eps. The state that leaves has all the sums in it.
                    by_sum = by_total[..., -1] * -ctx.eps
                    by_sum = tile.unchunk(by_sum - by_values.mul_(values).sum(-1))
                    by_sum[..., -1] += (by_leaving * leaving).sum((-1, -2))
                    tile.put(by_decay, by_sum.flip(-1).cumsum(-1).flip(-1))
                work.back("query", tile, read.flatten(2, 3), by_read.flatten(2, 3), by_query)
                work.back("key", tile, write.flatten(2, 3), by_write.flatten(2, 3), by_key)
        by_parameters = work.parameter_gradients()
        return None, by_query, by_key, by_value, by_decay, _outside(by_state), *[None] * 6, *by_parameters


class _Work:
    """What the tiles of one pass share: the feature map with its gradients, and memory to work in."""

    def __init__(self, feature_map, parameters, state, is_backward=False):
        self.feature_map, self.parameters, self.like = feature_map, parameters, state
        self.prepared = feature_map.prepare(*parameters)
        self.by_prepared = [torch.zeros_like(x) for x in self.prepared] if is_backward else None
        self.memory = {}

    def scratch(self, name, *shape):
        """Memory of this name: fresh memory for each tile would be cold, and come from the system page by page."""
        size = math.prod(shape)
        memory = self.memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self.memory[name] = self.like.new_empty(size)
        return memory[:size].view(shape)

    def matmul(self, name, left, right, added=None):
        """left @ right, batches of matrices, plus `added`, into memory of this name."""
        shape = (*left.shape[:-1], right.shape[-1])
        out = self.scratch(name, *shape)
        left, right, flat = (x.flatten(0, -3) for x in (left, right, out))
        if added is None:
            torch.bmm(left, right, out=flat)
        else:
            torch.baddbmm(added.flatten(0, -3), left, right, out=flat)
        return out

    def add_matmul(self, target, left, right, factor=None):
        """Add left @ right to `target`, its rows scaled by `factor`."""
        if factor is None:
            target.flatten(0, -3).baddbmm_(left.flatten(0, -3), right.flatten(0, -3))
        else:
            target.addcmul_(self.matmul("part", left, right), factor)

    def features(self, name, tile, x, chunk=None, key_mask=None):
        """Features of a tile, (h, b, n, K), or in whole chunks, (h, b, T, C, K); zero where nothing is written."""
        x = tile.of(x)
        heads, rows, length = x.shape[:3]
        features = self.scratch(name, heads, rows, _whole(length, chunk), self.like.shape[-1])
        self.feature_map.fill(features, x, self._scratch_of(name), *tile.of_heads(self.prepared))
        features[:, :, length:] = 0.0
        if key_mask is not None:
            features[:, :, :length].masked_fill_(~key_mask[tile.rows, tile.tokens].unsqueeze(-1), 0.0)
        return features if chunk is None else features.unflatten(2, (-1, chunk))

    def write_all(self, state, key, value, key_mask):
        """Add what all keys write to a state (H, B, d_v + 1, K)."""
        for tile in _tiles(key, state):
            write = self.features("features", tile, key, key_mask=key_mask)
            written = state[tile.groups]
            written[..., :-1, :] += _matmul(tile.of(value).to(state.dtype).mT, write)
            written[..., -1, :] += write.sum(-2)

    def back(self, name, tile, features, gradient, target):
        """From the gradient of features to those of `target` and of what the feature map was prepared with."""
        target = tile.of(target)
        by_x = target if target.dtype == gradient.dtype else self.scratch("by x", *target.shape)
        prepared, by_prepared = tile.of_heads(self.prepared), tile.of_heads(self.by_prepared)
        self.feature_map.backward(features, gradient, self._scratch_of(name), by_x, *by_prepared, *prepared)
        if by_x is not target:
            target.copy_(by_x)

    def _scratch_of(self, name):
        return lambda part, *shape: self.scratch(f"{name} inputs" if part == "inputs" else part, *shape)

    def parameter_gradients(self):
        with torch.enable_grad():
            parameters = [x.detach().requires_grad_() for x in self.parameters]
            prepared = self.feature_map.prepare(*parameters)
        return torch.autograd.grad(prepared, parameters, self.by_prepared, allow_unused=True) if parameters else ()

    def values(self, tile, value, chunk):
        """Values and, as a last column, the mass of their tokens, (h, b, T, C, d_v + 1); nothing after the last."""
        value = tile.of(value)
        length, dim = value.shape[2:]
        values = self.scratch("values", *value.shape[:2], _whole(length, chunk), dim + 1)
        values[:, :, :length, :dim].copy_(value)
        values[:, :, :length, dim] = 1.0
        values[:, :, length:] = 0.0
        return values.unflatten(2, (-1, chunk))

    def total_gradient(self, tile, output_gradient, output, normaliser, chunk=None):
        """Gradient of numerator and normaliser, (h, b, n, d_v + 1), or in whole chunks."""
        # Narrow ones are widened first: `out` alone would take a product that was rounded already.
        gradient, output = (tile.of(x).to(normaliser.dtype) for x in (output_gradient, output))
        below = tile.of(normaliser).unsqueeze(-1)
        length, dim = gradient.shape[2:]
        whole = self.scratch("by total", *gradient.shape[:2], _whole(length, chunk), dim + 1)
        whole[:, :, length:] = 0.0
        by_total = whole[:, :, :length]
        torch.mul(gradient, output, out=by_total[..., :dim])
        inward = by_total[..., :dim].sum(-1, keepdim=True)
        torch.div(gradient, below, out=by_total[..., :dim])
        torch.div(inward.neg_(), below, out=by_total[..., dim:])
        return whole if chunk is None else whole.unflatten(2, (-1, chunk))


class _Tile(NamedTuple):
    """A few heads of a few rows, and a stretch of tokens: few enough for features to stay in the processor's cache."""

    rows: slice
    heads: slice
    tokens: slice

    @property
    def groups(self):
        return self.heads, self.rows

    def of(self, x):
        """x (B, H, N, ..) -> (h, b, n, ..)."""
        return x[self.rows, self.heads, self.tokens].transpose(0, 1)

    def of_heads(self, parameters):
        return [parameter[self.heads] for parameter in parameters]

    def put(self, target, x):
        self.of(target).copy_(x)

    def crossings(self, chunk, is_causal, log_decay, sequence, state):
        start, stop = self.tokens.start, self.tokens.stop
        log_decay = None if log_decay is None else self.of(log_decay)
        before = None if sequence is None else sequence[max(start - 1, 0) :]
        sequence = None if sequence is None else sequence[self.tokens]
        return _crossings(stop - start, chunk, is_causal, log_decay, sequence, before, state)

    def unchunk(self, x):
        return x.flatten(2, 3)[:, :, : self.tokens.stop - self.tokens.start]

    def normalise(self, total, eps, output, normaliser):
        """Divide by the mass read, into `output` and `normaliser`."""
        below = total[..., -1] + eps
        self.put(normaliser, below)
        torch.div(total[..., :-1], below.unsqueeze(-1), out=self.of(output))


class _Carry(NamedTuple):
    """How states cross chunks, from the first to the last or, with `is_forward` False, the other way. None is one."""

    across: torch.Tensor | None = (
        None  # (.., T): what each chunk leaves of the state before it, in the order of crossing
    )
    enter: torch.Tensor | None = None  # (.., T, C, 1): what each token sees of the state that enters its chunk
    leave: torch.Tensor | None = None  # (.., T, C, 1): what is left of each token's write where its chunk ends
    is_forward: bool = True
    # (.., T + 1, T + 1), for `states_at_once`: states entering each chunk, and the last, of the first and the writes
    crossing: torch.Tensor | None = None

    def states(self, work, first, write, values):
        """States (h, b, T, d_v + 1, K) that enter each chunk, and the one that leaves the last.

        One chunk after another: in a matrix product, a NaN would reach chunks before it.
        """
        written = work.matmul("written", _scaled(values, self.leave).mT, write)
        states, order = work.scratch("states", *written.shape), self._order(written)
        states[:, :, order[0]] = first if self.is_forward else 0.0
        for i in range(1, len(order)):
            before = order[i - 1]
            self._add(written[:, :, before], states[:, :, before], i - 1, states[:, :, order[i]])
        return states, self._add(written[:, :, order[-1]], states[:, :, order[-1]], -1)

    def states_at_once(self, first, written):
        """The same by PyTorch's own operations."""
        before = torch.cat([first.unsqueeze(2), written], dim=2)
        if self.crossing is None:
            states = before.cumsum(dim=2)
        else:
            states = (self.crossing @ before.flatten(3)).view_as(before)
        return states[:, :, :-1], states[:, :, -1]

    def back(self, work, by_states, by_last):
        """Gradients of the first state and of what was written, from those of the states."""
        by_written, order = work.scratch("written", *by_states.shape), self._order(by_states)
        by_written[:, :, order[-1]] = by_last if self.is_forward else 0.0
        for i in range(len(order) - 1, 0, -1):
            here = order[i]
            self._add(by_states[:, :, here], by_written[:, :, here], i, by_written[:, :, order[i - 1]])
        return self._add(by_states[:, :, order[0]], by_written[:, :, order[0]], 0), by_written

    def _order(self, states):
        chunks = range(states.shape[2])
        return chunks if self.is_forward else chunks[::-1]

    def _add(self, x, state, index, out=None):
        """x + across[index] * state."""
        if self.across is None:
            return torch.add(x, state, out=out)
        return torch.addcmul(x, state, self.across[..., index, None, None], out=out)


def _crossings(length, chunk, is_causal, log_decay, sequence, before, like, at_once=False):
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
    crossing = torch.ones(count + 1, count + 1, dtype=dtype, device=device).tril() if at_once else None
    if sequence is not None:
        # Padding counts to the last sequence, so that its state goes on.
        inside = F.pad(sequence, (0, padding), value=-1)
        inside = torch.where(inside < 0, sequence[-1], inside).view(count, chunk)
        borders = torch.cat([before[:1], inside[:, -1]])
        inner = inner * (inside.unsqueeze(-1) == inside.unsqueeze(-2))
        across = borders[1:] == borders[:-1]
        enter, leave = inside == borders[:-1, None], inside == borders[1:, None]
        forward = _Carry(*_factors(dtype, across, enter, leave))
        if at_once:
            crossing = crossing * (borders[:, None] == borders)
        if not is_causal:
            # What comes from later chunks: nothing enters the last one, and the row of the last state is empty.
            following = F.pad(inside[1:, 0], (0, 1), value=-1)
            across = F.pad((following[:-1] == following[1:]).flip(0), (0, 1))
            enter, leave = inside == following[:, None], inside == inside[:, :1]
            backward = _Carry(*_factors(dtype, across, enter, leave), is_forward=False)
            if at_once:
                later = torch.ones(count, count, dtype=dtype, device=device).triu(1)
                later = later * (following[:, None] == inside[:, 0])
                backward = backward._replace(crossing=F.pad(later, (1, 0, 0, 1)))
            carries = [backward]
    if log_decay is not None:
        # Powers of two are several times as fast as those of e.
        decay = F.pad(log_decay / math.log(2), (0, padding)).unflatten(-1, (count, chunk))
        sums = decay.cumsum(-1)
        last = sums[..., -1:]
        # Of what is left out the difference may be above zero, and its power infinite.
        inner = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).clamp_(max=0.0).exp2_() * inner
        enter, leave = sums.exp2().unsqueeze(-1), (last - sums).exp2().unsqueeze(-1)
        across = last.squeeze(-1).exp2()
        forward = _Carry(*(_scaled(*pair) for pair in zip((across, enter, leave), forward)))
        if at_once:
            ends = F.pad(last.squeeze(-1).cumsum(-1), (1, 0))
            crossing = (ends.unsqueeze(-1) - ends.unsqueeze(-2)).clamp(max=0.0).exp2() * crossing
    if at_once and (sequence is not None or log_decay is not None):
        forward = forward._replace(crossing=crossing)
    return inner, [forward, *carries]


def _shortest_stretch(state, value):
    """Tokens beside whose queries, keys, values and outputs a state (.., K) is small."""
    return 16 // value.element_size() * state.shape[-1]


def _tiles(x, state, stretch=None):
    """Tiles of x (B, H, N, ..) over a stretch of tokens, or over all."""
    batch, heads, length = x.shape[:3]
    size = TILE * torch.get_num_threads() if x.device.type == "cpu" else TILE << 10
    if stretch is None:
        step = 4 * STRETCH
        stretches = [slice(start, min(start + step, length)) for start in range(0, length, step)]
    else:
        # In chunks, twice as many things of that size are around at a time.
        size, step, stretches = size // 2, stretch.stop - stretch.start, [stretch]
    one_head = max(min(step, length), 1) * state.shape[-1]
    head_step = min(heads, max(1, size // one_head))
    row_step = max(1, size // (one_head * heads)) if head_step == heads else 1
    for row in range(0, batch, row_step):
        for head in range(0, heads, head_step):
            for tokens in stretches:
                yield _Tile(slice(row, row + row_step), slice(head, head + head_step), tokens)


def _inside(state):
    """A copy of a state (B, H, K, d_v + 1) as it is used inside: (H, B, d_v + 1, K).

    Heads first as everywhere. And matrix products are fastest where the odd size, d_v + 1, is that of their rows.
    """
    return state.permute(1, 0, 3, 2).clone(memory_format=torch.contiguous_format)


def _outside(state):
    return state.permute(1, 0, 3, 2).contiguous()


def _matmul(left, right):
    """left @ right, batches (h, b) of matrices."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


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


def _whole(length, chunk):
    """Length in whole chunks."""
    return length if chunk is None else length + -length % chunk


def _chunks(x, size):
    padding = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, padding)) if padding else x).unflatten(2, (-1, size))


def _factors(dtype, across, enter, leave):
    return across.to(dtype), enter.unsqueeze(-1).to(dtype), leave.unsqueeze(-1).to(dtype)


def _scaled(x, factor):
    return x if factor is None else x * factor
