"""Whatever is in a manifest: the API server refuses it, or its children are made, or its status says what is wrong."""

from __future__ import annotations

from collections import Counter

from judging import End, Judge
from mutants import mutants
from operated import client_of

from apiserver import ApiServer

COUNT = 500


def test_of_500_mutations_each_is_refused_or_made_or_told_with_its_field(server: ApiServer) -> None:
    runner, client = client_of(server)
    found = runner.run(Judge(client, "mutants").judge(mutants(COUNT)))
    faults = [str(judged) for judged in found if judged.fault]
    assert not faults, "\n".join([f"{len(faults)} of {COUNT}:", *faults])
    ends = Counter(judged.end for judged in found)
    assert min(ends[end] for end in (End.REFUSED, End.MADE, End.TOLD)) > COUNT // 10, ends
