"""RBAC: the table's verbs and no more, and the escalation rule."""

from collections.abc import Iterable

import pytest
import yaml

from charts import CHART
from kimi_operator.desired.install import Install, install_objects
from kimi_operator.desired.rbac import (
    PolicyRule,
    all_rules,
    crd_rules,
    operator_rules,
    policy_rules,
)
from kimi_operator.kinds import INSTALLED, KINDS

Grants = set[tuple[str, str, str]]


def grants(rules: Iterable[PolicyRule]) -> Grants:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_rules_grant_exactly_what_the_table_says():
    wanted: Grants = set()
    for kind in KINDS:
        wanted |= {(kind.group, kind.plural, verb) for verb in kind.verbs}
        for name, verbs in kind.subresources:
            wanted |= {(kind.group, f"{kind.plural}/{name}", verb) for verb in verbs}
    rules = operator_rules()
    assert grants([*rules["namespaced"], *rules["nodes"]]) == wanted


def test_nothing_is_granted_by_a_wildcard():
    for rules in all_rules().values():
        for rule in rules:
            for field in ("apiGroups", "resources", "verbs"):
                assert "*" not in rule[field]


def test_secrets_are_created_and_never_read():
    assert {
        verb
        for _, resource, verb in grants(operator_rules()["namespaced"])
        if resource == "secrets"
    } == {"create"}


@pytest.mark.parametrize("kind", INSTALLED, ids=lambda kind: kind.kind)
def test_the_operator_may_not_touch_what_installs_it(kind):
    granted = {resource for _, resource, _ in grants(policy_rules(KINDS))}
    assert kind.plural not in granted


def test_the_crd_job_may_change_our_crds_only():
    for rule in crd_rules():
        if rule["verbs"] != ["create"]:
            assert rule["resourceNames"] == [
                "kimideployments.kimistack.dev",
                "kimiworkers.kimistack.dev",
            ]


def test_the_chart_reads_the_same_rules():
    assert yaml.safe_load((CHART / "files" / "rules.yaml").read_text()) == all_rules()


@pytest.mark.parametrize("scope", ["Namespace", "Cluster"])
def test_rights_end_at_the_scope(scope):
    objects = install_objects(Install(image="i", scope=scope, namespaces=()))
    wide = [o for o in objects if o["kind"] == "ClusterRole" and "aggregate" not in str(o)]
    resources = {resource for o in wide for _, resource, _ in grants(o["rules"])}
    if scope == "Namespace":
        assert resources == {"nodes"}
    else:
        assert "statefulsets" in resources


def test_an_operator_that_looks_elsewhere_still_holds_its_lease_at_home():
    objects = install_objects(Install(image="i", namespace="home", namespaces=("away",)))
    roles = {o["metadata"]["namespace"]: o for o in objects if o["kind"] == "Role"}
    assert set(roles) == {"home", "away"}
    assert {resource for _, resource, _ in grants(roles["home"]["rules"])} == {"events", "leases"}
