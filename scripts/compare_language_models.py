"""Train several mixers and seeds by one protocol, and put them into one table beside the paper's.

    python scripts/compare_language_models.py scripts/configs/two_cores.yaml --dataset_name FOLDER \\
        --output_dir comparison --systems sdpa linear gma:64 gma:64:forget --seeds 0 1

The YAML file is one of `train_wikitext.py`; flags that are not of this script go to it. Systems: a mixer, for GMA with
its number of components and "forget" for a forget gate, and flags of their own after "@", as in
gma:64@learning_rate=4e-3@mixture_learning_rate=1e-2. Every run has a folder of its own, and one that was interrupted
goes on where it was. Writes comparison.json, comparison.md and perplexity.png, of the systems and seeds that were
asked for; runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import yaml
from arguments import parse
from files import write_figure, write_json, write_text
from matplotlib import pyplot
from train_wikitext import Arguments as TrainArguments
from training import plain_ticks, portable, refuse_other_arguments


# Table 3 of the paper: WikiText-103, 20,000 steps of 16,384 tokens, one A100.
PAPER = {
    "sdpa": (35.40, 0.06, 110_778),
    "linear": (44.81, 0.11, 41_693),
    "performer": (47.49, 0.23, 14_559),
    "mamba": (35.44, 0.21, 74_532),
    "gma:128": (42.62, 0.38, 22_912),
    "gma:256": (41.72, 0.21, 13_056),
}
NAMES = {
    "sdpa": "SDPA, learned positions",
    "sdpa_rope": "SDPA, rotary positions",
    "linear": "Linear Transformer",
    "performer": "Performer",
    "mamba": "Mamba",
    "eager": "MHA, eager",
}
MARKERS = "os^vDPX*<>"


def system_flags(system: str) -> list[str]:
    """Flags of `train_wikitext.py` for a system such as gma:64:forget@learning_rate=4e-3."""
    name, *settings = system.split("@")
    mixer, *parts = name.split(":")
    flags = ["--mixer", mixer]
    for part in parts:
        if part == "forget":
            # What forgets knows how far back things are: no positions.
            flags += ["--forget_gate", "true", "--position_embedding_type", "none"]
        elif part.isdigit():
            flags += ["--num_components", part]
        else:
            raise ValueError(f"--systems: {system!r} has {part!r}, which is neither components nor forget.")
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"--systems: {system!r} has {setting!r}, which is not name=value.")
        flags += [f"--{key}", value]
    return flags


def label(system: str) -> str:
    name, *settings = system.split("@")
    mixer, *parts = name.split(":")
    if mixer == "gma":
        components = next((part for part in parts if part.isdigit()), "")
        text = f"GMA K={components}" if components else "GMA"
        text += ", forget gate" if "forget" in parts else ""
    else:
        text = NAMES.get(mixer, mixer)
    return ", ".join([text, *settings])


def train_all(arguments, passed_on: list[str], folder: Path) -> list[dict]:
    """Results of all runs, made or found."""
    script = Path(__file__).with_name("train_wikitext.py")
    runs = [(system, seed) for seed in arguments.seeds for system in arguments.systems]
    outputs = [folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', system)}_seed{seed}" for system, seed in runs]
    flags = [checked_flags(arguments, passed_on, *run, output) for run, output in zip(runs, outputs)]
    found = []
    for number, ((system, seed), output) in enumerate(zip(runs, outputs)):
        results = output / "results.json"
        if not results.exists():
            print(f"run {number + 1} of {len(runs)}: {system}, seed {seed}", flush=True)
            command = (
                [*arguments.launcher.split(), str(script)] if arguments.launcher else [sys.executable, str(script)]
            )
            code = wait_for(subprocess.Popen([*command, *flags[number], "--resume_from_checkpoint", "latest"]))
            if code or not results.exists():
                how = f"with code {code}" if code else "early"
                raise SystemExit(
                    f"{system}, seed {seed} ended {how}; what is finished is kept, and the same command goes on."
                )
        content = json.loads(results.read_text())
        log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
        curve = [
            {"tokens": line["tokens"], "seconds": line["seconds"], "perplexity": line["evaluation"]["perplexity"]}
            for line in log
            if "evaluation" in line
        ]
        kept = (
            "parameters",
            "tokens",
            "seconds",
            "tokens_per_second",
            "best_step",
            "mixture",
            "arguments",
            "versions",
        )
        found.append(
            {"system": system, "seed": seed, "perplexity": content["validation"]["perplexity"], "curve": curve}
            | {name: content[name] for name in (*kept, "train_tokens", "validation_tokens", "vocab_size")}
        )
        write_json(folder / "comparison.json", found)
        write_report(found, folder)
    return found


def wait_for(process: subprocess.Popen) -> int:
    """The end of a run. What asks us to stop asks it: it saves, and then both leave."""
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            print("\nsaving; interrupt again to leave at once", flush=True)


def checked_flags(arguments, passed_on: list[str], system: str, seed: int, output: Path) -> list[str]:
    """The command line of a run, once `train_wikitext.py` has accepted it: before hours of other runs, not after."""
    flags = [arguments.config] if arguments.config else []
    flags += [*passed_on, *system_flags(system), "--seed", str(seed), "--output_dir", str(output)]
    parsed = parse(TrainArguments, "", flags)
    results = output / "results.json"
    if results.exists():
        content = json.loads(results.read_text())
        refuse_other_arguments(content["given"], portable(parsed, content["processes"]), output)
    return flags


def write_report(runs: list[dict], folder: Path) -> None:
    write_text(folder / "comparison.md", "\n".join(table(runs)) + "\n")
    plot(runs, folder / "perplexity.png")


def table(runs: list[dict]) -> list[str]:
    """Markdown lines: validation perplexity, mean and spread over seeds, and tokens a second, beside the paper's."""
    by_system = {}
    for run in runs:
        by_system.setdefault(run["system"], []).append(run)
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
    for system, of_system in sorted(by_system.items(), key=lambda item: _mean(item[1], "perplexity")):
        values = [run["perplexity"] for run in of_system]
        spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        paper = PAPER.get(system.split("@")[0])
        lines.append(
            f"| {label(system)} | {of_system[0]['parameters']:,} | {len(values)} | "
            f"{statistics.mean(values):.2f}{spread} | {max(run['tokens_per_second'] for run in of_system):,.0f} | "
            + (f"{paper[0]:.2f} +- {paper[1]:.2f} | {paper[2]:,} |" if paper else "| |")
        )
    return lines


def _mean(runs: list[dict], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


def plot(runs: list[dict], path: Path) -> None:
    pyplot.switch_backend("Agg")
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    systems = list(dict.fromkeys(run["system"] for run in runs))
    colours = pyplot.get_cmap("tab10").colors
    for number, system in enumerate(systems):
        for run in (run for run in runs if run["system"] == system):
            for panel, name, scale in zip(panels, ("tokens", "seconds"), (1e6, 60)):
                panel.plot(
                    [point[name] / scale for point in run["curve"]],
                    [point["perplexity"] for point in run["curve"]],
                    marker=MARKERS[number % len(MARKERS)],
                    color=colours[number % len(colours)],
                    markersize=4,
                    linewidth=1,
                    label=label(system) if run["seed"] == runs[0]["seed"] else None,
                )
    for panel, name in zip(panels, ("millions of tokens", "minutes of training")):
        panel.set(xlabel=name, yscale="log")
        plain_ticks(panel.yaxis)
        panel.grid(alpha=0.3, which="both")
    lowest = min(point["perplexity"] for run in runs for point in run["curve"])
    panels[0].set_ylim(0.95 * lowest, min(8 * lowest, 1.05 * max(p["perplexity"] for r in runs for p in r["curve"])))
    panels[0].set_ylabel("validation perplexity")
    panels[0].legend(fontsize=8)
    figure.suptitle("Validation perplexity while training, one line a seed")
    write_figure(path, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="YAML file of train_wikitext.py")
    parser.add_argument("--output_dir", required=True, help="folder for the runs and the comparison")
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["sdpa", "sdpa_rope", "linear", "performer", "mamba", "gma:64", "gma:128", "gma:64:forget"],
        help="mixers to train (default: %(default)s)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="seeds (default: %(default)s)")
    parser.add_argument("--launcher", default="", help='what to start runs with, such as "accelerate launch"')
    parser.add_argument("--report_only", action="store_true", help="table and plot from comparison.json, no training")
    arguments, passed_on = parser.parse_known_args()
    folder = Path(arguments.output_dir).expanduser().resolve()
    try:
        for system in arguments.systems:
            system_flags(system)
    except ValueError as error:
        parser.error(str(error))
    if arguments.config and not Path(arguments.config).is_file():
        parser.error(f"{arguments.config} is not a file.")
    if arguments.report_only:
        if not (folder / "comparison.json").is_file():
            parser.error(f"{folder} has no comparison.json.")
        runs = json.loads((folder / "comparison.json").read_text())
        write_report(runs, folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            runs = train_all(arguments, shared_tokenizer(arguments, passed_on, folder), folder)
        except KeyboardInterrupt:
            raise SystemExit("\nInterrupted; the same command goes on from here.") from None
    print("\n".join(table(runs)))
    print(f"written to {folder}: comparison.json, comparison.md, perplexity.png")


def shared_tokenizer(arguments, passed_on: list[str], folder: Path) -> list[str]:
    """Flags with a tokenizer trained once in place of --train_tokenizer."""
    from data.wikitext import load_text, train_tokenizer

    settings = (yaml.safe_load(Path(arguments.config).read_text()) if arguments.config else None) or {}
    flags = argparse.ArgumentParser(add_help=False)
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
