import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

from modeling_gma import GMAConfig


# Two test processes share two cores.
torch.set_num_threads(1)

settings.register_profile("gma", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gma")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiny_config():
    """A function that makes a config small enough for tests, with the given fields changed."""

    def make(**changes) -> GMAConfig:
        fields = {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_components": 6,
            "max_position_embeddings": 128,
            "chunk_size": 8,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return GMAConfig(**(fields | changes))

    return make
