"""Mixtures watched by `Trainer`."""

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from modeling_gma import GMAForCausalLM, MixtureHealthCallback


@pytest.fixture
def make_trainer(tiny_config, tmp_path):
    def make(model=None, steps=4):
        torch.manual_seed(0)
        ids = torch.randint(3, 99, (8, 12)).tolist()
        rows = Dataset.from_dict({"input_ids": ids, "labels": ids, "text": ["not for the model"] * 8})
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True
        )
        return Trainer(model or GMAForCausalLM(tiny_config()), arguments, train_dataset=rows)

    return make


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "modeling_gma.callbacks"]


def test_figures_are_logged(make_trainer, caplog):
    trainer = make_trainer()
    trainer.add_callback(MixtureHealthCallback(trainer, every=3))
    trainer.train()
    looks = [entry for entry in trainer.state.log_history if "mixture/usage_entropy" in entry]
    assert [entry["step"] for entry in looks] == [3, 4]
    assert all(0 < entry["mixture/usage_entropy"] <= 1 for entry in looks)
    assert trainer.model.training and not messages(caplog)


def test_the_loss_is_logged_as_ever(make_trainer):
    trainer = make_trainer(steps=6)
    trainer.args.logging_steps = trainer.state.logging_steps = 2
    trainer.add_callback(MixtureHealthCallback(trainer, every=2))
    trainer.train()
    for name in ("loss", "mixture/usage_entropy"):
        assert [entry["step"] for entry in trainer.state.log_history if name in entry] == [2, 4, 6], name


def test_a_collapse_is_told_in_words(make_trainer, tiny_config, caplog):
    model = GMAForCausalLM(tiny_config())
    with torch.no_grad():
        model.model.layers[1].mixer.mixture_norm.alpha[2, 0] = 100.0
    trainer = make_trainer(model, steps=1)
    trainer.add_callback(MixtureHealthCallback(trainer))
    trainer.train()
    (warning,) = messages(caplog)
    assert warning.startswith("Step 1: Components have collapsed: head 2 of layer 1 writes into about 1.0 of its 6")


def test_watching_changes_nothing(make_trainer):
    plain, watched = make_trainer(), make_trainer()
    watched.model.load_state_dict(plain.model.state_dict())
    watched.add_callback(MixtureHealthCallback(watched, every=1))
    for trainer in (plain, watched):
        torch.manual_seed(5)
        trainer.train()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, watched.model.state_dict()[name]), name


def test_a_bad_interval_is_refused(make_trainer):
    with pytest.raises(ValueError, match="`every` must be at least 1, got 0"):
        MixtureHealthCallback(make_trainer(), every=0)
