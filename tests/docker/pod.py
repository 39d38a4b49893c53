"""pod.py - the pod of docker/k8s, container by container in docker: the manifest's users, rights, variables, mounts, probes and
hooks, without what a cluster adds. Sizes are the test's: the manifest's are for servers.

Volumes are as a kubelet makes them for fsGroup 7301: owned by root and that group, open to it; secrets can be read by it.
"""

import os
import subprocess
import time

import yaml

from engine import Failed

GROUP = 7301
MEMORY = "128MiB"


class Pod:
    def __init__(self, engine, image, manifest, folder, port):
        """folder: an empty one, for its volumes. port: of the host, for the coordinator's."""
        with open(manifest, encoding="utf-8") as file:
            manifests = {each["kind"]: each for each in yaml.safe_load_all(file)}
        self.engine, self.image, self.folder, self.port = engine, image, folder, port
        self.options = manifests["ConfigMap"]["data"]
        self.spec = manifests["StatefulSet"]["spec"]["template"]["spec"]
        self.names = [container["name"] for container in self.spec["containers"]]
        for volume in ("sockets", "models", "keys"):
            path = os.path.join(folder, volume)
            os.mkdir(path)
            os.chown(path, 0, GROUP)
            os.chmod(path, 0o2777)

    def add_key(self, name, source):
        path = os.path.join(self.folder, "keys", name)
        with open(source, "rb") as file, open(path, "wb") as copy:
            copy.write(file.read())
        os.chown(path, 0, GROUP)
        os.chmod(path, 0o440)

    def start_container(self, container):
        user, context = self.spec["securityContext"], container["securityContext"]
        words = ["run", "--detach", "--name", f"pod-{container['name']}", "--user", f"{user['runAsUser']}:{user['runAsGroup']}",
                 "--security-opt", "no-new-privileges"]
        if self.spec["initContainers"][0] is container:
            words += ["--network", "none"]
        elif container["name"] == self.names[0]:  # its network is the pod's
            words += ["--publish", f"127.0.0.1:{self.port}:{container['ports'][0]['containerPort']}"]
        else:
            words += ["--network", f"container:pod-{self.names[0]}"]
        words += ["--read-only"] * context["readOnlyRootFilesystem"]
        words += [word for right in context["capabilities"]["drop"] for word in ("--cap-drop", right)]
        words += [word for right in context["capabilities"].get("add", []) for word in ("--cap-add", right)]
        variables = {**self.options, **{entry["name"]: entry["value"] for entry in container.get("env", [])}}
        if "HCATTN_MEMORY" in variables:
            variables["HCATTN_MEMORY"] = MEMORY
        words += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        for mount in container["volumeMounts"]:
            words += ["--volume", f"{self.folder}/{mount['name']}:{mount['mountPath']}" + ":ro" * mount.get("readOnly", False)]
        command = [*container.get("command", []), *container.get("args", [])]
        if "command" in container:
            words += ["--entrypoint", command.pop(0)]
        self.engine.docker(*words, self.image, *command)

    def start(self, model):
        """The first container waits for the model, which comes in as docs/operations.md says; then the others."""
        waits = self.spec["initContainers"][0]
        self.start_container(waits)
        with open(model, "rb") as file:
            self.engine.docker("exec", "--interactive", f"pod-{waits['name']}", "sh", "-c",
                               "cat >/models/part && mv /models/part /models/model.gguf", input=file.read())
        if (status := self.engine.docker("wait", f"pod-{waits['name']}", timeout=30)) != "0":
            raise Failed(f"{waits['name']}: status {status}")
        for container in self.spec["containers"]:
            self.start_container(container)

    def wait_ready(self, seconds=60):
        """All readiness probes pass."""
        deadline = time.monotonic() + seconds
        for container in self.spec["containers"]:
            probe = ["exec", f"pod-{container['name']}", *container["readinessProbe"]["exec"]["command"]]
            while True:
                try:
                    self.engine.docker(*probe)
                    break
                except Failed as error:
                    if time.monotonic() > deadline:
                        raise Failed(f"{error}\n" + "\n".join(self.log(name) for name in self.names)) from None
                time.sleep(0.2)

    def log(self, name):
        return self.engine.docker("logs", "--tail", "20", f"pod-{name}", stderr=subprocess.STDOUT)

    def delete(self):
        """As a kubelet: in all containers at once the hook, and then the signal. Returns what the hooks said."""
        hooks = [subprocess.Popen([self.engine.program, "exec", f"pod-{container['name']}",
                                   *container["lifecycle"]["preStop"]["exec"]["command"]], env=self.engine.environment,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for container in self.spec["containers"]]
        said = []
        for name, hook in zip(self.names, hooks):
            said.append(hook.communicate(timeout=120)[0].decode())
            self.engine.docker("stop", "--time", "30", f"pod-{name}")
        self.engine.docker("rm", *[f"pod-{name}" for name in self.names], f"pod-{self.spec['initContainers'][0]['name']}")
        return said
