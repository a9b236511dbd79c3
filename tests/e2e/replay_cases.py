"""Replays groups of bad inputs, by a script kept outside the repository, against a demo server.

    PYTHONPATH=tests python tests/e2e/replay_cases.py SCRIPT GROUP...

Starts a server with the demo tenants, makes the keys that the cases name, and exits non-zero when
a case of any group fails or the server no longer answers well at the end.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from support.served import free_port, served

ADMIN_TOKEN = "operator-token-of-the-replay"
SEEDING_SECONDS = 120


def main(script: str, groups: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        data, port = Path(folder) / "data", free_port()
        environment = {
            "MANYLORA_PORT": str(port),
            "MANYLORA_DATA_DIR": str(data),
            "MANYLORA_ADMIN_TOKEN": ADMIN_TOKEN,
        }
        log = Path(folder) / "log"
        command = ["manylora", "serve", "--demo"]
        with served(command, environment, port=port, log=log, patience_seconds=600) as base:
            given = [f"--var={name}={value}" for name, value in variables(base, data).items()]
            failed = [group for group in groups if not replay(script, base, group, given)]
            still_well = httpx.get(f"{base}/ready").is_success
    sys.stdout.write(f"failed groups: {' '.join(failed) or 'none'}; ready: {still_well}\n")
    return 1 if failed or not still_well else 0


def replay(script: str, base: str, group: str, given: list[str]) -> bool:
    sys.stdout.write(f"group {group}\n")
    sys.stdout.flush()
    command = [sys.executable, script, "--base", base, "--group", group, *given]
    return subprocess.run(command, check=False).returncode == 0


def variables(base: str, data: Path) -> dict[str, str]:
    """What the cases name. A case that names something else is skipped, and counted."""
    demo = demo_facts(data / "demo.json")
    own, other = demo["tenants"]
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    with httpx.Client(base_url=f"{base}/api/v1", headers=headers) as api:
        shown = api.get(
            f"/tenants/{other['name']}/adapters/{other['adapters'][0]}"
        ).raise_for_status()
        found = keys(api, own["name"]) | {"OTHER_ADAPTER_ID": shown.json()["id"]}
    return found | {
        "ADMIN_KEY": ADMIN_TOKEN,
        "TENANT": own["name"],
        "MODEL": own["adapters"][0],
        "BASE": demo["base_model"],
        "OTHER_TENANT": other["name"],
        "OTHER_MODEL": other["adapters"][0],
        "ADMIN_USER": demo["admin"]["email"],
        "ADMIN_PASS": demo["admin"]["password"],
        "SESSION_COOKIE": session_cookie(base, **demo["admin"]),
        "LOGGED_OUT_COOKIE": session_cookie(base, **demo["admin"], sign_out=True),
        "ORIGIN": base,
        # Forms carry no token: `Origin` and `Sec-Fetch-Site` are checked instead.
        "CSRF": "none",
        "LOGIN_CSRF": "none",
    }


def demo_facts(path: Path) -> dict[str, Any]:
    """What the server says of its demo: it writes this once it is ready, when all is seeded."""
    deadline = time.monotonic() + SEEDING_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"no {path.name} after {SEEDING_SECONDS} s")
        time.sleep(0.1)
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def keys(api: httpx.Client, own: str) -> dict[str, str]:
    """A key in each state that a key can be in."""

    def make(tenant: str, *scopes: str) -> dict[str, str]:
        body = {"name": "replay", "scopes": scopes}
        made: dict[str, str] = (
            api.post(f"/tenants/{tenant}/keys", json=body).raise_for_status().json()
        )
        return made

    api.post("/tenants", json={"slug": "suspended"}).raise_for_status()
    of_suspended = make("suspended", "infer")
    api.patch("/tenants/suspended", json={"status": "suspended"}).raise_for_status()
    revoked = make(own, "infer")
    api.delete(f"/tenants/{own}/keys/{revoked['id']}").raise_for_status()
    return {
        "KEY": make(own, "infer", "manage")["key"],
        "INFER_ONLY_KEY": make(own, "infer")["key"],
        "REVOKED_KEY": revoked["key"],
        "DISABLED_TENANT_KEY": of_suspended["key"],
    }


def session_cookie(base: str, *, email: str, password: str, sign_out: bool = False) -> str:
    """The `Cookie` header of an operator's session, or of one that has ended."""
    with httpx.Client(base_url=base, headers={"Origin": base}) as browser:
        form = {"username": email, "password": password}
        assert browser.post("/admin/login", data=form).is_redirect
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        if sign_out:
            assert browser.post("/admin/logout").is_redirect
    return cookie


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
