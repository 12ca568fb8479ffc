"""What arrives on a link is what was sent, or it is not used."""

from tests.break_it.broken import Broken, said


def test_a_bit_of_latents_in_that_flips_on_the_link_is_refused_by_the_leader(
    broken: Broken,
) -> None:
    result = broken("bit-flip/inputs")
    assert said(result, 1).startswith("DigestError: chunk 3: latents_in from rank 0")
    assert (result.ends[0], result.ends[2]) == ("PeerLostError",) * 2


def test_a_bit_of_latents_out_that_flips_on_the_link_is_refused_by_rank0(broken: Broken) -> None:
    result = broken("bit-flip/answer")
    assert said(result, 0).startswith("DigestError: chunk 3: latents_out from rank 1")
    assert result.num_chunks == 3
