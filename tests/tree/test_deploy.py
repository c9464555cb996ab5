"""The image and the deployment manifests: linted, valid against their schemas,
consistent with their config.
"""

import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from affected_tests import importers
from programs import assert_refused, exports_of, run_checked, run_quietly, write_program

PYTORCH = Path("benchmarks/bert/implementations/pytorch")
ASSETS = Path(__file__).parents[1] / "assets/deploy"
SYSTEMS = Path("benchmarks/bert/implementations")
MOSAIC = Path("benchmarks/mosaic_bert")
TASK = PYTORCH / "deploy/skypilot/train.yaml"
MOSAIC_TASK = MOSAIC / "yamls/cloud/skypilot.yaml"
VERBS = ["get", "list", "create", "delete"]  # of the API's resources
SKYPILOT = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
# Stand-ins record their names and arguments; the scripts, configs and launchers are the real ones.
STAND_IN = '#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@" >"${NOTES}"\nenv >"${NOTES}.env"\n'
# A stand-in that records its arguments, and writes the --output file or fails halfway through.
ENROOT = (
    '#!/bin/bash\nprintf "%s " "$@" >"${0%/*}/words"\nprintf content >"$3"\n[[ "$4" != *broken* '
    "]]\n"
)


@pytest.fixture(scope="module")
def job(tree_root: Path) -> dict[str, dict]:
    documents = yaml.safe_load_all((tree_root / PYTORCH / "deploy/kubernetes/job.yaml").read_text())
    return {document["kind"]: document for document in documents}


def skypilot_task(tree_root: Path, path: Path = TASK) -> dict:
    return yaml.safe_load((tree_root / path).read_text())


def errors(schema: dict, value: object) -> list[str]:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="jsonschema is not installed (extra: test)"
    )
    validator = jsonschema.validators.validator_for(schema)(schema)
    return [
        f"{'/'.join(map(str, error.path))}: {error.message}"
        for error in validator.iter_errors(value)
    ]


def start(
    script: list[object], folder: Path, tmp_path: Path, **environ: str
) -> tuple[list[str], dict[str, str]]:
    """Run bash with the stand-ins and return the recorded words and environment."""
    for name in ("python3", "mlbert", "srun"):
        write_program(tmp_path / "bin" / name, STAND_IN)
    environ |= {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "NOTES": str(tmp_path / "notes"),
        "HOME": str(tmp_path),
    }
    run_checked("bash", "-euo", "pipefail", *script, cwd=folder, env=environ)
    lines = (tmp_path / "notes.env").read_text().splitlines()
    return (tmp_path / "notes").read_text().splitlines(), dict(
        line.split("=", 1) for line in lines if "=" in line
    )


def test_kubernetes_objects_match_the_api_schema(job: dict[str, dict]) -> None:
    schema = json.loads((ASSETS / "kubernetes.json").read_text())
    for kind, group in {"Job": "batch", "Service": "core"}.items():
        schema["$ref"] = f"#/definitions/io.k8s.api.{group}.v1.{kind}"
        assert errors(schema, job[kind]) == []
        assert (
            len(errors(schema, job[kind] | {"spec": job[kind]["spec"] | {"completionz": 2}})) == 1
        )


def test_kubernetes_numbers_match_the_config(
    job: dict[str, dict], tree_root: Path, tmp_path: Path
) -> None:
    spec = job["Job"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    folder = tree_root / Path(container["workingDir"]).relative_to("/opt/mlbert")
    script = container["args"][0]
    config = exports_of(folder / re.findall(r"source_config (\S+)", script)[0])
    assert str(spec["completions"]) == str(spec["parallelism"]) == config["DGXNNODES"]
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == config["DGXNGPU"]
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(config["DATADIR_PHASE2"]).parent) in paths
    name = job["Job"]["metadata"]["name"]
    assert pod["subdomain"] == job["Service"]["metadata"]["name"]
    assert job["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    given = {item["name"]: item["value"] for item in container["env"]} | {
        "IMAGE": "mlbert@sha256:1"
    }
    assert int(given["SAVE_CHECKPOINT_STEPS"]) > 0, "without checkpoints, RESUME finds nothing"
    given |= {"RESUME": "1", "LR": "0.5"}
    words, environ = start(["-c", script], folder, tmp_path, JOB_COMPLETION_INDEX="3", **given)
    kept = {"RESUME", "LR", "SAVE_CHECKPOINT_STEPS", "CLEAR_CACHES"}
    assert {name: environ[name] for name in kept} == {name: given[name] for name in kept}
    assert environ["BATCHSIZE"] == config["BATCHSIZE"]
    expected = {
        f"--nnodes={config['DGXNNODES']}",
        f"--nproc-per-node={config['DGXNGPU']}",
        "--node-rank=3",
    }
    assert expected | {f"--master-addr={name}-0.{pod['subdomain']}"} <= set(words)
    assert Path(words[-1]).samefile(folder / "run_pretraining.py")
    assert environ["CONT"] == "mlbert@sha256:1"
    assert environ["LOGDIR"].startswith("/runs/")


def jobs_of(tree_root: Path) -> list[dict]:
    """Return the Jobs of the manifest and of the page about Kubernetes."""
    page = (tree_root / "docs/kubernetes.md").read_text()
    texts = [
        (tree_root / PYTORCH / "deploy/kubernetes/job.yaml").read_text(),
        *re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL),
    ]
    documents = [document for text in texts for document in yaml.safe_load_all(text)]
    return [document for document in documents if document["kind"] == "Job"]


def restricted(pod: dict) -> list[str]:
    """Return what Pod Security's level "restricted" refuses of a pod, by the rules of
    kubernetes.io/docs/concepts/security/pod-security-standards.
    """
    refused = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    context = pod.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        refused.append("runAsNonRoot")
    if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        refused.append("seccompProfile")
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            refused.append("allowPrivilegeEscalation")
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            refused.append("capabilities")
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"}
    allowed |= {"persistentVolumeClaim", "projected", "secret"}
    for volume in pod.get("volumes", []):
        refused += sorted(volume.keys() - {"name"} - allowed)
    return refused


def test_jobs_pass_the_restricted_level_and_limit_their_memory(tree_root: Path) -> None:
    schema = json.loads((ASSETS / "kubernetes.json").read_text())
    schema["$ref"] = "#/definitions/io.k8s.api.batch.v1.Job"
    jobs = jobs_of(tree_root)
    assert len(jobs) == 2
    for job in jobs:
        assert errors(schema, job) == []
        pod = job["spec"]["template"]["spec"]
        assert restricted(pod) == []
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 10001
        assert all("memory" in one["resources"]["limits"] for one in pod["containers"])
        assert restricted({**pod, "securityContext": {}}) == ["runAsNonRoot", "seccompProfile"]


class ApiServer(http.server.BaseHTTPRequestHandler):
    """Answers kubectl as a Kubernetes API with a Job of eight pods that failed. It has the objects
    that were created.
    """

    protocol_version = "HTTP/1.1"
    created: ClassVar[dict[str, dict]] = {}  # by address

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        pods = [
            {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"name": f"mlbert-{number}", "namespace": "default"},
                "spec": {"containers": [{"name": "rank-group"}]},
            }
            for number in range(8)
        ]
        job = {
            "kind": "Job",
            "apiVersion": "batch/v1",
            "metadata": {"name": "pack-1", "namespace": "default"},
            "status": {"conditions": [{"type": "FailureTarget"}, {"type": "Failed"}]},
        }
        resources = {
            "/api/v1": ("v1", [("pods", "Pod"), ("services", "Service")]),
            "/apis/batch/v1": ("batch/v1", [("jobs", "Job")]),
        }
        answers: dict[str, object] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {
                        "name": "batch",
                        "versions": [{"groupVersion": "batch/v1", "version": "v1"}],
                        "preferredVersion": {"groupVersion": "batch/v1", "version": "v1"},
                    }
                ],
            },
            "/api/v1/namespaces/default/pods": {
                "kind": "PodList",
                "apiVersion": "v1",
                "items": pods,
            },
            "/apis/batch/v1/namespaces/default/jobs/pack-1": job,
        }
        for address, (version, named) in resources.items():
            answers[address] = {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": version,
                "resources": [
                    {"name": name, "kind": kind, "namespaced": True, "verbs": VERBS}
                    for name, kind in named
                ],
            }
        for pod in pods:
            answers[f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}"] = pod
        if path.endswith("/log"):
            assert "follow=true" in query
            self.answer(f"step 1 of {path.split('/')[-2]}\n".encode(), "text/plain")
        elif path in answers:
            self.answer(json.dumps(answers[path]).encode(), "application/json")
        elif path in self.created:
            self.answer(json.dumps(self.created[path]).encode(), "application/json")
        else:
            self.refuse()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        made = json.loads(content)
        self.created[f"{self.path.partition('?')[0]}/{made['metadata']['name']}"] = made
        self.answer(content, "application/json", 201)

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.created.pop(self.path, None) is None:
            self.refuse()
        else:
            status = b'{"kind": "Status", "apiVersion": "v1", "status": "Success"}'
            self.answer(status, "application/json")

    def refuse(self) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        status |= {"reason": "NotFound", "code": 404}
        self.answer(json.dumps(status).encode(), "application/json", 404)

    def answer(self, content: bytes, kind: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def kubectl(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a server that stands in for the API, and return the environment for kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: apt-get install kubernetes-client, or Kubernetes'")
    ApiServer.created.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test"}}],
        "clusters": [
            {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    yield {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}
    server.shutdown()


def documented(tree_root: Path, words: str) -> str:
    """Return the line of the page about Kubernetes that contains these words."""
    page = (tree_root / "docs/kubernetes.md").read_text()
    lines = [
        line for line in page.splitlines() if words in line and not line.startswith(("`", "S"))
    ]
    assert len(lines) == 1
    return lines[0]


def test_the_documented_commands_follow_all_pods_and_see_a_failed_job(
    kubectl: dict[str, str], tree_root: Path
) -> None:
    follow = documented(tree_root, "kubectl logs")
    said = run_checked("bash", "-c", follow, env=kubectl).stdout
    assert {line.split()[-1] for line in said.splitlines()} == {f"mlbert-{i}" for i in range(8)}
    few = follow.replace("--max-log-requests=8", "")
    assert run_quietly("bash", "-c", few, env=kubectl).returncode != 0
    wait = documented(tree_root, "until kubectl get job")
    assert "Failed" in run_checked("bash", "-c", wait, env=kubectl, timeout=60).stdout


def test_the_documented_commands_start_a_job_start_it_again_and_delete_it(
    kubectl: dict[str, str], tree_root: Path, job: dict[str, dict]
) -> None:
    folder = tree_root / PYTORCH / "deploy/kubernetes"
    # The stand-in has no schema; another test checks the file against the API's.
    start_job = documented(tree_root, "kubectl replace") + " --validate=false"
    for _ in range(2):
        run_checked("bash", "-c", start_job, cwd=folder, env=kubectl)
        made = {one["kind"]: one["spec"] for one in ApiServer.created.values()}
        assert made == {kind: one["spec"] for kind, one in job.items()}
    run_checked("bash", "-c", documented(tree_root, "kubectl delete"), cwd=folder, env=kubectl)
    assert ApiServer.created == {}


def test_the_definition_file_installs_what_the_dockerfile_does(
    tree_root: Path, tmp_path: Path
) -> None:
    """Apptainer is not in Debian's packages, so its file is read here: sections, and the shell of
    one.
    """
    text = (tree_root / PYTORCH / "apptainer.def").read_text()
    head, *parts = re.split(r"^%(\w+)$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(sections) == {"arguments", "files", "post", "environment", "test"}
    lines = [line.strip() for line in sections["arguments"].splitlines() if line]
    defaults = dict(line.split("=", 1) for line in lines)
    assert set(re.findall(r"{{ (\w+) }}", text)) == set(defaults)
    assert "Bootstrap: docker\nFrom: {{ BASE_IMAGE }}\n" in head
    dockerfile = (tree_root / PYTORCH / "Dockerfile").read_text()
    assert f"/{defaults['BASE_IMAGE']}\n" in dockerfile
    assert f'"{defaults["CUDA_ARCHS"]}"' in dockerfile
    post = sections["post"]
    commands = re.findall(r"(?:apt-get install|python3 -m pip install) .*", post)
    assert len(commands) == 3
    for command in commands:
        assert command in dockerfile
    script = tmp_path / "post.sh"
    script.write_text(f"#!/bin/sh\n{post}")
    run_checked("shellcheck", script)


@pytest.mark.parametrize("path", [TASK, MOSAIC_TASK], ids=str)
def test_skypilot_task_matches_the_schema(path: Path, tree_root: Path) -> None:
    task = skypilot_task(tree_root, path)
    schemas = json.loads((ASSETS / "skypilot.json").read_text())
    assert errors(schemas["task"], task) == []
    assert errors(schemas["resources"], task["resources"]) == []
    for mount in task["file_mounts"].values():
        assert errors(schemas["storage"], mount) == []
    assert errors(schemas["task"], task | {"num_node": 2})


def test_skypilot_numbers_match_the_config(tree_root: Path, tmp_path: Path) -> None:
    task = skypilot_task(tree_root)
    folder = tree_root / SYSTEMS / task["envs"]["SYSTEM"]
    config = exports_of(folder / task["envs"]["CONFIG"])
    assert str(task["num_nodes"]) == config["DGXNNODES"]
    assert task["resources"]["accelerators"].rpartition(":")[2] == config["DGXNGPU"]
    assert str(Path(config["DATADIR_PHASE2"]).parent) in task["file_mounts"]
    given = {"RESUME": "1", "SAVE_CHECKPOINT_STEPS": "200", "LOGDIR": "/bucket"}
    words, environ = start(
        ["-c", task["run"]], tree_root, tmp_path, **task["envs"], **given, **SKYPILOT
    )
    assert f"--nproc-per-node={config['DGXNGPU']}" in words
    assert Path(words[-1]).samefile(folder / "run_pretraining.py")
    assert environ["MASTER_ADDR"] == "10.0.0.1"
    assert "CONT" not in environ
    assert {name: environ[name] for name in given} == given
    assert environ["BATCHSIZE"] == config["BATCHSIZE"]


def test_skypilot_starts_the_mosaic_program(tree_root: Path, tmp_path: Path) -> None:
    task = skypilot_task(tree_root, MOSAIC_TASK)
    local = "mlbert launch local -n 8"
    given = task["envs"]
    for started in (f"{local} main.py", "python3 glue.py", f"{local} sequence_classification.py"):
        *_, program = started.split()
        exports = {"PROGRAM": program, "SKYPILOT_NUM_NODES": "2" if program == "main.py" else "1"}
        exports["SKYPILOT_NUM_GPUS_PER_NODE"] = "8"
        words, environ = start(
            ["-c", task["run"]], tree_root, tmp_path, **given | exports, **SKYPILOT
        )
        assert " ".join(words).startswith(f"{started} ")
        assert all((tree_root / MOSAIC / file).is_file() for file in (program, given["YAML"]))
        assert given["WORDS"] in words
        assert ("data_remote=/data/c4" in words) == (program == "main.py")
        if program == "main.py":
            assert (environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("16", "10.0.0.1")


def test_slurm_starts_one_mosaic_rank_per_task(tree_root: Path, tmp_path: Path) -> None:
    script = tree_root / MOSAIC / "yamls/cloud/slurm.sub"
    exports = {"SLURM_SUBMIT_DIR": str(tree_root / MOSAIC), "PYTHON": "/usr/bin/python3"}
    words, _ = start([script, "main.py", "a.yaml", "b=1"], tmp_path, tmp_path, **exports)
    assert words == ["srun", "--kill-on-bad-exit=1", "/usr/bin/python3", "main.py", "a.yaml", "b=1"]
    assert_refused(run_quietly("bash", script, env=exports), "no program")


def test_dockerfile_keeps_the_base_image_and_its_torch_and_sets_a_user(tree_root: Path) -> None:
    text = (tree_root / PYTORCH / "Dockerfile").read_text()
    base = re.search(r"^ARG BASE_IMAGE=docker.io/(\S+)$", text, re.MULTILINE)
    assert skypilot_task(tree_root)["resources"]["image_id"] == f"docker:{base[1]}"
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1:] == ["10001"]
    assert "grep -v -e '^torch==' -e '^triton==' constraints.txt" in text
    assert {"BASE_IMAGE", "CUDA_ARCHS", "GIT_COMMIT"} <= set(
        re.findall(r"^ARG (\w+)", text, re.MULTILINE)
    )


def test_dockerfile_passes_hadolint(tree_root: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if program is None:
        pytest.skip("hadolint is not installed (extra: test)")
    folders = (PYTORCH, SYSTEMS / "inventec_p8000_h100_n1")
    run_checked(program, *(tree_root / folder / "Dockerfile" for folder in folders))


@pytest.mark.slow
def test_prebuild_compiles_all_of_csrc(tree_root: Path, tmp_path: Path) -> None:
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = run_quietly(tree_root / PYTORCH / "launch/prebuild.sh", env=environ)
    if "unavailable" in done.stderr or "Unavailable" in done.stderr:
        pytest.skip(f"no compiler here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    built = {path.name.partition("-")[0] for path in (tmp_path / "mlbert").glob("*.so")}
    assert built == {"ops", "optim", "wordpiece", "instances", "tfrecord", "mhalib"}


def test_prebuild_compiles_the_kernels_for_the_requested_gpus(
    tree_root: Path, tmp_path: Path
) -> None:
    # A stand-in for Python that records how it was called.
    write_program(
        tmp_path / "python3", f'#!/bin/bash\n[[ "$1" == - ]] || echo "$@" >>"{tmp_path}/words"\n'
    )
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_ARCHS": "8.0;10.0"}
    run_checked(tree_root / PYTORCH / "launch/prebuild.sh", env=environ)
    *_, words = (tmp_path / "words").read_text().splitlines()
    program, *arguments = words.split()
    assert Path(program).samefile(tree_root / "tools/compile_kernels.py")
    assert arguments == ["--arch", "80", "100"]


def test_image_contains_what_compiling_the_kernels_imports(tree_root: Path) -> None:
    graph = importers(tree_root)
    needed = ["tools/compile_kernels.py"]
    for file in needed:
        imported = (
            other for other, users in graph.items() if file in users and other.startswith("tools/")
        )
        needed += [other for other in imported if other not in needed]
    lines = (tree_root / ".dockerignore").read_text().splitlines()
    kept = tuple(line.removeprefix("!") for line in lines if line.startswith("!"))
    assert "tools/sass.py" in needed
    assert [file for file in needed if not file.startswith(kept)] == []


@pytest.fixture
def launch(tmp_path: Path, tree_root: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return launch(program, *words), which runs a program of launch/ with stand-ins for the
    engines.
    """
    write_program(tmp_path / "bin/docker", '#!/bin/bash\nprintf "%s\\n" "$@" >"${0%/*}/words"\n')
    write_program(tmp_path / "bin/enroot", ENROOT)
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    return lambda program, *words: run_quietly(
        tree_root / PYTORCH / "launch" / program, *words, env=environ
    )


def test_build_image_passes_the_commit(launch, tree_root: Path, tmp_path: Path) -> None:
    done = launch("build_image.sh", "mlbert:x", "--build-arg", "CUDA_ARCHS=9.0;10.0")
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "bin/words").read_text().splitlines()
    assert words[:5] == [
        "build",
        "--file",
        str(tree_root / PYTORCH / "Dockerfile"),
        "--tag",
        "mlbert:x",
    ]
    assert words[-2:] == ["CUDA_ARCHS=9.0;10.0", str(tree_root)]
    commit = next(word for word in words if word.startswith("GIT_COMMIT="))
    assert re.fullmatch(r"GIT_COMMIT=([0-9a-f]{40}|unknown)", commit)


@pytest.mark.parametrize(
    "image",
    ["dockerd://mlbert", "podman://mlbert:latest", "docker://registry.example#group/mlbert:1"],
)
def test_make_sqsh_names_the_file_after_its_digest(image: str, launch, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    done = launch("make_sqsh.sh", image, f"{folder}/")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bin/words").read_text().startswith("import --output ")
    digest = hashlib.sha256(b"content").hexdigest()
    name = f"mlbert-{digest[:12]}.sqsh"
    files = {name: "content", f"{name}.sha256": f"{digest}  {name}\n"}
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    assert launch("make_sqsh.sh", "dockerd://broken", folder).returncode != 0
    assert {path.name for path in folder.iterdir()} == set(files), "no partial file may be left"


def test_invalid_arguments_are_rejected(launch) -> None:
    for line, message in {
        "build_image.sh": "no name",
        "make_sqsh.sh mlbert images": "lacks the kind of image",
        "make_sqsh.sh dockerd://mlbert x.sqsh": "is a file name",
        "make_sqsh.sh dockerd://mlbert": "two arguments",
    }.items():
        assert_refused(launch(*line.split()), message)
