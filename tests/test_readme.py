"""Each Python block of the README runs as it stands, after the quickstart."""

import os
import re
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]


def test_code_runs(tmp_path):
    short = ["--max_steps", "2", "--hidden_size", "32", "--num_hidden_layers", "1", "--vocab_size", "400"]
    quickstart = [sys.executable, str(ROOT / "scripts" / "quickstart.py"), "--output_dir", "quickstart_output", *short]
    subprocess.run(quickstart, cwd=tmp_path, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
    assert (tmp_path / "classifier" / "model.safetensors").is_file()


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text()
