"""A server that answers the requests of `datasets` as the Hugging Face hub does, and offers one dataset, owner/corpus."""

import hashlib
import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import datasets
import pyarrow as pa
import pyarrow.parquet
from huggingface_hub import constants

COMMIT = "1" * 40


class HubServer(ThreadingHTTPServer):
    """The server. `texts[subset][split]` contains documents. `read` lists the files that were downloaded."""

    def __init__(self, texts: dict[str, dict[str, list[str]]]) -> None:
        """Store the documents in Parquet files, whose column of text is called "body"."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.read: list[str] = []
        self.files: dict[str, bytes] = {}
        card = ["---", "configs:"]
        for subset, splits in texts.items():
            card += [f"- config_name: {subset}", "  data_files:"]
            for split, documents in splits.items():
                card += [f"  - split: {split}", f"    path: {subset}/{split}.parquet"]
                file = io.BytesIO()
                pa.parquet.write_table(pa.table({"body": documents}), file, row_group_size=20)
                self.files[f"{subset}/{split}.parquet"] = file.getvalue()
        self.files["README.md"] = "\n".join([*card, "---", ""]).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        files, path = self.server.files, urlsplit(self.path).path
        if path.startswith("/api/datasets/owner/corpus/tree/"):
            folder = path.split("/", 7)[-1]
            names = [name for name in files if name.startswith(folder)]
            self._reply(json.dumps([{"type": "file", "path": x, "size": len(files[x]), "oid": _hash(files[x])} for x in names]))
        elif path.startswith("/api/datasets/owner/corpus"):
            self._reply(json.dumps({"id": "owner/corpus", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}))
        elif path.startswith("/datasets/owner/corpus/resolve/") and (name := path.split("/", 6)[-1]) in files:
            if self.command == "GET":
                self.server.read.append(name)
            self._reply(files[name], **{"X-Repo-Commit": COMMIT, "ETag": f'"{_hash(files[name])}"'})
        else:
            code = "EntryNotFound" if path.startswith("/datasets/owner/corpus/") else "RepoNotFound"
            self._reply("{}", 404, **{"X-Error-Code": code})

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def _reply(self, content: str | bytes, status: int = 200, **headers: str) -> None:
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def use_server(rank: int = 0) -> None:
    """Send the requests of this process to the server at HF_ENDPOINT. The libraries have already read this variable."""
    datasets.config.HF_ENDPOINT = constants.ENDPOINT = os.environ["HF_ENDPOINT"]
    constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]
    # Without a network, requests to other servers may take minutes.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = datasets.config.USE_PARQUET_EXPORT = False


@contextmanager
def start_server(texts: dict[str, dict[str, list[str]]]) -> Iterator[HubServer]:
    """Run a server in a thread."""
    with HubServer(texts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
