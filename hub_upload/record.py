"""What is known of an exported folder, in a file beside it: where it came from, and that it was checked as it is."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


def record_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".record.json")


def read_record(folder: Path) -> dict:
    """The record of a folder; empty where there is none that can be read."""
    try:
        record = json.loads(record_path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(folder: Path, record: dict) -> None:
    path = record_path(folder)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, by its path inside; what a link points to is not looked at."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            found[name] = digest.hexdigest()
    return found
