"""Write a Gradio Space that shows models on the Hub.

    python -m hub_upload.demo demo --generator owner/name --classifier owner/other     # either or both
    hf upload owner/demo demo . --repo-type space                                      # once it is as you like it

The page is hub_upload/space/app.py, which also runs on this machine: python hub_upload/space/app.py --help. In the
Space it runs the code in those repositories (trust_remote_code): name your own, or such as you trust.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import metadata_save

from hub_upload.export import requirements
from hub_upload.push import refuse_name


SPACE = Path(__file__).with_name("space")
GRADIO = "6.31.0"  # what the page was tested with


def export_space(out: Path | str, generator: str | None, classifier: str | None) -> None:
    """Write the folder `out`, whole."""
    out = Path(out).expanduser().resolve()
    models = [name for name in (generator, classifier) if name]
    if not models:
        raise SystemExit("Give --generator or --classifier.")
    for name in models:
        refuse_name(name)
    if out.exists():
        raise SystemExit(f"OUT {out} is there already; name another folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        settings = {"generator": generator, "classifier": classifier, "trust_remote_code": True}
        (aside / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        (aside / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements()), encoding="utf-8")
        shutil.copyfile(SPACE / "app.py", aside / "app.py")
        (aside / "README.md").write_text("\nSee how Gaussian Mixture Attention routes tokens.\n", encoding="utf-8")
        space = {"title": "Gaussian Mixture Attention", "sdk": "gradio", "sdk_version": GRADIO, "app_file": "app.py"}
        metadata_save(aside / "README.md", space | {"license": "apache-2.0", "models": models})
        aside.chmod(0o755)
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hub_upload.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", help="Folder to make.")
    parser.add_argument("--generator", help="Causal language model on the Hub: owner/name.")
    parser.add_argument("--classifier", help="Text classifier on the Hub: owner/name.")
    export_space(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
