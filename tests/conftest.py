import os
import shutil


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings
from playwright.sync_api import sync_playwright
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling_gma import GMAConfig


# Two test processes share two cores.
torch.set_num_threads(1)

settings.register_profile("gma", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gma")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.fixture
def largest_tensor():
    return LargestTensor()


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next((found for found in map(shutil.which, names) if found), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    flags += ["--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def own_values_count(monkeypatch):
    """Models whose output gates have something of tokens' own values from the start."""
    monkeypatch.setattr("modeling_gma.modeling_gma.OWN_VALUE", 0.5)


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
        fields |= changes
        # Mixers that add as much as they can, so that nothing they do wrong is lost in the rest.
        return GMAConfig(**({"residual_initializer_range": fields["initializer_range"]} | fields))

    return make
