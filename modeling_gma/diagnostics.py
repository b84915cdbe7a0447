"""What can be said of responsibilities in numbers."""

from __future__ import annotations

import math

import torch
from torch import nn

from .mixture import GaussianMixture


def normalised_entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy over the last dimension, in units of its largest possible value: (.., K) -> (..)."""
    components = probabilities.shape[-1]
    entropy = torch.special.entr(probabilities).sum(-1)
    return entropy / math.log(components) if components > 1 else torch.zeros_like(entropy)


def usage_statistics(responsibilities: torch.Tensor) -> dict[str, torch.Tensor]:
    """How a layer uses its components: (B, H, N, K) -> for each head (H,)

    usage_entropy: entropy of the mean responsibilities, over log K. One: all components are used alike.
    token_entropy: mean entropy of the tokens, over log K. Zero: every token goes to one component.
    active: share of components that are the largest of some token.
    """
    gamma = responsibilities.transpose(0, 1).flatten(1, 2)
    components = gamma.shape[-1]
    largest = torch.zeros(gamma.shape[0], components, device=gamma.device)
    largest.scatter_(1, gamma.argmax(-1), 1.0)
    return {
        "usage_entropy": normalised_entropy(gamma.mean(1)),
        "token_entropy": normalised_entropy(gamma).mean(1),
        "active": largest.mean(1),
    }


@torch.no_grad()
def mixture_health(model: nn.Module, **inputs) -> dict[str, float]:
    """Figures to watch while a model trains, over all layers and heads; keys and queries together.

    Beside the means, the smallest `usage_entropy` of any head: near zero, its components have collapsed into one.
    """
    outputs = model(**inputs, output_responsibilities=True, use_cache=False)
    layers = [usage_statistics(torch.cat(pair, dim=2)) for pair in outputs.responsibilities]
    figures = {name: torch.cat([layer[name] for layer in layers]) for name in layers[0]}
    variances = [module()[1] for module in model.modules() if isinstance(module, GaussianMixture)]
    return {
        **{name: values.mean().item() for name, values in figures.items()},
        "smallest_usage_entropy": figures["usage_entropy"].min().item(),
        "smallest_variance": min(variance.min().item() for variance in variances),
    }
