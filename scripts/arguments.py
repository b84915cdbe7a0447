"""Command lines of dataclasses, with YAML files, of which later ones override earlier ones and flags all."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def parse(arguments_class: type, description: str, argv: list[str] | None = None):
    """An instance of a dataclass from `[settings.yaml ..] [--flag value ..]`; what is wrong is said in a sentence."""
    argv = sys.argv[1:] if argv is None else argv
    parser = HfArgumentParser(
        arguments_class, description=description, formatter_class=HelpFormatter, usage="%(prog)s [YAML ..] [--flag ..]"
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
        (arguments,) = parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)
    except ValueError as error:
        parser.error(str(error))
    return arguments


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
