"""Train a causal model with any mixer on multi-query associative recall, the task that tells mixers apart.

    python scripts/train_recall.py scripts/configs/two_cores_recall.yaml --output_dir recall --mixer gma
    python scripts/train_recall.py scripts/configs/two_cores_recall.yaml --output_dir recall16 --num_pairs 16
    python scripts/train_recall.py scripts/configs/two_cores_recall.yaml --output_dir gated \\
        --forget_gate true --position_embedding_type none

An example is made from a seed: key-value pairs, then every key once more after any distance, and blanks between; at
each key that is asked the model is to say its value. Who knows but which values there are is right once in as many
answers as there are pairs. With several --num_pairs, as many examples have each. The loop
is that of train_wikitext.py: checkpoints, --resume_from_checkpoint latest, signals, trackers.

In the output folder: the model of the best validation, and results.json with its test accuracy, by the number of pairs
and, for each, by the distance between a query and its pair in tokens. Of a model with GMA heads and local heads in a
layer also without what the one or the other bring: what the memory carries, and what the window.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from data import recall
from torch.utils.data import DataLoader, Subset
from train_wikitext import LanguageModelling
from training import DecoderArguments, start
from variations import vary

from baselines import build_twin
from modeling_gma import GMAAttention, GMAConfig


KINDS = ("gma_heads", "local_heads")


@dataclass
class Arguments(DecoderArguments):
    num_pairs: list[int] = field(
        default_factory=lambda: [8, 16, 32, 64], metadata={"help": "Pairs in an example, at most --length / 3."}
    )
    length: int = field(default=256, metadata={"help": "Tokens in an example."})
    vocab_size: int = field(default=512, metadata={"help": "A blank, and half keys, half values."})
    train_size: int = field(default=20_000, metadata={"help": "Examples to train on for each number of pairs."})
    eval_size: int = field(
        default=500, metadata={"help": "Examples to validate on for each number of pairs, and as many to test on."}
    )
    data_seed: int = field(default=0, metadata={"help": "Fixes the examples; --seed fixes the rest."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where examples are kept; by default with datasets."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that make examples; by default as many as pay."}
    )
    hidden_size: int = field(default=64, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Number of blocks."})
    num_attention_heads: int = field(default=2, metadata={"help": "Heads in each block."})
    num_components: int = field(default=64, metadata={"help": "Mixture components in each head, K."})

    def __post_init__(self):
        for name in ("train_size", "eval_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if not self.num_pairs or len(set(self.num_pairs)) < len(self.num_pairs):
            raise ValueError(f"--num_pairs must be one or more numbers, none of them twice, got {self.num_pairs}.")
        for number in self.num_pairs:
            recall.check(number, self.length, self.vocab_size)
        super().__post_init__()

    def config(self, **fields) -> GMAConfig:
        return super().config(vocab_size=self.vocab_size, max_position_embeddings=self.length, **fields)


class AssociativeRecall(LanguageModelling):
    """Order, loss and checks are those of language models: what is asked differs, and how answers are counted."""

    metric = "accuracy"
    greater_is_better = True

    def __init__(self, arguments: Arguments, accelerator: Accelerator):
        self.arguments, self.accelerator = arguments, accelerator
        with accelerator.main_process_first():
            self.train_dataset, self.validation, self.examples_to_test = (
                recall.load(
                    split,
                    arguments.num_pairs,
                    arguments.train_size if split == "train" else arguments.eval_size,
                    arguments.length,
                    arguments.vocab_size,
                    arguments.data_seed,
                    arguments.cache_dir,
                    arguments.preprocessing_num_workers,
                )
                for split in ("train", "validation", "test")
            )
        self.description = {
            "examples_in_split": {
                "train": len(self.train_dataset),
                "validation": len(self.validation),
                "test": len(self.examples_to_test),
            },
            "checksums": [self.train_dataset.checksum(), self.validation.checksum(), self.examples_to_test.checksum()],
        }
        set_seed(arguments.seed)
        self.model = build_twin(arguments.config(), arguments.mixer, self.model_class)
        if arguments.variation is not None:
            vary(self.model, arguments.variation)
        accelerator.print(
            f"{arguments.mixer}: {sum(p.numel() for p in self.model.parameters()):,} parameters; "
            f"{', '.join(map(str, arguments.num_pairs))} pairs in {arguments.length} tokens, "
            f"{len(self.train_dataset):,} examples to train on"
        )

    def evaluate(self, model, accelerator: Accelerator) -> dict[str, float]:
        return figures(count_answers(self, model, self.validation, accelerator).sum((0, 1)))

    def test(self, model, accelerator: Accelerator) -> dict:
        """Accuracy of all, by distance, by number of pairs, and by both; and without heads of one kind."""
        found = self._test(model, accelerator)
        for kind in KINDS if any(map(has_both_kinds, model.modules())) else ():
            with silenced(model, kind):
                found[f"without_{kind}"] = self._test(model, accelerator)
        return found

    def _test(self, model, accelerator: Accelerator) -> dict:
        counts = count_answers(self, model, self.examples_to_test, accelerator)
        of_pairs = [
            {"pairs": number, **figures(of_number.sum(0)), "by_distance": by_distance(of_number)}
            for number, of_number in zip(self.arguments.num_pairs, counts)
        ]
        return {**figures(counts.sum((0, 1))), "by_distance": by_distance(counts.sum(0)), "by_pairs": of_pairs}


def has_both_kinds(module: torch.nn.Module) -> bool:
    return isinstance(module, GMAAttention) and bool(module.num_local_heads and module.num_mixture_heads)


@contextmanager
def silenced(model, kind: str):
    """Within, local heads or GMA heads of layers that have both bring zeros."""
    hooks = []
    for mixer in filter(has_both_kinds, model.modules()):
        local = mixer.num_local_heads * mixer.config.value_dim
        part = slice(None, local) if kind == "local_heads" else slice(local, None)
        hooks.append(mixer.o_proj.register_forward_pre_hook(partial(_without, part)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without(part: slice, _, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    heads = inputs[0].clone()
    heads[..., part] = 0.0
    return (heads,)


@torch.no_grad()
def count_answers(task: AssociativeRecall, model, examples: recall.Recall, accelerator: Accelerator) -> torch.Tensor:
    """Queries, right answers and summed losses of all processes: (numbers of pairs, powers of two, 3)."""
    numbers, length = task.arguments.num_pairs, task.arguments.length
    rank, world = accelerator.process_index, accelerator.num_processes
    # As many batches in every process: sharded models go forward together. What is there twice counts once.
    mine = [rank + world * i for i in range(-(-len(examples) // world))]
    rows = [min(row, len(examples) - 1) for row in mine]
    size = task.arguments.per_device_eval_batch_size
    totals = torch.zeros(len(numbers) * length.bit_length(), 3, dtype=torch.float64)
    for number, batch in enumerate(DataLoader(Subset(examples, rows), batch_size=size)):
        batch = {name: x.to(accelerator.device) for name, x in batch.items()}
        logits = model(**task.inputs(batch)).logits
        of_batch = slice(number * size, (number + 1) * size)
        distances = torch.stack([examples.distances(row) for row in rows[of_batch]])
        is_real = torch.tensor([row < len(examples) for row in mine[of_batch]])
        asked = (distances > 0) & is_real[:, None]
        pairs = torch.tensor([numbers.index(n) for n in examples.num_pairs[rows[of_batch]]])
        # The exponent of the largest power of two that is not above it.
        power = torch.frexp(distances[asked].double()).exponent - 1
        group = pairs[:, None].expand_as(asked)[asked] * length.bit_length() + power
        on_device = asked.to(accelerator.device)
        answers, values = logits[on_device].float(), batch["labels"][on_device]
        losses = F.cross_entropy(answers, values, reduction="none")
        found = torch.stack([torch.ones_like(losses), (answers.argmax(-1) == values).float(), losses], dim=-1)
        totals.index_add_(0, group, found.double().cpu())
    if world > 1:
        totals = accelerator.reduce(totals.to(accelerator.device), "sum").cpu()
    return totals.view(len(numbers), length.bit_length(), 3)


def figures(counts: torch.Tensor) -> dict[str, float]:
    """What queries, right answers and summed losses (3,) come to."""
    queries, right, loss = counts.tolist()
    return {"accuracy": right / queries, "loss": loss / queries, "queries": int(queries)}


def by_distance(counts: torch.Tensor) -> list[dict]:
    """The same for each power of two (powers, 3) that has queries, from and to a distance in tokens."""
    return [
        {"from": 2**power, "to": 2 ** (power + 1) - 1, **figures(of_power)}
        for power, of_power in enumerate(counts)
        if of_power[0]
    ]


def main() -> None:
    results = start(AssociativeRecall, Arguments, __doc__)
    if results is not None:
        by_pairs = ", ".join(f"{of['pairs']} pairs {of['accuracy']:.4f}" for of in results["test"]["by_pairs"])
        print(f"test accuracy at step {results['best_step']}: {by_pairs}")


if __name__ == "__main__":
    main()
