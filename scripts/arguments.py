"""Command lines of dataclasses, with YAML files, of which later ones override earlier ones and flags all."""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import fields
from pathlib import Path

import torch
import yaml
from transformers import HfArgumentParser


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def parse(arguments_class: type, description: str, argv: list[str] | None = None):
    """An instance of a dataclass from `[settings.yaml ..] [--flag value ..]`; what is wrong is said in a sentence."""
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(
        arguments_class,
        description=description,
        formatter_class=HelpFormatter,
        usage="%(prog)s [YAML ..] [--flag ..]",
        allow_abbrev=False,
    )
    settings = {}
    while argv and not argv[0].startswith("-"):
        settings |= _read(parser, arguments_class, argv[0])
        argv = argv[1:]
    for action in parser._actions:
        action.required = action.required and action.dest not in settings
    # Text goes through what its flag goes through: YAML takes 1e-3 for a word.
    parser.set_defaults(**settings)
    try:
        arguments, rest = parser.parse_args_into_dataclasses(
            args=argv, look_for_args_file=False, return_remaining_strings=True
        )
    except ValueError as error:
        parser.error(str(error))
    if rest:
        known = [flag for flag in parser._option_string_actions if "-" not in flag[2:]]
        near = difflib.get_close_matches(rest[0].split("=")[0], known, 1)
        parser.error(f"{' '.join(rest)}: no flag of {parser.prog}." + (f" Is {near[0]} meant?" if near else ""))
    return arguments


def usable_device(name: str | None) -> torch.device:
    """The device of this name; without one a GPU, if there is any."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise SystemExit(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None


def _read(parser: HfArgumentParser, arguments_class: type, path: str) -> dict:
    try:
        settings = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"{path} cannot be read: {' '.join(str(error).split())}")
    if not isinstance(settings, dict):
        parser.error(f"{path} must hold `name: value` lines.")
    known = {field.name for field in fields(arguments_class) if field.init}
    unknown = sorted(set(settings) - known)
    if unknown:
        parser.error(f"{path} sets {', '.join(map(str, unknown))}, which is no flag of {parser.prog}.")
    return settings
