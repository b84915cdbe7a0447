"""--push_to_hub: from the command that trains to a model on the Hub."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import finetune_classifier
import pytest
import train_lra
import train_wikitext


ROOT = Path(__file__).parents[2]
NAME = "somebody/gma-trained"
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 4}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
TO_HUB = ["--push_to_hub", "true", "--hub_model_id", NAME]
TOKEN = "hf_" + "a1B2c3D4e5" * 4


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.txt").write_text("The for statement is used to iterate over a sequence.\n" * 60)
    return folder


def test_training_ends_on_the_hub(run, hub, texts, tmp_path):
    """The connection is gone when it is to be pushed: the command says how to go on, and going on pushes."""
    flags = [
        "--dataset_name",
        texts,
        "--output_dir",
        tmp_path / "run",
        "--train_tokenizer",
        "270",
        "--block_size",
        "16",
    ]
    flags += ["--max_steps", "3", "--preprocessing_num_workers", "1", *FLAGS, *TO_HUB]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    hub.fail("POST", "/repos/create$", 403)
    done = run(ROOT / "scripts" / "train_wikitext.py", *flags, hub=hub, **path)
    assert done.returncode == 1 and "(403)" in done.stderr and "to push it: python -m hub_upload.push" in done.stderr
    command = done.stderr.strip().splitlines()[-1].partition("to push it: python ")[2].split()
    pushed = run(*command, hub=hub)
    assert pushed.returncode == 0, pushed.stderr
    files = hub.files(NAME)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert json.loads(files["results.json"])["validation"] == results["validation"]
    assert f'from_pretrained("{NAME}"' in files["README.md"].decode()
    assert json.loads(files["results.json"])["arguments"]["dataset_name"] == "texts"
    for said in (done.stdout, done.stderr, json.dumps(results), *map(repr, files.values())):
        assert TOKEN not in said


def test_commands_of_the_readme(run, hub, checkpoints, tmp_path):
    """From a trained checkpoint to a loaded Hub model by what stands there, with a token in place of the login."""
    section = (ROOT / "README.md").read_text().partition("## Publishing a model")[2].partition("\n## ")[0]
    publishing, loading, _ = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    assert "hf auth login" in publishing
    shutil.copytree(checkpoints["causal"], tmp_path / "quickstart_output")
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = re.sub(r"^hf auth login.*$", "", publishing, flags=re.MULTILINE)
    done = run("-ec", script, hub=hub, program="bash", **python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "modeling_gma.py" in hub.files("owner/gma-quickstart")
    elsewhere = {"PYTHONPATH": "", "HF_HOME": str(tmp_path / "empty")}
    done = run("-ec", loading, hub=hub, program="bash", **python, **elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("The")


def test_fine_tuning_goes_the_same_way(tmp_path, monkeypatch, capsys):
    rows = "".join(f"{text},{label}\n" for text, label in (("a fine film", "good"), ("a dull film", "bad")) * 20)
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    published = []
    monkeypatch.setattr(finetune_classifier, "publish", lambda *given, **more: published.append((given, more)))
    flags = ["--train_file", tmp_path / "train.csv", "--output_dir", tmp_path / "out", "--max_steps", "2", *TO_HUB]
    flags += ["--vocab_size", "270", "--eval_strategy", "steps", "--eval_steps", "2", *FLAGS]
    monkeypatch.setattr(sys, "argv", ["finetune_classifier.py", *map(str, flags)])
    finetune_classifier.main()
    assert published == [((tmp_path / "out", NAME), {"public": False})]
    results = (tmp_path / "out" / "results.json").read_text()
    assert TOKEN not in results + capsys.readouterr().out
    assert json.loads(results)["train_file"] == str(tmp_path / "train.csv")


def test_what_cannot_be_pushed_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    common = {"output_dir": str(tmp_path / "out"), "push_to_hub": True}
    for module in (train_wikitext, train_lra):
        with pytest.raises(ValueError, match="go together"):
            module.Arguments(**common)
        with pytest.raises(SystemExit, match="must be owner/name"):
            module.Arguments(**common, hub_model_id="name")
        with pytest.raises(ValueError, match="goes with --mixer gma"):
            module.Arguments(**common, hub_model_id=NAME, mixer="sdpa")
    with pytest.raises(ValueError, match="retrieval"):
        train_lra.Arguments(**common, hub_model_id=NAME, task="retrieval")
    with pytest.raises(ValueError, match="--hub_token is for all to see"):
        finetune_classifier.Arguments(dataset_name="a/b", **common, hub_model_id=NAME, hub_token=TOKEN)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("hub_upload.push.get_token", lambda: None)
    with pytest.raises(SystemExit, match="There is no token"):
        train_wikitext.Arguments(**common, hub_model_id=NAME)
    assert not (tmp_path / "out").exists()
