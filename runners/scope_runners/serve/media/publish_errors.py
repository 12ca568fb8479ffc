"""Why a stream is not published at this moment; no sentence holds a secret of a URL."""

from scope_contracts.errors import ScopeError


class PublishError(ScopeError):
    """It may be tried again."""


class RefusedError(PublishError):
    """It would be refused again."""
