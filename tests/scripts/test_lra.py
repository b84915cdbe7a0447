"""Classifiers of Long Range Arena on tiny data: every mixer, pairs, padding, resuming, several processes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from arguments import parse
from checkpoints import checkpoint_steps
from comparison import system_flags
from data import retrieval
from metrics import Accuracy
from train_lra import Arguments, LongRangeArena
from training import train
from transformers import AutoModelForSequenceClassification


SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = {
    "max_length": 64,
    "min_length": 4,
    "train_size": 90,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_components": 4,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 1,
    "hidden_dropout": 0.0,
}


def arguments(output, cache, **changed):
    return Arguments(output_dir=str(output), cache_dir=cache, **(SMALL | changed))


def run(given):
    return train(LongRangeArena, given, given.make_accelerator())


@pytest.mark.parametrize("mixer", ["gma", "sdpa", "sdpa_rope", "linear", "linformer", "performer", "mamba"])
def test_every_mixer(mixer, tmp_path, cache):
    results = run(arguments(tmp_path / "run", cache, mixer=mixer))
    assert results["examples"] == 96 and 0 <= results["test"]["accuracy"] <= 1
    assert results["majority_class"] == max(results["label_histogram"]) / 90
    assert bool(results["mixture"]) == (mixer == "gma")
    assert results["examples_in_split"] == {"train": 90, "validation": 2000, "test": 2000}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert model.config.num_labels == 10 and model.config.vocab_size == 257 and not model.config.is_causal


def test_order_takes_everything_once_and_groups_by_length(tmp_path, cache):
    given = arguments(tmp_path / "run", cache, train_size=1000)
    task = LongRangeArena(given, given.make_accelerator())
    orders = [task.order(epoch) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(1000)) for order in orders) and orders[0] != orders[1]
    assert task.order(0) == orders[0]
    lengths = np.array([task.lengths[i] for i in orders[0]]).reshape(-1, 8)
    shuffled = np.random.default_rng(0).permutation(lengths.reshape(-1)).reshape(-1, 8)
    assert np.ptp(lengths, axis=1).mean() < 0.3 * np.ptp(shuffled, axis=1).mean()
    assert np.corrcoef(lengths.mean(1), np.arange(len(lengths)))[0, 1] < 0.5


def test_systems_with_local_heads(tmp_path, cache):
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    flags += [
        *system_flags("gma:4:hybrid@sliding_window=8"),
        "--cache_dir",
        cache,
        "--output_dir",
        str(tmp_path / "run"),
    ]
    run(parse(Arguments, "", flags))
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").config
    assert (config.layer_types, config.sliding_window, config.num_local_heads) == (["hybrid_sliding"], 8, 1)
    assert config.position_embedding_type == "none" and not config.is_causal


@pytest.mark.parametrize("mixer", ["gma", "gma hybrid", "sdpa", "linear", "linformer", "performer", "mamba"])
def test_logits_do_not_depend_on_the_batch(mixer, tmp_path, cache):
    local = {"layer_types": "hybrid_sliding", "sliding_window": 8} if mixer.endswith("hybrid") else {}
    given = arguments(tmp_path / "run", cache, mixer=mixer.split()[0], **local)
    task = LongRangeArena(given, given.make_accelerator())
    rows = task.splits["test"].with_format("numpy")
    examples = [rows[i] for i in range(32)]
    model = task.model.eval()

    def logits(examples):
        batch = task.collate(examples)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    with torch.no_grad():
        together, alone = logits(examples), torch.cat([logits([example]) for example in examples])
    assert (together - alone).abs().max() < 1e-5


def test_pairs(tmp_path):
    rng = np.random.default_rng(0)
    for name in retrieval.FILES.values():
        lines = []
        for _ in range(24):
            first, second = ("".join(map(chr, rng.integers(97, 123, rng.integers(5, 30)))) for _ in range(2))
            lines.append(f"{rng.integers(2)}.0\ta\tb\t{first}\t{second}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    for mixer in ("gma", "sdpa"):
        given = arguments(
            tmp_path / mixer,
            str(tmp_path / "cache"),
            task="retrieval",
            data_dir=str(tmp_path),
            mixer=mixer,
            train_size=None,
        )
        assert run(given)["examples"] == 24
        assert (tmp_path / mixer / "model.safetensors").exists()


def test_goes_on_like_language_models(tmp_path, cache):
    """The loop is the same; what is the task's own is the order and the number of steps."""
    both = {"num_train_epochs": 3, "checkpointing_steps": 5, "hidden_dropout": 0.1}
    whole = run(arguments(tmp_path / "whole", cache, **both))
    run(arguments(tmp_path / "parts", cache, **both))
    folder = tmp_path / "parts"
    for step in list(checkpoint_steps(folder / "checkpoints"))[1:]:
        for path in (folder / "checkpoints" / f"step_{step:08d}").iterdir():
            path.unlink()
        (folder / "checkpoints" / f"step_{step:08d}").rmdir()
    (folder / "results.json").unlink()
    (step,) = checkpoint_steps(folder / "checkpoints")
    assert 0 < step < 34
    again = run(arguments(folder, cache, resume_from_checkpoint="latest", **both))
    assert again["test"] == whole["test"] and again["last_validation"] == whole["last_validation"]


def test_two_processes_evaluate_every_example_once(tmp_path, cache, run_in_two_processes):
    flags = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    flags += ["--cache_dir", cache, "--output_dir", tmp_path / "two", "--per_device_train_batch_size", "4"]
    run_in_two_processes(SCRIPTS / "train_lra.py", *flags)
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    one = run(arguments(tmp_path / "one", cache))
    assert two["processes"] == 2 and two["examples"] == one["examples"]
    assert two["test"]["accuracy"] == pytest.approx(one["test"]["accuracy"], abs=2e-3)
    assert two["test"]["loss"] == pytest.approx(one["test"]["loss"], abs=1e-4)


def test_accuracy():
    metric = Accuracy()
    metric.add_batch(predictions=[1, 2, 3], references=[1, 0, 3])
    metric.add_batch(predictions=[5], references=[5])
    assert metric.compute() == {"accuracy": 0.75}


@pytest.mark.parametrize(
    "flags, sentence", [({"task": "listop"}, "--task must be one of"), ({"mixer": "x"}, "--mixer")]
)
def test_bad_flags(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        Arguments(output_dir="x", **flags)
