"""Text for language models: from the Hub or from local files, tokenised in parallel, as one stream cut into blocks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, List, Value, load_dataset
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2TokenizerFast, PreTrainedTokenizerFast


END_OF_TEXT = "<|endoftext|>"

# A title of WikiText, as in " = Valkyria Chronicles III = ": where a document begins.
TITLE = re.compile(r"^ ?= [^=\s](.*[^=])? = ?\n?$")

# Names that the splits of local files go by.
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}
BUILDERS = {
    ".txt": "text",
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
) -> tuple[DatasetDict, bool]:
    """Splits with a column of text, and whether documents begin at WikiText's titles (otherwise, at every row).

    `dataset` is the name of a Hub dataset or a local folder with files for each split; `files` names one for each
    split (a path, several, or a pattern) in its place.
    """
    if files or Path(dataset).expanduser().exists():
        files = {split: _matching(path) for split, path in files.items()} if files else _files_in(Path(dataset))
        kinds = {Path(name).suffix for names in files.values() for name in names}
        unknown = sorted(kinds - set(BUILDERS))
        builders = {BUILDERS[kind] for kind in kinds & set(BUILDERS)}
        if unknown or len(builders) != 1:
            raise SystemExit(
                f"Files must all be of one kind of {', '.join(BUILDERS)}; got {', '.join(sorted(kinds))}."
            )
        (builder,) = builders
        options = {"keep_linebreaks": True} if builder == "text" else {}
        loaded = load_dataset(builder, data_files=files, cache_dir=cache_dir, **options)
        by_title = builder == "text"
    else:
        try:
            loaded = load_dataset(dataset, dataset_config, cache_dir=cache_dir)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise SystemExit(
                f"The Hub dataset {dataset!r} ({dataset_config or 'default'}) could not be loaded: {reason}\n"
                f"Without a network, give local data: --dataset_name FOLDER with files named train.*, validation.* "
                f"and test.*, or --train_file and --validation_file ({', '.join(BUILDERS)})."
            ) from error
        by_title = "wikitext" in dataset.lower()
    for split, rows in loaded.items():
        if column not in rows.column_names:
            raise SystemExit(f"--text_column {column!r} is not in the {split} split, which has {rows.column_names}.")
    loaded = loaded.select_columns(column)
    return loaded if column == "text" else loaded.rename_column(column, "text"), by_title


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


def tokenize(
    rows: Dataset, tokenizer: PreTrainedTokenizerFast, by_title: bool, num_proc: int | None = None
) -> Dataset:
    """Rows of token ids, an end of text before each that begins a document. Cached by content."""
    if tokenizer.eos_token_id is None:
        raise SystemExit("The tokenizer has no end-of-text token (`eos_token`), which separates documents.")
    num_proc = min(num_proc or os.cpu_count() or 1, max(len(rows) // 1000, 1))
    key = (rows._fingerprint, tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, by_title)
    return rows.map(
        _tokenize,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "by_title": by_title},
        remove_columns=rows.column_names,
        features=Features({"input_ids": List(Value("int32"))}),
        num_proc=num_proc if num_proc > 1 else None,
        new_fingerprint=Hasher.hash(key),
        desc="tokenizing",
    )


def _tokenize(batch: dict, tokenizer: PreTrainedTokenizerFast, by_title: bool) -> dict:
    texts = [text or "" for text in batch["text"]]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return {"input_ids": [[end, *row] if not by_title or TITLE.match(text) else row for text, row in zip(texts, ids)]}


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
