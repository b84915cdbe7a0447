"""Put runs of finetune_classifier.py side by side: a table, and their learning curves in one plot.

    python scripts/compare_classifiers.py pretrained_0 pretrained_1 scratch_0 scratch_1 --output_dir comparison

Runs that differ in nothing but the seed are one row, mean and spread. Writes comparison.json, comparison.md and
accuracy.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from comparison import MARKERS, mean_and_spread
from files import write_figure, write_json, write_text
from matplotlib import pyplot

from hub_upload.export import without_paths


SAME = (
    "start",
    "lora",
    "learning_rate",
    "epochs_wanted",
    "batch_size",
    "max_length",
    "examples",
    "trained_parameters",
)
ACCURACIES = ("best_validation_accuracy", "test_accuracy")


def groups(runs: list[dict]) -> dict[str, list[dict]]:
    found = {}
    for run in runs:
        found.setdefault(json.dumps([run[name] for name in SAME]), []).append(run)
    return {_title(of_group[0]): of_group for of_group in found.values()}


def _title(run: dict) -> str:
    start = "from scratch" if run["start"] == "from scratch" else "pretrained"
    adapters = ", LoRA" if run["lora"] else ""
    return f"{start}{adapters}, {run['examples']['train']:,} texts, learning rate {run['learning_rate']:g}"


def table(runs: list[dict]) -> list[str]:
    """Markdown lines."""
    lines = ["| start | trained parameters | epochs | seeds | best validation, % | test, % |"]
    lines.append("| --- |" + " ---: |" * 5)
    for title, of_group in groups(runs).items():
        cells = [
            mean_and_spread([100 * run[name] for run in of_group if run[name] is not None]) for name in ACCURACIES
        ]
        epochs = statistics.mean(run["epochs"] for run in of_group)
        lines.append(
            f"| {title} | {of_group[0]['trained_parameters']:,} | {epochs:.3g} | {len(of_group)} | "
            f"{' | '.join(cells)} |"
        )
    return lines


def plot(runs: list[dict], path: Path) -> None:
    pyplot.switch_backend("Agg")
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    colours = pyplot.get_cmap("tab10").colors
    for number, (title, of_group) in enumerate(groups(runs).items()):
        for run in of_group:
            axis.plot(
                [point["epoch"] for point in run["curve"]],
                [100 * point["accuracy"] for point in run["curve"]],
                marker=MARKERS[number % len(MARKERS)],
                color=colours[number % len(colours)],
                label=title if run is of_group[0] else None,
            )
    axis.set(xlabel="epochs of fine-tuning", ylabel="validation accuracy, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    write_figure(path, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="output folders of finetune_classifier.py")
    parser.add_argument("--output_dir", required=True, help="folder for the comparison")
    arguments = parser.parse_args()
    runs = []
    for name in arguments.runs:
        path = Path(name).expanduser() / "results.json"
        run = json.loads(path.read_text()) if path.is_file() else {}
        if not run.keys() >= set(SAME):
            parser.error(f"{name} is no finished run of finetune_classifier.py: there is no results.json of one.")
        # What is compared is to be shown to others, whose folders are not these.
        runs.append(without_paths(run))
    folder = Path(arguments.output_dir).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", runs)
    write_text(folder / "comparison.md", "\n".join(table(runs)) + "\n")
    plot(runs, folder / "accuracy.png")
    print("\n".join(table(runs)))
    print(f"written to {folder}: comparison.json, comparison.md, accuracy.png")


if __name__ == "__main__":
    main()
