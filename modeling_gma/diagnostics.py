"""What can be said of responsibilities in numbers.

`RunningStatistics` gathers sums over any number of tokens, in memory that does not grow with them; the functions here
say what the sums mean. They take probabilities, tables of counts (how often component k had a token of category c) and
moments (the mean of products of responsibilities), with any dimensions before the last ones.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import nn

from .chunked import full_precision
from .mixture import GaussianMixture


# Below this share of the largest, an eigenvalue of moments is what rounding left of zero.
ROUNDING = 1e-13

# A head whose keys have a usage of smaller entropy, over log K, has collapsed: of 128 components it uses about three.
COLLAPSED = 0.25

# Responsibilities of a head that statistics look at together on CPU, half a megabyte of float32.
PIECE = 1 << 17


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """In nats, over the last dimension: (.., K) -> (..)."""
    tiny = torch.finfo(probabilities.dtype).tiny
    # Not the negative, which has a zero of its own.
    return 0.0 - probabilities.clamp(min=tiny).log_().mul_(probabilities).sum(-1)


def normalised_entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy over the last dimension, in units of its largest possible value: (.., K) -> (..)."""
    components = probabilities.shape[-1]
    return entropy(probabilities) / (math.log(components) if components > 1 else 1.0)


def hard_assignments(responsibilities: torch.Tensor) -> torch.Tensor:
    """The component that has most of a token, the first of equals: (.., K) -> (..)."""
    if responsibilities.device.type == "cpu":
        # Several times as fast as torch's.
        return torch.as_tensor(np.argmax(responsibilities.detach().numpy(), -1))
    return responsibilities.argmax(-1)


def effective_components(usage: torch.Tensor) -> torch.Tensor:
    """How many components, used alike, would have the entropy of this usage: (.., K) -> (..), from 1 to K."""
    return entropy(usage).exp()


def usage_overlap(query_usage: torch.Tensor, key_usage: torch.Tensor) -> torch.Tensor:
    """The share of usage that queries and keys have in common, (.., K) -> (..).

    One: what is read most is what is written most. Zero: no component is both written and read.
    """
    return torch.minimum(query_usage, key_usage).sum(-1)


def half_life(log_decay: torch.Tensor) -> torch.Tensor:
    """Tokens after which a forget gate leaves half of what was written, by its mean log-decay: any shape, the same."""
    return math.log(0.5) / log_decay.clamp(max=-torch.finfo(log_decay.dtype).tiny)


def effective_rank(query_moments: torch.Tensor, key_moments: torch.Tensor) -> torch.Tensor:
    """The effective rank of the affinity of all tokens with each other, Gamma^Q (Gamma^K)^T: (.., K, K) -> (..).

    It is the exponential of the entropy of the singular values over their sum, from 1 to K (Roy and Vetterli, 2007).
    Moments suffice: with Gamma^T Gamma = R^T R on both sides, the affinity has the singular values of R_Q R_K^T.
    """
    singular = torch.linalg.svdvals(_root(query_moments) @ _root(key_moments).mT)
    return effective_components(singular / singular.sum(-1, keepdim=True))


def _root(moments: torch.Tensor) -> torch.Tensor:
    """R of R^T R = moments."""
    values, vectors = torch.linalg.eigh(moments)
    values = torch.where(values > ROUNDING * values[..., -1:], values, 0.0)
    return values.sqrt().unsqueeze(-1) * vectors.mT


def principal_axes(usage: torch.Tensor, moments: torch.Tensor, count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """PCA of responsibility vectors: (.., K), (.., K, K) -> axes (.., count, K) and their shares of the variance.

    The largest entry of an axis is positive. Shares are zero where nothing varies.
    """
    covariance = moments - usage.unsqueeze(-1) * usage.unsqueeze(-2)
    values, vectors = torch.linalg.eigh(covariance)
    axes = vectors.mT.flip(-2)[..., :count, :]
    largest = axes.gather(-1, axes.abs().argmax(-1, keepdim=True))
    total = covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    shares = values.flip(-1)[..., :count].clamp(min=0) / total.clamp(min=torch.finfo(total.dtype).tiny)
    # Differences of moments that are equal leave about this much.
    shares = torch.where(total > ROUNDING * moments.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True), shares, 0.0)
    return axes * largest.sign(), shares


def purity(table: torch.Tensor) -> torch.Tensor:
    """The share of a component's tokens that its largest category has: (.., K, C) -> (.., K); NaN without tokens."""
    return table.amax(-1) / table.sum(-1)


def weighted_purity(table: torch.Tensor) -> torch.Tensor:
    """The mean purity of the components that tokens go to: (.., K, C) -> (..)."""
    return table.amax(-1).sum(-1) / table.sum((-2, -1))


def mutual_information(table: torch.Tensor) -> torch.Tensor:
    """Between component and category, in nats: (.., K, C) -> (..)."""
    joint = table / table.sum((-2, -1), keepdim=True)
    return (entropy(joint.sum(-1)) + entropy(joint.sum(-2)) - entropy(joint.flatten(-2))).clamp(min=0)


def normalised_mutual_information(table: torch.Tensor) -> torch.Tensor:
    """Mutual information over the smaller of the two entropies, as in the paper: (.., K, C) -> (..), from 0 to 1.

    Zero where that entropy is zero: one component, or one category, tells nothing.
    """
    total = table.sum((-2, -1)).unsqueeze(-1)
    smaller = torch.minimum(entropy(table.sum(-1) / total), entropy(table.sum(-2) / total))
    return torch.where(smaller > 0, mutual_information(table) / smaller, 0.0)


ALIGNMENT = {
    "weighted_purity": weighted_purity,
    "mutual_information": mutual_information,
    "normalised_mutual_information": normalised_mutual_information,
}


def count_pairs(components: torch.Tensor, categories: torch.Tensor, num_components: int, num_categories: int):
    """How often each component met each category: (.., T) and (T,) -> (.., K, C) in int64."""
    pairs = components * num_categories + categories
    counts = torch.zeros(*pairs.shape[:-1], num_components * num_categories, dtype=torch.long, device=pairs.device)
    counts.scatter_add_(-1, pairs, torch.ones_like(pairs))
    return counts.unflatten(-1, (num_components, num_categories))


def permuted_tables(table: torch.Tensor, permutations: int = 100, seed: int = 0) -> torch.Tensor:
    """Tables as they come out when the tokens' categories are shuffled: (K, C) -> (permutations, K, C).

    Only a table's margins matter to that, so it is drawn from them, without the tokens: each component in turn draws
    its tokens from those that are left, category by category.
    """
    generator = np.random.default_rng(seed)
    counts = table.detach().cpu().to(torch.long).numpy()
    left = np.broadcast_to(counts.sum(0), (permutations, counts.shape[1])).copy()
    drawn = np.zeros((permutations, *counts.shape), dtype=np.int64)
    for component, size in enumerate(counts.sum(1)):
        missing = np.full(permutations, size)
        for category in range(counts.shape[1]):
            rest = left[:, category + 1 :].sum(1)
            drawn[:, component, category] = generator.hypergeometric(left[:, category], rest, missing)
            missing -= drawn[:, component, category]
        left -= drawn[:, component]
    return torch.from_numpy(drawn)


def permutation_baseline(
    table: torch.Tensor, permutations: int = 100, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each alignment of components and categories when categories are shuffled."""
    if permutations < 2:
        raise ValueError(f"`permutations` must be at least 2, got {permutations}.")
    tables = permuted_tables(table, permutations, seed).double()
    values = {name: function(tables) for name, function in ALIGNMENT.items()}
    return {name: (value.mean().item(), value.std().item()) for name, value in values.items()}


def _sums(piece: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Of (H, T, K), for each head and last for their average: hard assignments, and sums over the tokens.

    Returns them and that average, (T, K).
    """
    groups = torch.cat([piece, piece.mean(0, keepdim=True)])
    sums = {
        "assignments": hard_assignments(groups),
        "usage": groups.sum(1),
        "largest": groups.amax(-1).sum(-1),
        "entropy": entropy(groups).sum(-1),
    }
    return sums, groups[-1]


def _sums_on_cpu(piece: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same by numpy, whose logarithm and argmax are several times as fast as torch's, and whose calls are short.

    One head at a time, while it is in the cache: statistics are mostly reading.
    """
    heads, tokens, components = piece.shape
    piece = piece.numpy()
    average, logs = np.zeros_like(piece, shape=(tokens, components)), np.empty_like(piece, shape=(tokens, components))
    sums = {
        "assignments": np.empty((heads + 1, tokens), np.int64),
        "usage": np.empty((heads + 1, components), piece.dtype),
        "largest": np.empty(heads + 1, piece.dtype),
        "entropy": np.empty(heads + 1, piece.dtype),
    }
    tiny, ones, places = np.finfo(piece.dtype).tiny, np.ones(tokens, piece.dtype), np.arange(tokens)
    for group, responsibilities in enumerate([*piece, average]):
        if group < heads:
            average += responsibilities
        else:
            average /= max(heads, 1)
        assignments = responsibilities.argmax(-1, out=sums["assignments"][group])
        np.dot(ones, responsibilities, out=sums["usage"][group])
        sums["largest"][group] = responsibilities[places, assignments].sum()
        # So small that it changes zeros alone.
        np.log2(np.add(responsibilities, tiny, out=logs), out=logs)
        sums["entropy"][group] = 0.0 - math.log(2) * np.vdot(logs, responsibilities)
    return {name: torch.from_numpy(values) for name, values in sums.items()}, torch.from_numpy(average)


class RunningStatistics:
    """Sums over tokens from which all statistics follow.

    ```python
    >>> statistics = RunningStatistics(num_categories=10, moments=1)
    >>> for gamma, categories in batches:  # (B, H, N, K), (B, N)
    ...     statistics.update(gamma, categories)
    >>> statistics.summary()["usage_entropy"]  # (H + 1,): every head, and their average
    ```

    Args:
        num_categories: how many categories tokens have, if `update` is given them.
        moments: keep what `effective_rank` and `principal_axes` need, of every so-manieth token: 1 for all, 0 for
            none. It is what takes most of the time, and some thousands of tokens give it well.

    Attributes: `count`, the number of tokens, and for each of G = H + 1 groups, the heads and last their average,
        `usage` (G, K), the mean responsibilities;
        `assigned` (G, K), how many tokens each component is the largest of;
        `table` (G, K, C), the same for each category;
        `moments` (G, K, K), the mean of products of two responsibilities, and `moments_usage` (G, K), the mean
        responsibilities of the same tokens.
    """

    def __init__(self, num_categories: int | None = None, moments: int = 0):
        self.num_categories, self.moments_every = num_categories, moments
        self.count = self.moments_count = 0

    def update(
        self,
        responsibilities: torch.Tensor,
        categories: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take in responsibilities (B, H, N, K) of tokens and their categories (B, N); `mask` (B, N) says which count.

        Returns hard assignments (H + 1, T) of the T tokens that do.
        """
        if responsibilities.dim() != 4:
            raise ValueError(
                f"`responsibilities` must be (batch, heads, tokens, components), got {tuple(responsibilities.shape)}."
            )
        batch, heads, tokens, components = responsibilities.shape
        if (categories is None) != (self.num_categories is None):
            raise ValueError("`categories` and `num_categories` go together.")
        for name, value in {"categories": categories, "mask": mask}.items():
            if value is not None and value.shape != (batch, tokens):
                raise ValueError(f"`{name}` must be {(batch, tokens)}, one a token, got {tuple(value.shape)}.")
        if self.count and self.table.shape[:2] != (heads + 1, components):
            raise ValueError(
                f"`responsibilities` must go on with {self.table.shape[0] - 1} heads and {self.table.shape[1]} "
                f"components, got {heads} and {components}."
            )
        responsibilities = responsibilities.detach()
        mask = None if mask is None else mask.to(responsibilities.device, torch.bool)
        pieces, some, seen = [], [], self.count
        for row, start in itertools.product(range(batch), range(0, tokens, self._piece_length(responsibilities))):
            place = slice(start, start + self._piece_length(responsibilities))
            piece = responsibilities[row, :, place]
            piece = piece if mask is None else piece[:, mask[row, place]]
            sums, average = _sums_on_cpu(piece) if piece.device.type == "cpu" else _sums(piece)
            pieces.append(sums)
            if self.moments_every:
                every = slice(-seen % self.moments_every, None, self.moments_every)
                some.append(torch.cat([piece[:, every], average[every].unsqueeze(0)]))
            seen += piece.shape[1]
        if not pieces:
            return torch.zeros(heads + 1, 0, dtype=torch.long, device=responsibilities.device)
        assignments = torch.cat([piece.pop("assignments") for piece in pieces], dim=-1)
        sums = {name: torch.stack([piece[name] for piece in pieces]).double().sum(0) for name in pieces[0]}
        if self.moments_every:
            some = torch.cat(some, dim=1)
            with full_precision(some.device):
                products = some.mT @ some
            sums |= {"moments": products.double(), "moments_usage": some.sum(1).double()}
            self.moments_count += some.shape[1]
        labels = torch.zeros(batch, tokens, dtype=torch.long) if categories is None else categories
        labels = labels.to(assignments.device)
        labels = labels.flatten() if mask is None else labels[mask]
        table = count_pairs(assignments, labels, components, self.num_categories or 1)
        if self.count == 0:
            self._sums, self.table = sums, table
        else:
            for name, value in sums.items():
                self._sums[name] += value
            self.table += table
        self.count = seen
        return assignments

    @staticmethod
    def _piece_length(responsibilities: torch.Tensor) -> int:
        """Tokens that are looked at together: on CPU as many as leave a head's responsibilities in the cache."""
        tokens, components = responsibilities.shape[-2:]
        return max(PIECE // components, 1) if responsibilities.device.type == "cpu" else max(tokens, 1)

    @property
    def usage(self) -> torch.Tensor:
        return self._mean("usage")

    @property
    def moments(self) -> torch.Tensor:
        return self._moments_mean("moments")

    @property
    def moments_usage(self) -> torch.Tensor:
        return self._moments_mean("moments_usage")

    @property
    def assigned(self) -> torch.Tensor:
        return self.table.sum(-1)

    def _moments_mean(self, name: str) -> torch.Tensor:
        if not self.moments_count:
            raise ValueError("No moments were kept: construct with `moments=1` and call `update`.")
        return self._sums[name] / self.moments_count

    def _mean(self, name: str) -> torch.Tensor:
        if self.count == 0:
            raise ValueError("No token has been counted yet: call `update`.")
        return self._sums[name] / self.count

    def summary(self) -> dict[str, torch.Tensor]:
        """For each group, (G,):

        usage_entropy: entropy of the mean responsibilities, over log K. One: all components are used alike.
        token_entropy: mean entropy of the tokens, over log K. Zero: every token goes to one component.
        mean_maximum: mean of the tokens' largest responsibility.
        active: share of components that are the largest of some token.
        effective_components: how many components, used alike, would have the entropy of the usage.

        With categories also how far hard assignments go with them: weighted_purity, mutual_information (nats) and
        normalised_mutual_information.
        """
        usage = self.usage
        components = usage.shape[-1]
        figures = {
            "usage_entropy": normalised_entropy(usage),
            "token_entropy": self._mean("entropy") / (math.log(components) if components > 1 else 1.0),
            "mean_maximum": self._mean("largest"),
            "active": (self.assigned > 0).double().mean(-1),
            "effective_components": effective_components(usage),
        }
        if self.num_categories is not None:
            figures |= {name: function(self.table.double()) for name, function in ALIGNMENT.items()}
        return figures


@torch.no_grad()
def mixture_health(model: nn.Module, **inputs) -> dict[str, float]:
    """Figures to watch while a model trains, over all GMA heads of all layers, queries and keys; padding left out.

    Beside the means, those of queries and keys alone, and the smallest `usage_entropy` of any head's keys, and which
    it is: near zero, all tokens are written into one slot, and `collapse_warning` says so in words. Queries that all
    go to a few slots are another thing: they weigh the keys. Heads are counted from the first GMA head of their layer.
    """
    variances = [module()[1] for module in model.modules() if isinstance(module, GaussianMixture)]
    if not variances:
        raise ValueError("`model` has no mixture to look at: none of its layers has GMA heads.")
    outputs = model(**inputs, output_responsibilities=True, use_cache=False)
    sides, places = {"query": [], "key": []}, []
    for number, pair in enumerate(outputs.responsibilities):
        places += [(number, head) for head in range(pair[0].shape[1])]
        for layers, responsibilities in zip(sides.values(), pair):
            statistics = RunningStatistics()
            statistics.update(responsibilities, mask=inputs.get("attention_mask"))
            layers.append({name: heads[:-1] for name, heads in statistics.summary().items()})
    query, key = (
        {name: torch.cat([layer[name] for layer in layers]) for name in layers[0]} for layers in sides.values()
    )
    smallest = key["usage_entropy"].argmin()
    return {
        **{name: torch.cat([query[name], key[name]]).mean().item() for name in key},
        "query_usage_entropy": query["usage_entropy"].mean().item(),
        "key_usage_entropy": key["usage_entropy"].mean().item(),
        "smallest_usage_entropy": key["usage_entropy"][smallest].item(),
        "smallest_usage_layer": places[smallest][0],
        "smallest_usage_head": places[smallest][1],
        "smallest_effective_components": key["effective_components"][smallest].item(),
        "collapsed_heads": int((key["usage_entropy"] < COLLAPSED).sum()),
        "smallest_variance": min(variance.min().item() for variance in variances),
    }


def collapse_warning(health: dict[str, float], num_components: int) -> str | None:
    """What `mixture_health` found, in words, if components have collapsed; None if not."""
    if num_components == 1 or not health.get("collapsed_heads"):
        return None
    others = health["collapsed_heads"] - 1
    more = f", and {others} more head{'s' if others > 1 else ''} like it" if others else ""
    return (
        f"Components have collapsed: head {health['smallest_usage_head']} of layer {health['smallest_usage_layer']} "
        f"writes into about {health['smallest_effective_components']:.1f} of its {num_components} (usage entropy "
        f"{health['smallest_usage_entropy']:.2f}, below {COLLAPSED}){more}. It mixes nearly all tokens alike. "
        f"Smaller learning rates for the mixtures, or a longer warmup, may keep them apart."
    )
