"""The manifests of docker/k8s: against the schemas that Kubernetes publishes, of two of its versions (fetched by
scripts/fetch-kubernetes-schemas), and for what no schema knows: references that lead somewhere, quality of service, rights, sizes,
names of options. Exit status 77, with a line that says why: the schemas or what reads them cannot be had here."""

import copy
import glob
import json
import os
import re
import subprocess
import sys
import unittest

ROOT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../..")
BIN = os.environ.get("HCATTN_BIN", os.path.join(ROOT, "build/release/bin"))
SCHEMAS = os.path.join(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"), "hcattn/kubernetes-schemas")
VERSIONS = ("1.29", "1.37")
ROLES = {"coordinator", "gpu-worker", "value-store"}
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BESIDE_ROWS = 512 << 20  # a store's limit beyond its rows


def skip(reason):
    print(f"skipped: {reason}: scripts/install-dependencies --tests")
    sys.exit(77)


try:
    import jsonschema
    import yaml
except ImportError as missing:
    skip(f"no {missing.name}")


def bytes_of(text):
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", text).groups()
    return int(number) * UNITS[unit]


def read():
    """{(kind, name): manifest}"""
    manifests = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "docker/k8s/*.yaml"))):
        with open(path, encoding="utf-8") as file:
            for manifest in yaml.safe_load_all(file):
                manifests[manifest["kind"], manifest["metadata"]["name"]] = manifest
    return manifests


def validator(version, manifest):
    with open(os.path.join(SCHEMAS, f"{version}.json"), encoding="utf-8") as file:
        schemas = json.load(file)
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", manifest["apiVersion"])
    schema = {**schemas[f"{manifest['kind'].lower()}-{group}"], "$defs": schemas["$defs"]}
    return jsonschema.Draft202012Validator(schema)


class Manifests(unittest.TestCase):
    def setUp(self):
        self.manifests = read()
        self.unit = self.manifests["StatefulSet", "hcattn"]
        self.pod = self.unit["spec"]["template"]["spec"]
        self.containers = {container["name"]: container for container in self.pod["containers"]}
        self.stores = {name: container for name, container in self.containers.items() if name.startswith("value-store")}
        self.options = self.manifests["ConfigMap", "hcattn"]["data"]

    def environment(self, container):
        return {**self.options, **{entry["name"]: entry["value"] for entry in container.get("env", [])}}

    def test_schemas(self):
        self.assertEqual({kind for kind, _ in self.manifests}, {"ConfigMap", "Service", "PodDisruptionBudget", "StatefulSet"})
        for version in VERSIONS:
            for (kind, name), manifest in self.manifests.items():
                errors = [f"{error.json_path}: {error.message}"[:500] for error in validator(version, manifest).iter_errors(manifest)]
                self.assertEqual(errors, [], f"{kind} {name} in Kubernetes {version}")

    def test_schemas_refuse(self):
        """What is checked with would find a mistake."""
        def spoil(change):
            spoilt = copy.deepcopy(self.unit)
            change(spoilt["spec"]["template"]["spec"])
            return list(validator(VERSIONS[0], spoilt).iter_errors(spoilt))
        self.assertEqual(spoil(lambda pod: None), [])
        self.assertTrue(spoil(lambda pod: pod.update(terminationGracePeriod=660)))
        self.assertTrue(spoil(lambda pod: pod.update(terminationGracePeriodSeconds="long")))
        self.assertTrue(spoil(lambda pod: pod["containers"][0].pop("name")))
        self.assertTrue(spoil(lambda pod: pod["containers"][0]["readinessProbe"].update(command=["healthy"])))

    def test_references(self):
        labels = self.unit["spec"]["template"]["metadata"]["labels"]
        service = self.manifests["Service", self.unit["spec"]["serviceName"]]["spec"]
        for selector in (service["selector"], self.unit["spec"]["selector"]["matchLabels"],
                         self.manifests["PodDisruptionBudget", "hcattn"]["spec"]["selector"]["matchLabels"]):
            self.assertLessEqual(selector.items(), labels.items())
        self.assertEqual(service["clusterIP"], "None")
        ports = {port["name"]: port["containerPort"] for port in self.containers["coordinator"]["ports"]}
        self.assertEqual([ports[port["targetPort"]] for port in service["ports"]], [7070])
        self.assertTrue(self.options["HCATTN_CLIENT_ENDPOINT"].endswith(":7070"))
        volumes = {volume["name"] for volume in self.pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in self.unit["spec"]["volumeClaimTemplates"]}
        for container in [*self.containers.values(), *self.pod["initContainers"]]:
            self.assertLessEqual({mount["name"] for mount in container["volumeMounts"]}, volumes)
            for source in container["envFrom"]:
                self.assertIn(("ConfigMap", source["configMapRef"]["name"]), self.manifests)

    def test_guaranteed(self):
        """Class Guaranteed, and cpus that the static CPU manager gives whole."""
        for container in [*self.containers.values(), *self.pod["initContainers"]]:
            resources = container["resources"]
            self.assertEqual(resources["requests"], resources["limits"], container["name"])
            self.assertEqual(set(resources["limits"]), {"cpu", "memory"})
            self.assertRegex(resources["limits"]["cpu"], r"^[1-9]\d*$")

    def test_rights(self):
        self.assertTrue(self.pod["securityContext"]["runAsNonRoot"])
        self.assertNotIn("hostIPC", self.pod)
        self.assertNotIn("shareProcessNamespace", self.pod)
        with open(os.path.join(ROOT, "docker/Dockerfile"), encoding="utf-8") as file:
            dockerfile = file.read()
        uid = self.pod["securityContext"]["runAsUser"]
        self.assertIn(f"USER {uid}:{self.pod['securityContext']['runAsGroup']}\n", dockerfile)
        for name, container in self.containers.items():
            context = container["securityContext"]
            self.assertFalse(context["allowPrivilegeEscalation"])
            self.assertEqual(context["capabilities"]["drop"], ["ALL"])
            self.assertEqual(context["capabilities"].get("add"), None if name == "coordinator" else ["SYS_NICE"])
            for program in ("command", "args"):
                for word in container.get(program, [])[:1]:
                    self.assertTrue(word == "run" or f"docker/{word}" in dockerfile, word)
            self.assertIn("docker/" + container["readinessProbe"]["exec"]["command"][0], dockerfile)
            self.assertNotIn("livenessProbe", container)

    def test_stores(self):
        numbers = sorted(int(self.environment(store)["HCATTN_INDEX"]) for store in self.stores.values())
        self.assertEqual(numbers, list(range(int(self.options["HCATTN_STORES"]))))
        for name, store in self.stores.items():
            self.assertEqual(name, f"value-store-{self.environment(store)['HCATTN_INDEX']}")
            rows = bytes_of(self.environment(store)["HCATTN_MEMORY"])
            self.assertEqual(bytes_of(store["resources"]["limits"]["memory"]), rows + BESIDE_ROWS, name)
        self.assertEqual({re.sub(r"-\d+$", "", name) for name in self.containers}, ROLES)

    def test_stopping(self):
        for container in self.containers.values():
            command = container["lifecycle"]["preStop"]["exec"]["command"]
            self.assertEqual(command[:2], ["hcattn", "drain"])
            minutes = int(re.fullmatch(r"(\d+)m", command[command.index("--timeout") + 1])[1])
            self.assertGreaterEqual(self.pod["terminationGracePeriodSeconds"], 60 * minutes + 30)

    def test_options(self):
        """The programs know every variable: they refuse others."""
        command = [os.path.join(BIN, "hcattn"), "status", "--runtime-dir", "/nonexistent/hcattn", "--connect-timeout", "1ms"]
        names = {name for container in self.containers.values() for name in self.environment(container)}
        self.assertTrue(all(name.startswith("HCATTN_") for name in names))

        def said(names):
            return subprocess.run(command, env={name: "1" for name in names}, capture_output=True, text=True, check=False,
                                  timeout=30).stderr
        self.assertNotIn("unknown environment variable", said(names))
        self.assertIn("unknown environment variable", said({*names, "HCATTN_STORE"}))


if __name__ == "__main__":
    for schema_version in VERSIONS:
        if not os.path.exists(os.path.join(SCHEMAS, f"{schema_version}.json")):
            skip(f"no schemas of Kubernetes {schema_version}")
    unittest.main()
