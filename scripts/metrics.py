"""Metrics of `evaluate` that need no download."""

from __future__ import annotations

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """Share of predictions that are right, as `evaluate.load("accuracy")` has it."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(
            description=type(self).__doc__,
            citation="",
            inputs_description="predictions, references",
            features=features,
        )

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
