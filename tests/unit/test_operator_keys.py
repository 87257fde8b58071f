"""Secrets of jobs, derived from the operator's root key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob_operator import names

ROOTS = st.binary(min_size=32, max_size=64)
UIDS = st.text(min_size=1, max_size=40)


@given(ROOTS, ROOTS, UIDS, UIDS)
def test_no_two_jobs_roots_or_uses_share_a_secret(root, other_root, uid, other_uid):
    keys = {names.job_key(root, uid), bytes.fromhex(names.ray_token(root, uid))}
    assert len(keys) == 2
    if (root, uid) != (other_root, other_uid):
        assert names.job_key(other_root, other_uid) not in keys
        assert bytes.fromhex(names.ray_token(other_root, other_uid)) not in keys


def test_short_root_key_and_job_without_uid_are_refused():
    with pytest.raises(ValueError, match="at least 32 bytes, but has 5"):
        names.job_key(b"short", "u")
    with pytest.raises(ValueError, match="not on a cluster"):
        names.ray_token(b"r" * 32, "")
