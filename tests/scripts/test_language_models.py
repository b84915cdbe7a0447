"""Perplexity of saved models against brute force, and the comparison of systems."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from arguments import parse
from compare_language_models import at_speed, table
from comparison import label, system_flags
from data.wikitext import Blocks, train_tokenizer
from datasets import Dataset
from evaluate_perplexity import stream_losses, text_perplexities
from train_wikitext import Arguments

from modeling_gma import GMAConfig, GMAForCausalLM


SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}
    return GMAForCausalLM(GMAConfig(vocab_size=300, **sizes, initializer_range=0.5)).eval()


def brute_force(model, stream, window, stride):
    """Each token's loss from the window that counts it, one at a time."""
    losses = []
    with torch.no_grad():
        for position in range(1, len(stream)):
            target = position - 1
            number = 0 if target < window else -(-(target - window + 1) // stride)
            start = number * stride
            logits = model(torch.tensor([stream[start:position]])).logits[0, -1]
            losses.append(-logits.log_softmax(-1)[stream[position]].item())
    return losses


@pytest.mark.parametrize("window, stride", [(8, 8), (8, 3), (8, 1), (64, 64), (64, 10)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_windows(model, window, stride, batch_size):
    stream = torch.randint(1, 300, (45,)).tolist()
    blocks = Blocks(Dataset.from_dict({"input_ids": [[0, *stream]]}), window, 0)
    total, count = stream_losses(model, blocks, window, stride, batch_size)
    expected = brute_force(model, [0, *stream], window, stride)
    assert count == len(expected) == 45
    assert total == pytest.approx(sum(expected), rel=1e-5)


def test_texts_by_themselves(model):
    texts = ["one two three", "four", "five six seven eight nine ten"]
    tokenizer = train_tokenizer(texts, 270)
    found = text_perplexities(model, tokenizer, texts, window=6, batch_size=2)
    for text, value in zip(texts, found):
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]][:6]
        losses = brute_force(model, ids, 64, 64)
        assert value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_the_script(model, tmp_path):
    texts = ["one two three\n"] * 20
    model.save_pretrained(tmp_path / "model")
    train_tokenizer(texts, 270).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("".join(texts))
    command = [
        sys.executable,
        str(SCRIPTS / "evaluate_perplexity.py"),
        "--model_name_or_path",
        str(tmp_path / "model"),
    ]
    command += [
        "--text_file",
        str(tmp_path / "text.txt"),
        "--window",
        "16",
        "--output_file",
        str(tmp_path / "out.json"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]))
    assert results["bits_per_byte"] == pytest.approx(results["loss"] * results["tokens"] / math.log(2) / (14 * 20))
    refused = subprocess.run([*command, "--window", "5000"], capture_output=True, text=True)
    assert refused.returncode and "--window 5000 is more than the model's 1024 positions" in refused.stderr


def test_systems():
    assert system_flags("gma:64:forget@learning_rate=1e-3") == [
        *("--mixer", "gma", "--num_components", "64", "--forget_gate", "true", "--position_embedding_type", "none"),
        *("--learning_rate", "1e-3"),
    ]
    flags = system_flags("gma:64:hybrid@sliding_window=32")
    assert flags[-6:] == [
        *("--layer_types", "hybrid_sliding", "--position_embedding_type", "none", "--sliding_window", "32"),
    ]
    config = parse(Arguments, "", [*flags, "--num_hidden_layers", "3", "--output_dir", "out"]).config()
    assert config.layer_types == ["hybrid_sliding"] * 3 and config.sliding_window == 32
    assert label("gma:64:hybrid") == "GMA K=64, local heads" and label("gma:local") == "GMA, local heads alone"
    assert label("gma:64:forget") == "GMA K=64, forget gate" and label("sdpa") == "SDPA, learned positions"
    for bad in ("gma:x", "gma@rate"):
        with pytest.raises(ValueError, match="--systems"):
            system_flags(bad)


def test_comparison_goes_on_where_it_was(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for split, rows in (("train", 60), ("validation", 10)):
        (corpus / f"{split}.txt").write_text("alpha beta gamma delta .\n" * rows)
    config = tmp_path / "tiny.yaml"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "block_size": 16, "max_steps": 3}
    config.write_text("".join(f"{name}: {value}\n" for name, value in sizes.items()) + "train_tokenizer: 270\n")
    output = tmp_path / "out"
    command = [sys.executable, str(SCRIPTS / "compare_language_models.py"), str(config), "--dataset_name", str(corpus)]
    command += ["--cache_dir", str(tmp_path / "cache"), "--output_dir", str(output), "--seeds", "0"]

    def compare(*systems):
        result = subprocess.run([*command, "--systems", *systems], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    first = compare("linear")
    assert "run 1 of 1: linear, seed 0" in first
    before = (output / "linear_seed0" / "results.json").stat().st_mtime_ns
    second = compare("linear", "gma:4")
    assert "run 2 of 2: gma:4, seed 0" in second and "run 1" not in second
    assert (output / "linear_seed0" / "results.json").stat().st_mtime_ns == before
    for bad, sentence in (
        (["--systems", "linear", "--learning_rate", "1e-5"], "was made with --learning_rate"),
        (["--systems", "gma:8", "linformer"], "bidirectional only"),
        (["--systems", "gma:8@lerning_rate=1"], "lerning_rate"),
    ):
        refused = subprocess.run([*command, *bad], capture_output=True, text=True)
        assert refused.returncode and sentence in refused.stderr and "run 1" not in refused.stdout
    runs = json.loads((output / "comparison.json").read_text())
    assert {run["system"] for run in runs} == {"linear", "gma:4"}
    lines = (output / "comparison.md").read_text().splitlines()
    assert lines == table(runs) and any("Linear Transformer" in line and "44.81 +- 0.11" in line for line in lines)
    assert (output / "perplexity.png").stat().st_size > 1000
    compare("linear", "gma:4", "--speed_rounds", "2")
    speeds = json.loads((output / "speeds.json").read_text())["tokens_per_second"]
    assert set(speeds) == {"linear", "gma:4"} and min(speeds.values()) > 0
    assert any(f"| {speeds['linear']:,.0f} |" in line for line in (output / "comparison.md").read_text().splitlines())
    assert str(tmp_path) not in (output / "comparison.json").read_text()
    assert at_speed({"system": "a", "curve": [{"tokens": 6, "seconds": 9.0}]}, 3)["curve"][0]["seconds"] == 2
