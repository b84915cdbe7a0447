"""Generate after short and long prompts: what a token costs then, in time and memory.

    python scripts/profile_generation.py --model_name_or_path gated hybrid --prompts 1000 100000

Of saved causal models, GMA's or twins'. Prompts are random tokens, taken in by pieces (`generate`'s
`prefill_chunk_size`), and each is generated after in a process of its own, several times, models and lengths taking
turns. Writes generation.json and generation.md: the bytes that are carried from token to token, the most memory that
generating took beyond the loaded model, and the time of a token at its best.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from arguments import parse
from files import write_json, write_text
from profile_mixers import cache_bytes, environment, forget_peak, resident_bytes, what_went_wrong
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

import baselines  # noqa: F401


@dataclass
class Arguments:
    model_name_or_path: list[str] = field(metadata={"help": "Saved causal models."})
    output_dir: str = field(default="generation", metadata={"help": "Folder for what is written."})
    prompts: list[int] = field(default_factory=lambda: [1000, 100_000], metadata={"help": "Tokens before the first."})
    piece: int = field(default=1024, metadata={"help": "Tokens of a prompt that are taken in at a time."})
    new_tokens: int = field(default=64, metadata={"help": "Tokens to generate, of which the first is not timed."})
    rounds: int = field(default=3, metadata={"help": "Times that each is done."})
    seed: int = field(default=0, metadata={"help": "Fixes the prompts."})

    def __post_init__(self):
        for name, least in {"piece": 1, "new_tokens": 2, "rounds": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}.")
        if not self.prompts or min(self.prompts) < 1:
            raise ValueError(f"--prompts must be numbers of at least 1, got {self.prompts}.")
        for path in self.model_name_or_path:
            try:
                AutoConfig.from_pretrained(path)
            except (OSError, ValueError) as error:
                raise ValueError(f"--model_name_or_path {path!r} cannot be read: {error}") from None


class Clock(BaseStreamer):
    """When `generate` had each token; the prompt counts as one."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def generate(send, path: str, prompt: int, arguments: Arguments) -> None:
    """In a process of its own: seconds of each token after the first, bytes of the cache and at the peak."""
    logging.set_verbosity_error()
    try:
        send.send(measure(AutoModelForCausalLM.from_pretrained(path).eval(), prompt, arguments))
    except Exception as error:
        # Results are to be shown to others, whose folders are not these.
        send.send({"status": what_went_wrong(error).replace(path, Path(path).name)})


def measure(model, prompt: int, arguments: Arguments) -> dict:
    torch.manual_seed(arguments.seed)
    tokens = torch.randint(0, model.config.vocab_size, (1, prompt))
    forget_peak()
    idle, clock = resident_bytes("VmRSS"), Clock()
    output = model.generate(
        tokens,
        streamer=clock,
        prefill_chunk_size=arguments.piece,
        min_new_tokens=arguments.new_tokens,
        max_new_tokens=arguments.new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    peak = resident_bytes("VmHWM")
    times = clock.times[1:]
    return {
        "status": "ok",
        "seconds": [after - before for before, after in itertools.pairwise(times)],
        "cache_bytes": cache_bytes(output.past_key_values),
        "peak_bytes": None if peak is None else peak - idle,
    }


def names_of(paths: list[str]) -> list[str]:
    """What to call models: their folders, and where two are alike the folders around them too."""
    names = [Path(path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else ["/".join(Path(path).resolve().parts[-2:]) for path in paths]


def gather(arguments: Arguments) -> list[dict]:
    """A row for each model and length of prompt."""
    context = multiprocessing.get_context("spawn")
    rows = [
        {"model": name, "prompt": prompt, "status": "ok", "seconds": [], "cache_bytes": 0, "peak_bytes": 0}
        for name in names_of(arguments.model_name_or_path)
        for prompt in arguments.prompts
    ]
    paths = [path for path in arguments.model_name_or_path for _ in arguments.prompts]
    progress = tqdm(total=arguments.rounds * len(rows), desc="generating", unit="prompt")
    for _ in range(arguments.rounds):
        for row, path in zip(rows, paths):
            progress.set_postfix_str(f"{row['model']} after {row['prompt']}")
            if row["status"] == "ok":
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=generate, args=(send, path, row["prompt"], arguments))
                process.start()
                send.close()
                try:
                    found = receive.recv()
                except EOFError:
                    found = {"status": "the process ended, perhaps for want of memory"}
                process.join()
                row["status"] = found["status"]
                if found["status"] == "ok":
                    row["seconds"] += found["seconds"]
                    row["cache_bytes"] = found["cache_bytes"]
                    peaks = [found["peak_bytes"], row["peak_bytes"]]
                    row["peak_bytes"] = None if None in peaks else max(peaks)
            progress.update()
    progress.close()
    for row in rows:
        seconds = row.pop("seconds")
        row["best_seconds"] = min(seconds, default=None)
    return rows


def table(rows: list[dict]) -> list[str]:
    lines = [
        "| model | prompt, tokens | carried, MB | peak, MB | ms a token |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [row["status"], "", ""]
        if row["status"] == "ok":
            peak = "?" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
            cells = [f"{row['cache_bytes'] / 1e6:,.2f}", peak, f"{1000 * row['best_seconds']:.2f}"]
        lines.append(f"| {row['model']} | {row['prompt']:,} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    arguments = parse(Arguments, __doc__)
    logging.set_verbosity_error()
    folder = Path(arguments.output_dir).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # For the processes to come.
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    rows = gather(arguments)
    settings = {name: getattr(arguments, name) for name in ("piece", "new_tokens", "rounds", "seed")}
    write_json(folder / "generation.json", {"rows": rows, "settings": settings, "environment": environment("cpu")})
    write_text(folder / "generation.md", "\n".join(table(rows)) + "\n")
    print("\n".join(table(rows)))
    print(f"written to {folder}: generation.json, generation.md")


if __name__ == "__main__":
    main()
