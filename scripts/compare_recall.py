"""Train several mixers and seeds on associative recall, and show what each can recall of how much, from how far back.

    python scripts/compare_recall.py scripts/configs/two_cores_recall.yaml --output_dir comparison \\
        --systems sdpa_rope mamba gma:64:forget gma:64:hybrid@sliding_window=16 --num_pairs 8 16 --seeds 0 1

The YAML file is one of `train_recall.py`; flags that are not of this script go to it. With --num_pairs a model is
trained for each of the numbers, without it one for all that the YAML file has. Systems are named as in
compare_language_models.py; those with GMA heads and local heads in a layer are also tested without what the one or the
other bring. Every run has a folder of its own, and one that was interrupted goes on where it was.
Writes comparison.json, comparison.md and recall.png, of the systems, numbers and seeds that were asked for; runs that
are there already are not made again.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from pathlib import Path

from comparison import Run, grouped, label, make_parser, make_run, mean_and_spread, parse_known, plot_curves, train_all
from data.recall import num_keys
from files import write_figure, write_text
from matplotlib import pyplot
from train_recall import KINDS
from train_recall import Arguments as TrainArguments


SYSTEMS = ["sdpa", "sdpa_rope", "linear", "mamba", "gma:16", "gma:64", "gma:256", "gma:64:forget"]
KEPT = ("parameters", "tokens", "seconds", "tokens_per_second", "best_step", "mixture", "arguments")
KEPT += ("versions", "mixed_precision", "examples_in_split")


def summary(run: Run, results: dict, evaluations: list[dict]) -> dict:
    return {"test": results["test"]} | {name: results[name] for name in KEPT}


def with_silenced(runs: list[dict]) -> list[dict]:
    """The runs, and after each of a model with both kinds of heads the same model without the one and the other."""
    found = []
    for run in runs:
        found.append(run)
        for kind in KINDS:
            test = run["test"].get(f"without_{kind}")
            if test:
                found.append(run | {"test": test, "system": f"{run['system']}@without {kind.replace('_', ' ')}"})
    return found


def write_report(runs: list[dict], folder: Path) -> None:
    write_text(folder / "comparison.md", "\n".join(table(runs)) + "\n")
    plot(runs, folder / "recall.png")


def accuracies(runs: list[dict]) -> list[dict]:
    """Test accuracies in %, one for each system, seed, number of pairs and distance; that of any distance has None."""
    found = []
    for run in runs:
        for of in run["test"]["by_pairs"]:
            for part in [of, *of["by_distance"]]:
                distance = (part["from"], part["to"]) if "from" in part else None
                named = {"system": run["system"], "seed": run["seed"], "pairs": of["pairs"], "distance": distance}
                found.append(named | {"queries": part["queries"], "accuracy": 100 * part["accuracy"]})
    return found


def table(runs: list[dict]) -> list[str]:
    """Markdown lines: accuracy by number of pairs and by distance, mean and spread over seeds."""
    runs = with_silenced(runs)
    first, found = runs[0], accuracies(runs)
    arguments = first["arguments"]
    everything = _of(found, distance=None)
    pairs = sorted({of["pairs"] for of in everything})
    guesses = ", ".join(f"{best_guess(number, arguments['vocab_size']):.1f}" for number in pairs)
    lines = [
        f"Test accuracy in %. {arguments['length']} tokens an example, a vocabulary of {arguments['vocab_size']:,}, "
        f"{first['tokens']:,} tokens to train on in {arguments['max_steps']:,} steps, "
        f"{arguments['num_hidden_layers']} layers of width {arguments['hidden_size']}. To say "
        f"the value seen most often is right in {guesses} %. Distances are in tokens from a pair to its query, their "
        f"accuracies means over the numbers of pairs."
    ]
    order = sorted(grouped(runs), key=lambda system: _mean(_of(everything, system=system)), reverse=True)
    lines += ["", f"| mixer | parameters | seeds | {' | '.join(f'{number} pairs' for number in pairs)} |"]
    lines.append("| --- |" + " ---: |" * (2 + len(pairs)))
    for system in order:
        cells = [
            mean_and_spread([of["accuracy"] for of in _of(everything, system=system, pairs=number)])
            for number in pairs
        ]
        of_system = [run for run in runs if run["system"] == system]
        seeds = len({run["seed"] for run in of_system})
        lines.append(f"| {label(system)} | {of_system[0]['parameters']:,} | {seeds} | {' | '.join(cells)} |")
    distances = sorted({of["distance"] for of in found if of["distance"]})
    lines += ["", f"| mixer | {' | '.join(f'{low} to {high}' for low, high in distances)} |"]
    lines.append("| --- |" + " ---: |" * len(distances))
    for system in order:
        of_distances = [_of(found, system=system, distance=distance) for distance in distances]
        cells = [mean_and_spread([_mean(of) for of in grouped(part, "seed").values()]) for part in of_distances]
        lines.append(f"| {label(system)} | {' | '.join(cells)} |")
    return lines


def _of(found: list[dict], **wanted) -> list[dict]:
    return [of for of in found if all(of[name] == value for name, value in wanted.items())]


def _mean(found: list[dict]) -> float:
    return statistics.mean(of["accuracy"] for of in found)


def best_guess(pairs: int, vocab_size: int, examples: int = 10_000) -> float:
    """How often, in %, the value that an example has most often is the one asked for: values may come twice."""
    rng, values = random.Random(0), vocab_size - 1 - num_keys(vocab_size)
    drawn = (Counter(rng.randrange(values) for _ in range(pairs)) for _ in range(examples))
    return 100 * statistics.mean(max(counts.values()) for counts in drawn) / pairs


def plot(runs: list[dict], path: Path) -> None:
    """Accuracy against the number of pairs, and for each number against distance."""
    pyplot.switch_backend("Agg")
    found = accuracies(with_silenced(runs))
    pairs = sorted({of["pairs"] for of in found})
    figure, panels = pyplot.subplots(
        1, 1 + len(pairs), figsize=(3.6 * (1 + len(pairs)), 4.8), layout="constrained", sharey=True
    )
    plot_curves(panels[0], curves(_of(found, distance=None), lambda of: of["pairs"]), "x", 1, "accuracy")
    guesses = [best_guess(number, runs[0]["arguments"]["vocab_size"]) for number in pairs]
    panels[0].plot(pairs, guesses, color="0.4", linestyle=":", label="the value seen most often")
    panels[0].set(title="all distances", xlabel="pairs to remember", ylabel="test accuracy, %", ylim=(-3, 103))
    panels[0].set_xticks(pairs, labels=map(str, pairs))
    for panel, number, guess in zip(panels[1:], pairs, guesses):
        of_number = [of for of in _of(found, pairs=number) if of["distance"]]
        # Where in the range is no matter: ranges are as wide as they are far, and so is the axis.
        plot_curves(panel, curves(of_number, lambda of: of["distance"][0]), "x", 1, "accuracy")
        panel.axhline(guess, color="0.4", linestyle=":")
        panel.set(title=f"{number} pairs", xlabel="tokens from pair to query, at least")
        lows = sorted({of["distance"][0] for of in of_number})
        panel.set_xticks(lows, labels=map(str, lows))
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("Associative recall, one line a seed")
    write_figure(path, figure)


def curves(found: list[dict], x) -> list[dict]:
    """One curve a system and seed, as `plot_curves` takes them."""
    lines = {}
    for of in found:
        lines.setdefault((of["system"], of["seed"]), []).append({"x": x(of), "accuracy": of["accuracy"]})
    return [
        {"system": system, "curve": sorted(points, key=lambda point: point["x"])}
        for (system, _), points in lines.items()
    ]


def main() -> None:
    parser = make_parser(__doc__, SYSTEMS)
    parser.add_argument("config", nargs="?", help="YAML file of train_recall.py")
    parser.add_argument("--num_pairs", nargs="+", type=int, help="train a model for each of these numbers of pairs")
    arguments, passed_on, folder = parse_known(parser)
    if arguments.report_only:
        runs = json.loads((folder / "comparison.json").read_text())
        write_report(runs, folder)
    else:
        first = [arguments.config] if arguments.config else []
        numbers = {f"pairs{number}_": ["--num_pairs", str(number)] for number in arguments.num_pairs or []}
        planned = [
            make_run(name + system, system, seed, folder, [*first, *passed_on, *flags], TrainArguments)
            for seed in arguments.seeds
            for name, flags in (numbers or {"": []}).items()
            for system in arguments.systems
        ]
        script = Path(__file__).with_name("train_recall.py")
        runs = train_all(script, planned, folder, arguments.launcher, summary, write_report)
    print("\n".join(table(runs)))
    print(f"written to {folder}: comparison.json, comparison.md, recall.png")


if __name__ == "__main__":
    main()
