"""The site that every test here works on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.site import Site, open_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path) as site:
        yield site


@pytest.fixture
def signed_in(site: Site) -> Site:
    return site.sign_in()
