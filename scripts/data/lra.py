"""What the tasks of Long Range Arena have in common."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, Features, List, Value


# 256 bytes (or pixels, or symbols) and padding.
VOCAB_SIZE = 257
PADDING = 256

FEATURES = Features({"input_ids": List(Value("uint16")), "labels": Value("int64")})
SPLITS = ("train", "validation", "test")


def as_dataset(rows: list, labels: list[int]) -> Dataset:
    return Dataset.from_dict({"input_ids": rows, "labels": labels}, features=FEATURES)


def default_cache() -> Path:
    from datasets.config import HF_DATASETS_CACHE

    return Path(HF_DATASETS_CACHE) / "lra"


def find(folder: str | None, names: list[str], what: str) -> list[Path]:
    """Files of a release in a folder, or a sentence that says what to fetch and where to put it."""
    if folder is None:
        raise SystemExit(f"This task is read from local files: --data_dir FOLDER with {', '.join(names)}. {what}")
    paths = [Path(folder).expanduser() / name for name in names]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise SystemExit(f"--data_dir {folder} has no {', '.join(missing)}. {what}")
    return paths
