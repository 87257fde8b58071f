"""The peer that gives way is the oldest of those from the busiest address."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.crowds import Crowds

ADDRESSES = st.lists(st.sampled_from("abc"), min_size=1, max_size=30)


@given(ADDRESSES, st.lists(st.integers(0, 29), max_size=20))
def test_the_busiest_addresss_oldest_peer_is_the_first_to_go(
    addresses: list[str], leaving: list[int]
) -> None:
    crowds, present = Crowds[int](), dict(enumerate(addresses))
    for peer, address in present.items():
        crowds.add(address, peer)
    for peer in leaving:
        if peer in present and len(present) > 1:
            crowds.remove(present.pop(peer), peer)
    assert sorted(crowds) == sorted(present)
    assert len(crowds) == len(present)
    first, sizes = crowds.first_to_go(), Counter(present.values())
    assert sizes[present[first]] == max(sizes.values())
    assert first == min(peer for peer, address in present.items() if address == present[first])
