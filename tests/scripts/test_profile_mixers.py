"""The harness on tiny blocks, and the memory it promises on real ones. Times are never asserted."""

import json
import subprocess
import sys
from pathlib import Path

import profile_mixers
import pytest
import torch
from matrix_products import Product, Stopwatch, block_products, window_products
from profile_mixers import Arguments, System, expected_seconds, run, saved_bytes, sharpen, what_went_wrong
from profile_report import ratio_lines, report_lines, summary_lines

from baselines import build_mixer
from configuration_gma import GMAConfig
from modeling_gma import GMAForCausalLM
from modeling_gma.mixture import GaussianMixture


ROOT = Path(__file__).parents[2]
TINY = {
    "preset": "cpu",
    "device": "cpu",
    "lengths": [16, 32],
    "tokens": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "repetitions": 1,
    "contexts": [4, 20],
}


def tiny_run(folder, **changes):
    return run(Arguments(**(TINY | {"output_dir": str(folder), "sections": ["speed"]} | changes)))


def test_every_mixer_has_a_row(tmp_path, capsys):
    mixers = ["eager", "sdpa", "sdpa_rope", "linear", "linformer", "performer", "mamba", "gma:4", "gma:4:forget"]
    mixers += ["gma:4:hybrid:window=8", "gma:4:local:window=8"]
    mixers += ["gma:4:floor", "gma:4:bfloat16"]
    results = tiny_run(tmp_path, mixers=mixers)
    places = {(row["direction"], row["length"], row["system"]): row for row in results["blocks"]}
    assert set(places) == {(d, n, m) for d in ("bidirectional", "causal") for n in (16, 32) for m in mixers}
    for (direction, length, name), row in places.items():
        if (direction, name) in {("causal", "linformer"), ("bidirectional", "gma:4:forget")}:
            assert row["status"].startswith("unsupported: `"), row
            continue
        assert row["status"] == "ok", row
        assert row["batch"] * length == 32
        for kind in ("forward", "train"):
            assert row[kind]["tokens_per_second"] == 32 / row[kind]["best_seconds"]
            assert row[kind]["limit_seconds"] > 0
            assert row[kind]["best_seconds"] <= row[kind]["median_seconds"]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    report = (tmp_path / "report.md").read_text()
    assert "GMA, K=4, forget over GMA, K=4" in report and "bidirectional only" in report
    assert report.strip() in capsys.readouterr().out
    assert (tmp_path / "throughput.png").stat().st_size > 1000


def test_an_interrupted_run_goes_on_and_others_are_left_alone(tmp_path, monkeypatch):
    settings = {"mixers": ["sdpa", "gma:4"], "directions": ["causal"]}
    measured, measure = [], profile_mixers.measure_speed

    def interrupted(arguments, direction, length, *rest):
        measured.append(length)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(arguments, direction, length, *rest)

    monkeypatch.setattr(profile_mixers, "measure_speed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path, **settings)
    kept = json.loads((tmp_path / "results.json").read_text())["blocks"]
    results = tiny_run(tmp_path, **settings)
    assert measured == [16, 32, 32] and results["blocks"][: len(kept)] == kept
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(SystemExit, match="holds results of other settings"):
        tiny_run(tmp_path, **settings, seed=1)
    assert (tmp_path / "results.json").read_bytes() == before
    assert len(tiny_run(tmp_path, **settings, seed=1, overwrite=True)["blocks"]) == 4


def test_decoding(tmp_path, monkeypatch):
    """A row for every mixer and context; memories and windows hold as much whatever came before, only SDPA more."""
    small = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1}
    config = System.config

    def small_config(self, *args, **fields):
        made = config(self, *args, **fields).to_dict() | small
        return GMAConfig(
            **made | {"routing_dim": 2, "value_dim": 2, "layer_types": self.layer_type and [self.layer_type]}
        )

    monkeypatch.setattr(System, "config", small_config)
    mixers = ["sdpa", "linear", "mamba", "gma:4:forget", "gma:4:hybrid:window=8", "gma:4:local:window=8"]
    results = tiny_run(tmp_path, sections=["decoding"], decoding_mixers=mixers, contexts=[20, 200])
    rows = {(row["system"], row["context"]): row for row in results["decoding"]}
    assert set(rows) == {(name, context) for name in mixers for context in (20, 200)}
    assert all(row["status"] == "ok" and row["tokens_per_second"] > 0 for row in rows.values()), rows
    for name in mixers:
        few, many = (rows[name, context]["cache_bytes"] for context in (20, 200))
        assert many - few == (180 * 2 * 8 * 2 * 4 if name == "sdpa" else 0)


def test_what_takes_too_long_or_too_much_is_a_row(tmp_path, monkeypatch):
    assert expected_seconds((2.0, 100, 4), 400, 1, 2) == 8.0
    assert expected_seconds((2.0, 100, 4), 400, 1, 1) == 2.0
    assert what_went_wrong(RuntimeError("[enforce fail] can't allocate memory: 9 bytes")) == "out of memory"
    monkeypatch.setattr(profile_mixers, "available_memory", lambda device: 1000)
    results = tiny_run(tmp_path, mixers=["eager", "linear"], directions=["causal"], longest_step=0.0)
    status = {(row["system"], row["length"]): row["status"] for row in results["blocks"]}
    assert status["eager", 16].startswith("out of memory: a step would take about")
    assert status["linear", 16] == "ok" and status["linear", 32].startswith("left out: a step would take about")


def test_a_trained_mixer(tmp_path):
    config = GMAConfig(vocab_size=9, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, num_components=4)
    GMAForCausalLM(config).save_pretrained(tmp_path / "model")
    results = tiny_run(
        tmp_path / "out", mixers=["gma:4:trained", "gma:8:trained"], checkpoint=str(tmp_path / "model"), lengths=[16]
    )
    status = {(row["direction"], row["system"]): row["status"] for row in results["blocks"]}
    assert status["causal", "gma:4:trained"] == "ok"
    assert status["causal", "gma:8:trained"] == "unsupported: the checkpoint has 4 components"
    assert status["bidirectional", "gma:4:trained"].startswith("unsupported: the checkpoint is causal")
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()


@pytest.mark.parametrize("variance", [0.3, 0.03, 0.0])
def test_sharpen(variance):
    mixture = GaussianMixture(2, 4, 8)
    means = mixture.mu.detach().clone()
    sharpen(mixture, variance)
    torch.testing.assert_close(mixture()[1], torch.full((2, 4, 8), max(variance, mixture.variance_floor)))
    torch.testing.assert_close(mixture.mu.detach(), 3 * means)


BAD = {
    "unknown mixer": ({"mixers": ["attention"]}, "'attention' must begin with one of gma, eager"),
    "bad part": ({"mixers": ["gma:few"]}, "'few' in 'gma:few' must be a dtype"),
    "bad variance": ({"mixers": ["gma:4:variance=-1"]}, "'variance=-1' in"),
    "components of sdpa": ({"mixers": ["sdpa:4"]}, "'4' in 'sdpa:4' must be a dtype"),
    "window of nothing": ({"mixers": ["gma:4:window=8"]}, "window in 'gma:4:window=8' goes with hybrid or local"),
    "sharp local heads": ({"mixers": ["gma:4:local:floor"]}, "local in 'gma:4:local:floor' has neither components"),
    "trained hybrid": ({"mixers": ["gma:4:hybrid:trained"]}, "trained in 'gma:4:hybrid:trained' does not go with"),
    "no checkpoint": ({"mixers": ["gma:4:trained"]}, "needs --checkpoint"),
    "no such checkpoint": (
        {"mixers": ["gma:4:trained"], "checkpoint": "/none"},
        "--checkpoint '/none' cannot be read",
    ),
    "direction": ({"directions": ["left"]}, "--directions must be of bidirectional, causal, got 'left'"),
    "section": ({"sections": ["all"]}, "--sections must be of speed, memory, decoding, got 'all'"),
    "dtype": ({"dtype": "int8"}, "--dtype must be one of"),
    "lengths": ({"lengths": [0]}, "--lengths must be numbers of at least 1"),
    "batch": ({"batch_size": 2}, "--tokens and --batch_size exclude each other"),
    "repetitions": ({"repetitions": 0}, "--repetitions must be at least 1, got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        Arguments(**(TINY | changes))


def test_presets_and_help():
    paper = Arguments(preset="paper", device="cpu")
    assert (paper.batch(1000), paper.lengths, paper.dtype) == (8, [1000, 2000, 4000], "bfloat16")
    cpu = Arguments(device="cpu")
    assert cpu.preset == "cpu" and [cpu.batch(n) for n in cpu.lengths] == [4, 2, 1, 1, 1, 1]
    assert (cpu.shape("bidirectional"), cpu.shape("causal")) == ((768, 12), (512, 8))
    command = [sys.executable, str(ROOT / "scripts" / "profile_mixers.py"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Repetitions of all mixers take turns" in text and "--longest_step" in text


def test_system_names():
    system = System.parse("gma:64:forget:variance=0.5:bfloat16", "float32")
    assert (system.components, system.forget, system.variance, system.dtype) == (64, True, 0.5, "bfloat16")
    assert System.parse("sdpa", "float64").dtype == "float64"
    system = System.parse("gma:64:hybrid:window=32", "float32")
    assert (system.layer_type, system.window, system.config(64, 4, 99, True).num_local_heads) == (
        "hybrid_sliding",
        32,
        2,
    )


def multiply_adds(mixer, length, train, features=128, is_causal=False):
    projections, inside = block_products(mixer, 2, length, 768, 12, features, is_causal, 64, train)
    tokens = 2 * length
    return sum(p.multiply_adds for p in projections) / tokens, sum(p.multiply_adds for p in inside) / (12 * tokens)


def test_products_are_counted():
    d, K, C = 64, 128, 64
    assert multiply_adds("gma", 4096, False) == (4 * 768**2, 2 * (2 * d * K) + 2 * d * K)
    assert multiply_adds("gma", 4096, True) == (12 * 768**2, 8 * (2 * d * K) + 6 * d * K)
    intra = 4 * K * C + 3 * d * C
    assert multiply_adds("gma", 4096, True, is_causal=True)[1] == 8 * (2 * d * K) + 7 * d * K + intra
    assert multiply_adds("linear", 4096, True, features=d)[1] == 6 * d * d
    assert multiply_adds("sdpa", 4096, True)[1] == 7 * d * 4096
    assert multiply_adds("sdpa", 4096, True, is_causal=True)[1] == 7 * d * 4097 / 2
    _, inside = block_products("gma", 2, 4096, 768, 12, K, False, 64, True, local_heads=4)
    assert sum(p.multiply_adds for p in inside) / (8 * 2 * 4096) == 8 * (2 * d * K) + 6 * d * K
    assert block_products("gma", 2, 4096, 768, 12, K, False, 64, True, local_heads=12)[1] == []
    (local,) = window_products(2, 4096, 4, d, 128, is_causal=True, train=True)
    seen = sum(min(i + 1, 128) for i in range(4096))
    assert local.multiply_adds == pytest.approx(7 * d * seen * 4 * 2)
    (local,) = window_products(2, 4096, 4, d, 128, is_causal=False, train=False)
    seen = sum(abs(i - j) < 128 for i in range(4096) for j in range(max(i - 200, 0), min(i + 200, 4096)))
    assert local.multiply_adds == pytest.approx(2 * d * seen * 4 * 2)
    (local,) = window_products(1, 64, 1, d, 128, is_causal=True, train=False)
    assert local.multiply_adds == pytest.approx(2 * d * 64 * 65 / 2)
    assert multiply_adds("linformer", 4096, False, features=256) == (4 * 768**2, 2 * 256 * d + 2 * 256 * d)


def test_stopwatch_adds_up():
    stopwatch = Stopwatch(torch.device("cpu"))
    products = [Product(2.0, 1, 8, 8, 8), Product(0.5, 3, 4, 8, 2)]
    stopwatch.measure(products, torch.float32)
    first, second = (stopwatch.best[(*p[1:], torch.float32)] for p in products)
    assert stopwatch.seconds(products, torch.float32) == 2.0 * first + 0.5 * second > 0


def kept(name, length, direction):
    hidden_size, heads = profile_mixers.SHAPES[direction]
    block = System.parse(name, "float32").build(hidden_size, heads, length, direction == "causal", "cpu")
    return saved_bytes(block, torch.randn(4096 // length, length, hidden_size, requires_grad=True))


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("length", [1024, 2048])
def test_bytes_kept_for_backward(length, direction):
    softmax = kept("sdpa", length, direction)
    few, *more = (kept(f"gma:{components}", length, direction) for components in (64, 128, 256, 512))
    assert max(few, *more) <= 1.1 * softmax
    assert more[-1] <= 1.15 * few
    if direction == "causal":
        assert kept("gma:512:forget", length, direction) <= 1.1 * softmax


def test_saved_bytes_counts_storages_once():
    block = build_mixer(GMAConfig(hidden_size=16, num_attention_heads=2, attention_bias=False), "sdpa")
    x = torch.randn(1, 10, 16, requires_grad=True)
    # The input, queries, keys, values, the output, and a log-sum a head and token; weights are not counted.
    assert saved_bytes(block, x) == (5 * 10 * 16 + 2 * 10) * 4


def test_ratios_stand_beside_those_of_the_limits():
    times = {"sdpa": (0.6, 0.3), "gma:64": (0.4, 0.1)}
    rows = [
        {"system": system, "length": 8, "train": {"best_seconds": best, "limit_seconds": limit}}
        for system, (best, limit) in times.items()
    ]
    rows.append({"system": "sdpa", "length": 16, "train": {"best_seconds": 1.0, "limit_seconds": 1.0}})
    assert "| GMA, K=64 over sdpa | 1.50x (3.00x) |  |" in ratio_lines(rows, "causal")


def test_readme_shows_what_was_measured():
    results = json.loads((ROOT / "docs" / "profile" / "results.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert "\n".join(summary_lines(results)).strip() in readme
    report = (ROOT / "docs" / "profile" / "report.md").read_text()
    assert report.strip() == "\n".join(report_lines(results)).strip()
