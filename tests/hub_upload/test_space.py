"""The demo page: what it computes, and, with GMA_BROWSER set, the page itself in headless Chromium."""

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
        gamma = app.responsibilities(model, ids, 1, side)
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


@pytest.mark.skipif("GMA_BROWSER" not in os.environ, reason="needs gradio, selenium and Chromium: set GMA_BROWSER=1")
def test_page_in_a_browser(exported, tmp_path):
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

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
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = None
    try:
        wait_for(f"http://127.0.0.1:{port}/", server, tmp_path / "log")
        browser = webdriver.Chrome(options=options)
        wait = WebDriverWait(browser, 60)
        browser.get(f"http://127.0.0.1:{port}/")
        prompt = wait.until(lambda browser: browser.find_element(By.CSS_SELECTOR, "#prompt textarea"))
        prompt.clear()
        prompt.send_keys("The <script>alert(1)</script> text")
        browser.find_element(By.ID, "generate").click()
        tokens = wait.until(lambda browser: browser.find_elements(By.CSS_SELECTOR, "#routing .token"))
        shown = "".join(token.get_property("textContent") for token in tokens)
        assert shown.startswith("The <script>alert(1)</script> text") and len(tokens) > 40
        components = [token.get_attribute("data-component") for token in tokens]
        colours = colours_of(tokens)
        assert len(set(components)) > 1 and len(set(colours)) > 1 and "rgba(0, 0, 0, 0)" not in colours
        assert "component" in tokens[0].get_attribute("title")
        browser.save_screenshot(os.environ["GMA_BROWSER"] + "-generate.png")

        browser.find_element(By.CSS_SELECTOR, "input[type=radio][value=writes]").click()
        wait.until(lambda browser: colours_of(browser.find_elements(By.CSS_SELECTOR, "#routing .token")) != colours)
        next(
            tab for tab in browser.find_elements(By.CSS_SELECTOR, "button[role=tab]") if tab.text == "Classify"
        ).click()
        text = wait.until(lambda browser: browser.find_element(By.CSS_SELECTOR, "#text textarea"))
        wait.until(lambda _: text.is_displayed())
        text.send_keys("The text")
        browser.find_element(By.ID, "classify").click()
        wait.until(lambda browser: "LABEL_" in browser.find_element(By.ID, "classes").text)
        browser.save_screenshot(os.environ["GMA_BROWSER"] + "-classify.png")
        # Fonts and icons from elsewhere cannot be had; nothing else may go wrong.
        errors = [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
        assert [message for message in errors if "127.0.0.1" in message and "favicon" not in message] == []
    finally:
        if browser is not None:
            browser.quit()
        server.terminate()
        server.wait(20)


def colours_of(tokens) -> list[str]:
    return [token.value_of_css_property("background-color") for token in tokens]


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())
