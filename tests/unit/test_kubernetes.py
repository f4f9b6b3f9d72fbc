"""Manifests: what the schemas of Kubernetes and of the operators say of them, and what no schema knows."""

import copy
import functools
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

import servekit as sk
from servekit.errors import ConfigError
from servekit.packaging.containerize import PORT
from servekit.packaging.kubernetes.api import Ref
from servekit.packaging.kubernetes.health import health, pod_state, stuck
from servekit.packaging.kubernetes.manifests import manifests
from servekit.packaging.kubernetes.order import Order
from servekit.packaging.kubernetes.overlay import Overlay
from servekit.packaging.yaml import to_yaml
from servekit.spec.describe import describe


@sk.service(cpu=1, memory="2GiB")
class Wave:
    @sk.endpoint
    def run(self, x: int) -> int:
        return x


@sk.service(gpu=0.5, replicas=2, placement=sk.Placement(labels={"zone": "a"}))
class Placed:
    @sk.endpoint
    def run(self, x: int) -> int:
        return x


@sk.service
class Report:
    @sk.task
    def make(self, x: int) -> int:
        return x


FULL = """
models = {size = "50GiB", access = "ReadWriteMany", storage_class = "fast"}
node_selector = {gpu = "a100"}
tolerations = [{key = "gpu", effect = "NoSchedule"}, {key = "team", value = "x"}]
labels = {team = "x"}
annotations = {note = "b"}
service_account = "wave"
pull_secrets = ["registry"]
settings = {gateway_workers = 2, tls_cert = "/etc/tls/tls.crt", tls_key = "/etc/tls/tls.key", drain_s = 60}
secrets = {HF_TOKEN = {secret = "hf", key = "token"}}
allow_from = {app = "x"}
allow_to = [{cidr = "10.0.0.0/8", port = 5432}, {cidr = "192.0.2.1/32"}]
[files]
"/etc/tls/tls.crt" = {secret = "tls", key = "tls.crt"}
"/etc/tls/tls.key" = {secret = "tls", key = "tls.key"}
"/etc/keys/keys.toml" = {secret = "keys", key = "k"}
[monitor]
labels = {release = "prometheus"}
credential = {secret = "keys", key = "metrics"}
"""
HPA = "[autoscale]\nmax = 4\ncpu_percent = 70\nin_flight = 2.5\n"
KEDA = """[autoscale]
by = "keda"
min = 0
max = 4
in_flight = 3
cpu_percent = 50
prometheus = "http://prometheus.monitoring:9090"
wake_query = "sum(rate(calls[1m]))"
"""
GATEWAY = """[traffic]
by = "gateway-api"
gateway = "infra/public"
hosts = ["wave.example.com"]
weights = {wave = 90, wave-2 = 10}
mirror = "wave-3"
mirror_percent = 5
"""
ISTIO = (
    '[traffic]\nby = "istio"\ngateway = "mesh"\nhosts = ["wave.example.com"]\nmirror = "wave-3"\n'
)
CANARY = 'kind = "rollout"\n[canary]\nprometheus = "http://prometheus:9090"\nmax_p99_s = 0.5\n'
RAY = """kind = "ray"
annotations = {note = "b"}
[ray]
token = {secret = "ray", key = "token"}
[[ray.groups]]
name = "door"
gateway = true
min = 2
[[ray.groups]]
name = "gpu"
gpu = 1
min = 0
max = 4
labels = {zone = "a"}
"""
CASES = {
    "plain": "",
    "full": FULL + HPA + GATEWAY,
    "keda": KEDA + ISTIO,
    "rollout": 'kind = "rollout"\n',
    "rollout with istio": CANARY + HPA + "[monitor]\n" + ISTIO,
    "rollout with the gateway api": CANARY + GATEWAY.replace("wave-2 = 10", "other = 10"),
    "kserve": 'kind = "kserve"\n[autoscale]\nmax = 3\ncpu_percent = 30\n',
    "kserve with knative": 'kind = "kserve"\nlabels = {a = "b"}\n[kserve]\nmode = "Knative"\n'
    "canary_percent = 10\n[autoscale]\nmin = 0\nmax = 3\nin_flight = 3\n",
    "kserve with a graph": 'kind = "kserve"\n[graph]\ntype = "Splitter"\nsteps = [{url = "http://a", '
    'weight = 30, name = "x"}, {url = "http://b", weight = 70}]\n',
    "ray": RAY,
}


app_of = functools.cache(describe)


def ordered(overlay: str = "", service=Wave, **more) -> Order:
    given = {
        "name": "wave",
        "image": "registry.example.com/wave:1",
        "target": "app.py",
        "version": "0123456789ab",
        "ray": "2.60.0",
        **more,
    }
    return Order(
        app=app_of(service), overlay=msgspec.convert(tomllib.loads(overlay), Overlay), **given
    )


def found(overlay: str = "", service=Wave, **more):
    """Return the manifests by kind, those of several of a kind by kind and name."""
    objects = manifests(ordered(overlay, service, **more))
    kinds = [one["kind"] for one in objects]
    return {
        one["kind"]
        if kinds.count(one["kind"]) == 1
        else (one["kind"], one["metadata"]["name"]): one
        for one in objects
    }


def only_pod(objects):
    return objects["Deployment"]["spec"]["template"]["spec"]


@functools.cache
def problems():
    """Return what checks custom resources, too, where that is on this machine; else core kinds alone."""
    import kubernetes_validate

    file = Path(__file__).parents[3] / "shared" / "k8s" / "validate.py"
    if file.is_file():
        spec = importlib.util.spec_from_file_location("validate", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.problems

    def core(one):
        if one["apiVersion"].partition("/")[0].count("."):
            pytest.skip("no schemas of custom resources on this machine")
        try:
            kubernetes_validate.validate(one, "1.33", strict=True)
        except Exception as error:
            return [str(error)]
        return []

    return core


EVERY = [
    pytest.param(one, id=f"{case}: {one['kind']}-{number}")
    for case, overlay in CASES.items()
    for number, one in enumerate(manifests(ordered(overlay)))
]


@pytest.mark.parametrize("one", EVERY)
def test_the_schemas_take_every_object(one):
    assert problems()(one) == []


@pytest.mark.parametrize("one", EVERY)
def test_the_schemas_refuse_what_is_not_quite_so(one):
    """Else the test above could not fail."""
    if one["apiVersion"] == "v1":
        other = copy.deepcopy(one)
        other["spec"]["nonsense"] = 1
        assert problems()(other)
    for path in _leaves(one["spec"]):
        other = copy.deepcopy(one)
        *parents, last = path
        place = functools.reduce(lambda node, step: node[step], parents, other["spec"])
        value = place[last]
        place[last] = [value] if not isinstance(value, list) else {"a": value}
        if problems()(other):
            return
    pytest.fail("no wrong type anywhere was refused")


def _leaves(node, path=()):
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for step, value in items:
        if isinstance(value, dict | list) and value:
            yield from _leaves(value, (*path, step))
        else:
            yield (*path, step)


@pytest.mark.parametrize("case", CASES)
def test_equal_orders_make_equal_yaml_which_is_what_they_are(case):
    yaml = pytest.importorskip("yaml")
    objects = manifests(ordered(CASES[case]))
    text = to_yaml(objects)
    assert "&id" not in text
    assert text == to_yaml(manifests(ordered(CASES[case])))
    assert list(yaml.safe_load_all(text)) == json.loads(json.dumps(objects))


@pytest.mark.parametrize("case", CASES)
def test_all_is_in_one_namespace_and_says_whose_it_is(case):
    for one in manifests(ordered('namespace = "models"\n' + CASES[case])):
        assert one["metadata"]["namespace"] == "models"
        assert one["metadata"]["labels"]["app.kubernetes.io/name"] == "wave"
        assert one["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "servekit"


def test_everything_finds_the_pods():
    objects = found(FULL)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        objects["Service"]["spec"]["selector"],
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    monitored = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= objects["Service"]["metadata"]["labels"].items()
    assert objects["ServiceMonitor"]["spec"]["endpoints"][0]["honorLabels"]


def test_new_code_makes_new_pods_and_the_same_does_not():
    def label(**more):
        template = found(**more)["Deployment"]["spec"]["template"]
        return template["metadata"]["labels"]["servekit.io/revision"]

    assert label() == label()
    assert label(image="registry.example.com/wave:2") != label()
    assert label(overlay="[settings]\ngateway_workers = 2") != label()


def test_a_pod_may_do_nothing_that_it_need_not():
    spec = only_pod(found())
    [container] = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/dev/shm"}


@pytest.mark.parametrize("settings", ["", "[settings]\ndrain_delay_s = 9\ndrain_s = 120"])
def test_callers_know_that_a_pod_leaves_before_it_does(settings):
    order = ordered(settings)
    spec = only_pod(found(settings))
    ready = spec["containers"][0]["readinessProbe"]
    unready_s = ready["periodSeconds"] * ready["failureThreshold"]
    assert unready_s < order.settings.drain_delay_s
    stop_s = spec["terminationGracePeriodSeconds"]
    assert stop_s > order.settings.drain_delay_s + order.settings.drain_s


def test_a_slow_start_is_waited_for():
    start = only_pod(found("[settings]\nstart_timeout_s = 1800"))["containers"][0]["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    deadline = found("[settings]\nstart_timeout_s = 1800")["Deployment"]["spec"]
    assert deadline["progressDeadlineSeconds"] > 1800


def test_what_services_declare_is_what_pods_ask_for():
    resources = only_pod(found())["containers"][0]["resources"]
    assert resources == {
        "requests": {"cpu": "1", "memory": "2304Mi"},  # and the gateway's
        "limits": {"memory": "2304Mi"},
    }
    spec = only_pod(found(service=Placed))
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert spec["nodeSelector"] == {"zone": "a"}
    more = 'gpus = 4\ngpu_resource = "amd.com/gpu"\ncpu = 8\nmemory = "1.5GiB"\n'
    spec = only_pod(found(more + 'node_selector = {disk = "ssd"}', service=Placed))
    assert spec["containers"][0]["resources"]["requests"] == {
        "cpu": "8",
        "memory": "1536Mi",
        "amd.com/gpu": "4",
    }
    assert spec["nodeSelector"] == {"zone": "a", "disk": "ssd"}


def test_a_pod_has_its_secrets_files_and_volumes_by_reference():
    spec = only_pod(found(FULL))
    [container] = spec["containers"]
    env = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert env == {
        "SERVEKIT_GATEWAY_WORKERS": "2",
        "SERVEKIT_TLS_CERT": "/etc/tls/tls.crt",
        "SERVEKIT_TLS_KEY": "/etc/tls/tls.key",
        "SERVEKIT_DRAIN_S": "60",
        "SERVEKIT_MODELS_DIR": "/models",
        "SERVEKIT_OFFLINE": "false",
        "HF_TOKEN": {"secretKeyRef": {"name": "hf", "key": "token"}},
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts) == {"/tmp", "/dev/shm", "/models", "/etc/keys", "/etc/tls"}
    assert set(mounts.values()) == set(volumes)
    sources = volumes[mounts["/etc/tls"]]["projected"]["sources"]
    assert [one["secret"]["items"][0]["path"] for one in sources] == ["tls.crt", "tls.key"]
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "wave-models"
    assert found(FULL)["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    [fetch] = spec["initContainers"]
    assert fetch["args"] == ["models", "pull", "app.py"]


def test_a_claim_that_is_there_is_not_made():
    objects = found('models = {claim = "shared"}')
    assert "PersistentVolumeClaim" not in objects
    volumes = {one["name"]: one for one in only_pod(objects)["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "shared"


def test_the_number_of_pods_has_one_owner():
    assert found()["Deployment"]["spec"]["replicas"] == 1
    assert "replicas" not in found(HPA)["Deployment"]["spec"]
    assert "replicas" not in found(CANARY + HPA)["Rollout"]["spec"]
    target = found(CANARY + HPA)["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["kind"] == "Rollout"


def test_keda_gets_text_and_wakes_by_a_query_of_its_own():
    objects = found(KEDA)
    assert "HorizontalPodAutoscaler" not in objects
    triggers = objects["ScaledObject"]["spec"]["triggers"]
    assert all(isinstance(v, str) for one in triggers for v in one["metadata"].values())
    queries = [one["metadata"].get("query", "") for one in triggers]
    assert any('service="Wave"' in query and 'job="wave"' in query for query in queries)
    assert "clamp_max(sum(rate(calls[1m])), 1)" in queries


def test_where_there_is_no_room_the_old_pod_goes_first():
    def strategy(overlay, service=Wave):
        return found(overlay, service)["Deployment"]["spec"]["strategy"]

    assert strategy("")["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert strategy("surge = 0")["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert strategy('jobs = {size = "1GiB"}', Report) == {"type": "Recreate"}


def test_a_policy_opens_one_port_and_dns():
    spec = found(FULL)["NetworkPolicy"]["spec"]
    assert spec["ingress"][0]["ports"] == [{"protocol": "TCP", "port": PORT}]
    assert spec["ingress"][0]["from"][0]["podSelector"] == {"matchLabels": {"app": "x"}}
    assert {53, 5432} == {p["port"] for rule in spec["egress"] for p in rule.get("ports", [])}
    assert found()["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]


def test_a_canary_is_judged_by_its_own_pods_metrics():
    objects = found(CANARY + "[monitor]\n" + ISTIO)
    steps = objects["Rollout"]["spec"]["strategy"]["canary"]["steps"]
    assert [step["setWeight"] for step in steps if "setWeight" in step] == [10, 50]
    [errors, p99] = objects["AnalysisTemplate"]["spec"]["metrics"]
    for metric in (errors, p99):
        query = metric["provider"]["prometheus"]["query"]
        assert 'rollouts_pod_template_hash="{{args.hash}}"' in query
    labels = objects["ServiceMonitor"]["spec"]["podTargetLabels"]
    assert labels == ["rollouts-pod-template-hash"]
    wanted = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
    services = [one for kind, one in objects.items() if kind[0] == "Service"]
    scraped = [one for one in services if wanted <= one["metadata"]["labels"].items()]
    assert [one["metadata"]["name"] for one in scraped] == ["wave-pods"]  # else pods count twice
    route = objects["VirtualService"]["spec"]["http"][0]["route"]
    assert [(one["destination"]["host"], one["weight"]) for one in route] == [
        ("wave", 100),
        ("wave-canary", 0),
    ]


def test_a_ray_cluster_has_gateways_where_its_service_looks():
    objects = found(RAY)
    spec = objects["RayCluster"]["spec"]
    door, gpu = spec["workerGroupSpecs"]
    selector = objects["Service"]["spec"]["selector"]
    assert door["labels"].items() <= selector.items()
    assert spec["rayVersion"] == "2.60.0"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert door["maxReplicas"] == door["minReplicas"] == 2
    assert gpu["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    [job] = objects["Job"]["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in job["env"]}
    cluster = objects["RayCluster"]["metadata"]["name"]
    assert env["SERVEKIT_RAY_ADDRESS"] == f"ray://{cluster}-head-svc:10001"
    assert selector["ray.io/cluster"] == cluster
    assert env["SERVEKIT_GATEWAY_NODES"] == "servekit.io/gateway=true"
    newer = found(RAY, image="registry.example.com/wave:2")
    for kind in ("Job", "RayCluster"):  # beside the old one, which serves until the new one does
        assert newer[kind]["metadata"]["name"] != objects[kind]["metadata"]["name"]
    assert newer["Service"]["metadata"]["name"] == objects["Service"]["metadata"]["name"]
    assert list(objects)[-1] == "Service"  # turned when the Job has deployed


@pytest.mark.parametrize(
    ("overlay", "service", "more", "message"),
    [
        ("", Report, {}, r"Report has tasks, and jobs end with the pod.*\[jobs\]"),
        (
            "replicas = 2\njobs = {size = '1GiB'}",
            Report,
            {},
            "Report has tasks, whose jobs are in one",
        ),
        ("", Wave, {"name": "Wave"}, "--app='Wave': need lower-case"),
        ("", Wave, {"name": "w" * 41}, "at most 40 characters"),
        ("[autoscale]\nmax = 3\ncpu_percent = 50", Placed, {}, "nobody says how many: cpu = 1.0"),
        (RAY, Wave, {"ray": ""}, r"the image has no Ray; add servekit\[ray\]"),
        ('kind = "kserve"\n[monitor]', Wave, {}, "monitor, allow_from and allow_to"),
        ('kind = "kserve"\n' + HPA, Wave, {}, 'in_flight needs .kserve. mode = "Knative"'),
        ('kind = "kserve"\n' + KEDA, Wave, {}, "KServe scales by itself"),
    ],
)
def test_what_an_app_can_not_be(overlay, service, more, message):
    with pytest.raises(ConfigError, match=message):
        found(overlay, service, **more)


def test_secrets_and_accelerators_that_nobody_can_guess_are_asked_for():
    @sk.service(image=sk.Image().secrets("HF_TOKEN"))
    class Private:
        @sk.endpoint
        def run(self, x: int) -> int:
            return x

    @sk.service(gpu=1, placement=sk.Placement(accelerator="A100"))
    class Fast:
        @sk.endpoint
        def run(self, x: int) -> int:
            return x

    with pytest.raises(ConfigError, match=r"is run with HF_TOKEN.*\[secrets\] HF_TOKEN = "):
        found(service=Private)
    assert found('secrets = {HF_TOKEN = {secret = "a", key = "b"}}', Private)
    with pytest.raises(ConfigError, match=r"Fast asks for accelerator='A100'.*\[node_selector\]"):
        found(service=Fast)
    assert found('node_selector = {"gpu.product" = "A100"}', Fast)


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ("replica = 1", "unknown field `replica`"),
        ('replicas = "1"', r"Expected `int`, got `str` - at `\$.replicas`"),
        ("replicas = 0", r"replicas=0: must be 1 or more; \[autoscale\] goes to zero"),
        ("surge = -1", "surge=-1"),
        ('namespace = "A"', "namespace='A': need lower-case letters"),
        ('memory = "much"', "memory: 'much' is no size"),
        ('shm = "much"', "shm: 'much' is no size"),
        ("models = {}", r"either claim=, one that is there, or size= - at `\$.models`"),
        ('models = {claim = "a", size = "1GiB"}', "either claim="),
        ('files = {"keys.toml" = {secret = "a", key = "b"}}', "'keys.toml' is no absolute path"),
        ("[settings]\nport = 8080", "settings: port is the image's own"),
        ("[settings]\ngatewayworkers = 2", "no setting 'SERVEKIT_GATEWAYWORKERS'"),
        ("[settings]\ngateway_workers = 0", "SERVEKIT_GATEWAY_WORKERS = '0'"),
        ("[autoscale]\nmax = 3", "say what is measured"),
        ("[autoscale]\nmax = 0\nmin = 2\ncpu_percent = 50", "min=2, max=0"),
        ("[autoscale]\nmax = 3\ncpu_percent = 0", "cpu_percent=0"),
        ("[autoscale]\nmax = 3\nin_flight = 0", "in_flight=0"),
        ("[autoscale]\nmax = 3\ncpu_percent = 50\nprometheus = 'http://p'", 'by = "keda"'),
        ("[autoscale]\nby = 'keda'\nmax = 3\nin_flight = 1", "prometheus is missing"),
        ("[autoscale]\nmin = 0\nmax = 3\ncpu_percent = 50", "no pod can tell"),
        ("[canary]", r'\[canary\] is for kind = "rollout"'),
        ("kind = 'rollout'\n[canary]\nweights = [50, 10]", "percents that rise"),
        ("kind = 'rollout'\n[canary]\nmax_error_rate = 2", "a share, from 0 to 1"),
        ("[traffic]\nby = 'istio'\ngateway = 'mesh'", "hosts is missing"),
        ("[traffic]\nby = 'gateway-api'\ngateway = 'g'\nweights = {a = 50}", "100 in all"),
        ("[traffic]\nby = 'gateway-api'\ngateway = 'g'\nweights = {a = 150, b = -50}", "0 or more"),
        ("[traffic]\nby = 'gateway-api'\ngateway = 'g'\nmirror_percent = 0", "from 1 to 100"),
        (
            "kind = 'kserve'\n[traffic]\nby = 'gateway-api'\ngateway = 'g'",
            "KServe makes the routes",
        ),
        ("kind = 'kserve'\n[kserve]\ncanary_percent = 10", 'is for mode = "Knative"'),
        ("[graph]\ntype = 'Sequence'\nsteps = [{url = 'http://a'}]", 'for kind = "kserve"'),
        ("kind = 'kserve'\n[graph]\ntype = 'Splitter'\nsteps = [{url = 'http://a'}]", "100 in all"),
        ("kind = 'kserve'\n[graph]\ntype = 'Sequence'\nsteps = []", "steps is empty"),
        ("kind = 'ray'", r"\[ray\] is missing"),
        ("[ray]\ntoken = {secret = 'a', key = 'b'}", 'is for kind = "ray"'),
        (
            "kind = 'ray'\n[ray]\ntoken = {secret = 'a', key = 'b'}\ngroups = []",
            "exactly one group",
        ),
        (RAY.replace("min = 2", "min = 2\nmax = 3"), "their number is fixed"),
        ("surge = 0\n" + RAY, "starts beside the old one"),
        (RAY + "[autoscale]\nmax = 3\ncpu_percent = 50", "sk.Autoscale scales"),
        ("kind = 1", "Expected `str`"),
        ("a b", "Expected '='"),
    ],
)
def test_an_overlay_says_where_it_is_wrong(overlay, message, tmp_path):
    file = tmp_path / "overlay.toml"
    file.write_text(overlay)
    with pytest.raises(ConfigError, match=message) as error:
        Overlay.read(file)
    assert str(error.value).startswith(f"{file}: ")


def test_an_overlay_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no.toml: No such file"):
        Overlay.read(tmp_path / "no.toml")


def status(kind, status, **spec):
    return {
        "kind": kind,
        "metadata": {"name": "a", "generation": 2},
        "spec": spec,
        "status": status,
    }


DONE = {"observedGeneration": 2, "replicas": 3, "updatedReplicas": 3, "availableReplicas": 3}
LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}


@pytest.mark.parametrize(
    ("one", "ready", "failed"),
    [
        (status("Service", {}), True, False),
        (status("Deployment", {}, replicas=3), False, False),
        (status("Deployment", DONE, replicas=3), True, False),
        (status("Deployment", {**DONE, "observedGeneration": 1}, replicas=3), False, False),
        (status("Deployment", {**DONE, "replicas": 4}, replicas=3), False, False),  # an old one
        (status("Deployment", {**DONE, "availableReplicas": 2}, replicas=3), False, False),
        (status("Deployment", {**DONE, "updatedReplicas": 2}, replicas=3), False, False),
        (status("Deployment", {"conditions": [LATE]}, replicas=3), False, True),
        (status("Rollout", {"observedGeneration": "2", "phase": "Healthy"}), True, False),
        (status("Rollout", {"observedGeneration": "1", "phase": "Healthy"}), False, False),
        (status("Rollout", {"phase": "Paused"}), True, False),
        (status("Rollout", {"phase": "Progressing"}), False, False),
        (status("Rollout", {"phase": "Degraded", "message": "too many errors"}), False, True),
        (status("InferenceService", {}), False, False),
        (status("InferenceService", {"conditions": [{"type": "Ready", "status": "True"}]}), True, False),
        (status("Job", {"conditions": [{"type": "Complete", "status": "True"}]}), True, False),
        (status("Job", {"conditions": [{"type": "Failed", "status": "True"}]}), False, True),
        (status("Job", {"active": 1}), False, False),
    ],
)  # fmt: skip
def test_when_an_object_is_ready_and_when_it_will_not_be(one, ready, failed):
    assert health(one)[:2] == (ready, failed)


def test_what_keeps_a_pod_from_starting():
    def pod(waiting, **more):
        containers = [{"name": "servekit", "state": {"waiting": waiting}, "restartCount": 3}]
        return {
            "metadata": {"name": "wave-1", **more},
            "status": {"phase": "Pending", "containerStatuses": containers},
        }

    image = stuck(pod({"reason": "ImagePullBackOff", "message": "no such image"}))
    assert image == ("wave-1", "servekit", "ImagePullBackOff: no such image", 3)
    assert stuck(pod({"reason": "CrashLoopBackOff"})).why == "CrashLoopBackOff"
    assert stuck(pod({"reason": "ContainerCreating"})) is None
    assert stuck({"metadata": {"name": "wave-1"}}) is None
    assert pod_state(pod({})) == "pending"
    assert pod_state(pod({}, deletionTimestamp="now")) == "leaving"
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
    assert pod_state({"metadata": {"name": "a"}, "status": ready}) == "ready"


def test_an_object_is_named_by_its_place():
    [service, *_] = manifests(ordered('namespace = "models"'))
    assert Ref.of(service) == ("v1", "Service", "models", "wave")


GUIDES = Path(__file__).parents[2] / "docs" / "guides"
OVERLAYS = [
    pytest.param(text, id=f"{guide}: {title}")
    for guide in ("kubernetes", "kserve", "kuberay")
    for title, text in re.findall(
        r"```toml title=\"(.+?)\"\n(.+?)```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL
    )
    if title != "pyproject.toml"
]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_overlays_of_the_guides_make_what_the_schemas_take(overlay):
    objects = manifests(ordered(overlay))
    assert [found for one in objects for found in problems()(one)] == []
