"""Linformer: softmax attention to keys and values projected, along the sequence, to a fixed number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .mixer import ProjectedMixer, valid_first


class LinformerAttention(ProjectedMixer):
    """Two projections (k, N), of keys and of values, that all heads share. N is `max_position_embeddings`.

    A shorter sequence uses the first columns, one for each token that is not padding. A projected key holds tokens of
    the whole sequence, so this cannot be causal.
    """

    def __init__(self, config, layer_idx: int | None = None):
        super().__init__(config, layer_idx)
        self._refuse_causal(config.is_causal)
        shape = (config.linformer_dim, config.max_position_embeddings)
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.value_projection = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # Projected keys and values are then as large as those of single tokens.
        for projection in (self.key_projection, self.value_projection):
            init.normal_(projection, std=projection.shape[1] ** -0.5)

    def attend(self, query, key, value, key_mask, past_key_values, position_ids, is_causal, output_attentions):
        self._refuse_causal(is_causal)
        length, limit = key.shape[2], self.config.max_position_embeddings
        if length > limit:
            raise ValueError(
                f"Linformer's projections end at `max_position_embeddings` = {limit}, got {length} tokens."
            )
        key, value = (x.transpose(1, 2).flatten(2) for x in (key, value))
        if key_mask is not None:
            _, key_mask, key, value = valid_first(key_mask, key, value)
            key, value = (x.masked_fill(~key_mask.unsqueeze(-1), 0.0) for x in (key, value))
        # Expanded, as a product of a matrix with a batch would copy the batch.
        projections = (x[:, :length].expand(len(key), -1, -1) for x in (self.key_projection, self.value_projection))
        key, value = (projection @ x for projection, x in zip(projections, (key, value)))
        key, value = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value), None

    @staticmethod
    def _refuse_causal(is_causal):
        if is_causal:
            raise ValueError('`is_causal=True`: the mixer "linformer" is bidirectional only; set `is_causal=False`.')
