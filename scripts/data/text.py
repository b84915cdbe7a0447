"""Text of Long Range Arena: the bytes of an IMDb review, positive or negative."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, load_dataset

from .lra import FEATURES


NUM_CLASSES = 2
LENGTH = 4000


def load(split: str, folder: str | None = None, length: int = LENGTH, cache_dir: str | None = None) -> Dataset:
    """A split of input_ids (bytes, cut to `length`) and labels.

    From {train,validation,test}.parquet in `folder`, or `stanfordnlp/imdb` from the Hub; where there is no validation
    split, it is the test split, as in the arena's own code.
    """
    if folder is not None:
        files = {path.stem: str(path) for path in sorted(Path(folder).expanduser().glob("*.parquet"))}
        if "train" not in files:
            raise SystemExit(f"--data_dir {folder} has no train.parquet with columns text and label.")
        splits = load_dataset("parquet", data_files=files, cache_dir=cache_dir)
    else:
        try:
            splits = load_dataset("stanfordnlp/imdb", cache_dir=cache_dir)
        except Exception as error:
            raise SystemExit(
                f"The Hub dataset 'stanfordnlp/imdb' could not be loaded: {' '.join(str(error).split())[:300]}\n"
                f"Without a network: --data_dir FOLDER with train.parquet and test.parquet (columns text and label)."
            ) from error
    rows = splits[split if split in splits else "test"]
    return rows.map(
        _as_bytes,
        batched=True,
        fn_kwargs={"length": length},
        remove_columns=rows.column_names,
        features=FEATURES,
        desc=f"bytes of {split}",
    )


def _as_bytes(batch: dict, length: int) -> dict:
    return {"input_ids": [list(text.encode()[:length]) for text in batch["text"]], "labels": batch["label"]}
