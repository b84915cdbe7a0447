"""Figures of responsibilities, as PNG and SVG, in colours that the colour-blind can tell apart."""

from __future__ import annotations

import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from files import write_figure
from matplotlib import colors, pyplot
from matplotlib.patches import Patch, Rectangle
from training import plain_ticks


# Paul Tol's muted scheme; the last is for the rest.
COLOURS = ["#332288", "#88ccee", "#117733", "#ddcc77", "#cc6677", "#44aa99", "#882255", "#999933", "#aa4499"]
REST = "#bbbbbb"
MAP = "cividis"
OF = {"query": "queries", "key": "keys"}

# Components in the figures that name them, tokens in the strip, and characters in its lines.
SHOWN, STRIP, LINE = 24, 240, 96
# Of fewer tokens a component's purity says little.
FEW = 20


@dataclass
class Routing:
    """What the figures of one group of responsibilities are made of, the average of a layer's heads or one head."""

    title: str  # which layer and heads
    names: list[str]  # of the categories
    usage: np.ndarray  # (K,) mean responsibilities
    other_usage: np.ndarray  # (K,) those of the other side
    overlap: float
    side: str
    table: np.ndarray  # (K, C) how many tokens of each category have component k as their largest
    purity: np.ndarray  # (K,) NaN where there are no tokens
    weighted_purity: float
    permuted: dict[str, tuple[float, float]]  # mean and spread of each alignment when labels are shuffled
    points: np.ndarray  # (S, 2) tokens along the first two principal axes
    shares: list[float]  # of the variance, by axis
    point_labels: np.ndarray  # (S,)
    point_components: np.ndarray  # (S,)
    frequent_tokens: list[list[str]]  # of each component
    passage: np.ndarray  # (N, K) responsibilities of one sequence
    texts: list[str]  # of its tokens

    def most_used(self, count: int = SHOWN) -> np.ndarray:
        """Components by the number of tokens that go to them, those without any left out."""
        counts = self.table.sum(1)
        order = np.argsort(-counts, kind="stable")[:count]
        return order[counts[order] > 0]


def visible(text: str) -> str:
    """A token's text with its white space to be seen; part of a character is a box."""
    for character, sign in ((" ", "·"), ("\n", "↵"), ("\t", "⇥"), ("\ufffd", "▯")):
        text = text.replace(character, sign)
    return text or "▯"


def write_figures(routing: Routing, folder: Path) -> None:
    pyplot.switch_backend("Agg")
    for name, draw in FIGURES.items():
        _write(folder / f"{name}.png", draw(routing))


def write_grid(layers: list[dict], folder: Path) -> None:
    """Entropies of every layer and head, from what statistics.json says of the layers."""
    pyplot.switch_backend("Agg")
    _write(folder / f"{GRID}.png", grid(layers))


def _write(path: Path, figure) -> None:
    with warnings.catch_warnings():
        # Tokens may have characters that the font has not; they are boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        write_figure(path, figure, ("png", "svg"))


def _titled(axis, words: str, routing: Routing, of: str | None = None) -> None:
    axis.set_title(f"{words}\n{routing.title}, {of or OF[routing.side]}", fontsize=10)


def category_colours(names: list[str]) -> list[str]:
    """Colours of the first ones; the others share one."""
    return [COLOURS[number] if number < len(COLOURS) else REST for number in range(len(names))]


def heatmap(routing: Routing):
    order = np.argsort(-routing.passage.mean(0), kind="stable")
    figure, axis = pyplot.subplots(figsize=(9, 5), layout="constrained")
    # Components that are used little are to be seen too.
    norm = colors.PowerNorm(0.5, vmin=0, vmax=max(float(routing.passage.max()), 1e-9))
    image = axis.imshow(
        routing.passage.T[order], aspect="auto", cmap=MAP, norm=norm, interpolation="nearest", rasterized=True
    )
    figure.colorbar(image, label="responsibility (colours by its square root)")
    axis.set(xlabel="position in the sequence, tokens", ylabel="component, the most used of this sequence on top")
    ticks = np.linspace(0, len(order) - 1, min(len(order), 9)).astype(int)
    axis.set_yticks(ticks, [str(order[tick]) for tick in ticks])
    _titled(axis, "Which component each token goes to", routing)
    return figure


def composition(routing: Routing):
    rows = routing.most_used()
    shares = routing.table[rows] / routing.table[rows].sum(1, keepdims=True)
    columns = [c for c in range(len(routing.names)) if routing.table[:, c].any()][:20]
    size = max(6.0, 1.6 + 0.75 * len(columns)), max(3.6, 1.9 + 0.26 * len(rows))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    image = axis.imshow(shares[:, columns], aspect="auto", cmap=MAP, vmin=0, vmax=1)
    for row in range(len(rows)):
        for column, category in enumerate(columns):
            share = shares[row, category]
            if share >= 0.01:
                colour = "black" if share > 0.55 else "white"
                axis.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color=colour)
    of_all = routing.table.sum(1)[rows] / routing.table.sum()
    axis.set_yticks(range(len(rows)), [f"{k} ({share:.1%})" for k, share in zip(rows, of_all)], fontsize=8)
    axis.set_xticks(range(len(columns)), [routing.names[c] for c in columns], rotation=40, ha="right", fontsize=8)
    axis.set_ylabel("component (its share of all tokens)")
    figure.colorbar(image, label="share of the component's tokens")
    _titled(axis, "What the tokens of the components with the most tokens are", routing)
    return figure


def usage(routing: Routing):
    components = len(routing.usage)
    order = np.argsort(-routing.usage, kind="stable")
    figure, axis = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    axis.bar(range(components), 100 * routing.usage[order], width=1.0, color=COLOURS[0])
    axis.axhline(100 / components, color="#cc6677", linestyle="--", linewidth=1.5)
    axis.annotate(
        f"all alike: {100 / components:.2g} %",
        (components - 1, 100 / components),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color="#882255",
    )
    axis.set(
        xlabel="rank of the component, the most used first",
        ylabel="mean responsibility, %",
        xlim=(-0.5, components - 0.5),
    )
    _titled(axis, "How much each component is used", routing)
    return figure


def purity(routing: Routing):
    rows = routing.most_used(40)
    paints = category_colours(routing.names)
    dominant = routing.table[rows].argmax(1)
    figure, axis = pyplot.subplots(figsize=(max(6.5, 0.24 * len(rows) + 2), 4), layout="constrained")
    bars = axis.bar(range(len(rows)), routing.purity[rows], color=[paints[c] for c in dominant], ec="black", lw=0.4)
    lines = (
        ("all components", routing.weighted_purity, "-"),
        ("labels shuffled", routing.permuted["weighted_purity"][0], ":"),
    )
    handles = [Patch(facecolor=paints[c], edgecolor="black", label=routing.names[c]) for c in sorted(set(dominant))]
    for words, value, style in lines:
        handles.append(axis.axhline(value, color="black", linestyle=style, label=f"{words}: {value:.3f}"))
    few = routing.table[rows].sum(1) < FEW
    for bar in np.array(bars)[few]:
        bar.set(hatch="////", alpha=0.35)
    if few.any():
        handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label=f"fewer than {FEW} tokens"))
    axis.set_xticks(range(len(rows)), rows, rotation=90, fontsize=7)
    axis.set(ylim=(0, 1), xlabel="component, that with the most tokens first", ylabel="share of its largest category")
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    _titled(axis, "How pure components are", routing)
    return figure


def _component_colours(routing: Routing) -> dict[int, str]:
    """Colours of the most used components, the same in every figure; the others share one."""
    return dict(zip(routing.most_used(len(COLOURS)).tolist(), COLOURS))


def _component_legend(figure, paints: dict[int, str]) -> None:
    handles = [Patch(facecolor=colour, label=f"component {k}") for k, colour in paints.items()]
    figure.legend(handles=[*handles, Patch(facecolor=REST, label="another")], loc="outside right upper", fontsize=8)


def strip(routing: Routing):
    components = routing.passage.argmax(1)[:STRIP]
    paints = _component_colours(routing)
    boxes, line, column = [], 0, 0
    for text, component in zip(routing.texts[:STRIP], components.tolist()):
        shown = textwrap.shorten(visible(text), 24, placeholder="..")
        if column + len(shown) > LINE:
            line, column = line + 1, 0
        boxes.append((line, column, shown, paints.get(component, REST)))
        column += len(shown)
        if "\n" in text:
            line, column = line + 1, 0
    lines = boxes[-1][0] + 1
    figure, axis = pyplot.subplots(figsize=(11, 1.2 + 0.27 * lines), layout="constrained")
    for row, start, shown, colour in boxes:
        axis.add_patch(Rectangle((start, row), len(shown), 0.9, facecolor=colour, edgecolor="white", linewidth=0.5))
        dark = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), colors.to_rgb(colour))) < 0.5
        axis.text(
            start + len(shown) / 2,
            row + 0.45,
            shown,
            ha="center",
            va="center",
            fontsize=7.5,
            family="monospace",
            color="white" if dark else "black",
            parse_math=False,
        )
    axis.set(xlim=(0, LINE), ylim=(lines, 0))
    axis.set_axis_off()
    _component_legend(figure, paints)
    _titled(axis, f"The component that each of {len(boxes)} tokens goes to most (· is a space)", routing)
    return figure


def _scatter(routing: Routing, words: str):
    figure, axis = pyplot.subplots(figsize=(7.5, 5.2), layout="constrained")
    first, second = (f"{share:.1%} of the variance" for share in routing.shares)
    axis.set(xlabel=f"first principal axis, {first}", ylabel=f"second principal axis, {second}")
    _titled(axis, f"{words}: {len(routing.points):,} tokens", routing)
    return figure, axis


def _dot(routing: Routing) -> float:
    """The area of a point: where there are few they are larger."""
    return min(max(5.0, 10_000 / max(len(routing.points), 1)), 30.0)


def pca_by_category(routing: Routing):
    figure, axis = _scatter(routing, "Responsibilities by category")
    handles = []
    for number, (name, colour) in enumerate(zip(routing.names, category_colours(routing.names))):
        of_category = routing.points[routing.point_labels == number]
        if len(of_category):
            axis.scatter(*of_category.T, s=_dot(routing), color=colour, alpha=0.6, linewidths=0, rasterized=True)
            if colour != REST:
                handles.append(Patch(facecolor=colour, label=name))
    rest = len(routing.names) - len(COLOURS)
    if rest > 0:
        handles.append(Patch(facecolor=REST, label=routing.names[-1] if rest == 1 else f"{rest} others"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    return figure


def pca_by_component(routing: Routing):
    figure, axis = _scatter(routing, "Responsibilities by component")
    paints = _component_colours(routing)
    colour = [paints.get(component, REST) for component in routing.point_components.tolist()]
    axis.scatter(*routing.points.T, s=_dot(routing), color=colour, alpha=0.6, linewidths=0, rasterized=True)
    _component_legend(figure, paints)
    return figure


def query_against_key(routing: Routing):
    sides = {routing.side: routing.usage, "key" if routing.side == "query" else "query": routing.other_usage}
    # What is never used is put on the edge of the logarithmic axes.
    least = 1e-3 / len(routing.usage)
    query, key = (100 * np.maximum(sides[side], least) for side in ("query", "key"))
    limits = 0.7 * min(query.min(), key.min()), 1.6 * max(query.max(), key.max())
    figure, axis = pyplot.subplots(figsize=(5.6, 5.4), layout="constrained")
    axis.plot(limits, limits, color="0.6", linewidth=1, zorder=0)
    axis.scatter(key, query, s=16, color=COLOURS[0], alpha=0.7, linewidths=0)
    for component in np.argsort(-np.maximum(query, key))[:6]:
        axis.annotate(str(component), (key[component], query[component]), xytext=(4, 2), textcoords="offset points")
    axis.set(xscale="log", yscale="log", aspect="equal", xlim=limits, ylim=limits)
    for part in (axis.xaxis, axis.yaxis):
        plain_ticks(part)
    axis.tick_params(which="both", labelsize=8)
    axis.tick_params(axis="x", which="both", rotation=90)
    axis.set(xlabel="written by keys: mean responsibility, %", ylabel="read by queries: mean responsibility, %")
    _titled(axis, f"What is written and what is read: {routing.overlap:.0%} in common", routing, "queries and keys")
    return figure


def grid(layers: list[dict]):
    figures = (("usage_entropy", "Usage entropy"), ("token_entropy", "Token entropy"))
    heads = len(layers[0]["query"]["heads"])
    figure, axes = pyplot.subplots(
        2, 2, figsize=(2.4 + 1.3 * (heads + 1), 2.2 + 0.75 * len(layers)), layout="constrained", squeeze=False
    )
    for row, side in enumerate(("query", "key")):
        for column, (name, words) in enumerate(figures):
            values = np.array(
                [[*(head[name] for head in layer[side]["heads"]), layer[side]["average"][name]] for layer in layers]
            )
            axis = axes[row, column]
            image = axis.imshow(values, cmap=MAP, vmin=0, vmax=1, aspect="auto")
            for (y, x), value in np.ndenumerate(values):
                colour = "black" if value > 0.55 else "white"
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
            axis.axvline(heads - 0.5, color="white", linewidth=3)
            axis.set_xticks(range(heads + 1), [*range(heads), "average"], fontsize=8)
            axis.set_yticks(range(len(layers)), range(len(layers)), fontsize=8)
            axis.set(xlabel="head", ylabel="layer")
            reads = "queries, which read" if side == "query" else "keys, which write"
            axis.set_title(f"{words} of {reads}", fontsize=10)
    figure.colorbar(image, ax=axes, label="entropy, over log K")
    return figure


FIGURES = {
    "heatmap": heatmap,
    "category_composition": composition,
    "usage": usage,
    "purity": purity,
    "token_strip": strip,
    "pca_by_category": pca_by_category,
    "pca_by_component": pca_by_component,
    "query_against_key": query_against_key,
}
GRID = "layers_and_heads"
