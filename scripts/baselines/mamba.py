"""Mamba: transformers' own `MambaMixer`, with a faster scan on CPU, behind `GMAAttention`'s interface."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from transformers import MambaConfig
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.models.mamba.modeling_mamba import MambaMixer

from .mixer import Mixer, in_order, valid_first
from .selective_scan import selective_scan


class StateSpace(MambaMixer):
    # What decays a state is not to be decayed itself.
    no_weight_decay = ("A_log",)
    output_std: float | None = None  # of the last projection at the start; None for transformers' own

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # As transformers' Mamba models begin.
        self.init_mamba_weights()
        init.kaiming_uniform_(self.conv1d.weight, a=math.sqrt(5))
        init.zeros_(self.conv1d.bias)
        if self.output_std is None:
            init.kaiming_uniform_(self.out_proj.weight, a=math.sqrt(5))
        else:
            init.normal_(self.out_proj.weight, std=self.output_std)

    def forward(self, hidden_states: torch.Tensor, cache_params: Cache | None = None, attention_mask=None):
        if hidden_states.is_cuda or cache_params is not None:
            # Kernels where transformers finds them, and single tokens.
            return super().forward(hidden_states, cache_params, attention_mask)
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask.unsqueeze(-1)
        length = hidden_states.shape[1]
        inner, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        inner = F.silu(self.conv1d(inner.transpose(1, 2))[..., :length]).transpose(1, 2)
        if attention_mask is not None:
            inner = inner * attention_mask.unsqueeze(-1)
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        steps, write, read = self.x_proj(inner).split(sizes, dim=-1)
        steps = F.softplus(self.dt_proj(steps).float())
        output, _ = selective_scan(inner, steps, -self.A_log.float().exp(), write, read)
        output = (output + inner * self.D) * F.silu(gate)
        return self.out_proj(output.to(hidden_states.dtype))


class MambaMixing(Mixer):
    """A selective state space. It runs from left to right whatever `is_causal` says, as in the paper.

    On GPU it uses mamba-ssm's kernels where transformers finds them, and otherwise transformers' loop over tokens.
    """

    crosses = False

    def __init__(self, config, layer_idx: int | None = None):
        super().__init__(config, layer_idx)
        fields = {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "expand": config.mamba_expand,
            "state_size": config.mamba_state_size,
            "conv_kernel": config.mamba_conv_kernel,
        }
        self.mamba = StateSpace(MambaConfig(**fields), layer_idx=layer_idx or 0)
        if config.residual_initializer_range != config.initializer_range:
            self.mamba.output_std = config.residual_initializer_range

    def mix(
        self,
        hidden_states,
        source,
        attention_mask,
        past_key_values: Cache | None,
        position_ids,
        is_causal,
        output_attentions,
    ):
        if past_key_values is not None and self.cached_state(past_key_values.layers[self.layer_idx]) is not None:
            return self._go_on(hidden_states, attention_mask, past_key_values), None
        if attention_mask is None:
            return self._run(hidden_states, past_key_values), None
        # `MambaMixer` lets padding between tokens decay the state. After all tokens it does them no harm, and before
        # all tokens it does none to the state that is cached.
        order, mask, hidden_states = valid_first(attention_mask, hidden_states, last=past_key_values is not None)
        output = self._run(hidden_states, past_key_values, mask)
        return in_order(output, order.argsort(dim=-1)), None

    def _run(self, hidden_states, past_key_values, attention_mask=None):
        # Without autocast, the scan of a model in bfloat16 would multiply float32 with bfloat16.
        dtype = hidden_states.dtype
        with torch.autocast(hidden_states.device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            return self.mamba(hidden_states, cache_params=past_key_values, attention_mask=attention_mask)

    def _go_on(self, hidden_states, attention_mask, past_key_values):
        """Continue from the cache, token by token: the scan of `MambaMixer` always begins with an empty state.

        As everywhere in transformers' Mamba, there is no backward through this: a step overwrites the state.
        """
        layer = past_key_values.layers[self.layer_idx]
        outputs = []
        for index in range(hidden_states.shape[1]):
            conv_state, state = layer.conv_states[0], layer.recurrent_states[0]
            if attention_mask is not None:
                layer.conv_states[0], layer.recurrent_states[0] = conv_state.clone(), state.clone()
            outputs.append(self._run(hidden_states[:, index : index + 1], past_key_values))
            if attention_mask is not None:
                is_token = attention_mask[:, index, None, None]
                layer.conv_states[0] = torch.where(is_token, layer.conv_states[0], conv_state)
                layer.recurrent_states[0] = torch.where(is_token, layer.recurrent_states[0], state)
        return torch.cat(outputs, dim=1)

    def state_shape(self, batch: int) -> tuple[int, ...]:
        return (batch, self.mamba.intermediate_size, self.mamba.ssm_state_size)
