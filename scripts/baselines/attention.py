"""Softmax attention: with its scores formed, by PyTorch's own kernel, and by that kernel with rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from modeling_gma.functional import can_look_inside

from .mixer import CacheLayer, ProjectedMixer


ROTARY_BASE = 10000.0


class EagerAttention(ProjectedMixer):
    """Multi-head softmax attention that forms its scores, (B, H, N, N_k)."""

    forms_weights = True

    def attend(
        self, query, key, value, key_mask, past_key_values: Cache | None, position_ids, is_causal, output_attentions
    ):
        if past_key_values is not None:
            key, value, key_mask = self._extend(past_key_values, key, value, key_mask)
        pairs, is_causal = allowed_pairs(query.shape[2], key.shape[2], key_mask, is_causal, query.device)
        if output_attentions:
            return eager_attention(query, key, value, pairs, is_causal)
        return self.softmax_attention(query, key, value, pairs, is_causal), None

    def softmax_attention(self, query, key, value, pairs, is_causal) -> torch.Tensor:
        return eager_attention(query, key, value, pairs, is_causal)[0]

    def _extend(self, past_key_values, key, value, key_mask):
        """Put keys and values into the cache; with what was there before: keys, values and key mask."""
        layer = past_key_values.layers[self.layer_idx]
        if not isinstance(layer, CacheLayerMixin):
            raise ValueError(
                f"`past_key_values` must hold keys and values, as `DynamicCache(config=model.config)` does, got "
                f"{type(layer).__name__} in layer {self.layer_idx}, as of another model."
            )
        length = key.shape[2]
        key, value = past_key_values.update(key, value, self.layer_idx)
        if isinstance(layer, StaticLayer):
            total = int(layer.get_seq_length())
            key, value = key[:, :, :total], value[:, :, :total]
        # Once padding was met, which keys are padding is kept where the layer could keep a state: it is reordered,
        # moved and reset with the keys.
        before = layer.recurrent_states[0] if layer.has_previous_state[0] else None
        if key_mask is not None or before is not None:
            everything = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
            before = everything[:, length:] if before is None else before.to(key.device)
            key_mask = torch.cat([before, everything[:, :length] if key_mask is None else key_mask], dim=-1)
            layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = key_mask, True
        return key, value, key_mask

    def state_shape(self, batch: int) -> tuple[int, ...]:
        return (batch, self.num_heads, 1, self.config.routing_dim)

    @staticmethod
    def cached_state(layer: CacheLayer) -> torch.Tensor | None:
        """The first cached key, (B, H, 1, d), or None."""
        keys = getattr(layer, "keys", None)
        return None if keys is None else keys[:, :, :1]


class SDPAAttention(EagerAttention):
    """The same by `torch.nn.functional.scaled_dot_product_attention`, which forms no scores."""

    def softmax_attention(self, query, key, value, pairs, is_causal):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=pairs, is_causal=is_causal)


class RotaryAttention(SDPAAttention):
    """The same with queries and keys turned by their positions, in place of position embeddings."""

    crosses = False

    def attend(self, query, key, value, position_ids, **options):
        dim = query.shape[-1]
        frequencies = ROTARY_BASE ** (-torch.arange(0, dim, 2, device=query.device, dtype=torch.float32) / dim)
        angles = position_ids[:, :, None, None].to(torch.float32) * frequencies
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        # As projections have them, (B, N, H, d), so that the kernel's output is laid out for the output projection.
        query, key = (rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (query, key))
        return super().attend(query, key, value, position_ids=position_ids, **options)


def rotate(x, cos, sin):
    """Turn the pairs (x[m], x[m + d / 2]) of x (.., d) by angles (.., d / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def eager_attention(query, key, value, pairs, is_causal):
    """Output (B, H, N, d_v) and weights (B, H, N, N_k). `pairs` and `is_causal` as `allowed_pairs` gives them."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if is_causal:
        pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if pairs is not None:
        scores = scores.masked_fill(~pairs, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return weights @ value, weights


def allowed_pairs(length, total, key_mask, is_causal, device):
    """Which of `total` keys each of the `length` last tokens may see, and whether plain causality says it all.

    Returns a mask (B or 1, 1, N or 1, N_k) and False; None and True where every key up to a query's own is meant; None
    and False where every key is. The last two are what fast kernels want.
    """
    # A single token is the last of all.
    is_causal = is_causal and length > 1
    if is_causal and total == length and (key_mask is None or _is_padded_right(key_mask)):
        # Padding after all tokens is out of their sight already.
        return None, True
    pairs = None
    if is_causal:
        pairs = torch.ones(1, 1, length, total, dtype=torch.bool, device=device).tril(total - length)
    if key_mask is not None:
        pairs = key_mask[:, None, None] if pairs is None else pairs & key_mask[:, None, None]
        # A query with nothing to see is padding. It may see everything, as the softmax of nothing is not a number.
        pairs = pairs | ~pairs.any(dim=-1, keepdim=True)
    return pairs, False


def _is_padded_right(key_mask):
    return can_look_inside(key_mask) and not (key_mask[:, 1:] & ~key_mask[:, :-1]).any()
