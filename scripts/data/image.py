"""Image of Long Range Arena: CIFAR-10 as 1,024 grey pixels in a row, 10 classes."""

from __future__ import annotations

import numpy as np
from datasets import Dataset

from .lra import as_dataset, find


NUM_CLASSES = 10
LENGTH = 1024
WHERE = "They are in cifar-10-binary.tar.gz of cs.toronto.edu/~kriz/cifar.html, and so is test_batch.bin."
# A tenth of the training images validates, as in the arena's own code.
VALIDATION = 0.1


def load(split: str, folder: str | None = None, cache_dir: str | None = None) -> Dataset:
    names = ["test_batch.bin"] if split == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    records = np.concatenate([_read(path) for path in find(folder, names, WHERE)])
    if split != "test":
        last = len(records) - round(VALIDATION * len(records))
        records = records[:last] if split == "train" else records[last:]
    labels, pixels = records[:, 0], records[:, 1:].reshape(-1, 3, LENGTH).astype(np.float32)
    # The luma weights that TensorFlow and most others make grey with.
    grey = np.tensordot(pixels, np.array([0.2989, 0.5870, 0.1140], dtype=np.float32), axes=([1], [0]))
    return as_dataset(grey.clip(0, 255).astype(np.uint8).tolist(), labels.tolist())


def _read(path) -> np.ndarray:
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % 3073:
        raise SystemExit(
            f"{path} is not a batch of the binary CIFAR-10: {len(content)} bytes, not a multiple of 3073."
        )
    return content.reshape(-1, 3073)
