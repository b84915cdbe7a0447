"""The learned Gaussian mixtures that route queries and keys, one for each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GaussianMixture(nn.Module):
    """Unconstrained parameters mu (H, K, d_r), omega (H, K, d_r) and alpha (H, K), and the mixture they stand for.

    Calling it gives what `gaussian_mixture_attention` takes: means, variances and log_priors, in float32 or wider.
    """

    def __init__(self, num_heads: int, num_components: int, routing_dim: int, variance_floor: float):
        super().__init__()
        self.variance_floor = variance_floor
        self.mu = nn.Parameter(torch.empty(num_heads, num_components, routing_dim))
        self.omega = nn.Parameter(torch.empty(num_heads, num_components, routing_dim))
        self.alpha = nn.Parameter(torch.empty(num_heads, num_components))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(self.mu.dtype, torch.float32)
        variances = F.softplus(self.omega.to(wide)) + self.variance_floor
        return self.mu.to(wide), variances, self.alpha.to(wide).log_softmax(-1)

    def extra_repr(self) -> str:
        heads, components, routing_dim = self.mu.shape
        return f"heads={heads}, components={components}, routing_dim={routing_dim}, floor={self.variance_floor}"
