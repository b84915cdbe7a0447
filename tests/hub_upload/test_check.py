import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hub_upload.check import SECRET, check, look, run_trials
from hub_upload.export import ABSOLUTE_PATH, export, without_paths
from hub_upload.record import digests, read_record, write_record


def edit_json(path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def renewed(folder) -> list[str]:
    """What is wrong with a folder apart from bytes that changed: as if it had been exported so."""
    write_record(folder, read_record(folder) | {"exported": digests(folder)})
    return look(folder)


# GMA_PYTHONS: other interpreters, such as one with the oldest transformers, where what is exported here has to pass.
@pytest.mark.parametrize(
    "python", [sys.executable, *filter(None, os.environ.get("GMA_PYTHONS", "").split(os.pathsep))]
)
def test_each_kind_passes(python, exported, run):
    """Export -> check of every kind of checkpoint, by the command, in processes of its own."""
    # A launcher's variables are not to make the processes wait for others.
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    done = run("-m", "hub_upload.check", *exported.values(), program=python, **launched)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, folder in exported.items():
        assert f"{name}: passed" in done.stdout
        assert read_record(folder)["checked"] == digests(folder)
        for how in ("with the package", "without the package"):
            assert f"{name}: {how}, logits" in done.stdout
            assert (f"{name}: {how}, train: one step" in done.stdout) == (name != "encoder")
    assert "without the package, config: GMAConfig of transformers_modules" in done.stdout
    assert "causal: without the package, pipeline: text-generation: 'The text" in done.stdout
    assert "MB" in done.stdout


def changed_byte(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


TAMPERED = {
    "model.safetensors is not as it was exported": changed_byte,
    "extra.txt is not on the list": lambda folder: (folder / "extra.txt").write_text("x"),
    "weights.bin may be a pickle": lambda folder: (folder / "weights.bin").write_bytes(b"\x80\x04"),
    "config.json is a link": lambda folder: (
        os.rename(folder / "config.json", folder.with_name("config.json")),
        (folder / "config.json").symlink_to(folder.with_name("config.json")),
    ),
    "extra is a folder": lambda folder: (folder / "extra").mkdir(),
    "pipe.json is no ordinary file": lambda folder: os.mkfifo(folder / "pipe.json"),
    "mixture.py is missing": lambda folder: (folder / "mixture.py").unlink(),
    "attention.py is not this package's code": lambda folder: (folder / "attention.py").write_text(
        (folder / "attention.py").read_text() + "\nprint(1)\n"
    ),
    "AutoModelForCausalLM is other/repo--modeling_gma.GMAForCausalLM": lambda folder: edit_json(
        folder / "config.json", auto_map={"AutoModelForCausalLM": "other/repo--modeling_gma.GMAForCausalLM"}
    ),
    "AutoTokenizer": lambda folder: edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B"]}),
    "results.json holds an absolute path: /home/somebody/texts": lambda folder: (folder / "results.json").write_text(
        '{"data": "/home/somebody/texts"}'
    ),
    "README.md holds what looks like a token (hf_abc..)": lambda folder: (folder / "README.md").write_text(
        (folder / "README.md").read_text() + "hf_abc" + "d" * 31
    ),
    "README.md says test accuracy 0.99, which results.json does not": lambda folder: (folder / "README.md").write_text(
        (folder / "README.md")
        .read_text()
        .replace(
            "pipeline_tag:",
            "model-index:\n- name: x\n  results:\n  - task:\n      type: a\n    dataset:\n      type: b\n"
            "      name: b\n      split: test\n    metrics:\n    - type: accuracy\n      value: 0.99\npipeline_tag:",
        )
    ),
    "in its table, which results.json does not": lambda folder: (folder / "README.md").write_text(
        (folder / "README.md").read_text() + "\n| validation | perplexity | 1.5 | 41.72 |\n"
    ),
    "README.md has no license": lambda folder: (folder / "README.md").write_text("# A model\n"),
    "requirements.txt is not": lambda folder: (folder / "requirements.txt").write_text("evil\n"),
}


@pytest.mark.parametrize("said", TAMPERED)
def test_tampering_is_named(said, copy):
    folder = copy("causal")
    assert look(folder) == []
    TAMPERED[said](folder)
    problems = look(folder)
    assert any(said in problem for problem in problems), problems
    changes_only = "is not as it was exported" in said
    # Not only because bytes changed: the same in a folder whose record was forged.
    assert any(said in problem for problem in renewed(folder)) != changes_only


def test_paths_out_of_the_folder_are_named(copy):
    folder = copy("sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = next(iter(index["weight_map"]))
    (folder.parent / "other.safetensors").write_bytes(b"")
    edit_json(
        folder / "model.safetensors.index.json", weight_map=index["weight_map"] | {first: "../other.safetensors"}
    )
    assert any("names ../other.safetensors, which is no file" in problem for problem in renewed(folder))


def header_of(change):
    """A safetensors file with its header changed."""

    def apply(content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        data = content[8 + length :]
        name = next(name for name in header if name != "__metadata__")
        change(header, name)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    return apply


BROKEN = {
    "its header claims": lambda content: struct.pack("<Q", 1 << 60) + content[8:],
    "its header cannot be read": lambda content: content[:8] + b"x" + content[9:],
    "bytes of weights, its header tells of": lambda content: content + b"hidden",
    "which its shape": header_of(lambda header, name: header[name].update(shape=[1])),
    "unknown type": header_of(lambda header, name: header[name].update(dtype="X9")),
    "absolute path": header_of(lambda header, name: header["__metadata__"].update(source="/srv/secret/model")),
}


@pytest.mark.parametrize("said", BROKEN)
def test_broken_safetensors_are_named(said, copy):
    folder = copy("causal")
    path = folder / "model.safetensors"
    path.write_bytes(BROKEN[said](path.read_bytes()))
    assert any(problem.startswith("model.safetensors") and said in problem for problem in renewed(folder))


def test_folder_that_fails_is_not_noted_as_checked(copy, capsys):
    folder = copy("causal")
    write_record(folder, read_record(folder) | {"checked": digests(folder)})
    changed_byte(folder)
    assert check([folder]) is False
    assert "checked" not in read_record(folder)
    assert "causal: FAILED: model.safetensors" in capsys.readouterr().out


def test_record_and_checkpoint_must_be_there(copy, capsys):
    folder = copy("causal")
    write_record(folder, read_record(folder) | {"checkpoint": str(folder / "gone")})
    assert check([folder]) is False
    assert "say --checkpoint" in capsys.readouterr().out
    folder.with_name("causal.record.json").unlink()
    assert check([folder]) is False
    assert "export again" in capsys.readouterr().out


def test_other_weights_are_noticed_without_digests(copy, checkpoints, tmp_path):
    """A folder that is sound by itself, with the weights of another model."""
    folder = copy("causal")
    export(checkpoints["sharded"], tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / "model.safetensors", folder / "model.safetensors")
    assert renewed(folder) == []
    (tmp_path / "work").mkdir()
    lines = run_trials([folder], [str(checkpoints["causal"])], with_package=True, work=tmp_path / "work")
    said = {line["check"]: line for line in lines}
    assert not said["logits"]["passed"] and "weights differ" in said["logits"]["said"]
    assert said["config"]["passed"] and said["round_trip"]["passed"]


def test_network_and_package_are_out_of_reach(tmp_path):
    """The guards of the process that plays a stranger, by themselves."""
    source = (Path(__file__).parents[2] / "hub_upload" / "trial.py").read_text()
    guards = source[: source.index("import torch\n")]
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"forbidden": ["modeling_gma"]}))
    for attempt, said in (
        ("import modeling_gma", "ModuleNotFoundError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "the network is off"),
        ("import socket; socket.socket().connect(('127.0.0.1', 9))", "the network is off"),
    ):
        (tmp_path / "guarded.py").write_text(guards + attempt)
        done = subprocess.run(
            [sys.executable, tmp_path / "guarded.py", task], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode != 0 and said in done.stderr, done.stderr


@pytest.mark.parametrize(
    "text", ["see /home/me/model", '"/tmp/x"', "C:\\Users\\me", "~/models", "path=/mnt/data/x", "(/srv/models)"]
)
def test_absolute_paths_are_seen(text):
    assert ABSOLUTE_PATH.search(text)
    assert not ABSOLUTE_PATH.search(without_paths(text))


@pytest.mark.parametrize(
    "text", ["tokens/s", "https://huggingface.co/a/b", "owner/name/x", "[a](analysis/b.png)", "N / K", "</summary>"]
)
def test_other_slashes_are_not_paths(text):
    assert not ABSOLUTE_PATH.search(text)
    assert not SECRET.search(text)
