"""An envelope of another version is refused by its number, before anything else of it is read."""

from tests.break_it.broken import Broken, said


def test_an_envelope_of_version_99_is_refused_by_the_leader(broken: Broken) -> None:
    result = broken("unknown-version")
    assert said(result, 1).startswith("VersionError: pp_envelope_version: got 99")
    assert result.ends[0] == "PeerLostError"
    assert result.num_chunks <= 3
