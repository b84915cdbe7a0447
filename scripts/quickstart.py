"""Train a small causal GMA model from nothing, in a few minutes on two cores, with no data to download.

The text is the language reference that every CPython carries for `help()`. The script trains a byte-level tokenizer
and a GMA model with Accelerate, says what validation perplexity it reached, saves both (safetensors), and has a new
process load them through the Auto classes and continue a prompt with the text-generation pipeline.

    python scripts/quickstart.py --output_dir quickstart_output
    accelerate launch scripts/quickstart.py --output_dir quickstart_output     # the same, as `accelerate config` says
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path


# Threads that wait for work sleep: on shared cores, spinning ones slow each other down many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from data.wikitext import train_tokenizer
from datasets import Dataset
from memory import keep_freed_memory
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import HfArgumentParser, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup
from transformers.utils import logging

from modeling_gma import GMAConfig, GMAForCausalLM, parameter_groups


# What a quickstart folder holds. A folder with anything else in it, or without our results, is left alone.
FILES = {"config.json", "generation_config.json", "model.safetensors", "results.json"}
FILES |= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}

# What the new process runs; it is all that using a saved model takes.
GENERATE = """
import sys
import modeling_gma  # registers GMA with the Auto classes
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, set_seed
from transformers.utils import logging

path, prompt, seed, max_new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
logging.disable_progress_bar()
set_seed(seed)
model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
print(generator(prompt, max_new_tokens=max_new_tokens, do_sample=True, top_k=20)[0]["generated_text"])
"""


@dataclass
class Arguments:
    output_dir: str = field(
        default="quickstart_output", metadata={"help": "Folder for the model, made or replaced whole."}
    )
    seed: int = field(default=0, metadata={"help": "Fixes the split, the initial weights, the data order, the text."})
    vocab_size: int = field(default=2048, metadata={"help": "Entries of the BPE vocabulary."})
    hidden_size: int = field(default=128, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Number of blocks."})
    num_attention_heads: int = field(default=4, metadata={"help": "Heads in each block."})
    num_components: int = field(default=64, metadata={"help": "Mixture components (memory slots) in each head."})
    block_size: int = field(default=256, metadata={"help": "Tokens in a training sequence."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Sequences in a step."})
    max_steps: int = field(default=300, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=5e-3, metadata={"help": "Peak of the warmup-cosine schedule."})
    weight_decay: float = field(
        default=0.1, metadata={"help": "On weight matrices; mixtures, norms and biases take none."}
    )
    prompt: str = field(default='The "for" statement', metadata={"help": "What to continue at the end."})
    max_new_tokens: int = field(default=60, metadata={"help": "Tokens to continue it by."})

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "per_device_train_batch_size", "max_steps", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.vocab_size < 257:
            raise ValueError(f"--vocab_size must be at least 257 (the bytes and end of text), got {self.vocab_size}.")
        if self.learning_rate <= 0:
            raise ValueError(f"--learning_rate must be above 0, got {self.learning_rate}.")
        if not self.prompt:
            raise ValueError("--prompt must not be empty.")

    def model_config(self, **tokens) -> GMAConfig:
        """The paper's causal model with a forget gate in place of positions: it learns faster, and has no limit."""
        return GMAConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_components=self.num_components,
            position_embedding_type="none",
            forget_gate=True,
            hidden_dropout=0.1,
            # Of projections as wide as at width 512 with the default.
            initializer_range=0.04,
            **tokens,
        )


def load_topics(seed: int) -> tuple[list[str], list[str]]:
    """The topics of Python's language reference, shuffled, a tenth of them for validation."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    random.Random(seed).shuffle(texts)
    held_out = len(texts) // 10
    return texts[held_out:], texts[:held_out]


def make_blocks(texts: list[str], tokenizer: PreTrainedTokenizerFast, block_size: int) -> Dataset:
    """All texts in a row, each closed by end of text, cut into blocks."""
    tokens = [token for ids in tokenizer(texts)["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
    blocks = [tokens[i : i + block_size] for i in range(0, len(tokens) - block_size + 1, block_size)]
    if not blocks:
        raise SystemExit(f"--block_size {block_size} is longer than the {len(tokens)} tokens of a split.")
    return Dataset.from_dict({"input_ids": blocks}).with_format("torch")


@torch.no_grad()
def perplexity(model, loader: DataLoader, accelerator: Accelerator) -> float:
    model.eval()
    losses = []
    for batch in loader:
        loss = model(**batch, labels=batch["input_ids"]).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    return math.exp(torch.cat(losses).mean().item())


def train(arguments: Arguments, accelerator: Accelerator):
    set_seed(arguments.seed)
    train_texts, validation_texts = load_topics(arguments.seed)
    tokenizer = train_tokenizer(train_texts, arguments.vocab_size)
    batch_size = arguments.per_device_train_batch_size
    train_blocks = make_blocks(train_texts, tokenizer, arguments.block_size)
    train_loader = DataLoader(
        train_blocks, batch_size=min(batch_size, len(train_blocks)), shuffle=True, drop_last=True
    )
    validation_loader = DataLoader(
        make_blocks(validation_texts, tokenizer, arguments.block_size), batch_size=batch_size
    )

    config = arguments.model_config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GMAForCausalLM(config)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, arguments.weight_decay), lr=arguments.learning_rate, betas=(0.9, 0.95)
    )
    steps = arguments.max_steps * accelerator.num_processes
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, scheduler, train_loader, validation_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, validation_loader
    )
    accelerator.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_blocks) * arguments.block_size:,} "
        f"training tokens, {config.vocab_size} token types"
    )
    before = perplexity(model, validation_loader, accelerator)
    accelerator.print(f"validation perplexity before training: {before:.1f}")

    start = time.perf_counter()
    tokens_per_step = train_loader.total_batch_size * arguments.block_size
    progress = tqdm(total=arguments.max_steps, desc="training", unit="step", disable=not accelerator.is_main_process)
    step = 0
    while step < arguments.max_steps:
        model.train()
        for batch in train_loader:
            loss = model(**batch, labels=batch["input_ids"]).loss
            if not loss.isfinite():
                raise SystemExit(f"The loss is {loss.item()} at step {step + 1}; try a lower --learning_rate.")
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            speed = step * tokens_per_step / (time.perf_counter() - start)
            progress.set_postfix(loss=f"{loss.item():.2f}", tokens_per_s=f"{speed:,.0f}", refresh=False)
            progress.update()
            if step == arguments.max_steps:
                break
    progress.close()
    seconds = time.perf_counter() - start
    after = perplexity(model, validation_loader, accelerator)
    accelerator.print(f"validation perplexity after training:  {after:.1f}  ({seconds:.0f} s)")
    results = {
        "validation_perplexity_before": before,
        "validation_perplexity_after": after,
        "tokens": step * tokens_per_step,
        "seconds": seconds,
        "arguments": asdict(arguments) | {"output_dir": Path(arguments.output_dir).name},
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
    }
    return accelerator.unwrap_model(model), tokenizer, results


def is_ours(results: Path) -> bool:
    try:
        return "validation_perplexity_after" in json.loads(results.read_text())
    except (OSError, ValueError):
        return False


def make_room(folder: Path) -> Path:
    """A folder beside the one to write, made before any work is done. Nobody's files are in the way."""
    if folder.exists() and not folder.is_dir():
        raise SystemExit(f"--output_dir {folder} is a file; name a folder.")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name not in FILES]
    if others or (names and not is_ours(folder / "results.json")):
        shown = ", ".join((others or names)[:3])
        raise SystemExit(f"--output_dir {folder} holds files of somebody else's ({shown}); name another folder.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise SystemExit(f"--output_dir {folder} cannot be made: {error}") from None


def save(folder: Path, aside: Path, model: GMAForCausalLM, tokenizer: PreTrainedTokenizerFast, results: dict) -> None:
    """Write everything aside, then put it in place at once."""
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    aside.chmod(0o755)
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def generate(folder: Path, arguments: Arguments) -> None:
    print(
        "\nA new process loads it and goes on from the prompt (so small a model writes nonsense, in Python's voice):\n"
    )
    command = [sys.executable, "-c", GENERATE, str(folder), arguments.prompt, str(arguments.seed)]
    sys.stdout.flush()
    if subprocess.run([*command, str(arguments.max_new_tokens)]).returncode:
        raise SystemExit(f"The model is saved in {folder}, but generating with it failed; the reason stands above.")


def main() -> None:
    parser = HfArgumentParser(Arguments, description=__doc__.split("\n\n")[0])
    try:
        (arguments,) = parser.parse_args_into_dataclasses()
        arguments.model_config(vocab_size=arguments.vocab_size)
    except Exception as error:
        parser.error(str(error))
    logging.disable_progress_bar()
    keep_freed_memory()
    folder = Path(arguments.output_dir).expanduser().resolve()
    accelerator = Accelerator()
    aside = make_room(folder) if accelerator.is_main_process else None
    try:
        model, tokenizer, results = train(arguments, accelerator)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            save(folder, aside, model, tokenizer, results)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; nothing was written.")
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    if accelerator.is_main_process:
        print(f"saved to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        generate(folder, arguments)


if __name__ == "__main__":
    main()
