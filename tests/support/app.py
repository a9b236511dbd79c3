"""The control plane around a fake engine: services, an application, two tenants, a real server."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from manylora.engine.text.processor import TextProcessor
from manylora.engine.text.template import ChatTemplate
from manylora.platform.adapter_check import CheckResult
from manylora.platform.app import create_app
from manylora.platform.base_models import register_base_model
from manylora.platform.db import Database
from manylora.platform.keys import issue_key
from manylora.platform.lives import Lives
from manylora.platform.metrics import ServerMetrics
from manylora.platform.registry import AdapterRegistry
from manylora.platform.services import Services
from manylora.platform.settings import Settings
from manylora.platform.storage import AdapterStore
from manylora.platform.tenants import create_tenant
from support.fake_engine import FakeEngine

BASE_MODEL = "tiny"
ADMIN_TOKEN = "operator-token-of-the-tests"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_text() -> TextProcessor:
    """A processor whose tokens are bytes: as many tokens as the text has bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextProcessor(
        vocab_size=len(alphabet), tokenizer=tokenizer, template=ChatTemplate(TEMPLATE, {})
    )


async def lenient_check(folder: Path) -> CheckResult:
    """Accepts any config with a rank; the digest is that of the weights' bytes."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    if "r" not in config:
        return CheckResult(False, None, ("r is missing", "nothing else is said either"), {})
    weights = (folder / "adapter_model.safetensors").read_bytes()
    return CheckResult(True, hashlib.sha256(weights).hexdigest(), (), {"rank": config["r"]})


def make_services(db: Database, data_dir: Path, engine: FakeEngine | None = None) -> Services:
    """Services over a migrated database, a fake engine and a lenient check."""
    settings = Settings(
        data_dir=data_dir, admin_token=SecretStr(ADMIN_TOKEN), max_upload_bytes=1 << 20
    )
    engine = engine or FakeEngine()
    with db.write() as session:
        base = register_base_model(session, name=BASE_MODEL, digest="0" * 64)
    store = AdapterStore(settings.adapters_dir)
    registry = AdapterRegistry(db, engine, store, lenient_check, base, settings.max_upload_bytes)
    lives = Lives(db=db, kept=settings.request_lives_kept)
    metrics = ServerMetrics(BASE_MODEL)
    return Services(settings, db, engine, byte_text(), base, registry, lives, metrics)


class MemoryFile:
    """A file of an upload."""

    def __init__(self, filename: str | None, content: bytes) -> None:
        self.filename = filename
        self._left = content

    async def read(self, size: int = -1) -> bytes:
        size = len(self._left) if size < 0 else size
        chunk, self._left = self._left[:size], self._left[size:]
        return chunk


def adapter_files(weights: bytes = b"weights") -> list[MemoryFile]:
    """What `lenient_check` accepts."""
    config = json.dumps({"peft_type": "LORA", "r": 8}).encode()
    return [
        MemoryFile("adapter_config.json", config),
        MemoryFile("adapter_model.safetensors", weights),
    ]


@dataclass
class TestBed:
    """An application with two tenants: `acme` with adapters pirate and support, `globex` json."""

    services: Services
    app: FastAPI
    engine: FakeEngine
    tenant_ids: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # by slug; with scopes infer and manage

    __test__ = False

    def client(self, token: str | None = None) -> httpx.AsyncClient:
        """A client in this process; an exception of the application is its 500 answer."""
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    def operator(self) -> httpx.AsyncClient:
        return self.client(ADMIN_TOKEN)

    def issue(self, slug: str, *scopes: str, expires_at: int | None = None) -> str:
        with self.services.db.write() as session:
            tenant_id = self.tenant_ids[slug]
            issued = issue_key(
                session, tenant_id, name="test", scopes=scopes, expires_at=expires_at
            )
        return issued[1]

    def upload(self, slug: str, name: str, weights: bytes, *, promote: bool = False) -> None:
        upload = self.services.adapters.upload
        asyncio.run(upload(self.tenant_ids[slug], name, adapter_files(weights), promote=promote))


def make_testbed(db: Database, data_dir: Path, engine: FakeEngine | None = None) -> TestBed:
    """The application with its tenants, keys and adapters."""
    engine = engine or FakeEngine()
    services = make_services(db, data_dir, engine)
    bed = TestBed(services, create_app(services), engine)
    for slug in ("acme", "globex"):
        with db.write() as session:
            bed.tenant_ids[slug] = create_tenant(session, slug=slug).id
        bed.keys[slug] = bed.issue(slug, "infer", "manage")
    bed.upload("acme", "pirate", b"pirate")
    bed.upload("acme", "support", b"support")
    bed.upload("globex", "json", b"json")
    return bed


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The application behind a real uvicorn on a free port; yields its base URL."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn ended"
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
