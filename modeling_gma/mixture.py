"""The learned Gaussian mixtures that route queries and keys, one for each head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init


# At the start: how far apart the components' scores of a routing vector are, and how much longer than routing vectors
# the means. Routing vectors grow many times over in the first hundred steps; means as short as they begin would follow
# as fast, and a soft mixture collapse to a few components. The faster it is trained, the softer it has to begin: at a
# learning rate of 4e-3 a spread of 0.5 leaves a quarter of the components, and half of it half of them.
SCORE_SPREAD = 0.25
MEAN_SCALE = 4.0


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
    def reset_parameters(
        self, routing_std: float = 3**-0.5, score_spread: float = SCORE_SPREAD, mean_scale: float = MEAN_SCALE
    ) -> None:
        """Start a mixture for routing vectors whose entries have this standard deviation.

        The default is what `nn.Linear` makes of inputs of unit variance. Means are `mean_scale` times as long as
        routing vectors, all equally: unequal lengths tilt every token towards the same components. Priors are uniform.
        Variances are such that scores spread by `score_spread`, whatever the width.
        """
        routing_dim = self.mu.shape[-1]
        directions = F.normalize(torch.randn_like(self.mu), dim=-1)
        init.copy_(self.mu, directions * (mean_scale * routing_std * math.sqrt(routing_dim)))
        variance = mean_scale * routing_std**2 * math.sqrt(routing_dim) / score_spread
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
