"""What is released: version, wheel and sdist. With GMA_PACKAGING set, built and installed into a new environment."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]

# What has to work where nothing but the wheel and what it asks for is installed.
USE = """
import importlib.metadata
import torch
import modeling_gma
from transformers import AutoConfig, AutoModelForCausalLM

assert modeling_gma.__version__ == importlib.metadata.version("modeling-gma")
config = AutoConfig.for_model("gma", vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config)
print(modeling_gma.__file__, model(torch.tensor([[1, 2, 3]])).logits.shape)
"""


def test_version_stands_once():
    source = (ROOT / "modeling_gma" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    assert f"## {version} " in (ROOT / "CHANGELOG.md").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    for name in ("pyproject.toml", "CITATION.cff"):
        assert not re.search(r"^version\s*[=:]\s*[\"'\d]", (ROOT / name).read_text(), flags=re.MULTILINE), name


def test_workflow_runs_what_the_readme_says():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert "run: make test" in workflow and "make test " in (ROOT / "README.md").read_text()
    least, most = re.search(r'requires-python = ">=3.(\d+),<3.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    for minor in range(int(least), int(most)):
        assert f'"3.{minor}"' in workflow


@pytest.mark.skipif("GMA_PACKAGING" not in os.environ, reason="builds and installs all of it: set GMA_PACKAGING=1")
def test_wheel_in_a_new_environment(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], check=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    for package in ("configuration_gma", "modeling_gma", "hub_upload"):
        wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        wanted |= set() if package == "hub_upload" else {f"{package}/py.typed"}
        assert wanted <= in_sdist and wanted <= in_wheel
    assert {name.split("/")[0] for name in in_wheel if ".dist-info" not in name} == {
        "configuration_gma",
        "hub_upload",
        "modeling_gma",
    }
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, env=environment)
    done = subprocess.run([python, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and "torch.Size([1, 3, 50])" in done.stdout
