"""Perplexity of a saved causal language model on any text.

    python scripts/evaluate_perplexity.py --model_name_or_path small --text_file wiki.test.tokens
    python scripts/evaluate_perplexity.py --model_name_or_path small --dataset_name Salesforce/wikitext --split test
    python scripts/evaluate_perplexity.py --model_name_or_path small --text_file t.txt --window 1024 --stride 256
    python scripts/evaluate_perplexity.py --model_name_or_path small --text_file t.txt --window 8192 --piece 512 \\
        --by_position 16 --figure_file by_position.png

By default the text is one stream, cut into windows: every token is predicted once, from what its window has before it
(--stride: from at least `window - stride` tokens). With --per_text each text counts by itself, after a start token and
up to --window tokens, and the mean of their perplexities is taken: what the "perplexity" metric of `evaluate` does.

With --by_position the perplexity of tokens is told for each range of places in their window as well, documents of the
stream joined as they come: whether a model goes on well past the length it was trained at. --piece feeds a window in
pieces through the model's cache, so that long ones fit.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from arguments import parse, usable_device
from data.wikitext import Blocks, load_text, load_tokenizer, tokenize
from files import writable_folder, write_figure, write_json
from matplotlib import pyplot
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import baselines  # noqa: F401  (registers twins, and GMA, with the Auto classes)
from hub_upload.export import without_paths


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
    by_position: str | None = field(
        default=None,
        metadata={
            "help": 'Perplexity by place in the window: in so many equal ranges, or "doubling" ones (1, 2, 4, ..).'
        },
    )
    figure_file: str | None = field(default=None, metadata={"help": "PNG file for --by_position."})
    piece: int | None = field(
        default=None,
        metadata={"help": "Tokens of a window at a time, through the model's cache; by default all at once."},
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
        for name in ("stride", "max_tokens", "piece"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.per_text and self.stride is not None:
            raise ValueError("--stride has no meaning with --per_text.")
        if self.by_position is not None:
            if self.by_position != "doubling" and not (self.by_position.isdecimal() and int(self.by_position) > 0):
                raise ValueError(f"--by_position must be a number of ranges or doubling, got {self.by_position!r}.")
            for name in ("per_text", "stride"):
                if getattr(self, name):
                    raise ValueError(f"--{name} has no meaning with --by_position.")
        elif self.figure_file is not None:
            raise ValueError("--figure_file goes with --by_position.")
        if self.per_text and self.piece is not None:
            raise ValueError("--piece has no meaning with --per_text.")
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
    return _losses(model(input_ids=inputs, attention_mask=attention_mask, use_cache=False).logits, labels)


@torch.no_grad()
def token_losses_in_pieces(model, inputs: torch.Tensor, labels: torch.Tensor, piece: int) -> torch.Tensor:
    """The same, so many tokens at a time: no more logits are there at once, and the rest is in the cache."""
    losses, cache = [], None
    for some, of_some in zip(inputs.split(piece, dim=1), labels.split(piece, dim=1)):
        output = model(input_ids=some, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise SystemExit(f"--piece {piece}: {type(model).__name__} returns no `past_key_values` to go on from.")
        losses.append(_losses(output.logits, of_some))
    return torch.cat(losses, dim=1)


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).double()


def stream_losses(
    model, tokens: Blocks, window: int, stride: int, batch_size: int, piece: int | None = None
) -> tuple[float, int]:
    """Sum of the losses of all tokens of a stream, each counted once, and their number."""
    losses, counts = position_losses(model, tokens, window, stride, batch_size, piece)
    return losses.sum().item(), int(counts.sum())


def position_losses(
    model, tokens: Blocks, window: int, stride: int, batch_size: int, piece: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same at each place of a window, (window,) and (window,)."""
    starts = [0]
    while starts[-1] + window < tokens.num_targets:
        starts.append(starts[-1] + stride)
    sums, counts = torch.zeros(window, dtype=torch.float64), torch.zeros(window, dtype=torch.long)
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
        if piece is None or piece >= window:
            losses = token_losses(model, inputs, labels)
        else:
            losses = token_losses_in_pieces(model, inputs, labels, piece)
        sums += losses.sum(0).cpu()
        counts += (labels != -100).sum(0).cpu()
    return sums, counts


def position_ranges(window: int, kind: str) -> list[tuple[int, int]]:
    """Places of a window, from 0, in ranges from the first to before the second: so many, or each twice the last."""
    if kind == "doubling":
        bounds = [0, *(2**power for power in range((window - 1).bit_length())), window]
    else:
        bounds = [number * window // int(kind) for number in range(int(kind) + 1)]
    return list(pairwise(bounds))


def by_position(sums: torch.Tensor, counts: torch.Tensor, kind: str) -> list[dict]:
    """Perplexity of each range of places, from `sums` of losses and `counts` of tokens (window,)."""
    found = []
    for start, stop in position_ranges(len(sums), kind):
        count = int(counts[start:stop].sum())
        # A stream can be shorter than a window.
        if count:
            loss = sums[start:stop].sum().item() / count
            found.append({"from": start, "to": stop - 1, "tokens": count, "loss": loss, "perplexity": _exp(loss)})
    return found


def plot_positions(found: list[dict], trained: int | None, path: Path) -> None:
    """Perplexity against place, a step a range; `trained` is where the model's own positions end."""
    pyplot.switch_backend("Agg")
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    edges = [of["from"] for of in found] + [found[-1]["to"] + 1]
    axis.stairs([of["perplexity"] for of in found], edges, baseline=None, color="#332288", linewidth=2)
    if trained is not None and trained < edges[-1]:
        axis.axvline(trained, color="0.4", linestyle=":", label=f"max_position_embeddings, {trained:,}")
        axis.legend()
    axis.set(xlabel="tokens before it in the window", ylabel="perplexity", title="Perplexity by position")
    axis.grid(alpha=0.3)
    write_figure(path, figure)


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
    output_file, figure_file = (
        path and writable_folder(flag, Path(path).expanduser().parent) / Path(path).name
        for flag, path in (("--output_file", arguments.output_file), ("--figure_file", arguments.figure_file))
    )
    files = {arguments.split: arguments.text_file} if arguments.text_file else None
    splits = load_text(arguments.dataset_name, arguments.dataset_config_name, arguments.text_column, files)
    if arguments.split not in splits:
        raise SystemExit(f"--split {arguments.split!r} is not there; there are {', '.join(splits)}.")
    rows = splits[arguments.split]
    device = usable_device(arguments.device)
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
    if arguments.by_position and arguments.by_position != "doubling" and int(arguments.by_position) > window:
        raise SystemExit(f"--by_position {arguments.by_position} is more than the {window} places of a window.")
    if arguments.stride is not None and arguments.stride > window:
        raise SystemExit(f"--stride {arguments.stride} is more than the window of {window}: tokens would be left out.")
    results = {"model": arguments.model_name_or_path, "text": arguments.text_file or arguments.dataset_name}
    results |= {"window": window} if arguments.text_file else {"split": arguments.split, "window": window}
    if arguments.per_text:
        texts = [text for text in rows["text"] if text and text.strip()]
        if not texts:
            raise SystemExit("There is no text to evaluate on: all lines are blank.")
        found = text_perplexities(model, tokenizer, texts, window, arguments.per_device_eval_batch_size)
        results |= {"texts": len(found), "mean_perplexity": sum(found) / len(found)}
    else:
        tokens = Blocks(tokenize(rows, tokenizer), window, tokenizer.eos_token_id)
        total_targets = tokens.num_targets
        if arguments.max_tokens is not None:
            tokens.num_targets = min(tokens.num_targets, arguments.max_tokens)
        stride, batch_size = arguments.stride or window, arguments.per_device_eval_batch_size
        sums, counts = position_losses(model, tokens, window, stride, batch_size, arguments.piece)
        total, count = sums.sum().item(), int(counts.sum())
        results |= {"stride": stride, "tokens": count, "loss": total / count, "perplexity": _exp(total / count)}
        if tokens.num_targets == total_targets:
            size = sum(len(text.encode()) for text in rows["text"] if text)
            words = sum(len(text.split()) for text in rows["text"] if text)
            results |= {"bits_per_byte": total / math.log(2) / size, "word_perplexity": _exp(total / max(words, 1))}
        if arguments.by_position:
            results["by_position"] = by_position(sums, counts, arguments.by_position)
    print(json.dumps(results, indent=1))
    if output_file:
        # To be shown to others, whose folders are not these.
        write_json(output_file, without_paths(results))
    if figure_file:
        plot_positions(results["by_position"], getattr(model.config, "max_position_embeddings", None), figure_file)


if __name__ == "__main__":
    main()
