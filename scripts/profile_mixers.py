"""Measure mixers beside each other: speed, memory and decoding of GMA, attention and the other baselines.

    python scripts/profile_mixers.py --preset cpu --output_dir profile_output
    python scripts/profile_mixers.py --mixers sdpa gma:64 gma:128:forget --lengths 1024 4096 --directions causal

A mixer is named by what `baselines.build_twin` calls it, and "gma" may be followed by its number of components and by
variants, with colons: "forget" (a forget gate), "hybrid" (half of the heads exact in a window, of 128 tokens unless
"window=64" says otherwise), "local" (all heads so), "variance=0.3" (sharper components, their means three times as
wide), "floor" (the same with variances at their smallest), "trained" (the mixer of --checkpoint). Any mixer may be
followed by a dtype, such as "sdpa:bfloat16".

What is measured: one mixing block (projections, mixer, output projection), forward alone and forward and backward;
bytes kept for backward and peak memory, each in a process of its own; and single-token decoding of the paper's
WikiText-103 decoder from caches of several lengths. Repetitions of all mixers take turns, so that a noisy moment does
not fall on one of them. Beside each time stands the arithmetic limit: how long the bare matrix products of that shape
take, measured in the same run.

Results are written after every length, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path


if __name__ == "__main__" and sys.platform == "linux" and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
    # Like a GPU's allocator, keep memory that was freed: otherwise every step gets part of it anew from the system,
    # page by page, and which mixers pay for that is chance. And let threads spin for the little while between two
    # operations: sleeping ones take longer to wake up than many an operation takes.
    settings = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40)}
    os.execve(sys.executable, sys.orig_argv, {"OMP_WAIT_POLICY": "ACTIVE", **os.environ, **settings})

import torch
from files import write_json
from huggingface_hub.errors import StrictDataclassError
from matrix_products import Stopwatch, block_products, time_call, window_products
from profile_report import write_report
from tqdm.auto import tqdm
from transformers import DynamicCache, HfArgumentParser

from baselines import MIXERS, build_mixer, build_twin
from configuration_gma import GMAConfig
from modeling_gma import GMAForCausalLM
from modeling_gma.attention import cached_count, keep_count


# Width and heads of the blocks in the paper's Table 1, and of its WikiText-103 decoder.
SHAPES = {"bidirectional": (768, 12), "causal": (512, 8)}

BASELINES = ["eager", "sdpa", "sdpa_rope", "linear", "linformer", "performer", "mamba"]
COMPONENTS = ["gma:64", "gma:128", "gma:256", "gma:512"]
SHARP = ["gma:128:variance=0.3", "gma:128:variance=0.03", "gma:128:floor"]
PRESETS = {
    "cpu": {
        "mixers": [*BASELINES, *COMPONENTS, "gma:128:forget", *SHARP, "sdpa:bfloat16", "gma:128:bfloat16"],
        "lengths": [1024, 2048, 4096, 8192, 16384, 65536],
        "tokens": 4096,
        "dtype": "float32",
        "directions": ["bidirectional", "causal"],
    },
    "paper": {
        "mixers": [*BASELINES, *COMPONENTS],
        "lengths": [1000, 2000, 4000],
        "batch_size": 8,
        "dtype": "bfloat16",
        "directions": ["bidirectional"],
    },
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass
class Arguments:
    output_dir: str = field(default="profile_output", metadata={"help": "Folder for results, tables and plots."})
    preset: str | None = field(
        default=None,
        metadata={
            "help": "What the flags below are by default: cpu (about an hour on two cores) or paper (Table 1: "
            "batch 8, N = 1000/2000/4000, bfloat16). By default paper on a GPU and cpu elsewhere.",
            "choices": list(PRESETS),
        },
    )
    device: str | None = field(default=None, metadata={"help": "cpu, cuda or cuda:1, ..; by default a GPU if any."})
    mixers: list[str] | None = field(
        default=None, metadata={"help": "Mixers to measure, such as sdpa linear gma:64 gma:128:forget sdpa:bfloat16."}
    )
    lengths: list[int] | None = field(default=None, metadata={"help": "Sequence lengths N."})
    directions: list[str] | None = field(default=None, metadata={"help": "bidirectional, causal, or both."})
    tokens: int | None = field(
        default=None, metadata={"help": "Tokens in a step: batches hold as many sequences as fit, at least one."}
    )
    batch_size: int | None = field(default=None, metadata={"help": "Sequences in a batch, in place of --tokens."})
    dtype: str | None = field(default=None, metadata={"help": "float32, bfloat16, float16 or float64."})
    hidden_size: int | None = field(
        default=None, metadata={"help": "Width of the block; by default 768, and 512 where causal."}
    )
    num_attention_heads: int | None = field(default=None, metadata={"help": "Heads; by default 12, and 8 if causal."})
    sections: list[str] = field(
        default_factory=lambda: ["speed", "memory", "decoding"],
        metadata={"help": "What to measure: speed, memory, decoding."},
    )
    contexts: list[int] = field(
        default_factory=lambda: [1024, 16384, 65536], metadata={"help": "Tokens in the cache when decoding."}
    )
    decoding_mixers: list[str] = field(
        default_factory=lambda: ["sdpa", "linear", "mamba", "gma:128", "gma:128:forget"],
        metadata={"help": "Mixers to decode with."},
    )
    repetitions: int = field(default=5, metadata={"help": "Times that each mixer is measured, at most."})
    seconds: float = field(
        default=10.0, metadata={"help": "Seconds for all repetitions of one mixer at one length; two are always done."}
    )
    longest_step: float = field(
        default=30.0, metadata={"help": "A step expected to take more seconds than this is left out."}
    )
    checkpoint: str | None = field(
        default=None,
        metadata={"help": 'A saved causal GMA model, of whose last layer "trained" is the mixer.'},
    )
    seed: int = field(default=0, metadata={"help": "Fixes weights and inputs."})
    overwrite: bool = field(default=False, metadata={"help": "Begin anew where --output_dir holds other results."})

    def __post_init__(self):
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if not self.device.startswith(("cpu", "cuda")):
            raise ValueError(f"--device must be cpu or cuda (or cuda:1, ..), got {self.device!r}.")
        if self.preset is None:
            self.preset = "paper" if self.device.startswith("cuda") else "cpu"
        if self.tokens is not None and self.batch_size is not None:
            raise ValueError("--tokens and --batch_size exclude each other.")
        preset = dict(PRESETS[self.preset])
        if self.tokens is not None or self.batch_size is not None:
            preset.pop("tokens", None), preset.pop("batch_size", None)
        for name, value in preset.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name, allowed in (("directions", list(SHAPES)), ("sections", ["speed", "memory", "decoding"])):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ValueError(f"--{name} must be of {', '.join(allowed)}, got {value!r}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        for name in ("tokens", "batch_size", "hidden_size", "num_attention_heads", "repetitions"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("lengths", "contexts"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"--{name} must be numbers of at least 1, got {getattr(self, name)}.")
        self.lengths, self.contexts = sorted(set(self.lengths)), sorted(set(self.contexts))
        if self.checkpoint is not None:
            try:
                components = GMAConfig.from_pretrained(self.checkpoint).num_components
            except (OSError, ValueError) as error:
                raise ValueError(f"--checkpoint {self.checkpoint!r} cannot be read: {error}") from None
            if not any("trained" in name for name in self.mixers):
                self.mixers = [*self.mixers, f"gma:{components}:trained"]
        for name in self.mixers:
            if System.parse(name, self.dtype).trained and self.checkpoint is None:
                raise ValueError(f"--mixers: {name!r} needs --checkpoint.")
        for name in self.decoding_mixers:
            system = System.parse(name, self.dtype)
            if system.variance is not None or system.trained:
                raise ValueError(f"--decoding_mixers: {name!r} must be without variance, floor and trained.")

    def shape(self, direction: str) -> tuple[int, int]:
        hidden_size, heads = SHAPES[direction]
        return self.hidden_size or hidden_size, self.num_attention_heads or heads

    def batch(self, length: int) -> int:
        return self.batch_size or max(1, self.tokens // length)


LOCAL = {"hybrid": "hybrid_sliding", "local": "sliding_attention"}


@dataclass(frozen=True)
class System:
    """One line of the results."""

    mixer: str
    dtype: str
    components: int | None = None
    forget: bool = False
    layer_type: str | None = None
    window: int | None = None
    variance: float | None = None  # 0.0: the smallest there is
    trained: bool = False
    name: str = ""

    @classmethod
    def parse(cls, name: str, dtype: str) -> System:
        mixer, *parts = name.split(":")
        if mixer != "gma" and mixer not in MIXERS:
            raise ValueError(f"--mixers: {name!r} must begin with one of {', '.join(['gma', *MIXERS])}.")
        values = {"components": 128} if mixer == "gma" else {}
        for part in parts:
            if part in DTYPES:
                dtype = part
            elif mixer == "gma" and part.isdigit() and int(part) > 0:
                values["components"] = int(part)
            elif mixer == "gma" and part in ("forget", "trained"):
                values[part] = True
            elif mixer == "gma" and part in LOCAL:
                values["layer_type"] = LOCAL[part]
            elif mixer == "gma" and part.startswith("window=") and part[7:].isdigit() and int(part[7:]) > 0:
                values["window"] = int(part[7:])
            elif mixer == "gma" and part == "floor":
                values["variance"] = 0.0
            elif mixer == "gma" and part.startswith("variance=") and _is_positive(part[9:]):
                values["variance"] = float(part[9:])
            else:
                raise ValueError(
                    f"--mixers: {part!r} in {name!r} must be a dtype ({', '.join(DTYPES)}) or, for gma, a number of "
                    f"components, forget, hybrid, local, window=<number>, variance=<number>, floor or trained, with "
                    f"numbers above 0."
                )
        system = cls(mixer=mixer, dtype=dtype, name=name, **values)
        if system.window is not None and system.layer_type is None:
            raise ValueError(f"--mixers: window in {name!r} goes with hybrid or local.")
        if system.layer_type is not None and system.trained:
            raise ValueError(f"--mixers: trained in {name!r} does not go with hybrid or local: the checkpoint says.")
        if system.layer_type == LOCAL["local"] and (system.variance is not None or system.forget):
            raise ValueError(f"--mixers: local in {name!r} has neither components to sharpen nor a memory to forget.")
        return system

    @property
    def grows(self) -> int:
        """The power of N that its time grows with."""
        return 2 if self.mixer in ("eager", "sdpa", "sdpa_rope") else 1

    def config(self, hidden_size: int, heads: int, length: int, is_causal: bool, **fields) -> GMAConfig:
        if self.layer_type is not None:
            # Of the block that is measured alone, or of the paper's decoder, which has six layers like all others.
            fields |= {"layer_types": [self.layer_type] * 6, "num_hidden_layers": 6}
            fields |= {"sliding_window": self.window or 128, "position_embedding_type": "none"}
        return GMAConfig(
            hidden_size=hidden_size,
            num_attention_heads=heads,
            max_position_embeddings=length,
            is_causal=is_causal,
            num_components=self.components or 128,
            forget_gate=self.forget,
            **fields,
        )

    def build(self, hidden_size, heads, length, is_causal, device, checkpoint=None):
        """The block that is measured, without biases, as in the paper's Table 1."""
        if self.trained:
            block = GMAForCausalLM.from_pretrained(checkpoint).model.layers[-1].mixer
            config = block.config
            if not is_causal or (config.hidden_size, config.num_attention_heads) != (hidden_size, heads):
                raise ValueError(
                    f"the checkpoint is causal, of width {config.hidden_size} with {config.num_attention_heads} heads"
                )
            if config.num_components != self.components:
                raise ValueError(f"the checkpoint has {config.num_components} components")
        else:
            block = build_mixer(self.config(hidden_size, heads, length, is_causal, attention_bias=False), self.mixer)
        if self.variance is not None:
            sharpen(block.mixture_norm, self.variance)
        return block.to(device=device, dtype=DTYPES[self.dtype])

    def memory_needed(self, batch, length, hidden_size, heads) -> int:
        """Bytes that a step takes at its peak, roughly, where that is far more than inputs and outputs."""
        size = DTYPES[self.dtype].itemsize
        if self.mixer == "eager":
            return 6 * size * batch * heads * length**2
        return 0


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


@torch.no_grad()
def sharpen(mixture, variance: float) -> None:
    """Give all components this variance, or the smallest there is, and means three times as wide."""
    mixture.mu *= 3.0
    above = max(variance - mixture.variance_floor, 1e-7)
    mixture.omega.fill_(torch.expm1(torch.tensor(above, dtype=torch.float64)).log())


def step(block, x, train: bool):
    with torch.set_grad_enabled(train):
        output = block(x)[0]
        if train:
            output.backward(torch.ones_like(output))
    x.grad = None
    for parameter in block.parameters():
        parameter.grad = None


def available_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _kilobytes("/proc/meminfo", "MemAvailable")


def is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "out of memory" in text or "can't allocate memory" in text


def what_went_wrong(error: Exception) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, StrictDataclassError):
        # It wraps the sentence that says what is wrong.
        error = error.__cause__ or error
    sentence = str(error).strip().splitlines()
    return f"unsupported: {sentence[0] if sentence else type(error).__name__}"


def measure_speed(arguments: Arguments, direction: str, length: int, seconds_before: dict, progress) -> list[dict]:
    """Rows of all mixers at one length, their repetitions taking turns."""
    device = torch.device(arguments.device)
    hidden_size, heads = arguments.shape(direction)
    is_causal, batch = direction == "causal", arguments.batch(length)
    stopwatch = Stopwatch(device)
    rows, running = [], []
    for name in arguments.mixers:
        system = System.parse(name, arguments.dtype)
        row = {"direction": direction, "length": length, "batch": batch, "system": name, "mixer": system.mixer}
        row |= {"components": system.components, "dtype": system.dtype, "status": "ok"}
        rows.append(row)
        expected = expected_seconds(seconds_before.get((direction, name)), length, batch, system.grows)
        if expected is not None and expected > arguments.longest_step:
            row["status"] = f"left out: a step would take about {expected:.0f} s"
        else:
            refuse_what_is_too_large(arguments, row)
        if row["status"] == "ok":
            try:
                torch.manual_seed(arguments.seed)
                block = system.build(hidden_size, heads, length, is_causal, device, arguments.checkpoint)
                x = torch.randn(batch, length, hidden_size, device=device, dtype=DTYPES[system.dtype])
                running.append((row, system, block, x.requires_grad_(), {"forward": [], "train": []}))
            except Exception as error:
                row["status"] = what_went_wrong(error)
        progress.update()
    for repetition in range(-1, arguments.repetitions):
        # The first round warms up.
        turn = repetition % len(running) if running else 0
        for row, system, block, x, times in running[turn:] + running[:turn]:
            spent = sum(times["forward"]) + sum(times["train"])
            if row["status"] != "ok" or (len(times["train"]) >= 3 and spent > arguments.seconds):
                continue
            progress.set_postfix_str(f"{direction} N={length} {row['system']}, round {repetition + 1}")
            try:
                for kind in times:
                    times[kind].append(time_call(lambda b=block, i=x, k=kind: step(b, i, k == "train"), device))
            except Exception as error:
                row["status"] = what_went_wrong(error)
            gc.collect()
            if system.memory_needed(batch, length, hidden_size, heads) > 2**32:
                # What it leaves behind in pieces is of no use to the next.
                return_memory(device)
        for row, system, block, *_ in running:
            if row["status"] == "ok":
                for products, dtype in system_products(system, block, row, hidden_size, heads, train=True):
                    stopwatch.measure(products, dtype, repetitions=1)
    for row, system, block, _, times in running:
        if row["status"] != "ok":
            continue
        row["parameters"] = sum(parameter.numel() for parameter in block.parameters())
        for kind, seconds in times.items():
            counted = seconds[1:] or seconds
            limit = sum(
                stopwatch.seconds(products, dtype)
                for products, dtype in system_products(system, block, row, hidden_size, heads, train=kind == "train")
            )
            row[kind] = {
                "best_seconds": min(counted),
                "median_seconds": statistics.median(counted),
                "repetitions": len(counted),
                "tokens_per_second": batch * length / min(counted),
                "limit_seconds": limit,
                "share_of_limit": limit / min(counted),
            }
        seconds_before[direction, row["system"]] = (row["train"]["best_seconds"], length, batch)
    running.clear()
    return_memory(device)
    return rows


def return_memory(device: torch.device) -> None:
    """Give freed memory back to the system, for processes that measure memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def refuse_what_is_too_large(arguments: Arguments, row: dict) -> None:
    """Systems end processes that take too much memory, rather than tell them."""
    system = System.parse(row["system"], arguments.dtype)
    needed = system.memory_needed(row["batch"], row["length"], *arguments.shape(row["direction"]))
    available = available_memory(torch.device(arguments.device))
    if available is not None and needed > 0.8 * available:
        row["status"] = f"out of memory: a step would take about {needed / 2**30:.0f} GiB"


def expected_seconds(before, length, batch, power) -> float | None:
    if before is None:
        return None
    seconds, length_before, batch_before = before
    return seconds * (length / length_before) ** power * batch / batch_before


def system_products(system, block, row, hidden_size, heads, train):
    """Matrix products with the dtype they are done in."""
    shape, is_causal = (row["batch"], row["length"]), row["direction"] == "causal"
    dtype = DTYPES[system.dtype]
    local_heads = getattr(block, "num_local_heads", 0)
    features = {
        "gma": system.components,
        "performer": getattr(block.config, "performer_features", None),
        "linformer": getattr(block.config, "linformer_dim", None),
    }.get(system.mixer, hidden_size // heads)
    projections, inside = block_products(
        system.mixer, *shape, hidden_size, heads, features, is_causal, block.config.chunk_size, train, local_heads
    )
    # Linear attention computes in float32 whatever comes in.
    is_wide = system.mixer in ("gma", "linear", "performer")
    products = [(projections, dtype), (inside, torch.promote_types(dtype, torch.float32) if is_wide else dtype)]
    if local_heads:
        dim = hidden_size // heads
        products.append(
            (window_products(*shape, local_heads, dim, block.config.sliding_window, is_causal, train), dtype)
        )
    return products


def measure_memory(arguments: Arguments, direction: str, rows: list[dict], progress) -> None:
    """Add bytes to rows, each read in a process that has done nothing else."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        # The server imports everything once, for which it has to find this file; what it forks has done nothing yet.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["profile_mixers"])
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
    else:
        context = multiprocessing.get_context("spawn")
    for row in rows:
        progress.update()
        system = System.parse(row["system"], arguments.dtype)
        if row["status"] != "ok" or system.variance is not None:
            continue
        progress.set_postfix_str(f"{direction} N={row['length']} {row['system']}, memory")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=read_memory, args=(send, arguments, direction, row["length"], row["system"]))
        process.start()
        send.close()
        try:
            row |= receive.recv()
            process.join()
        except EOFError:
            process.join()
            killed = process.exitcode == -9
            row["memory_status"] = (
                "out of memory: the process was killed"
                if killed
                else f"failed: the process ended with code {process.exitcode}"
            )


def read_memory(send, arguments: Arguments, direction: str, length: int, name: str) -> None:
    device = torch.device(arguments.device)
    system = System.parse(name, arguments.dtype)
    hidden_size, heads = arguments.shape(direction)
    try:
        torch.manual_seed(arguments.seed)
        block = system.build(hidden_size, heads, length, direction == "causal", device, arguments.checkpoint)
        x = torch.randn(
            arguments.batch(length), length, hidden_size, device=device, dtype=DTYPES[system.dtype], requires_grad=True
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if device.type == "cpu":
            forget_peak()
        idle = resident_bytes("VmRSS") if device.type == "cpu" else 0
        found = {"saved_bytes": saved_bytes(block, x)}
        peak = resident_bytes("VmHWM") if device.type == "cpu" else torch.cuda.max_memory_allocated(device)
        if peak is not None:
            found["peak_bytes"] = peak - idle
        send.send(found)
    except Exception as error:
        send.send({"memory_status": what_went_wrong(error)})


def saved_bytes(block, x) -> int:
    """Bytes that forward keeps for backward, parameters not counted, after a step with both."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)[0]
    # Addresses are not used again while everything is kept.
    total = sum(kept.values())
    output.backward(torch.ones_like(output))
    return total


def resident_bytes(name: str) -> int | None:
    """Memory of this process, now (VmRSS) or at its peak (VmHWM); None where there is no /proc."""
    return _kilobytes("/proc/self/status", name)


def forget_peak() -> None:
    """Let the peak begin anew, so that it is not that of building the block; where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _kilobytes(path: str, name: str) -> int | None:
    try:
        with open(path) as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None


@torch.no_grad()
def measure_decoding(arguments: Arguments, progress) -> list[dict]:
    """Rows of single-token steps with the paper's decoder, mixers and contexts taking turns."""
    device = torch.device(arguments.device)
    longest, tokens_each = max(arguments.contexts), 4
    rows, running = [], []
    for name in arguments.decoding_mixers:
        system = System.parse(name, arguments.dtype)
        model = None
        for context in arguments.contexts:
            row = {"system": name, "mixer": system.mixer, "components": system.components, "context": context}
            row |= {"dtype": system.dtype, "status": "ok"}
            rows.append(row)
            progress.set_postfix_str(f"decoding, {name} at {context}")
            try:
                if model is None:
                    torch.manual_seed(arguments.seed)
                    length = longest + tokens_each * (arguments.repetitions + 1)
                    config = system.config(512, 8, length, is_causal=True)
                    model = build_twin(config, system.mixer).to(device=device, dtype=DTYPES[system.dtype]).eval()
                cache = filled_cache(model, context, device)
                row["cache_bytes"] = cache_bytes(cache)
                running.append((row, model, cache, []))
            except Exception as error:
                row["status"] = what_went_wrong(error)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    for repetition in range(-1, arguments.repetitions):
        turn = repetition % len(running) if running else 0
        for row, model, cache, times in running[turn:] + running[:turn]:
            if row["status"] != "ok":
                continue
            progress.set_postfix_str(f"decoding, {row['system']} at {row['context']}, round {repetition + 1}")
            try:
                seconds = [
                    time_call(lambda m=model, c=cache: m(input_ids=token, past_key_values=c), device)
                    for _ in range(tokens_each)
                ]
            except Exception as error:
                row["status"] = what_went_wrong(error)
                continue
            if repetition >= 0:
                times += seconds
        progress.update()
    for row, _, _, times in running:
        if row["status"] == "ok":
            row |= {"best_seconds": min(times), "median_seconds": statistics.median(times)}
            row["tokens_per_second"] = 1 / min(times)
    return rows


def filled_cache(model, context: int, device) -> DynamicCache:
    """A cache of this many tokens. Keys and values are random: reading them takes as long whatever they are."""
    cache = DynamicCache(config=model.config)
    # A window is filled by what it holds, and holds no more.
    is_local = any(kind != "linear_attention" for kind in vars(model.config)["layer_types"] or ())
    start = min(context, model.config.sliding_window + 8 if is_local else 8)
    model(input_ids=torch.zeros(1, start, dtype=torch.long, device=device), past_key_values=cache)
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None and not is_local:
            batch, heads, _, dim = layer.keys.shape
            more = torch.randn(2, batch, heads, context - start, dim, device=device, dtype=layer.keys.dtype)
            cache.update(more[0], more[1], index)
        keep_count(cache, torch.full_like(cached_count(cache, index), context), index)
    return cache


def cache_bytes(cache: DynamicCache) -> int:
    """What a cache holds of the tokens it has seen."""
    total = 0
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            value = getattr(layer, name, None)
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            total += sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))
    return total


def environment(device: str) -> dict:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name()
    versions = {package: __import__(package).__version__ for package in ("torch", "transformers")}
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        **versions,
    }


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_results(path: Path, settings: dict, overwrite: bool) -> dict:
    """Results of an interrupted run with the same settings, or new ones."""
    if path.exists() and not overwrite:
        try:
            results = json.loads(path.read_text())
            same = results["settings"] == settings
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            sys.exit(
                f"{path} holds results of other settings. Choose another --output_dir, or --overwrite to replace them."
            )
        return results
    return {"settings": settings, "environment": {}, "blocks": [], "decoding": []}


def run(arguments: Arguments) -> dict:
    folder = Path(arguments.output_dir).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    settings = asdict(arguments)
    for name in ("output_dir", "overwrite"):
        settings.pop(name)
    # Its name says which one it was; where it lies is nobody's business.
    settings["checkpoint"] = settings["checkpoint"] and Path(settings["checkpoint"]).name
    results = load_results(path, settings, arguments.overwrite)
    results["environment"] = results["environment"] or environment(arguments.device)
    if arguments.device.startswith("cuda"):
        torch.cuda.set_device(arguments.device)
    blocks, before = results["blocks"], {}
    for row in blocks:
        if "train" in row:
            before[row["direction"], row["system"]] = (row["train"]["best_seconds"], row["length"], row["batch"])
    # What takes longest comes last.
    groups = [(direction, length) for length in arguments.lengths for direction in arguments.directions]
    groups = [group for group in groups if group not in {(row["direction"], row["length"]) for row in blocks}]
    if not {"speed", "memory"} & set(arguments.sections):
        groups = []
    decodes = "decoding" in arguments.sections and not results["decoding"]
    kinds = len({"speed", "memory"} & set(arguments.sections))
    total = len(groups) * len(arguments.mixers) * kinds + decodes * (arguments.repetitions + 1)
    if total == 0:
        print(f"{path} has everything these settings ask for; --overwrite measures it again.")
    with tqdm(total=total, desc="measuring", mininterval=1.0, dynamic_ncols=True) as progress:
        if decodes:
            results["decoding"] = measure_decoding(arguments, progress)
            write_json(path, results)
        for direction, length in groups:
            if "speed" in arguments.sections:
                rows = measure_speed(arguments, direction, length, before, progress)
            else:
                batch = arguments.batch(length)
                rows = [
                    {"direction": direction, "length": length, "batch": batch, "system": name, "status": "ok"}
                    for name in arguments.mixers
                ]
                for row in rows:
                    refuse_what_is_too_large(arguments, row)
            if "memory" in arguments.sections:
                measure_memory(arguments, direction, rows, progress)
            blocks += rows
            write_json(path, results)
    for line in write_report(results, folder):
        print(line)
    print(f"written to {folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")
    return results


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def main() -> None:
    # Read by now; processes that measure memory are to have the system's usual allocation.
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ.pop(name, None)
    parser = HfArgumentParser(Arguments, description=__doc__, formatter_class=HelpFormatter)
    try:
        (arguments,) = parser.parse_args_into_dataclasses()
    except ValueError as error:
        parser.error(str(error))
    try:
        run(arguments)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Every length that was finished is kept: the same command goes on from there.")


if __name__ == "__main__":
    main()
