"""Checkpoints of training: whole or not there, safetensors and JSON only.

A checkpoint is a folder `step_<number>`: the model as `from_pretrained` loads it, `optimizer.safetensors`, and
`state.json`. It is written under another name and then renamed, so that one which is there is complete.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import torch
from files import PART, write_json
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


# As one process would have it, whatever the model is wrapped in (DDP, FSDP).
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def checkpoint_steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by step, in order."""
    found = {}
    for path in folder.glob("step_*") if folder.is_dir() else ():
        if re.fullmatch(r"step_\d+", path.name) and (path / "state.json").is_file():
            found[int(path.name[5:])] = path
    return dict(sorted(found.items()))


def read_state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())


def save_checkpoint(folder: Path, step: int, model, optimizer, state: dict, is_main: bool, tokenizer=None) -> None:
    """Save to folder/step_<step>. All processes call it; one writes."""
    unwrapped = unwrap(model)
    weights = get_model_state_dict(model, options=WHOLE)
    # Where the model is sharded, one process alone is told the whole.
    moments = _flat(get_optimizer_state_dict(model, optimizer, options=WHOLE).get("state", {}))
    if not is_main:
        return
    final = folder / f"step_{step:08d}"
    if (final / "state.json").is_file():
        # Of a run that went on from an older one: a step comes out the same each time.
        return
    aside = folder / (final.name + PART)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        unwrapped.save_pretrained(aside, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        save_file(moments, aside / "optimizer.safetensors")
        write_json(aside / "state.json", {"step": step} | state)
        for path in aside.iterdir():
            _sync(path)
        os.replace(aside, final)
        _sync(folder)
    except Exception as error:
        # The libraries that write have exceptions of their own for a full disk.
        shutil.rmtree(aside, ignore_errors=True)
        raise SystemExit(cannot_write(folder, error)) from error


def load_optimizer(checkpoint: Path, model, optimizer) -> None:
    """Give a fresh optimizer the moments it had at a checkpoint."""
    state = get_optimizer_state_dict(model, optimizer)
    saved = load_file(checkpoint / "optimizer.safetensors")
    expected = {f"{name}/{moment}" for name, of_one in state["state"].items() for moment in of_one}
    different = sorted(expected ^ set(saved))
    if different:
        raise SystemExit(f"{checkpoint} is of another model or optimizer: {', '.join(different[:3])} do not fit.")
    state["state"] = {}
    for name, value in saved.items():
        parameter, _, moment = name.rpartition("/")
        state["state"].setdefault(parameter, {})[moment] = value
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def _flat(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{name}/{moment}": x.contiguous() for name, of_one in state.items() for moment, x in of_one.items()}


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Leave the newest checkpoints and the best one."""
    steps = list(checkpoint_steps(folder))
    for step in steps[:-keep]:
        if step != best:
            # Renamed first: half deleted, it must not be taken for a checkpoint.
            path = folder / f"step_{step:08d}"
            gone = path.with_name(path.name + PART)
            os.replace(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def remove_parts(folder: Path) -> None:
    """What an interrupted process left half done."""
    for path in folder.glob(f"*{PART}") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def unwrap(model):
    """Without DDP, FSDP1 and torch.compile around it."""
    while hasattr(model, "module") or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def cannot_write(folder: Path, error: BaseException) -> str:
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EACCES: "it may not be written to",
        errno.EROFS: "it is on a read-only disk",
        errno.EDQUOT: "the quota is used up",
    }
    reason = reasons.get(getattr(error, "errno", None))
    if reason is None and any(words in str(error) for words in ("os error 28", "No space left", "StorageFull")):
        reason = reasons[errno.ENOSPC]
    return f"{folder} cannot be written: {reason or error}. Checkpoints that were there are as they were."


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
