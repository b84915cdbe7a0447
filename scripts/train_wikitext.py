"""Train a causal language model with any mixer, by the paper's protocol.

    accelerate launch scripts/train_wikitext.py scripts/configs/wikitext103.yaml --output_dir wikitext103
    python scripts/train_wikitext.py scripts/configs/two_cores.yaml --dataset_name FOLDER --output_dir small

The first is the paper's run (20,000 steps of 16,384 tokens of WikiText-103); `accelerate config` says on what. The
second takes about 20 minutes on two cores, on any folder with train.* and validation.* files of text. A run that was
stopped, or killed, goes on with --resume_from_checkpoint latest and ends as if it had not been.

In the output folder: the best model (safetensors, with its tokenizer, for AutoModelForCausalLM), results.json,
loss.png, log.jsonl with every step, and checkpoints/.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path


# Threads that wait for work sleep: on shared cores, spinning ones slow each other down many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from checkpoints import unwrap
from data.wikitext import Blocks, load_text, load_tokenizer, tokenize, train_tokenizer
from safetensors.torch import load_model
from torch.utils.data import DataLoader, Subset
from training import DecoderArguments, Task, start
from variations import vary

from baselines import build_twin
from modeling_gma import GMAConfig, GMAForCausalLM
from modeling_gma.attention import GMAForgetGate, GMAQueryProjection
from modeling_gma.mixture import MEAN_SCALE, SCORE_SPREAD, GaussianMixture


@dataclass
class Arguments(DecoderArguments):
    dataset_name: str = field(
        default="Salesforce/wikitext", metadata={"help": "Hub dataset, or a local folder with train.*, validation.*."}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Its configuration; wikitext-103-raw-v1 for Salesforce/wikitext."}
    )
    train_file: str | None = field(default=None, metadata={"help": "Text to train on, in place of --dataset_name."})
    validation_file: str | None = field(default=None, metadata={"help": "Text to validate on, with --train_file."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where datasets are cached; by default as usual."})
    tokenizer_name: str = field(default="gpt2", metadata={"help": "Tokenizer, by Hub name or local folder."})
    train_tokenizer: int | None = field(
        default=None, metadata={"help": "Train a BPE of this many entries on the training text instead."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenise; by default one for each core."}
    )
    block_size: int = field(default=1024, metadata={"help": "Tokens in a sequence."})
    score_spread: float = field(
        default=SCORE_SPREAD, metadata={"help": "Spread of the components' scores at the start."}
    )
    mean_scale: float = field(
        default=MEAN_SCALE, metadata={"help": "Length of the components' means at the start, in routing vectors."}
    )
    query_bias: float | None = field(
        default=None,
        metadata={"help": "How far from zero queries begin, in routing vectors; see modeling_gma.attention."},
    )
    forget_gate_bias: list[float] | None = field(
        default=None,
        metadata={
            "help": "Bias of forget gates at the start: one, or those of the first and last head, the others between."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.forget_gate_bias is not None and len(self.forget_gate_bias) not in (1, 2):
            raise ValueError(f"--forget_gate_bias must be one number or two, got {self.forget_gate_bias}.")
        if self.block_size < 2:
            raise ValueError(f"--block_size must be at least 2, got {self.block_size}.")
        if self.train_tokenizer and self.train_tokenizer < 257:
            raise ValueError(
                f"--train_tokenizer must be at least 257 (bytes, end of text), got {self.train_tokenizer}."
            )
        if (self.train_file is None) != (self.validation_file is None):
            raise ValueError("--train_file and --validation_file go together.")
        for name in ("score_spread", "mean_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be above 0, got {getattr(self, name)}.")
        if self.dataset_config_name is None and self.dataset_name == "Salesforce/wikitext":
            self.dataset_config_name = "wikitext-103-raw-v1"

    def config(self, **fields) -> GMAConfig:
        return super().config(max_position_embeddings=self.block_size, **fields)


class LanguageModelling(Task):
    metric = "perplexity"
    model_class = GMAForCausalLM

    def __init__(self, arguments: Arguments, accelerator: Accelerator):
        self.arguments, self.accelerator = arguments, accelerator
        files = {"train": arguments.train_file, "validation": arguments.validation_file}
        # One process downloads and tokenises; the others find it in the cache.
        with accelerator.main_process_first():
            splits = load_text(
                arguments.dataset_name,
                arguments.dataset_config_name,
                arguments.text_column,
                files if arguments.train_file else None,
                arguments.cache_dir,
            )
            for split in ("train", "validation"):
                if split not in splits:
                    raise SystemExit(f"The data has no {split} split; it has {', '.join(splits)}.")
        self.tokenizer = self._tokenizer(splits["train"])
        with accelerator.main_process_first():
            tokens = {
                split: tokenize(splits[split], self.tokenizer, arguments.preprocessing_num_workers)
                for split in ("train", "validation")
            }
        end = self.tokenizer.eos_token_id
        self.train_dataset = Blocks(tokens["train"], arguments.block_size, end, train=True)
        self.validation = Blocks(tokens["validation"], arguments.block_size, end)
        self.description = {
            "train_tokens": self.train_dataset.num_targets,
            "validation_tokens": self.validation.num_targets,
            "vocab_size": len(self.tokenizer),
            "checksums": [self.train_dataset.checksum(), self.validation.checksum()],
        }
        set_seed(arguments.seed)
        config = arguments.config(
            vocab_size=len(self.tokenizer),
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        self.model = build_twin(config, arguments.mixer, self.model_class)
        routing_std = config.initializer_range * math.sqrt(config.hidden_size)
        for module in self.model.modules():
            if isinstance(module, GaussianMixture):
                module.reset_parameters(routing_std, arguments.score_spread, arguments.mean_scale)
            elif isinstance(module, GMAQueryProjection) and arguments.query_bias is not None:
                torch.nn.init.zeros_(module.bias)
                module.reset_bias(routing_std, arguments.query_bias)
            elif isinstance(module, GMAForgetGate) and arguments.forget_gate_bias is not None:
                module.reset_bias(arguments.forget_gate_bias[0], arguments.forget_gate_bias[-1])
        if arguments.variation is not None:
            vary(self.model, arguments.variation)
        accelerator.print(
            f"{arguments.mixer}: {sum(p.numel() for p in self.model.parameters()):,} parameters; "
            f"{self.train_dataset.num_targets:,} tokens to train on, {self.validation.num_targets:,} to validate"
        )

    def _tokenizer(self, rows):
        arguments, accelerator = self.arguments, self.accelerator
        if not arguments.train_tokenizer:
            return load_tokenizer(arguments.tokenizer_name)
        folder = Path(arguments.output_dir).expanduser() / "checkpoints" / "tokenizer"
        if accelerator.is_main_process:
            texts = (row["text"] for row in rows)
            train_tokenizer(texts, arguments.train_tokenizer, show_progress=True).save_pretrained(folder)
        accelerator.wait_for_everyone()
        return load_tokenizer(str(folder))

    def load(self, folder: Path) -> torch.nn.Module:
        model = super().load(folder)
        if self.arguments.variation is not None:
            # Classes do not know of it; what it has learned is in the file nevertheless.
            vary(model, self.arguments.variation)
            load_model(model, folder / "model.safetensors")
        return model

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.arguments.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.train_dataset), generator=generator).tolist()

    def inputs(self, batch: dict) -> dict:
        """What the model takes; its loss is a mean over labels that are not -100."""
        # Labels are the tokens after the inputs already.
        return batch | {"shift_labels": batch["labels"], "use_cache": False}

    def loss(self, model, batch: dict) -> torch.Tensor:
        return model(**self.inputs(batch)).loss

    def units(self, batch: dict) -> int:
        return batch["input_ids"].numel()

    def evaluate(self, model, accelerator: Accelerator) -> dict[str, float]:
        loss = mean_loss(self, model, self.validation, self.arguments.per_device_eval_batch_size, accelerator)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def check(self, model) -> str:
        error = prefix_error(model, self.train_dataset[0]["input_ids"].unsqueeze(0))
        if error != 0:
            raise SystemExit(f"The model is not causal: later tokens change earlier logits by {error:.2g}.")
        return "prefix check: later tokens change earlier logits by exactly 0"

    def watched(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.validation[0]["input_ids"].unsqueeze(0)}


@torch.no_grad()
def mean_loss(task: LanguageModelling, model, blocks: Blocks, batch_size: int, accelerator: Accelerator) -> float:
    """Mean over all tokens, each once, shared out over the processes."""
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = list(range(rank, len(blocks), world))
    # As many batches in every process: sharded models have to go forward together.
    count = -(-len(range(0, len(blocks), world)) // batch_size)
    batches = iter(DataLoader(Subset(blocks, mine), batch_size=batch_size))
    totals = torch.zeros(2, dtype=torch.float64)
    for _ in range(count):
        batch = next(batches, None)
        is_real = batch is not None
        batch = batch if is_real else {name: x.unsqueeze(0) for name, x in blocks[0].items()}
        batch = {name: x.to(accelerator.device) for name, x in batch.items()}
        inputs = task.inputs(batch)
        loss = model(**inputs).loss
        if is_real:
            tokens = int((inputs["labels"] != -100).sum())
            totals += torch.tensor([loss.item() * tokens, tokens], dtype=torch.float64)
    if world > 1:
        totals = accelerator.reduce(totals.to(accelerator.device), "sum")
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def prefix_error(model, tokens: torch.Tensor) -> float:
    """How much logits of the first half of (1, N) tokens change when the second half does."""
    was_training, model = model.training, model.eval()
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 1) % unwrap(model).config.vocab_size
    device = next(model.parameters()).device
    first, second = (model(input_ids=x.to(device), use_cache=False).logits[:, :half] for x in (tokens, other))
    model.train(was_training)
    return (first - second).abs().max().item()


def main() -> None:
    results = start(LanguageModelling, Arguments, __doc__)
    if results is not None:
        print(
            f"validation perplexity {results['validation']['perplexity']:.2f} at step {results['best_step']}; "
            f"{results['tokens_per_second']:,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
