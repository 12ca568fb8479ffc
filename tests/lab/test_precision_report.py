"""The report tells rounding from error: float32 is near float64, bfloat16 is not."""

from scope_lab.precision import errors


def test_each_dtype_is_as_far_off_as_it_rounds() -> None:
    report = errors(layers=2, heads=2, num_chunks=2, seed=0)
    assert report.keys() == {"rounded once", "bfloat16", "float16", "float32"}
    for what in ("flow", "chunk 0", "chunk 1"):
        assert report["float32"][what] < 1e-5 < report["rounded once"][what]
        assert report["float16"][what] < report["bfloat16"][what] < 0.1
    assert report["bfloat16"]["modulation"] < 1e-5, "float32 whatever the model's dtype"
