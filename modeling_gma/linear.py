"""A linear layer that is quick for a few tokens at a time."""

from __future__ import annotations

import torch
from torch import nn


# More rows than this are matrix products like any other; weights of fewer numbers than this are in cache anyway.
MOST_ROWS = 8
FEWEST_WEIGHTS = 1 << 15


class Linear(nn.Linear):
    """`nn.Linear`, but that decoding a few rows on CPU reads the weights about as fast as memory gives them.

    PyTorch hands a float32 product with a few rows to a kernel that runs on one thread, or that reads the weights once
    for each row. As a batch of products, each with a part of the weights, it goes two to six times as fast.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._is_narrow(input):
            return super().forward(input)
        parts = min(max(2, torch.get_num_threads()), self.out_features)
        whole = self.out_features - self.out_features % parts
        columns = input.reshape(-1, self.in_features).mT
        weights = self.weight[:whole].view(parts, -1, self.in_features)
        output = torch.bmm(weights, columns.expand(parts, -1, -1)).flatten(0, 1)
        if whole < self.out_features:
            output = torch.cat([output, self.weight[whole:] @ columns])
        output = output.mT.contiguous()
        if self.bias is not None:
            output += self.bias
        return output.view(*input.shape[:-1], self.out_features)

    def _is_narrow(self, x: torch.Tensor) -> bool:
        weight = self.weight
        return (
            0 < x.numel() <= MOST_ROWS * self.in_features
            and x.shape[-1] == self.in_features
            and not torch.is_grad_enabled()
            and x.dtype == weight.dtype == torch.float32
            and x.device.type == weight.device.type == "cpu"
            and type(weight) is nn.Parameter
            and weight.numel() >= FEWEST_WEIGHTS
            and weight.is_contiguous()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )


class ResidualProjection(Linear):
    """The last projection of a mixer or MLP, whose output is added to the hidden states."""
