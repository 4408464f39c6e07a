"""What watches tell, in whatever order it comes."""

from typing import Any

from kimi_operator.cache import Cache, Key
from kimi_operator.observed import Manifest, ObjectKey

KEY = Key("llm", "nano")


def child(version: int, uid: str = "u1", name: str = "front", **spec: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": uid,
            "resourceVersion": str(version),
            "labels": {"kimistack.dev/deployment": "nano"},
        },
        "spec": spec,
    }


AT = ObjectKey.of(child(1))


def test_an_event_names_the_deployment_it_concerns():
    assert Cache().saw("ADDED", child(1)) == KEY


def test_what_belongs_to_nobody_is_not_kept():
    stranger = child(1)
    stranger["metadata"]["labels"] = {}
    assert Cache().saw("ADDED", stranger) is None


def test_the_answer_to_a_write_is_not_undone_by_an_older_event():
    cache = Cache()
    cache.saw("MODIFIED", child(7, port=2))
    cache.saw("MODIFIED", child(6, port=1))
    assert cache.children(KEY)[AT]["spec"] == {"port": 2}


def test_an_answer_that_comes_after_the_word_of_the_deletion_brings_nothing_back():
    cache = Cache()
    cache.saw("ADDED", child(6))
    cache.saw("DELETED", child(8))
    cache.saw("MODIFIED", child(7))
    assert cache.children(KEY) == {}


def test_the_deletion_of_a_namesake_removes_nothing():
    cache = Cache()
    cache.saw("ADDED", child(9, uid="u2"))
    cache.saw("DELETED", child(8, uid="u1"))
    assert cache.children(KEY)[AT]["metadata"]["uid"] == "u2"


def test_a_listing_tells_of_a_deletion_that_no_watch_told_of():
    cache = Cache()
    cache.saw("ADDED", child(1))
    cache.saw("ADDED", child(2, uid="u2", name="back"))
    known = cache.known("v1/Service", "llm")
    assert cache.replace("v1/Service", [child(1)], known) == {KEY}
    assert list(cache.children(KEY)) == [AT]


def test_a_listing_of_one_namespace_says_nothing_of_another():
    cache = Cache()
    cache.saw("ADDED", child(1))
    assert cache.known("v1/Service", "other") == {}
    assert cache.known("apps/v1/Deployment", "llm") == {}
    assert cache.known("v1/Service", None) == {AT: "u1"}
    assert AT in cache.children(KEY)


def test_a_listing_that_tells_nothing_new_wakes_nobody():
    cache = Cache()
    cache.saw("ADDED", child(1))
    known = cache.known("v1/Service", "llm")
    assert cache.replace("v1/Service", [child(1)], known) == set()


def test_a_listing_asked_for_before_a_creation_does_not_bury_what_was_created():
    cache = Cache()
    known = cache.known("v1/Service", "llm")
    cache.saw("MODIFIED", child(5))
    assert cache.replace("v1/Service", [], known) == set()
    assert AT in cache.children(KEY)


def test_a_listing_tells_of_deployments_that_no_watch_told_of():
    cache = Cache()
    metadata = {"name": "nano", "namespace": "llm", "uid": "d1", "resourceVersion": "3"}
    api_version = "kimistack.dev/v1alpha1"
    resource = {"apiVersion": api_version, "kind": "KimiDeployment", "metadata": metadata}
    kind = f"{api_version}/KimiDeployment"
    assert cache.replace(kind, [resource], {}) == {KEY}
    assert cache.replace(kind, [], cache.known(kind, None)) == {KEY}
    assert cache.deployments() == ()


def test_a_condemned_child_is_being_deleted_until_the_watch_says_more():
    cache = Cache()
    cache.saw("ADDED", child(1))
    cache.condemn(KEY, AT, "u1", "2030-01-01T00:00:00Z")
    assert "deletionTimestamp" in cache.children(KEY)[AT]["metadata"]
    cache.condemn(KEY, AT, "u2", "2030-01-01T00:00:00Z")
    cache.saw("MODIFIED", child(2))
    assert "deletionTimestamp" not in cache.children(KEY)[AT]["metadata"]


def pod(version: int, owner: str, name: str, node: str | None, phase: str = "Running") -> Manifest:
    made = child(version, uid=f"uid-{name}", name=name, nodeName=node)
    made["kind"] = "Pod"
    made["metadata"]["labels"] = {"kimistack.dev/deployment": owner}
    half = {"resources": {"limits": {"amd.com/gpu": "4"}, "requests": {"memory": "1Gi"}}}
    made["spec"]["containers"] = [half, half]
    made["status"] = {"phase": phase}
    return made


def test_what_pods_of_other_deployments_request_is_known_by_node():
    cache = Cache()
    for made in (
        pod(1, "nano", "mine", "a"),
        pod(2, "other", "one", "a"),
        pod(3, "other", "two", "a"),
        pod(4, "other", "waiting", None),
        pod(5, "other", "ended", "a", "Failed"),
        pod(6, "third", "far", "b"),
    ):
        cache.saw("ADDED", made)
    two = {"amd.com/gpu": 8.0, "memory": 2 * 2.0**30}
    assert cache.taken(KEY) == {
        "a": {"llm/other": {name: 2 * amount for name, amount in two.items()}},
        "b": {"llm/third": two},
    }
    cache.saw("MODIFIED", pod(7, "other", "one", "a", "Succeeded"))
    cache.saw("DELETED", pod(8, "other", "two", "a"))
    assert cache.taken(KEY) == {"b": {"llm/third": two}}


def test_every_change_of_children_and_no_repeated_word_changes_the_number():
    cache, numbers = Cache(), []
    for change, made in (
        ("ADDED", child(1)),
        ("MODIFIED", child(2, port=1)),
        ("ADDED", child(3, uid="u2", name="back")),
        ("DELETED", child(4)),
        ("DELETED", child(5, uid="u2", name="back")),
        ("ADDED", child(6, uid="u3")),
    ):
        cache.saw(change, made)
        numbers.append(cache.changes(KEY))
        cache.saw(change, made)
        assert cache.changes(KEY) == numbers[-1]
    assert len(set(numbers)) == len(numbers)
    cache.condemn(KEY, AT, "u3", "2026-01-01T00:00:00Z")
    assert cache.changes(KEY) not in numbers
