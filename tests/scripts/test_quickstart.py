"""The quickstart as a person runs it, shortened."""

import json
import subprocess
import sys
from pathlib import Path


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


def test_refuses_to_replace_what_it_did_not_write(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run("--output_dir", str(tmp_path), *SHORT)
    assert done.returncode != 0 and "name another folder" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_bad_values_get_a_sentence(tmp_path):
    done = run("--output_dir", str(tmp_path / "model"), "--max_steps", "0")
    assert done.returncode != 0 and "--max_steps must be at least 1, got 0" in done.stderr
