"""The analysis as people run it, on a tiny model, against brute force over the model's own outputs."""

import csv
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from analyze_responsibilities import Analysis, Arguments, load_model, write_results
from data.labelled import load_labelled
from data.wikitext import load_tokenizer, train_tokenizer
from datasets import ClassLabel, Dataset, Features, List, Value
from matplotlib import pyplot
from sklearn.decomposition import PCA
from sklearn.metrics import mutual_info_score
from transformers import GPT2Config, GPT2Model

from modeling_gma import GMAConfig, GMAForCausalLM, GMAModel
from modeling_gma.categories import CATEGORIES, surface_category


SCRIPT = Path(__file__).parents[2] / "scripts" / "analyze_responsibilities.py"
TEXT = " = Title = \n The Cat sat , in 1990 , on the <unk> of NASA . \n A dog <unk> runs | over it .\n" * 12
LENGTH, SEQUENCES = 24, 5
FIGURES = ("heatmap", "category_composition", "usage", "purity", "token_strip", "pca_by_category", "pca_by_component")
FIGURES += ("query_against_key",)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("analysis")
    torch.manual_seed(0)
    tokenizer = train_tokenizer([TEXT], 300)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_components": 6}
    # Without biases no queries begin with a preference.
    sizes["attention_bias"] = False
    sizes |= {"initializer_range": 0.6, "residual_initializer_range": 0.6}
    config = GMAConfig(vocab_size=len(tokenizer), **sizes, max_position_embeddings=32, eos_token_id=0)
    GMAForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


def flags(folder, **changed):
    given = {"model_name_or_path": str(folder / "model"), "text_file": str(folder / "text.txt")}
    given |= {"sequences": SEQUENCES, "length": LENGTH, "permutations": 20}
    return Arguments(**(given | changed))


def analysed(arguments):
    model = load_model(arguments.model_name_or_path, "cpu", "auto")
    text = load_labelled(arguments, load_tokenizer(arguments.model_name_or_path), arguments.length)
    analysis = Analysis(model, text, arguments, arguments.layer % model.config.num_hidden_layers)
    analysis.run()
    return analysis


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """What the script writes, by its command line."""
    output = tmp_path_factory.mktemp("run") / "out"
    command = [sys.executable, str(SCRIPT), "--model_name_or_path", str(folder / "model"), "--output_dir", str(output)]
    command += ["--text_file", str(folder / "text.txt"), "--sequences", str(SEQUENCES), "--length", str(LENGTH)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "components active" in done.stdout and "analysing" in done.stderr
    return output


@pytest.fixture(scope="module")
def truth(folder):
    """Tokens, their categories, and responsibilities of every layer and side, (H + 1, T, K), by another route."""
    tokenizer = load_tokenizer(str(folder / "model"))
    lines = TEXT.splitlines(keepends=True)
    stream = []
    for line in lines:
        is_title = line.startswith(" = ")
        stream += [tokenizer.eos_token_id] * is_title + tokenizer(line, add_special_tokens=False)["input_ids"]
    ids = torch.tensor(stream[: SEQUENCES * LENGTH]).view(SEQUENCES, LENGTH)
    model = GMAForCausalLM.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        outputs = model(ids, output_responsibilities=True, use_cache=False).responsibilities
    sides = {}
    for layer, pair in enumerate(outputs):
        for side, gamma in zip(("query", "key"), pair):
            tokens = gamma.double().permute(1, 0, 2, 3).reshape(2, -1, 6)
            sides[layer, side] = torch.cat([tokens, tokens.mean(0, keepdim=True)]).numpy()
    labels = ["eos" if i == tokenizer.eos_token_id else surface_category(tokenizer.decode([i])) for i in stream]
    return ids.flatten().tolist(), labels[: SEQUENCES * LENGTH], sides


def entropy_of(probabilities):
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def test_statistics_of_every_layer_and_head(run, truth):
    ids, labels, sides = truth
    results = json.loads((run / "statistics.json").read_text())
    assert results["tokens"] == len(ids) == SEQUENCES * LENGTH and results["layer"] == 1
    numbers = [CATEGORIES.index(label) for label in labels]
    for (layer, side), gamma in sides.items():
        found = results["layers"][layer][side]
        for group, figures in enumerate([*found["heads"], found["average"]]):
            tokens = gamma[group]
            assert figures["usage_entropy"] == pytest.approx(entropy_of(tokens.mean(0)) / math.log(6), abs=1e-5)
            mean = sum(map(entropy_of, tokens)) / len(tokens) / math.log(6)
            assert figures["token_entropy"] == pytest.approx(mean, abs=1e-5)
            assert figures["mean_maximum"] == pytest.approx(tokens.max(1).mean(), abs=1e-5)
            assigned = tokens.argmax(1)
            assert figures["active"] == pytest.approx(len(set(assigned)) / 6)
            assert figures["mutual_information"] == pytest.approx(mutual_info_score(numbers, assigned), abs=1e-9)
    for layer in range(2):
        both = results["layers"][layer]["both"]
        for group, figures in enumerate([*both["heads"], both["average"]]):
            query, key = sides[layer, "query"][group], sides[layer, "key"][group]
            overlap = np.minimum(query.mean(0), key.mean(0)).sum()
            assert figures["usage_overlap"] == pytest.approx(overlap, abs=1e-5)
            singular = np.linalg.svd(query @ key.T, compute_uv=False)[:6]
            assert figures["effective_rank"] == pytest.approx(
                math.exp(entropy_of(singular / singular.sum())), rel=1e-2
            )
    shown = results["shown"]["average"]
    pca = PCA(2, svd_solver="full").fit(sides[1, "query"][2])
    assert shown["principal_axes"] == pytest.approx(pca.explained_variance_ratio_.tolist(), abs=1e-4)
    assert shown["mutual_information"] == results["layers"][1]["query"]["average"]["mutual_information"]
    assert shown["permuted"]["mutual_information"]["mean"] < shown["mutual_information"]


def test_tables(run, truth, folder):
    ids, labels, sides = truth
    counted = Counter(labels)
    categories = rows_of(run / "categories.csv")
    assert [row["category"] for row in categories] == list(CATEGORIES)
    assert {row["category"]: int(row["tokens"]) for row in categories if int(row["tokens"])} == dict(counted)
    assert sum(float(row["share"]) for row in categories) == pytest.approx(1)
    assigned = sides[1, "query"][2].argmax(1).tolist()
    tokenizer = load_tokenizer(str(folder / "model"))
    components = rows_of(run / "components.csv")
    assert sorted(int(row["component"]) for row in components) == list(range(6))
    for row in components:
        component = int(row["component"])
        mine = [n for n, k in enumerate(assigned) if k == component]
        assert int(row["tokens"]) == len(mine)
        tokens = json.loads(row["frequent_tokens"])
        if not mine:
            assert row["purity"] == row["dominant_category"] == "" and tokens == []
            continue
        counts = Counter(labels[n] for n in mine)
        assert float(row["purity"]) == pytest.approx(max(counts.values()) / len(mine))
        assert counts[row["dominant_category"]] == max(counts.values())
        texts = Counter(tokenizer.decode([ids[n]]).replace(" ", "·").replace("\n", "↵") for n in mine)
        frequencies = [texts[token] for token in tokens]
        assert frequencies == sorted(texts.values(), reverse=True)[: len(tokens)]
        assert len(tokens) == min(8, len(texts))
    metrics = rows_of(run / "permutation.csv")
    assert [row["metric"] for row in metrics] == [
        "weighted_purity",
        "mutual_information",
        "normalised_mutual_information",
    ]
    assert len(rows_of(run / "layers.csv")) == 2 * 2 * 3


def test_files_are_whole(run):
    names = {path.name for path in run.iterdir()}
    figures = {f"{name}.{kind}" for name in (*FIGURES, "layers_and_heads") for kind in ("png", "svg")}
    tables = {"categories.csv", "components.csv", "permutation.csv", "layers.csv", "report.md", "statistics.json"}
    assert names == figures | tables | {"explorer.html"}
    for path in run.glob("*.png"):
        picture = pyplot.imread(path)[..., :3]
        assert picture.shape[0] > 200 and picture.shape[1] > 300 and picture.std() > 0.01, path.name
    for path in run.glob("*.svg"):
        assert "<svg" in path.read_text() and "</svg>" in path.read_text()


def test_report_has_the_papers_figures_beside(run):
    report = (run / "report.md").read_text()
    for cell in ("104/128", "0.933", "0.293 ± 0.001", "12.0 % and 7.9 %", "0.286"):
        assert f"| {cell} |" in report
    assert "120 tokens: 5 sequences of 24." in report
    # A bar in a token does not end its cell.
    for line in report.splitlines():
        if line.startswith("|") and "`" in line:
            assert len(line.replace("\\|", "").strip("|").split("|")) == 5


def test_only_like_stands_beside_the_papers(folder, tmp_path):
    """The paper's are of queries, and of its own categories."""
    write_results(analysed(flags(folder, side="key")), tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Layer 1, average of 2 heads, keys")
    assert not any(f"| {cell} |" in report for cell in ("104/128", "0.933", "0.293 ± 0.001", "12.0 % and 7.9 %"))
    (tmp_path / "kinds.py").write_text("def kind(texts):\n    return ['a word'] * len(texts)\n")
    write_results(analysed(flags(folder, label_function=f"{tmp_path / 'kinds.py'}:kind")), tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Layer 1, average of 2 heads, queries") and "| 0.933 |" in report
    assert not any(f"| {cell} |" in report for cell in ("0.483", "0.293 ± 0.001", "0.286"))


def test_what_was_there_before_goes(folder, tmp_path):
    said = write_results(analysed(flags(folder, heads="each", layer=0)), tmp_path)
    assert "head_0: " in said and "head_1: " in said
    (tmp_path / "head_1" / "mine.txt").touch()
    write_results(analysed(flags(folder)), tmp_path)
    assert (tmp_path / "components.csv").exists()
    assert [path.name for path in tmp_path.glob("head_*/*")] == ["mine.txt"]


def test_the_same_seed_gives_the_same_files(folder, tmp_path):
    arguments = flags(folder)
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_results(analysed(arguments), tmp_path / name)
        contents.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.name != "statistics.json"})
    assert contents[0] == contents[1]


def test_each_head_has_its_own(folder, tmp_path, truth):
    _, _, sides = truth
    write_results(analysed(flags(folder, heads="each", layer=0, side="key")), tmp_path)
    results = json.loads((tmp_path / "statistics.json").read_text())
    assert list(results["shown"]) == ["head_0", "head_1"] and results["side"] == "key"
    for head in range(2):
        assigned = Counter(sides[0, "key"][head].argmax(1).tolist())
        rows = rows_of(tmp_path / f"head_{head}" / "components.csv")
        assert {int(r["component"]): int(r["tokens"]) for r in rows if int(r["tokens"])} == dict(assigned)
        assert (tmp_path / f"head_{head}" / "heatmap.svg").is_file()
    assert not (tmp_path / "components.csv").exists()


def test_text_that_is_left_out(folder):
    everything, without = analysed(flags(folder)), analysed(flags(folder, leave_out="<unk>"))
    run = everything.text.tokenizer(" <unk>")["input_ids"]
    size = SEQUENCES * LENGTH
    stream = everything.text.ids._read(0, min(size + len(run), int(everything.text.ids.starts[-1]))).tolist()
    starts = [start for start in range(len(stream)) if stream[start : start + len(run)] == run]
    dropped = {place for start in starts for place in range(start, start + len(run)) if place < size}
    # Some lie across the end of a sequence.
    assert any(start // LENGTH != (start + len(run) - 1) // LENGTH for start in starts)
    counts = torch.cat([without.text[number][2] for number in range(SEQUENCES)])
    assert set((~counts).nonzero().flatten().tolist()) == dropped
    assert without.statistics[0]["query"].count == size - len(dropped)
    # What is left out is still read: responsibilities of the rest are the same.
    torch.testing.assert_close(
        torch.from_numpy(without.passage.layers[1][0]), torch.from_numpy(everything.passage.layers[1][0])
    )


def test_standard_input(folder, tmp_path):
    command = [sys.executable, str(SCRIPT), "--model_name_or_path", str(folder / "model"), "--text_file", "-"]
    command += ["--sequences", "64", "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(command, input="some plain words . " * 40, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "out" / "statistics.json").read_text())
    # Without --length the model's own 32 positions, for it has fewer than 1024.
    assert results["length"] == 32 and results["sequences"] >= 1
    assert f"{results['sequences']} whole sequences of 32 tokens, not 64" in done.stdout


def test_labels_by_a_function(folder, tmp_path):
    (tmp_path / "kinds.py").write_text(
        "def kind(texts):\n    return ['after a comma' if t.strip() == ',' else 'rest' for t in [''] + texts[:-1]]\n"
    )
    analysis = analysed(flags(folder, label_function=f"{tmp_path / 'kinds.py'}:kind"))
    assert sorted(analysis.text.names) == ["after a comma", "rest"]
    ids, labels, _ = analysis.text[0]
    texts = [analysis.text.tokenizer.decode([i]) for i in ids.tolist()]
    for n in range(1, LENGTH):
        is_after = analysis.text.names[labels[n]] == "after a comma"
        assert is_after == (texts[n - 1].strip() == ",")
    assert analysis.statistics[1]["query"].table.shape == (3, 6, 2)


def test_labels_from_a_column(folder, tmp_path):
    tags = ["NOUN", "VERB", "DET"]
    kinds = Features({"words": List(Value("string")), "tags": List(ClassLabel(names=tags))})
    rows = [{"words": ["The", "Cat", "sat"], "tags": [2, 0, 1]}] * 60
    Dataset.from_list(rows, features=kinds).to_parquet(tmp_path / "tagged.parquet")
    arguments = flags(folder, text_file=str(tmp_path / "tagged.parquet"), text_column="words", label_column="tags")
    text = load_labelled(arguments, load_tokenizer(arguments.model_name_or_path), LENGTH)
    assert text.names == ["eos", "none", *tags]
    ids, labels, _ = text[0]
    named = [(text.tokenizer.decode([i]), text.names[label]) for i, label in zip(ids.tolist(), labels)]
    assert named[0] == ("<|endoftext|>", "eos")
    joined = {}
    for token, label in named[1 : named.index(("<|endoftext|>", "eos"), 1)]:
        joined[label] = joined.get(label, "") + token
    assert joined == {"DET": " The", "NOUN": " Cat", "VERB": " sat", "none": "\n"}


def test_numbers_from_a_column_by_their_size(folder, tmp_path):
    rows = [{"words": ["The", "Cat", "sat"], "tags": [10, 2, None]}] * 60
    Dataset.from_list(rows).to_parquet(tmp_path / "tagged.parquet")
    arguments = flags(folder, text_file=str(tmp_path / "tagged.parquet"), text_column="words", label_column="tags")
    text = load_labelled(arguments, load_tokenizer(arguments.model_name_or_path), LENGTH)
    assert text.names == ["eos", "none", "2", "10", "None"]


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"side": "value"}, "--side must be one of query, key, got 'value'"),
        ({"heads": "some"}, "--heads must be one of average, each, got 'some'"),
        ({"sequences": 0}, "--sequences must be at least 1, got 0"),
        ({"permutations": 1}, "--permutations must be at least 2, got 1"),
        ({"label_function": "a.py:b", "label_column": "c"}, "do not go together"),
        ({"label_column": "c", "text_file": "-"}, "not standard input"),
    ],
)
def test_bad_flags(folder, changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        flags(folder, **changed)


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"label_function": "nowhere.py:kind"}, "there is no file 'nowhere.py'"),
        ({"length": 100_000}, "and a sequence 100000: give more text, or --length"),
        ({"label_column": "tags"}, "must name a column of lists"),
        ({"split": "train", "text_file": None, "dataset_name": "/nowhere/at/all"}, "there is no such folder"),
    ],
)
def test_what_cannot_be_read_is_said(folder, changed, sentence):
    arguments = flags(folder, **changed)
    with pytest.raises(SystemExit, match=sentence):
        load_labelled(arguments, load_tokenizer(arguments.model_name_or_path), arguments.length)


def test_help_teaches():
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "explorer.html" in done.stdout and "--label_function" in done.stdout


@pytest.mark.parametrize(
    "fields, changed",
    [
        ({"num_components": 1}, {}),
        ({"forget_gate": True, "position_embedding_type": "none"}, {"dtype": "bfloat16"}),
        ({"is_causal": False}, {"side": "key", "heads": "each"}),
        ({"layer_types": ["hybrid_sliding"], "forget_gate": True}, {"heads": "each"}),
    ],
    ids=["one component", "fading in bfloat16", "both ways", "local heads"],
)
def test_models_of_other_kinds(folder, tmp_path, fields, changed):
    tokenizer = load_tokenizer(str(folder / "model"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}
    config = GMAConfig(vocab_size=len(tokenizer), **(sizes | fields))
    GMAModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    analysis = analysed(flags(folder, model_name_or_path=str(tmp_path / "model"), **changed))
    write_results(analysis, tmp_path)
    assert (analysis.passage.log_decays[0] is not None) == config.forget_gate
    text = (tmp_path / "statistics.json").read_text()
    assert "NaN" not in text and json.loads(text)["tokens"] == SEQUENCES * LENGTH


def test_half_lives(folder, tmp_path):
    """A gate that lets through the same share of memory at every token tells its own half-life."""
    tokenizer = load_tokenizer(str(folder / "model"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_components": 4}
    model = GMAModel(GMAConfig(vocab_size=len(tokenizer), forget_gate=True, **sizes))
    for layer, kept in zip(model.layers, ([0.5, 0.25], [0.9, 0.99])):
        torch.nn.init.zeros_(layer.mixer.forget_gate.proj.weight)
        with torch.no_grad():
            layer.mixer.forget_gate.bias.copy_(torch.logit(torch.tensor(kept)))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    analysis = analysed(flags(folder, model_name_or_path=str(tmp_path / "model")))
    write_results(analysis, tmp_path)
    expected = [[1.0, 0.5], [6.579, 68.97]]
    assert np.allclose(json.loads((tmp_path / "statistics.json").read_text())["half_lives"], expected, rtol=1e-3)
    assert "| 1 | 6.58 | 69 |" in (tmp_path / "report.md").read_text()


def test_other_models_are_refused(tmp_path):
    GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="is no GMA model but a GPT2Model"):
        load_model(str(tmp_path), "cpu", "auto")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 9}
    GMAModel(GMAConfig(**sizes, layer_types=["linear_attention", "sliding_attention"])).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=r"as many GMA heads in every layer, and at least one, got \[2, 0\]"):
        load_model(str(tmp_path), "cpu", "auto")
    with pytest.raises(SystemExit, match="cannot be loaded"):
        load_model(str(tmp_path / "nothing"), "cpu", "auto")
