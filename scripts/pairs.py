"""Two towers: one encoder reads both texts of a pair, and a small network compares what it made of them."""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN

from baselines.twins import TWINS, TwinForSequenceClassification
from modeling_gma import GMAForSequenceClassification
from modeling_gma.modeling_gma import GMASequenceClassifierOutput


class PairScore(nn.Module):
    """Long Range Arena's comparison of two vectors: both, their product and their difference."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.out = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        both = torch.cat([first, second, first * second, first - second], dim=-1)
        return self.out(self.act_fn(self.dense(both)))


class _Pairs:
    def __init__(self, config):
        super().__init__(config)
        self.score = PairScore(config)
        self.post_init()

    def forward(
        self, input_ids, other_input_ids, attention_mask=None, other_attention_mask=None, labels=None, **kwargs
    ) -> GMASequenceClassifierOutput:
        pooled = [
            self._pool(self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state, mask)
            for ids, mask in ((input_ids, attention_mask), (other_input_ids, other_attention_mask))
        ]
        logits = self.score(*map(self.dropout, pooled))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return GMASequenceClassifierOutput(loss=loss, logits=logits)


class GMAForPairClassification(_Pairs, GMAForSequenceClassification):
    pass


class TwinForPairClassification(_Pairs, TwinForSequenceClassification):
    pass


TWINS[GMAForPairClassification] = TwinForPairClassification
