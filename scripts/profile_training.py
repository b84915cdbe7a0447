"""Train whole decoders at several lengths: tokens a second, and bytes that they keep for backward, the loss aside.

    python scripts/profile_training.py scripts/configs/two_cores.yaml --systems sdpa sdpa_rope gma:64:forget:gate \\
        --lengths 1024 4096 16384 65536

The YAML file is one of `train_wikitext.py`, and systems are named as in compare_language_models.py. A step is forward,
backward and AdamW's step, on random tokens, in float32; systems take turns, and the best time counts. What would take
longer than --max_seconds a step is left out. Writes training.json, training.md and training.png, again after each
length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from arguments import parse
from comparison import MARKERS, label, system_flags
from files import write_figure, write_json, write_text
from matplotlib import pyplot
from memory import keep_freed_memory
from profile_mixers import System, environment, expected_seconds, saved_bytes, what_went_wrong
from profile_report import length_ticks
from tqdm.auto import tqdm
from train_wikitext import Arguments as TrainArguments
from training import plain_ticks

from baselines import build_twin
from modeling_gma import parameter_groups


class Steps:
    """Training steps of one system at one length."""

    def __init__(self, arguments: TrainArguments, batch: int, seed: int):
        torch.manual_seed(seed)
        config = arguments.config(vocab_size=arguments.train_tokenizer or 50257)
        self.model = build_twin(config, arguments.mixer)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, arguments.weight_decay), lr=1e-4)
        self.tokens = torch.randint(0, config.vocab_size, (batch, arguments.block_size))
        self.seconds = []

    def measure(self) -> None:
        start = time.perf_counter()
        self.model(self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def measure(arguments: argparse.Namespace) -> Iterator[list[dict]]:
    """Rows for each system and the lengths so far."""
    rows, before = [], {}
    progress = tqdm(total=len(arguments.lengths) * (arguments.repetitions + 1), desc="timing", unit="round")
    for length in arguments.lengths:
        batch = max(1, arguments.tokens // length)
        running = {}
        for system in arguments.systems:
            row = {"system": system, "length": length, "batch": batch, "status": "ok"}
            rows.append(row)
            mixer = system.split(":")[0].split("@")[0]
            power = System(mixer, "float32").grows
            expected = expected_seconds(before.get(system), length, batch, power)
            if expected is not None and expected > arguments.max_seconds:
                row["status"] = f"left out: about {expected:,.0f} s a step"
                continue
            try:
                steps = Steps(train_arguments(arguments, system, length), batch, arguments.seed)
                row["parameters"] = sum(parameter.numel() for parameter in steps.model.parameters())
                row["saved_bytes_per_token"] = saved_bytes(steps.model, steps.tokens) / (batch * length)
                steps.optimizer.zero_grad()
                running[system] = (row, steps)
            except Exception as error:
                row["status"] = what_went_wrong(error)
        # The first of each warms up.
        for _ in range(arguments.repetitions + 1):
            for system, (row, steps) in running.items():
                progress.set_postfix_str(f"N={length} {system}")
                if row["status"] == "ok":
                    try:
                        steps.measure()
                    except Exception as error:
                        row["status"] = what_went_wrong(error)
            progress.update()
        for system, (row, steps) in running.items():
            if row["status"] == "ok":
                seconds = steps.seconds[1:]
                row |= {"best_seconds": min(seconds), "median_seconds": statistics.median(seconds)}
                row["tokens_per_second"] = batch * length / min(seconds)
                before[system] = (min(seconds), length, batch)
        yield rows
    progress.close()


def train_arguments(arguments: argparse.Namespace, system: str, length: int) -> TrainArguments:
    flags = [*system_flags(system), "--block_size", str(length), "--output_dir", str(arguments.output_dir)]
    return parse(TrainArguments, "", ([arguments.config] if arguments.config else []) + flags)


def table(rows: list[dict]) -> list[str]:
    """Markdown lines: tokens a second and bytes kept, and both as multiples of the first system's."""
    lengths = sorted({row["length"] for row in rows})
    first = {row["length"]: row for row in rows if row["system"] == rows[0]["system"]}
    lines = [f"The second number in a cell is how many times that of {label(rows[0]['system'])} it is."]
    for name, unit in (
        ("tokens_per_second", "tokens/s"),
        ("saved_bytes_per_token", "bytes kept a token, the loss aside"),
    ):
        lines += ["", f"| {unit} | " + " | ".join(f"N={length}" for length in lengths) + " |"]
        lines.append("| --- |" + " ---: |" * len(lengths))
        for system in dict.fromkeys(row["system"] for row in rows):
            cells = []
            for row in (row for row in rows if row["system"] == system):
                if row["status"] == "ok":
                    beside = first[row["length"]].get(name)
                    cells.append(f"{row[name]:,.0f}" + (f", {row[name] / beside:.2f}x" if beside else ""))
                else:
                    cells.append(row["status"])
            lines.append(f"| {label(system)} | {' | '.join(cells)} |")
    return lines


def plot(rows: list[dict], path: Path) -> None:
    pyplot.switch_backend("Agg")
    figure, panel = pyplot.subplots(figsize=(7, 5), layout="constrained")
    for number, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
        measured = [row for row in rows if row["system"] == system and row["status"] == "ok"]
        panel.plot(
            [row["length"] for row in measured],
            [row["tokens_per_second"] for row in measured],
            marker=MARKERS[number % len(MARKERS)],
            label=label(system),
        )
    panel.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="tokens a second")
    panel.set_title("Training whole decoders")
    length_ticks(panel, sorted({row["length"] for row in rows}))
    plain_ticks(panel.yaxis)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    write_figure(path, figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", help="YAML file of train_wikitext.py (default: the paper's decoder)")
    systems = ["sdpa", "sdpa_rope", "gma:64:forget", "gma:64:forget:gate"]
    lengths = [1024, 4096, 16384, 65536]
    parser.add_argument("--systems", nargs="+", default=systems, help="what to train (default: %(default)s)")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=lengths, help="tokens in a sequence (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step, or one sequence (default: 4096)")
    parser.add_argument("--repetitions", type=int, default=5, help="steps that are timed (default: 5)")
    parser.add_argument("--max_seconds", type=float, default=60, help="longest step that is tried (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default: 0)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("training_speed"), help="for what is written (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if min(arguments.lengths) < 2:
        parser.error(f"--lengths must be at least 2, got {min(arguments.lengths)}.")
    if arguments.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, got {arguments.repetitions}.")
    arguments.systems = list(dict.fromkeys(arguments.systems))
    arguments.lengths = sorted(set(arguments.lengths))
    if arguments.config and not Path(arguments.config).is_file():
        parser.error(f"{arguments.config} is not a file.")
    try:
        for system in arguments.systems:
            system_flags(system)
    except ValueError as error:
        parser.error(str(error))
    # What the training script does not take should turn out before anything is measured.
    for system in arguments.systems:
        train_arguments(arguments, system, min(arguments.lengths))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    settings = {name: getattr(arguments, name) for name in ("tokens", "repetitions", "seed")}
    settings["config"] = arguments.config and Path(arguments.config).name
    folder = arguments.output_dir
    for rows in measure(arguments):
        write_json(folder / "training.json", {"rows": rows, "settings": settings, "environment": environment("cpu")})
        write_text(folder / "training.md", "\n".join(table(rows)) + "\n")
        if any(row["status"] == "ok" for row in rows):
            plot(rows, folder / "training.png")
    print((folder / "training.md").read_text(), end="")
    print(f"written to {folder}: " + ", ".join(sorted(path.name for path in folder.glob("training.*"))))


if __name__ == "__main__":
    main()
