"""The demo page: what it computes, and the page itself in headless Chromium."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from huggingface_hub import metadata_load
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hub_upload.demo import export_space


ROOT = Path(__file__).parents[2]
APP = ROOT / "hub_upload" / "space" / "app.py"
COLOURS = "[...document.querySelectorAll('#routing .token')].map(token => getComputedStyle(token).backgroundColor)"


@pytest.fixture(scope="module")
def app():
    spec = importlib.util.spec_from_file_location("space_app", APP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_have_the_colour_of_their_component(app, checkpoints):
    model, tokenizer = app.load(AutoModelForCausalLM, str(checkpoints["causal"]), trust=False)
    ids = app.generate(model, tokenizer, "The <b>text</b>", new_tokens=6, temperature=0.8, seed=1)
    assert ids == app.generate(model, tokenizer, "The <b>text</b>", new_tokens=6, temperature=0.8, seed=1)
    assert 6 >= len(ids) - len(tokenizer("The <b>text</b>")["input_ids"]) > 0
    outputs = model(torch.tensor([ids]), output_responsibilities=True)
    for side, of in (("reads", 0), ("writes", 1)):
        gamma = app.responsibilities(model, ids, 0, side)
        assert torch.allclose(gamma, outputs.responsibilities[0][of][0].mean(0))
        page = app.coloured(tokenizer, ids, gamma)
        assert [int(x) for x in re.findall(r'data-component="(\d+)"', page)] == gamma.argmax(-1).tolist()
    assert "<b>" not in page and "&lt;" in page
    colours = dict(re.findall(r'data-component="(\d+)" style="background: hsla\((\d+),', page))
    assert len(set(colours.values())) == len(colours)


def test_prompts_that_are_too_long_are_cut(app, checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints["causal"], position_embedding_type="sinusoidal")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["causal"])
    assert len(app.generate(model, tokenizer, "x " * 2000, 5, 0, 0)) <= app.LONGEST
    classifier = AutoModelForSequenceClassification.from_pretrained(checkpoints["classifier"]).eval()
    shares = app.classify(classifier, tokenizer, "x " * 2000)
    assert sum(shares.values()) == pytest.approx(1) and len(shares) == 3
    assert app.classify(classifier, tokenizer, "")


def test_space_is_whole(tmp_path, exported):
    export_space(tmp_path / "demo", "somebody/gma", None)
    assert sorted(os.listdir(tmp_path)) == ["demo"]
    assert sorted(os.listdir(tmp_path / "demo")) == ["README.md", "app.py", "requirements.txt", "settings.json"]
    data = metadata_load(tmp_path / "demo" / "README.md")
    assert data["sdk"] == "gradio" and data["app_file"] == "app.py" and data["models"] == ["somebody/gma"]
    settings = json.loads((tmp_path / "demo" / "settings.json").read_text())
    assert settings == {"generator": "somebody/gma", "classifier": None, "trust_remote_code": True}
    with pytest.raises(SystemExit, match="there already"):
        export_space(tmp_path / "demo", "somebody/gma", None)
    with pytest.raises(SystemExit, match="Give --generator"):
        export_space(tmp_path / "other", None, None)


def test_page_in_a_browser(browser, exported, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # As a Space runs it: by settings.json, with the code that comes with the models, without our package.
    export_space(tmp_path / "demo", "somebody/causal", "somebody/classifier")
    settings = json.loads((tmp_path / "demo" / "settings.json").read_text())
    settings |= {"generator": str(exported["causal"]), "classifier": str(exported["classifier"])}
    (tmp_path / "demo" / "settings.json").write_text(json.dumps(settings))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "GRADIO_ANALYTICS_ENABLED": "False"}
    command = [sys.executable, "app.py", "--port", str(port)]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, cwd=tmp_path / "demo", env=environment, stdout=log, stderr=log)
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.set_default_timeout(60_000)
    errors = []
    page.on("console", lambda line: errors.append((line.location["url"], line.text)) if line.type == "error" else None)
    page.on("dialog", lambda dialog: errors.append(("127.0.0.1", dialog.message)))
    try:
        wait_for(f"http://127.0.0.1:{port}/", server, tmp_path / "log")
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#prompt textarea").fill("The <script>alert(1)</script> text")
        page.locator("#generate").click()
        tokens = page.locator("#routing .token")
        tokens.first.wait_for()
        assert "".join(tokens.all_text_contents()).startswith("The <script>alert(1)</script> text")
        assert tokens.count() > 40 and "component" in tokens.first.get_attribute("title")
        components = {token.get_attribute("data-component") for token in tokens.all()}
        colours = colours_of(page)
        assert len(components) > 1 and len(set(colours)) > 1 and "rgba(0, 0, 0, 0)" not in colours

        page.locator("input[type=radio][value=writes]").click()
        page.wait_for_function(f"before => JSON.stringify({COLOURS}) !== JSON.stringify(before)", arg=colours)
        page.get_by_role("tab", name="Classify").click()
        page.locator("#text textarea").fill("The text")
        page.locator("#classify").click()
        page.locator("#classes").get_by_text("LABEL_").first.wait_for()
        # Fonts and icons from elsewhere cannot be had; nothing else may go wrong.
        assert [error for error in errors if "127.0.0.1" in error[0] and "favicon" not in error[0]] == []
    finally:
        page.close()
        server.terminate()
        server.wait(20)


def colours_of(page) -> list[str]:
    return page.evaluate(COLOURS)


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())
