"""Tables and plots of what `profile_mixers.py` measured.

python scripts/profile_report.py profile_output     # writes them again, and prints the short table of the README
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from files import write_figure, write_text
from matplotlib import pyplot


# What is compared with what, in the table of ratios; a variant of GMA is compared with GMA.
OPPONENTS = ("sdpa", "sdpa_rope", "linear", "mamba")
COLOURS = pyplot.colormaps["tab20"]


def write_report(results: dict, folder: Path) -> list[str]:
    """Write report.md, throughput.png and memory.png beside the results; return the report's lines."""
    lines = report_lines(results)
    write_text(folder / "report.md", "\n".join(lines) + "\n")
    plot(results["blocks"], folder / "throughput.png", _throughput, "tokens/s, forward and backward")
    plot(results["blocks"], folder / "memory.png", _saved, "bytes kept for backward, for each sequence")
    return lines


def report_lines(results: dict) -> list[str]:
    about, settings = results["environment"], results["settings"]
    lines = [
        "# Mixers beside each other",
        "",
        f"{about['device']}, threads: {about['threads']}, {settings['dtype']} where nothing else is said, PyTorch "
        f"{about['torch']}, transformers {about['transformers']}. Best of up to {settings['repetitions']} repetitions "
        f"that take turns. In brackets: the share of the arithmetic limit, which is what the bare matrix products of "
        f"that shape would reach in the same run.",
        "",
    ]
    for direction in dict.fromkeys(row["direction"] for row in results["blocks"]):
        rows = [row for row in results["blocks"] if row["direction"] == direction]
        if any("train" in row for row in rows):
            lines += [f"## {direction.capitalize()}: tokens/s, forward and backward", ""]
            lines += grid(rows, lambda row: speed_cell(row, "train"))
            lines += [f"## {direction.capitalize()}: tokens/s, forward", ""]
            lines += grid(rows, lambda row: speed_cell(row, "forward"))
            lines += ratio_lines(rows, direction)
        if any("saved_bytes" in row for row in rows):
            lines += [f"## {direction.capitalize()}: megabytes kept for backward / at the peak", ""]
            lines += grid([row for row in rows if "saved_bytes" in row or "memory_status" in row], memory_cell)
        lengths = {}
        for row in rows:
            if trouble(row):
                lengths.setdefault((row["system"], trouble(row)), []).append(str(row["length"]))
        notes = [f"- {system}, N={', '.join(of)}: {what}" for (system, what), of in lengths.items()]
        lines += [*notes, ""] if notes else []
    if results["decoding"]:
        lines += decoding_lines(results["decoding"])
    return lines


def summary_lines(results: dict) -> list[str]:
    """The short table: GMA with 128 components beside its opponents, in tokens/s forward and backward."""
    rows = results["blocks"]
    times = {(row["direction"], row["system"], row["length"]): row["train"] for row in rows if "train" in row}
    lengths = sorted({row["length"] for row in rows})
    body = []
    for direction in dict.fromkeys(row["direction"] for row in rows):
        for opponent in OPPONENTS:
            cells = [_ratio(times, (direction, "gma:128", n), (direction, opponent, n)) for n in lengths]
            if any(cells):
                body.append([f"{direction}, over {opponent}", *cells])
    return table(["GMA, K=128", *(f"N={n}" for n in lengths)], body)


def _ratio(times: dict, place, opponent, kind: str = "best_seconds") -> str:
    return f"{times[opponent][kind] / times[place][kind]:.2f}x" if place in times and opponent in times else ""


def trouble(row: dict) -> str | None:
    return row["status"] if row["status"] != "ok" else row.get("memory_status")


def table(head: list[str], body: list[list[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)] + [""]


def grid(rows: list[dict], cell) -> list[str]:
    """A line for each system and a column for each length."""
    lengths = sorted({row["length"] for row in rows})
    by_place = {(row["system"], row["length"]): row for row in rows}
    systems = dict.fromkeys(row["system"] for row in rows)
    body = [
        [label(system), *(cell(by_place[system, n]) if (system, n) in by_place else "" for n in lengths)]
        for system in systems
    ]
    return table(["mixer", *(f"N={n}" for n in lengths)], body)


def label(system: str) -> str:
    mixer, *parts = system.split(":")
    if mixer != "gma":
        return " ".join([mixer, *parts])
    return ", ".join(["GMA", *(f"K={part}" if part.isdigit() else part.replace("=", " ") for part in parts)])


def speed_cell(row: dict, kind: str) -> str:
    if kind not in row:
        return short(row)
    return f"{row[kind]['tokens_per_second']:,.0f} ({row[kind]['share_of_limit']:.0%})"


def memory_cell(row: dict) -> str:
    if "saved_bytes" not in row:
        return short(row)
    peak = f"{row['peak_bytes'] / 1e6:,.0f}" if "peak_bytes" in row else "?"
    return f"{row['saved_bytes'] / 1e6:,.0f} / {peak}"


def short(row: dict) -> str:
    return (trouble(row) or "").split(":")[0]


def ratio_lines(rows: list[dict], direction: str) -> list[str]:
    """How many times the tokens/s of another mixer, in the same run, and how many times at both arithmetic limits."""
    times = {(row["system"], row["length"]): row["train"] for row in rows if "train" in row}
    lengths = sorted({length for _, length in times})
    systems = list(dict.fromkeys(row["system"] for row in rows))
    pairs = []
    for system in (name for name in systems if name.startswith("gma")):
        plain = ":".join(system.split(":")[:2])
        opponents = [name for name in OPPONENTS if name in systems] if system == plain else [plain]
        pairs += [(system, opponent) for opponent in opponents]
    pairs += [("sdpa:bfloat16", "sdpa")]
    body = []
    for system, opponent in pairs:
        pairs_by_length = [((system, n), (opponent, n)) for n in lengths]
        measured = [_ratio(times, *pair) for pair in pairs_by_length]
        limits = [_ratio(times, *pair, "limit_seconds") for pair in pairs_by_length]
        if any(measured):
            cells = [ratio and f"{ratio} ({limit})" for ratio, limit in zip(measured, limits)]
            body.append([f"{label(system)} over {label(opponent)}", *cells])
    if not body:
        return []
    return [
        f"## {direction.capitalize()}: ratios of tokens/s, forward and backward",
        "",
        "In brackets: what they would be if both were at their arithmetic limits.",
        "",
        *table(["", *(f"N={n}" for n in lengths)], body),
    ]


def decoding_lines(rows: list[dict]) -> list[str]:
    lines = ["## Decoding, batch 1, the paper's WikiText-103 decoder: tokens/s, and megabytes of cache", ""]
    contexts = sorted({row["context"] for row in rows if "context" in row})
    body = []
    for system in dict.fromkeys(row["system"] for row in rows):
        places = {row["context"]: row for row in rows if row["system"] == system and "best_seconds" in row}
        cells = [
            f"{places[c]['tokens_per_second']:.1f}, {places[c]['cache_bytes'] / 1e6:,.1f} MB" if c in places else ""
            for c in contexts
        ]
        body.append([label(system), *cells])
    notes = [f"- {row['system']}: {row['status']}" for row in rows if row["status"] != "ok"]
    lines += table(["mixer", *(f"{c} tokens of context" for c in contexts)], body)
    return [*lines, *dict.fromkeys(notes), ""] if notes else lines


def _throughput(row: dict) -> float | None:
    return row["train"]["tokens_per_second"] if "train" in row else None


def _saved(row: dict) -> float | None:
    # Of a sequence: a batch of short ones holds as many tokens as one long one.
    return row.get("saved_bytes") and row["saved_bytes"] / row["batch"]


def plot(rows: list[dict], path: Path, value, title: str) -> None:
    """One panel a direction, one line a system, both axes logarithmic. Nothing where nothing was measured."""
    pyplot.switch_backend("Agg")
    rows = [row for row in rows if value(row) and _is_in_plots(row["system"])]
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    if not directions:
        return
    systems = list(dict.fromkeys(row["system"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(directions), figsize=(6.4 * len(directions), 4.8), squeeze=False, layout="constrained"
    )
    for axis, direction in zip(axes[0], directions):
        for number, system in enumerate(systems):
            points = sorted(
                (row["length"], value(row))
                for row in rows
                if row["system"] == system and row["direction"] == direction
            )
            if points:
                is_gma = system.startswith("gma")
                axis.plot(
                    *zip(*points),
                    label=label(system),
                    color=COLOURS(number % COLOURS.N),
                    marker="o" if is_gma else "s",
                    linestyle="-" if is_gma else "--",
                    linewidth=2.0 if is_gma else 1.2,
                    markersize=4,
                )
        lengths = sorted({row["length"] for row in rows if row["direction"] == direction})
        axis.set(xscale="log", yscale="log", xlabel="sequence length N", title=f"{direction}: {title}")
        length_ticks(axis, lengths)
        axis.grid(True, which="both", alpha=0.25)
        axis.legend(fontsize=7, ncols=2)
    write_figure(path, figure)


def length_ticks(axis, lengths: list[int]) -> None:
    axis.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths], minor=False)
    axis.set_xticks([], minor=True)


def _is_in_plots(system: str) -> bool:
    """Variants that lie on top of their plain line are left to the tables."""
    return not any(part.startswith(("variance", "floor", "bfloat16", "trained")) for part in system.split(":")[1:])


def main() -> None:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "results.json").is_file():
        sys.exit("usage: python scripts/profile_report.py FOLDER, where profile_mixers.py wrote results.json")
    folder = Path(sys.argv[1])
    results = json.loads((folder / "results.json").read_text())
    write_report(results, folder)
    print("\n".join(summary_lines(results)))


if __name__ == "__main__":
    main()
