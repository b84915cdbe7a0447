"""Masked pretraining, fine-tuning with `Trainer`, and the comparison on Long Range Arena, on tiny data."""

import json
import subprocess
import sys
from pathlib import Path

import finetune_classifier
import pretrain_masked
import pytest
import torch
from compare_lra import table
from comparison import at_speeds
from safetensors.torch import load_file
from training import train
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, pipeline


SCRIPTS = Path(__file__).parents[2] / "scripts"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}


def run(script, *flags, check=True):
    command = [sys.executable, str(SCRIPTS / script), *map(str, flags)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert not check or result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Files of texts with words that tell the label."""
    folder = tmp_path_factory.mktemp("reviews")
    words = {"good": ["fine", "film", "warm", "plot"], "bad": ["dull", "film", "cold", "plot"]}
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 120), ("validation", 30), ("test", 30)):
        lines = ["text,label"]
        for number in range(count):
            label = ("good", "bad")[number % 2]
            picks = torch.randint(4, (3 + number % 7,), generator=generator).tolist()
            lines.append(f"{words[label][0]} {' '.join(words[label][i] for i in picks)},{label}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def masked(reviews, tmp_path_factory):
    """A masked model pretrained for a few steps, and the task that made it."""
    output = tmp_path_factory.mktemp("masked") / "run"
    arguments = pretrain_masked.Arguments(
        output_dir=str(output),
        dataset_name=str(reviews),
        cache_dir=str(output.parent / "cache"),
        train_tokenizer=270,
        block_size=16,
        max_steps=5,
        per_device_train_batch_size=4,
        **SIZES,
    )
    tasks = []

    def make_task(*given):
        tasks.append(pretrain_masked.MaskedLanguageModelling(*given))
        return tasks[0]

    results = train(make_task, arguments, arguments.make_accelerator())
    return output, tasks[0], results


def test_masked_pretraining(masked):
    output, task, results = masked
    model = AutoModelForMaskedLM.from_pretrained(output)
    assert not model.config.is_causal and model.config.vocab_size == len(task.tokenizer) == 271
    assert results["validation"]["perplexity"] > 1
    again = task.evaluate(model, task.accelerator)
    assert again["loss"] == pytest.approx(results["validation"]["loss"], rel=1e-5)


def test_masks(masked):
    _, task, _ = masked
    tokens = torch.randint(1, 270, (64, 16))
    labels = tokens.clone()
    labels[:, 12:] = -100
    inputs = task.inputs({"input_ids": tokens, "labels": labels})
    chosen = inputs["labels"] != -100
    assert chosen[:, :12].float().mean() == pytest.approx(0.2, abs=0.06) and not chosen[:, 12:].any()
    assert (inputs["labels"][chosen] == tokens[chosen]).all()
    assert (inputs["input_ids"][~chosen] == tokens[~chosen]).all()
    is_mask = inputs["input_ids"][chosen] == task.tokenizer.mask_token_id
    assert is_mask.float().mean() == pytest.approx(0.8, abs=0.15)
    assert (inputs["attention_mask"] == (labels != -100)).all()
    with torch.no_grad():
        first, second = (task.inputs({"input_ids": tokens, "labels": labels})["labels"] for _ in range(2))
    assert (first == second).all()


def test_finetuning_from_a_checkpoint(masked, reviews, tmp_path):
    flags = ["--train_file", reviews / "train.csv", "--validation_file", reviews / "validation.csv"]
    flags += ["--test_file", reviews / "test.csv", "--learning_rate", "2e-2", "--num_train_epochs", "4"]
    flags += ["--model_name_or_path", masked[0], "--output_dir", tmp_path / "out"]
    result = run("finetune_classifier.py", *flags)
    assert "texts: 120 train, 30 validation, 30 test" in result.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["test_accuracy"] > 0.9 and results["start"] == "checkpoint" and len(results["curve"]) >= 1
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 1000
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "checkpoints" not in names and not any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    classify = pipeline("text-classification", model=str(tmp_path / "out"))
    assert [answer["label"] for answer in classify(["fine warm film", "dull cold film"])] == ["good", "bad"]
    refused = run("finetune_classifier.py", *flags, check=False)
    assert refused.returncode and "holds a finished run" in refused.stderr


def test_comparison_of_classifiers(tmp_path):
    runs = []
    for start, seed, accuracy in (("checkpoint", 0, 0.9), ("checkpoint", 1, 0.8), ("from scratch", 0, 0.6)):
        curve = [{"step": i, "epoch": i, "accuracy": accuracy - 0.1 / i, "loss": 1.0} for i in (1, 2)]
        run_ = {"start": start, "seed": seed, "test_accuracy": accuracy, "best_validation_accuracy": accuracy}
        run_ |= {"lora": False, "learning_rate": 1e-3, "epochs_wanted": 3.0, "batch_size": 16, "max_length": 64}
        run_ |= {"examples": {"train": 10}, "trained_parameters": 5, "curve": curve, "epochs": 2.0}
        run_ |= {"train_file": str(tmp_path / "train.csv")}
        folder = tmp_path / f"{start}{seed}"
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(run_))
        runs.append(folder)
    run("compare_classifiers.py", *runs, "--output_dir", tmp_path / "out")
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert lines[2].endswith("| 5 | 2 | 2 | 85.00 +- 7.07 | 85.00 +- 7.07 |") and "pretrained" in lines[2]
    assert lines[3].endswith("| 5 | 2 | 1 | 60.00 | 60.00 |") and "from scratch" in lines[3]
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [of_run["train_file"] for of_run in written] == ["train.csv"] * 3
    refused = run("compare_classifiers.py", tmp_path, "--output_dir", tmp_path / "out", check=False)
    assert refused.returncode and "there is no results.json of one" in refused.stderr
    (tmp_path / "results.json").write_text('{"perplexity": 3.0}')
    refused = run("compare_classifiers.py", tmp_path, "--output_dir", tmp_path / "out", check=False)
    assert refused.returncode and "there is no results.json of one" in refused.stderr


def test_finetuning_goes_on_and_merges_adapters(masked, reviews, tmp_path):
    flags = [
        "--train_file",
        reviews / "train.csv",
        "--model_name_or_path",
        masked[0],
        "--output_dir",
        tmp_path / "out",
    ]
    flags += ["--lora", "true", "--learning_rate", "2e-2", "--early_stopping_patience", "0"]
    # Stopped after the first epoch, as by a kill: its checkpoint is there, and no results.
    half = f"""
import sys, finetune_classifier
from transformers import TrainerCallback

class Stop(TrainerCallback):
    def on_save(self, *_, **__):
        raise SystemExit(3)

finetune_classifier.Trainer = lambda *a, callbacks, **k: Trainer(*a, callbacks=[Stop()], **k)
from transformers import Trainer
sys.argv[1:] = {[str(flag) for flag in flags]!r} + ["--num_train_epochs", "3"]
finetune_classifier.main()
"""
    stopped = subprocess.run([sys.executable, "-c", half], capture_output=True, text=True, cwd=SCRIPTS)
    assert stopped.returncode == 3, stopped.stderr[-3000:]
    refused = run("finetune_classifier.py", *flags, "--num_train_epochs", "3", check=False)
    assert refused.returncode and "--resume_from_checkpoint latest" in refused.stderr
    run("finetune_classifier.py", *flags, "--num_train_epochs", "3", "--resume_from_checkpoint", "latest")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [round(point["epoch"]) for point in results["curve"]] == [1, 2, 3]
    assert results["examples"] == {"train": 108, "validation": 12} and results["test_accuracy"] is None
    # Merged: a plain model, whose projections are no longer those of the checkpoint.
    before, after = (load_file(folder / "model.safetensors") for folder in (masked[0], tmp_path / "out"))
    assert not any("lora" in name for name in after)
    name = "model.layers.0.mixer.q_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def test_finetuning_from_nothing(reviews, tmp_path):
    sizes = [x for name, value in SIZES.items() for x in (f"--{name}", value)]
    flags = ["--train_file", reviews / "train.csv", "--output_dir", tmp_path / "out", "--vocab_size", 280]
    run("finetune_classifier.py", *flags, *sizes, "--num_train_epochs", 1)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "bad", 1: "good"} and not model.config.is_causal
    # Longer than the model has positions.
    assert pipeline("text-classification", model=str(tmp_path / "out"))("fine film " * 2000, truncation=True)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ([], "Give --dataset_name or --train_file"),
        (["--train_file", "x.txt"], "--train_file x.txt must be one of .csv, .json, .jsonl, .parquet"),
        (["--train_file", "x.csv"], "--train_file x.csv: there is no such file"),
        (["--dataset_name", "x", "--from_scratch", "true"], "--from_scratch takes the architecture"),
        (["--dataset_name", "x", "--label_column", "text"], "must be two columns, got 'text' twice"),
        (["--dataset_name", "x", "--learning_rat", "3"], "Is --learning_rate meant?"),
        (["--dataset_name", "x", "--validation_share", "2"], "--validation_share must be between 0 and 1, got 2.0"),
    ],
)
def test_finetuning_refuses(flags, sentence):
    refused = run("finetune_classifier.py", *flags, check=False)
    assert refused.returncode and sentence in refused.stderr


def test_finetuning_refuses_what_is_missing(reviews, tmp_path):
    given = {"output_dir": str(tmp_path), "train_file": str(reviews / "train.csv")}
    splits = finetune_classifier.load_splits(finetune_classifier.Arguments(**given))
    arguments = finetune_classifier.Arguments(**given, model_name_or_path=str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"--model_name_or_path .*nowhere could not be loaded"):
        finetune_classifier.make_model(arguments, splits)
    (tmp_path / "train.csv").write_text("text,label\nfine,good\ndull,\n")
    arguments = finetune_classifier.Arguments(output_dir=str(tmp_path), train_file=str(tmp_path / "train.csv"))
    with pytest.raises(SystemExit, match="1 of the train split's 2 texts have no label"):
        finetune_classifier.load_splits(arguments)


def test_finetuning_refuses_data(reviews, tmp_path):
    flags = ["--train_file", reviews / "train.csv", "--output_dir", tmp_path / "out"]
    refused = run("finetune_classifier.py", *flags, "--label_column", "stars", check=False)
    assert refused.returncode and "--label_column 'stars' is not in the train split" in refused.stderr
    (tmp_path / "other.csv").write_text("text,label\nso so,middling\n")
    refused = run("finetune_classifier.py", *flags, "--test_file", tmp_path / "other.csv", check=False)
    assert refused.returncode and "The label 'middling' is in another split" in refused.stderr


def test_the_texts_are_those_of_the_data_seed(reviews, tmp_path):
    def texts(**seeds):
        arguments = finetune_classifier.Arguments(
            output_dir=str(tmp_path), train_file=str(reviews / "train.csv"), max_train_samples=20, **seeds
        )
        return finetune_classifier.load_splits(arguments)["train"]["text"][:]

    assert texts(seed=3, data_seed=0) == texts(seed=4, data_seed=0) == texts(seed=0)
    assert texts(seed=3) != texts(seed=4)


def test_bfloat16_needs_no_other_flag(reviews, tmp_path):
    given = {"output_dir": str(tmp_path), "train_file": str(reviews / "train.csv")}
    arguments = finetune_classifier.Arguments(bf16=True, **given)
    assert arguments.bf16 and arguments.use_cpu == (not torch.accelerator.is_available())


def test_comparison_on_long_range_arena(tmp_path):
    flags = {"task": "listops", "max_length": 64, "min_length": 4, "train_size": 60, "max_steps": 2, **SIZES}
    config = tmp_path / "listops.yaml"
    config.write_text("".join(f"{name}: {value}\n" for name, value in flags.items()))
    command = [config, "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "out", "--seeds", "0", "1"]
    # Two precisions, of which Accelerate has one at a time.
    gma = "gma:4@mixed_precision=bf16"
    first = run("compare_lra.py", *command, "--systems", "linear").stdout
    assert "run 2 of 2: listops_linear, seed 1" in first
    second = run("compare_lra.py", *command, "--systems", "linear", gma).stdout
    assert f"run 2 of 4: listops_{gma}, seed 0" in second and "run 1" not in second
    runs = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {(run["system"], run["seed"]) for run in runs} == {(s, i) for s in ("linear", gma) for i in (0, 1)}
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert lines == table(runs) and any("Linear Transformer" in line and "40.03 +- 0.70" in line for line in lines)
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 1000
    refused = run("compare_lra.py", *command, "--data_dir", tmp_path, check=False)
    assert refused.returncode and "--data_dir must be TASK=FOLDER" in refused.stderr
    refused = run("compare_lra.py", config, *command, "--systems", "linear", check=False)
    assert refused.returncode and "both of the task listops" in refused.stderr
    run("compare_lra.py", *command, "--systems", "linear", gma, "--speed_rounds", "1")
    speeds = json.loads((tmp_path / "out" / "speeds.json").read_text())["examples_per_second"]
    assert set(speeds) == {"listops_linear", f"listops_{gma}"} and min(speeds.values()) > 0
    assert f"| {speeds['listops_linear']:,.1f} |" in (tmp_path / "out" / "comparison.md").read_text()


def test_speeds_timed_in_turn_take_the_place_of_the_clock(tmp_path):
    runs = [
        {"system": system, "task": "text", "examples_per_second": 1.0, "curve": [{"examples": 6, "seconds": 9.0}]}
        for system in ("sdpa", "mamba")
    ]
    assert at_speeds(runs, "examples", tmp_path) == runs
    (tmp_path / "speeds.json").write_text(json.dumps({"examples_per_second": {"text_sdpa": 3.0}}))
    timed, other = at_speeds(runs, "examples", tmp_path)
    assert timed["examples_per_second"] == 3 and timed["curve"] == [{"examples": 6, "seconds": 2.0}]
    assert other == runs[1]


def test_table_of_two_tasks():
    def one(system, task, seed, accuracy):
        arguments = {"max_length": 256, "num_hidden_layers": 4, "hidden_size": 64}
        sizes = {"train": 10, "validation": 5, "test": 5}
        figures = {
            "majority_class": 0.5,
            "examples": 20,
            "examples_per_second": 3.0,
            "curve": [],
            "peak_memory_bytes": 5e8,
        }
        given = {"system": system, "task": task, "seed": seed, "accuracy": accuracy, "arguments": arguments}
        return given | figures | {"examples_in_split": sizes}

    runs = [one("linear", "listops", 0, 30.0), one("linear", "listops", 1, 32.0), one("linear", "text", 0, 61.0)]
    runs += [one("gma:128", "listops", 0, 40.0), one("gma:128", "text", 0, 60.0)]
    rows = [line.split(" | ") for line in table(runs) if line.startswith(("| GMA", "| Linear"))]
    assert [row[0] for row in rows] == ["| GMA K=128", "| Linear Transformer"]
    assert rows[1][1:5] == ["1", "31.00 +- 1.41", "61.00", "46.00"] and rows[0][4] == "50.00"
    assert rows[0][7:9] == ["0.50 GB", "0.50 GB"]
