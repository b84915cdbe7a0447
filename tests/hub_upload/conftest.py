"""A Hub on this machine: the endpoints that huggingface_hub uses, with faults on demand; and folders to push to it."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from data.wikitext import train_tokenizer
from peft import LoraConfig, get_peft_model

from hub_upload.export import export
from modeling_gma import (
    GMAConfig,
    GMAForCausalLM,
    GMAForMaskedLM,
    GMAForSequenceClassification,
    GMAForTokenClassification,
    GMAModel,
)


ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "a1B2c3D4e5" * 4
TEXTS = ["The break statement leaves the innermost loop.", "The model reads this text.", "for x in y: pass"] * 20


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """Repositories in memory: branches and tags -> commits -> {path: content, or the SHA-256 of a large file}."""

    def __init__(self):
        self.repos, self.large, self.requests, self.faults = {}, {}, [], []
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def fail(self, method: str, path: str, *what) -> None:
        """Have requests whose path matches go wrong, one after the other: a status, a (status, headers) pair, "drop"
        in the middle of what is sent, or "lose" the answer."""
        self.faults += [(method, re.compile(path), one) for one in what]

    def fault(self, method: str, path: str):
        with self.lock:
            for number, (of, pattern, what) in enumerate(self.faults):
                if of == method and pattern.search(path):
                    del self.faults[number]
                    return what
        return None

    def create(self, name: str, private: bool, files: dict | None = None) -> None:
        commits = {"0" * 40: {".gitattributes": b"*.safetensors filter=lfs\n"} | (files or {})}
        self.repos[name] = {"private": private, "commits": commits, "branches": {"main": "0" * 40}, "tags": {}}

    def commit_of(self, name: str, revision: str) -> str | None:
        repo = self.repos[name]
        found = repo["branches"].get(revision) or repo["tags"].get(revision)
        return found or (revision if revision in repo["commits"] else None)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds, large files too."""
        held = self.repos[name]["commits"][self.commit_of(name, revision)]
        return {path: self.large[x] if isinstance(x, str) else x for path, x in held.items()}


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_one(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        length = int(self.headers.get("Content-Length") or 0)
        fault = self.hub.fault(self.command, path)
        self.hub.requests.append((self.command, path))
        if fault == "drop":
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = self.read_chunks()
        if isinstance(fault, int):
            fault = (fault, {})
        if isinstance(fault, tuple):
            return self.answer({"error": "a fault"}, *fault)
        with self.hub.lock:
            status, content, headers = self.route(path, body)
        if fault == "lose":
            self.close_connection = True
            return
        self.answer(content, status, headers)

    do_GET = do_POST = do_PUT = do_HEAD = handle_one

    def read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, content, status: int = 200, headers: dict | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": len(data)} | (headers or {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def route(self, path: str, body: bytes):
        hub = self.hub
        may_write = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if path.startswith("/lfs/"):
            oid = path.rpartition("/")[2]
            if hashlib.sha256(body).hexdigest() != oid:
                return 400, {"error": "the content is not what was announced"}, {}
            hub.large[oid] = body
            return 200, {}, {}
        if not may_write and self.command in ("POST", "PUT"):
            return 401, {"error": "Invalid credentials"}, {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repos:
                return 409, {"error": "You already created this model repo"}, {}
            hub.create(name, asked.get("visibility") == "private" or bool(asked.get("private")))
            return 200, {"url": f"{hub.endpoint}/{name}", "name": name, "id": name}, {}
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/.]+)(?:\.git)?(?:/(.*))?", path)
        if match is None or match[1] not in hub.repos or (hub.repos[match[1]]["private"] and not may_write):
            return 404 if may_write else 401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"}
        return self.route_repo(match[1], match[2] or "", body)

    def route_repo(self, name: str, rest: str, body: bytes):
        hub, repo = self.hub, self.hub.repos[name]
        verb, _, revision = rest.partition("/")
        if verb == "refs":
            refs = {
                kind: [{"name": ref, "ref": f"refs/{ref}", "targetCommit": at} for ref, at in repo[kind].items()]
                for kind in ("branches", "tags")
            }
            return 200, refs | {"converts": []}, {}
        if verb == "branch":
            taken = revision in repo["branches"]
            repo["branches"].setdefault(revision, repo["branches"]["main"])
            return (409 if taken else 200), {}, {}
        if rest == "info/lfs/objects/batch":
            objects = []
            for wanted in json.loads(body)["objects"]:
                actions = {"upload": {"href": f"{hub.endpoint}/lfs/{wanted['oid']}"}}
                objects.append(wanted | ({} if wanted["oid"] in hub.large else {"actions": actions}))
            return 200, {"transfer": "basic", "objects": objects}, {}
        if verb in ("resolve", "tree"):
            revision, _, file = revision.partition("/")
        commit = hub.commit_of(name, revision or "main")
        if commit is None:
            return 404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"}
        held = repo["commits"][commit]
        if verb in ("", "revision"):
            siblings = [{"rfilename": path} for path in held]
            return 200, {"id": name, "sha": commit, "private": repo["private"], "siblings": siblings, "tags": []}, {}
        if verb == "tag":
            tag = json.loads(body)["tag"]
            taken = tag in repo["tags"]
            repo["tags"].setdefault(tag, commit)
            return (409 if taken else 200), {}, {}
        if verb == "preupload":
            files = []
            for file in json.loads(body)["files"]:
                is_large = file["path"].endswith(".safetensors") or b"\0" in base64.b64decode(file["sample"])
                there = held.get(file["path"])
                oid = there if isinstance(there, str) or there is None else git_id(there)
                mode = "lfs" if is_large else "regular"
                files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            return 200, {"files": files}, {}
        if verb == "tree" and file:
            return 404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"}
        if verb == "tree":
            return 200, [self.entry(path, content) for path, content in held.items()], {}
        if verb == "commit":
            return self.commit(repo, name, revision, commit, body)
        if verb == "resolve":
            if file not in held:
                return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            content = held[file] if isinstance(held[file], bytes) else hub.large[held[file]]
            etag = held[file] if isinstance(held[file], str) else git_id(content)
            return 200, content, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        return 404, {"error": f"{self.command} {name} {rest} is not known here"}, {}

    def entry(self, path: str, content) -> dict:
        if isinstance(content, bytes):
            return {"type": "file", "path": path, "size": len(content), "oid": git_id(content)}
        size = len(self.hub.large[content])
        lfs = {"oid": content, "size": size, "pointerSize": 134}
        return {"type": "file", "path": path, "size": size, "oid": git_id(content.encode()), "lfs": lfs}

    def commit(self, repo: dict, name: str, revision: str, parent: str, body: bytes):
        held = dict(repo["commits"][parent])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, parent):
                return 412, {"error": "the branch has moved on"}, {}
            if line["key"] == "file":
                held[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                if value["oid"] not in self.hub.large:
                    return 400, {"error": f"{value['path']} was not uploaded"}, {}
                held[value["path"]] = value["oid"]
            if line["key"] == "deletedFile":
                del held[value["path"]]
        oid = hashlib.sha1(f"{parent}{sorted(held)}{len(repo['commits'])}".encode()).hexdigest()
        repo["commits"][oid] = held
        repo["branches"][revision] = oid
        url = f"{self.hub.endpoint}/{name}/commit/{oid}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""}, {}


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def run(tmp_path):
    """Run a command in a new process that knows the Hub, a token and an empty cache, and nothing of ours but ROOT."""

    def run(*command, hub=None, token=TOKEN, program=sys.executable, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GMA_"))}
        environment |= {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        # The Hub here knows large files by LFS alone.
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"HF_ENDPOINT": hub.endpoint} if hub else {"HF_HUB_OFFLINE": "1"}
        environment |= {"HF_TOKEN": token} if token else {}
        command = [program, *map(str, command)]
        return subprocess.run(command, env=environment | variables, capture_output=True, text=True, cwd=tmp_path)

    return run


def make_checkpoints(folder: Path) -> dict[str, Path]:
    """A small model of each kind, with a tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    fields = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields |= {"num_components": 4, "max_position_embeddings": 64, "num_labels": 3}
    fields |= {"initializer_range": 0.2, "residual_initializer_range": 0.2}
    fields |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    both_ways = GMAConfig(**fields, is_causal=False)
    causal = GMAConfig(**fields, forget_gate=True, position_embedding_type="sinusoidal")
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    models = {
        "causal": GMAForCausalLM(causal),
        "classifier": GMAForSequenceClassification(both_ways),
        "masked": GMAForMaskedLM(both_ways),
        "tagger": GMAForTokenClassification(both_ways),
        "encoder": GMAModel(both_ways),
        "lora": get_peft_model(GMAForSequenceClassification(both_ways), adapters).merge_and_unload(),
        "sharded": GMAForCausalLM(causal).to(torch.bfloat16),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in models}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def exported(checkpoints, tmp_path_factory) -> dict[str, Path]:
    """Each of them exported."""
    folder = tmp_path_factory.mktemp("exported")
    for name, checkpoint in checkpoints.items():
        export(checkpoint, folder / name, max_shard_size="20KB" if name == "sharded" else "5GB")
    return {name: folder / name for name in checkpoints}


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of an exported folder, with its record, to do things to."""

    def make(name: str) -> Path:
        shutil.copytree(exported[name], tmp_path / name)
        record = exported[name].with_name(f"{name}.record.json")
        shutil.copyfile(record, tmp_path / record.name)
        return tmp_path / name

    return make
