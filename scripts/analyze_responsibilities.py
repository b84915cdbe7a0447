"""What a GMA model routes where: the paper's statistics, tables and figures of any model on any text, and an explorer.

    python scripts/analyze_responsibilities.py --model_name_or_path small --text_file wiki.valid.tokens
    python scripts/analyze_responsibilities.py --model_name_or_path small --dataset_name Salesforce/wikitext
    cat notes.txt | python scripts/analyze_responsibilities.py --model_name_or_path small --text_file - --sequences 1
    python scripts/analyze_responsibilities.py --model_name_or_path small --text_file t.txt --heads each --layer 0

As in the paper by default: the first 64 sequences of 1024 tokens, the last layer, query responsibilities averaged over
the heads of each token, and ten surface forms of tokens. --heads each makes tables and figures of every head; all
statistics of every layer and head are in statistics.json and layers.csv whatever is asked for.

Labels of your own: --label_function kinds.py:kind names a function that takes the texts of a sequence's tokens and
returns a label for each. --label_column pos_tags takes them from the data, where --text_column then holds lists of
words and this column a label for each word.

In the output folder: statistics.json; report.md, beside the paper's figures; categories.csv, components.csv,
permutation.csv, layers.csv; figures as PNG and SVG; and explorer.html, a page to open in a browser.
"""

from __future__ import annotations

import csv
import io
import os
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from arguments import parse, usable_device
from data.labelled import LabelledText, load_labelled
from data.wikitext import load_tokenizer
from explorer import Passage, write_explorer
from files import writable_folder, write_json, write_text
from memory import keep_freed_memory, peak_memory
from responsibility_figures import FIGURES, GRID, Routing, visible, write_figures, write_grid
from responsibility_report import category_rows, component_rows, layer_rows, permutation_rows, report_lines
from tqdm.auto import tqdm
from training import versions
from transformers import AutoModel
from transformers.utils import logging

from hub_upload.export import without_paths
from modeling_gma import GMAModel
from modeling_gma.attention import GMAForgetGate
from modeling_gma.categories import token_texts
from modeling_gma.diagnostics import (
    RunningStatistics,
    effective_rank,
    half_life,
    permutation_baseline,
    principal_axes,
    purity,
    usage_overlap,
)


SIDES = ("query", "key")

# Tokens, spread over the text, that effective rank and principal axes are worked out from: more would cost time only.
MOMENTS = 8192

TABLES = ("categories.csv", "components.csv", "permutation.csv", "layers.csv")
FIGURES_WRITTEN = [f"{name}.{kind}" for name in (*FIGURES, GRID) for kind in ("png", "svg")]
WRITTEN = [*TABLES, *FIGURES_WRITTEN, "report.md", "statistics.json", "explorer.html"]

# Tokens whose responsibilities are kept for the PCA figures, and tokens listed for a component.
SAMPLE, FREQUENT = 4000, 8


@dataclass
class Arguments:
    model_name_or_path: str = field(metadata={"help": "A saved GMA model with its tokenizer, or a Hub name."})
    output_dir: str = field(default="responsibilities", metadata={"help": "Folder for what is written."})
    text_file: str | None = field(
        default=None, metadata={"help": "Text to analyse (text, parquet, json, csv), or - for standard input."}
    )
    dataset_name: str = field(default="Salesforce/wikitext", metadata={"help": "Hub dataset or local folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    split: str = field(default="validation", metadata={"help": "Split of --dataset_name."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "By default the model's own."})
    layer: int = field(default=-1, metadata={"help": "Layer of the tables and figures, from 0; -1 is the last."})
    side: str = field(default="query", metadata={"help": "Responsibilities of the tables and figures: query or key."})
    heads: str = field(default="average", metadata={"help": "Tables and figures of the average of heads, or of each."})
    sequences: int = field(default=64, metadata={"help": "Sequences to analyse, the first of the text."})
    length: int | None = field(
        default=None, metadata={"help": "Tokens in each; by default 1024, or the model's positions if it has fewer."}
    )
    passage: int = field(default=0, metadata={"help": "The sequence that heatmap, strip and explorer show, from 0."})
    label_function: str | None = field(
        default=None, metadata={"help": "FILE.py:NAME of a function of the texts of tokens that gives their labels."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": "Column with a label for each word, where the text is lists of words."}
    )
    leave_out: str | None = field(
        default=None,
        metadata={"help": "Text that the model reads but statistics leave out, such as <unk> in WikiText."},
    )
    permutations: int = field(default=100, metadata={"help": "Times that labels are shuffled for the baseline."})
    seed: int = field(default=0, metadata={"help": "Fixes the shuffles, and the tokens in the PCA figures."})
    per_device_eval_batch_size: int = field(default=2, metadata={"help": "Sequences at a time."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, ..; by default a GPU if any."})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})

    def __post_init__(self):
        least = {"sequences": 1, "length": 2, "passage": 0, "permutations": 2, "per_device_eval_batch_size": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"--{name} must be at least {smallest}, got {value}.")
        choices = {"side": ("query", "key"), "heads": ("average", "each")}
        choices |= {"dtype": ("auto", "float32", "bfloat16", "float16")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.label_function and self.label_column:
            raise ValueError("--label_function and --label_column do not go together.")
        if self.label_column and self.text_file == "-":
            raise ValueError("--label_column needs a file or dataset with columns, not standard input.")
        if self.dataset_config_name is None and self.dataset_name == "Salesforce/wikitext":
            self.dataset_config_name = "wikitext-103-raw-v1"


class Analysis:
    """Everything that one pass over a text gathers of a model."""

    def __init__(self, model: GMAModel, text: LabelledText, arguments: Arguments, layer: int):
        self.model, self.text, self.arguments, self.layer = model, text, arguments, layer
        config = model.config
        self.heads, self.components = model.layers[layer].mixer.num_mixture_heads, config.num_components
        # Groups are the heads and last their average; which of them have tables and figures of their own.
        each = arguments.heads == "each"
        self.shown = {f"head_{h}": h for h in range(self.heads)} if each else {"average": self.heads}
        every = max(text.count * text.length // MOMENTS, 1)
        self.statistics = [
            {side: RunningStatistics(len(text.names), every) for side in SIDES}
            for _ in range(config.num_hidden_layers)
        ]
        self.token_counts = torch.zeros(len(self.shown), self.components * len(text.tokenizer), dtype=torch.int32)
        # Whole from the start: what is kept of a batch would break up the memory that the next one takes again.
        most = min(SAMPLE, text.count * text.length)
        self.sample = torch.zeros(len(self.shown), most, self.components)
        self.sample_labels = torch.zeros(most, dtype=torch.long)
        self.sampled = 0
        self.passage = None
        # Sums over tokens of log-decays, (layers, heads), where memory fades.
        self.log_decays = torch.zeros(config.num_hidden_layers, self.heads, dtype=torch.float64)
        self.seconds = {"forward": 0.0, "statistics": 0.0}

    @torch.no_grad()
    def run(self) -> None:
        device, size = self.model.device, self.arguments.per_device_eval_batch_size
        total = self.text.count * self.text.length
        generator = np.random.default_rng(self.arguments.seed)
        sampled = np.sort(generator.choice(total, min(SAMPLE, total), replace=False))
        start = 0
        hooks = [
            gate.register_forward_hook(partial(self._add_decay, number)) for number, gate in enumerate(self._gates())
        ]
        progress = tqdm(total=total, desc="analysing", unit="token", unit_scale=True)
        for ids, labels, counts in self.text.batches(size):
            began = self._now()
            outputs = self.model(ids.to(device), use_cache=False, output_responsibilities=True).responsibilities
            between = self._now()
            of_batch = torch.from_numpy(sampled[(sampled >= start) & (sampled < start + ids.numel())] - start)
            self._take(outputs, ids, labels, counts, of_batch)
            self.seconds["forward"] += between - began
            self.seconds["statistics"] += self._now() - between
            # Not to be held while the next ones are made.
            del outputs
            start += ids.numel()
            progress.update(ids.numel())
        progress.close()
        for hook in hooks:
            hook.remove()
        count = self.statistics[0]["query"].count
        if not count:
            raise SystemExit(f"--leave_out {self.arguments.leave_out!r} leaves no token.")
        if self.arguments.leave_out and count == total:
            print(f"--leave_out {self.arguments.leave_out!r} is nowhere in the text: nothing was left out.")
        self.passage = self._passage()

    def _take(self, outputs, ids, labels, counts, sampled) -> None:
        mask = None if counts.all() else counts
        kept = counts.flatten()
        for number, (pair, statistics) in enumerate(zip(outputs, self.statistics)):
            for side, responsibilities in zip(SIDES, pair):
                assignments = statistics[side].update(responsibilities, labels, mask)
                if number == self.layer and side == self.arguments.side:
                    self._count_tokens(assignments[list(self.shown.values())].cpu(), ids.flatten()[kept])
                    sampled = sampled[kept[sampled]]
                    vectors = responsibilities[sampled // ids.shape[1], :, sampled % ids.shape[1]].transpose(0, 1)
                    vectors = torch.cat([vectors, vectors.mean(0, keepdim=True)])
                    place = slice(self.sampled, self.sampled + len(sampled))
                    self.sample[:, place] = vectors[list(self.shown.values())].cpu()
                    self.sample_labels[place] = labels.flatten()[sampled]
                    self.sampled += len(sampled)

    def _count_tokens(self, assignments: torch.Tensor, ids: torch.Tensor) -> None:
        pairs = assignments * len(self.text.tokenizer) + ids
        self.token_counts.scatter_add_(1, pairs, torch.ones_like(pairs, dtype=torch.int32))

    def _add_decay(self, layer: int, _, __, log_decay: torch.Tensor) -> None:
        self.log_decays[layer] += log_decay.sum((0, 2), dtype=torch.float64).cpu()

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def _passage(self) -> Passage:
        """One sequence once more, with all that the explorer shows of it."""
        ids, labels, _ = self.text[self.arguments.passage]
        decays = []
        hooks = [
            gate.register_forward_hook(lambda _, __, decay: decays.append(_numpy(decay[0]))) for gate in self._gates()
        ]
        ids = ids.unsqueeze(0).to(self.model.device)
        outputs = self.model(ids, use_cache=False, output_responsibilities=True).responsibilities
        for hook in hooks:
            hook.remove()
        return Passage(
            title=f"{Path(self.arguments.model_name_or_path).name}: what each token reads and writes",
            texts=token_texts(self.text.tokenizer, ids[0].tolist()),
            labels=[self.text.names[label] for label in labels],
            layers=[tuple(_numpy(side[0]) for side in pair) for pair in outputs],
            log_decays=decays or [None] * len(outputs),
            is_causal=self.model.config.is_causal,
        )

    def _gates(self) -> list[GMAForgetGate]:
        """One a layer, or none."""
        return [module for module in self.model.modules() if isinstance(module, GMAForgetGate)]

    def half_lives(self) -> list[list[float]] | None:
        """In tokens, of the memory of each layer's heads; None where nothing is forgotten."""
        if not self._gates():
            return None
        return half_life(self.log_decays / (self.text.count * self.text.length)).tolist()

    def layer_figures(self) -> list[dict]:
        """All statistics of every layer, side and head, as JSON has them."""
        layers = []
        for statistics in self.statistics:
            query, key = (statistics[side] for side in SIDES)
            shared = {
                "usage_overlap": usage_overlap(query.usage, key.usage),
                "effective_rank": effective_rank(query.moments, key.moments),
            }
            layers.append(
                {side: self._by_group(statistics[side].summary()) for side in SIDES} | {"both": self._by_group(shared)}
            )
        return layers

    def _by_group(self, figures: dict[str, torch.Tensor]) -> dict:
        rows = [{name: value[group].item() for name, value in figures.items()} for group in range(self.heads + 1)]
        return {"average": rows[-1], "heads": rows[:-1]}

    def routing(self, name: str) -> Routing:
        """What tables and figures of one of the groups shown are made of."""
        arguments, group = self.arguments, self.shown[name]
        other = SIDES[1 - SIDES.index(arguments.side)]
        statistics, others = self.statistics[self.layer][arguments.side], self.statistics[self.layer][other]
        usage, counts = statistics.usage[group], statistics.table[group]
        number = list(self.shown).index(name)
        vectors = self.sample[number, : self.sampled].double()
        axes, shares = principal_axes(statistics.moments_usage[group], statistics.moments[group], count=2)
        # One component has one axis, along which nothing lies.
        axes = torch.nn.functional.pad(axes, (0, 0, 0, 2 - len(axes)))
        passage = self.passage.layers[self.layer][SIDES.index(arguments.side)]
        plural = "s" if self.heads > 1 else ""
        of_heads = f"average of {self.heads} head{plural}" if name == "average" else f"head {group}"
        return Routing(
            title=f"layer {self.layer}, {of_heads}",
            names=self.text.names,
            usage=_numpy(usage),
            other_usage=_numpy(others.usage[group]),
            overlap=usage_overlap(usage, others.usage[group]).item(),
            side=arguments.side,
            table=_numpy(counts),
            purity=_numpy(purity(counts.double())),
            weighted_purity=statistics.summary()["weighted_purity"][group].item(),
            permuted=permutation_baseline(counts, arguments.permutations, arguments.seed),
            points=_numpy((vectors - usage.cpu()) @ axes.cpu().T),
            shares=[*shares.tolist(), 0.0][:2],
            point_labels=_numpy(self.sample_labels[: self.sampled]),
            point_components=_numpy(vectors.argmax(-1)),
            frequent_tokens=self._frequent_tokens(number),
            passage=passage.mean(0) if name == "average" else passage[group],
            texts=self.passage.texts,
        )

    def _frequent_tokens(self, number: int) -> list[list[str]]:
        """For each component the tokens that go to it most often."""
        counts = self.token_counts[number].view(self.components, -1)
        values, ids = counts.topk(min(FREQUENT, counts.shape[1]))
        return [
            [visible(self.text.tokenizer.decode([token])) for token in row[there].tolist()]
            for row, there in zip(ids, values > 0)
        ]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().float().numpy() if tensor.dtype == torch.bfloat16 else tensor.detach().cpu().numpy()


def remove_earlier(folder: Path) -> None:
    """Take away what an analysis wrote there before: its heads or layer may have been others."""
    for place in [folder, *folder.glob("head_*")]:
        # What marks a place as one of ours.
        if (place / "components.csv").exists() or (place / "statistics.json").exists():
            for name in WRITTEN:
                (place / name).unlink(missing_ok=True)
            if place != folder and not any(place.iterdir()):
                place.rmdir()


def write_csv(path: Path, rows: list[dict]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def load_model(name: str, device: str, dtype: str) -> GMAModel:
    try:
        model = AutoModel.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model_name_or_path {name!r} cannot be loaded: {error}") from None
    if not isinstance(model, GMAModel):
        raise SystemExit(f"--model_name_or_path {name!r} is no GMA model but a {type(model).__name__}.")
    heads = [getattr(layer.mixer, "num_mixture_heads", 0) for layer in model.layers]
    if not all(heads) or len(set(heads)) > 1:
        raise SystemExit(
            f"--model_name_or_path {name!r} must have as many GMA heads in every layer, and at least one, got "
            f"{heads}: its `layer_types` are {model.config.layer_types}."
        )
    return model.to(device).eval()


def main() -> None:
    arguments = parse(Arguments, __doc__)
    keep_freed_memory()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = usable_device(arguments.device)
    model = load_model(arguments.model_name_or_path, device, arguments.dtype)
    config = model.config
    layers = config.num_hidden_layers
    if not -layers <= arguments.layer < layers:
        raise SystemExit(f"--layer must be from 0 to {layers - 1}, or from the end, got {arguments.layer}.")
    limit = config.max_position_embeddings if config.position_embedding_type == "learned" else None
    length = arguments.length or min(1024, limit or 1024)
    if limit is not None and length > limit:
        raise SystemExit(f"--length {length} is more than the model's {limit} positions.")
    tokenizer = load_tokenizer(arguments.tokenizer_name or arguments.model_name_or_path)
    if len(tokenizer) > config.vocab_size:
        raise SystemExit(f"The tokenizer has {len(tokenizer)} entries, the model {config.vocab_size}.")
    folder = writable_folder("--output_dir", arguments.output_dir)
    text = load_labelled(arguments, tokenizer, length)
    if text.count < arguments.sequences:
        print(f"The text has {text.count} whole sequences of {length} tokens, not {arguments.sequences}.")
    if arguments.passage >= text.count:
        raise SystemExit(f"--passage must be below the number of sequences, {text.count}, got {arguments.passage}.")
    analysis = Analysis(model, text, arguments, arguments.layer % layers)
    analysis.run()
    print(write_results(analysis, folder))


def write_results(analysis: Analysis, folder: Path) -> str:
    """Write all files; returns what to say of them."""
    remove_earlier(folder)
    arguments = analysis.arguments
    layers, half_lives = analysis.layer_figures(), analysis.half_lives()
    results = {"layer": analysis.layer, "side": arguments.side, "tokens": analysis.statistics[0]["query"].count}
    results |= {"sequences": analysis.text.count, "length": analysis.text.length}
    results |= {"categories": analysis.text.names, "shown": {}}
    about = f"{results['tokens']:,} tokens: {results['sequences']} sequences of {results['length']}"
    about += f", without {arguments.leave_out}." if arguments.leave_out else "."
    of_layer = layers[analysis.layer]
    for name, group in analysis.shown.items():
        is_average = name == "average"
        routing = analysis.routing(name)
        figures, both = (
            of_layer[part]["average"] if is_average else of_layer[part]["heads"][group]
            for part in (arguments.side, "both")
        )
        place = folder if is_average else folder / name
        place.mkdir(exist_ok=True)
        write_csv(place / "categories.csv", category_rows(routing))
        write_csv(place / "components.csv", component_rows(routing))
        write_csv(place / "permutation.csv", permutation_rows(routing, figures))
        write_text(place / "report.md", "\n".join(report_lines(routing, figures, both, about, half_lives)))
        write_figures(routing, place)
        results["shown"][name] = (
            figures
            | both
            | {
                "permuted": {metric: dict(zip(("mean", "std"), pair)) for metric, pair in routing.permuted.items()},
                "category_tokens": dict(zip(routing.names, routing.table.sum(0).tolist())),
                "principal_axes": routing.shares,
            }
        )
    write_csv(folder / "layers.csv", layer_rows(layers))
    write_grid(layers, folder)
    write_explorer(folder / "explorer.html", analysis.passage)
    results |= {
        "layers": layers,
        "half_lives": half_lives,
        "seconds": analysis.seconds,
        "peak_memory_bytes": peak_memory(analysis.model.device),
        "num_components": analysis.components,
        "arguments": without_paths(asdict(arguments)),
        "versions": versions(),
    }
    write_json(folder / "statistics.json", results)
    share = analysis.seconds["statistics"] / analysis.seconds["forward"]
    lines = [
        f"{name}: {figures['active'] * analysis.components:.0f} of {analysis.components} components active, usage "
        f"entropy {figures['usage_entropy']:.3f}, token entropy {figures['token_entropy']:.3f}, purity "
        f"{figures['weighted_purity']:.3f}, NMI {figures['normalised_mutual_information']:.3f}."
        for name, figures in results["shown"].items()
    ]
    lines.append(
        f"Statistics took {share:.1%} of the time of the forward pass. Everything is in {folder}; explorer.html opens "
        f"in a browser."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
