"""What all baselines share: `GMAAttention`'s interface, and projections into heads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin as CacheLayer

from modeling_gma.attention import GMAOutputGate, cached_count, count_tokens, keep_count
from modeling_gma.linear import Linear, ResidualProjection


class Mixer(nn.Module):
    """A drop-in for `layer.mixer`: what it takes and returns is as in `GMAAttention`, without responsibilities.

    A mixer says what it does in `mix`. What it cannot do is refused here.
    """

    forms_weights = False  # whether `output_attentions=True` has something to return
    crosses = True  # whether keys can come from another sequence
    packs = False  # whether `mix` takes `cu_seqlens`; otherwise packed sequences come to it as rows of a padded batch

    def __init__(self, config, layer_idx: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx

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
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Arguments as in `GMAAttention.forward`; `position_embeddings` are not used.

        Returns:
            The output (B, N, hidden_size), the attention weights (B, H, N, N_k) or None, and None.
        """
        name = self.config.mixer
        is_cross = key_value_states is not None
        is_causal = (self.config.is_causal if is_causal is None else is_causal) and not is_cross
        if output_responsibilities:
            raise ValueError(f'`output_responsibilities=True` needs a mixture, which the mixer "{name}" has not.')
        if output_attentions and not self.forms_weights:
            raise ValueError(f'`output_attentions=True`: the mixer "{name}" forms no attention weights.')
        if is_cross and not self.crosses:
            raise ValueError(f'`key_value_states`: the mixer "{name}" does no cross-attention.')
        if is_cross and (past_key_values is not None or cu_seqlens is not None):
            raise ValueError("`key_value_states` goes with neither `past_key_values` nor `cu_seqlens`.")
        if past_key_values is not None and not is_causal:
            raise ValueError("`past_key_values` needs a causal mixer (`is_causal=True`).")
        if past_key_values is not None and self.layer_idx is None:
            raise ValueError("`past_key_values` needs to know its layer: construct the mixer with `layer_idx`.")
        if attention_mask is not None:
            attention_mask = attention_mask.to(torch.bool)
        if cu_seqlens is not None and not self.packs:
            if output_attentions:
                raise ValueError(f'`output_attentions=True`: the mixer "{name}" returns none of packed sequences.')
            output = self._mix_packed(hidden_states, attention_mask, position_ids, cu_seqlens, is_causal)
            return output, None, None

        if past_key_values is not None and tokens_seen is None:
            tokens_seen = count_tokens(past_key_values, attention_mask, hidden_states, self.layer_idx)
        output, weights = self.mix(
            hidden_states,
            hidden_states if key_value_states is None else key_value_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            is_causal=is_causal,
            output_attentions=output_attentions,
            **({"cu_seqlens": cu_seqlens} if self.packs else {}),
        )
        if past_key_values is not None:
            keep_count(past_key_values, tokens_seen, self.layer_idx)
        return output, weights, None

    def _mix_packed(self, hidden_states, attention_mask, position_ids, cu_seqlens, is_causal):
        """Packed sequences as rows of a padded batch, and the output packed again."""
        batch, length = hidden_states.shape[:2]
        lengths = cu_seqlens.diff().tolist()

        def rows(x):
            return pad_sequence(x.expand(batch, *x.shape[1:]).flatten(0, 1).split(lengths), batch_first=True)

        inside = rows(torch.ones(batch, length, dtype=torch.bool, device=hidden_states.device))
        states = rows(hidden_states)
        output, _ = self.mix(
            states,
            states,
            attention_mask=inside if attention_mask is None else rows(attention_mask),
            past_key_values=None,
            position_ids=None if position_ids is None else rows(position_ids),
            is_causal=is_causal,
            output_attentions=False,
        )
        return output[inside].view_as(hidden_states)

    def count_positions(self, hidden_states, attention_mask, past_key_values) -> torch.Tensor:
        """Positions (B or 1, N) of tokens among those that are not padding, from where the cache ends."""
        if attention_mask is None:
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        else:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        seen = None if past_key_values is None else cached_count(past_key_values, self.layer_idx)
        return positions if seen is None else positions + seen[:, 1].to(positions.device)

    @staticmethod
    def cached_state(layer: CacheLayer) -> torch.Tensor | None:
        """What a layer of the cache holds to continue from, or None."""
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None


class ProjectedMixer(Mixer):
    """A mixer of queries, keys and values in heads, with the projections of `GMAAttention`.

    What happens between the projections is `attend(query, key, value, ..)`, on (B, H, N, d), giving the output
    (B, H, N, d_v) and the weights or None.
    """

    def __init__(self, config, layer_idx: int | None = None):
        super().__init__(config, layer_idx)
        self.num_heads = config.num_attention_heads
        routing_size, value_size = (self.num_heads * dim for dim in (config.routing_dim, config.value_dim))
        self.q_proj = Linear(config.hidden_size, routing_size, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, routing_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, value_size, bias=config.attention_bias)
        self.o_proj = ResidualProjection(value_size, config.hidden_size, bias=config.attention_bias)
        self.output_gate = GMAOutputGate(config.hidden_size, value_size) if config.output_gate else None

    def mix(self, hidden_states, source, attention_mask, past_key_values, position_ids, is_causal, **options):
        query, key, flat_value = self.q_proj(hidden_states), self.k_proj(source), self.v_proj(source)
        query, key, value = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, flat_value))
        if position_ids is None:
            position_ids = self.count_positions(hidden_states, attention_mask, past_key_values)
        output, weights = self.attend(
            query,
            key,
            value,
            key_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            is_causal=is_causal,
            **options,
        )
        output = output.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)
        if self.output_gate is not None:
            output = self.output_gate(output, hidden_states, flat_value if source is hidden_states else None)
        return self.o_proj(output), weights


def valid_first(attention_mask: torch.Tensor, *tensors: torch.Tensor, last: bool = False) -> list[torch.Tensor]:
    """The order (B, N) that moves the tokens that are not padding to the front of every row (or to its end), and the
    mask and the tensors (B, N, ..) in that order."""
    order = attention_mask.long().argsort(dim=-1, descending=not last, stable=True)
    return [order, *(in_order(x, order) for x in (attention_mask, *tensors))]


def in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x (B, N, ..) with the tokens of every row in the given order (B, N)."""
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(-1), order]
