"""The GMA mixer: projections, Gaussian mixture attention, output projection, and its place in transformers' cache."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, StaticSlidingWindowLayer
from transformers.cache_utils import LinearAttentionCacheLayerMixin as CacheLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configuration_gma import GMAConfig

from .chunked import MixtureMap, PreparedMixtureMap, full_precision, linear_attention
from .chunked import attention as chunked_attention
from .functional import (
    gaussian_mixture_attention,
    gaussian_mixture_attention_weights,
    gaussian_responsibilities,
)
from .linear import Linear, ResidualProjection
from .mixture import GaussianMixture
from .sliding import (
    alignment,
    in_order,
    rotary_positions,
    rotate,
    windowed_attention,
    windowed_attention_weights,
)


# Of the first head and of the last: memories begin with half-lives of 2 to 280 tokens.
FORGET_GATE_BIAS = (1.0, 6.0)

# What an output gate begins with of a token's own value, beside what heads bring.
OWN_VALUE = 0.0

# How far from zero the queries of a head begin, in lengths of routing vectors, where memory does not fade. Every key
# writes the same mass, so that queries without a preference read all tokens alike; with one, keys of its component
# count more from the first step on, and it is the head's to learn which. Memory that fades prefers what is near.
QUERY_BIAS = 16.0

# A cached key has the number of its token in its row beside it, in digits that every dtype holds exactly; padding has
# 0. So it is reordered, moved and reset with the key: there is no other place in a sliding layer of a cache.
NUMBER_DIGITS = 4
NUMBER_BASE = 256


class GMAForgetGate(nn.Module):
    """One log-decay, below 0, a head and token: (B, N, hidden_size) -> (B, H, N), in float32 or wider."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_bias()

    def reset_bias(self, first: float = FORGET_GATE_BIAS[0], last: float = FORGET_GATE_BIAS[1]) -> None:
        """Begin evenly between what the first and the last head have; one alone has what the last would."""
        init.copy_(self.bias, torch.linspace(last, first, len(self.bias)).flip(0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate = self.proj(hidden_states) + self.bias
        return F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32))).transpose(1, 2)


class _GatedSum(torch.autograd.Function):
    """(x + own * value) * silu(gate), of which backward keeps what goes in alone."""

    @staticmethod
    def forward(ctx, x, value, own, gate):
        ctx.save_for_backward(x, value, own, gate)
        return torch.addcmul(x, own.to(x.dtype), value) * F.silu(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, value, own, gate = ctx.saved_tensors
        factor = own.to(x.dtype)
        by_sum = gradient * F.silu(gate)
        by_gate = torch.ops.aten.silu_backward(gradient * torch.addcmul(x, factor, value), gate)
        by_own = (by_sum * value).flatten(0, -2).sum(0, dtype=own.dtype)
        return by_sum, by_sum * factor, by_own, by_gate


class GMAOutputGate(nn.Module):
    """What a token lets through of the values that heads bring, and of its own: silu of a projection.

    How much its own value counts beside them is a learned factor a channel.
    """

    def __init__(self, hidden_size: int, value_size: int):
        super().__init__()
        self.proj = Linear(hidden_size, value_size, bias=False)
        # Named for `Trainer`, as the mixture is: weight decay would draw it back to nothing.
        self.own_norm = nn.Parameter(torch.full((value_size,), OWN_VALUE))

    def forward(self, output: torch.Tensor, hidden_states: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        """(B, N, value_size), (B, N, hidden_size) and, if tokens have one, their value -> (B, N, value_size)."""
        gate = self.proj(hidden_states).view_as(output)
        if value is None:
            return output * F.silu(gate)
        return _GatedSum.apply(output, value.reshape(output.shape), self.own_norm, gate)


class GMAQueryProjection(Linear):
    """Projection to the queries of all heads, of which the first `num_local_heads` have no mixture."""

    def __init__(self, config: GMAConfig, num_local_heads: int = 0):
        super().__init__(
            config.hidden_size, config.num_attention_heads * config.routing_dim, bias=config.attention_bias
        )
        self.num_local = num_local_heads * config.routing_dim
        self.scale = QUERY_BIAS if config.is_causal and not config.forget_gate else 0.0

    @torch.no_grad()
    def reset_bias(self, routing_std: float, scale: float | None = None) -> None:
        """Begin the queries of each head at a random place, `scale` times as far from zero as routing vectors are.

        By default `QUERY_BIAS` times in causal models that do not forget, and at zero in others.
        """
        scale = self.scale if scale is None else scale
        if self.bias is not None and scale:
            bias = torch.randn_like(self.bias) * (scale * routing_std)
            bias[: self.num_local] = 0.0
            init.copy_(self.bias, bias)


class GMAAttention(nn.Module):
    """Multi-head Gaussian mixture attention over one sequence, or from one sequence to another.

    The layer's type in `config.layer_types` says how many heads, the first ones, are local instead: exact softmax
    attention within `config.sliding_window`, with rotary positions.

    ```python
    >>> mixer = GMAAttention(GMAConfig(hidden_size=64, num_attention_heads=4, num_components=16))
    >>> output, _, _ = mixer(torch.randn(2, 10, 64))  # (2, 10, 64), causal as the config says
    >>> output, _, _ = mixer(torch.randn(2, 10, 64), key_value_states=torch.randn(2, 30, 64))  # cross-attention
    ```
    """

    def __init__(self, config: GMAConfig, layer_idx: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        local_heads = {"linear_attention": 0, "hybrid_sliding": config.num_local_heads}
        self.num_local_heads = local_heads.get(config.layer_types[layer_idx or 0], self.num_heads)
        self.num_mixture_heads = self.num_heads - self.num_local_heads
        routing_size, value_size = (self.num_heads * dim for dim in (config.routing_dim, config.value_dim))
        self.q_proj = GMAQueryProjection(config, self.num_local_heads)
        self.k_proj = Linear(config.hidden_size, routing_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, value_size, bias=config.attention_bias)
        self.o_proj = ResidualProjection(value_size, config.hidden_size, bias=config.attention_bias)
        self.output_gate = GMAOutputGate(config.hidden_size, value_size) if config.output_gate else None
        self.forget_gate = self.mixture_norm = None
        if self.num_mixture_heads and config.forget_gate:
            self.forget_gate = GMAForgetGate(config.hidden_size, self.num_mixture_heads)
        if self.num_mixture_heads:
            # `Trainer` takes weight decay off parameters under a name ending in "norm", and a mixture must have none:
            # decay would draw all components to one place.
            self.mixture_norm = GaussianMixture(
                self.num_mixture_heads, config.num_components, config.routing_dim, config.variance_floor
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        tokens_seen: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        is_causal: bool | None = None,
        output_attentions: bool = False,
        output_responsibilities: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """
        Args:
            hidden_states: (B, N, hidden_size).
            attention_mask: (B, N_k), False or 0 for keys that write nothing.
            key_value_states: (B, N_k, hidden_size); where given, keys and values come from it, and every query reads
                all of them.
            past_key_values: the cache to continue from and to update.
            tokens_seen: (B, 2, 1), what `count_tokens` says the cache has seen after this call; counted here if None.
            cu_seqlens: (S + 1,) boundaries of packed sequences; rows of a batch count as one long row.
            position_ids: (B, N), by which local heads turn queries and keys; by default tokens are counted.
            position_embeddings: what `rotary_positions` makes of them, if that is known.
            is_causal: overrides the config's.
            output_attentions, output_responsibilities: whether to return them.

        Returns:
            The output (B, N, hidden_size), the attention weights (B, H, N, N_k), of GMA heads the induced ones, and
            query and key responsibilities, each (B, H, N, K), of GMA heads alone.
        """
        batch, length = hidden_states.shape[:2]
        is_cross = key_value_states is not None
        if is_cross and (past_key_values is not None or cu_seqlens is not None):
            raise ValueError("`key_value_states` goes with neither `past_key_values` nor `cu_seqlens`.")
        if is_cross and self.num_local_heads:
            raise ValueError("`key_value_states` needs GMA heads alone: a window lies in one sequence.")
        is_causal = (self.config.is_causal if is_causal is None else is_causal) and not is_cross
        if past_key_values is not None and not is_causal:
            raise ValueError("`past_key_values` needs a causal mixer (`is_causal=True`).")
        if past_key_values is not None and self.layer_idx is None:
            raise ValueError("`past_key_values` needs to know its layer: construct the mixer with `layer_idx`.")
        if attention_mask is not None:
            attention_mask = attention_mask.to(torch.bool)
        if cu_seqlens is not None and batch > 1:
            if output_attentions:
                raise ValueError("`output_attentions=True` takes packed sequences in one row (batch size 1) only.")
            hidden_states = hidden_states.flatten(0, 1).unsqueeze(0)
            attention_mask = None if attention_mask is None else attention_mask.reshape(1, -1)
            position_ids = None if position_ids is None else position_ids.expand(batch, -1).reshape(1, -1)
            if position_embeddings is not None:
                position_embeddings = tuple(
                    x.expand(batch, -1, -1, -1).reshape(1, 1, -1, x.shape[-1]) for x in position_embeddings
                )
        if past_key_values is not None and tokens_seen is None:
            tokens_seen = count_tokens(past_key_values, attention_mask, hidden_states, self.layer_idx)

        source = key_value_states if is_cross else hidden_states
        query = self._heads(self.q_proj(hidden_states))
        key = self._heads(self.k_proj(source))
        flat_value = self.v_proj(source)
        value = self._heads(flat_value)
        options = {"is_causal": is_causal, "cu_seqlens": cu_seqlens}
        local_output = local_weights = None
        if self.num_local_heads:
            if position_embeddings is None:
                position_embeddings = self._rotary_positions(position_ids, attention_mask, tokens_seen, hidden_states)
            local_output, local_weights = self._attend_locally(
                *(x[:, : self.num_local_heads] for x in (query, key, value)),
                attention_mask,
                past_key_values,
                tokens_seen,
                position_embeddings,
                output_attentions,
                **options,
            )
        if self.num_mixture_heads:
            log_decay = self.forget_gate(hidden_states) if self.forget_gate is not None and is_causal else None
            output, weights, responsibilities = self._mix(
                *(x[:, self.num_local_heads :] for x in (query, key, value)),
                past_key_values,
                output_attentions,
                output_responsibilities,
                key_mask=attention_mask,
                log_decay=log_decay,
                **options,
            )
        else:
            output, weights, responsibilities = local_output, local_weights, None
        if self.num_local_heads and self.num_mixture_heads:
            output = torch.cat([local_output.transpose(1, 2), output.transpose(1, 2)], dim=2).transpose(1, 2)
            weights = torch.cat([local_weights, weights], dim=1) if output_attentions else None
        if output_responsibilities:
            shape = (batch, -1, self.num_mixture_heads, self.config.num_components)
            if responsibilities is None:
                responsibilities = (query.new_zeros(batch, 0, length, self.config.num_components),) * 2
            else:
                responsibilities = tuple(x.transpose(1, 2).reshape(shape).transpose(1, 2) for x in responsibilities)
        if past_key_values is not None:
            keep_count(past_key_values, tokens_seen, self.layer_idx)
        output = output.transpose(1, 2).reshape(batch, length, -1)
        if self.output_gate is not None:
            output = self.output_gate(output, hidden_states, None if is_cross else flat_value)
        return self.o_proj(output), weights, responsibilities

    def _mix(self, query, key, value, past_key_values, output_attentions, output_responsibilities, **options):
        """Output of the GMA heads (B, H, N, d_v), and their weights and responsibilities where asked for."""
        options["initial_state"] = None if past_key_values is None else self._initial_state(past_key_values)
        options["eps"] = self.config.attention_eps
        looks = output_attentions or output_responsibilities
        weights = None if looks or query.shape[2] > 1 else self._kept_weights(past_key_values, query)
        if weights is not None:
            with full_precision(query.device):
                output, state = linear_attention(
                    query,
                    key,
                    value,
                    PreparedMixtureMap,
                    (weights,),
                    weights.shape[-1],
                    dtype=weights.dtype,
                    **options,
                )
        else:
            means, variances, log_priors = self.mixture_norm()
            output, state = gaussian_mixture_attention(
                query,
                key,
                value,
                means,
                variances,
                log_priors,
                **options,
                backend=partial(chunked_attention, chunk_size=self.config.chunk_size),
            )
            if past_key_values is not None:
                self._keep_weights(past_key_values, means, variances, log_priors)
        weights = responsibilities = None
        if output_attentions:
            weights = gaussian_mixture_attention_weights(query, key, means, variances, log_priors, **options)
            if options["initial_state"] is None:
                # The same output by way of the weights, so that they have gradients.
                output = (weights @ value.to(weights.dtype)).to(value.dtype)
        if output_responsibilities:
            responsibilities = tuple(gaussian_responsibilities(x, means, variances, log_priors) for x in (query, key))
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state, self.layer_idx)
        return output, weights, responsibilities

    def _attend_locally(
        self,
        query,
        key,
        value,
        attention_mask,
        past_key_values,
        tokens_seen,
        position_embeddings,
        output_attentions,
        **options,
    ):
        """Output of the local heads (B, H, N, d_v), and their weights where asked for."""
        query, key = (rotate(x, *position_embeddings) for x in (query, key))
        # A window that was kept has its padding in front, and goes on with tokens.
        is_aligned = past_key_values is not None and attention_mask is None
        if past_key_values is not None:
            numbers = _token_numbers(tokens_seen.to(key.device), attention_mask, key.shape[2])
            key, value, attention_mask = extend_window(
                past_key_values, key, value, numbers, attention_mask, self.config.sliding_window, self.layer_idx
            )
        options |= {"window": self.config.sliding_window, "key_mask": attention_mask}
        if self._can_flash(query, key, attention_mask, options["cu_seqlens"]) and not output_attentions:
            return self._flash(query, key, value, **options), None
        if not output_attentions:
            return windowed_attention(query, key, value, **options, is_aligned=is_aligned), None
        weights = windowed_attention_weights(query, key, **options)
        output = (weights @ value.to(weights.dtype)).to(value.dtype)
        return output, weights[..., key.shape[2] - query.shape[2] :]

    def _can_flash(self, query, key, key_mask, cu_seqlens) -> bool:
        """Whether a FlashAttention kernel was asked for, and transformers' way to it can say what is padding here."""
        length, total = query.shape[2], key.shape[2]
        is_plain = key_mask is None or (cu_seqlens is None and length in (1, total))
        return is_plain and "flash" in (self.config._attn_implementation or "")

    def _flash(self, query, key, value, window, is_causal, key_mask, cu_seqlens):
        packed = {}
        if cu_seqlens is not None:
            longest = int(cu_seqlens.diff().max())
            packed = {"cu_seq_lens_q": cu_seqlens.int(), "cu_seq_lens_k": cu_seqlens.int()}
            packed |= {"max_length_q": longest, "max_length_k": longest}
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        options = {"sliding_window": window, "is_causal": is_causal}
        output, _ = attend(self, query, key, value, key_mask, **options, **packed)
        return output.transpose(1, 2).to(value.dtype)

    def _rotary_positions(self, position_ids, attention_mask, tokens_seen, hidden_states):
        if position_ids is None:
            length = hidden_states.shape[1]
            valid = hidden_states.new_ones(1, length, dtype=torch.long) if attention_mask is None else attention_mask
            position_ids = valid.long().cumsum(-1)
            if tokens_seen is not None:
                position_ids = position_ids - position_ids[:, -1:] + tokens_seen[:, 1].to(position_ids.device)
        return rotary_positions(position_ids, self.config.routing_dim, self.config.rope_parameters["rope_theta"])

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _initial_state(self, past_key_values: Cache) -> torch.Tensor | None:
        state = self.cached_state(past_key_values.layers[self.layer_idx])
        # The cache is overwritten in place; what backward still needs must not be.
        return state.clone() if state is not None and torch.is_grad_enabled() else state

    def _kept_weights(self, past_key_values: Cache | None, query: torch.Tensor) -> torch.Tensor | None:
        """What `_keep_weights` left, for a token that goes on from there."""
        if past_key_values is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        layer = past_key_values.layers[self.layer_idx]
        weights = getattr(layer, "mixture_weights", None)
        fits = weights is not None and weights.device == query.device and self.cached_state(layer) is not None
        return weights if fits else None

    def _keep_weights(self, past_key_values: Cache, *mixture: torch.Tensor) -> None:
        """Leave score weights beside the state, which means nothing under another mixture: making them anew for every
        token would take a fifth of the time of decoding."""
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            past_key_values.layers[self.layer_idx].mixture_weights = MixtureMap.prepare(*mixture)[0]

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """The shape of what `cached_state` returns."""
        if not self.num_mixture_heads:
            return (batch, self.num_heads, self.config.routing_dim + NUMBER_DIGITS)
        return (batch, self.num_mixture_heads, self.config.num_components, self.config.value_dim + 1)

    @staticmethod
    def cached_state(layer: CacheLayer | DynamicSlidingWindowLayer) -> torch.Tensor | None:
        """What a layer of the cache holds to continue from, or None: the state, or without one the last key."""
        if isinstance(layer, CacheLayer):
            return layer.recurrent_states[0] if layer.has_previous_state[0] else None
        return None if layer.keys is None else layer.keys[:, :, -1]


def extend_window(
    past_key_values: Cache,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window: int,
    layer_idx: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Put keys and values (B, H, N, d) of tokens of these numbers (B, N) into the cache.

    Returns keys, values and, if any could be padding, the mask (B, S + N) of what was there and of them. What stays
    are the last `window - 1` tokens of every row: padding, which would push tokens out, is moved before them.
    """
    layer = past_key_values.layers[layer_idx]
    new = key.shape[2]
    digits = numbers.unsqueeze(-1) // NUMBER_BASE ** torch.arange(NUMBER_DIGITS, device=key.device) % NUMBER_BASE
    digits = digits.to(key.dtype).unsqueeze(1).expand(-1, key.shape[1], -1, -1)
    key, value = past_key_values.update(torch.cat([key, digits], dim=-1), value, layer_idx)
    is_static = isinstance(layer, StaticSlidingWindowLayer)
    if is_static:
        filled = layer.get_seq_length()
        if filled > layer.max_cache_len and layer.max_cache_len < window:
            raise ValueError(
                f"`past_key_values` has room for {layer.max_cache_len} tokens, fewer than the window of {window} and "
                f"the {filled} tokens seen."
            )
        key, value = key[:, :, :filled], value[:, :, :filled]
    mask = None
    if attention_mask is not None or key.shape[2] != new:
        mask = (key[:, 0, :, -NUMBER_DIGITS:] != 0).any(-1)
    kept = key, value
    if attention_mask is not None:
        order = alignment(mask)
        kept = in_order(key, order), in_order(value, order)
    if not is_static and (new > 1 or attention_mask is not None or window == 1):
        # Of their own memory: a view would keep that of all tokens. Of a window of one, the last number is needed.
        layer.keys, layer.values = (x[:, :, -max(window - 1, 1) :].clone() for x in kept)
    elif is_static and attention_mask is not None:
        slots = min(filled, layer.max_cache_len)
        key, value = key.clone(), value.clone()
        layer.keys[:, :, :slots], layer.values[:, :, :slots] = (x[:, :, -slots:] for x in kept)
    return key[..., :-NUMBER_DIGITS], value, mask


def _token_numbers(tokens_seen, attention_mask, length):
    """Numbers (B, N), from 1, of new tokens among those that are not padding; 0 for padding."""
    last = tokens_seen[:, 1]
    if attention_mask is None:
        return last + torch.arange(1 - length, 1, device=last.device)
    numbers = attention_mask.long().cumsum(-1)
    return (numbers - numbers[:, -1:] + last) * attention_mask


def cached_count(past_key_values: Cache | None, layer_idx: int = 0) -> torch.Tensor | None:
    """What `keep_count` left in the cache, (B, 2, 1)."""
    return None if past_key_values is None else _count_in(past_key_values.layers[layer_idx])


def keep_count(past_key_values: Cache, tokens_seen: torch.Tensor, layer_idx: int) -> None:
    """Put what `count_tokens` counted into the cache; a window has it in the number of its last token."""
    layer = past_key_values.layers[layer_idx]
    if isinstance(layer, CacheLayer):
        past_key_values.update_conv_state(tokens_seen, layer_idx, _count_slot(layer))


def _count_slot(layer: CacheLayer) -> int:
    # The last of a layer's convolution states: a mixer that has convolutions keeps theirs before it.
    return layer.number_of_states - 1


def _count_in(layer) -> torch.Tensor | None:
    if isinstance(layer, CacheLayer):
        slot = _count_slot(layer)
        return layer.conv_states[slot] if layer.has_previous_state[slot] else None
    if not layer.get_seq_length():
        return None
    digits = layer.keys[:, 0, :, -NUMBER_DIGITS:].long()
    numbers = (digits * NUMBER_BASE ** torch.arange(NUMBER_DIGITS, device=digits.device)).sum(-1)
    tokens = numbers.amax(-1, keepdim=True)
    return torch.stack([torch.full_like(tokens, layer.get_seq_length()), tokens], dim=1)


def count_tokens(
    past_key_values: Cache | None, attention_mask: torch.Tensor | None, hidden_states: torch.Tensor, layer_idx: int = 0
) -> torch.Tensor:
    """Tokens seen after this call, (B, 2, 1): all of them, and those that are not padding.

    A state does not grow, so its cache has to be told how long it is. The counts live where the cache keeps what a
    convolution of width one would: reordered, offloaded and reset with everything else. They are exact where the
    mass in the state is a sum of floats, and right where a forget gate makes the mass count something else.
    """
    batch, length = hidden_states.shape[:2]
    device = hidden_states.device
    if attention_mask is None:
        new = torch.full((batch, 2, 1), length, dtype=torch.long, device=device)
    else:
        valid = attention_mask.sum(-1, dtype=torch.long)
        new = torch.stack([torch.full_like(valid, length), valid], dim=1).unsqueeze(-1)
    seen = cached_count(past_key_values, layer_idx)
    return new if seen is None else seen.to(device) + new


def check_cache(past_key_values: Cache, mixers: list[nn.Module], config: GMAConfig, batch: int) -> None:
    """Refuse what is not a cache of a model with these mixers, and of this batch."""
    if not isinstance(past_key_values, Cache):
        raise ValueError(
            f"`past_key_values` must be a transformers `Cache`, such as `DynamicCache(config=model.config)`, got "
            f"{type(past_key_values).__name__}."
        )
    layers = past_key_values.layers
    is_ours = all(_fits(layer, kind, config) for layer, kind in zip(layers, config.layer_types))
    if len(layers) != config.num_hidden_layers or not is_ours:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "a cache made without a config"
        raise ValueError(
            f"`past_key_values` must have {config.num_hidden_layers} layers that hold {_held(config)}, as "
            f"`DynamicCache(config=model.config)` makes them, got {len(layers)} ({kinds}), as of another model."
        )
    for index, (layer, mixer) in enumerate(zip(layers, mixers)):
        if _count_in(layer) is not None:
            state, expected = mixer.cached_state(layer), mixer.state_shape(batch)
            shape = None if state is None else tuple(state.shape)
            if shape != expected:
                raise ValueError(
                    f"`past_key_values` holds a state of shape {shape} in layer {index}, this model and batch need "
                    f"{expected}: it belongs to another model or another batch."
                )


def _fits(layer, kind: str, config: GMAConfig) -> bool:
    """Whether a layer of a cache is one for this type of layer."""
    is_state = isinstance(layer, CacheLayer) and layer.number_of_states == getattr(config, "number_of_conv_states", 1)
    is_window = isinstance(layer, (DynamicSlidingWindowLayer, StaticSlidingWindowLayer))
    is_window = is_window and getattr(layer, "sliding_window", config.sliding_window) == config.sliding_window
    return {"hybrid_sliding": is_state and is_window, "sliding_attention": is_window}.get(kind, is_state)


def _held(config: GMAConfig) -> str:
    if "hybrid_sliding" in config.layer_types or "sliding_attention" in config.layer_types:
        return f"a state, a window of {config.sliding_window} tokens or both"
    return "a state"


def let_cache_tell_length(past_key_values: Cache) -> None:
    """Give a cache that holds states alone a `get_seq_length`, which `generate` asks for and such caches refuse."""
    if "get_seq_length" not in vars(past_key_values) and _holds_states_alone(past_key_values):
        # Of the layers, not of the cache: no circle, and it can be copied and pickled with the cache.
        past_key_values.get_seq_length = partial(_tokens_seen, past_key_values.layers)


def _holds_states_alone(past_key_values: Cache) -> bool:
    return all(isinstance(layer, CacheLayer) for layer in past_key_values.layers)


def _tokens_seen(layers: list, layer_idx: int = 0) -> int:
    count = _count_in(layers[layer_idx])
    return 0 if count is None else int(count[0, 0, 0])
