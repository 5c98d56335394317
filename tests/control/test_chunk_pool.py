"""Whatever ranks do and whichever die, no pick is lost and none is counted twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from flodl_shm.control.chunk_pool import ChunkPool, Coverage
from flodl_shm.control.spans import length
from flodl_shm.errors import WeBroke


def positions(spans):
    return [position for start, stop in spans for position in range(start, stop)]


RANKS = st.integers(0, 3)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that lists single picks."""

    rounds = Bundle("rounds")

    @initialize(total=st.integers(0, 200))
    def begin(self, total):
        self.pool = ChunkPool(total)
        self.free = set(range(total))
        self.held = {rank: [] for rank in range(4)}
        self.pending = {}
        self.done = []
        self.round = 0

    def granted(self, rank, spans):
        picks = positions(spans)
        assert len(set(picks)) == len(picks)
        assert self.free.issuperset(picks)
        self.free.difference_update(picks)
        self.held[rank] += picks

    @rule(rank=RANKS, size=st.integers(0, 80), unit=st.integers(1, 9))
    def take(self, rank, size, unit):
        free = len(self.free)
        spans = self.pool.take(rank, size, unit=unit)
        self.granted(rank, spans)
        want = min(size, free)
        assert length(spans) == (want - want % unit if unit <= want < free else want)

    @rule(rank=RANKS, size=st.integers(0, 40))
    def take_next(self, rank, size):
        want = min(size, len(self.free))
        spans = self.pool.take_next(rank, size)
        self.granted(rank, spans)
        assert length(spans) == want

    @rule(weights=st.dictionaries(RANKS, st.floats(), max_size=4), unit=st.integers(1, 9))
    def reserve(self, weights, unit):
        self.pool.reserve(weights, unit=unit)
        if weights:
            assert sum(length(self.pool.reserved_spans(r)) for r in weights) <= len(self.free)

    @rule(target=rounds, rank=RANKS, part=st.floats(0, 1), next_round=st.booleans())
    def consume(self, rank, part, next_round):
        self.round += next_round
        size = int(part * len(self.held[rank]))
        self.pool.consume(rank, size, round=self.round)
        self.pending.setdefault(self.round, []).extend(self.held[rank][:size])
        del self.held[rank][:size]
        return self.round

    @rule(number=rounds)
    def commit(self, number):
        self.pool.commit(number)
        self.done += self.pending.pop(number, [])

    @rule(rank=RANKS)
    def give_back(self, rank):
        assert self.pool.give_back(rank) == len(self.held[rank])
        self.free.update(self.held[rank])
        self.held[rank] = []

    @rule(rank=RANKS)
    def die(self, rank):
        assert self.pool.forfeit(rank) == len(self.held[rank])
        assert self.pool.reserved_spans(rank) == ()
        self.free.update(self.held[rank])
        self.held[rank] = []

    @rule(rank=RANKS)
    def claim_too_much(self, rank):
        with pytest.raises(WeBroke, match="but holds"):
            self.pool.consume(rank, len(self.held[rank]) + 1, round=self.round)

    @invariant()
    def books_agree(self):
        pool = self.pool
        for rank, picks in self.held.items():
            assert positions(pool.held_spans(rank)) == picks
            assert pool.held(rank) == len(picks)
        assert pool.undealt == len(self.free)
        assert pool.pending == sum(map(len, self.pending.values()))
        assert pool.done == len(self.done) == len(set(self.done))
        assert positions(pool.done_spans()) == sorted(self.done)
        held = sum(map(len, self.held.values()))
        assert pool.done + pool.pending + held + pool.undealt == pool.total
        missing = pool.total - len(self.done)
        assert pool.coverage() == Coverage(pool.total, len(self.done), 0, missing, 0)

    def teardown(self):
        """Survivors can always bring the epoch to its end."""
        if not hasattr(self, "pool"):
            return
        for rank in (1, 2, 3):
            self.pool.forfeit(rank)
        self.pool.take(0, self.pool.undealt)
        self.pool.consume(0, self.pool.held(0), round=self.round + 1)
        for number in range(self.round + 2):
            self.pool.commit(number)
        assert self.pool.finished
        assert self.pool.coverage() == Coverage(self.pool.total, self.pool.total, 0, 0, 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_own_span_from_the_front_then_the_tail_of_the_largest():
    pool = ChunkPool(100)
    pool.reserve({0: 1.0, 1: 5.0, 2: 4.0}, unit=10)
    assert pool.take(0, 10) == ((0, 10),)
    assert pool.take(0, 10) == ((50, 60),)  # rank 1 has most left: its tail
    assert pool.take(1, 10) == ((10, 20),)
    assert pool.take(0, 10) == ((90, 100),)  # rank 2 now
    assert pool.held_spans(0) == ((0, 10), (50, 60), (90, 100))


def test_what_a_dead_rank_held_is_dealt_first():
    pool = ChunkPool(100)
    pool.reserve({0: 1, 1: 1}, unit=10)
    pool.take(0, 30)
    pool.consume(0, 10, round=1)
    assert pool.forfeit(0) == 20
    assert pool.take(1, 30) == ((10, 30), (50, 60))
    pool.commit(1)
    assert pool.done == 10  # its arrival stands


def test_a_steal_goes_on_to_the_next_victim():
    pool = ChunkPool(30)
    pool.reserve({0: 0, 1: 1, 2: 1}, unit=1)
    assert length(pool.take(0, 30)) == 30
    assert pool.undealt == 0
    assert pool.take(0, 1) == ()


def test_unused_picks_return_to_the_front():
    pool = ChunkPool(20)
    pool.reserve({0: 1, 1: 1}, unit=1)
    pool.take(0, 8)
    pool.consume(0, 3, round=1)
    assert pool.give_back(0) == 5
    assert pool.take(0, 7) == ((3, 10),)


def test_reserving_shares_by_weight_in_whole_units():
    pool = ChunkPool(1030)
    pool.reserve({2: 1.0, 0: 4.0, 1: 2.0, 3: 0.0}, unit=100)
    shares = [length(pool.reserved_spans(rank)) for rank in range(4)]
    assert shares == [600, 300, 130, 0]  # 5.7, 2.9 and 1.4 units; the last one has the crumb
    pool.reserve({}, unit=100)
    assert [length(pool.reserved_spans(rank)) for rank in range(4)] == shares


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_say_nothing_share_equally(weight):
    pool = ChunkPool(30)
    pool.reserve({0: weight, 1: weight, 2: weight}, unit=1)
    assert [length(pool.reserved_spans(rank)) for rank in range(3)] == [10, 10, 10]


def test_less_than_a_unit_goes_to_the_last():
    pool = ChunkPool(5)
    pool.reserve({0: 1, 1: 1}, unit=10)
    assert pool.reserved_spans(1) == ((0, 5),)


def test_huge_weights_do_not_overflow():
    pool = ChunkPool(30)
    pool.reserve({0: 1e308, 1: 1e308, 2: 1e308}, unit=1)
    assert length(pool.reserved_spans(1)) == 10


def test_dealing_in_turn_ignores_who_reserved():
    pool = ChunkPool(12)
    pool.reserve({0: 1, 1: 1}, unit=1)
    dealt = [pool.take_next(rank, 2) for rank in (1, 0, 1, 0, 1, 0)]
    assert dealt == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),), ((8, 10),), ((10, 12),)]


def test_dealing_in_turn_takes_the_lowest_even_out_of_order():
    pool = ChunkPool(9)
    pool.reserve({0: 1, 1: 1, 2: 1}, unit=1)
    pool.take(0, 6)  # 0..3 and stolen 5, 8 or the like
    pool.give_back(0)
    assert positions([s for _ in range(9) for s in pool.take_next(1, 1)]) == list(range(9))


def test_a_billion_picks_cost_nothing():
    pool = ChunkPool(10**9)
    pool.reserve({0: 4, 1: 2, 2: 1}, unit=64)
    for number in range(200):
        for rank, size in ((0, 4000), (1, 2000), (2, 1000)):
            pool.take(rank, 64 * size, unit=64)
            pool.consume(rank, pool.held(rank) // 2, round=number)
            pool.give_back(rank)
        pool.commit(number)
    assert pool.done + pool.undealt == 10**9
    assert len(pool.done_spans()) <= 3


def test_a_resumed_epoch_goes_on_and_finds_duplicates():
    pool = ChunkPool.resumed(100, [(0, 20), (50, 60)], dropped=3)
    assert pool.undealt == 70
    assert positions(pool.take(0, 100)) == [*range(20, 50), *range(60, 100)]
    pool.consume(0, 70, round=7)
    pool.commit(7)
    assert pool.coverage() == Coverage(100, 100, 0, 0, 3)
    assert ChunkPool.resumed(100, [(0, 20), (10, 30)]).coverage() == Coverage(100, 20, 10, 70, 0)


def test_a_resumed_epoch_must_fit():
    with pytest.raises(WeBroke, match="epoch of 10 picks"):
        ChunkPool.resumed(10, [(5, 11)])


def test_an_empty_epoch_is_finished():
    assert ChunkPool(0).finished
