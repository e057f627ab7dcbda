"""Download of tokenizers from the Hugging Face Hub, with a local server of the Hub's API."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.paths import ROOT
from tokenization import TINY_DIRECTORY

COMMIT = hashlib.sha1(b"commit").hexdigest()
FILES = {
    path.name: path.read_bytes() for path in TINY_DIRECTORY.iterdir() if path.suffix in (".json", ".jinja")
} | {"model.safetensors": b"weights", "video.json": b"{}"}
# Files about images.
OF_IMAGES = ("chat_template.json", "preprocessor_config.json", "processor_config.json")
FILES |= dict.fromkeys(OF_IMAGES, b"{}")
# Runs in its own process, because the client reads its environment only once.
LOAD = """
import sys, time
from tokenization import PromptTokenizer, TokenizerLoadError
from tokenization.templates.files import hub_directory
time.sleep = lambda _seconds: None  # the Hub's client pauses between its attempts, 23 s in all
try:
    directory = hub_directory(sys.argv[1], sys.argv[2])
    tokenizer = PromptTokenizer.from_directory(directory)
    print(tokenizer.vocab_size, sorted(path.name for path in directory.iterdir()))
except TokenizerLoadError as error:
    print("error:", error)
"""


@pytest.fixture
def hub() -> Iterator[str]:
    """Run a Hub with the repository owner/model and a gated one."""

    class Handler(BaseHTTPRequestHandler):
        """Handler of the paths that a download needs."""

        def do_HEAD(self) -> None:
            """Answer with a file's headers."""
            self.answer(body=False)

        def do_GET(self) -> None:
            """Answer with a repository's list of files, or a file."""
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            """Answer a request."""
            path = unquote(self.path.partition("?")[0])
            name = path.rpartition("/")[2]
            if "owner/gated" in path:
                self.reply(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
            elif "owner/model" not in path:
                self.reply(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            elif COMMIT not in path and "v1" not in path:
                self.reply(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            elif path.startswith("/api/") and "/tree/" in path:
                entries = [
                    {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for file, data in FILES.items()
                ]
                self.reply(200, json.dumps(entries).encode(), body, {})
            elif path.startswith("/api/"):
                siblings = [{"rfilename": file} for file in FILES]
                info = {"id": "owner/model", "sha": COMMIT, "siblings": siblings}
                self.reply(200, json.dumps(info).encode(), body, {})
            elif name in FILES:
                etag = hashlib.sha1(FILES[name]).hexdigest()
                self.reply(200, FILES[name], body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            else:
                self.reply(404, b"", body, {"X-Error-Code": "EntryNotFound"})

        def reply(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
            """Write a response."""
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def load(repository: str, revision: str, cache: Path, **environment: str) -> str:
    """Load a tokenizer in a process; return its output."""
    result = subprocess.run(
        [sys.executable, "-c", LOAD, repository, revision],
        env={
            "PATH": "",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_CACHE": str(cache),
            "PYTHONPATH": str(ROOT),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_tokenizer_is_fetched_once_and_then_from_the_cache(hub: str, tmp_path: Path) -> None:
    """Files are downloaded once, without weights; a pinned commit then needs no request to the Hub."""
    loaded = load("owner/model", COMMIT, tmp_path, HF_ENDPOINT=hub)
    assert loaded.startswith("4096 ")
    assert "tokenizer.json" in loaded
    assert "chat_template.jinja" in loaded
    assert all(name in loaded for name in OF_IMAGES)
    assert "safetensors" not in loaded
    assert "video" not in loaded
    assert load("owner/model", COMMIT, tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1") == loaded
    assert load("owner/model", COMMIT, tmp_path, HF_ENDPOINT="http://127.0.0.1:1") == loaded


@pytest.mark.parametrize(
    ("repository", "revision", "said"),
    [
        ("owner/gated", COMMIT, "owner/gated is gated, private or missing; set HF_TOKEN"),
        ("owner/other", COMMIT, "owner/other is gated, private or missing; set HF_TOKEN"),
        ("owner/model", "v9", "owner/model@v9 cannot be downloaded"),
        ("owner/mo del", COMMIT, "cannot be downloaded"),
    ],
)
def test_a_missing_repository_is_reported(
    hub: str, tmp_path: Path, repository: str, revision: str, said: str
) -> None:
    """The error names the repository or revision and the fix."""
    assert said in load(repository, revision, tmp_path, HF_ENDPOINT=hub)


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}])
def test_an_empty_cache_without_a_hub_is_reported(tmp_path: Path, environment: dict[str, str]) -> None:
    """Without the Hub a tokenizer that is not cached raises an error that states it."""
    assert "is not cached" in load("owner/model", COMMIT, tmp_path, **environment)
