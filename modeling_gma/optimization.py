"""Parameter groups for optimizers."""

from __future__ import annotations

from torch import nn

from .mixture import GaussianMixture


def parameter_groups(model: nn.Module, weight_decay: float, mixture_learning_rate: float | None = None) -> list[dict]:
    """Groups for an optimizer: parameters with weight decay, those without and, with a learning rate of their own,
    mixtures.

    Mixtures take no decay (it would draw all components to one place), nor do norms and biases, nor what a module
    names in `no_weight_decay`. Of a GMA model `Trainer` makes the same groups by itself.
    """
    decayed, free, mixtures = [], [], []
    seen = set()
    for module in model.modules():
        spared = getattr(module, "no_weight_decay", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                if isinstance(module, GaussianMixture):
                    mixtures.append(parameter)
                else:
                    (free if parameter.dim() < 2 or name in spared else decayed).append(parameter)
    if mixture_learning_rate is None or not mixtures:
        free, mixtures = free + mixtures, []
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return groups + [{"params": mixtures, "weight_decay": 0.0, "lr": mixture_learning_rate}] * bool(mixtures)
