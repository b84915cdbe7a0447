"""The training script as people use it: killed, stopped, misused, in two processes. On a tiny model and text."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from checkpoints import checkpoint_steps, load_optimizer, prune, save_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from train_wikitext import Arguments, LanguageModelling, mean_loss, prefix_error
from training import Batches, Lock, Signals, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from baselines import build_twin
from modeling_gma import GMAConfig, GMAForCausalLM, parameter_groups


SCRIPTS = Path(__file__).parents[2] / "scripts"
STEPS = 60
SMALL = {
    "train_tokenizer": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_components": 4,
    "block_size": 16,
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "eval_steps": 10,
    "checkpointing_steps": 3,
    "learning_rate": 3e-3,
    "preprocessing_num_workers": 1,
}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(0)
    vocabulary = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "seven", "quick", "slow"]
    for split, rows in (("train", 200), ("validation", 20)):
        lines = [" ".join(words.choices(vocabulary, k=12)) + " .\n" for _ in range(rows)]
        (folder / f"{split}.txt").write_text(" = Title = \n" + "".join(lines))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


def arguments(corpus, output, **changed):
    cache = str(Path(output).parent / "cache")
    return Arguments(output_dir=str(output), dataset_name=str(corpus), cache_dir=cache, **(SMALL | changed))


def run(corpus, output, **changed):
    given = arguments(corpus, output, **changed)
    accelerator = given.make_accelerator()
    return train(LanguageModelling, given, accelerator)


def command(corpus, output, *flags):
    script = str(SCRIPTS / "train_wikitext.py")
    folders = ["--dataset_name", str(corpus), "--output_dir", str(output), "--cache_dir", str(corpus / "cache")]
    return [sys.executable, script, *FLAGS, *folders, *flags]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run that nothing interrupts, with dropout."""
    output = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(corpus, output, "--hidden_dropout", "0.1"), check=True, capture_output=True)
    return output


def test_what_a_run_leaves(whole):
    names = {path.name for path in whole.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "results.json", "loss.png", "log.jsonl"}
    assert not [path for path in whole.rglob("*") if path.suffix in (".part", ".bin", ".pt", ".pkl", ".pth")]
    results = json.loads((whole / "results.json").read_text())
    assert results["tokens"] == STEPS * 4 * 16 and results["validation"]["perplexity"] > 1
    assert set(results["mixture"]) >= {"usage_entropy", "token_entropy", "active", "smallest_variance"}
    assert not any("warning" in line for line in (json.loads(x) for x in (whole / "log.jsonl").open()))
    assert str(whole.parent) not in (whole / "results.json").read_text()
    assert list(losses(whole)) == list(range(1, STEPS + 1))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(whole), AutoTokenizer.from_pretrained(whole)
    assert isinstance(model, GMAForCausalLM)
    model.generate(**tokenizer("alpha beta", return_tensors="pt"), max_new_tokens=3)
    # The newest two, and the best.
    assert set(checkpoint_steps(whole / "checkpoints")) == {STEPS - 3, STEPS, results["best_step"]}


def wait_for_progress(process):
    """Until the bar of training shows: it begins with a percentage after "training"."""
    seen = ""
    while not seen.endswith("training:"):
        character = process.stderr.read(1)
        if not character:
            return
        seen += character


def test_killed_at_any_moment_it_ends_the_same(corpus, whole, tmp_path):
    output, dice = tmp_path / "run", random.Random(int(os.environ.get("GMA_KILL_SEED", "1")))
    kills, wanted, resumed = 0, int(os.environ.get("GMA_KILLS", "3")), []
    flags = ["--hidden_dropout", "0.1", "--resume_from_checkpoint", "latest"]
    while not (output / "results.json").exists():
        before = checkpoint_steps(output / "checkpoints")
        process = subprocess.Popen(
            command(corpus, output, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if kills < wanted:
            # Most of the time goes into starting: the moment is one of training, after another checkpoint.
            wait_for_progress(process)
            while process.poll() is None and checkpoint_steps(output / "checkpoints").keys() <= before.keys():
                time.sleep(0.001)
            time.sleep(dice.uniform(0.0, 0.05))
            process.kill()
            kills += process.wait() == -signal.SIGKILL
        printed, error = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), error
        resumed += [int(step) for step in re.findall(r"going on from step_(\d+)", printed)]
    assert kills == wanted and len(resumed) == wanted and all(0 < step < STEPS for step in resumed)
    assert losses(output) == losses(whole)
    last = f"checkpoints/step_{STEPS:08d}"
    for name in ("model.safetensors", f"{last}/model.safetensors", f"{last}/optimizer.safetensors"):
        ours, theirs = load_file(output / name), load_file(whole / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_sigterm_saves_and_leaves(corpus, tmp_path):
    output = tmp_path / "run"
    flags = ["--max_steps", "100000", "--checkpointing_steps", "100000", "--eval_steps", "100000"]
    process = subprocess.Popen(
        command(corpus, output, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_progress(process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    (step,) = checkpoint_steps(output / "checkpoints")
    assert f"SIGTERM: saved step {step}" in printed and not (output / "results.json").exists()
    assert len(losses(output)) == step


@pytest.mark.parametrize("flags", [[], ["--mixed_precision", "bf16"]], ids=["plain", "bf16"])
def test_two_processes_are_as_one(corpus, tmp_path, flags, run_in_two_processes):
    """The same global batch, in one process and in two."""
    tolerance = 2e-2 if flags else 1e-4
    both = ["--max_steps", "50", "--eval_steps", "50", "--checkpointing_steps", "50", *flags]
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run(command(corpus, one, *both), check=True, capture_output=True)
    here = command(corpus, two, *both, "--per_device_train_batch_size", "2")[2:]
    run_in_two_processes(SCRIPTS / "train_wikitext.py", *here)
    assert json.loads((two / "results.json").read_text())["processes"] == 2
    ours, theirs = losses(two), losses(one)
    assert len(ours) == len(theirs) == 50
    worst = max(abs(ours[step] - theirs[step]) for step in ours)
    assert worst < tolerance
    a, b = (json.loads((x / "results.json").read_text())["validation"]["loss"] for x in (one, two))
    assert abs(a - b) < tolerance


SHARDED = """
import sys, torch
from pathlib import Path
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from checkpoints import load_optimizer, save_checkpoint
from modeling_gma import GMAConfig, GMAForCausalLM, parameter_groups

dist.init_process_group("gloo")
folder = Path(sys.argv[1])
torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_components": 4}
model = GMAForCausalLM(GMAConfig(**sizes))
mesh = init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
tokens = torch.arange(24).view(2, 12)[dist.get_rank() :][:1]
def step():
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
step()
save_checkpoint(folder, 1, model, optimizer, {}, dist.get_rank() == 0)
dist.barrier()
step()
save_checkpoint(folder, 2, model, optimizer, {}, dist.get_rank() == 0)
dist.barrier()
# Back to the first step: the moments must come back sharded.
load_optimizer(folder / "step_00000001", model, optimizer)
save_checkpoint(folder, 3, model, optimizer, {}, dist.get_rank() == 0)
dist.destroy_process_group()
"""


def test_a_sharded_model_saves_what_anybody_loads(tmp_path, run_in_two_processes):
    """FSDP in two processes; Accelerate offers it on accelerators only, so here it is PyTorch's own."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    run_in_two_processes(script, tmp_path, accelerate=False, PYTHONPATH=str(SCRIPTS))
    torch.manual_seed(0)
    config = GMAConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_components=4)
    model = GMAForCausalLM(config)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    tokens = torch.arange(24).view(2, 12)
    for step in (1, 2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loaded = GMAForCausalLM.from_pretrained(tmp_path / f"step_{step:08d}")
        for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters()):
            torch.testing.assert_close(theirs, ours, msg=name, rtol=1e-4, atol=1e-5)
    first, third = (load_file(tmp_path / f"step_0000000{i}" / "optimizer.safetensors") for i in (1, 3))
    assert first.keys() == third.keys() and all(torch.equal(first[key], third[key]) for key in first)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    def parts(**fields):
        config = GMAConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **fields)
        model = GMAForCausalLM(config)
        return model, torch.optim.AdamW(parameter_groups(model, 0.1))

    model, optimizer = parts(num_components=4)
    save_checkpoint(tmp_path, 7, model, optimizer, {}, is_main=True)
    load_optimizer(tmp_path / "step_00000007", model, optimizer)
    with pytest.raises(SystemExit, match="of another model"):
        load_optimizer(tmp_path / "step_00000007", *parts(num_components=4, forget_gate=True))


def test_a_loss_that_is_not_finite_stops_and_writes_nothing(corpus, tmp_path, monkeypatch):
    given = arguments(corpus, tmp_path / "run", eval_steps=4, checkpointing_steps=4)
    accelerator = given.make_accelerator()
    task = LanguageModelling(given, accelerator)
    calls, loss = [], task.loss

    def broken(model, batch):
        calls.append(model.training)
        return loss(model, batch) * (float("nan") if sum(calls) == 6 else 1.0)

    monkeypatch.setattr(task, "loss", broken)
    with pytest.raises(SystemExit, match=r"(?s)Step 6: the loss is nan .* norms .*step_00000004; nothing was written"):
        train(lambda *_: task, given, accelerator)
    assert list(checkpoint_steps(tmp_path / "run" / "checkpoints")) == [4]
    assert not (tmp_path / "run" / "results.json").exists() and len(losses(tmp_path / "run")) == 4


def test_collapsed_components_are_told_in_words(corpus, tmp_path, capsys):
    def make_task(*given):
        task = LanguageModelling(*given)
        with torch.no_grad():
            task.model.model.layers[1].mixer.mixture_norm.alpha[0, 2] = 100.0
        return task

    given = arguments(corpus, tmp_path / "run", max_steps=1)
    results = train(make_task, given, given.make_accelerator())
    assert results["mixture"]["collapsed_heads"] == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (warning,) = [line["warning"] for line in lines if "warning" in line]
    assert "head 0 of layer 1 writes into about 1.0 of its 4" in warning
    assert f"Step 1: {warning}" in "".join(capsys.readouterr())


def test_a_full_disk_is_said_and_leaves_what_was_there(corpus, tmp_path, monkeypatch):
    import checkpoints

    given = arguments(corpus, tmp_path / "run")
    accelerator = given.make_accelerator()
    saves, save_file = [], checkpoints.save_file

    def full(*args, **kwargs):
        saves.append(1)
        if len(saves) == 2:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        return save_file(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(SystemExit, match="cannot be written: the disk is full"):
        train(LanguageModelling, given, accelerator)
    assert list(checkpoint_steps(tmp_path / "run" / "checkpoints")) == [3]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.part"))


def test_a_folder_that_cannot_be_made_is_said(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="cannot be written"):
        run(corpus, tmp_path / "file" / "run")


def test_other_runs_are_left_alone(corpus, tmp_path):
    run(corpus, tmp_path / "run", max_steps=3)
    with pytest.raises(SystemExit, match="holds a finished run: name another folder"):
        run(corpus, tmp_path / "run", max_steps=3)
    # Again with what does not matter changed, and with what does.
    given = {"max_steps": 3, "resume_from_checkpoint": "latest", "logging_steps": 7}
    assert run(corpus, tmp_path / "run", **given)["best_step"] == 3
    for unfinished in (False, True):
        if unfinished:
            (tmp_path / "run" / "results.json").unlink()
        with pytest.raises(SystemExit, match=r"was made with --learning_rate 0\.003, not 0\.1"):
            run(corpus, tmp_path / "run", learning_rate=0.1, **given)
        with pytest.raises(SystemExit, match="was made with --mixer gma, not sdpa"):
            run(corpus, tmp_path / "run", mixer="sdpa", **given)
    with pytest.raises(SystemExit, match="holds a run at step 3: go on with --resume_from_checkpoint latest"):
        run(corpus, tmp_path / "run", max_steps=3)
    with pytest.raises(SystemExit, match="is no checkpoint of this run"):
        run(corpus, tmp_path / "run", max_steps=3, resume_from_checkpoint=str(tmp_path))


def test_forget_gates_begin_where_they_are_told(corpus, tmp_path):
    given = arguments(corpus, tmp_path / "run", forget_gate=True, forget_gate_bias=[1.0, 5.0])
    model = LanguageModelling(given, given.make_accelerator()).model
    assert [layer.mixer.forget_gate.bias.tolist() for layer in model.model.layers] == [[1.0, 5.0]] * 2
    with pytest.raises(ValueError, match="--forget_gate_bias must be one number or two"):
        arguments(corpus, tmp_path / "run", forget_gate_bias=[1.0, 2.0, 3.0])


def test_arguments_that_were_not_there_yet_are_as_by_default(corpus, tmp_path):
    given = {"max_steps": 3, "resume_from_checkpoint": "latest"}
    run(corpus, tmp_path / "run", **given)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    del results["given"]["position_embedding_type"]
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    assert run(corpus, tmp_path / "run", **given)["best_step"] == 3
    with pytest.raises(SystemExit, match="was made with --position_embedding_type learned, not none"):
        run(corpus, tmp_path / "run", position_embedding_type="none", **given)


def test_a_variation_goes_on_with_what_it_learned(corpus, tmp_path):
    """The Auto classes do not know of its weights; a run that was stopped does."""
    given = {"max_steps": 6, "eval_steps": 3, "variation": "convolution", "resume_from_checkpoint": "latest"}
    whole = run(corpus, tmp_path / "whole", **given)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_00000006")
    (tmp_path / "stopped" / "results.json").unlink()
    again = run(corpus, tmp_path / "stopped", **given)
    assert again["validation"] == whole["validation"]
    weights = [load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "stopped")]
    convolutions = [name for name in weights[0] if "q_proj.1.weight" in name]
    assert convolutions and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert all((weights[0][name][..., :-1] != 0).any() for name in convolutions)


def test_other_data_is_refused(corpus, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "validation"):
        text = (corpus / f"{split}.txt").read_text()
        (other / f"{split}.txt").write_text(text)
    given = {"max_steps": 4, "checkpointing_steps": 2, "eval_steps": 4, "resume_from_checkpoint": "latest"}
    run(other, tmp_path / "run", **given)
    (tmp_path / "run" / "results.json").unlink()
    (other / "train.txt").write_text((corpus / "train.txt").read_text().replace("river", "stone", 1))
    with pytest.raises(SystemExit, match="was made with other data"):
        run(other, tmp_path / "run", **given)


def test_one_process_at_a_time(tmp_path):
    with Lock(tmp_path), pytest.raises(SystemExit, match="Another process is training in"), Lock(tmp_path):
        pass
    with Lock(tmp_path):
        pass


def test_a_start_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "new" / "run", tmp_path / "mine"):
        with pytest.raises(SystemExit, match="no such folder"):
            run(tmp_path / "nothing", folder)
    assert not (tmp_path / "new" / "run").exists() and not any((tmp_path / "mine").iterdir())


def test_a_validation_that_is_not_finite_stops_too(corpus, tmp_path, monkeypatch):
    given = arguments(corpus, tmp_path / "run", eval_steps=4, checkpointing_steps=2)
    accelerator = given.make_accelerator()
    task = LanguageModelling(given, accelerator)
    monkeypatch.setattr(task, "evaluate", lambda *_: {"perplexity": float("nan")})
    with pytest.raises(SystemExit, match="Step 4: validation perplexity is nan"):
        train(lambda *_: task, given, accelerator)
    assert list(checkpoint_steps(tmp_path / "run" / "checkpoints")) == [2]


def test_what_the_loop_adds_is_measured(corpus, tmp_path):
    bare = run(corpus, tmp_path / "run", max_steps=4, bare_steps=3)["bare_steps"]
    assert bare["bare_median"] > 0 and bare["speed_kept"] == bare["bare_median"] / bare["loop_median"]


def test_accumulated_batches_are_as_one(corpus, tmp_path):
    # A loader that somebody left in the middle, at its last batch, as far as Accelerate knows.
    left = iter(Accelerator().prepare(DataLoader([1])))
    next(left)
    assert GradientState().end_of_dataloader
    run(corpus, tmp_path / "one", max_steps=6)
    run(corpus, tmp_path / "four", max_steps=6, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert one.keys() == four.keys() and max(abs(one[step] - four[step]) for step in one) < 1e-5


@pytest.mark.parametrize("mixer", ["sdpa", "sdpa_rope", "linear", "performer", "mamba"])
def test_every_mixer_trains_and_loads(corpus, tmp_path, mixer):
    results = run(corpus, tmp_path / "run", mixer=mixer, max_steps=2, report_to="tensorboard")
    assert results["mixture"] == {}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.mixer == mixer
    assert list((tmp_path / "run" / "logs").rglob("events.*"))


def test_compiled(corpus, tmp_path, monkeypatch):
    # Without code generation, which needs a compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    run(corpus, tmp_path / "plain", max_steps=4)
    run(corpus, tmp_path / "compiled", max_steps=4, torch_compile=True)
    plain, compiled = losses(tmp_path / "plain"), losses(tmp_path / "compiled")
    assert plain.keys() == compiled.keys() and max(abs(plain[step] - compiled[step]) for step in plain) < 1e-5
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "compiled"), GMAForCausalLM)


def test_batches_are_those_of_one_process_split():
    class Numbers:
        train_dataset = range(10)

        def order(self, epoch):
            return random.Random(epoch).sample(range(10), 10)

    whole = list(Batches(Numbers(), 4, 0, 10, 0, 1))
    flat = [index for batch in whole for index in batch]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10))
    shares = [list(Batches(Numbers(), 2, 0, 10, rank, 2)) for rank in (0, 1)]
    assert [first + second for first, second in zip(*shares)] == whole
    assert list(Batches(Numbers(), 4, 7, 10, 0, 1)) == whole[7:]


def test_validation_counts_every_token_once(corpus, tmp_path):
    given = arguments(corpus, tmp_path / "run", block_size=7)
    accelerator = given.make_accelerator()
    task = LanguageModelling(given, accelerator)
    model = task.model.eval()
    tokens = torch.tensor([b["labels"].tolist() for b in (task.validation[i] for i in range(len(task.validation)))])
    inputs = torch.stack([task.validation[i]["input_ids"] for i in range(len(task.validation))])
    with torch.no_grad():
        logits = model(inputs).logits.log_softmax(-1)
    real = tokens != -100
    expected = -logits[real].gather(-1, tokens[real].unsqueeze(-1)).mean().item()
    for batch_size in (1, 3, 100):
        assert mean_loss(task, model, task.validation, batch_size, accelerator) == pytest.approx(expected, abs=1e-5)
    assert int(real.sum()) == task.validation.num_targets


def test_prefix_error_sees_a_model_that_is_not_causal():
    config = GMAConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_components=4)
    tokens = torch.randint(0, 50, (1, 20))
    assert prefix_error(GMAForCausalLM(config), tokens) == 0.0
    model = GMAForCausalLM(config)
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.mixer.config.is_causal = False
    assert prefix_error(model, tokens) > 0.0


def test_signals_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_prune(tmp_path):
    model = build_twin(GMAConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1), "sdpa")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, model, optimizer, {}, is_main=True)
    (tmp_path / "step_00000009").mkdir()  # not a checkpoint
    prune(tmp_path, keep=2, best=1)
    assert list(checkpoint_steps(tmp_path)) == [1, 3, 4]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--block_size", "1"], "--block_size must be at least 2, got 1"),
        (["--mixer", "gmma"], "--mixer must be one of"),
        (["--learning_rate", "0"], "--learning_rate must be above 0, got 0.0"),
        (["--hidden_size", "33", "--num_attention_heads", "4"], "must be a multiple of"),
        (["--mixer", "sdpa", "--forget_gate", "true"], "--forget_gate goes with --mixer gma"),
        (["--sliding_window", "64"], "--sliding_window 64 is of layers with local heads"),
        (["--num_local_heads", "2"], "--num_local_heads 2 is of layers with local heads"),
        (["--train_file", "x.txt"], "--train_file and --validation_file go together"),
        (["--mixer", "linformer"], "got 'linformer', which is bidirectional only"),
        (["--report_to", "tensorbored"], "--report_to must be none, all or of"),
        (["--train_tokenizer", "5"], "--train_tokenizer must be at least 257"),
        (["--max_steps", "0"], "--max_steps must be at least 1, got 0"),
    ],
)
def test_bad_flags_get_a_sentence(flags, sentence, capsys):
    from arguments import parse

    with pytest.raises(SystemExit):
        parse(Arguments, "", ["--output_dir", "x", *flags])
    assert sentence in capsys.readouterr().err


def test_yaml_then_flags(tmp_path, capsys):
    from arguments import parse

    path = tmp_path / "a.yaml"
    path.write_text("learning_rate: 1e-3\nmixer: linear\nforget_gate: false\noutput_dir: there\n")
    given = parse(Arguments, "", [str(path), "--mixer", "sdpa"])
    assert (given.learning_rate, given.mixer, given.output_dir) == (1e-3, "sdpa", "there")
    other = tmp_path / "b.yaml"
    other.write_text("mixer: performer\nforget_gate: true\n")
    given = parse(Arguments, "", [str(path), str(other), "--learning_rate", "2e-3"])
    assert (given.learning_rate, given.mixer, given.forget_gate) == (2e-3, "performer", True)
    path.write_text("learning_rat: 1e-3\n")
    with pytest.raises(SystemExit):
        parse(Arguments, "", [str(path), "--output_dir", "x"])
    assert "sets learning_rat, which is no flag" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(Arguments, "", [str(tmp_path / "none.yaml")])
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wikitext103", "two_cores"])
def test_the_configs_are_what_they_say(name):
    from arguments import parse

    given = parse(Arguments, "", [str(SCRIPTS / "configs" / f"{name}.yaml"), "--output_dir", "x"])
    if name == "wikitext103":
        assert given.block_size * given.per_device_train_batch_size == 16_384 and given.max_steps == 20_000
        config = given.config(vocab_size=50257)
        with torch.device("meta"):
            assert sum(p.numel() for p in GMAForCausalLM(config).parameters()) == 45_963_776


@pytest.mark.parametrize("size", ["wikitext103", "two_cores"])
@pytest.mark.parametrize("preset", ["gated", "hybrid", "gated_hybrid"])
def test_presets_have_as_many_parameters_as_softmax_attention(size, preset):
    from arguments import parse

    from baselines import build_twin

    def count(*files, mixer):
        given = parse(
            Arguments, "", [*(str(SCRIPTS / "configs" / f"{name}.yaml") for name in files), "--output_dir", "x"]
        )
        with torch.device("meta"):
            model = build_twin(given.config(vocab_size=given.train_tokenizer or 50257), mixer)
        return sum(p.numel() for p in model.parameters()), model.config

    parameters, config = count(size, preset, mixer="gma")
    assert parameters == pytest.approx(count(size, mixer="sdpa")[0], rel=0.01)
    assert config.forget_gate == preset.startswith("gated") and config.position_embedding_type == "none"
    assert set(config.layer_types) == {"hybrid_sliding" if preset.endswith("hybrid") else "linear_attention"}
