"""The whole site around a fake engine, for tests of the pages."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from manylora.platform.adapter_check import CheckResult
from manylora.platform.adapters import Upload
from manylora.platform.app import create_app
from manylora.platform.db import Database, sqlite_url
from manylora.platform.keys import issue_key
from manylora.platform.migrate import upgrade
from manylora.platform.models import ApiKey, Tenant
from manylora.platform.operators import create_operator
from manylora.platform.services import Services
from manylora.platform.tenants import create_tenant
from manylora.platform.usage import Usage, record
from manylora.web.app import mount
from support.app import adapter_files, lenient_check, make_services
from support.fake_engine import FakeEngine

EMAIL, PASSWORD = "ada@example.org", "correct horse battery"
HI = [{"role": "user", "content": "hi"}]
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}

# Of the shape that the engine's check gives.
REPORT = {
    "modules": [
        {"path": f"model.layers.{layer}.self_attn.{target}", "rank": 8, "scale": 2.0}
        for layer in range(3)
        for target in ("q_proj", "v_proj")
    ],
    "targets": ["q_proj", "v_proj"],
    "rank": 8,
    "dtypes": ["BF16"],
    "parameters": 460_800,
    "size_bytes": 921_600,
    "ignored_config": ["inference_mode"],
    "base_model_name_or_path": "someone/tiny",
}


def words_of(html: str) -> str:
    """The text that a reader sees, without tags, in one line."""
    html = html.replace('<wbr><span class="nowrap">', "")
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


async def check_with_report(folder: Path) -> CheckResult:
    result = await lenient_check(folder)
    return replace(result, report=REPORT) if result.accepted else result


@dataclass
class Site:
    """The site, what serves it, and one browser's worth of client."""

    app: FastAPI
    services: Services
    engine: FakeEngine
    client: TestClient
    requests: int = field(default=0)

    @property
    def db(self) -> Database:
        return self.services.db

    def sign_in(self) -> "Site":
        answer = self.post("/admin/login", username=EMAIL, password=PASSWORD)
        assert answer.status_code == 303
        return self

    def get(self, path: str, **headers: str):
        return self.client.get(
            path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )

    def post(self, path: str, **values: object):
        """A form as a browser sends it from one of our pages."""
        return self.client.post(path, data=values or {"nothing": ""}, headers=SAME_ORIGIN)

    def add_tenant(self, slug: str = "acme", name: str | None = None) -> Tenant:
        with self.db.write() as session:
            return create_tenant(session, slug=slug, name=name)

    def add_key(self, tenant: Tenant, name: str = "app") -> tuple[ApiKey, str]:
        with self.db.write() as session:
            return issue_key(session, tenant.id, name=name)

    def add_adapter(
        self, tenant: Tenant, name: str = "pirate", weights: bytes = b"w", *, promote: bool = False
    ) -> Upload:
        upload = partial(self.services.adapters.upload, promote=promote)
        assert self.client.portal is not None
        return self.client.portal.call(upload, tenant.id, name, adapter_files(weights))

    def chat(self, tenant: Tenant, model: str | None = None, **body: object) -> str:
        """Send one request as this tenant; its id."""
        answer = self.client.post(
            "/v1/chat/completions",
            json={"model": model or self.services.base_model.name, "messages": HI, **body},
            headers={"Authorization": f"Bearer {self.add_key(tenant)[1]}"},
        )
        return answer.headers["x-request-id"]

    def add_usage(self, key: ApiKey, upload: Upload | None = None, **values: object) -> None:
        """One answered request; of the base model unless an adapter's upload is given."""
        self.requests += 1
        if upload is not None:
            values |= {
                "adapter": upload.adapter.name,
                "adapter_version": upload.version.number,
                "adapter_version_id": upload.version.id,
                "adapter_digest": upload.version.digest,
            }
        defaults = {
            "tenant_id": key.tenant_id,
            "key_id": key.id,
            "request_id": f"req_{self.requests:08d}",
            "base_model": self.services.base_model.name,
            "route": "chat",
            "status": "ok",
            "finish_reason": "stop",
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "completion_tokens": 5,
            "delivered_tokens": 5,
            "queued_us": 1_000,
            "ttft_us": 80_000,
            "total_us": 900_000,
        }
        with self.db.write() as session:
            record(session, Usage(**defaults | values))


def admin_routes(site: Site) -> list[tuple[str, str]]:
    """Method and path of every page, also of those that FastAPI keeps in included routers."""
    pending, found = list(site.app.routes), []
    while pending:
        route = pending.pop()
        if isinstance(route, APIRoute):
            found += [(method, route.path) for method in sorted(route.methods)]
        elif included := getattr(route, "original_router", None):
            pending += included.routes
    return [(method, path) for method, path in found if path.startswith("/admin")]


@cache
def _database_file() -> bytes:
    """A migrated database with one operator; made once, since each test wants its own."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "site.db"
        database = Database(sqlite_url(file))
        upgrade(database)
        with database.write() as session:
            create_operator(session, email=EMAIL, password=PASSWORD)
        database.close()
        return file.read_bytes()


@contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """A site over SQLite with one operator, its data in a folder of its own."""
    file = folder / "site.db"
    file.write_bytes(_database_file())
    database = Database(sqlite_url(file))
    engine = FakeEngine()
    services = make_services(database, folder, engine)
    services = replace(services, adapters=replace(services.adapters, check=check_with_report))
    app = create_app(services)
    mount(app)
    with TestClient(app, follow_redirects=False) as client:
        yield Site(app, services, engine, client)
    database.close()
