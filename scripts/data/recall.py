"""Multi-query associative recall: key-value pairs, then the keys again, whose values are asked for. Made here from a
seed."""

from __future__ import annotations

import multiprocessing
import os
import random
import zlib
from bisect import bisect_left
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm


# What stands between queries; then come the keys, then the values.
BLANK = 0

# Examples made from one seed; workers take any of them, and the order is that of their numbers.
SHARD = 500

# To be raised when `make_example` gives something else: it is part of the name that cached examples have.
VERSION = 1


def check(num_pairs: int, length: int, vocab_size: int) -> None:
    """Say what cannot be made, in the words of the flags."""
    if not 1 <= num_pairs <= length // 3:
        raise ValueError(
            f"--num_pairs must be from 1 to a third of --length, here {length // 3}, for all to be asked, got "
            f"{num_pairs}."
        )
    if not 2 * num_pairs + 1 <= vocab_size <= 2**16:
        raise ValueError(
            f"--vocab_size must be from {2 * num_pairs + 1} (a blank, keys of {num_pairs} pairs, as many values) to "
            f"{2**16}, got {vocab_size}."
        )


def num_keys(vocab_size: int) -> int:
    """Keys are the ids from 1 to this; what is above are values."""
    return (vocab_size - 1) // 2


def make_example(rng: random.Random, num_pairs: int, length: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """Tokens, and at every query its distance from the key's first place, elsewhere 0; both (length,).

    Pairs come first. Then every key is asked once, with blanks between: an answer that stood there could be ruled out
    for the queries after it. How far back a pair lies is drawn so that every power of two is as likely, as far as
    there is room, and near queries are not rare.

    Only `rng.random()` and integers are used, which are the same in every version of Python and on every machine.
    """

    def below(count: int) -> int:
        return int(count * rng.random())

    keys = []
    while len(keys) < num_pairs:
        key = 1 + below(num_keys(vocab_size))
        if key not in keys:
            keys.append(key)
    first_value = 1 + num_keys(vocab_size)
    values = [first_value + below(vocab_size - first_value) for _ in keys]
    tokens, distances = [BLANK] * length, [0] * length
    tokens[: 2 * num_pairs : 2], tokens[1 : 2 * num_pairs : 2] = keys, values
    free = list(range(2 * num_pairs, length))
    waiting = list(range(num_pairs))
    while waiting:
        # In any order: who comes first has the choice.
        index = waiting.pop(below(len(waiting)))
        nearest, farthest = 2 * (num_pairs - index), length - 1 - 2 * index
        power = nearest.bit_length() + below(farthest.bit_length() - nearest.bit_length() + 1)
        low, high = max(nearest, 2 ** (power - 1)), min(farthest, 2**power - 1)
        wanted = 2 * index + low + below(high - low + 1)
        place = bisect_left(free, wanted)
        if place == len(free) or (place and wanted - free[place - 1] < free[place] - wanted):
            place -= 1
        position = free.pop(place)
        tokens[position], distances[position] = keys[index], position - 2 * index
    return tokens, distances


def make_shard(task: tuple) -> np.ndarray:
    """Tokens and distances, (2, examples, length): a function of the seed, the split and the number of the shard."""
    seed, split, number, count, num_pairs, length, vocab_size = task
    rng = random.Random(f"recall {VERSION} {seed} {split} {num_pairs} {length} {vocab_size} {number}")
    made = [make_example(rng, num_pairs, length, vocab_size) for _ in range(count)]
    return np.array(made, dtype="<u2").transpose(1, 0, 2)


def generate(
    count: int, num_pairs: int, length: int, vocab_size: int, seed: int, split: str, num_proc: int | None = None
) -> np.ndarray:
    """Tokens and distances of `count` examples, (2, count, length)."""
    check(num_pairs, length, vocab_size)
    # The last shard too is made whole, and cut: examples do not depend on how many there are.
    tasks = [(seed, split, first // SHARD, SHARD, num_pairs, length, vocab_size) for first in range(0, count, SHARD)]
    # To start a process takes as long as a hundred shards.
    num_proc = min(num_proc, len(tasks)) if num_proc else min(os.cpu_count() or 1, max(len(tasks) // 100, 1))
    progress = {"total": len(tasks), "desc": f"making {num_pairs} pairs", "unit": "shard"}
    if num_proc == 1:
        shards = list(tqdm(map(make_shard, tasks), **progress))
    else:
        with multiprocessing.get_context("spawn").Pool(num_proc) as pool:
            # In the order of the tasks, however many workers there are.
            shards = list(tqdm(pool.imap(make_shard, tasks), **progress))
    return np.concatenate(shards, axis=1)[:, :count]


class Recall(torch.utils.data.Dataset):
    """Examples with labels: the value at every query, -100 elsewhere.

    Args:
        made: of each number of pairs, tokens and distances (2, examples, length).
    """

    def __init__(self, made: dict[int, np.ndarray]):
        self.made = list(made.values())
        self.sizes = [examples.shape[1] for examples in self.made]
        self.starts = np.cumsum([0, *self.sizes])
        self.num_pairs = np.repeat(list(made), self.sizes)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _read(self, index: int) -> np.ndarray:
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.made[part][:, index - int(self.starts[part])].astype(np.int64)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """input_ids and labels (length,); a label stands at its query already."""
        tokens, distances = self._read(index)
        labels = np.full_like(tokens, -100)
        (queries,) = distances.nonzero()
        labels[queries] = tokens[queries - distances[queries] + 1]
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def distances(self, index: int) -> torch.Tensor:
        """How far before each query its pair begins, 0 where there is no query: (length,)."""
        return torch.from_numpy(self._read(index)[1])

    def checksum(self) -> int:
        """Of all tokens and distances: whether two sets are the same."""
        value = 0
        for examples in self.made:
            value = zlib.crc32(np.ascontiguousarray(examples), value)
        return value


def load(
    split: str,
    num_pairs: list[int],
    count: int,
    length: int = 256,
    vocab_size: int = 512,
    seed: int = 0,
    cache_dir: str | None = None,
    num_proc: int | None = None,
) -> Recall:
    """`count` examples with each of these numbers of pairs, made from the seed and kept in `cache_dir`.

    A split of another name is another set.
    """
    folder = Path(cache_dir).expanduser() if cache_dir else default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for number in num_pairs:
        path = folder / (
            f"recall{VERSION}-{split}-{count}-pairs{number}-length{length}-vocab{vocab_size}-seed{seed}.npy"
        )
        if not path.exists():
            examples = generate(count, number, length, vocab_size, seed, split, num_proc)
            aside = path.with_name(f"{path.name}.{os.getpid()}.part")
            with open(aside, "wb") as file:
                np.save(file, examples)
            os.replace(aside, path)
        found[number] = np.load(path, mmap_mode="r")
    return Recall(found)


def default_cache() -> Path:
    from datasets.config import HF_DATASETS_CACHE

    return Path(HF_DATASETS_CACHE) / "recall"
