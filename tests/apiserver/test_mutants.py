"""Whatever is in a manifest: the API server refuses it, or its children are made, or its status says what is wrong."""

from __future__ import annotations

from collections import Counter

from judging import End, Judge, unnamed
from mutants import FEEDERS, HEAD, TRAINERS, Mutant, changed, mutants
from odd_values import deep
from operated import client_of

from apiserver import ApiServer

COUNT = 500
EXACT = 0.94
"""Share of messages that name the very field that was changed, or one within it; 0.96 was measured."""

PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
"""The manifest that is mutated names one."""


def test_each_of_500_mutations_is_refused_made_or_reported_by_field(server: ApiServer) -> None:
    server.request("POST", PRIORITIES, {"metadata": {"name": "high"}, "value": 1000})
    runner, client = client_of(server)
    found = runner.run(Judge(client, "mutants").judge(mutants(COUNT)))
    faults = [str(judged) for judged in found if judged.fault]
    assert not faults, "\n".join([f"{len(faults)} of {COUNT}:", *faults])
    ends = Counter(judged.end for judged in found)
    assert min(ends[end] for end in (End.REFUSED, End.MADE, End.TOLD)) > COUNT // 10, ends
    said = [judged.exact for judged in found if judged.end in (End.REFUSED, End.TOLD)]
    assert sum(said) >= EXACT * len(said), f"{sum(said)} of {len(said)}"


def test_message_naming_a_sibling_field_counts_as_a_fault() -> None:
    image = Mutant(path=(*FEEDERS, "spec", "containers", 0, "image"), what="", manifest={})
    assert unnamed(image, "spec.feeders.replicas: found -1") != ""
    assert unnamed(image, "spec.feeders.template.spec.volumes[0].name: Not found") == ""
    assert (
        unnamed(image, 'spec.feeders: Invalid value: "object": template.spec.containers[].image: found a')
        == ""
    )


def test_value_nested_too_deeply_is_reported_by_field(server: ApiServer) -> None:
    places = [(*template, "spec", "affinity") for template in (TRAINERS, FEEDERS, HEAD)]
    found = [Mutant(path=path, what="300 levels", manifest=changed(path, deep(300))) for path in places]
    runner, client = client_of(server)
    for judged in runner.run(Judge(client, "deep").judge(found)):
        assert (judged.end, judged.fault) == (End.TOLD, ""), judged
        assert "found more than 200 levels; use fewer" in judged.said
