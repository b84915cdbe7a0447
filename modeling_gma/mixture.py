"""The learned Gaussian mixtures that route queries and keys, one for each head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init


# How far apart the components' scores of a routing vector are at the start. Chosen by validation perplexity on IMDb
# (4 layers, 4 heads, K = 64, one seed): after a million tokens spreads of 0.3, 0.5 and 0.8 give 237.5, 236.5 and 247.0
# at width 128; after 0.6 million, 0.5 and 0.8 give 327.6 and 322.3 at width 256. Means twice or four times as long as
# routing vectors give 239.4 and 244.2 at width 128. At 0.5, usage entropy starts at 1.00 and token entropy at 0.97 of
# log K, at any width.
SCORE_SPREAD = 0.5


class GaussianMixture(nn.Module):
    """Unconstrained parameters mu (H, K, d_r), omega (H, K, d_r) and alpha (H, K), and the mixture they stand for.

    Calling it gives what `gaussian_mixture_attention` takes: means, variances and log_priors, in float32 or wider.
    """

    def __init__(self, num_heads: int, num_components: int, routing_dim: int, variance_floor: float = 1e-4):
        super().__init__()
        self.variance_floor = variance_floor
        self.mu = nn.Parameter(torch.empty(num_heads, num_components, routing_dim))
        self.omega = nn.Parameter(torch.empty(num_heads, num_components, routing_dim))
        self.alpha = nn.Parameter(torch.empty(num_heads, num_components))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, routing_std: float = 3**-0.5, score_spread: float = SCORE_SPREAD) -> None:
        """Start a mixture for routing vectors whose entries have this standard deviation.

        The default is what `nn.Linear` makes of inputs of unit variance. Means are as long as routing vectors, all
        equally: unequal lengths tilt every token towards the same components. Priors are uniform. Variances are such
        that scores spread by `score_spread`, whatever the width.
        """
        routing_dim = self.mu.shape[-1]
        directions = F.normalize(torch.randn_like(self.mu), dim=-1)
        init.copy_(self.mu, directions * (routing_std * math.sqrt(routing_dim)))
        variance = routing_std**2 * math.sqrt(routing_dim) / score_spread
        # What softplus has to add to the floor; a floor above the variance wanted is the variance.
        variance = max(variance - self.variance_floor, 1e-3 * variance)
        init.constant_(self.omega, variance + math.log(-math.expm1(-variance)))
        init.zeros_(self.alpha)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(self.mu.dtype, torch.float32)
        variances = F.softplus(self.omega.to(wide)) + self.variance_floor
        return self.mu.to(wide), variances, self.alpha.to(wide).log_softmax(-1)

    def extra_repr(self) -> str:
        heads, components, routing_dim = self.mu.shape
        return f"heads={heads}, components={components}, routing_dim={routing_dim}, floor={self.variance_floor}"
