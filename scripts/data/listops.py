"""ListOps of Long Range Arena: nested MIN, MAX, MED and SM of digits, 10 classes. Made here from a seed, or read from
the released TSV files."""

from __future__ import annotations

import csv
import multiprocessing
import os
import random
import statistics
from pathlib import Path

from datasets import Dataset, DatasetDict
from tqdm.auto import tqdm

from .lra import as_dataset, default_cache, find


NUM_CLASSES = 10
LENGTH = 2000
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
WHERE = "They are in lra_release.gz of github.com/google-research/long-range-arena, under lra_release/listops-1000."
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# One id for each symbol: digits are themselves.
SYMBOLS = (*map(str, range(10)), *OPERATORS, "]")
IDS = {symbol: index for index, symbol in enumerate(SYMBOLS)}
CLOSE = IDS["]"]
FIRST_OPERATOR = IDS[OPERATORS[0]]

OPERATOR_PROBABILITY = 0.25
MAX_DEPTH = 10
MAX_ARGUMENTS = 10

# Expressions made from one seed; workers take any of them, and the order is that of their numbers.
SHARD = 500


def evaluate(operator: int, values: list[int]) -> int:
    """The value of an operator (0 to 3, in the order of OPERATORS)."""
    if operator == 0:
        return min(values)
    if operator == 1:
        return max(values)
    if operator == 2:
        return int(statistics.median(values))
    return sum(values) % 10


def make_tree(rng: random.Random, ids: list[int], limit: int, depth: int = 1) -> int | None:
    """Append an expression to `ids`, and return its value; None once it is longer than `limit`.

    Only `rng.random()` is used, which is the same in every version of Python.
    """
    if depth == MAX_DEPTH or rng.random() > OPERATOR_PROBABILITY:
        digit = int(10 * rng.random())
        ids.append(digit)
        return digit
    operator = int(4 * rng.random())
    ids.append(FIRST_OPERATOR + operator)
    values = []
    for _ in range(2 + int((MAX_ARGUMENTS - 1) * rng.random())):
        value = make_tree(rng, ids, limit, depth + 1)
        if value is None or len(ids) > limit:
            return None
        values.append(value)
    ids.append(CLOSE)
    return evaluate(operator, values)


def make_shard(task: tuple[int, int, int, int]) -> list[tuple[bytes, int]]:
    """Expressions and values, a function of the seed and the number of the shard."""
    seed, number, shorter, longer = task
    rng = random.Random(f"listops {seed} {number}")
    found = []
    while len(found) < SHARD:
        ids = []
        value = make_tree(rng, ids, longer)
        if value is not None and shorter < len(ids) < longer:
            found.append((bytes(ids), value))
    return found


def generate(
    count: int, seed: int = 0, shorter: int = 500, longer: int = 2000, num_proc: int | None = None
) -> tuple[list[bytes], list[int]]:
    """`count` different expressions of more than `shorter` and fewer than `longer` symbols, and their values."""
    num_proc = num_proc or os.cpu_count() or 1
    seen, labels = {}, []

    def tasks():
        number = 0
        while True:
            yield seed, number, shorter, longer
            number += 1

    with tqdm(total=count, desc="making ListOps", unit="expression") as progress:
        # Results come in the order of the tasks, however many workers there are.
        for shard in _in_order(make_shard, tasks(), num_proc):
            for ids, value in shard:
                if ids not in seen:
                    seen[ids] = None
                    labels.append(value)
                    progress.update()
                    if len(labels) == count:
                        return list(seen), labels


def _in_order(function, tasks, num_proc):
    if num_proc == 1:
        yield from map(function, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(num_proc) as pool:
        waiting = [pool.apply_async(function, (next(tasks),)) for _ in range(2 * num_proc)]
        while True:
            yield waiting.pop(0).get()
            waiting.append(pool.apply_async(function, (next(tasks),)))


def load(
    split: str,
    folder: str | None = None,
    sizes: tuple[int, int, int] = (96_000, 2_000, 2_000),
    seed: int = 0,
    shorter: int = 500,
    longer: int = 2000,
    cache_dir: str | None = None,
    num_proc: int | None = None,
) -> Dataset:
    """A split ("train", "validation" or "test") of input_ids and label.

    From basic_train.tsv, basic_val.tsv and basic_test.tsv in `folder`, or made from the seed and kept in `cache_dir`.
    """
    if folder is not None:
        return read_release(folder, split)
    made = Path(cache_dir or default_cache()).expanduser() / (
        f"listops-{'-'.join(map(str, sizes))}-above{shorter}-below{longer}-seed{seed}"
    )
    if not made.exists():
        expressions, labels = generate(sum(sizes), seed, shorter, longer, num_proc)
        splits, start = DatasetDict(), 0
        for name, size in zip(("train", "validation", "test"), sizes):
            rows = [list(ids) for ids in expressions[start : start + size]]
            splits[name] = as_dataset(rows, labels[start : start + size])
            start += size
        aside = made.with_name(f"{made.name}.{os.getpid()}.part")
        splits.save_to_disk(aside)
        os.replace(aside, made)
    return DatasetDict.load_from_disk(made)[split]


def read_release(folder: str, split: str) -> Dataset:
    """A split of the released files: an expression in binary brackets, which are dropped, and its value."""
    (path,) = find(folder, [FILES[split]], WHERE)
    rows, labels = [], []
    with open(path, newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            rows.append([IDS[symbol] for symbol in row["Source"].replace("(", " ").replace(")", " ").split()])
            labels.append(int(row["Target"]))
    return as_dataset(rows, labels)
