"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from matplotlib import pyplot


PART = ".part"


def writable_folder(flag: str, path: str | Path) -> Path:
    """The folder, made if need be, once it is clear that it can be written to: before the work, not after it."""
    folder = Path(path).expanduser().resolve()
    probe = folder / f".{os.getpid()}{PART}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SystemExit(f"{flag} {path} cannot be written to: {error.strerror or error}.") from None
    return folder


def write_text(path: Path, text: str) -> None:
    aside = path.with_name(path.name + PART)
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def write_json(path: Path, content) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_figure(path: Path, figure, formats: tuple[str, ...] = ("png",)) -> None:
    """A pyplot figure as PNG, or in these formats, each with its own suffix; it is closed."""
    for kind in formats:
        aside = path.with_name(path.name + PART)
        # A picture is the same as often as it is made.
        with pyplot.rc_context({"svg.hashsalt": path.stem}):
            figure.savefig(aside, dpi=120, format=kind, metadata={"Date": None} if kind == "svg" else None)
        os.replace(aside, path.with_suffix(f".{kind}"))
    pyplot.close(figure)
