"""From training in one step: what --push_to_hub does at the end."""

from __future__ import annotations

from pathlib import Path

from hub_upload.check import check
from hub_upload.export import export
from hub_upload.push import push, refuse_name, refuse_without_token


def refuse_early(push_to_hub: bool, hub_model_id: str | None) -> None:
    """What would be refused at the end, before hours of training."""
    if push_to_hub != (hub_model_id is not None):
        raise ValueError("--push_to_hub and --hub_model_id owner/name go together.")
    if push_to_hub:
        refuse_name(hub_model_id)
        refuse_without_token()


def publish(checkpoint: Path, hub_model_id: str, public: bool = False) -> None:
    """Export a checkpoint into its folder `hub`, check that, push it."""
    out = checkpoint / "hub"
    export(checkpoint, out, hub_model_id, overwrite=True)
    if not check([out]):
        raise SystemExit(f"{out} did not pass the check and is not pushed; the model is in {checkpoint}.")
    try:
        print(push(out, hub_model_id, public))
    except SystemExit as refused:
        again = f"python -m hub_upload.push {out} {hub_model_id}{' --public' if public else ''}"
        raise SystemExit(f"{refused} The model is in {checkpoint}, checked; to push it: {again}") from None
