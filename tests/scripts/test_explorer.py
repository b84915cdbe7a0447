"""The explorer in a real browser: what it shows against the model's own outputs, and that text in it is only text."""

import json
import re

import numpy as np
import pytest
import torch
from data.wikitext import train_tokenizer
from explorer import Passage, quantised, write_explorer

from modeling_gma import GMAConfig, GMAModel
from modeling_gma.attention import GMAForgetGate
from modeling_gma.categories import token_texts


# Each a token of its own, as a tokenizer of code may have it.
NASTY = ["</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 2'>", "\u202eright"]
TEXT = f"a {NASTY[0]} is {NASTY[1]} &lt; {NASTY[2]} <!-- 🙂 é\n"


def make_passage(**fields):
    """A passage of nasty text in a random model, and the weights that the model says it induces."""
    torch.manual_seed(3)
    tokenizer = train_tokenizer(["a script right"], 262)
    tokenizer.add_tokens(NASTY)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_components": 5}
    config = GMAConfig(
        vocab_size=len(tokenizer), **(sizes | {"initializer_range": 0.7, "residual_initializer_range": 0.7} | fields)
    )
    model = GMAModel(config).eval()
    decays = []
    for module in model.modules():
        if isinstance(module, GMAForgetGate):
            module.register_forward_hook(lambda _, __, decay: decays.append(decay[0].detach().numpy()))
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        outputs = model(ids, output_responsibilities=True, output_attentions=True, use_cache=False)
    texts = token_texts(tokenizer, ids[0].tolist())
    passage = Passage(
        title="<b>model</b> & co",
        texts=texts,
        labels=["<i>label</i>"] * len(texts),
        layers=[tuple(side[0].numpy() for side in pair) for pair in outputs.responsibilities],
        log_decays=decays or [None] * 2,
        is_causal=config.is_causal,
    )
    return passage, [weights[0].numpy() for weights in outputs.attentions]


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a passage; whatever the console says is an error of the test."""
    said = []

    def open_passage(passage, **options):
        path = tmp_path / "explorer.html"
        write_explorer(path, passage)
        page = browser.new_page(**options)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or said.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-layer]")
        return page

    yield open_passage
    assert said == []


def averaged(passage, layer, side, head="average"):
    gamma = passage.layers[layer][side]
    return gamma.mean(0) if head == "average" else gamma[head]


def token(page, number):
    return page.locator(f'[data-token="{number}"]')


def listed(page, box, number):
    """Names and values of the lists in a box."""
    rows = page.locator(f"{box} ol").nth(number).locator("li").all()
    return [
        (row.locator("span").first.text_content(), float(row.locator(".number").text_content()[:-2])) for row in rows
    ]


def test_text_is_only_text(open_page):
    passage, _ = make_passage()
    page = open_page(passage)
    shown = page.locator("#tokens > span").all_text_contents()
    assert len(shown) == len(passage.texts)
    for found, text in zip(shown, passage.texts):
        assert found == text if text.strip() else found in ("·", "↵", "▯")
    assert "".join(passage.texts) == TEXT and "🙂" in shown and set(NASTY) <= set(shown)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == page.locator("#tokens script").count() == page.locator("b, i").count() == 0
    assert page.title() == page.locator("#title").text_content() == "<b>model</b> & co"
    token(page, 3).hover()
    assert "<i>label</i>" in page.locator("#token").text_content()


def test_nothing_in_the_data_can_run(tmp_path):
    passage, _ = make_passage()
    write_explorer(tmp_path / "page.html", passage)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script>") == 1 and "onerror=" in page
    (data,) = re.findall(r'id="about">(.*?)</script>', page)
    assert "<" not in data and json.loads(data)["texts"] == passage.texts
    policy = re.search(r'content="(default-src[^"]*)"', page).group(1)
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("sha256-") == 2


@pytest.mark.parametrize(
    "fields", [{}, {"forget_gate": True}, {"is_causal": False}], ids=["plain", "fading", "both ways"]
)
def test_weights_are_those_of_the_model(open_page, fields):
    passage, attentions = make_passage(**fields)
    page = open_page(passage)
    count = len(passage.texts)
    for layer in range(2):
        page.select_option("#layer", str(layer))
        page.wait_for_selector(f'body[data-layer="{layer}"]')
        for head in ("average", 1):
            page.select_option("#head", str(head))
            expected = attentions[layer].mean(0) if head == "average" else attentions[layer][head]
            for number in (0, 7, count - 1):
                read = page.evaluate(f"Array.from(readsFrom({number}))")
                np.testing.assert_allclose(read, expected[number], atol=0.01)
                read_by = page.evaluate(f"Array.from(readBy({number}))")
                np.testing.assert_allclose(read_by, expected[:, number], atol=0.01)


def test_hovering_shows_where_a_token_goes_and_reads(open_page):
    passage, attentions = make_passage()
    page = open_page(passage)
    gamma, number = averaged(passage, 1, 0), 9
    token(page, number).hover()
    through, sources = (listed(page, "#token", place) for place in range(2))
    best = np.argsort(-gamma[number])
    assert through[0][0] == f"component {best[0]}"
    for name, value in through:
        assert value == pytest.approx(100 * gamma[number][int(name.split()[1])], abs=1)
    weights = attentions[1].mean(0)[number]
    for name, value in sources:
        assert value == pytest.approx(100 * weights[int(name.split()[0])], abs=1)
    assert sources[0][1] == pytest.approx(100 * weights.max(), abs=1)
    assert all(int(name.split()[0]) <= number for name, _ in sources)
    assert page.locator("#tokens > .here").get_attribute("data-token") == str(number)
    token(page, number + 5).hover()
    assert listed(page, "#token", 1) != sources


def test_clicking_a_component_lights_its_tokens(open_page):
    passage, _ = make_passage()
    page = open_page(passage)
    gamma = averaged(passage, 1, 0)
    for button in page.locator("#components button").all()[:3]:
        button.click()
        component = int(button.get_attribute("data-component"))
        assert button.get_attribute("aria-pressed") == "true"
        lit = set(
            page.locator("#tokens > .lit").evaluate_all("spans => spans.map(span => Number(span.dataset.token))")
        )
        sure = {n for n, row in enumerate(gamma) if row.argmax() == component or row[component] > 0.11}
        close = {n for n, row in enumerate(gamma) if row[component] > 0.09}
        assert sure - close == set() and sure <= lit <= close | sure
        name, _ = listed(page, "#component", 0)[0]
        shares = {}
        for text, row in zip(passage.texts, gamma):
            shares[text] = shares.get(text, 0) + row[component]
        assert name == (max(shares, key=shares.get).replace(" ", "·").replace("\n", "↵") or "▯")
    page.keyboard.press("Escape")
    assert page.locator("#tokens > .lit").count() == 0


def test_switches(open_page):
    passage, _ = make_passage()
    page = open_page(passage)

    def usage():
        texts = page.locator("#components button").all_text_contents()
        return {int(text.split(":")[0]): float(text.split(":")[1][:-2]) for text in texts}

    assert page.locator("#layer").input_value() == "1"
    seen = []
    for layer, head, side in ((1, "average", 0), (0, "average", 0), (0, 1, 0), (0, 1, 1), (1, 0, 1)):
        page.select_option("#layer", str(layer))
        page.wait_for_selector(f'body[data-layer="{layer}"]')
        page.select_option("#head", str(head))
        page.check(f'input[name=side][value="{side}"]')
        expected = averaged(passage, layer, side, head).mean(0)
        assert usage() == pytest.approx({k: 100 * value for k, value in enumerate(expected)}, abs=1)
        seen.append(tuple(usage().items()))
    assert len(set(seen)) == len(seen)


def test_keyboard(open_page):
    page = open_page(make_passage()[0])
    token(page, 0).focus()
    for key, number in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowDown", 11), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.token") == str(number)
        assert f"at {number}," in page.locator("#token").text_content()
    page.keyboard.press("Enter")
    assert token(page, 0).evaluate("span => span.classList.contains('lit')")
    page.keyboard.press("Escape")
    assert page.locator("#tokens > .lit").count() == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.component") is not None


def test_light_and_dark_at_two_widths(open_page):
    passage, _ = make_passage()
    colours = set()
    for width, scheme in ((1280, "light"), (420, "dark")):
        page = open_page(passage, viewport={"width": width, "height": 800}, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


def softmax(scores):
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_a_large_model_fits_ten_megabytes(tmp_path, spread):
    """4 layers, 8 heads, 1,024 tokens, 128 components; noise, which packs worse than what a model makes."""
    noise = np.random.default_rng(0)
    layers = [tuple(softmax(spread * noise.normal(size=(8, 1024, 128))) for _ in range(2))]
    path = tmp_path / "explorer.html"
    write_explorer(path, Passage("large", ["word"] * 1024, ["x"] * 1024, layers, [None], True))
    # The other three layers are as large.
    assert 4 * path.stat().st_size < 10_000_000


def test_bytes_are_near_enough():
    gamma = softmax(np.random.default_rng(0).normal(size=(50, 128)) * 3)
    assert np.abs((quantised(gamma) / 255.0) ** 2 - gamma).max() < 0.004


def test_a_large_passage_is_fast(open_page):
    noise = np.random.default_rng(0)
    layers = [tuple(softmax(2 * noise.normal(size=(8, 1024, 128))) for _ in range(2))]
    page = open_page(Passage("large", [" word"] * 1024, ["x"] * 1024, layers, [None], True))
    page.evaluate("look(1000)")
    took = page.evaluate(
        "(() => { const began = performance.now(); look(1023); return performance.now() - began; })()"
    )
    assert took < 500
