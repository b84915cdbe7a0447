"""The training loop that all tasks share: one can leave it alone for a day.

A step depends on nothing but the seed, its number and the weights before it: the order of examples, the learning rate
and the random numbers of dropout are functions of the step. So a run that is killed at any moment and goes on from a
checkpoint ends with the weights of one that was not, bit for bit.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import platform
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path

import accelerate
import torch
import transformers
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin, broadcast
from arguments import parse
from checkpoints import (
    cannot_write,
    checkpoint_steps,
    load_optimizer,
    prune,
    read_state,
    remove_parts,
    save_checkpoint,
    unwrap,
)
from files import PART, write_figure, write_json, write_text
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter, StrMethodFormatter
from memory import keep_freed_memory, peak_memory
from torch.utils.data import DataLoader, Sampler, default_collate
from tqdm.auto import tqdm
from transformers.utils import logging
from variations import VARIATIONS

from baselines import MIXERS, twin_config
from hub_upload.publish import publish, refuse_early
from modeling_gma import GaussianMixture, GMAConfig, parameter_groups
from modeling_gma.diagnostics import collapse_warning, mixture_health


try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


# Arguments that another process may have otherwise and still go on with the same run.
FREE = {
    "output_dir",
    "resume_from_checkpoint",
    "logging_steps",
    "checkpointing_steps",
    "checkpointing_minutes",
    "checkpoints_kept",
    "report_to",
    "bare_steps",
    "num_workers",
    "preprocessing_num_workers",
    "per_device_eval_batch_size",
    "cache_dir",
    "push_to_hub",
    "hub_model_id",
}


@dataclass
class LoopArguments:
    """What `train` reads; scripts add their own."""

    output_dir: str = field(metadata={"help": "Folder for checkpoints, the model and results."})
    seed: int = field(default=0, metadata={"help": "Fixes initial weights, data order and dropout."})
    max_steps: int = field(default=20_000, metadata={"help": "Optimizer steps."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Sequences on a device at a time."})
    per_device_eval_batch_size: int = field(default=16, metadata={"help": "Sequences on a device in evaluation."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches in an optimizer step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak of the schedule."})
    mixture_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak for the mixtures' parameters; by default --learning_rate."}
    )
    warmup_steps: int | None = field(
        default=None, metadata={"help": "Steps of linear warmup; by default a twentieth of --max_steps."}
    )
    final_learning_rate: float = field(
        default=0.1, metadata={"help": "Where the cosine ends, as a share of --learning_rate."}
    )
    weight_decay: float = field(
        default=0.1, metadata={"help": "On weight matrices; mixtures, norms and biases take none."}
    )
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW's first beta."})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's second beta."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm; 0 clips none."})
    mixed_precision: str | None = field(
        default=None, metadata={"help": "no, bf16 or fp16; by default what `accelerate config` says."}
    )
    torch_compile: bool = field(default=False, metadata={"help": "Compile the model."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Less memory for more time."})
    num_workers: int = field(default=0, metadata={"help": "Processes that load batches."})
    logging_steps: int = field(default=10, metadata={"help": "Steps between reports to trackers."})
    eval_steps: int = field(default=500, metadata={"help": "Steps between evaluations; the last step has one."})
    checkpointing_steps: int = field(default=500, metadata={"help": "Steps between checkpoints."})
    checkpointing_minutes: float = field(default=15.0, metadata={"help": "Minutes between checkpoints, at most."})
    checkpoints_kept: int = field(default=2, metadata={"help": "Newest checkpoints kept, beside the best one."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": '"latest", which begins anew where there is none, or the folder of a checkpoint.'},
    )
    report_to: str = field(default="none", metadata={"help": "Tracker: tensorboard, wandb, .., all or none."})
    bare_steps: int = field(
        default=0,
        metadata={"help": "After each of so many steps, time the bare model's forward, backward and AdamW step too."},
    )
    push_to_hub: bool = field(
        default=False, metadata={"help": "Export, check and push the best model at the end, to a private repository."}
    )
    hub_model_id: str | None = field(default=None, metadata={"help": "That repository: owner/name."})

    def __post_init__(self):
        refuse_early(self.push_to_hub, self.hub_model_id)
        least = {"max_steps": 1, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "num_workers": 0}
        least |= {"gradient_accumulation_steps": 1, "logging_steps": 1, "eval_steps": 1, "checkpointing_steps": 1}
        least |= {"checkpoints_kept": 1, "warmup_steps": 0, "bare_steps": 0, "weight_decay": 0, "max_grad_norm": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"--{name} must be at least {smallest}, got {value}.")
        for name in ("learning_rate", "mixture_learning_rate", "checkpointing_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} must be above 0, got {value}.")
        if not 0 <= self.final_learning_rate <= 1:
            raise ValueError(f"--final_learning_rate must be from 0 to 1, got {self.final_learning_rate}.")
        if self.mixed_precision is False:
            # So YAML reads a bare no.
            self.mixed_precision = "no"
        if self.mixed_precision not in (None, "no", "bf16", "fp16"):
            raise ValueError(f"--mixed_precision must be no, bf16 or fp16, got {self.mixed_precision!r}.")
        trackers = [] if self.report_to in ("none", "all") else self.report_to.split(",")
        available = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
        for tracker in trackers:
            if tracker not in LOGGER_TYPE_TO_CLASS:
                raise ValueError(f"--report_to must be none, all or of {list(LOGGER_TYPE_TO_CLASS)}, got {tracker!r}.")
            if tracker not in available:
                raise ValueError(f"--report_to {tracker}: its package is not installed.")
        if self.warmup_steps is None:
            self.warmup_steps = max(self.max_steps // 20, 1)

    def make_accelerator(self) -> Accelerator:
        return Accelerator(
            mixed_precision=self.mixed_precision,
            # By count alone: there are as many batches as steps need, whatever loaders Accelerate knows of.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=self.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            log_with=None if self.report_to == "none" else self.report_to.split(","),
            project_dir=self.output_dir,
            # The others wait while one process downloads and tokenises.
            kwargs_handlers=[InitProcessGroupKwargs(backend=None, timeout=timedelta(hours=3))],
        )

    def rate(self, step: int) -> float:
        """Share of the peak learning rate at a step, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.max_steps - self.warmup_steps, 1)
        return self.final_learning_rate + (1 - self.final_learning_rate) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class ModelArguments(LoopArguments):
    """The model, in any task; defaults are the paper's language model."""

    mixer: str = field(default="gma", metadata={"help": f"gma or a baseline: {', '.join(MIXERS)}."})
    hidden_size: int = field(default=512, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=6, metadata={"help": "Number of blocks."})
    num_attention_heads: int = field(default=8, metadata={"help": "Heads in each block."})
    num_components: int = field(default=128, metadata={"help": "Mixture components in each head, K."})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width inside MLPs; by default four times the model's."}
    )
    hidden_dropout: float = field(default=0.0, metadata={"help": "Dropout."})
    routing_dim: int | None = field(
        default=None, metadata={"help": "Of queries and keys in a head; by default its share."}
    )
    value_dim: int | None = field(default=None, metadata={"help": "Of values in a head; by default its share."})
    initializer_range: float = field(default=0.02, metadata={"help": "Spread of weights and embeddings at the start."})
    residual_initializer_range: float | None = field(
        default=None,
        metadata={"help": "Of projections that add to hidden states; by default the spread / (2 * layers)."},
    )
    position_embedding_type: str = field(default="learned", metadata={"help": "learned, sinusoidal or none."})
    output_gate: bool = field(
        default=False,
        metadata={
            "help": "Let tokens scale what heads bring them, and their own values; not in the paper, nor with mamba."
        },
    )
    layer_types: str | None = field(
        default=None,
        metadata={"help": "linear_attention, hybrid_sliding or sliding_attention: one for all layers, or by commas."},
    )
    num_local_heads: int | None = field(
        default=None, metadata={"help": "Local heads in a hybrid_sliding layer; by default half of the heads."}
    )
    sliding_window: int | None = field(default=None, metadata={"help": "Tokens that a local head sees."})

    def __post_init__(self):
        super().__post_init__()
        if self.mixer != "gma" and self.mixer not in MIXERS:
            raise ValueError(f"--mixer must be one of {['gma', *MIXERS]}, got {self.mixer!r}.")
        if self.push_to_hub and self.mixer != "gma":
            raise ValueError(f"--push_to_hub goes with --mixer gma, got {self.mixer!r}: baselines stay here.")
        if self.output_gate and self.mixer == "mamba":
            raise ValueError(
                '--output_gate goes with any --mixer but mamba, which has a gate of its own, got "mamba".'
            )
        if self.layer_types and self.mixer != "gma":
            raise ValueError(f'--layer_types goes with --mixer gma, got "{self.mixer}".')
        for name in ("num_local_heads", "sliding_window"):
            value = getattr(self, name)
            if value is not None and "sliding" not in (self.layer_types or ""):
                raise ValueError(
                    f"--{name} {value} is of layers with local heads: give --layer_types hybrid_sliding or "
                    f"sliding_attention."
                )
        if self.mixer == "linformer" and self.config().is_causal:
            causal = ["gma", *(name for name in MIXERS if name != "linformer")]
            raise ValueError(f"--mixer must be one of {causal} here, got 'linformer', which is bidirectional only.")
        try:
            twin_config(self.config(), self.mixer)
        except Exception as error:
            # The sentence alone, without the names of the classes that passed it on.
            raise ValueError(str(error.__cause__ or error).rpartition("ValueError: ")[2]) from None

    def config(self, **fields) -> GMAConfig:
        """The GMA model's config; scripts add what is theirs."""
        kinds = self.layer_types.split(",") if self.layer_types else None
        if kinds and len(kinds) == 1:
            kinds *= self.num_hidden_layers
        if self.sliding_window is not None:
            fields["sliding_window"] = self.sliding_window
        return GMAConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_components=self.num_components,
            intermediate_size=self.intermediate_size,
            hidden_dropout=self.hidden_dropout,
            routing_dim=self.routing_dim,
            value_dim=self.value_dim,
            initializer_range=self.initializer_range,
            residual_initializer_range=self.residual_initializer_range,
            position_embedding_type=self.position_embedding_type,
            output_gate=self.output_gate,
            layer_types=kinds,
            num_local_heads=self.num_local_heads,
            **fields,
        )


@dataclass
class DecoderArguments(ModelArguments):
    """What causal models have besides, in any task."""

    forget_gate: bool = field(
        default=False, metadata={"help": "Let the memory of gma, linear or performer fade (not in the paper)."}
    )
    variation: str | None = field(
        default=None,
        metadata={"help": f"For ablations alone, what is not in the mixer, by commas: {', '.join(VARIATIONS)}."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.forget_gate and self.mixer not in ("gma", "linear", "performer"):
            raise ValueError(f'--forget_gate goes with --mixer gma, linear or performer, got "{self.mixer}".')
        if self.variation is not None and self.push_to_hub:
            raise ValueError("--push_to_hub does not go with --variation: no class loads such a model.")
        named = self.variation.split(",") if self.variation else []
        if not set(named) <= set(VARIATIONS) or (named and self.mixer == "mamba"):
            raise ValueError(
                f"--variation must be of {', '.join(VARIATIONS)}, and not with --mixer mamba, got {self.variation!r}."
            )

    def config(self, **fields) -> GMAConfig:
        return super().config(forget_gate=self.forget_gate, **fields)


class Task:
    """What is trained. A script says here what is its own; `train` does the rest."""

    metric: str  # what `evaluate` returns that decides which checkpoint is best
    greater_is_better = False
    unit = "tokens"

    model: torch.nn.Module
    train_dataset: torch.utils.data.Dataset
    tokenizer = None
    collate = None
    description: dict = {}  # goes into results.json

    def load(self, folder: Path) -> torch.nn.Module:
        """A model that was saved, like `model`."""
        return load_whole(type(self.model), folder)

    def order(self, epoch: int) -> list[int]:
        """The examples in the order of an epoch; a function of the seed and the epoch."""
        raise NotImplementedError

    def loss(self, model, batch: dict) -> torch.Tensor:
        """Mean loss of a batch."""
        raise NotImplementedError

    def units(self, batch: dict) -> int:
        """Tokens, or examples, in a batch."""
        raise NotImplementedError

    def evaluate(self, model, accelerator: Accelerator) -> dict[str, float]:
        """Metrics on the validation split, the same in all processes."""
        raise NotImplementedError

    def check(self, model) -> str:
        """What must hold before the first step, in a sentence; raise SystemExit if it does not."""
        return ""

    def watched(self) -> dict[str, torch.Tensor]:
        """Inputs of the model without its head: an example whose routing is watched while a GMA model trains."""
        raise NotImplementedError

    def test(self, model, accelerator: Accelerator) -> dict[str, float]:
        """Metrics of the best weights at the end."""
        return {}


class Batches(Sampler):
    """Indices of this process's share of every batch, epoch after epoch without a seam."""

    def __init__(self, task: Task, size: int, start: int, stop: int, rank: int, world: int):
        self.task, self.size, self.start, self.stop, self.rank, self.world = task, size, start, stop, rank, world

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self.task.train_dataset)
        total = self.size * self.world
        epochs = {}
        for number in range(self.start, self.stop):
            first = number * total + self.rank * self.size
            batch = []
            for position in range(first, first + self.size):
                epoch = position // count
                if epoch not in epochs:
                    epochs = {epoch - 1: epochs.get(epoch - 1), epoch: self.task.order(epoch)}
                batch.append(epochs[epoch][position % count])
            yield batch


class Signals:
    """SIGTERM and the first interruption ask to save and leave; a second interruption interrupts."""

    def __init__(self):
        self.received = 0

    def __enter__(self):
        self.before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number, _frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


def start(make_task, arguments_class: type[LoopArguments], description: str) -> dict | None:
    """What a script's `main` does: read the flags and train. Returns the results in the main process, if there are."""
    arguments = parse(arguments_class, description)
    keep_freed_memory()
    accelerator = arguments.make_accelerator()
    # Such as that inputs may be padded, for an end of text that is also padding.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results = train(make_task, arguments, accelerator)
    if results is None or not accelerator.is_main_process:
        return None
    if arguments.push_to_hub:
        publish(Path(arguments.output_dir).expanduser().resolve(), arguments.hub_model_id)
    return results


def train(make_task, arguments: LoopArguments, accelerator: Accelerator) -> dict | None:
    """Train, evaluate, save what `make_task(arguments, accelerator)` gives, a `Task`.

    Returns what results.json holds, or None if a signal ended it before the end.
    """
    folder = Path(arguments.output_dir).expanduser().resolve()
    # First of all: whether the results can be written should not turn out after hours of preparing data.
    with Lock(folder) if accelerator.is_main_process else nullcontext():
        checkpoint = prepare_folder(arguments, accelerator)
        given = portable(arguments, accelerator.num_processes)
        if (folder / "results.json").exists():
            results = json.loads((folder / "results.json").read_text())
            refuse_other_arguments(results["given"], given, folder)
            accelerator.print(f"{folder} is finished; results.json has what came of it.")
            return results
        if checkpoint is not None:
            if not (checkpoint / "state.json").is_file():
                raise SystemExit(f"{checkpoint} is not to be seen by all processes: they need the same disk.")
            refuse_other_arguments(read_state(checkpoint)["arguments"], given, checkpoint)
        task = make_task(arguments, accelerator)
        if checkpoint is not None:
            _refuse_other_data(checkpoint, task)
        with Signals() as signals:
            return _Loop(task, arguments, accelerator, folder, signals, given).run(checkpoint)


class Lock:
    """A folder that one process at a time trains in; a process that ends in any way lets go of it."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / ".lock"

    def __enter__(self):
        self.made = [path for path in (self.folder / "checkpoints", self.folder) if not path.exists()]
        try:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "w")
        except OSError as error:
            raise SystemExit(cannot_write(self.folder, error)) from None
        if fcntl is not None:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SystemExit(f"Another process is training in {self.folder}; wait for it, or stop it.") from None
        return self

    def __exit__(self, *_):
        self.path.unlink(missing_ok=True)
        self.file.close()
        # What did not begin leaves nothing behind.
        for folder in self.made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def prepare_folder(arguments: LoopArguments, accelerator: Accelerator) -> Path | None:
    """See that nobody's run is in the way; returns the checkpoint to go on from."""
    folder = Path(arguments.output_dir).expanduser().resolve()
    checkpoints = folder / "checkpoints"
    resume = arguments.resume_from_checkpoint
    if accelerator.is_main_process:
        steps = checkpoint_steps(checkpoints)
        if resume is None and (steps or (folder / "results.json").exists()):
            if (folder / "results.json").exists():
                raise SystemExit(f"--output_dir {folder} holds a finished run: name another folder.")
            raise SystemExit(
                f"--output_dir {folder} holds a run at step {max(steps)}: go on with --resume_from_checkpoint latest, "
                f"or name another folder."
            )
        remove_parts(folder)
        remove_parts(checkpoints)
    accelerator.wait_for_everyone()
    if resume is None:
        return None
    if resume == "latest":
        # What one process finds, all go on from.
        found = torch.tensor(max(checkpoint_steps(checkpoints), default=0), device=accelerator.device)
        step = int(broadcast(found)) if accelerator.num_processes > 1 else int(found)
        return checkpoints / f"step_{step:08d}" if step else None
    checkpoint = Path(resume).expanduser().resolve()
    if checkpoint.parent != checkpoints or not (checkpoint / "state.json").is_file():
        raise SystemExit(
            f"--resume_from_checkpoint {resume} is no checkpoint of this run: latest, or a folder in {checkpoints}."
        )
    return checkpoint


def _refuse_other_data(checkpoint: Path, task: Task) -> None:
    state = read_state(checkpoint)
    if state["description"] != json.loads(json.dumps(task.description)):
        raise SystemExit(f"{checkpoint} was made with other data: {state['description']}, now {task.description}.")


def refuse_other_arguments(saved: dict, ours: dict, where: Path) -> None:
    """End if arguments, as `portable` gives them, make these two runs different ones.

    Where one has no such argument, it was made before there was one, and is as the default says.
    """
    defaults = {field.name: field.default for field in fields(DecoderArguments)}
    for name in sorted(saved.keys() | ours.keys()):
        default = defaults.get(name)
        before, now = saved.get(name, default), ours.get(name, default)
        if before != now:
            raise SystemExit(
                f"{where} was made with --{name} {before}, not {now}: it would not be the same run. "
                f"Give the flags it was started with, or another --output_dir."
            )


def portable(arguments: LoopArguments, processes: int) -> dict:
    """Arguments that decide what comes of a run, as JSON has them; of batches, how many sequences make a step."""
    values = json.loads(json.dumps(asdict(arguments)))
    sequences = values.pop("per_device_train_batch_size") * values.pop("gradient_accumulation_steps")
    values = {name: value for name, value in values.items() if name not in FREE}
    return values | {"sequences_per_step": sequences * processes}


class _Loop:
    def __init__(self, task, arguments, accelerator, folder, signals, given):
        self.task, self.arguments, self.accelerator, self.given = task, arguments, accelerator, given
        self.folder, self.checkpoints, self.signals = folder, folder / "checkpoints", signals
        self.state = {"seconds": 0.0, "units": 0, "best": None}
        self.log = []
        self.bare = None

    def run(self, checkpoint: Path | None) -> dict | None:
        arguments, accelerator = self.arguments, self.accelerator
        start = self._build(checkpoint)
        if checkpoint is None:
            sentence = self.task.check(self.model)
            if sentence:
                accelerator.print(sentence)
        if arguments.report_to != "none":
            simple = {name: value for name, value in asdict(arguments).items() if isinstance(value, (int, float, str))}
            accelerator.init_trackers("logs", config=simple | {"output_dir": self.folder.name})
        finished = self._steps(start)
        results = self._finish() if finished else None
        if arguments.report_to != "none":
            accelerator.end_training()
        return results

    def _build(self, checkpoint: Path | None) -> int:
        arguments, accelerator, model = self.arguments, self.accelerator, self.task.model
        if checkpoint is not None:
            model = self.task.load(checkpoint)
            self.state |= {key: value for key, value in read_state(checkpoint).items() if key in self.state}
        start = 0 if checkpoint is None else read_state(checkpoint)["step"]
        self._read_log(start)
        if arguments.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        groups = parameter_groups(model, arguments.weight_decay, arguments.mixture_learning_rate)
        fused = accelerator.device.type in ("cpu", "cuda") and accelerator.distributed_type.value != "FSDP"
        model = torch.compile(model) if arguments.torch_compile else model
        optimizer = torch.optim.AdamW(
            groups,
            lr=arguments.learning_rate,
            betas=(arguments.adam_beta1, arguments.adam_beta2),
            fused=fused,
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        for group in self.optimizer.param_groups:
            group["peak"] = group["lr"]
        if checkpoint is not None:
            load_optimizer(checkpoint, self.model, self.optimizer.optimizer)
            if accelerator.scaler is not None:
                accelerator.scaler.load_state_dict(read_state(checkpoint)["scaler"])
            accelerator.print(f"going on from {checkpoint.name}")
        return start

    def _batches(self, start: int) -> Iterator[dict]:
        """Batches from an optimizer step on. Accelerate's own loaders would have to skip what came before."""
        arguments, accelerator = self.arguments, self.accelerator
        accumulated = arguments.gradient_accumulation_steps
        sampler = Batches(
            self.task,
            arguments.per_device_train_batch_size,
            start * accumulated,
            arguments.max_steps * accumulated,
            accelerator.process_index,
            accelerator.num_processes,
        )
        loader = DataLoader(
            self.task.train_dataset,
            batch_sampler=sampler,
            num_workers=arguments.num_workers,
            pin_memory=accelerator.device.type == "cuda",
            collate_fn=self.task.collate,
            # Of its own: a loader draws a number when it begins, which would be one of dropout's.
            generator=torch.Generator(),
        )
        for batch in loader:
            yield {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.items()}

    def _steps(self, start: int) -> bool:
        arguments, accelerator = self.arguments, self.accelerator
        batches = self._batches(start)
        progress = tqdm(
            initial=start,
            total=arguments.max_steps,
            desc="training",
            unit="step",
            dynamic_ncols=True,
            disable=not accelerator.is_main_process,
        )
        saved_at = time.monotonic()
        units, seconds, validation = 0, 0.0, {}
        self.bare = BareSteps(self.task, arguments, accelerator) if arguments.bare_steps else None
        self.model.train()
        for step in range(start, arguments.max_steps):
            began = time.perf_counter()
            late = time.monotonic() - saved_at > 60 * arguments.checkpointing_minutes
            loss, norm, new_units, (stop, late) = self._step(step, batches, (self.signals.received > 0, late))
            done = step + 1
            self.state["units"] += new_units
            line = {"step": done, self.task.unit: self.state["units"], "loss": loss, "grad_norm": norm}
            learning_rate = arguments.learning_rate * arguments.rate(step)
            self.log.append(line | {"learning_rate": learning_rate})
            speed = {f"{self.task.unit}/s": f"{units / seconds:,.0f}"} if seconds else {}
            progress.set_postfix({"loss": f"{loss:.3f}"} | speed | validation, refresh=False)
            progress.update()
            is_last = done == arguments.max_steps
            if arguments.report_to != "none" and (done % arguments.logging_steps == 0 or is_last):
                accelerator.log(
                    {"train/loss": loss, "train/grad_norm": norm, "train/learning_rate": learning_rate}, done
                )
            took = time.perf_counter() - began
            self.state["seconds"] += took
            units, seconds = units + new_units, seconds + took
            if step - start < arguments.bare_steps:
                self.bare.measure(took)
            is_best = False
            if done % arguments.eval_steps == 0 or is_last:
                is_best = self._evaluate(done, progress)
                validation = {self.task.metric: f"{self.log[-1]['evaluation'][self.task.metric]:.4g}"}
            if is_best or is_last or stop or late or done % arguments.checkpointing_steps == 0:
                self._save(done)
                saved_at = time.monotonic()
            if stop and not is_last:
                progress.close()
                self._say_goodbye(done)
                return False
        progress.set_postfix({"loss": f"{loss:.3f}"} | validation if start < arguments.max_steps else {})
        progress.close()
        return True

    def _step(self, step: int, batches: Iterator[dict], flags: tuple) -> tuple[float, float, int, list[bool]]:
        """One optimizer step; returns loss, gradient norm and units of all processes, and flags that any has set."""
        arguments, accelerator, model, optimizer = self.arguments, self.accelerator, self.model, self.optimizer
        # Dropout is to be the same whether the run came here at once or from a checkpoint.
        torch.manual_seed((arguments.seed * 1_000_003 + step) * 4096 + accelerator.process_index)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * arguments.rate(step)
        total, units, norm = 0.0, 0, None
        for _ in range(arguments.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                loss = self.task.loss(model, batch)
                accelerator.backward(loss)
                total = total + loss.detach() / arguments.gradient_accumulation_steps
                units += self.task.units(batch) * accelerator.num_processes
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm or math.inf)
                    asked = torch.tensor([float(flag) for flag in flags], device=total.device)
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
                    norm = norm.to(total.device).reshape(1)
                    numbers = torch.cat([total.float().reshape(1), norm.float(), asked])
                    numbers = accelerator.reduce(numbers, "mean").tolist()
                    # With fp16 a step whose gradients overflow is left out, and the scale goes down.
                    if not math.isfinite(numbers[0]) or (accelerator.scaler is None and not math.isfinite(numbers[1])):
                        self._refuse_non_finite(f"Step {step + 1}: the loss", *numbers[:2])
                optimizer.step()
                optimizer.zero_grad()
        return numbers[0], numbers[1], units, [number > 0 for number in numbers[2:]]

    def _refuse_non_finite(self, what: str, loss: float, norm: float) -> None:
        norms = {
            name: parameter.detach().float().norm().item() for name, parameter in unwrap(self.model).named_parameters()
        }
        largest = sorted(norms.items(), key=lambda pair: -pair[1] if math.isfinite(pair[1]) else -math.inf)[:3]
        steps = checkpoint_steps(self.checkpoints)
        good = f"The last good checkpoint is {steps[max(steps)]}" if steps else "There is no checkpoint yet"
        raise SystemExit(
            f"{what} is {loss} and the norm of the gradient {norm}; the weights have norms up to "
            f"{', '.join(f'{value:.3g} ({name})' for name, value in largest)}. {good}; nothing was written. "
            f"A lower --learning_rate or --max_grad_norm, or more --warmup_steps, may help."
        )

    def _evaluate(self, step: int, progress) -> bool:
        progress.set_postfix_str("evaluating")
        self.model.eval()
        with torch.no_grad():
            figures = self.task.evaluate(self.model, self.accelerator)
            health = self._health()
        self.model.train()
        value, best = figures[self.task.metric], self.state["best"]
        if not math.isfinite(value):
            self._refuse_non_finite(f"Step {step}: validation {self.task.metric}", value, self.log[-1]["grad_norm"])
        line = {"step": step, self.task.unit: self.state["units"], "seconds": self.state["seconds"]}
        warning = collapse_warning(health, unwrap(self.model).config.num_components) if health else None
        if warning and self.accelerator.is_main_process:
            progress.write(f"Step {step}: {warning}")
        self.log.append(line | {"evaluation": figures, "mixture": health} | ({"warning": warning} if warning else {}))
        if self.arguments.report_to != "none":
            named = {f"validation/{name}": x for name, x in figures.items()}
            self.accelerator.log(named | {f"mixture/{name}": x for name, x in health.items()}, step)
        if best is not None and (value <= best["value"] if self.task.greater_is_better else value >= best["value"]):
            return False
        self.state["best"] = {"step": step, "value": value}
        return True

    def _health(self) -> dict[str, float]:
        """Figures of the mixtures, if there are any and they are whole in this process."""
        model = unwrap(self.model)
        has_mixtures = any(isinstance(module, GaussianMixture) for module in model.modules())
        if not has_mixtures or self.accelerator.distributed_type == DistributedType.FSDP:
            return {}
        inputs = {name: value.to(self.accelerator.device) for name, value in self.task.watched().items()}
        return mixture_health(model.base_model, **inputs)

    def _save(self, step: int) -> None:
        accelerator = self.accelerator
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            try:
                self._write_log()
            except OSError as error:
                raise SystemExit(cannot_write(self.folder, error)) from None
        state = self.state | {"arguments": self.given, "description": self.task.description}
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler.state_dict()
        save_checkpoint(
            self.checkpoints,
            step,
            self.model,
            self.optimizer.optimizer,
            state,
            accelerator.is_main_process,
            self.task.tokenizer,
        )
        if accelerator.is_main_process:
            best = self.state["best"]
            prune(self.checkpoints, self.arguments.checkpoints_kept, best and best["step"])

    def _write_log(self) -> None:
        write_text(self.folder / "log.jsonl", "".join(json.dumps(line) + "\n" for line in self.log))

    def _read_log(self, step: int) -> None:
        path = self.folder / "log.jsonl"
        if step and path.exists():
            lines = (json.loads(line) for line in path.read_text().splitlines())
            self.log = [line for line in lines if line["step"] <= step]

    def _say_goodbye(self, step: int) -> None:
        name = signal.Signals(self.signals.received).name if self.signals.received else "a signal"
        self.accelerator.print(
            f"{name}: saved step {step} and left. --resume_from_checkpoint latest goes on from there."
        )

    def _finish(self) -> dict:
        """Put the best weights into the output folder, and what came of the run beside them."""
        arguments, accelerator = self.arguments, self.accelerator
        best = self.checkpoints / f"step_{self.state['best']['step']:08d}"
        accelerator.wait_for_everyone()
        model = self.task.load(best).to(accelerator.device).eval()
        with torch.no_grad():
            test = self.task.test(model, accelerator)
        evaluations = [line for line in self.log if "evaluation" in line]
        at_best = next(line for line in evaluations if line["step"] == self.state["best"]["step"])
        units = self.state["units"]
        results = {
            "task": type(self.task).__name__,
            "best_step": self.state["best"]["step"],
            "validation": at_best["evaluation"],
            "last_validation": evaluations[-1]["evaluation"],
            "test": test,
            "mixture": at_best["mixture"],
            "parameters": self.parameters,
            self.task.unit: units,
            "seconds": self.state["seconds"],
            f"{self.task.unit}_per_second": units / self.state["seconds"],
            "peak_memory_bytes": peak_memory(accelerator.device),
            "bare_steps": self.bare.summary() if self.bare and self.bare.seconds else None,
            "processes": accelerator.num_processes,
            "device": accelerator.device.type,
            "mixed_precision": accelerator.mixed_precision,
            "arguments": asdict(arguments) | {"output_dir": self.folder.name},
            "given": self.given,
            "versions": versions(),
            **self.task.description,
        }
        if accelerator.is_main_process:
            try:
                for path in best.iterdir():
                    if path.name not in ("optimizer.safetensors", "state.json"):
                        aside = self.folder / (path.name + PART)
                        shutil.copyfile(path, aside)
                        os.replace(aside, self.folder / path.name)
                plot_log(self.log, self.task, self.folder / "loss.png")
                write_json(self.folder / "results.json", results)
            except OSError as error:
                raise SystemExit(cannot_write(self.folder, error)) from None
        accelerator.wait_for_everyone()
        return results


def plain_ticks(axis) -> None:
    """60 and 240 on a logarithmic axis, not powers of ten."""
    for formatter in (axis.set_major_formatter, axis.set_minor_formatter):
        formatter(StrMethodFormatter("{x:,.6g}"))


class BareSteps:
    """Times of the bare model at the same shapes, in turn with the loop's own steps or with those of other models.

    A measurement is a step on each of so many batches, taken evenly from the first epoch: one where all are of a size.
    """

    def __init__(self, task: Task, arguments: LoopArguments, accelerator: Accelerator, batches: int = 1):
        self.task, self.accelerator = task, accelerator
        self.model = copy.deepcopy(unwrap(task.model)).to(accelerator.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        order, size = task.order(0), arguments.per_device_train_batch_size
        whole = max(len(order) // size, 1)
        self.batches = []
        for number in range(batches):
            first = number * whole // batches * size
            rows = [task.train_dataset[i] for i in order[first : first + size]]
            batch = (task.collate or default_collate)(rows)
            self.batches.append({name: value.to(accelerator.device) for name, value in batch.items()})
        self.accumulated = arguments.gradient_accumulation_steps
        self.units = self.accumulated * sum(task.units(batch) for batch in self.batches)
        self.seconds, self.of_loop = [], []

    def measure(self, of_loop: float = 0.0) -> None:
        began = time.perf_counter()
        for batch in self.batches:
            for _ in range(self.accumulated):
                with self.accelerator.autocast():
                    loss = self.task.loss(self.model, batch)
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss.item()
        self.seconds.append(time.perf_counter() - began)
        self.of_loop.append(of_loop)

    def summary(self) -> dict[str, float]:
        # The first step of either warms up.
        bare, loop = self.seconds[1:] or self.seconds, self.of_loop[1:] or self.of_loop
        return {
            "bare_median": statistics.median(bare),
            "loop_median": statistics.median(loop),
            "bare_best": min(bare),
            "loop_best": min(loop),
            "speed_kept": statistics.median(bare) / statistics.median(loop),
        }


def plot_log(log: list[dict], task: Task, path: Path) -> None:
    """Training loss, smoothed, and the validation metric against tokens or examples."""
    pyplot.switch_backend("Agg")
    steps = [line for line in log if "loss" in line]
    evaluations = [line for line in log if "evaluation" in line]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True)
    # The mean of as many steps before as after, fewer at the ends: one of steps before alone would lag behind.
    sums = [0.0, *itertools.accumulate(line["loss"] for line in steps)]
    reaches = [min(len(steps) // 40, i, len(steps) - 1 - i) for i in range(len(steps))]
    smooth = [(sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1) for i, reach in enumerate(reaches)]
    units = [line[task.unit] for line in steps]
    left.plot(units, [line["loss"] for line in steps], color="0.8", linewidth=0.8, label="each step")
    left.plot(units, smooth, color="#0072b2", label="smoothed")
    left.set(title="Training loss", xlabel=task.unit, ylabel="loss")
    left.legend()
    values = [line["evaluation"][task.metric] for line in evaluations]
    right.plot([line[task.unit] for line in evaluations], values, "o-", color="#d55e00")
    right.set(title=f"Validation {task.metric.replace('_', ' ')}", xlabel=task.unit)
    if not task.greater_is_better:
        right.set_yscale("log")
        plain_ticks(right.yaxis)
    for axis in (left, right):
        axis.xaxis.set_major_formatter(EngFormatter())
    write_figure(path, figure)


def load_whole(model_class, folder: Path):
    """A saved model, whole in every process: with FSDP, transformers loads it in the first one alone."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        return model_class.from_pretrained(folder)
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def versions() -> dict:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
