"""Text with a label for each token: by surface form, by a function, or from a column of the data."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, List, Value

from modeling_gma.categories import numbered, token_categories

from .wikitext import Blocks, load_splits, load_text, tokenize


# Labels of tokens that stand for no word of the data, such as line breaks, and for the end of text.
NO_WORD, END = "none", "eos"


class LabelledText:
    """The first sequences of a text: ids, labels and whether each token counts.

    Args:
        tokens: rows of input_ids, and of labels where `label` is None.
        length, sequences: tokens in a sequence, and how many to take at most.
        names: what labels stand for; where `label` is a function that names them, found out here.
        label: (V,) labels of a vocabulary, or a function of the texts of a sequence's tokens that gives their names.
        leave_out: text whose tokens do not count.
    """

    def __init__(
        self,
        tokens: Dataset,
        tokenizer,
        length: int,
        sequences: int,
        names: list[str],
        label: torch.Tensor | Callable[[list[str]], list[str]] | None,
        leave_out: str | None = None,
    ):
        self.tokenizer, self.length, self.names, self.label = tokenizer, length, names, label
        self.ids = Blocks(tokens.select_columns("input_ids"), length, tokenizer.eos_token_id)
        if label is None:
            labels = tokens.select_columns("labels").rename_column("labels", "input_ids")
            # Rows of labels begin with that of the end of text; nothing is to be put before it.
            self.labels = Blocks(labels, length, names.index(END))
        size = int(self.ids.starts[-1])
        if size < length:
            raise SystemExit(
                f"The text has {size} tokens, and a sequence {length}: give more text, or --length {size} or less."
            )
        self.count = min(sequences, size // length)
        self.left_out = []
        if leave_out:
            # With a space before it, it is another run of tokens.
            runs = (tokenizer(space + leave_out, add_special_tokens=False)["input_ids"] for space in (" ", ""))
            self.left_out = [np.array(run) for run in runs]
        if callable(label):
            for number in range(self.count):
                self.names = numbered(self._by_function(self._ids(number)), self.names)[1]

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = self._ids(number)
        if self.label is None:
            labels = torch.from_numpy(self.labels._read(*self._span(number)).astype(np.int64))
        elif callable(self.label):
            labels = numbered(self._by_function(ids), self.names)[0]
        else:
            labels = self.label[ids]
        return torch.from_numpy(ids), labels, torch.from_numpy(self._counts(number))

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for first in range(0, self.count, size):
            rows = [self[number] for number in range(first, min(first + size, self.count))]
            yield tuple(torch.stack(column) for column in zip(*rows))

    def _span(self, number: int) -> tuple[int, int]:
        return number * self.length, (number + 1) * self.length

    def _ids(self, number: int) -> np.ndarray:
        return self.ids._read(*self._span(number)).astype(np.int64)

    def _counts(self, number: int) -> np.ndarray:
        """Whether each token of a sequence counts. What is left out may begin before it or end after it."""
        start, stop = self._span(number)
        reach = max((len(run) for run in self.left_out), default=1) - 1
        first, last = max(start - reach, 0), min(stop + reach, int(self.ids.starts[-1]))
        ids = self.ids._read(first, last).astype(np.int64)
        counts = np.ones(last - first, dtype=bool)
        for run in self.left_out:
            if len(run) <= len(ids):
                windows = np.lib.stride_tricks.sliding_window_view(ids, len(run))
                for place in np.flatnonzero((windows == run).all(1)):
                    counts[place : place + len(run)] = False
        return counts[start - first : stop - first]

    def _by_function(self, ids: np.ndarray) -> list[str]:
        texts = [self.tokenizer.decode([number]) for number in ids.tolist()]
        labels = [str(label) for label in self.label(texts)]
        if len(labels) != len(texts):
            raise SystemExit(f"--label_function gave {len(labels)} labels for {len(texts)} tokens.")
        return labels


def load_labelled(arguments, tokenizer, length: int) -> LabelledText:
    """What the flags of `analyze_responsibilities.py` ask for."""
    # Where open files cannot be removed, they are left to the system.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source = {"dataset": arguments.dataset_name, "dataset_config": arguments.dataset_config_name}
        if arguments.text_file == "-":
            path = Path(folder) / "text.txt"
            given = sys.stdin.read()
            if not given.strip():
                raise SystemExit("--text_file -: there is no text on standard input.")
            path.write_text(given, encoding="utf-8")
            # What came this way leaves no copy.
            source |= {"files": {arguments.split: str(path)}, "cache_dir": folder}
        elif arguments.text_file:
            source["files"] = {arguments.split: arguments.text_file}
        if arguments.label_column:
            splits = load_splits(**source)
        else:
            splits = load_text(column=arguments.text_column, **source)
        if arguments.split not in splits:
            raise SystemExit(f"--split {arguments.split!r} is not there; there are {', '.join(splits)}.")
        rows, label = splits[arguments.split], None
        if arguments.label_column:
            tokens, names = words_with_labels(rows, tokenizer, arguments.text_column, arguments.label_column)
        else:
            tokens = tokenize(rows, tokenizer, num_proc=1)
            if arguments.label_function:
                label, names = load_function(arguments.label_function), []
            else:
                label, names = token_categories(tokenizer)
        return LabelledText(tokens, tokenizer, length, arguments.sequences, names, label, arguments.leave_out)


def words_with_labels(rows: Dataset, tokenizer, words: str, labels: str) -> tuple[Dataset, list[str]]:
    """Rows of words and of their labels as input_ids and labels of tokens, an end of text before each row."""
    for flag, column in (("text_column", words), ("label_column", labels)):
        kind = rows.features.get(column)
        if not isinstance(kind, List):
            got = "no such column" if kind is None else f"{column!r} of {kind}"
            raise SystemExit(f"--{flag} must name a column of lists, one entry a word; got {got}.")
    kind = rows.features[labels].feature
    name = kind.int2str if isinstance(kind, ClassLabel) else str
    found = {label for row in rows[labels] for label in row}
    # Numbers by their size, classes in their order, words by the alphabet.
    names = numbered([name(label) for label in sorted(found, key=lambda x: (x is None, x))], [END, NO_WORD])[1]
    tokens = rows.map(
        _spread,
        fn_kwargs={"tokenizer": tokenizer, "words": words, "labels": labels, "names": names, "name": name},
        remove_columns=rows.column_names,
        features=Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))}),
        load_from_cache_file=False,
        desc="tokenizing",
    )
    return tokens, names


def _spread(row: dict, tokenizer, words: str, labels: str, names: list[str], name: Callable) -> dict:
    if len(row[words]) != len(row[labels]):
        raise SystemExit(f"A row has {len(row[words])} words in {words} and {len(row[labels])} labels in {labels}.")
    text, owners = "", []
    for word, label in zip(row[words], row[labels]):
        text += f" {word}"
        owners += [names.index(name(label))] * (len(word) + 1)
    text, owners = text + "\n", [*owners, names.index(NO_WORD)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # A token belongs to the word of its last character.
    of_tokens = [owners[max(end, 1) - 1] for _, end in encoded["offset_mapping"]]
    return {
        "input_ids": [tokenizer.eos_token_id, *encoded["input_ids"]],
        "labels": [names.index(END), *of_tokens],
    }


def load_function(place: str) -> Callable[[list[str]], list[str]]:
    """The function that FILE.py:NAME names."""
    path, separator, name = place.rpartition(":")
    if not separator:
        raise SystemExit(f"--label_function must be FILE.py:NAME, got {place!r}: the name of the function is missing.")
    if not Path(path).expanduser().is_file():
        raise SystemExit(f"--label_function must be FILE.py:NAME, got {place!r}: there is no file {path!r}.")
    spec = importlib.util.spec_from_file_location("labels", Path(path).expanduser())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise SystemExit(f"--label_function {place}: {path} has no function {name!r}.")
    return function
