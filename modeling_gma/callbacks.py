"""Watching mixtures while `Trainer` trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from .diagnostics import collapse_warning, mixture_health


if TYPE_CHECKING:
    from transformers import Trainer


logger = logging.get_logger(__name__)

# What a model without its head takes of a batch.
INPUTS = ("input_ids", "attention_mask", "position_ids", "cu_seq_lens_q", "seq_idx")


class MixtureHealthCallback(TrainerCallback):
    """Logs `mixture_health`, as mixture/.., and warns in words when components collapse.

    ```python
    >>> trainer = Trainer(model, arguments, train_dataset=dataset)
    >>> trainer.add_callback(MixtureHealthCallback(trainer))
    ```

    Args:
        trainer: the trainer that it is added to; its log goes to all that reports.
        every: steps between looks, each one forward pass over one example.
        example: what the model takes; by default the first example of the evaluation set, or of the training set.
    """

    def __init__(self, trainer: Trainer, every: int = 100, example: dict[str, torch.Tensor] | None = None):
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every}.")
        self.trainer, self.every, self.example = trainer, every, example

    def on_step_end(self, args, state, control, model: nn.Module, **kwargs) -> None:
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        model = self.trainer.accelerator.unwrap_model(model)
        if self.example is None:
            self.example = self._first_example()
        inputs = {name: value.to(model.device) for name, value in self.example.items()}
        was_training = model.training
        health = mixture_health(model.eval().base_model, **inputs)
        model.train(was_training)
        # A log of ours must not pass for the one of the loss that is due.
        is_due = control.should_log
        self.trainer.log({f"mixture/{name}": value for name, value in health.items()})
        self.trainer.control.should_log = is_due
        warning = collapse_warning(health, model.config.num_components)
        if warning:
            logger.warning(f"Step {state.global_step}: {warning}")

    def _first_example(self) -> dict[str, torch.Tensor]:
        dataset = self.trainer.train_dataset if self.trainer.eval_dataset is None else self.trainer.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        # A set without numbers to its examples has a first one nevertheless.
        row = dataset[0] if hasattr(dataset, "__getitem__") else next(iter(dataset))
        # Collators that mask draw numbers, which training must not miss.
        with torch.random.fork_rng(devices=[]):
            batch = self.trainer.data_collator([{name: row[name] for name in INPUTS if name in row}])
        return {name: batch[name] for name in INPUTS if batch.get(name) is not None}
