"""Retrieval of Long Range Arena: do two papers of the ACL anthology cite each other? Bytes of both, two towers."""

from __future__ import annotations

import csv
import sys

from datasets import Dataset, Features, List, Value

from .lra import find


NUM_CLASSES = 2
LENGTH = 4000
FILES = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
WHERE = "They are in lra_release.gz of github.com/google-research/long-range-arena, under lra_release/tsv_data."
FEATURES = Features(
    {"input_ids": List(Value("uint16")), "other_input_ids": List(Value("uint16")), "labels": Value("int64")}
)


def load(split: str, folder: str | None = None, length: int = LENGTH, cache_dir: str | None = None) -> Dataset:
    """A split of input_ids, other_input_ids (bytes, cut to `length`) and labels."""
    (path,) = find(folder, [FILES[split]], WHERE)
    return Dataset.from_generator(
        _rows, features=FEATURES, gen_kwargs={"path": str(path), "length": length}, cache_dir=cache_dir
    )


def _rows(path: str, length: int):
    csv.field_size_limit(sys.maxsize)
    with open(path, newline="", encoding="utf-8") as file:
        for label, _, _, first, second in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield {
                "input_ids": list(first.encode()[:length]),
                "other_input_ids": list(second.encode()[:length]),
                "labels": int(float(label)),
            }
