"""Parameter groups for optimizers."""

from __future__ import annotations

from torch import nn

from .mixture import GaussianMixture


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for an optimizer: parameters with weight decay, and those without.

    Mixtures take none (decay would draw all components to one place), nor do norms and biases, nor what a module names
    in `no_weight_decay`. Of a GMA model `Trainer` makes the same groups by itself.
    """
    decayed, free = [], []
    seen = set()
    for module in model.modules():
        spared = getattr(module, "no_weight_decay", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                is_free = isinstance(module, GaussianMixture) or parameter.dim() < 2 or name in spared
                (free if is_free else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
