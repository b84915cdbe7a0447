"""Train several mixers and seeds by one protocol, and put them into one table beside the paper's.

    python scripts/compare_language_models.py scripts/configs/two_cores.yaml --dataset_name FOLDER \\
        --output_dir comparison --systems sdpa linear gma:64 gma:64:forget --seeds 0 1

The YAML file is one of `train_wikitext.py`; flags that are not of this script go to it. Systems: a mixer, for GMA with
its number of components, "forget" for a forget gate, "gate" for an output gate, "hybrid" for local heads beside GMA's
or "local" for such heads alone, and flags of their own after "@", as in
gma:64:hybrid@sliding_window=64@mixture_learning_rate=1e-2. Every run has a folder of its own, and one that was
interrupted goes on where it was. Writes comparison.json, comparison.md and perplexity.png, of the systems and seeds
that were asked for; runs that are there already are not made again. With --speed_rounds, once all is trained, training
steps of all systems are timed in turn on a machine that is best left alone meanwhile, and the table has those speeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import yaml
from comparison import (
    Run,
    at_speeds,
    grouped,
    label,
    make_parser,
    make_run,
    mean_and_spread,
    measure_speeds,
    minutes_label,
    parse_known,
    plot_curves,
    train_all,
)
from files import write_figure, write_json, write_text
from matplotlib import pyplot
from train_wikitext import Arguments as TrainArguments
from train_wikitext import LanguageModelling
from training import plain_ticks


# Table 3 of the paper: WikiText-103, 20,000 steps of 16,384 tokens, one A100.
PAPER = {
    "sdpa": (35.40, 0.06, 110_778),
    "linear": (44.81, 0.11, 41_693),
    "performer": (47.49, 0.23, 14_559),
    "mamba": (35.44, 0.21, 74_532),
    "gma:128": (42.62, 0.38, 22_912),
    "gma:256": (41.72, 0.21, 13_056),
}
SYSTEMS = ["sdpa", "sdpa_rope", "linear", "performer", "mamba", "gma:64", "gma:128", "gma:64:forget"]
KEPT = ("parameters", "tokens", "seconds", "tokens_per_second", "best_step", "mixture", "arguments", "versions")
KEPT += ("mixed_precision", "train_tokens", "validation_tokens", "vocab_size")


def summary(run: Run, results: dict, evaluations: list[dict]) -> dict:
    curve = [
        {"tokens": line["tokens"], "seconds": line["seconds"], "perplexity": line["evaluation"]["perplexity"]}
        for line in evaluations
    ]
    kept = {name: results[name] for name in KEPT}
    return {"perplexity": results["validation"]["perplexity"], "curve": curve} | kept


def write_report(runs: list[dict], folder: Path) -> None:
    runs = at_speeds(runs, "tokens", folder)
    write_text(folder / "comparison.md", "\n".join(table(runs)) + "\n")
    plot(runs, folder)


def table(runs: list[dict]) -> list[str]:
    """Markdown lines: validation perplexity, mean and spread over seeds, and tokens a second, beside the paper's."""
    first = runs[0]
    arguments = first["arguments"]
    lines = [
        f"{first['tokens']:,} tokens each ({arguments['max_steps']} steps, context "
        f"{arguments['block_size']}), {arguments['num_hidden_layers']} layers of width {arguments['hidden_size']}, "
        f"vocabulary {first['vocab_size']:,}; validation over {first['validation_tokens']:,} tokens. The paper's: "
        f"WikiText-103, 328 million tokens, context 1024, 6 layers of width 512, vocabulary 50,257, one A100.",
        "",
        "| mixer | parameters | seeds | validation perplexity | tokens/s | perplexity, paper | tokens/s, paper |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for system, of_system in sorted(grouped(runs).items(), key=_perplexity):
        values = [run["perplexity"] for run in of_system]
        speed = max(run["tokens_per_second"] for run in of_system)
        paper = PAPER.get(system.split("@")[0])
        lines.append(
            f"| {label(system)} | {of_system[0]['parameters']:,} | {len(values)} | "
            f"{mean_and_spread(values)} | {speed:,.0f} | "
            + (f"{paper[0]:.2f} +- {paper[1]:.2f} | {paper[2]:,} |" if paper else "| |")
        )
    return lines


def _perplexity(item: tuple[str, list[dict]]) -> float:
    return statistics.mean(run["perplexity"] for run in item[1])


def plot(runs: list[dict], folder: Path) -> None:
    pyplot.switch_backend("Agg")
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    for panel, name, scale, unit in (
        (panels[0], "tokens", 1e6, "millions of tokens"),
        (panels[1], "seconds", 60, minutes_label(folder)),
    ):
        plot_curves(panel, runs, name, scale, "perplexity")
        panel.set(xlabel=unit, yscale="log")
        plain_ticks(panel.yaxis)
    values = [point["perplexity"] for run in runs for point in run["curve"]]
    panels[0].set_ylim(0.95 * min(values), min(8 * min(values), 1.05 * max(values)))
    panels[0].set_ylabel("validation perplexity")
    panels[0].legend(fontsize=8)
    figure.suptitle("Validation perplexity while training, one line a seed")
    write_figure(folder / "perplexity.png", figure)


def main() -> None:
    parser = make_parser(__doc__, SYSTEMS)
    parser.add_argument("config", nargs="?", help="YAML file of train_wikitext.py")
    parser.add_argument("--speed_rounds", type=int, default=0, help="time so many steps of each system, in turn")
    arguments, passed_on, folder = parse_known(parser)
    if any(word.endswith((".yaml", ".yml")) for word in passed_on):
        parser.error(f"one YAML file, got {arguments.config} and more: what systems differ in is part of their names.")
    if arguments.report_only:
        runs = json.loads((folder / "comparison.json").read_text())
        write_report(runs, folder)
    else:
        first = [arguments.config] if arguments.config else []
        first += shared_tokenizer(arguments, passed_on, folder)
        planned = [
            make_run(system, system, seed, folder, first, TrainArguments)
            for seed in arguments.seeds
            for system in arguments.systems
        ]
        script = Path(__file__).with_name("train_wikitext.py")
        runs = train_all(script, planned, folder, arguments.launcher, summary, write_report)
        if arguments.speed_rounds > 0:
            measure_speeds(planned, arguments.speed_rounds, TrainArguments, LanguageModelling, folder)
            write_report(runs, folder)
    print((folder / "comparison.md").read_text(), end="")
    print(f"written to {folder}: comparison.json, comparison.md, perplexity.png")


def shared_tokenizer(arguments, passed_on: list[str], folder: Path) -> list[str]:
    """Flags with a tokenizer trained once in place of --train_tokenizer."""
    from data.wikitext import load_text, train_tokenizer

    settings = (yaml.safe_load(Path(arguments.config).read_text()) if arguments.config else None) or {}
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("dataset_name", "dataset_config_name", "train_file", "text_column", "cache_dir", "train_tokenizer"):
        flags.add_argument(f"--{name}", default=settings.get(name))
    given = vars(flags.parse_known_args(passed_on)[0])
    if not int(given["train_tokenizer"] or 0):
        return passed_on
    cache_dir = given.pop("cache_dir")
    made_from = {name: value and str(value) for name, value in given.items()}
    path, record = folder / "tokenizer", folder / "tokenizer_made_from.json"
    if record.exists() and json.loads(record.read_text()) != made_from:
        raise SystemExit(f"{path} was trained otherwise ({record.read_text().strip()}); name another --output_dir.")
    if not record.exists():
        name = given["dataset_name"] or "Salesforce/wikitext"
        config = given["dataset_config_name"] or ("wikitext-103-raw-v1" if name == "Salesforce/wikitext" else None)
        files = {"train": given["train_file"]} if given["train_file"] else None
        splits = load_text(name, config, given["text_column"] or "text", files, cache_dir)
        texts = (row["text"] for row in splits["train"])
        train_tokenizer(texts, int(given["train_tokenizer"]), show_progress=True).save_pretrained(path)
        write_json(record, made_from)
    return [*passed_on, "--train_tokenizer", "0", "--tokenizer_name", str(path)]


if __name__ == "__main__":
    main()
