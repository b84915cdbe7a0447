"""The model card: what is known of a model, all of it from files in the exported folder or from the paper."""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel


ANALYSIS = "responsibilities"  # folder of what scripts/analyze_responsibilities.py writes

CITATION = """@article{huang2026gaussian,
  title = {Gaussian Mixture Attention: Linear-Time Sequence Mixing via Probabilistic Latent Routing},
  author = {Huang, Yongchao and Raza, Hassan},
  year = {2026}
}"""

# Tables 2 and 3 of the paper: data, split, metric, components -> value.
PAPER = {
    ("wikitext-103-raw-v1", "validation", "perplexity", 128): "42.62 ± 0.38 (20,000 steps of 16,384 tokens)",
    ("wikitext-103-raw-v1", "validation", "perplexity", 256): "41.72 ± 0.21 (20,000 steps of 16,384 tokens)",
    ("lra-listops", "test", "accuracy", 128): "0.4117 ± 0.0023 (20 epochs, length 2,000)",
    ("lra-text", "test", "accuracy", 128): "0.6497 ± 0.0021 (20 epochs, length 4,000)",
}

# Class -> pipeline, what it is in words, the rest of the code that uses it.
KINDS = {
    "GMAForCausalLM": (
        "text-generation",
        "causal language model",
        """inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))""",
    ),
    "GMAForMaskedLM": (
        "fill-mask",
        "masked language model",
        """inputs = tokenizer(f"It was {tokenizer.mask_token} of the", return_tensors="pt")
print(tokenizer.decode(model(**inputs).logits[0].argmax(-1)))""",
    ),
    "GMAForSequenceClassification": (
        "text-classification",
        "text classifier",
        """inputs = tokenizer("A text to classify", return_tensors="pt")
print(model.config.id2label[model(**inputs).logits.argmax(-1).item()])""",
    ),
    "GMAForTokenClassification": (
        "token-classification",
        "token classifier",
        """inputs = tokenizer("A text whose tokens have classes", return_tensors="pt")
print([model.config.id2label[label] for label in model(**inputs).logits[0].argmax(-1).tolist()])""",
    ),
    "GMAModel": (
        "feature-extraction",
        "encoder",
        """inputs = tokenizer("A text", return_tensors="pt")
print(model(**inputs).last_hidden_state)""",
    ),
}


def make_card(folder: Path, model: PreTrainedModel, hub_model_id: str) -> ModelCard:
    """The card of a folder that holds everything else already."""
    results = _read(folder / "results.json")
    statistics = _read(folder / ANALYSIS / "statistics.json")
    kind = type(model).__name__
    pipeline, words, _ = KINDS[kind]
    data, metrics = dataset(results), measured(results)
    card_data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["gma", "gaussian-mixture-attention", "linear-attention", "custom_code"],
        datasets=[data["type"]] if data and is_hub_name(data["type"]) else None,
        base_model=results.get("base_model") if is_hub_name(results.get("base_model")) else None,
        metrics=sorted({name for _, name, _ in metrics}) or None,
        model_name=f"GMA {words}",
        eval_results=[
            EvalResult(
                task_type=pipeline,
                dataset_type=measured_on["type"],
                dataset_name=measured_on["name"],
                dataset_config=measured_on["config"],
                dataset_split=split,
                metric_type=name,
                metric_name=f"{split} {name}",
                metric_value=value,
            )
            for split, name, value in metrics
            for measured_on in [dataset(results, split)]
        ]
        or None,
    )
    sections = [
        f"# GMA {words}",
        introduction(words, model, data),
        "## Use",
        usage(folder, kind, hub_model_id),
        "## Results",
        result_table(metrics, results, model.config.num_components),
        "## Routing",
        routing(results, statistics, sorted((folder / ANALYSIS).glob("*.png"))),
        "## Training",
        training(results, data),
        "## Model",
        architecture(model),
        "## Intended use and limits",
        limits(model),
        "## Citation",
        f"```bibtex\n{CITATION}\n```",
    ]
    body = "\n\n".join(sections)
    return ModelCard(f"---\n{card_data.to_yaml()}\n---\n\n{body}\n")


def dataset(results: dict, split: str = "train") -> dict | None:
    """Type (a Hub name, where there is one), name and configuration of a split; None where nothing says."""
    arguments = results.get("arguments", results)
    if "validation_perplexity_after" in results:
        return {"type": "pydoc-topics", "name": "the language reference that CPython carries", "config": None}
    if results.get("task") == "LongRangeArena":
        task = arguments["task"]
        return {"type": f"lra-{task}", "name": f"Long Range Arena, {task}", "config": None}
    name, config = arguments.get("dataset_name"), arguments.get("dataset_config_name")
    if arguments.get("train_file"):
        # Without a file of its own a split was held out of the training file.
        name, config = arguments.get(f"{split}_file") or arguments["train_file"], None
    return {"type": name, "name": f"{name} ({config})" if config else name, "config": config} if name else None


def is_hub_name(name: str | None) -> bool:
    """owner/name, and no folder here."""
    return bool(name) and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def measured(results: dict) -> list[tuple[str, str, float]]:
    """(split, metric, value) of all that was measured."""
    splits = {split: results.get(split) or {} for split in ("validation", "test")}
    if "validation_perplexity_after" in results:
        splits["validation"] = {"perplexity": results["validation_perplexity_after"]}
    for split, name in (("validation", "best_validation_accuracy"), ("test", "test_accuracy")):
        if results.get(name) is not None:
            splits[split] = {"accuracy": results[name]}
    return [
        (split, name, value)
        for split, figures in splits.items()
        for name, value in sorted(figures.items())
        # What is broken down further is in results.json.
        if isinstance(value, (int, float))
    ]


def introduction(words: str, model: PreTrainedModel, data: dict | None) -> str:
    trained = f", trained on {data['name']}" if data else ""
    return (
        f"A {words} of {model.num_parameters():,} parameters with Gaussian Mixture Attention{trained}. Each head "
        f"routes queries and keys through a learned mixture of {model.config.num_components} Gaussian components: "
        f"time is linear in length, and the responsibilities can be looked at."
    )


def usage(folder: Path, kind: str, hub_model_id: str) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    auto_class = next(name for name, of_one in config["auto_map"].items() if of_one.endswith(f".{kind}"))
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    lines = [
        f"from transformers import {auto_class}{', AutoTokenizer' if has_tokenizer else ''}",
        "",
        f'model = {auto_class}.from_pretrained("{hub_model_id}", trust_remote_code=True)',
    ]
    if has_tokenizer:
        # Without it, AutoTokenizer stops to ask.
        lines += [
            f'tokenizer = AutoTokenizer.from_pretrained("{hub_model_id}", trust_remote_code=True)',
            KINDS[kind][2],
        ]
    text = "\n".join(lines)
    note = "`trust_remote_code=True` runs the modules of this repository: read them, and pin a `revision`. With the "
    note += "package `modeling-gma` installed, `import modeling_gma` takes their place and nothing has to be trusted."
    if not has_tokenizer:
        note += f" No tokenizer came with it: its inputs are ids below {config['vocab_size']}"
        note += f", and {config['pad_token_id']} is padding." if config.get("pad_token_id") is not None else "."
    return f"```bash\npip install -r requirements.txt\n```\n\n```python\n{text}\n```\n\n{note}"


def result_table(metrics: list, results: dict, components: int) -> str:
    if not metrics:
        return "Nothing was measured: no results.json came with the checkpoint."
    lines = ["| split | metric | this model | the paper | of |", "| --- | --- | ---: | --- | --- |"]
    beside = False
    for split, name, value in metrics:
        data = dataset(results, split) or {"type": None, "name": "data that nothing names", "config": None}
        keys = [(of, split, name, components) for of in (data["config"], data["type"])]
        paper = next((PAPER[key] for key in keys if key in PAPER), None)
        beside = beside or paper is not None
        lines.append(f"| {split} | {name} | {value:.4g} | {paper or 'not measured there'} | {data['name']} |")
    source = "From [results.json](results.json)" + ("; the paper's from its tables 2 and 3." if beside else ".")
    return "\n".join([*lines, "", source])


def routing(results: dict, statistics: dict, figures: list[Path]) -> str:
    parts = []
    if results.get("mixture"):
        parts += [_table(results["mixture"]), "At the best step, from [results.json](results.json)."]
    for name, shown in list(statistics.get("shown", {}).items())[:1]:
        numbers = {figure: value for figure, value in shown.items() if isinstance(value, (int, float))}
        read = statistics.get("arguments", {})
        of = read.get("text_file") or read.get("dataset_name")
        parts += [
            f"Of {statistics['tokens']:,} tokens{f' of {of}' if of else ''}, layer {statistics['layer']}, "
            f"{statistics['side']} responsibilities, heads: {name}."
        ]
        for metric, shuffled in shown.get("permuted", {}).items():
            numbers[f"{metric}, with categories shuffled"] = shuffled["mean"]
        parts += [_table(numbers), f"From [{ANALYSIS}/statistics.json]({ANALYSIS}/statistics.json)."]
    parts += [f"![{path.stem.replace('_', ' ')}]({ANALYSIS}/{path.name})" for path in figures]
    return "\n\n".join(parts) or (
        "No analysis came with the checkpoint. `model(**inputs, output_responsibilities=True).responsibilities` gives "
        "query and key responsibilities of every layer."
    )


def training(results: dict, data: dict | None) -> str:
    if not results:
        return "Nothing is known of it: no results.json came with the checkpoint."
    arguments = results.get("arguments", {})
    rows = {"data": data and data["name"], "base model": results.get("base_model")}
    rows |= {name: results.get(name) for name in ("start", "tokens", "examples", "epochs", "best_step", "lora")}
    rows |= {name: results.get(name, arguments.get(name)) for name in ("seed", "learning_rate", "max_length")}
    rows |= {name: results.get(name) for name in ("seconds", "processes", "device", "mixed_precision")}
    rows |= {f"{name} version": value for name, value in results.get("versions", {}).items()}
    text = _table({name: value for name, value in rows.items() if value is not None})
    if arguments:
        listing = "\n".join(f"{name}: {value}" for name, value in sorted(arguments.items()) if value is not None)
        text += f"\n\n<details><summary>All arguments</summary>\n\n```yaml\n{listing}\n```\n\n</details>"
    return f"{text}\n\nFrom [results.json](results.json)."


def architecture(model: PreTrainedModel) -> str:
    config = model.config
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_components", "vocab_size")
    names += ("position_embedding_type", "is_causal", "forget_gate", "output_gate")
    rows = {name: getattr(config, name) for name in names}
    if config.position_embedding_type == "learned":
        rows["max_position_embeddings"] = config.max_position_embeddings
    if "Classification" in type(model).__name__:
        rows["labels"] = ", ".join(config.id2label[number] for number in range(config.num_labels))
    return _table({"parameters": model.num_parameters()} | rows) + "\n\nFrom [config.json](config.json)."


def limits(model: PreTrainedModel) -> str:
    lines = ["For research on attention with latent routing, and not for decisions about people."]
    lines.append("Apache-2.0 is the license of the code and of these weights; the data has terms of its own.")
    if type(model).__name__ in ("GMAForCausalLM", "GMAForMaskedLM"):
        lines.append(
            "It repeats what is in its training data, wrong and unfair things too; nothing was done to stop it."
        )
    if type(model).__name__ == "GMAForCausalLM":
        lines.append("It was not tuned to follow instructions.")
        lines.append("Assisted and speculative decoding are refused: the state cannot be rolled back.")
    if "Classification" in type(model).__name__:
        lines.append("It answers with one of its classes whatever it is given; figures hold for data like that above.")
    if model.config.position_embedding_type == "learned":
        lines.append(f"Sequences end at {model.config.max_position_embeddings} tokens: its positions are learned.")
    return "\n".join(f"- {line}" for line in lines)


def _table(rows: dict) -> str:
    return "\n".join(["| | |", "| --- | ---: |", *(f"| {name} | {_shown(value)} |" for name, value in rows.items())])


def _shown(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_shown(of_one)} {name}" for name, of_one in value.items())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
