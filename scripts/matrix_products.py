"""The matrix products that a mixer cannot do without, and how long they take by themselves: its arithmetic limit."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


# Tokens in the products that are measured; longer sequences are that many times as long.
TOKENS = 1024


class Product(NamedTuple):
    """`count` batches of (m, k) @ (k, n)."""

    count: float
    batch: int
    m: int
    k: int
    n: int

    @property
    def multiply_adds(self) -> float:
        return self.count * self.batch * self.m * self.k * self.n


def block_products(
    mixer: str,
    batch: int,
    length: int,
    hidden_size: int,
    heads: int,
    features: int,
    is_causal: bool,
    chunk: int,
    train: bool,
    local_heads: int = 0,
) -> tuple[list[Product], list[Product]]:
    """What a block with this mixer multiplies: projections, and products inside the mixer, but for its local heads.

    `features` is K of GMA, M of Performer, k of Linformer; the head dimension for the Linear Transformer. With
    `train`, forward and backward, and what is computed again in backward because it is not kept.
    """
    if mixer == "mamba":
        return _mamba_projections(batch * length, hidden_size, train), []
    dim = hidden_size // heads
    projections = [_rows(batch * length, hidden_size, hidden_size, 4 * (3 if train else 1))]
    if mixer in ("eager", "sdpa", "sdpa_rope"):
        # Forward two; backward four, and one again where scores are not kept.
        times = 2 if not train else 6 if mixer == "eager" else 7
        return projections, [_pairs(times, batch, heads, length, length, dim, is_causal and mixer != "eager")]
    if mixer == "linformer":
        projected = Product(2 * batch * (3 if train else 1), 1, features, length, hidden_size)
        return projections, [projected, _pairs(7 if train else 2, batch, heads, length, features, dim, False)]

    heads -= local_heads
    if not heads:
        return projections, []
    tokens = min(length, TOKENS)
    share = batch * length / tokens

    def each_token(times, inside, outside):
        return Product(times * share, heads, tokens, inside, outside)

    products = []
    if mixer == "gma":
        products.append(each_token(4 if train else 2, 2 * dim, features))
        products.append(each_token(2 * train, features, 2 * dim))
        products.append(Product(2 * train * share, heads, 2 * dim, tokens, features))
    elif mixer == "performer":
        products.append(each_token(4 if train else 2, dim, features))
        products.append(each_token(2 * train, features, dim))
    if not is_causal:
        products.append(Product((1 + train) * share, heads, dim, tokens, features))
        products.append(each_token(1 + train, features, dim))
        products.append(each_token(2 * train, dim, features))
    else:
        chunk = min(chunk, length)
        chunks, many = heads * max(tokens // chunk, 1), batch * length / (max(tokens // chunk, 1) * chunk)
        products += [
            Product((1 + train) * many, chunks, chunk, features, chunk),  # affinities
            Product((1 + 2 * train) * many, chunks, chunk, chunk, dim),  # by values, and their gradients
            Product(2 * train * many, chunks, chunk, chunk, features),  # gradients of reading and writing
            Product((1 + 2 * train) * many, chunks, dim, chunk, features),  # states and their gradients
            Product((1 + train) * many, chunks, chunk, features, dim),
            Product(2 * train * many, chunks, chunk, dim, features),
        ]
    return projections, [product for product in products if product.count]


def window_products(batch, length, heads, dim, window, is_causal, train) -> list[Product]:
    """What local heads multiply at least: every query with the keys that it sees, in blocks of a window."""
    window = min(window, length)
    # The first tokens have fewer before them.
    pairs = window * length - window * (window - 1) / 2
    if not is_causal:
        pairs = 2 * pairs - length
    block = min(window, TOKENS)
    return [Product((7 if train else 2) * batch * pairs / block**2, heads, block, dim, block)]


def _rows(rows, inside, outside, times):
    tokens = min(rows, 4 * TOKENS)
    return Product(times * rows / tokens, 1, tokens, inside, outside)


def _pairs(times, batch, heads, length, total, dim, is_causal):
    """Every query with every key, or with those up to it, in square pieces."""
    m, n = min(length, TOKENS), min(total, TOKENS)
    pieces = (length / m) * (total / n)
    if is_causal:
        # Down to single tokens: what a kernel with small pieces comes near to.
        pieces = pieces * (length + 1) / (2 * length)
    return Product(times * batch * pieces, heads, m, dim, n)


def _mamba_projections(rows, hidden_size, train):
    inner, rank = 2 * hidden_size, -(-hidden_size // 16)
    times = 3 if train else 1
    return [
        _rows(rows, hidden_size, 2 * inner, times),
        _rows(rows, inner, rank + 2 * 16, times),
        _rows(rows, rank, inner, times),
        _rows(rows, inner, hidden_size, times),
    ]


class Stopwatch:
    """Seconds that products take, each the best of all times it was measured."""

    def __init__(self, device: torch.device):
        self.device = device
        self.best = {}

    def measure(self, products: list[Product], dtype: torch.dtype, repetitions: int = 3) -> None:
        for _, *shape in products:
            batch, m, k, n = shape
            left = torch.randn(batch, m, k, dtype=dtype, device=self.device)
            right = torch.randn(batch, k, n, dtype=dtype, device=self.device)
            out = torch.empty(batch, m, n, dtype=dtype, device=self.device)
            key = (*shape, dtype)
            for _ in range(repetitions):
                seconds = time_call(lambda a=left, b=right, c=out: torch.bmm(a, b, out=c), self.device)
                self.best[key] = min(self.best.get(key, seconds), seconds)

    def seconds(self, products: list[Product], dtype: torch.dtype) -> float:
        return sum(product.count * self.best[(*product[1:], dtype)] for product in products)


def time_call(function, device: torch.device) -> float:
    """Seconds: by the wall clock on CPU, by CUDA events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000
