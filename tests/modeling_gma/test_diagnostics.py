"""Every statistic by another route: scikit-learn, or brute force over tokens."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import mutual_info_score
from sklearn.metrics.cluster import contingency_matrix, expected_mutual_information, normalized_mutual_info_score

from modeling_gma import GMAConfig, GMAForCausalLM, diagnostics
from modeling_gma.diagnostics import (
    ALIGNMENT,
    RunningStatistics,
    collapse_warning,
    count_pairs,
    effective_rank,
    mixture_health,
    normalised_entropy,
    permutation_baseline,
    permuted_tables,
    principal_axes,
    purity,
    usage_overlap,
)


EXACT = {"abs": 1e-9, "rel": 1e-9}
BATCH, HEADS, TOKENS = 3, 2, 40


def soft(components=7):
    return torch.randn(BATCH, HEADS, TOKENS, components, dtype=torch.float64).mul(2).softmax(-1)


def with_empty_components():
    gamma = soft(9)
    gamma[..., 2:6] = 0
    return gamma / gamma.sum(-1, keepdim=True)


def one_used():
    gamma = torch.zeros(BATCH, HEADS, TOKENS, 5, dtype=torch.float64)
    gamma[..., 3] = 1
    return gamma


def one_hot():
    choice = torch.randint(0, 6, (BATCH, HEADS, TOKENS))
    return torch.nn.functional.one_hot(choice, 6).double()


def all_alike():
    return torch.full((BATCH, HEADS, TOKENS, 4), 0.25, dtype=torch.float64)


INPUTS = {
    "random": soft,
    "one component": lambda: soft(1),
    "more components than tokens": lambda: soft(200),
    "empty components": with_empty_components,
    "one used": one_used,
    "one hot": one_hot,
    "all alike": all_alike,
}


@pytest.fixture(params=INPUTS)
def gamma(request):
    """Query and key responsibilities."""
    torch.manual_seed(1)
    return INPUTS[request.param](), INPUTS[request.param]()


@pytest.fixture(params=[1, 4])
def categories(request):
    torch.manual_seed(2)
    return torch.randint(0, request.param, (BATCH, TOKENS)), request.param


def gathered(responsibilities, categories=None, num_categories=None, moments=0):
    """The statistics of a tensor that comes row by row."""
    statistics = RunningStatistics(num_categories, moments)
    for row in range(BATCH):
        labels = None if categories is None else categories[row : row + 1]
        statistics.update(responsibilities[row : row + 1], labels)
    return statistics


def groups_of(responsibilities):
    """Each head, and their average, as lists of tokens."""
    rows = responsibilities.numpy()
    heads = [[rows[b, h, n] for b in range(BATCH) for n in range(TOKENS)] for h in range(HEADS)]
    average = [sum(rows[b, h, n] for h in range(HEADS)) / HEADS for b in range(BATCH) for n in range(TOKENS)]
    return [*heads, average]


def entropy_of(probabilities):
    return -sum(p * math.log(p) for p in probabilities if p > 0)


def test_entropy():
    assert normalised_entropy(torch.full((3, 8), 1 / 8)).tolist() == pytest.approx([1.0] * 3)
    assert normalised_entropy(torch.tensor([0.0, 1.0, 0.0])).item() == 0.0
    assert normalised_entropy(torch.tensor([[1.0], [1.0]])).tolist() == [0.0, 0.0]


def test_usage(gamma):
    statistics = gathered(gamma[0])
    found = statistics.summary()
    components = gamma[0].shape[-1]
    unit = math.log(components) if components > 1 else 1.0
    for group, tokens in enumerate(groups_of(gamma[0])):
        mean = sum(tokens) / len(tokens)
        assert statistics.usage[group].tolist() == pytest.approx(mean.tolist(), **EXACT)
        assert found["usage_entropy"][group].item() == pytest.approx(entropy_of(mean) / unit, **EXACT)
        token_entropy = sum(map(entropy_of, tokens)) / len(tokens) / unit
        assert found["token_entropy"][group].item() == pytest.approx(token_entropy, **EXACT)
        assert found["mean_maximum"][group].item() == pytest.approx(sum(map(max, tokens)) / len(tokens), **EXACT)
        assigned = Counter(max(range(components), key=token.__getitem__) for token in tokens)
        assert statistics.assigned[group].tolist() == [assigned[k] for k in range(components)]
        assert found["active"][group].item() == pytest.approx(len(assigned) / components, **EXACT)
        effective = math.prod(p**-p for p in mean if p > 0)
        assert found["effective_components"][group].item() == pytest.approx(effective, **EXACT)


def same_sums(found, expected):
    assert found.count == expected.count and found.moments_count == expected.moments_count
    assert torch.equal(found.table, expected.table)
    for name, value in expected._sums.items():
        torch.testing.assert_close(found._sums[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("piece", [1, 7 * 13, 1 << 17])
def test_pieces_make_no_difference(piece, monkeypatch):
    gamma, categories = soft(), torch.randint(0, 4, (BATCH, TOKENS))
    expected = gathered(gamma, categories, 4, moments=3)
    monkeypatch.setattr(diagnostics, "PIECE", piece)
    statistics = RunningStatistics(4, moments=3)
    assignments = statistics.update(gamma, categories)
    same_sums(statistics, expected)
    groups = torch.cat([gamma, gamma.mean(1, keepdim=True)], dim=1).transpose(0, 1).flatten(1, 2)
    assert torch.equal(assignments, groups.argmax(-1))


def test_mask_leaves_tokens_out():
    gamma, categories, mask = soft(), torch.randint(0, 4, (BATCH, TOKENS)), torch.rand(BATCH, TOKENS) < 0.5
    mask[1] = False
    kept = gamma.transpose(1, 2)[mask].transpose(0, 1).unsqueeze(0)
    expected, found = RunningStatistics(4, moments=3), RunningStatistics(4, moments=3)
    alone = expected.update(kept, categories[mask].unsqueeze(0))
    assert torch.equal(found.update(gamma, categories, mask.long()), alone)
    same_sums(found, expected)


def test_no_tokens_change_nothing():
    statistics, expected = RunningStatistics(), RunningStatistics()
    gamma = soft()
    assert statistics.update(gamma[:, :, :0]).shape == statistics.update(gamma[:0]).shape == (HEADS + 1, 0)
    statistics.update(gamma)
    assert statistics.update(gamma, mask=torch.zeros(BATCH, TOKENS)).shape == (HEADS + 1, 0)
    expected.update(gamma)
    same_sums(statistics, expected)


def test_autocast_changes_nothing():
    gamma = soft().float()
    statistics, expected = RunningStatistics(moments=1), RunningStatistics(moments=1)
    expected.update(gamma)
    with torch.autocast("cpu", torch.bfloat16):
        statistics.update(gamma)
    same_sums(statistics, expected)


def test_alignment_with_categories(gamma, categories):
    labels, count = categories
    statistics = gathered(gamma[0], labels, count)
    found = statistics.summary()
    flat = labels.flatten().tolist()
    for group, tokens in enumerate(groups_of(gamma[0])):
        assigned = [int(np.argmax(token)) for token in tokens]
        information = mutual_info_score(flat, assigned)
        assert found["mutual_information"][group].item() == pytest.approx(information, **EXACT)
        assert statistics.table[group].sum().item() == len(flat)
        nmi = normalized_mutual_info_score(flat, assigned, average_method="min")
        # By the paper's definition one component, or one category, has none; scikit-learn calls two such alike.
        nmi = 0.0 if min(len(set(flat)), len(set(assigned))) == 1 else nmi
        assert found["normalised_mutual_information"][group].item() == pytest.approx(nmi, **EXACT)
        purities = []
        for component in range(gamma[0].shape[-1]):
            of_component = Counter(c for c, z in zip(flat, assigned) if z == component)
            pure = of_component.most_common(1)[0][1] / of_component.total() if of_component else math.nan
            found_purity = purity(statistics.table[group].double())[component].item()
            assert found_purity == pytest.approx(pure, nan_ok=True, **EXACT)
            purities.append((of_component.total(), pure))
        weighted = sum(n / len(flat) * pure for n, pure in purities if n)
        assert found["weighted_purity"][group].item() == pytest.approx(weighted, **EXACT)


def test_pairs_are_counted():
    components, categories = torch.randint(0, 5, (3, 60)), torch.randint(0, 4, (60,))
    tables = count_pairs(components, categories, 6, 4)
    assert tables.shape == (3, 6, 4)
    for row, table in zip(components, tables):
        expected = contingency_matrix(row.numpy(), categories.numpy())
        seen = sorted(set(row.tolist()))
        assert table[seen].tolist() == expected.tolist()
        assert table.sum().item() == 60


def test_overlap_of_usage(gamma):
    query, key = (gathered(side).usage for side in gamma)
    for group, tokens in enumerate(zip(groups_of(gamma[0]), groups_of(gamma[1]))):
        p, q = (sum(side) / len(side) for side in tokens)
        expected = 1 - sum(abs(a - b) for a, b in zip(p, q)) / 2
        assert usage_overlap(query, key)[group].item() == pytest.approx(expected, **EXACT)


def test_effective_rank_of_the_affinity(gamma):
    query, key = (gathered(side, moments=1) for side in gamma)
    found = effective_rank(query.moments, key.moments)
    for group, (queries, keys) in enumerate(zip(groups_of(gamma[0]), groups_of(gamma[1]))):
        singular = np.linalg.svd(np.array(queries) @ np.array(keys).T, compute_uv=False)
        # What rounding leaves of zeros is no rank.
        singular = singular[singular > 1e-12 * singular[0]]
        expected = math.exp(entropy_of(singular / singular.sum()))
        assert found[group].item() == pytest.approx(expected, **EXACT)


def test_principal_axes(gamma):
    statistics = gathered(gamma[0], moments=1)
    count = min(2, gamma[0].shape[-1])
    axes, shares = principal_axes(statistics.usage, statistics.moments, count)
    for group, tokens in enumerate(groups_of(gamma[0])):
        points = np.array(tokens)
        if np.ptp(points, axis=0).max() < 1e-12:
            assert shares[group].tolist() == [0.0] * count
            continue
        expected = PCA(count, svd_solver="full").fit(points)
        assert shares[group].tolist() == pytest.approx(expected.explained_variance_ratio_.tolist(), **EXACT)
        turn = np.sign((axes[group].numpy() * expected.components_).sum(1, keepdims=True))
        np.testing.assert_allclose(axes[group].numpy(), turn * expected.components_, atol=1e-9)
        assert (axes[group].max(-1).values == axes[group].abs().max(-1).values).all()


def test_moments_of_some_tokens():
    gamma = soft()
    statistics = gathered(gamma, moments=3)
    some = torch.cat([gamma, gamma.mean(1, keepdim=True)], dim=1).transpose(0, 1).flatten(1, 2)[:, ::3]
    assert statistics.count == BATCH * TOKENS
    torch.testing.assert_close(statistics.moments, some.mT @ some / some.shape[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(statistics.moments_usage, some.mean(1), rtol=0, atol=1e-12)


def test_permuted_tables_keep_their_margins():
    table = torch.tensor([[5, 0, 2], [0, 0, 0], [1, 7, 4]])
    tables = permuted_tables(table, 50, seed=3)
    assert tables.shape == (50, 3, 3)
    assert (tables.sum(1) == table.sum(0)).all() and (tables.sum(2) == table.sum(1)).all()
    assert (tables >= 0).all()
    assert len({tuple(t.flatten().tolist()) for t in tables}) > 10
    assert torch.equal(tables, permuted_tables(table, 50, seed=3))
    assert not torch.equal(tables, permuted_tables(table, 50, seed=4))


def test_permuted_tables_come_as_often_as_from_all_permutations():
    components, categories = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]
    expected = Counter()
    for shuffled in itertools.permutations(categories):
        expected[tuple(count_pairs(torch.tensor(components), torch.tensor(shuffled), 3, 3).flatten().tolist())] += 1
    table = count_pairs(torch.tensor(components), torch.tensor(categories), 3, 3)
    draws = 40_000
    found = Counter(tuple(t.flatten().tolist()) for t in permuted_tables(table, draws))
    assert found.keys() == expected.keys()
    for key, count in expected.items():
        share = count / math.factorial(6)
        assert found[key] / draws == pytest.approx(share, abs=5 * math.sqrt(share / draws))


def test_permutation_baseline_against_shuffled_labels():
    assignments, labels = torch.randint(0, 6, (500,)), torch.randint(0, 4, (500,)) // 2
    table = count_pairs(assignments, labels, 6, 2)
    found = permutation_baseline(table, permutations=4000, seed=1)
    shuffles = torch.stack([count_pairs(assignments, labels[torch.randperm(500)], 6, 2) for _ in range(4000)]).double()
    for name, function in ALIGNMENT.items():
        values = function(shuffles)
        mean, spread = found[name]
        assert mean == pytest.approx(values.mean().item(), abs=6 * values.std().item() / math.sqrt(4000))
        assert spread == pytest.approx(values.std().item(), rel=0.1)
    exact = expected_mutual_information(table.numpy(), 500)
    mean, spread = found["mutual_information"]
    assert mean == pytest.approx(exact, abs=5 * spread / math.sqrt(4000))


def test_permutation_baseline_of_one_category():
    found = permutation_baseline(torch.tensor([[3], [0], [9]]))
    assert found["weighted_purity"] == pytest.approx((1.0, 0.0), abs=1e-12)
    assert found["mutual_information"] == pytest.approx((0.0, 0.0), abs=1e-12)
    with pytest.raises(ValueError, match="`permutations` must be at least 2, got 1"):
        permutation_baseline(torch.tensor([[3]]), permutations=1)


def test_sums_are_the_same_elsewhere(gamma):
    """What other devices do, on this one."""
    (sums, average), (found, found_average) = diagnostics._sums(gamma[0][0]), diagnostics._sums_on_cpu(gamma[0][0])
    assert found.keys() == sums.keys()
    for name, value in sums.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(found_average, average, rtol=1e-12, atol=1e-12)


def test_sums_do_not_grow(gamma):
    statistics = gathered(gamma[0], torch.zeros(BATCH, TOKENS, dtype=torch.long), 1, moments=1)

    def size():
        return sum(x.numel() for x in [*statistics._sums.values(), statistics.table])

    before = size()
    for _ in range(5):
        statistics.update(gamma[0], torch.zeros(BATCH, TOKENS, dtype=torch.long))
    assert size() == before and statistics.count == 6 * BATCH * TOKENS


def test_what_does_not_fit_is_refused():
    statistics = RunningStatistics(num_categories=3)
    with pytest.raises(ValueError, match="No token has been counted"):
        statistics.summary()
    with pytest.raises(ValueError, match="go together"):
        statistics.update(torch.rand(1, 2, 5, 4))
    labels = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"`categories` must be \(1, 5\), one a token, got \(5,\)"):
        statistics.update(torch.rand(1, 2, 5, 4), labels[0])
    with pytest.raises(ValueError, match=r"`mask` must be \(1, 5\), one a token, got \(1, 4\)"):
        statistics.update(torch.rand(1, 2, 5, 4), labels, torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"must be \(batch, heads, tokens, components\), got \(5, 4\)"):
        statistics.update(torch.rand(5, 4), labels)
    statistics.update(torch.rand(1, 2, 5, 4), labels)
    with pytest.raises(ValueError, match="must go on with 2 heads and 4 components, got 2 and 6"):
        statistics.update(torch.rand(1, 2, 5, 6), labels)
    assert statistics.count == 5
    with pytest.raises(ValueError, match="No moments were kept"):
        _ = statistics.moments


def test_health_sees_a_collapse():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_components": 8}
    # Without biases no queries begin with a preference.
    config = GMAConfig(vocab_size=50, **sizes, attention_bias=False)
    model = GMAForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (2, 30))
    healthy = mixture_health(model, input_ids=tokens)
    assert healthy["smallest_usage_entropy"] > 0.9
    assert collapse_warning(healthy, 8) is None
    with torch.no_grad():
        mixture = model.model.layers[1].mixer.mixture_norm
        mixture.alpha[0, 0] = 100.0
        mixture.omega[0, 3, 5] = -30.0
    collapsed = mixture_health(model, input_ids=tokens)
    assert collapsed["smallest_usage_entropy"] < 0.01 < healthy["smallest_usage_entropy"]
    assert collapsed["active"] < healthy["active"]
    assert collapsed["smallest_variance"] == pytest.approx(config.variance_floor, rel=1e-3)
    assert collapsed["collapsed_heads"] == 1
    assert "head 0 of layer 1 writes into about 1.0 of its 8" in collapse_warning(collapsed, 8)
    with torch.no_grad():
        model.model.layers[0].mixer.mixture_norm.alpha[1, 4] = 100.0
    assert "1 more head like it" in collapse_warning(mixture_health(model, input_ids=tokens), 8)


def test_health_tells_keys_from_queries():
    """Keys that all go to one slot are a collapse, whatever queries do; queries that do are none."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_components": 8}
    tokens = torch.randint(0, 50, (2, 30))
    for name, collapsed in {"k_proj": 1, "q_proj": 0}.items():
        model = GMAForCausalLM(GMAConfig(vocab_size=50, **sizes, forget_gate=True)).eval()
        mixer = model.model.layers[0].mixer
        with torch.no_grad():
            # Far out, where one component has all.
            getattr(mixer, name).bias[8:] = 1e3 * mixer.mixture_norm.mu[1, 5]
        health = mixture_health(model, input_ids=tokens)
        assert health["collapsed_heads"] == collapsed, name
        assert (health["key_usage_entropy"] < health["query_usage_entropy"]) == bool(collapsed)


def test_health_leaves_padding_out():
    config = GMAConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_components=8)
    model = GMAForCausalLM(config).eval()
    tokens = torch.randint(1, 50, (1, 20))
    padded = torch.cat([tokens, torch.zeros(1, 30, dtype=torch.long)], dim=1)
    mask = (torch.arange(50) < 20).long().unsqueeze(0)
    alone = mixture_health(model, input_ids=tokens)
    assert mixture_health(model, input_ids=padded, attention_mask=mask) == pytest.approx(alone, abs=1e-5)


def test_one_component_is_no_collapse():
    config = GMAConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_components=1)
    health = mixture_health(GMAForCausalLM(config).eval(), input_ids=torch.randint(0, 50, (1, 9)))
    assert collapse_warning(health, 1) is None
