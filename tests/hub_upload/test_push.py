import importlib
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hub_upload.check import check
from hub_upload.push import refuse_name
from hub_upload.record import digests, read_record, write_record


NAME = "somebody/gma-small"

# What a stranger runs, with an empty cache and without our package.
LOAD = """
import sys
for name in ("modeling_gma", "configuration_gma", "hub_upload"):
    sys.modules[name] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

name, revision, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(name, revision=revision, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=True)
tokens = tokenizer("The model reads this text.", return_tensors="pt")["input_ids"]
save_file({"tokens": tokens, "logits": model(tokens).logits}, out)
"""


@pytest.fixture
def folder(copy):
    """A folder that was checked, as its record says."""
    folder = copy("causal")
    card = folder / "README.md"
    card.write_text(card.read_text().replace("OWNER/NAME", NAME))
    write_record(folder, read_record(folder) | {"checked": digests(folder)})
    return folder


@pytest.fixture
def push(run, hub, folder):
    def push(*flags, **options):
        done = run("-m", "hub_upload.push", folder, NAME, *flags, **({"hub": hub} | options))
        # One sentence, no trace, no token.
        assert "Traceback" not in done.stderr, done.stderr
        assert "hf_a1" not in done.stdout + done.stderr
        if done.returncode:
            assert len(done.stderr.strip().splitlines()[-1]) < 400
        return done

    return push


def contents(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in digests(folder)}


def held(hub, revision="main") -> dict[str, bytes]:
    files = hub.files(NAME, revision)
    assert files.pop(".gitattributes")
    return files


def test_pushed_model_loads_into_an_empty_cache(push, hub, folder, run, tmp_path, checkpoints):
    done = push("--tag", "v1")
    assert done.returncode == 0, done.stderr
    assert held(hub) == held(hub, "v1") == contents(folder)
    repo = hub.repos[NAME]
    assert repo["private"] and len(repo["commits"]) == 2
    # Weights are large files, the rest is not.
    stored = repo["commits"][repo["branches"]["main"]]
    assert [name for name, content in stored.items() if isinstance(content, str)] == ["model.safetensors"]

    done = run("-c", LOAD, NAME, "v1", tmp_path / "loaded.safetensors", hub=hub)
    assert done.returncode == 0, done.stderr
    loaded = load_file(tmp_path / "loaded.safetensors")
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(checkpoints["causal"])(loaded["tokens"]).logits
    assert torch.equal(loaded["logits"], original)
    assert any(method == "GET" and path.endswith("/attention.py") for method, path in hub.requests)
    # A private model is not for those without a token.
    assert run("-c", LOAD, NAME, "main", tmp_path / "no", hub=hub, token=None).returncode != 0


def test_second_push_replaces_the_first(push, hub, folder):
    assert push().returncode == 0
    commits = len(hub.repos[NAME]["commits"])
    assert push().returncode == 0
    assert len(hub.repos[NAME]["commits"]) == commits
    sent = len([1 for method, _ in hub.requests if method == "PUT"])
    assert sent == 1
    (folder / "generation_config.json").unlink()
    write_record(folder, read_record(folder) | {"checked": digests(folder)})
    assert push("--revision", "next").returncode == 0
    assert held(hub, "next") == contents(folder)
    assert "generation_config.json" in held(hub)


def test_dry_run_sends_nothing(push, hub, folder):
    done = push("--dry-run", token=None)
    assert done.returncode == 0 and hub.requests == []
    for name in digests(folder):
        assert name in done.stdout
    assert f"{(folder / 'model.safetensors').stat().st_size:,}" in done.stdout and "private" in done.stdout


@pytest.mark.parametrize("change", ["unchecked", "failed", "changed", "link"])
def test_folder_must_be_as_it_was_checked(change, push, hub, folder):
    if change == "unchecked":
        record = read_record(folder)
        del record["checked"]
        write_record(folder, record)
    elif change == "failed":
        (folder / "extra.txt").write_text("x")
        assert not check([folder])
    elif change == "changed":
        (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMore.\n")
    else:
        (folder / "README.md").rename(folder.with_name("README.md"))
        (folder / "README.md").symlink_to(folder.with_name("README.md"))
    done = push()
    assert done.returncode == 1 and hub.requests == []
    said = {"unchecked": "was not checked", "changed": "since it was checked (README.md)", "link": "has links"}
    said |= {"failed": "did not pass its check: extra.txt is not on the list"}
    assert said[change] in done.stderr
    if change == "changed":
        assert push("--force").returncode == 0
        assert held(hub) == contents(folder)


LARGE = r"^/lfs/"
COMMIT = r"/commit/main$"

# Faults that pass: what goes wrong, and how often the commit is asked for.
PASSING = {
    "dropped while weights are sent": [("PUT", LARGE, "drop")],
    "429 with Retry-After": [("POST", r"/preupload/", (429, {"Retry-After": "1"}))],
    "429 with Retry-After at the commit": [("POST", COMMIT, (429, {"Retry-After": "1"}))],
    "500 twice at the commit": [("POST", COMMIT, 500, 500)],
    "500 twice at the start": [("POST", r"/repos/create$", 500, 500)],
    "dropped at the commit": [("POST", COMMIT, "drop")],
    "answer to the commit lost": [("POST", COMMIT, "lose")],
    "answer to the creation lost": [("POST", r"/repos/create$", "lose")],
}


@pytest.mark.parametrize("case", PASSING)
def test_passing_trouble_is_tried_again(case, push, hub, folder):
    for fault in PASSING[case]:
        hub.fail(*fault)
    done = push()
    assert done.returncode == 0, done.stderr
    assert hub.faults == []
    assert held(hub) == contents(folder)
    assert len(hub.repos[NAME]["commits"]) == 2


LASTING = {
    "does not accept the token (401)": [("POST", r"/repos/create$", 401)],
    "may not write to somebody/gma-small (403)": [("POST", r"/repos/create$", 403)],
    "may not write to somebody/gma-small (403): it": [("POST", COMMIT, 403)],
    "changed by somebody else meanwhile (409)": [("POST", COMMIT, 409)],
    "The Hub has trouble (500)": [("POST", COMMIT, *[500] * 9)],
    "no connection": [("POST", COMMIT, *["drop"] * 9)],
}


@pytest.mark.parametrize("said", LASTING)
def test_lasting_trouble_is_a_sentence(said, push, hub, folder):
    for fault in LASTING[said]:
        hub.fail(*fault)
    done = push("--tag", "v1")
    assert done.returncode == 1 and said in done.stderr.strip().splitlines()[-1]
    assert NAME not in done.stdout
    if NAME in hub.repos:
        # Nothing that could be taken for the model, and no tag on it.
        assert held_names(hub) == [".gitattributes"] and hub.repos[NAME]["tags"] == {}
    if said == "no connection":
        # It goes on from there: the weights that arrived are not sent again.
        hub.faults.clear()
        assert push("--tag", "v1").returncode == 0
        assert held(hub, "v1") == contents(folder)
        assert [method for method, _ in hub.requests].count("PUT") == 1


def held_names(hub) -> list[str]:
    return sorted(hub.files(NAME))


def test_commit_that_holds_something_else_is_no_success(push, hub, monkeypatch):
    """A server that loses a file of a commit: what it says is not believed."""
    handler = hub.server.RequestHandlerClass
    honest = handler.commit

    def forgetful(self, repo, name, revision, parent, body):
        lines = [line for line in body.splitlines() if b'"mixture.py"' not in line]
        return honest(self, repo, name, revision, parent, b"\n".join(lines))

    monkeypatch.setattr(handler, "commit", forgetful)
    done = push("--tag", "v1")
    assert done.returncode == 1 and "mixture.py is missing" in done.stderr
    assert hub.repos[NAME]["tags"] == {}


def test_names_that_are_taken_are_refused(push, hub):
    hub.create(NAME, private=True, files={"config.json": b"{}", "pytorch_model.bin": b"x"})
    done = push()
    assert done.returncode == 1 and f"The name {NAME} is taken, by something else" in done.stderr
    hub.create(NAME, private=False)
    done = push()
    assert done.returncode == 1 and "is public: say --public" in done.stderr
    assert held_names(hub) == [".gitattributes"]
    hub.fail("GET", rf"^/api/models/{NAME}$", 403)
    done = push()
    assert done.returncode == 1 and "may not see" in done.stderr
    hub.repos[NAME]["tags"]["v1"] = "0" * 40
    done = push("--public", "--tag", "v1")
    assert done.returncode == 1 and "--tag v1" in done.stderr
    assert held_names(hub) == [".gitattributes"]


def test_public_is_said(push, hub):
    assert push("--public").returncode == 0
    assert hub.repos[NAME]["private"] is False


def test_token_must_be_there_and_right(push, hub):
    done = push(token=None)
    assert done.returncode == 1 and "There is no token" in done.stderr and hub.requests == []
    done = push(token="hf_wrong" + "0" * 30)
    assert done.returncode == 1 and "(401)" in done.stderr


@pytest.mark.parametrize("name", ["small", "a/b/c", "a/b--c", "../b", "a/b.git", "-a/b", "a/", "a/b c"])
def test_bad_names_are_refused(name):
    with pytest.raises(SystemExit, match="must be owner/name"):
        refuse_name(name)


def test_good_names_are_taken():
    for name in ("a/b", "some-body/GMA_small.v1"):
        refuse_name(name)


@pytest.mark.parametrize("command", ["export", "check", "push"])
def test_help_teaches(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"hub_upload.{command}").main()
    said = capsys.readouterr().out
    assert f"    python -m hub_upload.{command} small" in said and "OUT" in said


def test_a_card_of_another_repository_is_refused(push, hub, folder):
    card = folder / "README.md"
    card.write_text(card.read_text().replace(NAME, "OWNER/NAME"))
    write_record(folder, read_record(folder) | {"checked": digests(folder)})
    for flags in ([], ["--dry-run"]):
        done = push(*flags)
        assert done.returncode == 1 and f"loads 'OWNER/NAME', not '{NAME}'" in done.stderr
    assert hub.requests == [] and push("--force").returncode == 0
