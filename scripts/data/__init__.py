"""Loaders, one for each task: a Hub name or a local path in, data to train on out."""
