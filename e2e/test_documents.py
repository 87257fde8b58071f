"""The commands of README.md and docs/kubernetes/install.md are those that these tests run."""

from __future__ import annotations

from cluster import RELEASE, create_words, install_words, load_words
from readme import FIRST_JOB, UPGRADE, words


def test_cluster_and_chart_install_as_the_readme_describes():
    assert words(FIRST_JOB, "kind", "create") == create_words("dataloaderjob")
    assert words(FIRST_JOB, "kind", "load") == load_words("dataloaderjob")
    assert words(FIRST_JOB, "helm", "install") == install_words(RELEASE)
    ran_elsewhere = {("make", "images"), ("kubectl", "apply"), ("kubectl", "get")}
    others = {tuple(line[:2]) for line in FIRST_JOB} - {
        ("kind", "create"),
        ("kind", "load"),
        ("helm", "install"),
    }
    assert others == ran_elsewhere


def test_documented_upgrade_commands_are_exactly_the_tested_ones():
    assert [line[:2] for line in UPGRADE] == [["helm", "upgrade"], ["helm", "uninstall"]]
