"""What docker-compose makes of the files for GPUs: workers with a device each, all else as without."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import yaml
except ImportError:
    yaml = None

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.realpath(__file__)), "../.."))
SKIPPED = 77


def without(service, *names):
    return {name: value for name, value in service.items() if name not in names}


class Gpus(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = os.path.join(folder.name, "docker")
        shutil.copytree(os.path.join(ROOT, "docker"), self.tree,
                        ignore=shutil.ignore_patterns("compose.override.yaml", ".env", "k8s"))

    def config(self, *files, **variables):
        """The services, as docker-compose understands these files; without files those that it takes by itself."""
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("HC_", "HCATTN_", "DOCKER_", "COMPOSE_"))}
        done = subprocess.run(["docker-compose", *(word for file in files for word in ("-f", file)), "config"],
                              cwd=self.tree, env={**environment, **variables}, capture_output=True, text=True, check=False,
                              timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        services = yaml.safe_load(done.stdout)["services"]
        for service in services.values():
            service.get("volumes", []).sort()  # which docker-compose does not keep in order
        return services

    def assert_on(self, worker, device):
        (asked,) = worker["deploy"]["resources"]["reservations"]["devices"]
        self.assertEqual(asked, {"driver": "nvidia", "device_ids": [device], "capabilities": ["gpu", "compute", "utility"]})
        self.assertEqual(worker["environment"]["HCATTN_BACKEND"], "cuda")

    def test_one_gpu_over_the_service(self):
        plain = self.config("compose.yaml", HC_CUBLAS="off")
        services = self.config("compose.yaml", "compose.gpu.yaml", HC_GPU="GPU-8932f937", HC_CUBLAS="off")
        self.assert_on(services["gpu-worker"], "GPU-8932f937")
        self.assertEqual(services["coordinator"]["build"]["args"]["CUBLAS"], "off")
        self.assertEqual(plain["gpu-worker"]["environment"]["HCATTN_BACKEND"], "cpu")
        self.assertNotIn("deploy", plain["gpu-worker"])
        self.assertEqual(without(services["gpu-worker"], "deploy", "environment"), without(plain["gpu-worker"], "environment"))
        self.assertEqual(without(services["gpu-worker"]["environment"], "HCATTN_BACKEND"),
                         without(plain["gpu-worker"]["environment"], "HCATTN_BACKEND"))
        self.assertEqual((plain["coordinator"]["build"]["args"]["CUDA"], services["coordinator"]["build"]["args"]["CUDA"]),
                         ("off", "on"))
        self.assertEqual(without(services["coordinator"], "build"), without(plain["coordinator"], "build"))
        self.assertEqual(services["value-store"], plain["value-store"])

    def test_a_worker_for_each_gpu(self):
        subprocess.run([os.path.join(self.tree, "compose-for-this-host"), "--gpus", "3", "--memory", "64MiB"], check=True,
                       capture_output=True, timeout=30)
        services = self.config()
        self.assertEqual(services["gpu-worker"]["scale"], 0)
        for index in range(3):
            worker = services[f"gpu-worker-{index}"]
            self.assert_on(worker, str(index))
            self.assertEqual((worker["environment"]["HCATTN_INDEX"], worker["scale"]), (str(index), 1))
            self.assertEqual(without(worker, "deploy", "environment", "scale"),
                             without(services["gpu-worker"], "environment", "scale"))
        self.assertNotIn("gpu-worker-3", services)
        self.assertEqual(services["coordinator"]["environment"]["HCATTN_WORKERS"], "3")
        self.assertEqual(services["coordinator"]["build"]["args"]["CUDA"], "on")


if __name__ == "__main__":
    if yaml is None or not shutil.which("docker-compose"):
        print("skipped: no docker-compose or no yaml for python3: scripts/install-dependencies --tests")
        sys.exit(SKIPPED)
    unittest.main()
