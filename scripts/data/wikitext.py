"""Text for language models: from the Hub or from local files, tokenised in parallel, as one stream cut into blocks."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2TokenizerFast, PreTrainedTokenizerFast


END_OF_TEXT = "<|endoftext|>"

# Rows among which a title of WikiText would be.
LOOKED_AT = 1000

# A title of WikiText, as in " = Valkyria Chronicles III = ": where a document begins.
TITLE = re.compile(r"^ ?= [^=\s](.*[^=])? = ?\n?$")

# To be raised when `_tokenize` gives something else: it is part of the name that cached tokens have.
VERSION = 1

# Names that the splits of local files go by.
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
BUILDERS = {
    ".txt": "text",
    ".md": "text",
    ".tokens": "text",
    ".raw": "text",
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
}


def load_text(
    dataset: str = "Salesforce/wikitext",
    dataset_config: str | None = "wikitext-103-raw-v1",
    column: str = "text",
    files: dict[str, str] | None = None,
    cache_dir: str | None = None,
) -> DatasetDict:
    """Splits with a column of text, and whether each row begins a document.

    Documents begin at WikiText's titles where there are any, otherwise with every row or, in text files, whose rows
    are lines, with every file.

    `dataset` is the name of a Hub dataset or a local folder with files for each split; `files` names one for each
    split (a path, several, or a pattern) in its place.
    """
    loaded = load_splits(dataset, dataset_config, files, cache_dir)
    for split, rows in loaded.items():
        if column not in rows.column_names:
            there = [name for name in rows.column_names if name != "starts"]
            raise SystemExit(f"--text_column {column!r} is not in the {split} split, which has {there}.")
    if column != "text":
        loaded = loaded.select_columns(column).rename_column(column, "text")
    return DatasetDict({split: _with_starts(rows) for split, rows in loaded.items()})


def load_splits(
    dataset: str,
    dataset_config: str | None = None,
    files: dict[str, str] | None = None,
    cache_dir: str | None = None,
) -> DatasetDict:
    """Splits with all their columns; of text files the lines, and whether each is the first of its file."""
    is_path = dataset.startswith((".", "~", os.sep)) or dataset.count("/") > 1
    if not files and is_path and not Path(dataset).expanduser().exists():
        raise SystemExit(f"--dataset_name {dataset}: there is no such folder.")
    if files or Path(dataset).expanduser().exists():
        files = {split: _matching(path) for split, path in files.items()} if files else _files_in(Path(dataset))
        kinds = {Path(name).suffix for names in files.values() for name in names}
        unknown = sorted(kinds - set(BUILDERS))
        builders = {BUILDERS[kind] for kind in kinds & set(BUILDERS)}
        if unknown or len(builders) != 1:
            got = ", ".join(repr(kind) if kind else "one without an ending" for kind in sorted(kinds))
            raise SystemExit(f"Files must all be of one kind of {', '.join(BUILDERS)}; got {got}.")
        (builder,) = builders
        if builder == "text":
            return DatasetDict({split: _lines(names, cache_dir) for split, names in files.items()})
        return load_dataset(builder, data_files=files, cache_dir=cache_dir)
    try:
        return load_dataset(dataset, dataset_config, cache_dir=cache_dir)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        config = f" ({dataset_config})" if dataset_config else ""
        raise SystemExit(
            f"--dataset_name {dataset}: there is no such folder, and the Hub dataset of this name{config} could not "
            f"be loaded: {reason}\nWithout a network, give local data: --dataset_name FOLDER with files named "
            f"train.*, validation.* and test.*, or files by themselves ({', '.join(BUILDERS)}): --train_file and "
            f"--validation_file to train, --text_file to evaluate or analyse."
        ) from error


def _lines(names: list[str], cache_dir: str | None) -> Dataset:
    """The lines of text files, and which are the first of theirs."""
    files = []
    for name in names:
        if not Path(name).stat().st_size:
            continue
        try:
            rows = load_dataset("text", data_files=name, split="train", cache_dir=cache_dir, keep_linebreaks=True)
        except DatasetGenerationError as error:
            raise SystemExit(f"{name} cannot be read as text in UTF-8: {error.__cause__ or error}") from error
        if len(rows):
            files.append(rows.add_column("starts", np.arange(len(rows)) == 0))
    if not files:
        raise SystemExit(f"There is no text in {', '.join(names)}.")
    return concatenate_datasets(files)


def _with_starts(rows: Dataset) -> Dataset:
    if any(text and TITLE.match(text) for text in rows[:LOOKED_AT]["text"]):
        rule = "title"
    else:
        rule = "column" if "starts" in rows.column_names else "row"
    return rows.map(
        _starts,
        batched=True,
        fn_kwargs={"rule": rule},
        remove_columns=[name for name in rows.column_names if name not in ("text", "starts")],
        new_fingerprint=Hasher.hash((rows._fingerprint, rule, TITLE.pattern, VERSION)),
        desc="finding documents",
    )


def _starts(batch: dict, rule: str) -> dict:
    if rule == "column":
        return {"text": batch["text"], "starts": batch["starts"]}
    return {
        "text": batch["text"],
        "starts": [rule == "row" or bool(text and TITLE.match(text)) for text in batch["text"]],
    }


def _matching(pattern: str) -> list[str]:
    path = Path(pattern).expanduser()
    names = sorted(map(str, path.parent.glob(path.name)))
    if not names:
        raise SystemExit(f"There is no file {pattern}.")
    return names


def _files_in(folder: Path) -> dict[str, list[str]]:
    folder = folder.expanduser()
    paths = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.suffix in BUILDERS)
    found = {}
    for split, names in SPLITS.items():
        of_split = [str(path) for path in paths if re.search(rf"(^|[^a-z])({'|'.join(names)})([^a-z]|$)", path.name)]
        if of_split:
            found[split] = of_split
    if "train" not in found and "validation" not in found:
        raise SystemExit(
            f"{folder} has no files named after a split (train.*, validation.* or test.*; {', '.join(BUILDERS)}). "
            f"--train_file and --validation_file take files of any name."
        )
    return found


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer by Hub name or path; a folder with vocab.json and merges.txt alone is a GPT-2 one."""
    folder = Path(name).expanduser()
    try:
        if folder.is_dir() and not any(
            (folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")
        ):
            return GPT2TokenizerFast.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise SystemExit(
            f"The tokenizer {name!r} could not be loaded: {reason}\nWithout a network, --tokenizer_name takes a local "
            f"folder, and --train_tokenizer N trains one of N entries on the training text."
        ) from error


def train_tokenizer(texts, vocab_size: int, show_progress: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on an iterable of texts, with an end of text that is also padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, padding_side="left"
    )


def tokenize(rows: Dataset, tokenizer: PreTrainedTokenizerFast, num_proc: int | None = None) -> Dataset:
    """Rows of token ids, an end of text before each that begins a document. Cached by content."""
    if tokenizer.eos_token_id is None:
        raise SystemExit("The tokenizer has no end-of-text token (`eos_token`), which separates documents.")
    num_proc = min(num_proc or os.cpu_count() or 1, max(len(rows) // 1000, 1))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    entries = Hasher.hash(tokenizer) if backend is None else backend.to_str()
    key = (rows._fingerprint, entries, tokenizer.eos_token_id, VERSION)
    return rows.map(
        _tokenize,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=rows.column_names,
        features=Features({"input_ids": List(Value("int32"))}),
        num_proc=num_proc if num_proc > 1 else None,
        new_fingerprint=Hasher.hash(key),
        desc="tokenizing",
    )


def _tokenize(batch: dict, tokenizer: PreTrainedTokenizerFast) -> dict:
    texts = [text or "" for text in batch["text"]]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return {"input_ids": [[end, *row] if starts else row for starts, row in zip(batch["starts"], ids)]}


class Blocks(torch.utils.data.Dataset):
    """Blocks of `block_size` tokens and the tokens after each: every token of a stream is predicted exactly once.

    The stream is read where the tokenised dataset lies on disk. Its first token has an end of text before it, its last
    one too few for a block: in `train` the last block reaches back to be whole, otherwise the rest of it is -100.
    """

    def __init__(self, tokens: Dataset, block_size: int, end_of_text: int, train: bool = False):
        self.parts = [
            chunk.flatten().to_numpy(zero_copy_only=False) for chunk in tokens.data.column("input_ids").chunks
        ]
        self.parts = [part for part in self.parts if len(part)]
        if self.parts and self.parts[0][0] != end_of_text:
            self.parts.insert(0, np.array([end_of_text], dtype=np.int32))
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)])
        self.block_size, self.end_of_text, self.train = block_size, end_of_text, train
        self.num_targets = max(int(self.starts[-1]) - 1, 0)
        if train and self.num_targets < block_size:
            raise SystemExit(f"--block_size {block_size} is longer than the {self.num_targets} tokens to train on.")
        if not self.num_targets:
            raise SystemExit("The split to evaluate on is empty.")

    def checksum(self) -> int:
        """Of all tokens: whether two streams are the same."""
        value = 0
        for part in self.parts:
            value = zlib.crc32(np.ascontiguousarray(part, dtype=np.int32), value)
        return value

    def __len__(self) -> int:
        return -(-self.num_targets // self.block_size)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.block_size
        if self.train:
            start = min(start, self.num_targets - self.block_size)
        tokens = torch.from_numpy(self._read(start, start + self.block_size + 1).astype(np.int64))
        missing = self.block_size + 1 - len(tokens)
        inputs = torch.nn.functional.pad(tokens[:-1], (0, missing), value=self.end_of_text)
        return {"input_ids": inputs, "labels": torch.nn.functional.pad(tokens[1:], (0, missing), value=-100)}

    def _read(self, start: int, stop: int) -> np.ndarray:
        stop = min(stop, int(self.starts[-1]))
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            offset = int(self.starts[first])
            piece = self.parts[first][start - offset : stop - offset]
            pieces.append(piece)
            start, first = start + len(piece), first + 1
        return np.concatenate(pieces)
