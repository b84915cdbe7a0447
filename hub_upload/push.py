"""Push a checked folder to the Hub, in one commit.

    python -m hub_upload.push small_hub owner/name --dry-run     # what would go
    python -m hub_upload.push small_hub owner/name               # private; --public for everybody

The token is the one of `hf auth login` or of HF_TOKEN. The repository is made if it is not there; afterwards the
revision holds just what the folder holds, or, where anything went wrong, what it held before. A dropped connection or
a busy server is tried again; so can the command be, and what is on the Hub already is not sent twice. At the end the
files on the Hub are compared with the folder's.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import time
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile

from hub_upload.record import digests, read_record


WAITS = (1, 2, 5)  # seconds before each further try, where the server does not say
BUSY = (408, 429, 500, 502, 503, 504)
OURS = "modeling_gma.py"  # by which a repository is known for one of ours


def push(
    folder: Path | str,
    hub_model_id: str,
    public: bool = False,
    revision: str = "main",
    tag: str | None = None,
    force: bool = False,
) -> str:
    """Make the revision hold what the folder holds; returns the address of the commit."""
    folder = Path(folder).expanduser().resolve()
    files = refuse_unchecked(folder, force)
    refuse_name(hub_model_id)
    refuse_other_name(folder, hub_model_id, force)
    refuse_without_token()
    api = HfApi()
    try:
        prepare(api, hub_model_id, public, revision, tag)
        commit = _again(lambda: upload(api, folder, files, hub_model_id, revision))
        difference = _again(lambda: compare(api, folder, files, hub_model_id, commit.oid))
        if difference:
            raise SystemExit(f"{hub_model_id} at {commit.oid} is not the folder: {difference}. Push again.")
        if tag is not None:
            _again(lambda: api.create_tag(hub_model_id, tag=tag, revision=commit.oid, exist_ok=True))
    except Exception as error:
        raise SystemExit(explain(error, hub_model_id, api.endpoint)) from None
    return commit.commit_url


def refuse_unchecked(folder: Path, force: bool) -> dict[str, str]:
    """Digests of the files to push, by name."""
    if not folder.is_dir():
        raise SystemExit(f"OUT {folder} is no folder.")
    files = digests(folder)
    links = [name for name, digest in files.items() if digest.startswith("link")]
    if links:
        raise SystemExit(f"OUT {folder} has links, such as {links[0]}: what is pushed must be there itself.")
    record = read_record(folder)
    checked = record.get("checked")
    if force or checked == files:
        return files
    if record.get("failed"):
        raise SystemExit(f"OUT {folder} did not pass its check: {record['failed']} Mend that, check again.")
    if checked is None:
        raise SystemExit(
            f"OUT {folder} was not checked: `python -m hub_upload.check {os.path.relpath(folder)}`, or --force."
        )
    names = sorted(name for name in files.keys() | checked.keys() if files.get(name) != checked.get(name))
    raise SystemExit(
        f"OUT {folder} has changed since it was checked ({', '.join(names[:3])}): "
        f"`python -m hub_upload.check {os.path.relpath(folder)}` again, or --force."
    )


def refuse_other_name(folder: Path, hub_model_id: str, force: bool) -> None:
    """A card whose code loads another repository is of no use to who reads it."""
    card = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").is_file() else ""
    others = set(re.findall(r'from_pretrained\("([^"]+)"', card)) - {hub_model_id}
    if others and not force:
        raise SystemExit(
            f"The card's code loads {others.pop()!r}, not {hub_model_id!r}: export with --hub_model_id {hub_model_id} "
            f"--overwrite, or edit README.md, and check again; or --force."
        )


def refuse_name(hub_model_id: str) -> None:
    part = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
    if not re.fullmatch(f"{part}/{part}", hub_model_id) or re.search(r"--|\.\.|\.git$", hub_model_id):
        raise SystemExit(
            f"The name of a repository must be owner/name, of letters, digits and single . _ - between them, got "
            f"{hub_model_id!r}."
        )


def refuse_without_token() -> None:
    if get_token() is None:
        raise SystemExit("There is no token for the Hub: log in with `hf auth login`, or set HF_TOKEN.")


def prepare(api: HfApi, hub_model_id: str, public: bool, revision: str, tag: str | None) -> None:
    """See that there is a repository to push to, which is ours to push to."""
    try:
        _again(lambda: api.create_repo(hub_model_id, private=not public))
    except HfHubHTTPError as error:
        if _status(error) != 409:
            raise
        try:
            info = _again(lambda: api.model_info(hub_model_id))
        except HfHubHTTPError as hidden:
            if _status(hidden) not in (401, 403, 404):
                raise
            raise SystemExit(f"The name {hub_model_id} is taken, by what this token may not see.") from None
        names = {sibling.rfilename for sibling in info.siblings or []} - {".gitattributes", "README.md"}
        if names and OURS not in names:
            shown = ", ".join(sorted(names)[:3])
            raise SystemExit(f"The name {hub_model_id} is taken, by something else ({shown}).") from None
        if not info.private and not public:
            raise SystemExit(f"{hub_model_id} is public: say --public, or choose another name.") from None
        if info.private and public:
            print(f"{hub_model_id} is private and stays so; its settings page makes it public.")
    if tag is not None and tag in [ref.name for ref in _again(lambda: api.list_repo_refs(hub_model_id)).tags]:
        raise SystemExit(f"--tag {tag} is in {hub_model_id} already; name another.")
    if revision != "main":
        _again(lambda: api.create_branch(hub_model_id, branch=revision, exist_ok=True))


def upload(api: HfApi, folder: Path, files: dict[str, str], hub_model_id: str, revision: str):
    """One commit that adds what is new and takes away what the folder has not.

    `HfApi.upload_folder` may make several, and a revision that somebody loads between them would be half a model.
    """
    info = api.model_info(hub_model_id, revision=revision)
    there = {sibling.rfilename for sibling in info.siblings or []} - {".gitattributes"}
    operations = [CommitOperationAdd(name, str(folder / name)) for name in files]
    operations += [CommitOperationDelete(name) for name in sorted(there - files.keys())]
    return api.create_commit(
        hub_model_id,
        operations,
        commit_message="Upload GMA model",
        revision=revision,
        # What somebody else commits meanwhile is not to be undone.
        parent_commit=info.sha,
    )


def compare(api: HfApi, folder: Path, files: dict[str, str], hub_model_id: str, commit: str) -> str:
    """What a commit holds otherwise than the folder; nothing, if all went well."""
    tree = api.list_repo_tree(hub_model_id, recursive=True, revision=commit)
    there = {entry.path: entry for entry in tree if isinstance(entry, RepoFile) and entry.path != ".gitattributes"}
    for name in sorted(there.keys() ^ files.keys()):
        return f"{name} is {'missing' if name in files else 'there, and not in the folder'}"
    for name, entry in there.items():
        if entry.lfs is not None:
            is_same = entry.lfs.sha256 == files[name]
        else:
            content = (folder / name).read_bytes()
            is_same = entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if not is_same:
            return f"{name} has other bytes"
    return ""


def _again(call):
    """What a call returns; one that fails for the moment is made again."""
    for wait in (*WAITS, None):
        try:
            return call()
        except Exception as error:
            if wait is None or not (_status(error) in BUSY or _is_connection(error)):
                raise
            asked = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
            wait = min(int(asked), 300) if asked.isdigit() else wait
            print(f"{_status(error) or 'There was no proper answer'}; trying again in {wait} s")
            time.sleep(wait)


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_connection(error: BaseException) -> bool:
    # By name: which HTTP client there is depends on the version of huggingface_hub.
    names = {kind.__name__ for kind in type(error).__mro__}
    # A server in trouble may answer with a page where JSON is due.
    return bool(names & {"TransportError", "ConnectionError", "TimeoutError", "JSONDecodeError"})


def explain(error: Exception, hub_model_id: str, endpoint: str) -> str:
    status, owner = _status(error), hub_model_id.partition("/")[0]
    said = " ".join((getattr(error, "server_message", None) or str(error)).split())[:300]
    sentences = {
        401: "The Hub does not accept the token (401): log in again with `hf auth login`, or set HF_TOKEN.",
        403: f"The token may not write to {hub_model_id} (403): it needs the right to write for {owner}.",
        404: f"{hub_model_id}, or the revision, is not there for this token (404).",
        409: f"{hub_model_id} was changed by somebody else meanwhile (409): push again.",
        412: f"{hub_model_id} was changed by somebody else meanwhile (412): push again.",
        429: "The Hub asks to come back later (429): push again in a while.",
    }
    if status in sentences:
        sentence = sentences[status]
    elif status is not None and status >= 500:
        sentence = f"The Hub has trouble ({status}): push again in a while."
    elif _is_connection(error):
        sentence = f"There is no connection to {endpoint}: push again when there is."
    else:
        return f"{hub_model_id} could not be pushed: {said}"
    return f"{sentence} The push is not complete."


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hub_upload.push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="OUT", help="Folder that hub_upload.check passed.")
    parser.add_argument("hub_model_id", metavar="owner/name", help="Repository to push to.")
    parser.add_argument("--public", action="store_true", help="Make a new repository public.")
    parser.add_argument("--revision", default="main", help="Branch, made if it is not there (default: %(default)s).")
    parser.add_argument("--tag", help="Tag for the commit, such as v1.0.")
    parser.add_argument("--dry-run", action="store_true", help="List what would go, and send nothing.")
    parser.add_argument("--force", action="store_true", help="Push though the folder was not checked as it is.")
    arguments = vars(parser.parse_args())
    if arguments.pop("dry_run"):
        folder = Path(arguments["folder"]).expanduser().resolve()
        refuse_name(arguments["hub_model_id"])
        files = refuse_unchecked(folder, arguments["force"])
        refuse_other_name(folder, arguments["hub_model_id"], arguments["force"])
        sizes = {name: (folder / name).stat().st_size for name in files}
        for name, size in sizes.items():
            print(f"{size:>15,}  {name}")
        kind = "public" if arguments["public"] else "private"
        print(f"{sum(sizes.values()):>15,}  bytes to {arguments['hub_model_id']} ({kind}, {arguments['revision']})")
        return
    print(push(**arguments))
    print(f"To load it: from_pretrained({arguments['hub_model_id']!r}, trust_remote_code=True).")


if __name__ == "__main__":
    main()
