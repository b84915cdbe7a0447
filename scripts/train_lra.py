"""Train a bidirectional classifier with any mixer on a task of Long Range Arena, by the paper's protocol.

    accelerate launch scripts/train_lra.py scripts/configs/lra_listops.yaml --output_dir listops
    accelerate launch scripts/train_lra.py scripts/configs/lra_text.yaml --output_dir text --mixer sdpa
    python scripts/train_lra.py --output_dir small --max_length 256 --train_size 20000 --num_train_epochs 2

Tasks: listops (made here from a seed), text (IMDb, from the Hub or --data_dir), retrieval, image, pathfinder (from
--data_dir). The loop is that of train_wikitext.py: checkpoints, --resume_from_checkpoint latest, signals, trackers. In
the output folder: the model of the best validation epoch, and results.json with its test accuracy.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from data import image, listops, pathfinder, retrieval, text
from data.lra import PADDING, VOCAB_SIZE
from metrics import Accuracy
from pairs import GMAForPairClassification
from torch.utils.data import DataLoader, Subset
from training import ModelArguments, Task, start

from baselines import build_twin
from modeling_gma import GMAConfig, GMAForSequenceClassification


TASKS = {"listops": listops, "text": text, "retrieval": retrieval, "image": image, "pathfinder": pathfinder}


@dataclass
class Arguments(ModelArguments):
    task: str = field(default="listops", metadata={"help": f"{', '.join(TASKS)}."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with the task's files."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where datasets are cached; by default as usual."})
    max_length: int | None = field(
        default=None, metadata={"help": "Longest sequence; by default the task's. ListOps is made no longer than it."}
    )
    min_length: int | None = field(default=None, metadata={"help": "ListOps is made longer than this."})
    train_size: int | None = field(default=None, metadata={"help": "Examples to train on; by default all."})
    eval_size: int | None = field(default=None, metadata={"help": "Examples to validate and test on; by default all."})
    num_train_epochs: float | None = field(
        default=None,
        metadata={
            "help": "Epochs, with an evaluation after each and a twentieth of warmup. In place of --max_steps, "
            "--eval_steps and --warmup_steps, which count where this is 0."
        },
    )
    hidden_size: int = field(default=256, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Number of blocks."})
    hidden_dropout: float = field(default=0.1, metadata={"help": "Dropout."})

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"--task must be one of {list(TASKS)}, got {self.task!r}.")
        if self.push_to_hub and self.task == "retrieval":
            raise ValueError("--push_to_hub does not go with --task retrieval: no Auto class loads its two towers.")
        for name in ("max_length", "train_size", "eval_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}.")
        self.max_length = self.max_length or TASKS[self.task].LENGTH
        super().__post_init__()

    def config(self, **fields) -> GMAConfig:
        return super().config(
            vocab_size=VOCAB_SIZE,
            pad_token_id=PADDING,
            max_position_embeddings=self.max_length,
            is_causal=False,
            num_labels=TASKS[self.task].NUM_CLASSES,
            **fields,
        )


class LongRangeArena(Task):
    metric = "accuracy"
    greater_is_better = True
    unit = "examples"

    def __init__(self, arguments: Arguments, accelerator: Accelerator):
        self.arguments, self.accelerator = arguments, accelerator
        module = TASKS[arguments.task]
        with accelerator.main_process_first():
            self.splits = {split: self._load(module, split) for split in ("train", "validation", "test")}
        for split, size in (
            ("train", arguments.train_size),
            ("validation", arguments.eval_size),
            ("test", arguments.eval_size),
        ):
            if size:
                # Of all of them: some files are sorted by label.
                rows = self.splits[split].shuffle(seed=0)
                self.splits[split] = rows.select(range(min(size, len(rows))))
        self.train_dataset = self.splits["train"].with_format("numpy")
        self.lengths = [len(ids) for ids in self.splits["train"].with_format("numpy")["input_ids"]]
        if arguments.num_train_epochs:
            per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
            steps = arguments.num_train_epochs * len(self.train_dataset) / (per_step * accelerator.num_processes)
            arguments.max_steps = max(math.ceil(steps), 1)
            arguments.eval_steps = max(math.ceil(steps / max(arguments.num_train_epochs, 1)), 1)
            arguments.warmup_steps = max(arguments.max_steps // 20, 1)
            epochs = f"{arguments.num_train_epochs:g}"
            accelerator.print(f"--num_train_epochs {epochs}: {arguments.max_steps:,} steps, whatever --max_steps says")
        set_seed(arguments.seed)
        kind = GMAForPairClassification if arguments.task == "retrieval" else GMAForSequenceClassification
        self.model = build_twin(arguments.config(), arguments.mixer, kind)
        counts = torch.bincount(torch.tensor(self.splits["train"]["labels"]), minlength=module.NUM_CLASSES)
        self.description = {
            "examples_in_split": {split: len(rows) for split, rows in self.splits.items()},
            "majority_class": int(counts.max()) / int(counts.sum()),
            "label_histogram": counts.tolist(),
        }

        accelerator.print(
            f"{arguments.mixer} on {arguments.task}: {sum(p.numel() for p in self.model.parameters()):,} parameters; "
            f"examples: {', '.join(f'{len(rows):,} {split}' for split, rows in self.splits.items())}"
        )

    def _load(self, module, split: str):
        arguments = self.arguments
        options = {"folder": arguments.data_dir, "cache_dir": arguments.cache_dir}
        if arguments.task in ("text", "retrieval"):
            options["length"] = arguments.max_length
        if arguments.task == "listops" and arguments.data_dir is None:
            shorter = arguments.min_length if arguments.min_length is not None else arguments.max_length // 4
            options |= {"longer": arguments.max_length, "shorter": shorter}
            if arguments.train_size:
                options["sizes"] = (arguments.train_size, 2_000, 2_000)
        return module.load(split, **options)

    def order(self, epoch: int) -> list[int]:
        """Random, but that examples of like length come together: batches are padded to their longest."""
        generator = torch.Generator().manual_seed(self.arguments.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self.arguments.per_device_train_batch_size * self.accelerator.num_processes
        pool = 50 * size
        batches = []
        for first in range(0, len(shuffled), pool):
            by_length = sorted(shuffled[first : first + pool], key=self.lengths.__getitem__, reverse=True)
            batches += [by_length[i : i + size] for i in range(0, len(by_length), size)]
        # The one that may not be full stays last.
        last = batches.pop() if len(batches[-1]) < size else []
        mixed = torch.randperm(len(batches), generator=generator).tolist()
        return [index for number in mixed for index in batches[number]] + last

    @staticmethod
    def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
        batch = {"labels": torch.tensor([int(example["labels"]) for example in examples])}
        for name in ("input_ids", "other_input_ids"):
            if name in examples[0]:
                rows = [torch.as_tensor(example[name].astype("int64")) for example in examples]
                ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
                batch |= {name: ids, name.replace("input_ids", "attention_mask"): (ids != PADDING).long()}
        return batch

    def loss(self, model, batch: dict) -> torch.Tensor:
        return model(**batch).loss

    def units(self, batch: dict) -> int:
        return len(batch["labels"])

    def watched(self) -> dict[str, torch.Tensor]:
        example = self.collate([self.splits["validation"].with_format("numpy")[0]])
        return {name: example[name] for name in ("input_ids", "attention_mask")}

    def evaluate(self, model, accelerator: Accelerator) -> dict[str, float]:
        return self._accuracy(model, "validation")

    def test(self, model, accelerator: Accelerator) -> dict[str, float]:
        return self._accuracy(model, "test")

    @torch.no_grad()
    def _accuracy(self, model, split: str) -> dict[str, float]:
        accelerator, rows = self.accelerator, self.splits[split].with_format("numpy")
        rank, world = accelerator.process_index, accelerator.num_processes
        # As many batches in every process; what is there twice is cut off after gathering.
        count = -(-len(rows) // world)
        mine = [min(rank + world * i, len(rows) - 1) for i in range(count)]
        loader = DataLoader(
            Subset(rows, mine), batch_size=self.arguments.per_device_eval_batch_size, collate_fn=self.collate
        )
        columns = []
        for batch in loader:
            output = model(**{name: x.to(accelerator.device) for name, x in batch.items()})
            logits, labels = output.logits.float(), batch["labels"].to(accelerator.device)
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            columns.append(torch.stack([logits.argmax(-1).float(), labels.float(), losses]))
        columns = torch.cat(columns, dim=1)
        if world > 1:
            columns = accelerator.gather(columns.unsqueeze(0)).permute(1, 2, 0).reshape(3, -1)
        predicted, right, losses = columns[:, : len(rows)].double().cpu()
        metric = Accuracy()
        metric.add_batch(predictions=predicted.int().tolist(), references=right.int().tolist())
        return metric.compute() | {"loss": losses.mean().item()}


def main() -> None:
    results = start(LongRangeArena, Arguments, __doc__)
    if results is not None:
        print(
            f"test accuracy {results['test']['accuracy']:.4f} at the best validation step {results['best_step']}; "
            f"largest class {results['majority_class']:.4f}"
        )


if __name__ == "__main__":
    main()
