"""Two hosts whose cable is cut both say so within the bound, and go on when it is whole again."""

import pytest

from scope_runners.namespaces import why_not
from tests.break_it.broken import HEARTBEAT_S, Broken
from tests.break_it.warm_host import warm_hosts


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    "warm",
    [
        pytest.param("ab", id="forked"),
        # With torchrun, and what it starts, as a user's interpreter starts them.
        pytest.param("b", id="started", marks=pytest.mark.lab),
    ],
)
def test_a_stream_over_two_hosts_survives_a_cut_cable(
    broken: Broken, monkeypatch: pytest.MonkeyPatch, warm: str
) -> None:
    with warm_hosts(monkeypatch, warm):
        result = broken("cable-cut")
    assert result.ends == ("LinkTimeoutError",) * 2
    assert all(error_s is not None and error_s < HEARTBEAT_S for error_s in result.error_s)
    assert len(result.error_s) == 2
    assert result.num_chunks == 8
