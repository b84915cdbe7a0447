"""Prove that an exported folder loads, before it is pushed.

    python -m hub_upload.check small_hub        # several folders at once, if you like

Looks at every file first: nothing that is not on the list, no link, no pickle, no token, no path of this machine, code
that is this package's and a config that names no other, sane safetensors, a card whose figures are in results.json.
Then new processes without a network load it: one that cannot import this package, with trust_remote_code=True, and one
that can, with trust_remote_code=False. Each takes config, tokenizer and model by the Auto classes, compares the logits
with the checkpoint's bit for bit, runs a pipeline, saves and loads again, and takes a step with Trainer.

What passed is noted in OUT.record.json, with a digest of each file: `push` takes a folder that is still the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path

from huggingface_hub import ModelCard

import modeling_gma
from hub_upload.card import ANALYSIS, KINDS, measured
from hub_upload.export import ABSOLUTE_PATH, PACKAGES, TOKENIZER_FILES, auto_map, flatten, requirements
from hub_upload.record import digests, read_record, write_record


NEEDED = {"README.md", "config.json", "requirements.txt"}
ALLOWED = NEEDED | TOKENIZER_FILES | {"generation_config.json", "results.json", "model.safetensors.index.json"}
ALLOWED |= {"model.safetensors", f"{ANALYSIS}/statistics.json"}
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
FIGURE = re.compile(rf"{ANALYSIS}/[\w-]+\.png")
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".joblib"}
SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b")
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

# What a launcher or a login leaves in the environment, and processes that are to be strangers must not see.
HIDDEN = re.compile(
    r"(HF_|HUGGING|TRANSFORMERS_|ACCELERATE_|FSDP_|TORCHELASTIC_|LOCAL_|MASTER_|GROUP_|ROLE_|RANK$|WORLD_SIZE$|WANDB_)"
)


def look(folder: Path) -> list[str]:
    """What is wrong with the files of a folder, a sentence each; none of its code is run."""
    if not folder.is_dir():
        return [f"{folder} is no folder."]
    found, code = [], flatten()
    names = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found.append(f"{name} is a link, to {os.readlink(path)}: a file must be here itself.")
        elif path.is_dir():
            if name != ANALYSIS:
                found.append(f"{name} is a folder that is not on the list of what is pushed.")
        elif not path.is_file():
            found.append(f"{name} is no ordinary file.")
        elif path.suffix in PICKLES:
            found.append(f"{name} may be a pickle, which can run anything: weights are safetensors.")
        elif not (name in ALLOWED or name in code or SHARD.fullmatch(name) or FIGURE.fullmatch(name)):
            found.append(f"{name} is not on the list of what is pushed.")
        else:
            names.add(name)
    missing = (NEEDED | set(code)) - names
    found += [f"{name} is missing." for name in sorted(missing)]
    found += _changed(folder)
    if missing:
        return found
    for name in sorted(code):
        if (folder / name).read_text(encoding="utf-8", errors="replace") != code[name]:
            found.append(f"{name} is not this package's code.")
    for name in sorted(names):
        found += _look_inside(folder, name)
    return found + _look_at_config(folder) + _look_at_weights(folder, names) + _look_at_card(folder)


def _changed(folder: Path) -> list[str]:
    exported = read_record(folder).get("exported")
    if exported is None:
        return [f"{folder}.record.json, which export writes, is missing: export again."]
    now = digests(folder)
    # The card may be edited.
    changed = [name for name in exported if name in now and name != "README.md" and now[name] != exported[name]]
    found = [f"{name} is not as it was exported: its bytes have changed." for name in changed]
    return found + [f"{name} was exported and is gone." for name in exported if name not in now]


def _look_inside(folder: Path, name: str) -> list[str]:
    """Tokens and paths of this machine in a file, and whether it is what its name says."""
    path = folder / name
    if path.suffix == ".png":
        with open(path, "rb") as file:
            return [] if file.read(8) == b"\x89PNG\r\n\x1a\n" else [f"{name} is no PNG."]
    if path.suffix == ".safetensors":
        header, problem = read_header(path)
        if problem:
            return [f"{name}: {problem}"]
        text = json.dumps(header.get("__metadata__", {}))
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return [f"{name} is no text."]
    found = []
    if SECRET.search(text):
        found.append(f"{name} holds what looks like a token ({SECRET.search(text)[0][:6]}..).")
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except ValueError as error:
            return [*found, f"{name} is no JSON: {error}."]
        if name == "tokenizer.json" and isinstance(content, dict):
            # Pieces of paths are words like others.
            content.pop("model", None)
        text = "\n".join(strings(content))
    if name not in ("vocab.json", "merges.txt") and ABSOLUTE_PATH.search(text):
        found.append(f"{name} holds an absolute path: {ABSOLUTE_PATH.search(text)[0]}.")
    return found


def strings(value) -> list[str]:
    """All text in JSON, keys too."""
    if isinstance(value, dict):
        return [text for name, of_one in value.items() for text in (name, *strings(of_one))]
    if isinstance(value, list):
        return [text for of_one in value for text in strings(of_one)]
    return [value] if isinstance(value, str) else []


def read_header(path: Path) -> tuple[dict, str]:
    """Header of a safetensors file, and what is wrong with it: every byte must belong to just one tensor."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, 100_000_000):
            return {}, f"its header claims {length:,} bytes, the file has {size:,}."
        try:
            header = json.loads(file.read(length))
            tensors = {name: of_one for name, of_one in header.items() if name != "__metadata__"}
            end = 0
            for name, tensor in sorted(tensors.items(), key=lambda pair: pair[1]["data_offsets"]):
                first, last = tensor["data_offsets"]
                if tensor["dtype"] not in BYTES:
                    return header, f"{name} is of the unknown type {tensor['dtype']}."
                if first != end or last - first != BYTES[tensor["dtype"]] * prod(tensor["shape"]):
                    return (
                        header,
                        f"{name} lies at {first} to {last}, which its shape and its neighbours do not allow.",
                    )
                end = last
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return {}, f"its header cannot be read: {error!r}."
    if end != size - 8 - length:
        return header, f"it has {size - 8 - length:,} bytes of weights, its header tells of {end:,}."
    return header, ""


def _look_at_config(folder: Path) -> list[str]:
    found = []
    config, tokenizer = (_read(folder / name) for name in ("config.json", "tokenizer_config.json"))
    named, expected = config.get("auto_map"), auto_map()
    named = named if isinstance(named, dict) else {}
    for name in sorted(named.keys() | expected.keys()):
        if named.get(name) != expected.get(name):
            found.append(f"config.json names other code: {name} is {named.get(name)}, not {expected.get(name)}.")
    if tokenizer.get("auto_map"):
        found.append(f"tokenizer_config.json names code: {tokenizer['auto_map']}.")
    if config.get("model_type") != "gma" or config.get("architectures") not in [[kind] for kind in KINDS]:
        found.append(f"config.json is of {config.get('architectures')}, not of one of {', '.join(KINDS)}.")
    if (folder / "requirements.txt").read_text(encoding="utf-8").split() != requirements():
        found.append("requirements.txt is not what this package requires.")
    return found


def _look_at_weights(folder: Path, names: set[str]) -> list[str]:
    shards = {name for name in names if SHARD.fullmatch(name)}
    if not (folder / "model.safetensors.index.json").is_file():
        if shards or "model.safetensors" not in names:
            return ["There is no model.safetensors, and no model.safetensors.index.json for files in its place."]
        return []
    index = _read(folder / "model.safetensors.index.json").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        return ["model.safetensors.index.json has no weight_map."]
    found = []
    for name in sorted(set(index.values())):
        if not SHARD.fullmatch(name):
            found.append(f"model.safetensors.index.json names {name}, which is no file of weights in this folder.")
        elif name not in shards:
            found.append(f"model.safetensors.index.json names {name}, which is missing.")
    for name in sorted(shards):
        held = set(read_header(folder / name)[0]) - {"__metadata__"}
        if held != {tensor for tensor, where in index.items() if where == name}:
            found.append(f"model.safetensors.index.json and {name} do not hold the same tensors.")
    if "model.safetensors" in names:
        found.append("model.safetensors is there beside files that are in its place.")
    return found


def _look_at_card(folder: Path) -> list[str]:
    try:
        data = ModelCard.load(folder / "README.md").data
    except Exception as error:
        return [f"README.md has metadata that cannot be read: {' '.join(str(error).split())}."]
    found = [
        f"README.md has no {name} in its metadata."
        for name in ("license", "library_name", "pipeline_tag")
        if not data.get(name)
    ]
    known = {(split, name): value for split, name, value in measured(_read(folder / "results.json"))}
    for result in data.eval_results or []:
        if known.get((result.dataset_split, result.metric_type)) != result.metric_value:
            found.append(
                f"README.md says {result.dataset_split} {result.metric_type} {result.metric_value}, which "
                f"results.json does not."
            )
    text = (folder / "README.md").read_text(encoding="utf-8")
    for split, name, shown in re.findall(r"^\| (validation|test) \| (\w+) \| ([^|]*) \|", text, flags=re.MULTILINE):
        value = known.get((split, name))
        if value is None or shown != f"{value:.4g}":
            found.append(f"README.md shows {split} {name} {shown} in its table, which results.json does not.")
    return found


def _read(path: Path) -> dict:
    """A JSON object; empty where there is none, of which something else complains."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def run_trials(folders: list[Path], checkpoints: list[str], with_package: bool, work: Path) -> list[dict]:
    """Have a new process load the folders; returns a line for each thing it did."""
    described = []
    for number, (folder, checkpoint) in enumerate(zip(folders, checkpoints)):
        kind = _read(folder / "config.json")["architectures"][0]
        names = {name for name, of_one in auto_map().items() if of_one.endswith(f".{kind}")}
        described.append(
            {
                "number": number,
                "path": str(folder),
                "checkpoint": checkpoint,
                "auto_class": names.pop(),
                "auto_map": auto_map(),
                "pipeline": KINDS[kind][0],
            }
        )
    report = work / "report.json"
    report.unlink(missing_ok=True)
    forbidden = [] if with_package else [*PACKAGES, "hub_upload", "baselines"]
    task = {"folders": described, "forbidden": forbidden, "report": str(report)}
    (work / "task.json").write_text(json.dumps(task))
    environment = {name: value for name, value in os.environ.items() if not HIDDEN.match(name)}
    # Empty caches, no accelerator: what is compared bit for bit is computed in one way.
    environment |= {"HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if with_package:
        source = str(Path(modeling_gma.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH")]))
    command = [sys.executable, str(Path(__file__).with_name("trial.py")), str(work / "task.json")]
    done = subprocess.run(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if not report.is_file():
        raise SystemExit(f"The process that loads the folders ended without a report:\n{done.stderr[-2000:]}")
    return json.loads(report.read_text())


def check(folders: list[Path | str], checkpoint: str | None = None) -> bool:
    """Check folders, say what was found, and note in their records those that passed. Whether all did."""
    folders = [Path(folder).expanduser().resolve() for folder in folders]
    failed, before = {}, {}

    def fail(folder: Path, said: str, how: str = "") -> None:
        print(f"{folder.name}: {how}FAILED: {said}")
        failed.setdefault(folder, said)

    for folder in folders:
        record = read_record(folder)
        if record.pop("checked", None) or record.pop("failed", None):
            write_record(folder, record)
        before[folder] = digests(folder)
        problems = look(folder)
        checkpoint_of = checkpoint or record.get("checkpoint", "")
        if not problems and not Path(checkpoint_of, "config.json").is_file():
            problems = [f"The checkpoint it was made from is not in {checkpoint_of}: say --checkpoint."]
        for problem in problems:
            fail(folder, problem)
    # Code that is not ours is not run.
    sound = [folder for folder in folders if folder not in failed]
    if sound:
        checkpoints = [checkpoint or read_record(folder)["checkpoint"] for folder in sound]
        with tempfile.TemporaryDirectory() as work:
            for with_package in (True, False):
                how = "with the package" if with_package else "without the package"
                for line in run_trials(sound, checkpoints, with_package, Path(work)):
                    folder = Path(line["folder"])
                    what = f"{how}, {line['check'].replace('_', ' ')}: "
                    if line["passed"]:
                        print(f"{folder.name}: {what}{line['said']}")
                    else:
                        fail(folder, line["said"], what)
    for folder in sound:
        if digests(folder) != before[folder]:
            fail(folder, "its files changed while they were checked.")
        if folder not in failed:
            write_record(folder, read_record(folder) | {"checked": before[folder]})
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            print(
                f"{folder.name}: passed; {len(before[folder])} files, {size / 1e6:,.1f} MB, of which weights "
                f"{weights / 1e6:,.1f} MB. Next: python -m hub_upload.push {os.path.relpath(folder)} owner/name"
            )
    for folder, said in failed.items():
        record = read_record(folder)
        if "exported" in record:
            write_record(folder, record | {"failed": said})
            print(
                f"{folder.name}: not passed. Mend README.md by hand; for anything else export again: python -m "
                f"hub_upload.export {os.path.relpath(record['checkpoint'])} {os.path.relpath(folder)} --overwrite"
            )
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hub_upload.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", metavar="OUT", nargs="+", help="Folder that hub_upload.export made.")
    parser.add_argument("--checkpoint", help="Where the checkpoint is now, if it was moved.")
    arguments = parser.parse_args()
    if arguments.checkpoint and len(arguments.folders) > 1:
        parser.error(f"--checkpoint goes with one OUT, got {len(arguments.folders)}.")
    if not check(arguments.folders, arguments.checkpoint):
        sys.exit(1)


if __name__ == "__main__":
    main()
