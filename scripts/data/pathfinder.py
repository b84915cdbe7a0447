"""Pathfinder of Long Range Arena: are two points on a 32 x 32 image joined by a dashed path? 1,024 grey pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datasets import Dataset
from PIL import Image

from .lra import as_dataset, find


NUM_CLASSES = 2
LENGTH = 1024
LEVELS = {"easy": "curv_baseline", "medium": "curv_contour_length_9", "hard": "curv_contour_length_14"}
WHERE = "They are in lra_release.gz of github.com/google-research/long-range-arena, under lra_release/pathfinder32."
# The arena's own split: 80, 10 and 10 %.
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}


def load(split: str, folder: str | None = None, level: str = "hard", cache_dir: str | None = None) -> Dataset:
    (root,) = find(folder, [LEVELS[level]], WHERE)
    (metadata,) = find(str(root), ["metadata"], WHERE)
    pixels, labels = [], []
    # Text in spite of their name: folder, file, number, label, ..
    for path in sorted(metadata.glob("*.npy"), key=lambda path: int(path.stem)):
        for line in path.read_text().splitlines():
            parts = line.split()
            pixels.append(_pixels(root / parts[0] / parts[1]))
            labels.append(int(parts[3]))
    start, stop = (round(share * len(labels)) for share in SHARES[split])
    return as_dataset(pixels[start:stop], labels[start:stop])


def _pixels(path: Path) -> list[int]:
    with Image.open(path) as image:
        return np.asarray(image.convert("L"), dtype=np.uint8).reshape(-1).tolist()
