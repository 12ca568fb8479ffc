"""Tests of the server speak no TLS, and read no certificates for it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """httpx reads all of a machine's for every client, for 20 ms of a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield
