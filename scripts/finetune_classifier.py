"""Fine-tune a GMA model, causal or masked, as a text classifier with `Trainer`.

    python scripts/finetune_classifier.py --model_name_or_path masked --dataset_name stanfordnlp/imdb --output_dir out
    python scripts/finetune_classifier.py --model_name_or_path masked --train_file train.csv --test_file test.csv \\
        --output_dir out --lora true
    python scripts/finetune_classifier.py --train_file train.csv --output_dir out          # from nothing

Data: a Hub dataset, or files (csv, json, jsonl or parquet) with a column of texts and one of labels, which may be
words. Where there is no validation split, a share of the training split is it. All flags of `TrainingArguments` are
flags here; a YAML file may come first. In the output folder: the best model with its tokenizer, for
pipeline("text-classification", model="out"), results.json and accuracy.png. Trainer's checkpoints are in its folder
checkpoints until the end; --resume_from_checkpoint latest goes on from the newest of them. --push_to_hub true
--hub_model_id owner/name exports, checks and pushes the model (private, unless --hub_private_repo false).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from arguments import parse
from data.wikitext import load_tokenizer, train_tokenizer
from datasets import ClassLabel, DatasetDict, Value, load_dataset
from files import PART, write_figure, write_json
from matplotlib import pyplot
from memory import keep_freed_memory
from metrics import Accuracy
from training import versions
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

import modeling_gma  # noqa: F401 (registers GMA with the Auto classes)
from configuration_gma import GMAConfig
from hub_upload.publish import publish, refuse_early


BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class Arguments(TrainingArguments):
    output_dir: str = field(default="classifier", metadata={"help": "Folder for the model and results."})
    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "GMA checkpoint to start from: a folder or a Hub name. Without it, from nothing."},
    )
    from_scratch: bool = field(
        default=False, metadata={"help": "Take the checkpoint's architecture and tokenizer, but not its weights."}
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Hub dataset with texts and labels."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(default=None, metadata={"help": "File to train on: csv, json, jsonl or parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "File to validate on."})
    test_file: str | None = field(default=None, metadata={"help": "File to test on at the end."})
    text_column: str = field(default="text", metadata={"help": "Column of texts."})
    label_column: str = field(default="label", metadata={"help": "Column of labels, numbers or words."})
    validation_share: float = field(
        default=0.1, metadata={"help": "Share of the training split to validate on where there is no such split."}
    )
    max_length: int | None = field(default=None, metadata={"help": "Tokens kept of a text; by default what fits."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use so many examples to train."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use so many to validate, and to test."})
    early_stopping_patience: int = field(
        default=3, metadata={"help": "Evaluations in a row without a better accuracy that end it; 0 for never."}
    )
    lora: bool = field(default=False, metadata={"help": "Train adapters of low rank (PEFT), merged at the end."})
    lora_rank: int = field(default=8, metadata={"help": "Their rank."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, in place of the checkpoint's."})
    vocab_size: int = field(default=8192, metadata={"help": "From nothing: entries of a BPE trained on the texts."})
    hidden_size: int = field(default=128, metadata={"help": "From nothing: width of the model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "From nothing: number of blocks."})
    num_attention_heads: int = field(default=4, metadata={"help": "From nothing: heads in each block."})
    num_components: int = field(default=128, metadata={"help": "From nothing: mixture components in each head."})

    # What Trainer has otherwise.
    learning_rate: float = field(default=5e-4, metadata={"help": "Peak of the schedule."})
    weight_decay: float = field(default=0.01, metadata={"help": "On weight matrices, not on mixtures."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Steps of warmup, or below 1 a share of all."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Texts on a device at a time."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Texts on a device in evaluation."})
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "Order of examples."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate, and save."})
    report_to: str = field(default="none", metadata={"help": "Trackers."})
    save_total_limit: int = field(default=2, metadata={"help": "Checkpoints kept while it runs."})

    def __post_init__(self):
        if (self.dataset_name is None) == (self.train_file is None):
            raise ValueError("Give --dataset_name or --train_file.")
        if self.from_scratch and self.model_name_or_path is None:
            raise ValueError("--from_scratch takes the architecture of --model_name_or_path.")
        if self.text_column == self.label_column:
            raise ValueError(f"--text_column and --label_column must be two columns, got {self.text_column!r} twice.")
        if not 0 < self.validation_share < 1:
            raise ValueError(f"--validation_share must be between 0 and 1, got {self.validation_share}.")
        for name in ("max_length", "max_train_samples", "max_eval_samples", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}.")
        if self.lora and importlib.util.find_spec("peft") is None:
            raise ValueError("--lora needs the package peft, which is not installed.")
        for name in ("train_file", "validation_file", "test_file"):
            path = getattr(self, name)
            if path is not None and Path(path).suffix not in BUILDERS:
                raise ValueError(f"--{name} {path} must be one of {', '.join(BUILDERS)}.")
            if path is not None and not Path(path).expanduser().is_file():
                raise ValueError(f"--{name} {path}: there is no such file.")
        refuse_early(self.push_to_hub, self.hub_model_id)
        if self.hub_token is not None:
            raise ValueError("--hub_token is for all to see among the processes: set HF_TOKEN, or `hf auth login`.")
        # Trainer would push checkpoints of its own.
        self.publishes, self.push_to_hub = self.push_to_hub, False
        self.folder = Path(self.output_dir).expanduser().resolve()
        self.output_dir = str(self.folder / "checkpoints")
        self.save_strategy, self.save_steps = self.eval_strategy, self.eval_steps or self.save_steps
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        if self.bf16 and not torch.accelerator.is_available():
            # What `TrainingArguments` wants to be told.
            self.use_cpu = True
        self.load_best_model_at_end, self.metric_for_best_model = True, "accuracy"
        super().__post_init__()


def load_splits(arguments: Arguments) -> DatasetDict:
    """Splits train, validation and, if there is one, test, with columns text and labels (classes)."""
    if arguments.train_file:
        names = {split: getattr(arguments, f"{split}_file") for split in ("train", "validation", "test")}
        files = {split: str(Path(name).expanduser()) for split, name in names.items() if name}
        kinds = {BUILDERS[Path(name).suffix] for name in files.values()}
        if len(kinds) != 1:
            raise SystemExit(f"The files must be of one kind, got {', '.join(map(str, files.values()))}.")
        splits = load_dataset(kinds.pop(), data_files=files)
    else:
        try:
            splits = load_dataset(arguments.dataset_name, arguments.dataset_config_name)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise SystemExit(
                f"The Hub dataset {arguments.dataset_name!r} could not be loaded: {reason}\n"
                f"Without a network: --train_file and --test_file ({', '.join(BUILDERS)})."
            ) from error
    splits = DatasetDict({name: splits[name] for name in ("train", "validation", "test") if name in splits})
    if "train" not in splits:
        raise SystemExit("The data has no train split.")
    for split, rows in splits.items():
        for flag in ("text_column", "label_column"):
            column = getattr(arguments, flag)
            if column not in rows.column_names:
                raise SystemExit(f"--{flag} {column!r} is not in the {split} split, which has {rows.column_names}.")
        without = sum(label is None for label in rows[arguments.label_column])
        if without:
            raise SystemExit(f"{without:,} of the {split} split's {len(rows):,} texts have no label: leave them out.")
    splits = splits.select_columns([arguments.text_column, arguments.label_column])
    splits = splits.rename_columns({arguments.text_column: "text", arguments.label_column: "labels"})
    splits = _with_classes(splits)
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    if "validation" not in splits:
        parts = splits["train"].train_test_split(arguments.validation_share, seed=seed)
        splits["train"], splits["validation"] = parts["train"], parts["test"]
    for split, most in (
        ("train", arguments.max_train_samples),
        ("validation", arguments.max_eval_samples),
        ("test", arguments.max_eval_samples),
    ):
        if most is not None and split in splits:
            # A share of all of them: files are often sorted by label.
            rows = splits[split].shuffle(seed=seed)
            splits[split] = rows.select(range(min(most, len(rows))))
    return splits


def _with_classes(splits: DatasetDict) -> DatasetDict:
    """Labels as numbers from 0, with names."""
    if isinstance(splits["train"].features["labels"], ClassLabel):
        return splits
    values = sorted({str(value) for value in splits["train"].unique("labels")}, key=lambda x: (len(x), x))
    is_missing = [str(x) for rows in splits.values() for x in rows.unique("labels") if str(x) not in values]
    if is_missing:
        raise SystemExit(f"The label {is_missing[0]!r} is in another split, but not in train, which has {values}.")
    if len(values) < 2:
        raise SystemExit(f"There must be two classes at least, got {values}.")
    return splits.cast_column("labels", Value("string")).cast_column("labels", ClassLabel(names=values))


def make_model(arguments: Arguments, splits: DatasetDict):
    """The model and its tokenizer."""
    names = splits["train"].features["labels"].names
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    source = arguments.model_name_or_path
    if source:
        try:
            config = AutoConfig.from_pretrained(source, **labels)
        except (OSError, ValueError) as error:
            raise _not_loaded(source, error) from error
    if arguments.tokenizer_name or source:
        tokenizer = load_tokenizer(arguments.tokenizer_name or source)
    else:
        texts = (row["text"] for row in splits["train"])
        tokenizer = train_tokenizer(texts, arguments.vocab_size, show_progress=True)
    # A mean over tokens has no side, and a causal model reads the end of the text at its end.
    tokenizer.padding_side = "right"
    set_seed(arguments.seed)
    if source and not arguments.from_scratch:
        try:
            model = AutoModelForSequenceClassification.from_pretrained(source, **labels)
        except (OSError, ValueError) as error:
            raise _not_loaded(source, error) from error
    else:
        if not source:
            config = GMAConfig(
                vocab_size=len(tokenizer),
                hidden_size=arguments.hidden_size,
                num_hidden_layers=arguments.num_hidden_layers,
                num_attention_heads=arguments.num_attention_heads,
                num_components=arguments.num_components,
                max_position_embeddings=arguments.max_length or 512,
                is_causal=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **labels,
            )
        model = AutoModelForSequenceClassification.from_config(config)
    return model, tokenizer


def _not_loaded(source: str, error: Exception) -> SystemExit:
    return SystemExit(f"--model_name_or_path {source} could not be loaded: {' '.join(str(error).split())[:300]}")


def tokenize(splits: DatasetDict, tokenizer, longest: int | None) -> DatasetDict:
    return splits.map(
        lambda batch: tokenizer(
            [text or "" for text in batch["text"]], truncation=longest is not None, max_length=longest
        ),
        batched=True,
        remove_columns="text",
        desc="tokenizing",
    )


def with_adapters(model, rank: int):
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    )
    return get_peft_model(model, config)


def accuracy(predictions) -> dict[str, float]:
    metric = Accuracy()
    metric.add_batch(
        predictions=predictions.predictions.argmax(-1).tolist(), references=predictions.label_ids.tolist()
    )
    return metric.compute()


def finetune(arguments: Arguments) -> dict:
    folder = arguments.folder
    newest = get_last_checkpoint(arguments.output_dir) if os.path.isdir(arguments.output_dir) else None
    resume = arguments.resume_from_checkpoint
    if (folder / "results.json").exists():
        raise SystemExit(f"--output_dir {folder} holds a finished run: name another folder.")
    if newest and not resume:
        raise SystemExit(
            f"--output_dir {folder} holds a run: go on with --resume_from_checkpoint latest, or name another folder."
        )
    splits = load_splits(arguments)
    model, tokenizer = make_model(arguments, splits)
    config = model.config
    most = config.max_position_embeddings if config.position_embedding_type == "learned" else arguments.max_length
    if arguments.max_length and most and arguments.max_length > most:
        raise SystemExit(f"--max_length {arguments.max_length} is more than the model's {most} positions.")
    longest = arguments.max_length or most
    if longest:
        # Whoever truncates later, by a pipeline's truncation=True, does it where training did.
        tokenizer.model_max_length = longest
    splits = tokenize(splits, tokenizer, longest)
    model = with_adapters(model, arguments.lora_rank) if arguments.lora else model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained; "
        f"texts: {', '.join(f'{len(rows):,} {split}' for split, rows in splits.items())}"
    )
    patience = arguments.early_stopping_patience
    trainer = Trainer(
        model,
        arguments,
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(patience)] if patience and arguments.eval_strategy != "no" else [],
    )
    trained_output = trainer.train(resume_from_checkpoint=newest if resume == "latest" else resume)
    test = trainer.predict(splits["test"]).metrics if "test" in splits else {}
    history = [line for line in trainer.state.log_history if "eval_accuracy" in line]
    curve = [
        {"step": line["step"], "epoch": line["epoch"], "accuracy": line["eval_accuracy"], "loss": line["eval_loss"]}
        for line in history
    ]
    results = {
        "test_accuracy": test.get("test_accuracy"),
        "best_validation_accuracy": max((point["accuracy"] for point in curve), default=None),
        "curve": curve,
        "seconds": trained_output.metrics["train_runtime"],
        "trained_parameters": trained,
        "examples": {split: len(rows) for split, rows in splits.items()},
        "start": "from scratch" if arguments.from_scratch or not arguments.model_name_or_path else "checkpoint",
        "base_model": arguments.model_name_or_path,
        "dataset_name": arguments.dataset_name,
        "dataset_config_name": arguments.dataset_config_name,
        "train_file": arguments.train_file,
        "validation_file": arguments.validation_file,
        "test_file": arguments.test_file,
        "lora": arguments.lora,
        "learning_rate": arguments.learning_rate,
        "epochs": trainer.state.epoch,
        "epochs_wanted": arguments.num_train_epochs,
        "batch_size": arguments.train_batch_size,
        "max_length": arguments.max_length or most,
        "seed": arguments.seed,
        "versions": versions(),
    }
    if trainer.is_world_process_zero():
        model = trainer.model.merge_and_unload() if arguments.lora else trainer.accelerator.unwrap_model(trainer.model)
        save(model, tokenizer, results, folder)
        if arguments.publishes:
            publish(folder, arguments.hub_model_id, public=arguments.hub_private_repo is False)
    return results


def save(model, tokenizer, results: dict, folder: Path) -> None:
    """The model, whole or not at all; results.json last, and then no checkpoints."""
    aside = folder / ("model" + PART)
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    for path in aside.iterdir():
        os.replace(path, folder / path.name)
    aside.rmdir()
    plot(results["curve"], folder / "accuracy.png")
    write_json(folder / "results.json", results)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def plot(curve: list[dict], path: Path) -> None:
    pyplot.switch_backend("Agg")
    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axis.plot([point["epoch"] for point in curve], [100 * point["accuracy"] for point in curve], "o-")
    axis.set(xlabel="epochs", ylabel="validation accuracy, %", title="Fine-tuning")
    axis.grid(alpha=0.3)
    write_figure(path, figure)


def main() -> None:
    arguments = parse(Arguments, __doc__)
    keep_freed_memory()
    logging.disable_progress_bar()
    results = finetune(arguments)
    if arguments.process_index == 0:
        split = "test" if results["test_accuracy"] is not None else "best_validation"
        print(f"{split.replace('_', ' ')} accuracy {results[f'{split}_accuracy']:.4f}; model in {arguments.folder}")


if __name__ == "__main__":
    main()
