"""Tables of responsibilities: rows of the CSV files, and a report beside the paper's figures."""

from __future__ import annotations

import json

import numpy as np
from profile_report import table as markdown
from responsibility_figures import OF, Routing

from modeling_gma.categories import CATEGORIES


# Table 4 and the appendix of the paper: K=128, WikiText-103, last layer, queries, heads averaged.
PAPER = {
    "active": "104/128",
    "usage_entropy": "0.933",
    "token_entropy": "0.790",
    "mean_maximum": "0.103",
    "weighted_purity": "0.483",
    "mutual_information": "0.427",
    "normalised_mutual_information": "0.244",
}
PAPER_PERMUTED = {
    "weighted_purity": "0.293 ± 0.001",
    "mutual_information": "0.0067 ± 0.0003",
    "normalised_mutual_information": "0.0038 ± 0.0002",
}
PAPER_SHARES = dict(zip(CATEGORIES, (0.286, 0.280, 0.157, 0.133, 0.064, 0.037, 0.023, 0.011, 0.005, 0.003)))
PAPER_PCA = "12.0 % and 7.9 %"
WORDS = {
    "active": "components that are the largest of some token",
    "usage_entropy": "usage entropy, over log K",
    "token_entropy": "token entropy, over log K",
    "mean_maximum": "mean of the largest responsibility",
    "effective_components": "effective number of components",
    "weighted_purity": "weighted purity",
    "mutual_information": "mutual information, nats",
    "normalised_mutual_information": "normalised mutual information",
}


def category_rows(routing: Routing) -> list[dict]:
    counts = routing.table.sum(0)
    return [
        {"category": name, "tokens": int(count), "share": count / counts.sum()}
        for name, count in zip(routing.names, counts)
    ]


def component_rows(routing: Routing) -> list[dict]:
    """Components by how many tokens go to them, the most first."""
    counts = routing.table.sum(1)
    return [
        {
            "component": int(k),
            "usage": routing.usage[k],
            "tokens": int(counts[k]),
            "share": counts[k] / counts.sum(),
            "purity": routing.purity[k] if counts[k] else "",
            "dominant_category": routing.names[routing.table[k].argmax()] if counts[k] else "",
            # As JSON, which no spreadsheet takes for a formula.
            "frequent_tokens": json.dumps(routing.frequent_tokens[k], ensure_ascii=False),
        }
        for k in np.argsort(-counts, kind="stable")
    ]


def permutation_rows(routing: Routing, figures: dict) -> list[dict]:
    return [
        {"metric": name, "observed": figures[name], "permuted_mean": mean, "permuted_std": spread}
        for name, (mean, spread) in routing.permuted.items()
    ]


def layer_rows(layers: list[dict]) -> list[dict]:
    rows = []
    for number, layer in enumerate(layers):
        for side in ("query", "key"):
            for head, figures in enumerate([*layer[side]["heads"], layer[side]["average"]]):
                is_head = head < len(layer[side]["heads"])
                both = layer["both"]["heads"][head] if is_head else layer["both"]["average"]
                rows.append({"layer": number, "side": side, "head": head if is_head else "average"} | figures | both)
    return rows


def report_lines(
    routing: Routing, figures: dict, both: dict, about: str, half_lives: list[list[float]] | None = None
) -> list[str]:
    """Markdown: the paper's tables, ours beside the paper's where they are of the same kind.

    `about` says what text it was.
    """
    count = len(routing.usage)
    paper = PAPER if routing.side == "query" else {}
    if tuple(routing.names) != CATEGORIES:
        paper = {name: value for name, value in paper.items() if name not in PAPER_PERMUTED}
    cells = {name: f"{value:.3f}" for name, value in figures.items()}
    cells["active"] = f"{round(figures['active'] * count)}/{count}"
    cells["effective_components"] = f"{figures['effective_components']:.1f}"
    lines = [
        f"# {routing.title.capitalize()}, {OF[routing.side]}",
        "",
        f"{about} The paper's: 65,536 tokens of WikiText-103's validation split, K = 128, last layer, queries, heads "
        f"averaged.",
        "",
    ]
    body = [[words, cells[name], paper.get(name, "")] for name, words in WORDS.items()]
    body += [
        ["effective rank of the affinity", f"{both['effective_rank']:.1f}", ""],
        ["usage that queries and keys have in common", f"{both['usage_overlap']:.3f}", ""],
        [
            "variance along the first two axes",
            " and ".join(f"{100 * x:.1f} %" for x in routing.shares),
            PAPER_PCA if paper else "",
        ],
    ]
    lines += markdown(["", "here", "paper"], body)
    body = []
    for row in permutation_rows(routing, figures):
        metric, shuffled = row["metric"], f"{row['permuted_mean']:.4f} ± {row['permuted_std']:.4f}"
        of_paper = [paper[metric], PAPER_PERMUTED[metric]] if metric in paper else ["", ""]
        body.append([WORDS[metric], f"{row['observed']:.4f}", shuffled, *of_paper])
    lines += ["## Labels shuffled", ""]
    lines += markdown(["", "observed", "shuffled", "observed, paper", "shuffled, paper"], body)
    shares = PAPER_SHARES if tuple(routing.names) == CATEGORIES else {}
    body = []
    for row in category_rows(routing):
        share = f"{shares[row['category']]:.3f}" if shares else ""
        body.append([row["category"], f"{row['tokens']:,}", f"{row['share']:.3f}", share])
    lines += ["## Categories", "", *markdown(["category", "tokens", "share", "share, paper"], body)]
    body = []
    for row in component_rows(routing)[:12]:
        if row["tokens"]:
            tokens = " ".join(f"`{escaped(token)}`" for token in json.loads(row["frequent_tokens"]))
            body.append([str(row["component"]), f"{row['share']:.3f}", f"{row['purity']:.3f}"])
            body[-1] += [row["dominant_category"], tokens]
    lines += ["## Components that most tokens go to", ""]
    lines += markdown(["component", "share", "purity", "dominant category", "frequent tokens"], body)
    if half_lives is not None:
        body = [[str(layer), *(f"{tokens:,.3g}" for tokens in heads)] for layer, heads in enumerate(half_lives)]
        lines += ["## Half-life of memory, in tokens", ""]
        lines += markdown(["layer", *(f"head {head}" for head in range(len(half_lives[0])))], body)
    return lines


def escaped(token: str) -> str:
    """A token inside a code span of a Markdown table."""
    return token.replace("|", "\\|").replace("`", "\u02cb")
