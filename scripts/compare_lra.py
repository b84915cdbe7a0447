"""Train several mixers and seeds on tasks of Long Range Arena, and put them into one table beside the paper's.

    python scripts/compare_lra.py scripts/configs/two_cores_listops.yaml scripts/configs/two_cores_text.yaml \\
        --data_dir text=IMDB_FOLDER --output_dir comparison --systems sdpa linear gma:128 --seeds 0 1

A YAML file of `train_lra.py` for each task; flags that are not of this script go to all of them. Systems: a mixer, for
GMA with its number of components, and flags of their own after "@", as in gma:128@learning_rate=1e-3. Every run has a
folder of its own, and one that was interrupted goes on where it was. Writes comparison.json, comparison.md and
accuracy.png, of the tasks, systems and seeds that were asked for; runs that are there already are not made again. With
--speed_rounds, once all is trained, training steps of all systems are timed in turn on a machine that is best left
alone meanwhile, and the table has those speeds.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from arguments import parse
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
from files import write_figure, write_text
from matplotlib import pyplot
from train_lra import Arguments as TrainArguments
from train_lra import LongRangeArena


# Table 2 of the paper: 20 epochs, three seeds, lengths of 2,000 (ListOps) and 4,000 (Text).
PAPER = {
    "sdpa": {"listops": (41.33, 0.49), "text": (64.03, 0.89)},
    "linformer": {"listops": (39.15, 0.13), "text": (58.82, 1.60)},
    "linear": {"listops": (40.03, 0.70), "text": (64.88, 0.13)},
    "performer": {"listops": (40.65, 0.85), "text": (63.38, 0.73)},
    "mamba": {"listops": (42.28, 1.75), "text": (82.12, 0.40)},
    "gma:128": {"listops": (41.17, 0.23), "text": (64.97, 0.21)},
}
SYSTEMS = ["sdpa", "linformer", "linear", "performer", "mamba", "gma:128"]
TITLES = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image", "pathfinder": "Pathfinder"}
KEPT = ("parameters", "examples", "seconds", "examples_per_second", "best_step", "majority_class", "arguments")
KEPT += ("versions", "peak_memory_bytes", "mixed_precision", "examples_in_split")
# Batches are of many lengths: so many of them are timed, from all over an epoch.
TIMED_BATCHES = 8


def summary(run: Run, results: dict, evaluations: list[dict]) -> dict:
    curve = [
        {"examples": line["examples"], "seconds": line["seconds"], "accuracy": 100 * line["evaluation"]["accuracy"]}
        for line in evaluations
    ]
    figures = {"task": results["arguments"]["task"], "accuracy": 100 * results["test"]["accuracy"], "curve": curve}
    return figures | {name: results[name] for name in KEPT}


def write_report(runs: list[dict], folder: Path) -> None:
    runs = at_speeds(runs, "examples", folder)
    write_text(folder / "comparison.md", "\n".join(table(runs)) + "\n")
    plot(runs, folder)


def table(runs: list[dict]) -> list[str]:
    """Markdown lines: test accuracy at the best validation, mean and spread over seeds, beside the paper's."""
    by_task = grouped(runs, "task")
    lines = []
    for task, of_task in by_task.items():
        first = of_task[0]
        arguments, sizes = first["arguments"], first["examples_in_split"]
        lines.append(
            f"- {TITLES[task]}: lengths up to {arguments['max_length']:,}, {sizes['train']:,} examples to train on, "
            f"{first['examples']:,} seen, {sizes['test']:,} to test; {arguments['num_hidden_layers']} layers of width "
            f"{arguments['hidden_size']}. The largest class is {100 * first['majority_class']:.2f} % of the examples."
        )
    columns = [f"{TITLES[task]}, %" for task in by_task]
    columns += ["average"] if len(by_task) > 1 else []
    columns += [f"{TITLES[task]}, examples/s" for task in by_task]
    columns += [f"{TITLES[task]}, peak memory" for task in by_task]
    columns += [f"{TITLES[task]}, paper" for task in by_task]
    lines += ["", f"| mixer | seeds | {' | '.join(columns)} |", "| --- |" + " ---: |" * (1 + len(columns))]
    order = {system: _average(of_system) for system, of_system in grouped(runs).items()}
    for system in sorted(order, key=order.get, reverse=True):
        of_tasks = {task: [run for run in by_task[task] if run["system"] == system] for task in by_task}
        cells = [mean_and_spread([run["accuracy"] for run in of_task]) for of_task in of_tasks.values()]
        if len(by_task) > 1:
            cells.append(f"{order[system]:.2f}" if all(of_tasks.values()) else "")
        speeds = [max((run["examples_per_second"] for run in of_task), default=None) for of_task in of_tasks.values()]
        cells += ["" if speed is None else f"{speed:,.1f}" for speed in speeds]
        peaks = [max((run["peak_memory_bytes"] or 0 for run in of_task), default=0) for of_task in of_tasks.values()]
        cells += [f"{peak / 1e9:.2f} GB" if peak else "" for peak in peaks]
        paper = PAPER.get(system.split("@")[0], {})
        cells += ["{:.2f} +- {:.2f}".format(*paper[task]) if task in paper else "" for task in by_task]
        seeds = min(len(of_task) for of_task in of_tasks.values())
        lines.append(f"| {label(system)} | {seeds} | {' | '.join(cells)} |")
    return lines


def _average(runs: list[dict]) -> float:
    """Over tasks, of the mean over seeds."""
    tasks = grouped(runs, "task").values()
    return statistics.mean(statistics.mean(run["accuracy"] for run in of_task) for of_task in tasks)


def plot(runs: list[dict], folder: Path) -> None:
    pyplot.switch_backend("Agg")
    by_task = grouped(runs, "task")
    figure, panels = pyplot.subplots(
        1, len(by_task), figsize=(6 * len(by_task), 5), layout="constrained", squeeze=False
    )
    for panel, (task, of_task) in zip(panels[0], by_task.items()):
        plot_curves(panel, of_task, "seconds", 60, "accuracy")
        panel.axhline(100 * of_task[0]["majority_class"], color="0.5", linestyle=":", label="largest class")
        panel.set(title=TITLES[task], xlabel=minutes_label(folder), ylabel="validation accuracy, %")
    panels[0][0].legend(fontsize=8)
    figure.suptitle("Validation accuracy while training, one line a seed")
    write_figure(folder / "accuracy.png", figure)


def main() -> None:
    parser = make_parser(__doc__, SYSTEMS)
    parser.add_argument("config", nargs="+", help="YAML files of train_lra.py, one a task")
    parser.add_argument("--data_dir", nargs="+", default=[], help="local files of tasks, each as TASK=FOLDER")
    parser.add_argument("--speed_rounds", type=int, default=0, help="time so many rounds of steps of each, in turn")
    arguments, passed_on, folder = parse_known(parser)
    if arguments.report_only:
        runs = json.loads((folder / "comparison.json").read_text())
        write_report(runs, folder)
    else:
        folders = {}
        for given in arguments.data_dir:
            task, separator, path = given.partition("=")
            if not separator or task not in TITLES:
                parser.error(f"--data_dir must be TASK=FOLDER with a task of {list(TITLES)}, got {given!r}.")
            folders[task] = ["--data_dir", path]
        tasks = {}
        for config in arguments.config:
            task = parse(TrainArguments, "", [config, *passed_on, "--output_dir", str(folder)]).task
            if task in tasks:
                parser.error(f"{tasks[task]} and {config} are both of the task {task}.")
            tasks[task] = config
        planned = [
            make_run(
                f"{task}_{system}", system, seed, folder, [config, *passed_on, *folders.get(task, [])], TrainArguments
            )
            for seed in arguments.seeds
            for task, config in tasks.items()
            for system in arguments.systems
        ]
        script = Path(__file__).with_name("train_lra.py")
        runs = train_all(script, planned, folder, arguments.launcher, summary, write_report)
        if arguments.speed_rounds > 0:
            measure_speeds(planned, arguments.speed_rounds, TrainArguments, LongRangeArena, folder, TIMED_BATCHES)
            write_report(runs, folder)
    print((folder / "comparison.md").read_text(), end="")
    print(f"written to {folder}: comparison.json, comparison.md, accuracy.png")


if __name__ == "__main__":
    main()
