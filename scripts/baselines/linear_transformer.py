"""The Linear Transformer: a memory written and read by elu(x) + 1 of keys and queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

from modeling_gma.attention import GMAForgetGate
from modeling_gma.chunked import linear_attention

from .mixer import ProjectedMixer


class EluMap:
    """From x to elu(x) + 1. The methods are those that `linear_attention` asks of a feature map."""

    @staticmethod
    def prepare():
        return ()

    @staticmethod
    def features(x):
        return F.elu(x) + 1.0

    @staticmethod
    def fill(features, x, scratch):
        features = features[:, :, : x.shape[2]]
        torch._C._nn.elu(x.to(features.dtype), out=features)
        features += 1.0

    @staticmethod
    def backward(features, gradient, scratch, by_x):
        # Below zero the derivative is exp(x), which the feature is; above, it is one.
        length = by_x.shape[2]
        slope = torch.clamp(features, max=1.0, out=scratch("slope", *features.shape))
        torch.mul(gradient[:, :, :length], slope[:, :, :length], out=by_x)


class LinearAttention(ProjectedMixer):
    """Attention through a memory of fixed size, by the same chunks as GMA's: only the feature map is another."""

    packs = True
    feature_map = EluMap
    # Added to the normaliser; None takes the config's `attention_eps`.
    eps = None

    def __init__(self, config, layer_idx: int | None = None):
        super().__init__(config, layer_idx)
        self.num_features = config.routing_dim
        self.forget_gate = GMAForgetGate(config.hidden_size, self.num_heads) if config.forget_gate else None

    def map_parameters(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """What the feature map takes beside x, indexed by head."""
        return ()

    def mix(self, hidden_states, *args, is_causal, **options):
        if self.forget_gate is not None and is_causal:
            options["log_decay"] = self.forget_gate(hidden_states)
        return super().mix(hidden_states, *args, is_causal=is_causal, **options)

    def attend(
        self,
        query,
        key,
        value,
        key_mask,
        past_key_values: Cache | None,
        position_ids,
        is_causal,
        output_attentions,
        cu_seqlens=None,
        log_decay=None,
    ):
        if cu_seqlens is not None:
            log_decay = None if log_decay is None else log_decay.transpose(0, 1).reshape(1, self.num_heads, -1)
            query, key, value = (_in_one_row(x) for x in (query, key, value))
            key_mask = None if key_mask is None else key_mask.reshape(1, -1)
        state = None if past_key_values is None else self.cached_state(past_key_values.layers[self.layer_idx])
        if state is not None and torch.is_grad_enabled():
            # The cache is overwritten in place; what backward still needs must not be.
            state = state.clone()
        dtype = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            output, state = linear_attention(
                query,
                key,
                value,
                self.feature_map,
                self.map_parameters(dtype),
                self.num_features,
                is_causal=is_causal,
                key_mask=key_mask,
                cu_seqlens=cu_seqlens,
                log_decay=log_decay,
                initial_state=state,
                eps=self.config.attention_eps if self.eps is None else self.eps,
                chunk_size=self.config.chunk_size,
                dtype=dtype,
            )
        if past_key_values is not None:
            past_key_values.update_recurrent_state(state, self.layer_idx)
        return output, None

    def state_shape(self, batch: int) -> tuple[int, ...]:
        return (batch, self.num_heads, self.num_features, self.config.value_dim + 1)


def _in_one_row(x):
    """(B, H, N, d) -> (1, H, B N, d)."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)
