"""What `check` has new processes do: load exported folders as a stranger would, and use what was loaded.

Run as a file, never imported: python trial.py TASK.json, which says what to load, whether with our packages, and where
to write what came of it. It has no network, and only transformers, PyTorch and safetensors to go by.
"""

# ruff: noqa: E402 (what may be imported is settled first)

import json
import math
import shutil
import sys
from pathlib import Path


def forbid_network(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(arguments[1], tuple)):
        raise OSError(f"the network is off, and {event} was called with {arguments[1:]}")


work = Path(sys.argv[1]).parent
task = json.loads(Path(sys.argv[1]).read_text())
# Nothing in this file's folder is to be found by its name.
sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
sys.addaudithook(forbid_network)
for name in task["forbidden"]:
    # How Python says that a module cannot be imported.
    sys.modules[name] = None

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, Trainer, TrainingArguments, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module


if not task["forbidden"]:
    import modeling_gma  # noqa: F401 (registers GMA with the Auto classes)

TEXT = "The text"


class Loaded:
    """One folder, its Auto class and how it may be loaded."""

    def __init__(self, folder: dict, trust: bool, work: Path):
        self.path, self.checkpoint, self.work = folder["path"], folder["checkpoint"], work
        self.auto_class, self.auto_map, self.task = folder["auto_class"], folder["auto_map"], folder["pipeline"]
        self.trust = {"trust_remote_code": trust}
        # The first process leaves here what the original says, for the others to say the same.
        self.expected = work / f"{folder['number']}.safetensors"

    def config(self) -> str:
        config = AutoConfig.from_pretrained(self.path, **self.trust)
        came_from = type(config).__module__.partition(".")[0]
        wanted = "transformers_modules" if self.trust["trust_remote_code"] else "configuration_gma"
        demand(came_from == wanted, f"it is {came_from}'s, not {wanted}'s")
        return f"{type(config).__name__} of {came_from}"

    def classes(self) -> str:
        if not self.trust["trust_remote_code"]:
            return "the package's"
        for name in self.auto_map.values():
            get_class_from_dynamic_module(name, self.path)
        return ", ".join(self.auto_map)

    def tokenizer(self) -> str:
        if not self.has_tokenizer():
            return "there is none"
        tokenizer = AutoTokenizer.from_pretrained(self.path, **self.trust)
        ids = tokenizer(TEXT)["input_ids"]
        most = AutoConfig.from_pretrained(self.path, **self.trust).vocab_size
        demand(ids and max(ids) < most, f"it gives ids {ids} for a model of {most} tokens")
        return f"{len(ids)} tokens of {TEXT!r}"

    def logits(self) -> str:
        model, report = self.load(self.path, output_loading_info=True)
        wrong = {name: sorted(map(str, keys)) for name, keys in report.items() if name.endswith("_keys") and keys}
        demand(not wrong, f"{wrong}")
        if not self.trust["trust_remote_code"]:
            original = self.load(self.checkpoint)
            ours, theirs = model.state_dict(), original.state_dict()
            different = [name for name in theirs if name not in ours or not same(ours[name], theirs[name])]
            demand(not different and len(ours) == len(theirs), f"weights differ from the checkpoint's: {different}")
            save_file({"logits": outputs(original)}, self.expected)
        expected = load_file(self.expected)["logits"]
        demand(same(outputs(model), expected), "they differ from the checkpoint's")
        return f"{expected.numel():,} numbers, bit for bit the checkpoint's"

    def pipeline(self) -> str:
        if not self.has_tokenizer():
            return "none without a tokenizer"
        run = pipeline(self.task, model=self.path, device="cpu", **self.trust)
        text = TEXT
        if self.task == "fill-mask":
            if run.tokenizer.mask_token is None:
                return "none without a mask token"
            text = f"The {run.tokenizer.mask_token}"
        options = {"max_new_tokens": 8, "do_sample": False} if self.task == "text-generation" else {}
        result = run(text, **options)
        if self.task == "text-generation":
            new = result[0]["generated_text"]
            demand(new.startswith(TEXT), f"{new!r} does not go on from {TEXT!r}")
            return f"{self.task}: {new!r}"
        return self.task

    def round_trip(self) -> str:
        model = self.load(self.path)
        copy = self.work / "copy"
        model.save_pretrained(copy)
        try:
            demand(same(outputs(self.load(str(copy))), outputs(model)), "what was saved gives other logits")
        finally:
            shutil.rmtree(copy)
        return "saved and loaded again, the same logits"

    def train(self) -> str:
        if self.auto_class == "AutoModel":
            return "none without a head"
        model = self.load(self.path)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        ids, _ = inputs(model.config)
        rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels(self.task, model.config, ids))]
        arguments = TrainingArguments(
            str(self.work / "trainer"),
            max_steps=1,
            per_device_train_batch_size=len(rows),
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        loss = Trainer(model, arguments, train_dataset=rows).train().training_loss
        demand(math.isfinite(loss), f"its loss is {loss}")
        demand(any(not same(value, before[name]) for name, value in model.state_dict().items()), "no weight changed")
        return f"one step, loss {loss:.3f}"

    def load(self, path: str, **options):
        auto_class = getattr(transformers, self.auto_class)
        loaded = auto_class.from_pretrained(path, use_safetensors=True, **self.trust, **options)
        return (loaded[0].eval(), *loaded[1:]) if options else loaded.eval()

    def has_tokenizer(self) -> bool:
        return (Path(self.path) / "tokenizer_config.json").is_file()


def inputs(config):
    """Ids, and a mask that leaves out the end of one row."""
    length = 48 if config.position_embedding_type != "learned" else min(48, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, length // 2 + 1 :] = 0
    return ids, mask


@torch.no_grad()
def outputs(model):
    ids, mask = inputs(model.config)
    results = [model(input_ids=ids), model(input_ids=ids, attention_mask=mask)]
    results = [result.get("logits", result.get("last_hidden_state")) for result in results]
    return torch.stack(results)


def labels(task: str, config, ids) -> list:
    """Something to learn for each of two rows."""
    if task != "text-classification":
        return list(ids % config.num_labels if task == "token-classification" else ids)
    if config.num_labels == 1:
        return [0.0, 1.0]
    if config.problem_type in ("regression", "multi_label_classification"):
        return [torch.zeros(config.num_labels), torch.ones(config.num_labels)]
    return [0, 1]


def demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def same(first, second) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    report = []
    for folder in task["folders"]:
        loaded = Loaded(folder, bool(task["forbidden"]), work)
        for name in ("config", "classes", "tokenizer", "logits", "pipeline", "round_trip", "train"):
            try:
                line = {"passed": True, "said": getattr(loaded, name)()}
            except Exception as error:
                reason = " ".join(str(error).split())
                line = {"passed": False, "said": reason or type(error).__name__}
            report.append({"folder": folder["path"], "check": name} | line)
    Path(task["report"]).write_text(json.dumps(report))


main()
