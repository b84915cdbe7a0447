"""Turn a GMA checkpoint into a folder that anybody can load from the Hub, without this package.

    python -m hub_upload.export small small_hub          # CHECKPOINT OUT
    python -m hub_upload.check small_hub
    python -m hub_upload.push small_hub owner/name

CHECKPOINT is what a training script or `save_pretrained` wrote: the model, its tokenizer if it has one, results.json
if it was measured, and a folder responsibilities if scripts/analyze_responsibilities.py wrote one there. OUT then
holds safetensors, a config that names the code, that code in one flat folder, the tokenizer, requirements.txt,
results.json, statistics and figures of responsibilities, and the model card (README.md), which may be edited. The same
checkpoint gives the same bytes. OUT appears whole or not at all; what is known of it stands in OUT.record.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from transformers.utils import logging

import configuration_gma
import modeling_gma
from hub_upload.card import ANALYSIS, make_card
from hub_upload.push import refuse_name
from hub_upload.record import digests, read_record, write_record
from modeling_gma import AUTO_CLASSES, GMAConfig, GMAPreTrainedModel


PACKAGES = ("configuration_gma", "modeling_gma")
MODULES = ("configuration_gma", "modeling_gma")  # where loading begins; what they import comes along
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
TOKENIZER_FILES |= {"vocab.json", "merges.txt", "chat_template.jinja"}
ABSOLUTE_PATH = re.compile(
    r"(?<![\w:/.<>~)\]-])(?:/[\w.@+-]+){2,}|\b[A-Za-z]:(?:\\[\w.@+-]+)+|(?<!\w)~(?:/[\w.@+-]+)+"
)
SHARD_SIZE = "5GB"


def export(
    checkpoint: Path | str,
    out: Path | str,
    hub_model_id: str = "OWNER/NAME",
    max_shard_size: str = SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Write the folder `out`, whole, and the record beside it."""
    checkpoint, out = Path(checkpoint).expanduser().resolve(), Path(out).expanduser().resolve()
    refuse_name(hub_model_id)
    if not re.fullmatch(r"\d+(KB|MB|GB)", max_shard_size):
        raise SystemExit(f"--max_shard_size must be a number with KB, MB or GB, such as 5GB, got {max_shard_size!r}.")
    if out == checkpoint or out in checkpoint.parents:
        raise SystemExit(f"OUT {out} is or holds the checkpoint; name another folder.")
    if out.exists() and not overwrite:
        raise SystemExit(f"OUT {out} is there already; name another folder, or say --overwrite.")
    if out.exists() and "exported" not in read_record(out):
        raise SystemExit(f"OUT {out} was not made by this command and is left alone; name another folder.")
    model = load(checkpoint)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise SystemExit(f"OUT {out} cannot be made: {error}") from None
    try:
        build(checkpoint, model, aside, hub_model_id, max_shard_size)
        # Some were written for this user's eyes only.
        for path in (aside, *aside.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        write_record(out, {"checkpoint": str(checkpoint), "exported": digests(aside)})
        _put(aside, out)
    except OSError as error:
        raise SystemExit(f"OUT {out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put(aside: Path, out: Path) -> None:
    """A folder cannot replace another in one step, but what is there is whole at every moment."""
    before = aside.with_name(aside.name + "-before")
    if out.exists():
        os.rename(out, before)
    try:
        os.rename(aside, out)
    except OSError:
        if before.exists():
            os.rename(before, out)
        raise
    shutil.rmtree(before, ignore_errors=True)


def load(checkpoint: Path) -> GMAPreTrainedModel:
    """The model of a checkpoint, which must be whole, safetensors, and of a class that an Auto class loads."""
    if (checkpoint / "adapter_config.json").is_file():
        raise SystemExit(
            f"CHECKPOINT {checkpoint} holds adapters alone: merge them (`merge_and_unload`) and save that."
        )
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"CHECKPOINT {checkpoint} has no config.json to read: {error}") from None
    kinds = {kind.__name__: kind for kind in AUTO_CLASSES.values()}
    named = (config.get("architectures") or [None])[0]
    if config.get("model_type") != GMAConfig.model_type or named not in kinds:
        raise SystemExit(
            f"CHECKPOINT {checkpoint} is a {named} (model_type {config.get('model_type')!r}); what can be exported is "
            f"{', '.join(kinds)} (model_type 'gma')."
        )
    try:
        model, report = kinds[named].from_pretrained(
            checkpoint, dtype="auto", use_safetensors=True, output_loading_info=True
        )
    except Exception as error:
        raise SystemExit(f"CHECKPOINT {checkpoint} cannot be loaded: {' '.join(str(error).split())}") from None
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[what]:
            raise SystemExit(
                f"CHECKPOINT {checkpoint} has {what.replace('_', ' ')}: {', '.join(map(str, report[what]))}."
            )
    return model


def build(checkpoint: Path, model: GMAPreTrainedModel, folder: Path, hub_model_id: str, max_shard_size: str) -> None:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", config | {"auto_map": auto_map()})
    for name, source in flatten().items():
        (folder / name).write_text(source, encoding="utf-8")
    for name in sorted(TOKENIZER_FILES):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    if (folder / "tokenizer_config.json").is_file():
        _clean_tokenizer(checkpoint, folder / "tokenizer_config.json")
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements()), encoding="utf-8")
    for name in ("results.json", f"{ANALYSIS}/statistics.json"):
        if (checkpoint / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            _write_json(folder / name, without_paths(json.loads((checkpoint / name).read_text(encoding="utf-8"))))
    if (folder / ANALYSIS).is_dir():
        for path in sorted((checkpoint / ANALYSIS).glob("*.png")):
            shutil.copyfile(path, folder / ANALYSIS / path.name)
    make_card(folder, model, hub_model_id).save(folder / "README.md")


def auto_map() -> dict[str, str]:
    """Auto class -> module and class, for every class that is registered."""
    found = {"AutoConfig": f"{GMAConfig.__module__.rpartition('.')[2]}.{GMAConfig.__name__}"}
    for auto_class, kind in AUTO_CLASSES.items():
        found[auto_class.__name__] = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    return found


def flatten() -> dict[str, str]:
    """The code that loading needs, file name -> source: modules side by side that import none of our packages."""
    folders = {"configuration_gma": Path(configuration_gma.__file__).parent}
    sources, waiting = {}, list(MODULES)
    while waiting:
        name = waiting.pop()
        path = folders.get(name, Path(modeling_gma.__file__).parent) / f"{name}.py"
        source = path.read_text(encoding="utf-8")
        source = re.sub(
            r"^from configuration_gma import", "from .configuration_gma import", source, flags=re.MULTILINE
        )
        # Examples in docstrings begin with the imports that the package needs, and the Hub does not.
        source = re.sub(rf"^ *>>> (import|from) ({'|'.join(PACKAGES)})\b.*\n", "", source, flags=re.MULTILINE)
        left = package_imports(source)
        if left:
            raise SystemExit(
                f"{path.name} imports {left[0]}, which only `from configuration_gma import ..` can become."
            )
        sources[f"{name}.py"] = source
        needed = re.findall(r"^from \.(\w+) import", source, flags=re.MULTILINE)
        waiting += [other for other in needed if f"{other}.py" not in sources and other not in waiting]
    return dict(sorted(sources.items()))


def package_imports(source: str) -> list[str]:
    """Imports of our packages by name, anywhere in a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in PACKAGES]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] in PACKAGES:
            found.append(node.module)
    return found


def requirements() -> list[str]:
    """What the package needs, without extras."""
    try:
        lines = metadata.requires("modeling-gma") or []
    except metadata.PackageNotFoundError:
        raise SystemExit("The package modeling-gma is not installed: `pip install .` in its folder.") from None
    return [line for line in lines if "extra ==" not in line]


def without_paths(value):
    """The same JSON with every absolute path cut to its last part: folders of this machine are nobody's business."""
    if isinstance(value, dict):
        return {without_paths(name): without_paths(of_one) for name, of_one in value.items()}
    if isinstance(value, list):
        return [without_paths(of_one) for of_one in value]
    if isinstance(value, str):
        return ABSOLUTE_PATH.sub(lambda path: re.split(r"[\\/]", path[0])[-1], value)
    return value


def _clean_tokenizer(checkpoint: Path, path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("auto_map"):
        raise SystemExit(
            f"CHECKPOINT {checkpoint} has a tokenizer with code of its own (auto_map), which is not exported."
        )
    # Where it was loaded from.
    for name in ("name_or_path", "tokenizer_file", "vocab_file", "merges_file"):
        config.pop(name, None)
    _write_json(path, without_paths(config))


def _write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hub_upload.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="Folder with the model to export.")
    parser.add_argument("out", metavar="OUT", help="Folder to make.")
    parser.add_argument(
        "--hub_model_id",
        default="OWNER/NAME",
        help="What the card calls the model in its code (default: %(default)s).",
    )
    parser.add_argument(
        "--max_shard_size", default=SHARD_SIZE, help="Weights above this are cut into files (default: %(default)s)."
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace OUT, if this command made it.")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    export(**vars(arguments))
    out = Path(arguments.out)
    print(f"{out}: {', '.join(digests(out))}. Next: python -m hub_upload.check {out}")


if __name__ == "__main__":
    main()
