"""The quickstart as a person runs it, shortened."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.py"
SHORT = ["--max_steps", "12", "--hidden_size", "32", "--num_hidden_layers", "1", "--num_components", "8"]
SHORT += ["--vocab_size", "400", "--block_size", "32", "--max_new_tokens", "8"]


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_trains_saves_reloads_and_writes(tmp_path):
    folder = tmp_path / "model"
    done = run("--output_dir", str(folder), *SHORT)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text())
    assert results["validation_perplexity_after"] < 0.9 * results["validation_perplexity_before"]
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
    assert list(tmp_path.iterdir()) == [folder]
    assert 'The "for" statement' in done.stdout
    again = run("--output_dir", str(folder), *SHORT)
    assert again.returncode == 0, again.stderr
    repeated = json.loads((folder / "results.json").read_text())
    assert repeated["validation_perplexity_after"] == results["validation_perplexity_after"]


BAD = {
    "somebody's folder": (["--output_dir", "{}"], "somebody else's (checkpoint, thesis.txt); name another folder"),
    "somebody's checkpoint": (
        ["--output_dir", "{}/checkpoint"],
        "(config.json, model.safetensors)",
    ),
    "a file": (["--output_dir", "{}/thesis.txt"], "is a file"),
    "below a file": (["--output_dir", "{}/thesis.txt/model"], "cannot be made"),
    "no steps": (["--output_dir", "{}/model", "--max_steps", "0"], "--max_steps must be at least 1, got 0"),
    "heads that do not divide": (["--output_dir", "{}/model", "--hidden_size", "30"], "`hidden_size` (30)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_get_a_sentence_and_change_nothing(name, tmp_path):
    arguments, message = BAD[name]
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "checkpoint").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "checkpoint" / file).write_text("weeks of training")
    done = run(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "results.json", "thesis.txt"]
    assert (tmp_path / "checkpoint" / "model.safetensors").read_text() == "weeks of training"
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_interrupted_it_leaves_nothing(tmp_path):
    command = [sys.executable, str(SCRIPT), "--output_dir", str(tmp_path / "model"), *SHORT, "--max_steps", "100000"]
    # As at a terminal: what runs these tests in the background may have them ignore the signal.
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for line in process.stdout:
        if "before training" in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "Interrupted; nothing was written" in errors
    assert not list(tmp_path.iterdir())
