"""The Kubernetes examples fit the schemas of what they make, and start what there is.

Pods, services and network policies are held against Kubernetes' own schema (package
kubernetes-validate), strictly: an unknown field is an error. No package brings the schema of
LeaderWorkerSet; `LWS_FIELDS` has the fields and values that its published definition (v1) allows of
those that are used here. No cluster has taken these files.
"""

import importlib
import shlex
from typing import Any

import pytest

pytest.importorskip("fastapi")

from scope_rt.topology import Topology, plan_named
from scope_runners.command_parser import CommandParser
from scope_runners.request import add_stream_arguments
from scope_runners.serve.group_control import END_S
from tests.deploy.files import documents, known_variables, served

FILES = ("kubernetes/leaderworkerset.yaml", "kubernetes/two-hosts.yaml")
KUBERNETES = "1.31"
NUMBER, POLICY = "a number", "RecreateGroupOnPodRestart None Default"
LWS_FIELDS: dict[str, Any] = {
    "replicas": NUMBER,
    "startupPolicy": "LeaderCreated LeaderReady",
    "rolloutStrategy": {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"maxUnavailable": NUMBER, "maxSurge": NUMBER},
    },
    "leaderWorkerTemplate": {
        "size": NUMBER,
        "restartPolicy": POLICY,
        "leaderTemplate": "a pod",
        "workerTemplate": "a pod",
    },
}


def errors_of(given: Any, allowed: Any, where: str = "spec") -> list[str]:
    """What does not fit, each with its place."""
    if allowed == "a pod":
        return [] if isinstance(given, dict) else [f"{where}: {given!r} is no pod"]
    if allowed == NUMBER:
        return [] if type(given) is int else [f"{where}: {given!r} is no number"]
    if isinstance(allowed, str):
        return [] if given in allowed.split() else [f"{where}: {given!r} is none of {allowed}"]
    found = [f"{where}.{name}: unknown" for name in given if name not in allowed]
    for name, value in given.items():
        if name in allowed:
            found += errors_of(value, allowed[name], f"{where}.{name}")
    return found


def sets(name: str) -> list[dict[str, Any]]:
    return [each for each in documents(name) if each["kind"] == "LeaderWorkerSet"]


def pod_of(leader_worker_set: dict[str, Any]) -> dict[str, Any]:
    template = leader_worker_set["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    metadata = {**template["metadata"], "name": "pod"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def container_of(name: str) -> dict[str, Any]:
    (leader_worker_set,) = sets(name)
    (container,) = pod_of(leader_worker_set)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def validate(document: dict[str, Any]) -> None:
    pytest.importorskip("kubernetes_validate", reason="it brings the schemas of Kubernetes")
    importlib.import_module("kubernetes_validate").validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_every_object_fits_its_schema(name: str) -> None:
    for document in documents(name):
        if document["kind"] != "LeaderWorkerSet":
            validate(document)
            continue
        assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert errors_of(document["spec"], LWS_FIELDS) == []
        validate(pod_of(document))


def test_an_unknown_field_fits_no_schema() -> None:
    (leader_worker_set,) = sets(FILES[0])
    pod = pod_of(leader_worker_set)
    pod["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(Exception, match="readynessProbe"):
        validate(pod)
    leader_worker_set["spec"]["leaderWorkerTemplate"] |= {"restartPolicy": "Never", "sizes": 2}
    assert errors_of(leader_worker_set["spec"], LWS_FIELDS) == [
        "spec.leaderWorkerTemplate.sizes: unknown",
        f"spec.leaderWorkerTemplate.restartPolicy: 'Never' is none of {POLICY}",
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_variable_is_one_that_is_read(name: str) -> None:
    given = {each["name"] for each in container_of(name)["env"]}
    assert {each for each in given if each.startswith("SCOPE_")} <= known_variables()


def test_a_served_group_is_one_pod_that_is_given_time_to_end() -> None:
    (leader_worker_set,) = sets(FILES[0])
    assert leader_worker_set["spec"]["leaderWorkerTemplate"]["size"] == 1
    assert pod_of(leader_worker_set)["spec"]["terminationGracePeriodSeconds"] > END_S
    container = container_of(FILES[0])
    served(container["args"])
    probes = {
        name: probe["httpGet"]["path"] for name, probe in container.items() if "Probe" in name
    }
    assert probes == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }


def test_the_service_finds_the_pods() -> None:
    (service,) = (each for each in documents(FILES[0]) if each["kind"] == "Service")
    (leader_worker_set,) = sets(FILES[0])
    assert service["spec"]["selector"] == pod_of(leader_worker_set)["metadata"]["labels"]
    named = {port["name"] for port in container_of(FILES[0])["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


def test_two_hosts_start_as_many_ranks_as_their_plan_has() -> None:
    from torch.distributed.run import get_args_parser

    (script,) = container_of(FILES[1])["args"]
    command = script.replace("$LWS_GROUP_SIZE", "2").rpartition("exec torchrun ")[2]
    asked = get_args_parser().parse_args(shlex.split(command))
    assert asked.training_script == "scope_runners.stream"
    parser = CommandParser()
    add_stream_arguments(parser)
    stream = parser.parse_args(asked.training_script_args)
    topology = Topology.of(plan_named(stream.plan), int(stream.tp))
    (leader_worker_set,) = sets(FILES[1])
    size = leader_worker_set["spec"]["leaderWorkerTemplate"]["size"]
    assert int(asked.nnodes) == size
    assert size * int(asked.nproc_per_node) == topology.world_size
