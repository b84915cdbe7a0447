"""Associative recall: what is made, what is counted, and that models train and are compared on it."""

import copy
import hashlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from arguments import parse
from compare_recall import best_guess, main, table
from comparison import system_flags
from data import recall
from train_recall import Arguments, AssociativeRecall, count_answers, silenced
from training import train
from transformers import AutoModelForCausalLM

from hub_upload.card import measured
from modeling_gma import GMAConfig, GMAForCausalLM


SMALL = {
    "num_pairs": [1, 3],
    "length": 16,
    "vocab_size": 17,
    "train_size": 40,
    "eval_size": 7,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_components": 4,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 3,
}


def arguments(output, cache, **changed):
    return Arguments(output_dir=str(output), cache_dir=cache, **(SMALL | changed))


def run(given):
    return train(AssociativeRecall, given, given.make_accelerator())


def answers(tokens, num_pairs):
    """Position, value and distance of every query, by a dictionary of the pairs."""
    memory = {tokens[i]: (tokens[i + 1], i) for i in range(0, 2 * num_pairs, 2)}
    found = [
        (position, memory[token][0], position - memory[token][1])
        for position, token in enumerate(tokens)
        if position >= 2 * num_pairs and token != recall.BLANK
    ]
    return found, memory


@pytest.mark.parametrize("num_pairs, length, vocab_size", [(1, 3, 3), (5, 17, 11), (8, 64, 40), (21, 64, 100)])
def test_every_label_is_right(num_pairs, length, vocab_size):
    made = recall.generate(200, num_pairs, length, vocab_size, seed=1, split="train", num_proc=1)
    examples = recall.Recall({num_pairs: made})
    assert len(examples) == 200 and made.shape == (2, 200, length)
    for index in range(200):
        tokens, labels = (examples[index][name].tolist() for name in ("input_ids", "labels"))
        found, memory = answers(tokens, num_pairs)
        assert len(memory) == num_pairs == len({tokens[position] for position, _, _ in found}) == len(found)
        assert {position: value for position, value, _ in found} == {
            position: label for position, label in enumerate(labels) if label != -100
        }
        distances = [0] * length
        for position, _, distance in found:
            distances[position] = distance
        assert examples.distances(index).tolist() == distances
        keys, values = set(memory), {value for value, _ in memory.values()}
        # No answer is given away.
        assert not values & set(tokens[2 * num_pairs :])
        assert max(keys) <= recall.num_keys(vocab_size) < min(values) and max(values) < vocab_size


def test_distances_are_spread_evenly():
    """Over powers of two, as far as there is room; values do not depend on anything."""
    tokens, distances = recall.generate(2000, 4, 256, 512, seed=0, split="train", num_proc=1)
    powers = np.bincount(np.log2(distances[distances > 0]).astype(int), minlength=8)
    # Only the last pair can lie 2 or 3 tokens back, and only three of four up to 7; from 8 on it is any of them.
    assert powers[3:].min() > 0.8 * powers[3:].max() and powers[1] > 0.1 * powers[7]
    assert powers[0] == 0 and powers.sum() == 4 * 2000
    values = np.bincount(tokens[:, 1:8:2].ravel(), minlength=512)[recall.num_keys(512) + 1 :]
    assert values.min() > 0 and values.max() < 3 * values.mean()


def test_a_seed_gives_the_same_bytes_everywhere():
    settings = {"num_pairs": 6, "length": 40, "vocab_size": 64, "seed": 3, "split": "test"}
    one = recall.generate(3 * recall.SHARD - 7, num_proc=1, **settings)
    assert one.dtype == np.dtype("<u2")
    digest = hashlib.sha256(np.ascontiguousarray(one).tobytes()).hexdigest()
    assert digest == "6f50005836328c9b7b97ad9129199a8add91c8b8d20b607171de9139f2bce31b"
    assert np.array_equal(one, recall.generate(3 * recall.SHARD - 7, num_proc=2, **settings))
    assert np.array_equal(one[:, :20], recall.generate(20, num_proc=1, **settings))
    for changed in ({"seed": 4}, {"split": "train"}):
        other = recall.generate(20, num_proc=1, **(settings | changed))
        assert not any(np.array_equal(one[:, i], other[:, i]) for i in range(20))


def test_what_is_made_is_kept(tmp_path, monkeypatch):
    first = recall.load("train", [2, 3], 10, 16, 17, cache_dir=str(tmp_path))
    monkeypatch.setattr(recall, "generate", None)
    second = recall.load("train", [3, 2], 10, 16, 17, cache_dir=str(tmp_path))
    assert first.num_pairs.tolist() == [2] * 10 + [3] * 10 and len(list(tmp_path.iterdir())) == 2
    assert torch.equal(first[13]["input_ids"], second[3]["input_ids"])
    assert first.checksum() != second.checksum()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"num_pairs": [6]}, "--num_pairs must be from 1 to a third of --length, here 5,.* got 6"),
        ({"num_pairs": [0]}, "--num_pairs must be from 1"),
        ({"num_pairs": [2, 2]}, "none of them twice, got .2, 2."),
        ({"vocab_size": 6}, "--vocab_size must be from 7"),
        ({"eval_size": 0}, "--eval_size must be at least 1, got 0"),
        ({"forget_gate": True, "mixer": "sdpa"}, "--forget_gate goes with --mixer gma"),
    ],
)
def test_bad_flags(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        Arguments(output_dir="x", **(SMALL | flags))


class KnowsNear(torch.nn.Module):
    """Answers right up to a distance in tokens, by a dictionary, and otherwise with a blank."""

    def __init__(self, distance):
        super().__init__()
        self.distance = distance

    def forward(self, input_ids, **_):
        logits = torch.zeros(*input_ids.shape, 17)
        logits[..., recall.BLANK] = 1.0
        for row, tokens in enumerate(input_ids.tolist()):
            for position, value, distance in answers(tokens, num_pairs=sum(token > 8 for token in tokens))[0]:
                if distance <= self.distance:
                    logits[row, position, value] = 9.0
        return type("Output", (), {"logits": logits})


def test_answers_are_counted_by_pairs_and_distance(tmp_path, cache):
    given = arguments(tmp_path, cache, num_pairs=[4, 1], eval_size=50)
    accelerator = given.make_accelerator()
    task = AssociativeRecall(given, accelerator)
    test = task.test(KnowsNear(7), accelerator)
    right, queries = {4: 0, 1: 0}, {4: 0, 1: 0}
    for index in range(100):
        number = 4 if index < 50 else 1
        for _, _, distance in answers(task.examples_to_test[index]["input_ids"].tolist(), number)[0]:
            queries[number] += 1
            right[number] += distance <= 7
    assert queries == {4: 200, 1: 50}
    assert [of["pairs"] for of in test["by_pairs"]] == [4, 1]
    for of in test["by_pairs"]:
        assert of["queries"] == queries[of["pairs"]] and 0 < of["accuracy"] < 1
        assert of["accuracy"] == right[of["pairs"]] / queries[of["pairs"]]
        assert sum(part["queries"] for part in of["by_distance"]) == of["queries"]
    assert test["accuracy"] == sum(right.values()) / 250 and test["queries"] == 250
    assert [(of["from"], of["to"], of["accuracy"]) for of in test["by_distance"]] == [
        (2, 3, 1.0),
        (4, 7, 1.0),
        (8, 15, 0.0),
    ]
    # Numbers alone go into a card's table.
    names = [name for _, name, _ in measured({"test": test})]
    assert names == ["accuracy", "loss", "queries"]


def test_a_model_learns_to_recall(tmp_path, cache):
    """One of two pairs would be a matter of chance; of one, the value that stands there is to be said again."""
    given = arguments(
        tmp_path,
        cache,
        num_pairs=[1],
        length=8,
        train_size=500,
        eval_size=50,
        hidden_size=32,
        max_steps=150,
        learning_rate=1e-2,
        weight_decay=0.0,
        per_device_train_batch_size=32,
        forget_gate=True,
        position_embedding_type="none",
    )
    results = run(given)
    assert results["test"]["accuracy"] > 0.9
    assert results["test"]["by_pairs"][0]["accuracy"] == results["test"]["accuracy"] and results["mixture"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.forget_gate and model.config.vocab_size == 17 and model.config.max_position_embeddings == 8


def test_systems_with_local_heads(tmp_path, cache):
    flags = [*system_flags("gma:4:hybrid@sliding_window=3"), "--output_dir", str(tmp_path), "--cache_dir", cache]
    flags += [part for name, value in SMALL.items() if name != "num_pairs" for part in (f"--{name}", str(value))]
    given = parse(Arguments, "", [*flags, "--num_pairs", "2", "4"])
    task = AssociativeRecall(given, given.make_accelerator())
    assert task.model.config.layer_types == ["hybrid_sliding"] and task.model.config.sliding_window == 3
    assert [of["pairs"] for of in task.test(task.model.eval(), task.accelerator)["by_pairs"]] == [2, 4]


def test_goes_on_like_language_models(tmp_path, cache):
    """The loop is the same; the task's own are data and counts."""
    both = {"mixer": "mamba", "max_steps": 4, "checkpointing_steps": 2, "eval_steps": 4}
    whole = run(arguments(tmp_path / "whole", cache, **both))
    run(arguments(tmp_path / "parts", cache, **both))
    folder = tmp_path / "parts"
    for path in (folder / "checkpoints" / "step_00000004").iterdir():
        path.unlink()
    (folder / "checkpoints" / "step_00000004").rmdir()
    (folder / "results.json").unlink()
    again = run(arguments(folder, cache, resume_from_checkpoint="latest", **both))
    assert again["test"] == whole["test"] and again["test"]["queries"] == 7 * (1 + 3)
    assert whole["tokens"] == 4 * 4 * 16


def test_processes_share_every_query_once(tmp_path, cache):
    """Seven examples in two processes: the second has one of them again, which is not counted."""
    given = arguments(tmp_path, cache, num_pairs=[4, 1], eval_size=7)
    task = AssociativeRecall(given, given.make_accelerator())
    whole = count_answers(task, KnowsNear(7), task.validation, task.accelerator)

    def share(rank, world):
        others = SimpleNamespace(process_index=rank, num_processes=world, device="cpu", reduce=lambda x, _: x)
        return count_answers(task, KnowsNear(7), task.validation, others)

    for world in (2, 3, 5):
        shares = [share(rank, world) for rank in range(world)]
        torch.testing.assert_close(sum(shares), whole)
        assert whole[..., 0].sum() == 35 and all(of[..., 0].sum() > 0 for of in shares)


def test_comparison_goes_on_where_it_was(tmp_path, cache, monkeypatch, capfd):
    config = tmp_path / "tiny.yaml"
    config.write_text("".join(f"{name}: {value}\n" for name, value in SMALL.items()))
    output = tmp_path / "out"

    def compare(*flags):
        given = [str(config), "--output_dir", str(output), "--cache_dir", cache, "--seeds", "0", *flags]
        monkeypatch.setattr(sys, "argv", ["compare_recall.py", *given])
        try:
            main()
        except SystemExit as stop:
            return f"{stop} {capfd.readouterr().err}"
        return capfd.readouterr().out

    assert "run 1 of 1: pairs2_linear, seed 0" in compare("--systems", "linear", "--num_pairs", "2")
    before = (output / "pairs2_linear_seed0" / "results.json").stat().st_mtime_ns
    second = compare("--systems", "linear", "gma:4:forget", "--num_pairs", "2")
    assert "run 2 of 2: pairs2_gma:4:forget, seed 0" in second and "run 1" not in second
    assert (output / "pairs2_linear_seed0" / "results.json").stat().st_mtime_ns == before
    other = compare("--systems", "linear", "--num_pairs", "2", "--learning_rate", "1e-5")
    assert "was made with --learning_rate" in other
    assert "--num_pairs must be from 1" in compare("--systems", "linear", "--num_pairs", "6")
    runs = json.loads((output / "comparison.json").read_text())
    assert [run["system"] for run in runs] == ["linear", "gma:4:forget"]
    assert all([of["pairs"] for of in run["test"]["by_pairs"]] == [2] for run in runs)
    lines = (output / "comparison.md").read_text().splitlines()
    assert lines == table(runs) and any("GMA K=4, forget gate" in line for line in lines)
    (output / "recall.png").unlink()
    assert "GMA K=4, forget gate" in compare("--report_only")
    assert (output / "recall.png").stat().st_size > 1000


def test_the_table():
    """One row a system, best first: mean and spread over seeds, for each number of pairs and each distance."""

    def made(system, seed, *accuracies):
        by_pairs = []
        for pairs, near, far in accuracies:
            parts = [{"from": 2, "to": 3, "queries": 10, "accuracy": near}]
            parts.append({"from": 4, "to": 7, "queries": 30, "accuracy": far})
            of_pairs = {"pairs": pairs, "queries": 40, "accuracy": (near + 3 * far) / 4, "by_distance": parts}
            by_pairs.append(of_pairs)
        return {
            "system": system,
            "seed": seed,
            "parameters": 1234,
            "tokens": 5678,
            "test": {"by_pairs": by_pairs},
            "arguments": {"length": 8, "vocab_size": 17, "max_steps": 2, "num_hidden_layers": 1, "hidden_size": 16},
        }

    runs = [made("linear", 0, (1, 0.5, 0.1)), made("linear", 0, (2, 0.3, 0.1))]
    runs += [made("gma:8", seed, (1, 0.9 + seed / 10, 0.5), (2, 0.7, 0.5)) for seed in (0, 1)]
    lines = table(runs)
    assert lines[2] == "| mixer | parameters | seeds | 1 pairs | 2 pairs |"
    assert lines[4:6] == [
        "| GMA K=8 | 1,234 | 2 | 61.25 +- 1.77 | 55.00 +- 0.00 |",
        "| Linear Transformer | 1,234 | 1 | 20.00 | 15.00 |",
    ]
    assert lines[7] == "| mixer | 2 to 3 | 4 to 7 |"
    assert lines[9:] == ["| GMA K=8 | 82.50 +- 3.54 | 50.00 +- 0.00 |", "| Linear Transformer | 40.00 | 10.00 |"]


def test_the_best_guess_is_the_value_seen_most_often():
    assert best_guess(1, 9) == 100
    # Four values: two pairs have the same one in a quarter of the examples.
    assert best_guess(2, 9) == pytest.approx(100 * (1 / 4 + 3 / 4 / 2), abs=1)


def test_heads_of_one_kind_are_silenced():
    """With zeros in their part of the output projection heads bring nothing either."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "num_components": 8}
    types = ["hybrid_sliding", "linear_attention"]
    config = GMAConfig(vocab_size=30, **sizes, layer_types=types, num_local_heads=1, sliding_window=4)
    model, ids = GMAForCausalLM(config).eval(), torch.randint(0, 30, (2, 20))
    whole = model(ids).logits
    for kind, columns in (("local_heads", slice(None, 8)), ("gma_heads", slice(8, None))):
        with silenced(model, kind):
            found = model(ids).logits
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[0].mixer.o_proj.weight[:, columns] = 0.0
        torch.testing.assert_close(found, other(ids).logits)
        assert (found - whole).abs().max() > 1e-4
    assert torch.equal(model(ids).logits, whole)


def test_silenced_models_have_rows_of_their_own(tmp_path, cache):
    given = arguments(tmp_path / "run", cache, layer_types="hybrid_sliding", sliding_window=4)
    found = run(given)["test"]
    assert {"without_gma_heads", "without_local_heads"} < set(found)
    assert found["without_gma_heads"]["loss"] != found["loss"]
    made = {"system": "gma:8:hybrid", "seed": 0, "parameters": 1, "tokens": 2, "test": found, "arguments": vars(given)}
    text = "\n".join(table([made]))
    assert "| GMA K=8, local heads, without gma heads | 1 | 1 |" in text
    assert "| GMA K=8, local heads, without local heads | 1 | 1 |" in text
