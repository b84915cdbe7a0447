"""What the comparison scripts share: systems by name, and a training script run for each of them and each seed."""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from arguments import parse
from files import write_json
from responsibility_figures import COLOURS
from tqdm.auto import tqdm
from training import BareSteps, Task, portable, refuse_other_arguments

from hub_upload.export import without_paths


NAMES = {
    "sdpa": "SDPA, learned positions",
    "sdpa_rope": "SDPA, rotary positions",
    "linear": "Linear Transformer",
    "linformer": "Linformer",
    "performer": "Performer",
    "mamba": "Mamba",
    "eager": "MHA, eager",
}
LAYERS = {"hybrid": ("hybrid_sliding", "local heads"), "local": ("sliding_attention", "local heads alone")}
LISTS = ("forget_gate_bias", "num_pairs")
MARKERS = "os^vDPX*<>"


@dataclass
class Run:
    """One run of a training script, in a folder of its own."""

    name: str  # of the system and, where there are several, of the task
    system: str
    seed: int
    output: Path
    flags: list[str]


def make_parser(description: str, systems: list[str]) -> argparse.ArgumentParser:
    # An abbreviation might be of a flag that goes on to the training script.
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output_dir", required=True, help="folder for the runs and the comparison")
    parser.add_argument("--systems", nargs="+", default=systems, help="mixers to train (default: %(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="seeds (default: %(default)s)")
    parser.add_argument("--launcher", default="", help='what to start runs with, such as "accelerate launch"')
    parser.add_argument("--report_only", action="store_true", help="report all that comparison.json has, no training")
    return parser


def parse_known(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str], Path]:
    """The flags, those that go on to the training script, and the folder."""
    arguments, passed_on = parser.parse_known_args()
    folder = Path(arguments.output_dir).expanduser().resolve()
    try:
        for system in arguments.systems:
            system_flags(system)
    except ValueError as error:
        parser.error(str(error))
    configs = arguments.config if isinstance(arguments.config, list) else [arguments.config]
    for config in filter(None, configs):
        if not Path(config).is_file():
            parser.error(f"{config} is not a file.")
    if arguments.report_only and not (folder / "comparison.json").is_file():
        parser.error(f"{folder} has no comparison.json.")
    folder.mkdir(parents=True, exist_ok=True)
    return arguments, passed_on, folder


def system_flags(system: str) -> list[str]:
    """Flags of a training script for a system such as gma:64:forget@learning_rate=4e-3."""
    name, *settings = system.split("@")
    mixer, *parts = name.split(":")
    if mixer != "gma" and mixer not in NAMES:
        raise ValueError(f"--systems: {system!r} has {mixer!r}, which is none of {['gma', *NAMES]}.")
    flags = ["--mixer", mixer]
    for part in parts:
        if part == "forget":
            # What forgets knows how far back things are: no positions.
            flags += ["--forget_gate", "true", "--position_embedding_type", "none"]
        elif part == "gate":
            flags += ["--output_gate", "true"]
        elif part in LAYERS:
            # Local heads have rotary positions.
            flags += ["--layer_types", LAYERS[part][0], "--position_embedding_type", "none"]
        elif part.isdigit():
            flags += ["--num_components", part]
        else:
            raise ValueError(
                f"--systems: {system!r} has {part!r}, which is neither components nor forget, gate, hybrid or local."
            )
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"--systems: {system!r} has {setting!r}, which is not name=value.")
        # Several values have commas between.
        flags += [f"--{key}", *value.split(",")] if key in LISTS else [f"--{key}", value]
    return flags


def label(system: str) -> str:
    name, *settings = system.split("@")
    mixer, *parts = name.split(":")
    if mixer == "gma":
        components = next((part for part in parts if part.isdigit()), "")
        text = f"GMA K={components}" if components else "GMA"
    else:
        text = NAMES.get(mixer, mixer)
    text += ", forget gate" if "forget" in parts else ""
    text += ", output gate" if "gate" in parts else ""
    text += "".join(f", {LAYERS[part][1]}" for part in parts if part in LAYERS)
    return ", ".join([text, *settings])


def make_run(name: str, system: str, seed: int, folder: Path, first_flags: list[str], arguments_class: type) -> Run:
    """A run whose flags the training script accepts: that should turn out before hours of other runs, not after."""
    output = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}_seed{seed}"
    flags = [*first_flags, *system_flags(system), "--seed", str(seed), "--output_dir", str(output)]
    parsed = parse(arguments_class, "", flags)
    results = output / "results.json"
    if results.exists():
        content = json.loads(results.read_text())
        refuse_other_arguments(content["given"], portable(parsed, content["processes"]), output)
    return Run(name, system, seed, output, flags)


def train_all(
    script: Path,
    runs: list[Run],
    folder: Path,
    launcher: str,
    summary: Callable[[Run, dict, list[dict]], dict],
    report: Callable[[list[dict], Path], None],
) -> list[dict]:
    """Results of all runs, made or found, as `summary(run, results, evaluations)` gives them.

    comparison.json and the report are written again after every run.
    """
    found = []
    for number, run in enumerate(runs):
        results = run.output / "results.json"
        if not results.exists():
            print(f"run {number + 1} of {len(runs)}: {run.name}, seed {run.seed}", flush=True)
            command = [*launcher.split(), str(script)] if launcher else [sys.executable, str(script)]
            process = subprocess.Popen([*command, *run.flags, "--resume_from_checkpoint", "latest"])
            code, is_asked = _wait_for(process, bool(launcher))
            if is_asked:
                raise SystemExit("\nInterrupted; the same command goes on from here.")
            if code or not results.exists():
                how = f"with code {code}" if code else "early"
                raise SystemExit(
                    f"{run.name}, seed {run.seed} ended {how}; what is finished is kept, and the same command goes on."
                )
        log = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
        evaluations = [line for line in log if "evaluation" in line]
        kept = {"system": run.system, "seed": run.seed}
        # What is compared is to be shown to others, whose folders are not these.
        found.append(without_paths(kept | summary(run, json.loads(results.read_text()), evaluations)))
        write_json(folder / "comparison.json", found)
        report(found, folder)
    return found


def _wait_for(process: subprocess.Popen, is_launched: bool) -> tuple[int, bool]:
    """The exit code of a run, and whether we were asked to stop: then it is asked too, saves, and both leave."""
    asked = []

    def pass_on(number, _) -> None:
        asked.append(number)
        if number == signal.SIGTERM:
            process.terminate()
        elif len(asked) > 1:
            process.send_signal(number)
        else:
            print("\nsaving; interrupt again to leave at once", flush=True)
            # At a terminal it was interrupted with us, and this asks for no more. Of a launcher it would be the end.
            if not is_launched:
                process.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return process.wait(), bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure_speeds(
    planned: list[Run], rounds: int, arguments_class: type, task_class: type[Task], folder: Path, batches: int = 1
) -> None:
    """Write speeds.json: tokens or examples a second of forward, backward and optimizer step, the best of each.

    Systems are timed in turn, so that what else the machine does is shared among them.
    """
    parsed = {run.name: parse(arguments_class, "", run.flags) for run in planned}
    speeds = {}
    # Accelerate has one precision at a time.
    for precision in dict.fromkeys(arguments.mixed_precision for arguments in parsed.values()):
        AcceleratorState._reset_state()
        steps = {}
        for name, arguments in parsed.items():
            if arguments.mixed_precision == precision:
                accelerator = arguments.make_accelerator()
                steps[name] = BareSteps(task_class(arguments, accelerator), arguments, accelerator, batches)
        # The first of each warms up.
        for _ in tqdm(range(rounds + 1), desc="timing", unit="round"):
            for of_run in steps.values():
                of_run.measure()
        speeds |= {name: of_run.units / min(of_run.seconds[1:]) for name, of_run in steps.items()}
    about = {"rounds": rounds, "threads": torch.get_num_threads()}
    write_json(folder / "speeds.json", {f"{task_class.unit}_per_second": speeds} | about)


def at_speeds(runs: list[dict], unit: str, folder: Path) -> list[dict]:
    """The runs, with the speeds of speeds.json where there are any: of runs beside which the machine had other things
    to do, the clock tells less than steps timed in turn."""
    path = folder / "speeds.json"
    if not path.exists():
        return runs
    speeds = json.loads(path.read_text())[f"{unit}_per_second"]
    found = []
    for run in runs:
        speed = speeds.get(f"{run['task']}_{run['system']}" if "task" in run else run["system"])
        if speed:
            curve = [point | {"seconds": point[unit] / speed} for point in run["curve"]]
            run = run | {f"{unit}_per_second": speed, "curve": curve}
        found.append(run)
    return found


def minutes_label(folder: Path) -> str:
    is_timed = (folder / "speeds.json").exists()
    return "minutes of training" + (", at the speed of steps timed in turn" if is_timed else "")


def grouped(runs: list[dict], key: str = "system") -> dict[str, list[dict]]:
    groups = {}
    for run in runs:
        groups.setdefault(run[key], []).append(run)
    return groups


def mean_and_spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.mean(values):.2f}" + (f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def plot_curves(panel, runs: list[dict], x: str, scale: float, y: str) -> None:
    """One line a seed, of the points in each run's "curve"; one colour and marker a system."""
    for number, (system, of_system) in enumerate(grouped(runs).items()):
        for run in of_system:
            panel.plot(
                [point[x] / scale for point in run["curve"]],
                [point[y] for point in run["curve"]],
                marker=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                markersize=4,
                linewidth=1,
                label=label(system) if run is of_system[0] else None,
            )
    panel.grid(alpha=0.3, which="both")
