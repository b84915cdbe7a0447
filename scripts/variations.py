"""Parts that GMA's mixer does not have, to measure what they would buy: see docs/ablations.md.

A model with one trains, is validated and goes on like any other. Caches, padding and packing do not know of them, and
the Auto classes refuse what is saved: it is good for nothing else. All but the norm begin as if they were not there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ShortConvolution(nn.Module):
    """Each channel of a token from itself and the tokens just before it: (B, N, D) -> (B, N, D)."""

    no_weight_decay = ("weight",)

    def __init__(self, channels: int, width: int = 4):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))
        with torch.no_grad():
            self.weight[..., -1] = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.weight.shape[-1]
        x = F.pad(x.transpose(1, 2), (width - 1, 0))
        return F.conv1d(x, self.weight.to(x.dtype), groups=len(self.weight)).transpose(1, 2)


class WriteGate(nn.Module):
    """How much of itself a token writes into a memory of each head, instead of all tokens as much.

    Values times weights, and the weights as one more value, through the same memory: their quotient is the mean of
    the values under these weights too.
    """

    def __init__(self, mixer: nn.Module, config, method: str):
        super().__init__()
        heads = getattr(mixer, "num_mixture_heads", config.num_attention_heads)
        self.proj = nn.Linear(config.hidden_size, heads)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)
        mixer.register_forward_pre_hook(self._see, with_kwargs=True)
        self.plain = getattr(mixer, method)
        setattr(mixer, method, self._write)

    def _see(self, mixer, args, kwargs) -> None:
        self.seen = args[0] if args else kwargs["hidden_states"]

    def _write(self, query, key, value, *args, **options):
        weight = self.proj(self.seen).float().clamp(-8.0, 8.0).exp().transpose(1, 2).unsqueeze(-1)
        output, *rest = self.plain(query, key, torch.cat([value * weight, weight], dim=-1), *args, **options)
        return (output[..., :-1] / output[..., -1:].clamp(min=1e-9)).to(value.dtype), *rest


class NormalisedOutput(nn.Module):
    """What each head brings at a root mean square of one, times a learned scale, before the output projection."""

    def __init__(self, mixer: nn.Module, num_heads: int):
        super().__init__()
        self.proj, self.num_heads = mixer.o_proj, num_heads
        self.norm = nn.RMSNorm(self.proj.in_features // num_heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x.unflatten(-1, (self.num_heads, -1))).flatten(-2))


def convolve(mixer: nn.Module, config) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(mixer, name)
        setattr(mixer, name, nn.Sequential(projection, ShortConvolution(projection.out_features)))


def normalise_output(mixer: nn.Module, config) -> None:
    mixer.o_proj = NormalisedOutput(mixer, config.num_attention_heads)


def gate_writing(mixer: nn.Module, config) -> None:
    mixer.write_gate = WriteGate(mixer, config, "_mix" if hasattr(mixer, "_mix") else "attend")


VARIATIONS = {
    "convolution": convolve,
    "write_gate": gate_writing,
    "output_norm": normalise_output,
}


def vary(model: nn.Module, names: str) -> None:
    """Give every mixer of a model some of `VARIATIONS`, named with commas between."""
    config, names = model.config, names.split(",")
    if "write_gate" in names and 0 in [
        getattr(layer.mixer, "num_mixture_heads", 1) for layer in model.base_model.layers
    ]:
        raise ValueError(f"`names` must be without write_gate where a layer has no memory, got {config.layer_types}.")
    # Saved, it is no model that another class may take for its own.
    config.__class__ = type(f"Varied{type(config).__name__}", (type(config),), {"model_type": "gma_varied"})
    for layer in model.base_model.layers:
        if not hasattr(layer.mixer, "q_proj"):
            raise ValueError(
                f"`model` must have mixers with queries, keys and values, got {type(layer.mixer).__name__}."
            )
        for name in names:
            VARIATIONS[name](layer.mixer, config)
