"""What is kept of a loss is its first cause, and the chunk by which pictures came again."""

from scope_runners.serve.recoveries import Recoveries, Recovery


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def recoveries(clock: Clock) -> Recoveries:
    return Recoveries(clock=clock, wall_clock=lambda: clock.now_s + 1000)


def test_a_recovery_is_kept_with_its_first_cause_and_its_first_chunk() -> None:
    clock = Clock()
    kept = recoveries(clock)
    assert kept.lost("the link broke") == "the link broke"
    clock.now_s += 1
    assert kept.lost("rank 1 was killed (SIGKILL)", is_of_rank=True).startswith("rank 1")
    assert kept.lost("rank 0 was ended (SIGTERM)", is_of_rank=True).startswith("rank 1")
    assert kept.lost("rank 0 is gone").startswith("rank 1")
    kept.ready()
    clock.now_s += 2
    assert kept.came(17)
    assert not kept.came(18)
    why = "rank 1 was killed (SIGKILL)"
    assert kept.all == (Recovery(why=why, lost_at=1010.0, after_s=3.0, chunk_index=17),)


def test_a_rewind_is_no_loss() -> None:
    kept = recoveries(Clock())
    kept.lost("rewinding to chunk 3", is_asked_for=True)
    assert kept.lost("rank 0 was ended (SIGTERM)", is_of_rank=True) == "rewinding to chunk 3"
    kept.ready()
    assert not kept.came(3)
    assert kept.all == ()


def test_a_loss_after_the_ranks_came_back_has_its_own_cause() -> None:
    kept = recoveries(Clock())
    kept.lost("rank 1 was killed (SIGKILL)", is_of_rank=True)
    kept.ready()
    assert kept.lost("rank 0 is gone") == "rank 0 is gone"
    assert kept.came(5)
    assert [each.why for each in kept.all] == ["rank 0 is gone"]
