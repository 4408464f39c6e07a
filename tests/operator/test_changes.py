"""Which children are applied and pruned, and why."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakekube import FakeKube
from kimi_operator.changes import (
    FIELD_MANAGER,
    Changes,
    applied_fields,
    changes,
    fingerprint,
    owns,
    stamped,
)
from kimi_operator.observed import Manifest, ObjectKey
from ssa import fields_of

OWNER = "uid-of-the-deployment"
REFERENCE = {
    "apiVersion": "kimistack.dev/v1alpha1",
    "kind": "KimiDeployment",
    "name": "nano",
    "uid": OWNER,
    "controller": True,
}


def service(name: str = "front", port: int = 80, **metadata: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "labels": {"app": "nano"},
            "ownerReferences": [REFERENCE],
            **metadata,
        },
        "spec": {"ports": [{"name": "http", "port": port, "targetPort": 8000}]},
    }


def applied(*manifests: Manifest) -> FakeKube:
    kube = FakeKube()
    for manifest in manifests:
        kube.server_side_apply(stamped(manifest), FIELD_MANAGER, force=True)
    return kube


def planned(kube: FakeKube, *wanted: Manifest, **options: Any) -> Changes:
    return changes(wanted, kube.objects, OWNER, **options)


def reasons(found: Changes) -> list[tuple[str, str]]:
    return [(apply.key.name, apply.reason) for apply in found.applies]


def test_what_is_missing_is_created():
    assert reasons(planned(FakeKube(), service())) == [("front", "create")]


def test_what_is_as_wanted_is_left_alone():
    found = planned(applied(service()), service())
    assert (found.applies, found.deletes) == ((), ())


def test_another_spec_is_a_change():
    assert reasons(planned(applied(service()), service(port=81))) == [("front", "change")]


def test_a_field_of_ours_that_somebody_changed_is_drift():
    kube = applied(service())
    kube.edit(ObjectKey.of(service()), {"metadata": {"labels": {"app": "other"}}})
    assert reasons(planned(kube, service())) == [("front", "drift")]


def test_a_field_of_ours_that_somebody_removed_is_drift():
    kube = applied(service())
    kube.edit(ObjectKey.of(service()), {"metadata": {"labels": {"app": None}}})
    assert reasons(planned(kube, service())) == [("front", "drift")]


def test_fields_of_others_are_left_alone():
    kube = applied(service())
    kube.edit(
        ObjectKey.of(service()),
        {"metadata": {"labels": {"team": "a"}}, "spec": {"clusterIP": "10.96.0.7"}},
    )
    assert planned(kube, service()).applies == ()


def test_an_object_whose_managed_fields_were_wiped_is_applied_again():
    kube = applied(service())
    kube.objects[ObjectKey.of(service())]["metadata"]["managedFields"] = []
    assert reasons(planned(kube, service())) == [("front", "drift")]


def test_a_server_that_keeps_less_than_was_applied_is_not_asked_for_ever():
    kube = applied(service())
    key = ObjectKey.of(service())
    for entry in kube.objects[key]["metadata"]["managedFields"]:
        del entry["fieldsV1"]["f:spec"]
    assert reasons(planned(kube, service())) == [("front", "drift")]
    settled = {key: fingerprint(kube.objects[key])}
    assert planned(kube, service(), settled=settled).applies == ()


def test_what_is_no_longer_wanted_is_pruned_by_its_uid():
    kube = applied(service(), service("old"))
    (delete,) = planned(kube, service()).deletes
    uid = kube.objects[ObjectKey.of(service("old"))]["metadata"]["uid"]
    assert (delete.key.name, delete.uid, delete.foreground) == ("old", uid, False)


def test_what_is_kept_is_neither_applied_nor_pruned():
    kube = applied(service(), service("old"))
    found = planned(kube, service(), kept=frozenset({ObjectKey.of(service("old"))}))
    assert (found.applies, found.deletes) == ((), ())


@pytest.mark.parametrize("references", [[], [{**REFERENCE, "uid": "somebody"}]])
def test_an_object_of_somebody_else_is_neither_taken_over_nor_pruned(references: list[Any]):
    theirs = service(ownerReferences=references)
    found = planned(applied(theirs), service())
    assert (found.applies, found.foreign) == ((), (ObjectKey.of(service()),))
    assert planned(applied(theirs)).deletes == ()


def test_an_object_being_deleted_is_waited_for():
    kube = applied(service(finalizers=["somebody/thing"]))
    kube.remove(ObjectKey.of(service()))
    found = planned(kube, service())
    assert (found.applies, found.ending) == ((), (ObjectKey.of(service()),))
    assert planned(kube).deletes == ()


def test_the_hash_does_not_depend_on_the_order_of_keys():
    manifest = service()
    turned = {name: manifest[name] for name in reversed(manifest)}
    assert stamped(manifest) == stamped(turned)


def test_ports_are_applied_with_their_protocol():
    (port,) = stamped(service())["spec"]["ports"]
    assert port["protocol"] == "TCP"


def test_empty_maps_do_not_count_as_owned_fields():
    pod = {"spec": {"volumes": [{"name": "scratch", "emptyDir": {}}]}}
    fields = {"f:spec": {"f:volumes": {'k:{"name":"scratch"}': {".": {}, "f:name": {}}}}}
    assert owns(fields, pod)


def test_an_element_of_a_list_that_we_lost_is_noticed():
    pod = {"spec": {"containers": [{"name": "engine", "image": "a"}, {"name": "b", "image": "c"}]}}
    fields = copy.deepcopy(fields_of(pod))
    del fields["f:spec"]["f:containers"]['k:{"name":"b"}']
    assert not owns(fields, pod)


_names = st.sampled_from(["a", "b", "image", "name"])
_values = st.recursive(
    st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from(["", "x", "y"])),
    lambda below: st.one_of(
        st.dictionaries(_names, below, min_size=1, max_size=3), st.lists(below, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(_names, _values, min_size=1, max_size=3))
def test_a_manager_owns_what_it_applied(spec: dict[str, Any]):
    manifest = {**service(), "kind": "ConfigMap", "spec": spec}
    kube = applied(manifest)
    (child,) = kube.objects.values()
    assert owns(child["metadata"]["managedFields"][0]["fieldsV1"], applied_fields(manifest))
    assert planned(kube, manifest).applies == ()
