"""Steps of whole decoders: what is measured, what is left out, and what is refused before anything is."""

import json
import sys

import pytest
from profile_training import main


SIZES = "train_tokenizer: 300\nhidden_size: 16\nnum_hidden_layers: 1\nnum_attention_heads: 2\nnum_components: 4\n"


@pytest.fixture
def profile(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(SIZES)

    def run(*flags):
        words = [str(tmp_path / "small.yaml"), "--output_dir", str(tmp_path / "out"), "--tokens", "64", *flags]
        monkeypatch.setattr(sys, "argv", ["profile_training.py", *words])
        main()
        return json.loads((tmp_path / "out" / "training.json").read_text())

    return run


def test_rows_of_systems_and_lengths(profile, tmp_path, capsys):
    systems = ["gma:4:forget", "gma:4:forget:gate", "gma:4:forget@value_dim=16"]
    found = profile("--systems", *systems, "--lengths", "64", "16", "64", "--repetitions", "2")
    rows = found["rows"]
    assert [(row["system"], row["length"], row["batch"]) for row in rows] == [
        (system, length, 64 // length) for length in (16, 64) for system in systems
    ]
    assert all(row["status"] == "ok" and row["tokens_per_second"] > 0 for row in rows)
    # What a gate needs, or wider values.
    kept = [row["saved_bytes_per_token"] for row in rows[3:]]
    assert kept[0] < kept[1] and kept[0] < kept[2]
    text = capsys.readouterr().out
    assert "| GMA K=4, forget gate | " in text and ", 1.00x |" in text and "N=64 |" in text
    assert str(tmp_path) not in (tmp_path / "out" / "training.json").read_text()
    assert (tmp_path / "out" / "training.png").stat().st_size > 0


def test_what_would_take_too_long_is_left_out(profile, capsys):
    rows = profile("--systems", "sdpa", "--lengths", "16", "64", "--repetitions", "1", "--max_seconds", "0")["rows"]
    assert rows[0]["status"] == "ok" and rows[1]["status"].startswith("left out: about ")
    assert "left out: about" in capsys.readouterr().out


def test_what_does_not_run_is_a_row(profile, monkeypatch):
    def fails(self):
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr("profile_training.Steps.measure", fails)
    rows = profile("--systems", "gma:4", "--lengths", "16", "--repetitions", "1")["rows"]
    assert [row["status"] for row in rows] == ["unsupported: no such thing"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--systems", "gma:nothing"], "neither components nor forget"),
        (["--systems", "sdpa@layer_types=hybrid_sliding"], "--layer_types goes with --mixer gma"),
        (["--systems", "sdpaa"], "--systems: 'sdpaa' has 'sdpaa', which is none of ['gma', 'sdpa',"),
        (["--lengths", "1"], "--lengths must be at least 2, got 1."),
        (["--repetitions", "0"], "--repetitions must be at least 1, got 0."),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(profile, tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit):
        profile(*flags)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
