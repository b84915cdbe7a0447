"""Tasks of Long Range Arena: expressions that are made, and files in the formats of the release."""

import csv
import hashlib

import numpy as np
import pytest
from data import image, listops, pathfinder, retrieval, text
from data.lra import PADDING, VOCAB_SIZE
from datasets import Dataset
from PIL import Image


def value_of(symbols):
    """The value of an expression by another route: a stack of lists."""
    stack = [[]]
    for symbol in symbols:
        if symbol.startswith("["):
            stack.append([symbol])
        elif symbol == "]":
            operator, *values = stack.pop()
            ordered = sorted(values)
            middle = len(ordered) // 2
            median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
            results = {"[MIN": ordered[0], "[MAX": ordered[-1], "[MED": median, "[SM": sum(ordered) % 10}
            stack[-1].append(results[operator])
        else:
            stack[-1].append(int(symbol))
    ((result,),) = stack
    return result


@pytest.fixture(scope="module")
def made():
    return listops.generate(10_000, seed=3, shorter=30, longer=256, num_proc=2)


def test_every_label_is_right(made):
    expressions, labels = made
    assert len(set(expressions)) == len(expressions) == len(labels) == 10_000
    for ids, label in zip(expressions, labels):
        symbols = [listops.SYMBOLS[i] for i in ids]
        assert 30 < len(symbols) < 256 and value_of(symbols) == label


def test_structure_is_that_of_the_arena(made):
    """Two to ten arguments, no operator at depth 10, all operators and digits alike."""
    expressions, labels = made
    counts = np.zeros(len(listops.SYMBOLS))
    for ids in expressions:
        depth, arguments = 1, []
        for i in ids:
            counts[i] += 1
            if i == listops.CLOSE:
                assert 2 <= arguments.pop() <= 10
                depth -= 1
                continue
            if arguments:
                arguments[-1] += 1
            if i >= listops.FIRST_OPERATOR:
                assert depth < 10
                arguments.append(0)
                depth += 1
        assert depth == 1 and not arguments
    digits, operators = counts[:10], counts[10:14]
    assert digits.std() / digits.mean() < 0.02 and operators.std() / operators.mean() < 0.02
    # MIN and MAX make the ends more frequent.
    histogram = np.bincount(labels, minlength=10) / len(labels)
    assert histogram.min() > 0.04 and histogram.argmax() in (0, 9)


def test_lengths_at_the_arenas_size():
    expressions, _ = listops.generate(listops.SHARD, seed=0, num_proc=1)
    lengths = [len(ids) for ids in expressions]
    assert min(lengths) > 500 and max(lengths) < 2000 and 800 < np.mean(lengths) < 1200


@pytest.mark.parametrize("num_proc", [1, 2, 3])
def test_the_same_bytes_with_any_number_of_workers(num_proc):
    expressions, labels = listops.generate(1100, seed=0, shorter=20, longer=120, num_proc=num_proc)
    digest = hashlib.sha256(b"".join(expressions) + bytes(labels)).hexdigest()
    assert digest == "56f3a221e96c8817d4634ff1aecaf438599403d77187cc59434060197fb089a2"
    other, _ = listops.generate(1100, seed=1, shorter=20, longer=120, num_proc=num_proc)
    assert other != expressions


def test_listops_splits_and_cache(tmp_path):
    options = {"sizes": (60, 20, 10), "shorter": 20, "longer": 100, "cache_dir": str(tmp_path), "num_proc": 1}
    splits = {split: listops.load(split, **options) for split in ("train", "validation", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 60, "validation": 20, "test": 10}
    (folder,) = tmp_path.iterdir()
    before = folder.stat().st_mtime_ns
    assert listops.load("train", **options)["input_ids"][:] == splits["train"]["input_ids"][:]
    assert folder.stat().st_mtime_ns == before
    assert listops.load("train", **(options | {"seed": 1}))["input_ids"][:] != splits["train"]["input_ids"][:]


def test_listops_as_released(tmp_path):
    rows = [("( ( ( [MAX 4 ) 3 ) ] )", 4), ("( ( ( ( [SM 9 ) ( ( ( [MED 1 ) 4 ) ] ) ) 5 ) ] )", 6)]
    for name in listops.FILES.values():
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerows([("Source", "Target"), *rows])
    loaded = listops.load("validation", folder=str(tmp_path))
    assert [[listops.SYMBOLS[i] for i in ids] for ids in loaded["input_ids"]] == [
        ["[MAX", "4", "3", "]"],
        ["[SM", "9", "[MED", "1", "4", "]", "5", "]"],
    ]
    assert loaded["labels"][:] == [4, 6]
    for ids, label in zip(loaded["input_ids"], loaded["labels"]):
        assert value_of([listops.SYMBOLS[i] for i in ids]) == label


def test_text_is_bytes(tmp_path):
    reviews = ["Große Klasse", "x" * 50]
    for split in ("train", "test"):
        Dataset.from_dict({"text": reviews, "label": [1, 0]}).to_parquet(tmp_path / f"{split}.parquet")
    loaded = text.load("train", folder=str(tmp_path), length=40, cache_dir=str(tmp_path / "cache"))
    assert bytes(loaded["input_ids"][0]).decode() == reviews[0] and len(loaded["input_ids"][1]) == 40
    assert loaded["labels"][:] == [1, 0] and VOCAB_SIZE == 257 and PADDING == 256
    assert len(text.load("validation", folder=str(tmp_path), cache_dir=str(tmp_path / "cache"))) == 2


def test_retrieval_pairs(tmp_path):
    lines = ['1.0\tid1\tid2\tfirst paper\tsecond, with "quotes"', "0.0\tid3\tid4\tthird\tfourth"]
    for name in retrieval.FILES.values():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    loaded = retrieval.load("test", folder=str(tmp_path), length=8, cache_dir=str(tmp_path / "cache"))
    assert loaded["labels"][:] == [1, 0]
    assert bytes(loaded["input_ids"][0]) == b"first pa" and bytes(loaded["other_input_ids"][0]) == b"second, "


def test_image_is_grey_pixels(tmp_path):
    rng = np.random.default_rng(0)
    batches = {}
    for name in ("test_batch.bin", *(f"data_batch_{i}.bin" for i in range(1, 6))):
        batches[name] = rng.integers(0, 256, (10, 3073), dtype=np.uint8)
        batches[name][:, 0] %= 10
        batches[name].tofile(tmp_path / name)
    sizes = {split: len(image.load(split, folder=str(tmp_path))) for split in ("train", "validation", "test")}
    assert sizes == {"train": 45, "validation": 5, "test": 10}
    first = batches["test_batch.bin"][0].astype(float)
    grey = 0.2989 * first[1:1025] + 0.587 * first[1025:2049] + 0.114 * first[2049:]
    loaded = image.load("test", folder=str(tmp_path))
    assert np.abs(np.array(loaded["input_ids"][0]) - np.floor(grey)).max() <= 1
    assert loaded["labels"][0] == first[0]
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(SystemExit, match="not a batch of the binary CIFAR-10"):
        image.load("test", folder=str(tmp_path))


def test_pathfinder_images(tmp_path):
    root = tmp_path / "curv_contour_length_14"
    (root / "metadata").mkdir(parents=True)
    rng = np.random.default_rng(0)
    pixels = []
    for folder in (0, 1):
        (root / "imgs" / str(folder)).mkdir(parents=True)
        lines = []
        for number in range(5):
            pixels.append(rng.integers(0, 256, (32, 32), dtype=np.uint8))
            Image.fromarray(pixels[-1]).save(root / "imgs" / str(folder) / f"sample_{number}.png")
            lines.append(f"imgs/{folder} sample_{number}.png {number} {number % 2} 1.0 2")
        (root / "metadata" / f"{folder}.npy").write_text("\n".join(lines))
    loaded = {split: pathfinder.load(split, folder=str(tmp_path)) for split in ("train", "validation", "test")}
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 8, "validation": 1, "test": 1}
    assert loaded["train"]["input_ids"][3] == pixels[3].reshape(-1).tolist()
    assert loaded["train"]["labels"][:6] == [0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("module", [retrieval, image, pathfinder])
def test_what_to_fetch_is_said(module, tmp_path):
    with pytest.raises(SystemExit, match="--data_dir FOLDER with"):
        module.load("train")
    with pytest.raises(SystemExit, match=r"has no .*They are in"):
        module.load("train", folder=str(tmp_path))
