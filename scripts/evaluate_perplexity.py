"""Perplexity of a saved causal language model on any text.

    python scripts/evaluate_perplexity.py --model_name_or_path small --text_file wiki.test.tokens
    python scripts/evaluate_perplexity.py --model_name_or_path small --dataset_name Salesforce/wikitext --split test
    python scripts/evaluate_perplexity.py --model_name_or_path small --text_file t.txt --window 1024 --stride 256

By default the text is one stream, cut into windows: every token is predicted once, from what its window has before it
(--stride: from at least `window - stride` tokens). With --per_text each text counts by itself, after a start token and
up to --window tokens, and the mean of their perplexities is taken: what the "perplexity" metric of `evaluate` does.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from arguments import parse
from data.wikitext import Blocks, load_text, load_tokenizer, tokenize
from files import write_json
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import baselines  # noqa: F401  (registers twins, and GMA, with the Auto classes)


@dataclass
class Arguments:
    model_name_or_path: str = field(metadata={"help": "A saved model with its tokenizer, or a Hub name."})
    text_file: str | None = field(default=None, metadata={"help": "Text to evaluate on (text, parquet, json, csv)."})
    dataset_name: str = field(default="Salesforce/wikitext", metadata={"help": "Hub dataset or local folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    split: str = field(default="validation", metadata={"help": "Split of --dataset_name."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "By default the model's own."})
    window: int | None = field(
        default=None, metadata={"help": "Tokens the model sees at once; by default its number of positions."}
    )
    stride: int | None = field(default=None, metadata={"help": "Tokens between windows; by default no overlap."})
    per_text: bool = field(
        default=False, metadata={"help": "Every row (or line of a text file) by itself, as `evaluate` does."}
    )
    max_tokens: int | None = field(
        default=None,
        metadata={"help": "Stop after so many tokens of a stream; then without figures by byte and word."},
    )
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Windows at a time."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, ..; by default a GPU if any."})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the result."})

    def __post_init__(self):
        if self.window is not None and self.window < 2:
            raise ValueError(f"--window must be at least 2, got {self.window}.")
        for name in ("stride", "max_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.per_text and self.stride is not None:
            raise ValueError("--stride has no meaning with --per_text.")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"--dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}.")
        if self.per_device_eval_batch_size < 1:
            raise ValueError(
                f"--per_device_eval_batch_size must be at least 1, got {self.per_device_eval_batch_size}."
            )
        if self.dataset_config_name is None and self.dataset_name == "Salesforce/wikitext":
            self.dataset_config_name = "wikitext-103-raw-v1"


@torch.no_grad()
def token_losses(model, inputs: torch.Tensor, labels: torch.Tensor, attention_mask=None) -> torch.Tensor:
    """Losses of labels (B, N), the tokens after inputs; zero where they are -100."""
    logits = model(input_ids=inputs, attention_mask=attention_mask, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).double()


def stream_losses(model, tokens: Blocks, window: int, stride: int, batch_size: int) -> tuple[float, int]:
    """Sum of the losses of all tokens of a stream, each counted once, and their number."""
    starts = [0]
    while starts[-1] + window < tokens.num_targets:
        starts.append(starts[-1] + stride)
    total, count = 0.0, 0
    for first in tqdm(range(0, len(starts), batch_size), desc="evaluating", unit="batch"):
        inputs, labels = [], []
        for start in starts[first : first + batch_size]:
            stop = min(start + window, tokens.num_targets)
            ids = torch.from_numpy(tokens._read(start, stop + 1).astype("int64"))
            target = ids[1:].clone()
            # What the window before has had.
            target[: max(window - stride, 0) if start else 0] = -100
            padding = (0, window - len(target))
            inputs.append(F.pad(ids[:-1], padding, value=tokens.end_of_text))
            labels.append(F.pad(target, padding, value=-100))
        inputs, labels = torch.stack(inputs).to(model.device), torch.stack(labels).to(model.device)
        total += token_losses(model, inputs, labels).sum().item()
        count += int((labels != -100).sum())
    return total, count


def text_perplexities(model, tokenizer, texts: list[str], window: int, batch_size: int) -> list[float]:
    """Perplexity of each text, after a start token and up to `window` tokens, as `evaluate`'s metric has it."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    found = []
    for first in tqdm(range(0, len(texts), batch_size), desc="evaluating", unit="batch"):
        rows = tokenizer(texts[first : first + batch_size], add_special_tokens=False, verbose=False)["input_ids"]
        rows = [[start, *row[: window - 1]] for row in rows]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [start] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        losses = token_losses(
            model, ids[:, :-1].to(model.device), labels.to(model.device), mask[:, :-1].to(model.device)
        )
        means = losses.sum(1).cpu() / (labels != -100).sum(1)
        found += means.exp().tolist()
    return found


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def main() -> None:
    arguments = parse(Arguments, __doc__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    files = {arguments.split: arguments.text_file} if arguments.text_file else None
    splits = load_text(arguments.dataset_name, arguments.dataset_config_name, arguments.text_column, files)
    if arguments.split not in splits:
        raise SystemExit(f"--split {arguments.split!r} is not there; there are {', '.join(splits)}.")
    rows = splits[arguments.split]
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path, dtype=arguments.dtype)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model_name_or_path {arguments.model_name_or_path!r} cannot be loaded: {error}") from None
    model = model.to(device).eval()
    tokenizer = load_tokenizer(arguments.tokenizer_name or arguments.model_name_or_path)
    if len(tokenizer) > model.config.vocab_size:
        raise SystemExit(f"The tokenizer has {len(tokenizer)} entries, the model {model.config.vocab_size}.")
    limit = getattr(model.config, "max_position_embeddings", None)
    if getattr(model.config, "position_embedding_type", "learned") != "learned":
        limit = None
    window = arguments.window or getattr(model.config, "max_position_embeddings", None) or 1024
    if limit is not None and window > limit:
        raise SystemExit(f"--window {window} is more than the model's {limit} positions.")
    if arguments.stride is not None and arguments.stride > window:
        raise SystemExit(f"--stride {arguments.stride} is more than the window of {window}: tokens would be left out.")
    results = {"model": arguments.model_name_or_path, "text": arguments.text_file or arguments.dataset_name}
    results |= {"window": window} if arguments.text_file else {"split": arguments.split, "window": window}
    if arguments.per_text:
        texts = [text for text in rows["text"] if text and text.strip()]
        if not texts:
            raise SystemExit("There is no text to evaluate on.")
        found = text_perplexities(model, tokenizer, texts, window, arguments.per_device_eval_batch_size)
        results |= {"texts": len(found), "mean_perplexity": sum(found) / len(found)}
    else:
        tokens = Blocks(tokenize(rows, tokenizer), window, tokenizer.eos_token_id)
        total_targets = tokens.num_targets
        if arguments.max_tokens is not None:
            tokens.num_targets = min(tokens.num_targets, arguments.max_tokens)
        stride = arguments.stride or window
        total, count = stream_losses(model, tokens, window, stride, arguments.per_device_eval_batch_size)
        results |= {"stride": stride, "tokens": count, "loss": total / count, "perplexity": _exp(total / count)}
        if tokens.num_targets == total_targets:
            size = sum(len(text.encode()) for text in rows["text"] if text)
            words = sum(len(text.split()) for text in rows["text"] if text)
            results |= {"bits_per_byte": total / math.log(2) / size, "word_perplexity": _exp(total / max(words, 1))}
    print(json.dumps(results, indent=1))
    if arguments.output_file:
        path = Path(arguments.output_file).expanduser().resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, results)


if __name__ == "__main__":
    main()
