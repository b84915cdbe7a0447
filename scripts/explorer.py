"""One page, in one file, to explore what a model routes where in a passage: explorer.html with its data put in.

Responsibilities are kept as bytes: 255 times their square root, which is fine where they are small. Squares of such
numbers sum to one, so that whatever the model, gzip needs no more than about 5.6 of the 8 bits at 128 components.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from files import write_text


TEMPLATE = Path(__file__).with_name("explorer.html")


@dataclass
class Passage:
    """A sequence of N tokens in a model of H heads and K components."""

    title: str
    texts: list[str]
    labels: list[str]
    layers: list[tuple[np.ndarray, np.ndarray]]  # for each, query and key responsibilities (H, N, K)
    log_decays: list[np.ndarray | None]  # for each, (H, N), or None where memory does not fade
    is_causal: bool


def write_explorer(path: Path, passage: Passage) -> None:
    heads, _, components = passage.layers[0][0].shape
    about = {
        "title": passage.title,
        "texts": passage.texts,
        "labels": passage.labels,
        "layers": len(passage.layers),
        "heads": heads,
        "components": components,
        "isCausal": passage.is_causal,
    }
    # A "<" cannot end the element that data stand in.
    data = json.dumps(about, ensure_ascii=True).replace("<", "\\u003c")
    blocks = [f'<script type="application/json" id="about">{data}</script>']
    for number, (pair, log_decay) in enumerate(zip(passage.layers, passage.log_decays)):
        blocks.append(_block(f"layer-{number}", np.stack([quantised(side) for side in pair])))
        if log_decay is not None:
            blocks.append(_block(f"decay-{number}", np.cumsum(log_decay, axis=1, dtype=np.float64).astype("<f4")))
    page = TEMPLATE.read_text(encoding="utf-8")
    # Nothing runs but what is hashed here, whatever the passage holds.
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        page = page.replace(f"{kind}-hash", f"sha256-{digest}")
    write_text(path, page.replace("<!-- data -->", "\n".join(blocks)))


def quantised(responsibilities: np.ndarray) -> np.ndarray:
    return np.rint(255 * np.sqrt(responsibilities.astype(np.float64))).astype(np.uint8)


def _block(name: str, content: np.ndarray) -> str:
    packed = base64.b64encode(gzip.compress(content.tobytes(), mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>'
