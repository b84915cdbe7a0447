"""A page to try GMA models: generate text and see how each token is routed, classify text.

    python hub_upload/space/app.py --generator small_hub --classifier classifier_hub

Either may be left out; each is a folder or a Hub name. Without flags the names are those in settings.json beside this
file, as `python -m hub_upload.demo` writes it for a Space. Models come by the package modeling_gma where it is
installed; --trust_remote_code takes the code that comes with them instead.
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


LONGEST = 400  # tokens of a text that are looked at


def load(auto_class, name: str, trust: bool):
    if not trust:
        if importlib.util.find_spec("modeling_gma") is None:
            raise SystemExit("The package modeling_gma is not installed: install it, or say --trust_remote_code.")
        import modeling_gma  # noqa: F401 (registers GMA with the Auto classes)
    model = auto_class.from_pretrained(name, trust_remote_code=trust).eval()
    return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust)


def room(model) -> int:
    """Tokens that a text and what goes on from it may have."""
    config = model.config
    return min(LONGEST, config.max_position_embeddings) if config.position_embedding_type == "learned" else LONGEST


@torch.no_grad()
def generate(model, tokenizer, prompt: str, new_tokens: int, temperature: float, seed: int) -> list[int]:
    """Ids of the prompt and what goes on from it."""
    new_tokens = min(int(new_tokens), room(model) - 1)
    ids = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt")["input_ids"]
    # The end of a prompt that is too long.
    ids = ids[:, -(room(model) - new_tokens) :]
    torch.manual_seed(int(seed))
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature > 0 else {"do_sample": False}
    )
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **sampling)[0].tolist()


@torch.no_grad()
def responsibilities(model, ids: list[int], layer: int, side: str) -> torch.Tensor:
    """(tokens, components) of a layer, averaged over its heads: of queries (reading) or keys (writing)."""
    outputs = model(torch.tensor([ids]), output_responsibilities=True, use_cache=False)
    reading, writing = outputs.responsibilities[int(layer)]
    return (reading if side == "reads" else writing)[0].mean(0)


def coloured(tokenizer, ids: list[int], gamma: torch.Tensor) -> str:
    """The tokens as HTML, in the colour of their largest component; the more of the token it has, the stronger."""
    share, component = gamma.max(-1)
    spans = []
    for number, (token, of, index) in enumerate(zip(ids, share.tolist(), component.tolist())):
        text = html.escape(tokenizer.decode([token])).replace("\n", "&#8629;<br>")
        # Steps of the golden angle keep the colours of neighbouring components apart.
        style = f"background: hsla({index * 137.508 % 360:.0f}, 75%, 55%, {0.15 + 0.7 * of:.2f})"
        spans.append(
            f'<span class="token" data-component="{index}" style="{style}" '
            f'title="token {number}: component {index}, {of:.0%}">{text}</span>'
        )
    return f'<div class="routing" style="line-height: 2; white-space: pre-wrap">{"".join(spans)}</div>'


@torch.no_grad()
def classify(model, tokenizer, text: str) -> dict[str, float]:
    ids = tokenizer(text or " ", return_tensors="pt", truncation=True, max_length=room(model))["input_ids"]
    probabilities = model(ids).logits[0].softmax(-1).tolist()
    return {model.config.id2label[number]: value for number, value in enumerate(probabilities)}


def build(settings: dict):
    """The page."""
    import gradio

    trust = settings.get("trust_remote_code", False)
    with gradio.Blocks(title="Gaussian Mixture Attention", analytics_enabled=False) as page:
        gradio.Markdown(
            "# Gaussian Mixture Attention\nEach head routes tokens through a few learned Gaussian components. Tokens "
            "of one colour go through the same component most; point at one to read which."
        )
        if settings.get("generator"):
            model, tokenizer = load(AutoModelForCausalLM, settings["generator"], trust)
            layers = model.config.num_hidden_layers
            with gradio.Tab("Generate"):
                prompt = gradio.Textbox(label="Prompt", value="The", lines=3, elem_id="prompt")
                with gradio.Row():
                    new_tokens = gradio.Slider(1, 200, value=40, step=1, label="New tokens")
                    temperature = gradio.Slider(0, 1.5, value=0.8, label="Temperature (0: the likeliest)")
                    seed = gradio.Number(value=0, precision=0, label="Seed")
                button = gradio.Button("Generate", variant="primary", elem_id="generate")
                with gradio.Row():
                    layer = gradio.Slider(0, layers - 1, value=layers - 1, step=1, label="Layer", visible=layers > 1)
                    side = gradio.Radio(["reads", "writes"], value="reads", label="Colour tokens by what each")
                shown = gradio.HTML(label="Routing", elem_id="routing")
                tokens = gradio.State([])

                def show(ids, layer, side):
                    return coloured(tokenizer, ids, responsibilities(model, ids, layer, side)) if ids else ""

                def run(prompt, new_tokens, temperature, seed, layer, side):
                    ids = generate(model, tokenizer, prompt, new_tokens, temperature, seed)
                    return ids, show(ids, layer, side)

                asked = [prompt, new_tokens, temperature, seed, layer, side]
                button.click(run, asked, [tokens, shown], api_name="generate")
                for control in (layer, side):
                    control.change(show, [tokens, layer, side], shown, api_name=False)
        if settings.get("classifier"):
            classifier, words = load(AutoModelForSequenceClassification, settings["classifier"], trust)
            with gradio.Tab("Classify"):
                text = gradio.Textbox(label="Text", lines=3, elem_id="text")
                ask = gradio.Button("Classify", variant="primary", elem_id="classify")
                label = gradio.Label(label="Classes", elem_id="classes")
                ask.click(lambda text: classify(classifier, words, text), text, label, api_name="classify")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", help="Causal language model: a folder or a Hub name.")
    parser.add_argument("--classifier", help="Text classifier: a folder or a Hub name.")
    parser.add_argument("--trust_remote_code", action="store_true", help="Run the code that comes with the models.")
    parser.add_argument("--port", type=int, default=7860, help="Port on this machine (default: %(default)s).")
    arguments = parser.parse_args()
    settings, beside = vars(arguments), Path(__file__).with_name("settings.json")
    if not (arguments.generator or arguments.classifier):
        if not beside.is_file():
            parser.error("Give --generator or --classifier.")
        settings = json.loads(beside.read_text(encoding="utf-8"))
    build(settings).launch(server_port=arguments.port)


if __name__ == "__main__":
    main()
