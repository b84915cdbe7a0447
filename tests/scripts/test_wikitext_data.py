"""Text from files, tokenised, as blocks in which every token is predicted exactly once."""

import json

import pytest
import torch
from data.wikitext import TITLE, Blocks, load_text, load_tokenizer, tokenize, train_tokenizer
from datasets import Dataset


LINES = [
    " \n",
    " = First = \n",
    " \n",
    " Some words . \n",
    " = = Section = = \n",
    " More . \n",
    " = Second one = \n",
    " End \n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES * 4, 270)


@pytest.fixture
def cached(tmp_path):
    """Datasets cached in a folder of the test."""
    return str(tmp_path / "cache")


def ids_of(blocks):
    return [token for block in blocks for token in block["labels"].tolist() if token != -100]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("block_size", [2, 3, 7, 64])
@pytest.mark.parametrize("lengths", [[5, 0, 1, 9, 30], [70], [1, 1, 1, 61, 8]])
def test_every_token_is_predicted_once(lengths, block_size, train):
    tokens = iter(range(1, 1000))
    rows = [[0, *(next(tokens) for _ in range(length))] for length in lengths]
    dataset = Dataset.from_dict({"input_ids": rows})
    stream = [token for row in rows for token in row]
    if train and len(stream) - 1 < block_size:
        with pytest.raises(SystemExit, match=f"--block_size {block_size} is longer"):
            Blocks(dataset, block_size, 0, train=True)
        return
    blocks = Blocks(dataset, block_size, 0, train=train)
    assert blocks.num_targets == len(stream) - 1
    for block in (blocks[i] for i in range(len(blocks))):
        assert block["input_ids"].shape == block["labels"].shape == (block_size,)
        real = block["labels"] != -100
        assert torch.equal(block["input_ids"][1:][real[:-1]][: real.sum() - 1], block["labels"][real][:-1])
    labels = ids_of(blocks[i] for i in range(len(blocks)))
    if train:
        # The last block reaches back, so that it is whole: nothing is lost, and nothing but its beginning comes twice.
        assert labels[: len(labels) - block_size] == stream[1:][: len(labels) - block_size]
        assert labels[-block_size:] == stream[-block_size:]
        assert all((blocks[i]["labels"] != -100).all() for i in range(len(blocks)))
    else:
        assert labels == stream[1:]


def test_a_stream_without_a_document_start_gets_one():
    blocks = Blocks(Dataset.from_dict({"input_ids": [[5, 6], [7]]}), 4, 0)
    assert blocks[0]["input_ids"].tolist() == [0, 5, 6, 0] and blocks[0]["labels"].tolist() == [5, 6, 7, -100]


def test_blocks_over_many_parts():
    """A table in several pieces, as `datasets` makes of large ones."""
    from datasets import concatenate_datasets

    pieces = [Dataset.from_dict({"input_ids": [[i] * (i % 3 + 1)]}) for i in range(20)]
    blocks = Blocks(concatenate_datasets(pieces), 6, 0)
    expected = [i for i in range(20) for _ in range(i % 3 + 1)]
    assert len(blocks.parts) > 1 and ids_of(blocks[i] for i in range(len(blocks))) == expected[1:]


@pytest.mark.parametrize(
    "line, is_title",
    [
        (" = Valkyria Chronicles III = \n", True),
        ("= A =", True),
        (" = = Gameplay = = \n", False),
        (" = = = Deep = = = \n", False),
        (" a = b = c \n", False),
        ("", False),
        (" \n", False),
    ],
)
def test_titles(line, is_title):
    assert bool(TITLE.match(line)) == is_title


def test_documents_begin_with_an_end_of_text(tokenizer):
    starts = [bool(TITLE.match(line)) for line in LINES]
    end = tokenizer.eos_token_id
    rows = tokenize(Dataset.from_dict({"text": LINES, "starts": starts}), tokenizer)["input_ids"]
    assert [row[:1] == [end] for row in rows] == starts and sum(starts) == 2
    assert "".join(tokenizer.decode([i for i in row if i != end]) for row in rows) == "".join(LINES)


def test_many_processes_give_the_same(tokenizer):
    rows = Dataset.from_dict({"text": [f"row {i} " for i in range(2500)], "starts": [i % 7 == 0 for i in range(2500)]})
    one, two = (tokenize(rows, tokenizer, num_proc)["input_ids"] for num_proc in (1, 2))
    assert list(one) == list(two)


def test_another_tokenizer_is_not_taken_from_the_cache(tokenizer):
    rows = Dataset.from_dict({"text": LINES, "starts": [True] * len(LINES)})
    other = train_tokenizer(["Some words . More ."] * 9, 280)
    one, two = (list(tokenize(rows, which)["input_ids"]) for which in (tokenizer, other))
    assert one != two and two[0] == [other.eos_token_id, *other(LINES[0])["input_ids"]]


def write(folder, kind):
    folder.mkdir()
    texts = {"train": ["one\n", "two\n"], "valid": ["three\n"], "test": ["four\n"]}
    for split, rows in texts.items():
        if kind == "tokens":
            (folder / f"wiki.{split}.tokens").write_text("".join(rows))
        elif kind == "txt":
            (folder / f"{split}.txt").write_text("".join(rows))
        elif kind == "jsonl":
            (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        else:
            Dataset.from_dict({"text": rows, "label": [0] * len(rows)}).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("kind", ["tokens", "txt", "jsonl", "parquet"])
def test_local_folders(kind, tmp_path, cached):
    splits = load_text(str(write(tmp_path / kind, kind)), cache_dir=cached)
    assert {name: list(rows["text"]) for name, rows in splits.items()} == {
        "train": ["one\n", "two\n"],
        "validation": ["three\n"],
        "test": ["four\n"],
    }
    # A text file is a document; elsewhere, a row.
    assert list(splits["train"]["starts"]) == [True, kind not in ("tokens", "txt")]


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_titles_begin_documents_wherever_they_are(kind, tmp_path, cached):
    if kind == "txt":
        (tmp_path / "train.txt").write_text("".join(LINES))
    else:
        Dataset.from_dict({"text": LINES}).to_parquet(tmp_path / "train.parquet")
    rows = load_text(str(tmp_path), cache_dir=cached)["train"]
    assert list(rows["text"]) == LINES and list(rows["starts"]) == [bool(TITLE.match(line)) for line in LINES]


def test_every_file_is_a_document(tmp_path, cached):
    for name in ("train.a.txt", "train.b.txt"):
        (tmp_path / name).write_text("x\ny\n")
    assert list(load_text(str(tmp_path), cache_dir=cached)["train"]["starts"]) == [True, False, True, False]


def test_named_files_and_another_column(tmp_path, cached):
    Dataset.from_dict({"body": ["a", "b"]}).to_parquet(tmp_path / "mine.parquet")
    files = {"train": str(tmp_path / "mine.parquet")}
    splits = load_text(column="body", files=files, cache_dir=cached)
    assert list(splits["train"]["text"]) == ["a", "b"]
    with pytest.raises(SystemExit, match=r"'text' is not in the train split.*body"):
        load_text(files=files, cache_dir=cached)


def test_what_is_not_there_is_said(tmp_path, cached, monkeypatch):
    with pytest.raises(SystemExit, match="there is no such folder"):
        load_text(str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="There is no file"):
        load_text(files={"train": str(tmp_path / "none.txt")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no files named after a split"):
        load_text(str(tmp_path / "empty"))
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.parquet").write_bytes(b"x")
    with pytest.raises(SystemExit, match="of one kind"):
        load_text(files={"train": str(tmp_path / "a.txt"), "validation": str(tmp_path / "b.parquet")})


def test_without_a_network_the_error_says_what_to_do(monkeypatch, cached):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("data.wikitext.load_dataset", offline)
    with pytest.raises(
        SystemExit,
        match=r"Salesforce/wikitext: there is no such folder(.|\n)*\(wikitext-103-raw-v1\)(.|\n)*--train_file",
    ):
        load_text()
    monkeypatch.setattr("data.wikitext.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(SystemExit, match=r"'gpt2' could not be loaded(.|\n)*--train_tokenizer"):
        load_tokenizer("gpt2")


def test_gpt2_files_alone_are_a_tokenizer(tmp_path, tokenizer):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    loaded = load_tokenizer(str(tmp_path))
    text = "Some words . More ."
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"] and loaded.eos_token_id == tokenizer.eos_token_id


def test_files_that_hold_no_text_are_named(tmp_path):
    empty, odd = tmp_path / "empty.txt", tmp_path / "odd.txt"
    empty.touch()
    odd.write_bytes(bytes(range(128, 256)) * 20)
    for path, sentence in ((empty, "There is no text in"), (odd, "cannot be read as text in UTF-8")):
        with pytest.raises(SystemExit, match=sentence) as refused:
            load_text(files={"train": str(path)}, cache_dir=str(tmp_path / "cache"))
        assert path.name in str(refused.value)
