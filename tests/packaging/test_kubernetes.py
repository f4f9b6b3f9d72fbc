"""`--target kubernetes` against a server that keeps objects as Kubernetes does, on loopback.

It has no controllers: a test says what a Deployment's status becomes, and which pods there are.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading

import kmock
import pytest

from servekit.cli.project import Template, create
from servekit.errors import ConfigError, SetupError
from servekit.packaging.kubernetes.api import Cluster, Ref
from servekit.packaging.kubernetes.deployment import Deployment
from servekit.packaging.kubernetes.record import Record, Revision

COMMAND = (sys.executable, "-m", "servekit")
PLURALS = {
    "v1": ("services", "configmaps", "persistentvolumeclaims", "pods", "events"),
    "apps/v1": ("deployments",),
    "policy/v1": ("poddisruptionbudgets",),
    "networking.k8s.io/v1": ("networkpolicies",),
    "autoscaling/v2": ("horizontalpodautoscalers",),
}
DONE = {"replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}


class Emulator(kmock.KubernetesEmulator):
    """Server-side apply, which makes what is not there, and a generation that counts changes."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.becomes = lambda found: DONE
        self.said = b""
        for version, plurals in PLURALS.items():
            for plural in plurals:
                self.resources[f"{version}/{plural}"] = {"namespaced": True}

    async def _handle(self, request):
        self.asked.append((request.method, request.url.path, dict(request.params)))
        if request.url.path.endswith("/log"):
            from aiohttp.web import Response

            return Response(body=self.said)
        if request.method == "PATCH" and request.name:
            self._apply(request)
        return await super()._handle(request)

    async def _serve_list(self, request):
        listed = await super()._serve_list(request)
        wanted = request.params.get("labelSelector", "")
        labels = dict(pair.split("=") for pair in wanted.split(",") if pair)
        items = [
            one
            for one in listed["items"]
            if labels.items() <= one["metadata"].get("labels", {}).items()
        ]
        return {"kind": "List", "apiVersion": "v1", "items": items}

    def _apply(self, request):
        assert request.headers["Content-Type"] == "application/apply-patch+yaml"
        assert request.params["fieldManager"] == "servekit"
        if request.resource not in self._get_resources():
            raise kmock.KubernetesResourceNotFoundError
        key = request.resource, request.namespace, request.name
        wanted = request.data
        old = self._there(key)
        generation = 1
        if old is not None:
            same = {**old, "status": 0, "metadata": 0} == {**wanted, "status": 0, "metadata": 0}
            generation = old["metadata"]["generation"] + (not same)
        wanted["metadata"]["generation"] = generation
        if wanted["kind"] == "Deployment":
            wanted["status"] = {**self.becomes(wanted), "observedGeneration": generation}
        self.objects[key] = json.loads(json.dumps(wanted))

    def has(self, version, plural, name, namespace="default"):
        """Return an object, or None."""
        return self._there((kmock.resource(f"{version}/{plural}"), namespace, name))

    def _there(self, key):
        if key not in self.objects or self.objects[key].deleted:
            return None
        return self.objects[key].raw

    def put(self, version, plural, found):
        """Have an object be there."""
        metadata = found["metadata"]
        self.objects[
            f"{version}/{plural}", metadata.setdefault("namespace", "default"), metadata["name"]
        ] = found


@pytest.fixture
def emulator():
    """Serve from a thread of its own, as the client blocks."""
    ready, over = threading.Event(), None
    made = None

    async def serve():
        nonlocal over, made
        over = asyncio.Event()
        async with Emulator() as made, kmock.Server(made) as server:
            made.address = str(server.url).rstrip("/")
            made.loop = asyncio.get_running_loop()
            ready.set()
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield made
    made.loop.call_soon_threadsafe(over.set)
    thread.join(30)


@pytest.fixture
def cluster(emulator):
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.configuration import Configuration

    configuration = Configuration()
    configuration.host = emulator.address
    client = ApiClient(configuration)
    yield Cluster(client)
    with contextlib.suppress(AttributeError):
        client.rest_client.pool_manager.clear()


def revision(image="registry.example.com/wave:1", *, more=(), namespace="default"):
    """Return a Service and a Deployment, as small as can be, and more."""
    metadata = {
        "name": "wave",
        "namespace": namespace,
        "labels": {"app.kubernetes.io/name": "wave"},
    }
    labels = {"app.kubernetes.io/name": "wave", "servekit.io/revision": image[-1] * 8}
    pods = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": image}]}}
    return Revision(
        image=image,
        objects=[
            {"apiVersion": "v1", "kind": "Service", "metadata": dict(metadata), "spec": {}},
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": dict(metadata),
                "spec": {"replicas": 1, "template": pods},
            },
            *more,
        ],
    )


def extra(kind, version, name="wave-more"):
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": {}}


def image_of(emulator):
    found = emulator.has("apps/v1", "deployments", "wave")
    return found["spec"]["template"]["spec"]["containers"][0]["image"]


def pod(name, revision, **status):
    labels = {"app.kubernetes.io/name": "wave", "servekit.io/revision": revision}
    spec = {"containers": [{"name": "servekit", "image": "registry.example.com/wave:2"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": status,
    }


@pytest.fixture
def deployment(cluster):
    return Deployment(cluster, "default", "wave")


def test_a_deploy_makes_what_is_not_there_and_says_what(emulator, deployment):
    told = []
    wanted = revision(more=[extra("PodDisruptionBudget", "policy/v1")])
    plan = deployment.plan(wanted)
    assert [ref.kind for ref in plan.new] == ["Service", "Deployment", "PodDisruptionBudget"]
    deployment.carry_out(wanted, timeout_s=20, told=told.append)
    assert emulator.has("policy/v1", "poddisruptionbudgets", "wave-more")
    assert image_of(emulator) == "registry.example.com/wave:1"
    assert told[:2] == ["applying Service wave", "applying Deployment wave"]
    again = deployment.plan(wanted)
    assert (again.new, again.changed, again.gone) == ([], [], [])
    assert len(again.same) == 3


def test_what_a_new_revision_has_no_more_is_removed_but_no_data(emulator, deployment):
    old = revision(
        more=[
            extra("PodDisruptionBudget", "policy/v1"),
            extra("PersistentVolumeClaim", "v1", "wave-jobs"),
        ]
    )
    deployment.carry_out(old, timeout_s=20)
    new = revision("registry.example.com/wave:2")
    plan = deployment.plan(new)
    assert [ref.kind for ref in plan.changed] == ["Deployment"]
    assert [ref.kind for ref in plan.gone] == ["PodDisruptionBudget"]
    deployment.carry_out(new, timeout_s=20)
    assert emulator.has("policy/v1", "poddisruptionbudgets", "wave-more") is None
    assert emulator.has("v1", "persistentvolumeclaims", "wave-jobs")


def test_a_rollback_and_another_one_are_back_where_they_were(emulator, deployment):
    told = []
    with pytest.raises(ConfigError, match="nothing ran before"):
        deployment.rollback(timeout_s=20, told=told.append)
    first, second = revision(), revision("registry.example.com/wave:2")
    deployment.carry_out(first, timeout_s=20)
    deployment.carry_out(second, timeout_s=20)
    deployment.carry_out(second, timeout_s=20)  # the same again is no step
    assert deployment.rollback(timeout_s=20, told=told.append).image == first.image
    assert image_of(emulator) == first.image
    assert deployment.rollback(timeout_s=20, told=told.append).image == second.image
    assert image_of(emulator) == second.image


@pytest.mark.parametrize("first", [True, False])
def test_a_pod_that_does_not_start_is_shown_and_the_old_revision_is_back(
    emulator, deployment, first
):
    old = revision()
    if not first:
        deployment.carry_out(old, timeout_s=20)
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    container = {"name": "servekit", "state": {"waiting": waiting}, "restartCount": 2}
    emulator.put("v1", "pods", pod("wave-old", "1" * 8, containerStatuses=[container]))
    emulator.put("v1", "pods", pod("wave-new", "2" * 8, containerStatuses=[container]))
    event = {"metadata": {"name": "e"}, "reason": "BackOff", "message": "Back-off restarting"}
    emulator.put("v1", "events", event)
    emulator.said = b"loading\nValueError: no weights\n"
    emulator.becomes = lambda found: (
        DONE if str(found["spec"]).count("wave:1") else {**DONE, "availableReplicas": 0}
    )
    with pytest.raises(SetupError, match="Deployment wave: a pod does not start") as error:
        deployment.carry_out(revision("registry.example.com/wave:2"), timeout_s=60)
    assert "ValueError: no weights" in error.value.trace
    assert "BackOff: Back-off restarting" in error.value.trace
    assert "Pod wave-new, container servekit: CrashLoopBackOff: back-off 10s" in error.value.trace
    assert "wave-old" not in error.value.trace
    logs = [query for _, path, query in emulator.asked if path.endswith("/wave-new/log")]
    assert logs[0]["previous"] == "true"  # what it said before it ended, not nothing
    if first:
        assert (
            deployment.record().now.image == "registry.example.com/wave:2"
        )  # to look at, or delete
    else:
        assert image_of(emulator) == old.image
        assert deployment.record().now == old


def test_a_first_crash_is_waited_for_as_its_service_may_come_up_later(emulator, deployment):
    waiting = {"reason": "CrashLoopBackOff"}
    container = {"name": "servekit", "state": {"waiting": waiting}, "restartCount": 1}
    emulator.put("v1", "pods", pod("wave-new", "1" * 8, containerStatuses=[container]))
    states = iter([{**DONE, "availableReplicas": 0}])
    emulator.becomes = lambda _: next(states, DONE)
    told = []

    def heard(text):
        told.append(text)
        if text.startswith("waiting"):
            emulator.has("apps/v1", "deployments", "wave")["status"].update(DONE)

    deployment.carry_out(revision(), timeout_s=30, told=heard)
    assert told[-1] == "waiting for Deployment wave: 0 of 1 pods are new and ready"


def test_what_takes_too_long_or_will_not_be(emulator, deployment):
    emulator.becomes = lambda _: {**DONE, "availableReplicas": 0}
    with pytest.raises(SetupError, match=r"is not ready after 0.1 s: 0 of 1 pods"):
        deployment.carry_out(revision(), timeout_s=0.1)
    late = {"type": "Progressing", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
    emulator.becomes = lambda _: {**DONE, "availableReplicas": 0, "conditions": [late]}
    with pytest.raises(SetupError, match="Deployment wave: timed out"):
        deployment.carry_out(revision("registry.example.com/wave:2"), timeout_s=60)


def test_what_the_cluster_refuses_or_does_not_know(emulator, deployment, cluster):
    with pytest.raises(ConfigError, match=r"knows no ScaledObject .*; install KEDA there"):
        deployment.carry_out(
            revision(more=[extra("ScaledObject", "keda.sh/v1alpha1")]), timeout_s=20
        )
    (
        emulator["patch /api/v1/namespaces/default/services/wave"]
        << 422
        << {
            "kind": "Status",
            "message": "spec.ports: Required value",
        }
    )
    with pytest.raises(ConfigError, match="Service wave: the cluster refuses it: spec.ports: Req"):
        deployment.carry_out(revision(), timeout_s=20)


def test_a_cluster_that_is_not_there_is_said_so_soon():
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.configuration import Configuration

    configuration = Configuration()
    configuration.host = "http://127.0.0.1:9"
    configuration.retries = 0
    with pytest.raises(SetupError, match="the cluster can't be reached"):
        Deployment(Cluster(ApiClient(configuration)), "default", "wave").record()


def test_a_deletion_keeps_data_and_others_apps(emulator, deployment, cluster):
    deployment.carry_out(
        revision(more=[extra("PersistentVolumeClaim", "v1", "wave-jobs")]), timeout_s=20
    )
    emulator.put("v1", "services", extra("Service", "v1", "other"))
    kept = deployment.delete()
    assert kept == [Ref("v1", "PersistentVolumeClaim", "default", "wave-jobs")]
    assert emulator.has("apps/v1", "deployments", "wave") is None
    assert emulator.has("v1", "services", "other")
    assert deployment.record() is None
    assert Record.all(cluster, "default") == []
    assert deployment.delete() == []  # twice is fine


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def project(tmp_path_factory, cache):
    """A folder with a bundle."""
    folder = create("wave", Template.PIPELINE, tmp_path_factory.mktemp("project"))
    env = {**os.environ, "SERVEKIT_CACHE_DIR": str(cache)}
    build = (*COMMAND, "build", "app.py", "-o", "wave.bundle")
    subprocess.run(build, cwd=folder, env=env, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture
def servekit(project, cache, emulator, tmp_path):
    """Run a command line against the cluster of a kubeconfig."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": emulator.address}}],
        "users": [{"name": "me", "user": {}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    env = {"KUBECONFIG": str(file), "SERVEKIT_CACHE_DIR": str(cache)}

    def run(*words, code=0, **more):
        done = subprocess.run(
            [*COMMAND, *words],
            cwd=project,
            env={**os.environ, **env, **more},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run


TO = ("--target", "kubernetes")


def test_the_verbs_of_the_command(servekit, emulator, project, tmp_path):
    overlay = tmp_path / "overlay.toml"
    overlay.write_text("cpu = 0.5\n[autoscale]\nmax = 3\ncpu_percent = 50\n")
    deploy = ("deploy", "wave.bundle", *TO, "--app", "wave")
    image = ("--image", "registry.example.com/wave:1")

    yaml = servekit(*deploy, *image, "--dry-run", "--overlay", str(overlay), "-n", "models")
    assert "kind: HorizontalPodAutoscaler" in yaml
    assert "namespace: models" in yaml
    assert not emulator.asked  # a dry run asks nobody

    said = servekit(*deploy, *image, "--plan")
    assert "+  Deployment" in said
    assert emulator.has("apps/v1", "deployments", "wave") is None

    said = servekit(*deploy, *image)
    assert "wave is ready in default" in said
    servekit(*deploy, "--image", "registry.example.com/wave:2", "--overlay", str(overlay))
    assert emulator.has("autoscaling/v2", "horizontalpodautoscalers", "wave")
    revision = emulator.has("apps/v1", "deployments", "wave")["spec"]["template"]["metadata"]
    label = revision["labels"]["servekit.io/revision"]
    ready = [{"type": "Ready", "status": "True"}]
    emulator.put("v1", "pods", pod("wave-abc", label, phase="Running", conditions=ready))
    emulator.said = b"ready\n"
    assert "wave  wave-abc  ready  registry.example.com/wave:2" in servekit("status", *TO)
    assert "wave-abc  ready" in servekit("logs", *TO)
    follow = servekit("logs", *TO, "--follow", code=1)
    assert "kubectl logs --follow --prefix --namespace default" in follow
    assert "wave is back at registry.example.com/wave:1" in servekit("rollback", *TO)
    assert emulator.has("autoscaling/v2", "horizontalpodautoscalers", "wave") is None
    assert "there are: wave" in servekit("delete", *TO, "--app", "other", code=1)
    assert "wave has ended" in servekit("delete", *TO, "--app", "wave")
    assert "0 apps are in namespace default" in servekit("rollback", *TO, code=1)
    assert "no app of ours is in namespace default" in servekit("status", *TO)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say which image: --image REFERENCE"),
        (("--image", "a", "--push", "b"), "say which image"),
        (("--image", "a", "--port", "80"), r"--port is for --target ray and docker, not for kube"),
        (("--image", "a", "--replicas", "2"), "--replicas is for --target docker"),
    ],
)
def test_options_that_do_nothing_are_refused(servekit, words, message):
    assert message.replace("\\", "") in servekit("deploy", "app.py", *TO, *words, code=1)


def test_no_cluster_is_configured(servekit, tmp_path):
    said = servekit("status", *TO, code=1, KUBECONFIG=str(tmp_path / "none"), HOME=str(tmp_path))
    assert "no Kubernetes cluster is configured" in said
    assert len(said.splitlines()) == 1
