"""The GMA mixer: projections, Gaussian mixture attention, output projection, and its place in transformers' cache."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin as CacheLayer

from configuration_gma import GMAConfig

from .chunked import MixtureMap, PreparedMixtureMap, full_precision, linear_attention
from .chunked import attention as chunked_attention
from .functional import (
    gaussian_mixture_attention,
    gaussian_mixture_attention_weights,
    gaussian_responsibilities,
)
from .linear import Linear
from .mixture import GaussianMixture


# sigmoid(4) = 0.982: memory starts with a half-life of 38 tokens.
FORGET_GATE_BIAS = 4.0


class GMAForgetGate(nn.Module):
    """One log-decay, below 0, a head and token: (B, N, hidden_size) -> (B, H, N), in float32 or wider."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.bias = nn.Parameter(torch.full((num_heads,), FORGET_GATE_BIAS))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate = self.proj(hidden_states) + self.bias
        return F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32))).transpose(1, 2)


class GMAAttention(nn.Module):
    """Multi-head Gaussian mixture attention over one sequence, or from one sequence to another.

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
        routing_size, value_size = (self.num_heads * dim for dim in (config.routing_dim, config.value_dim))
        self.q_proj = Linear(config.hidden_size, routing_size, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, routing_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, value_size, bias=config.attention_bias)
        self.o_proj = Linear(value_size, config.hidden_size, bias=config.attention_bias)
        self.forget_gate = GMAForgetGate(config.hidden_size, self.num_heads) if config.forget_gate else None
        # `Trainer` takes weight decay off parameters under a name ending in "norm", and a mixture must have none:
        # decay would draw all components to one place.
        self.mixture_norm = GaussianMixture(
            self.num_heads, config.num_components, config.routing_dim, config.variance_floor
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
            position_ids: not used; other mixers that a layer can have turn queries and keys by them.
            is_causal: overrides the config's.
            output_attentions, output_responsibilities: whether to return them.

        Returns:
            The output (B, N, hidden_size), the induced attention weights (B, H, N, N_k), and query and key
            responsibilities, each (B, H, N, K).
        """
        batch, length = hidden_states.shape[:2]
        is_cross = key_value_states is not None
        if is_cross and (past_key_values is not None or cu_seqlens is not None):
            raise ValueError("`key_value_states` goes with neither `past_key_values` nor `cu_seqlens`.")
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

        source = key_value_states if is_cross else hidden_states
        query = self._heads(self.q_proj(hidden_states))
        key = self._heads(self.k_proj(source))
        value = self._heads(self.v_proj(source))
        options = {
            "is_causal": is_causal,
            "key_mask": attention_mask,
            "cu_seqlens": cu_seqlens,
            "log_decay": self.forget_gate(hidden_states) if self.forget_gate is not None and is_causal else None,
            "initial_state": None if past_key_values is None else self._initial_state(past_key_values),
            "eps": self.config.attention_eps,
        }
        looks = output_attentions or output_responsibilities
        weights = None if looks or length > 1 else self._kept_weights(past_key_values, query)
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
            responsibilities = tuple(
                gaussian_responsibilities(x, means, variances, log_priors)
                .transpose(1, 2)
                .reshape(batch, -1, self.num_heads, self.config.num_components)
                .transpose(1, 2)
                for x in (query, key)
            )
        if past_key_values is not None:
            if tokens_seen is None:
                tokens_seen = count_tokens(past_key_values, attention_mask, hidden_states, self.layer_idx)
            past_key_values.update_recurrent_state(state, self.layer_idx)
            keep_count(past_key_values, tokens_seen, self.layer_idx)
        output = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return output, weights, responsibilities

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
        return (batch, self.num_heads, self.config.num_components, self.config.value_dim + 1)

    @staticmethod
    def cached_state(layer: CacheLayer) -> torch.Tensor | None:
        """What a layer of the cache holds to continue from, or None."""
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None


def cached_count(past_key_values: Cache | None, layer_idx: int = 0) -> torch.Tensor | None:
    """What `keep_count` left in the cache, (B, 2, 1)."""
    return None if past_key_values is None else _count_in(past_key_values.layers[layer_idx])


def keep_count(past_key_values: Cache, tokens_seen: torch.Tensor, layer_idx: int) -> None:
    """Put what `count_tokens` counted into the cache."""
    past_key_values.update_conv_state(tokens_seen, layer_idx, _count_slot(past_key_values.layers[layer_idx]))


def _count_slot(layer: CacheLayer) -> int:
    # The last of a layer's convolution states: a mixer that has convolutions keeps theirs before it.
    return layer.number_of_states - 1


def _count_in(layer: CacheLayer) -> torch.Tensor | None:
    slot = _count_slot(layer)
    return layer.conv_states[slot] if layer.has_previous_state[slot] else None


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
    slots = getattr(config, "number_of_conv_states", 1)
    is_ours = _holds_states_alone(past_key_values) and all(layer.number_of_states == slots for layer in layers)
    if len(layers) != config.num_hidden_layers or not is_ours:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "a cache made without a config"
        raise ValueError(
            f"`past_key_values` must have {config.num_hidden_layers} layers that hold a state, as "
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
