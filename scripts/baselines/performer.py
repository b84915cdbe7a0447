"""Performer (FAVOR+): softmax attention estimated by positive orthogonal random features."""

from __future__ import annotations

import math

import torch
from transformers import initialization as init

from .linear_transformer import LinearAttention


# Added to every exponent, which changes no output. Exponents w.x - |x|^2 / 2 are seldom above 5, however long x is,
# but far below zero where it is long: this moves them to the middle of what float32 can hold.
SHIFT = 15.0
# Exponents end here, which takes a vector along w: products of two features, summed over features and tokens, stay
# finite in float32.
LARGEST_EXPONENT = 35.0
# A feature above this is one whose exponent was cut, give or take rounding.
LARGEST_FEATURE = 0.99999 * math.exp(LARGEST_EXPONENT)


class SoftmaxKernelMap:
    """From x to exp(w.x' - |x'|^2 / 2) with x' = x / d^(1/4): the mean over w of products is exp(q.k / sqrt(d)).

    Parameter: the vectors w / d^(1/4), (H, M, d).

    It is common to subtract the largest exponent among all keys from every one. That number cancels in the
    normaliser, but it is not known while later keys are still to come; the largest exponent of each key is known, but
    does not cancel. Here every feature depends on its own token alone, so that outputs are causal, and the same in
    chunks, in one piece and from a cache; float32 has room for vectors so long that their logits are above 100.
    """

    @staticmethod
    def prepare(projection):
        return (projection,)

    @staticmethod
    def features(x, projection):
        exponents = x @ projection.mT - SoftmaxKernelMap._offset(x)
        return exponents.clamp(max=LARGEST_EXPONENT).exp()

    @staticmethod
    def fill(features, x, scratch, projection):
        inputs = scratch("inputs", *features.shape[:3], x.shape[-1])
        inputs[:, :, : x.shape[2]].copy_(x)
        inputs[:, :, x.shape[2] :] = 0.0
        torch.bmm(inputs.flatten(1, 2), projection.mT, out=features.flatten(1, 2))
        features.sub_(SoftmaxKernelMap._offset(inputs)).clamp_(max=LARGEST_EXPONENT).exp_()

    @staticmethod
    def backward(features, gradient, scratch, by_x, by_projection, projection):
        length, dim = by_x.shape[2:]
        inputs = scratch("inputs", *features.shape[:3], dim)
        by_exponents = gradient.mul_(features).masked_fill_(features > LARGEST_FEATURE, 0.0)
        by_inputs = scratch("by inputs", *inputs.shape)
        torch.bmm(by_exponents.flatten(1, 2), projection, out=by_inputs.flatten(1, 2))
        by_inputs.addcmul_(inputs, by_exponents.sum(-1, keepdim=True), value=-(dim**-0.5))
        by_x.copy_(by_inputs[:, :, :length])

    @staticmethod
    def _offset(x):
        return x.square().sum(-1, keepdim=True) * (0.5 * x.shape[-1] ** -0.5) - SHIFT


class PerformerAttention(LinearAttention):
    """The random vectors are drawn once, when the model is made, and saved with it."""

    feature_map = SoftmaxKernelMap
    # Features of long vectors are small: this only keeps an empty memory from dividing by zero.
    eps = 1e-30

    def __init__(self, config, layer_idx: int | None = None):
        super().__init__(config, layer_idx)
        self.num_features = config.performer_features
        self.register_buffer("features", torch.empty(self.num_heads, self.num_features, config.routing_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.copy_(self.features, orthogonal_gaussians(*self.features.shape).to(self.features))

    def map_parameters(self, dtype):
        return (self.features.to(dtype) * self.config.routing_dim**-0.25,)


def orthogonal_gaussians(heads: int, count: int, dim: int) -> torch.Tensor:
    """Vectors (H, M, d), each a standard normal one, every d in a row at right angles."""
    blocks = -(-count // dim)
    directions, triangles = torch.linalg.qr(torch.randn(heads, blocks, dim, dim, device="cpu"))
    # QR chooses signs; with those of the diagonal, all directions are as likely.
    directions = directions * triangles.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = torch.randn(heads, count, dim, device="cpu").norm(dim=-1, keepdim=True)
    return directions.flatten(1, 2)[:, :count] * lengths
