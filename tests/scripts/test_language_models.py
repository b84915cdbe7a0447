"""Perplexity of saved models against brute force, and the comparison of systems."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from arguments import parse, usable_device
from compare_language_models import table
from comparison import _wait_for, label, system_flags
from data.wikitext import Blocks, train_tokenizer
from datasets import Dataset
from evaluate_perplexity import Arguments as EvaluationArguments
from evaluate_perplexity import by_position, position_losses, position_ranges, stream_losses, text_perplexities
from train_wikitext import Arguments

from baselines import build_twin
from modeling_gma import GMAConfig, GMAForCausalLM


SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}
    return GMAForCausalLM(
        GMAConfig(vocab_size=300, **sizes, initializer_range=0.5, residual_initializer_range=0.5)
    ).eval()


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


@pytest.mark.parametrize("mixer", ["gma", "hybrid", "sdpa_rope", "mamba"])
@pytest.mark.parametrize("piece", [None, 5, 16])
def test_positions(mixer, piece):
    """Each place of a window by itself, whole or in pieces, against tokens predicted one at a time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_components": 4}
    fields = {"position_embedding_type": "none", "forget_gate": mixer == "gma"}
    if mixer == "hybrid":
        mixer, fields = "gma", fields | {"layer_types": ["hybrid_sliding"] * 2, "sliding_window": 4}
    twin = build_twin(
        GMAConfig(vocab_size=50, **sizes, **fields, initializer_range=0.5, residual_initializer_range=0.5), mixer
    ).eval()
    stream = [0, *torch.randint(1, 50, (45,)).tolist()]
    blocks = Blocks(Dataset.from_dict({"input_ids": [stream]}), 16, 0)
    sums, counts = position_losses(twin, blocks, 16, 16, batch_size=2, piece=piece)
    losses = torch.tensor(brute_force(twin, stream, 16, 16), dtype=torch.float64)
    assert counts.tolist() == [3] * 13 + [2] * 3
    expected = torch.stack([losses[place::16].sum() for place in range(16)])
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)
    for of in by_position(sums, counts, "doubling"):
        here = [loss for place, loss in enumerate(losses.tolist()) if of["from"] <= place % 16 <= of["to"]]
        assert of["tokens"] == len(here)
        assert of["perplexity"] == pytest.approx(math.exp(sum(here) / len(here)), rel=1e-4)


def test_ranges_of_positions():
    assert position_ranges(8, "doubling") == [(0, 1), (1, 2), (2, 4), (4, 8)]
    assert position_ranges(9, "doubling")[-2:] == [(4, 8), (8, 9)]
    assert position_ranges(10, "4") == [(0, 2), (2, 5), (5, 7), (7, 10)]
    for kind in ("doubling", "1", "7", "100"):
        covered = [place for start, stop in position_ranges(100, kind) for place in range(start, stop)]
        assert covered == list(range(100))


def test_pieces_hold_few_logits(largest_tensor):
    """Whole, 96 places have 96 x 1000 logits; in pieces of 8 no tensor is as large as a third of that."""
    twin = build_twin(GMAConfig(vocab_size=1000, hidden_size=16, num_hidden_layers=1, num_attention_heads=2), "gma")
    blocks = Blocks(Dataset.from_dict({"input_ids": [[0, *range(96)]]}), 96, 0)
    with largest_tensor:
        position_losses(twin.eval(), blocks, 96, 96, batch_size=1, piece=8)
    assert largest_tensor.numel < 96 * 1000 / 3


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
    more = ["--piece", "5", "--by_position", "4", "--figure_file", str(tmp_path / "positions.png")]
    result = subprocess.run([*command, *more], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    again = json.loads((tmp_path / "out.json").read_text())
    assert again["perplexity"] == pytest.approx(results["perplexity"], rel=1e-5)
    ranges = again["by_position"]
    assert [(of["from"], of["to"]) for of in ranges] == [(0, 3), (4, 7), (8, 11), (12, 15)]
    assert sum(of["tokens"] for of in ranges) == results["tokens"]
    assert sum(of["loss"] * of["tokens"] for of in ranges) == pytest.approx(results["loss"] * results["tokens"])
    assert (tmp_path / "positions.png").stat().st_size > 1000
    refused = subprocess.run([*command, "--window", "5000"], capture_output=True, text=True)
    assert refused.returncode and "--window 5000 is more than the model's 1024 positions" in refused.stderr


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"by_position": "halves"}, "--by_position must be a number of ranges or doubling, got 'halves'"),
        ({"by_position": "0"}, "--by_position must be a number"),
        ({"by_position": "4", "stride": 2}, "--stride has no meaning with --by_position"),
        ({"by_position": "4", "per_text": True}, "--per_text has no meaning with --by_position"),
        ({"figure_file": "x.png"}, "--figure_file goes with --by_position"),
        ({"piece": 0}, "--piece must be at least 1, got 0"),
    ],
)
def test_bad_flags_of_positions(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        EvaluationArguments(model_name_or_path="x", **flags)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_asked_to_stop_asks_its_run(number):
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{program}; time.sleep(60)"], stdout=subprocess.PIPE)
    # It is ready to be asked.
    process.stdout.readline()
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    assert _wait_for(process, is_launched=False) == (7, True)
    assert {name: signal.getsignal(name) for name in before} == before


def test_a_second_interruption_ends_a_run_at_once():
    # Of its own accord: what is started in the background may have come to ignore interruptions.
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    program += "signal.signal(signal.SIGINT, signal.default_int_handler); print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{program}; time.sleep(60)"], stdout=subprocess.PIPE)
    process.stdout.readline()
    for seconds in (0.3, 0.6):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    code, is_asked = _wait_for(process, is_launched=False)
    assert code != 0 and is_asked


def test_one_yaml_for_all_systems(tmp_path):
    command = [sys.executable, str(SCRIPTS / "compare_language_models.py"), "--output_dir", str(tmp_path / "out")]
    configs = [str(SCRIPTS / "configs" / name) for name in ("two_cores.yaml", "gated.yaml")]
    done = subprocess.run([*command, *configs], capture_output=True, text=True)
    assert done.returncode == 2 and "one YAML file" in done.stderr.splitlines()[-1]


def test_flags_that_are_none_are_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(Arguments, "", ["--output_dir", str(tmp_path), "--hiden_size", "3"])
    said = capsys.readouterr().err
    assert "--hiden_size 3: no flag of" in said and "Is --hidden_size meant?" in said


def test_a_device_that_is_not_there_is_told():
    assert usable_device("cpu").type == "cpu"
    with pytest.raises(SystemExit, match="--device nonesuch cannot be used here"):
        usable_device("nonesuch")


def test_a_place_for_results_is_asked_for_first(tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, str(SCRIPTS / "evaluate_perplexity.py"), "--model_name_or_path", "none"]
    command += ["--text_file", "none.txt", "--output_file", str(tmp_path / "file" / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("--output_file") and "cannot be written to" in done.stderr
