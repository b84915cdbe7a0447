import importlib
import json
import os
import re
import shutil

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from hub_upload.check import look
from hub_upload.export import auto_map, export, flatten, package_imports, without_paths
from hub_upload.record import digests, read_record


def test_modules_stand_alone():
    modules = flatten()
    assert {"configuration_gma.py", "modeling_gma.py", "functional.py", "reference.py"} <= modules.keys()
    for name, source in modules.items():
        assert package_imports(source) == []
        assert not re.search(r"(import|from) (modeling_gma|configuration_gma)\b", source), name
        for other in re.findall(r"^\s*from \.(\w*) import", source, flags=re.MULTILINE):
            assert f"{other}.py" in modules
    assert package_imports("def f():\n    from modeling_gma.linear import Linear") == ["modeling_gma.linear"]
    assert package_imports("import configuration_gma as c") == ["configuration_gma"]


def test_every_registered_class_is_in_the_map():
    """Each Auto class of transformers that knows GMA's config, whoever registered it."""
    from configuration_gma import GMAConfig

    registered = {"AutoConfig"}
    for name in dir(transformers):
        mapping = getattr(getattr(transformers, name), "_model_mapping", None) if name.startswith("Auto") else None
        if mapping is not None and GMAConfig in mapping:
            registered.add(name)
    assert len(registered) == 6
    assert auto_map().keys() == registered
    for reference in auto_map().values():
        module, _, name = reference.partition(".")
        package = "configuration_gma" if module == "configuration_gma" else "modeling_gma"
        assert hasattr(importlib.import_module(f"{package}.{module}"), name)


@pytest.mark.parametrize("name", ["causal", "sharded"])
def test_same_input_same_bytes(name, checkpoints, exported, tmp_path):
    size = "20KB" if name == "sharded" else "5GB"
    moved = shutil.copytree(checkpoints[name], tmp_path / "moved")
    export(moved, tmp_path / "again", max_shard_size=size)
    assert digests(tmp_path / "again") == digests(exported[name])


def test_weights_are_the_checkpoints(checkpoints, exported):
    original = load_file(checkpoints["sharded"] / "model.safetensors")
    parts = sorted(exported["sharded"].glob("model-*.safetensors"))
    assert len(parts) > 1 and not (exported["sharded"] / "model.safetensors").exists()
    found = {name: value for part in parts for name, value in load_file(part).items()}
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], original[name]) and found[name].dtype == torch.bfloat16 for name in found)
    assert {path.stat().st_mode & 0o777 for path in exported["sharded"].iterdir()} == {0o644}


def test_paths_and_pickles_stay_behind(checkpoints, tmp_path):
    checkpoint = shutil.copytree(checkpoints["classifier"], tmp_path / "checkpoint")
    torch.save({}, checkpoint / "training_args.bin")
    (checkpoint / "optimizer.safetensors").write_bytes(b"x")
    results = {"arguments": {"dataset_name": str(tmp_path / "texts"), "files": ["~/a.csv", "C:\\b.csv"]}, "lora": True}
    (checkpoint / "results.json").write_text(json.dumps(results))
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config | {"name_or_path": str(tmp_path)}))
    export(checkpoint, tmp_path / "out")
    names = digests(tmp_path / "out")
    assert "training_args.bin" not in names and "optimizer.safetensors" not in names
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    assert kept == {"arguments": {"dataset_name": "texts", "files": ["a.csv", "b.csv"]}, "lora": True}
    assert without_paths("a/b") == "a/b"


def test_out_is_whole_or_not_there(checkpoints, tmp_path, monkeypatch):
    out = tmp_path / "out"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("notes")
    with pytest.raises(SystemExit, match="there already"):
        export(checkpoints["causal"], tmp_path / "mine")
    with pytest.raises(SystemExit, match="left alone"):
        export(checkpoints["causal"], tmp_path / "mine", overwrite=True)
    with pytest.raises(SystemExit, match="holds the checkpoint"):
        export(checkpoints["causal"], checkpoints["causal"])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hub_upload.export.make_card", full)
        with pytest.raises(SystemExit, match="No space left"):
            export(checkpoints["causal"], out)
    assert sorted(os.listdir(tmp_path)) == ["mine"]
    export(checkpoints["causal"], out)
    before = digests(out)
    with monkeypatch.context() as patch:
        patch.setattr("hub_upload.export.make_card", full)
        with pytest.raises(SystemExit):
            export(checkpoints["classifier"], out, overwrite=True)
    assert digests(out) == before == read_record(out)["exported"]
    export(checkpoints["classifier"], out, overwrite=True)
    assert digests(out) == read_record(out)["exported"] != before
    assert sorted(os.listdir(tmp_path)) == ["mine", "out", "out.record.json"]


def test_what_cannot_be_exported_is_said(checkpoints, tmp_path):
    def broken(change) -> str:
        folder = shutil.copytree(checkpoints["causal"], tmp_path / "broken")
        change(folder)
        with pytest.raises(SystemExit) as refused:
            export(folder, tmp_path / "out")
        shutil.rmtree(folder)
        assert not (tmp_path / "out").exists()
        return str(refused.value)

    def edit(**fields):
        def change(folder):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | fields))

        return change

    assert "no config.json" in broken(lambda folder: (folder / "config.json").unlink())
    assert "is a BertModel" in broken(edit(architectures=["BertModel"]))
    assert "model_type 'gma_sdpa'" in broken(edit(model_type="gma_sdpa"))
    assert "missing keys" in broken(edit(num_hidden_layers=3))
    assert "unexpected keys" in broken(edit(num_hidden_layers=1))
    assert "merge them" in broken(lambda folder: (folder / "adapter_config.json").write_text("{}"))
    assert "cannot be loaded" in broken(lambda folder: (folder / "model.safetensors").unlink())
    for name, value in (("hub_model_id", "a/b\n# c"), ("max_shard_size", "large")):
        with pytest.raises(SystemExit, match="must be"):
            export(checkpoints["causal"], tmp_path / "out", **{name: value})


TRAINED = {
    "task": "LanguageModelling",
    "best_step": 30,
    "validation": {"loss": 3.75, "perplexity": 42.521},
    "test": {},
    "mixture": {"usage_entropy": 0.9071},
    "tokens": 491_520,
    "seconds": 12.5,
    "arguments": {
        "dataset_name": "Salesforce/wikitext",
        "dataset_config_name": "wikitext-103-raw-v1",
        "seed": 3,
        "learning_rate": 0.001,
    },
    "versions": {"torch": "2.13.0"},
}


def card_of(checkpoint, results: dict, out) -> ModelCard:
    checkpoint = shutil.copytree(checkpoint, out.with_name("checkpoint"))
    (checkpoint / "results.json").write_text(json.dumps(results))
    shuffled = {"weighted_purity": {"mean": 0.2917, "std": 0.001}}
    statistics = {"tokens": 640, "side": "query", "layer": 3, "arguments": {"text_file": "some.txt"}}
    statistics["shown"] = {"average": {"weighted_purity": 0.4831, "permuted": shuffled}}
    (checkpoint / "responsibilities").mkdir()
    (checkpoint / "responsibilities" / "statistics.json").write_text(json.dumps(statistics))
    (checkpoint / "responsibilities" / "usage.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    export(checkpoint, out, hub_model_id="somebody/gma-small")
    assert look(out) == []
    return ModelCard.load(out / "README.md")


def test_card_says_what_was_measured(checkpoints, tmp_path):
    card = card_of(checkpoints["causal"], TRAINED, tmp_path / "out")
    data = card.data
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "transformers", "text-generation")
    assert data.datasets == ["Salesforce/wikitext"] and "custom_code" in data.tags
    figures = {(x.dataset_split, x.metric_type): x.metric_value for x in data.eval_results}
    assert figures == {("validation", "loss"): 3.75, ("validation", "perplexity"): 42.521}
    assert {x.dataset_config for x in data.eval_results} == {"wikitext-103-raw-v1"}
    text = card.text
    assert 'AutoModelForCausalLM.from_pretrained("somebody/gma-small", trust_remote_code=True)' in text
    for shown in (
        "| validation | perplexity | 42.52 |",
        "491,520",
        "0.9071",
        "0.4831",
        "responsibilities/usage.png",
        "0.2917",
        "640 tokens of some.txt, layer 3",
    ):
        assert shown in text, shown
    assert "| seed | 3 |" in text and "2.13.0" in text and "bibtex" in text


def test_card_has_the_papers_figures_beside_ours(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("hub_upload.card.PAPER", {("wikitext-103-raw-v1", "validation", "perplexity", 4): "12.34"})
    card = card_of(checkpoints["causal"], TRAINED, tmp_path / "out")
    assert "| 42.52 | 12.34 |" in card.text and "| 3.75 | not measured there |" in card.text


def test_card_without_results_has_no_figures(exported):
    card = ModelCard.load(exported["causal"] / "README.md")
    assert card.data.eval_results is None and card.data.datasets is None
    assert "Nothing was measured" in card.text


@pytest.mark.parametrize("name", ["causal", "classifier", "masked", "tagger", "encoder"])
def test_code_of_the_card_runs(name, exported, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (exported[name] / "README.md").read_text(), flags=re.DOTALL)
    assert code.count('"OWNER/NAME"') == 2
    exec(code.replace("OWNER/NAME", str(exported[name])), {})
    assert capsys.readouterr().out.strip()


def test_card_of_a_fine_tuned_model(checkpoints, tmp_path):
    results = {"test_accuracy": 0.75, "best_validation_accuracy": None, "base_model": "somebody/base", "seed": 1}
    results |= {"dataset_name": "stanfordnlp/imdb", "dataset_config_name": None, "examples": {"train": 100}}
    card = card_of(checkpoints["classifier"], results, tmp_path / "out")
    data = card.data
    assert "| labels | LABEL_0, LABEL_1, LABEL_2 |" in card.text
    assert data.base_model == "somebody/base" and data.datasets == ["stanfordnlp/imdb"]
    assert [(x.dataset_split, x.metric_type, x.metric_value) for x in data.eval_results] == [
        ("test", "accuracy", 0.75)
    ]


def test_card_names_the_file_that_each_figure_is_of(checkpoints, tmp_path):
    results = {"test_accuracy": 0.75, "best_validation_accuracy": 0.5, "train_file": "train.csv"}
    results |= {"test_file": "test.csv", "validation_file": None}
    card = card_of(checkpoints["classifier"], results, tmp_path / "out")
    assert {x.dataset_split: x.dataset_name for x in card.data.eval_results} == {
        "validation": "train.csv",
        "test": "test.csv",
    }
    assert "| test | accuracy | 0.75 | not measured there | test.csv |" in card.text
