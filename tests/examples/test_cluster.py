"""The launchers of `examples/cluster`, each run as its file says: `make test-hosts`."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import ADDRESSES, Host, Hosts, wait_until, why_no_hosts

FILES = Path(__file__).parents[2] / "examples" / "cluster"
ROWS = Path(__file__).parents[2] / "examples" / "countdown" / "heldout.jsonl.gz"
pytestmark = pytest.mark.slow
SECONDS = 600.0
"""The longest that a run may take here."""

# ---- Slurm: slurmctld on the first host, slurmd on both

REFUSED = why_no_hosts() or (
    None if shutil.which("slurmctld") and shutil.which("slurmd") else "no Slurm here: apt-get install slurm-wlm"
)
SLURM = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=node1 NodeAddr={addresses[0]} CPUs=1 State=UNKNOWN
NodeName=node2 NodeAddr={addresses[1]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Host]:
    """The host of slurmctld, when both nodes are idle."""
    if REFUSED is not None:
        pytest.skip(REFUSED)
    (tmp_path / "state").mkdir()
    (conf := tmp_path / "slurm.conf").write_text(SLURM.format(folder=tmp_path, addresses=ADDRESSES))
    (tmp_path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of torchrun
    with pytest.MonkeyPatch.context() as patch, Hosts(tmp_path) as hosts:
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("PATH", path)
        hosts[0].start(["slurmctld", "-D"])
        for host in hosts:
            host.start(["slurmd", "-D"])
        wait_until(lambda: "2 idle" in state(hosts[0]), SECONDS, "two idle nodes", hosts)
        yield hosts[0]


def state(host: Host) -> str:
    """`2 idle`, say."""
    try:
        return host.run("sinfo", "-h", "-o", "%D %t")
    except AssertionError:
        return ""


def submit(host: Host, folder: Path, *options: str, steps: int = 60) -> str:
    """Submit the example; returns the number of the job."""
    train = f"{ROWS} --model tiny --output_dir {folder}/out --max_steps {steps} --tokens_per_step 600 --save_steps 5"
    cpus = "--use_cpu true --ddp_backend gloo --report_to none --logging_steps 5"
    words = ["--parsable", f"--output={folder}/job.said", *options, str(FILES / "train.sbatch"), *train.split()]
    return host.run("sbatch", *words, *cpus.split()).strip()


def wait_for_job(host: Host, job: str, folder: Path, condition) -> str:
    """Wait for a condition on what `scontrol` says of a job, which it returns."""
    end = time.monotonic() + SECONDS
    while not condition(found := host.run("scontrol", "show", "job", job)):
        said = (folder / "job.said").read_text() if (folder / "job.said").exists() else ""
        assert time.monotonic() < end and "JobState=FAILED" not in found, found + said[-6000:]
        time.sleep(0.5)
    return found


@pytest.mark.timeout(1800)
def test_a_job_of_slurm_stops_with_a_checkpoint_at_its_signal_is_requeued_and_goes_on(slurm, tmp_path) -> None:
    job, out = submit(slurm, tmp_path), tmp_path / "out"
    wait_for_job(slurm, job, tmp_path, lambda _: (out / "checkpoint-5").exists())
    slurm.run("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@300 does 300 s before the end
    found = wait_for_job(slurm, job, tmp_path, lambda found: "JobState=COMPLETED" in found)
    text = (tmp_path / "job.said").read_text()
    assert "Restarts=1 " in found, found
    stopped = int(re.findall(r"SIGTERM: stopped after step (\d+) of 60; all of it is saved in", text)[0])
    assert 5 <= stopped < 60 and "the model is in" in text
    logged = json.loads((out / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in logged if "loss" in entry] == [*range(5, 61, 5)]


# ---- Ray Train


@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: make test-hosts")
@pytest.mark.parametrize("name", ["ray_tree_trainer", "ray_trl"])
def test_ray_starts_all_workers_again_when_one_is_killed_and_they_go_on(name, tmp_path) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    command = [
        sys.executable,
        "-m",
        f"examples.cluster.{name}",
        "--output",
        str(out),
        "--steps",
        "8",
        "--save-steps",
        "2",
    ]
    root = str(FILES.parents[1])
    patient = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_USAGE_STATS_ENABLED": "0"}
    patient["RAY_memory_monitor_refresh_ms"] = "0"  # others on this machine may fill its memory
    environment = os.environ | patient | {"PYTHONPATH": f"{root}/src{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    with said.open("w") as file:
        driver = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        end = time.monotonic() + SECONDS
        while not (out / "checkpoint-2").exists():
            assert time.monotonic() < end and driver.poll() is None, said.read_text()[-6000:]
            time.sleep(0.1)
        worker = int(re.findall(r"pid=(\d+)\) world_rank=1", said.read_text())[-1])
        os.kill(worker, signal.SIGKILL)
        assert driver.wait(SECONDS) == 0, said.read_text()[-6000:]
    finally:
        driver.terminate()  # ends the cluster too, which is its own
        driver.wait(60)
    logged = json.loads((out / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in logged if "loss" in entry] == [*range(1, 9)]
    assert len(re.findall(r"pid=\d+\) world_rank=1", said.read_text())) == 2  # two groups of workers
    assert (out / "model.safetensors").exists()


# ---- Files that no cluster here runs, as far as validators go


def torchrun_words(text: str) -> tuple[list[str], list[str]]:
    """The words of a torchrun command, and those of `treetrain train` in it."""
    words = shlex.split(text.replace("\\\n", " "))
    words = words[words.index("torchrun") + 1 :]
    return words[: words.index("-m")], words[words.index("train") + 1 :]


def check_command(text: str) -> None:
    """torchrun and `treetrain train` know every option."""
    from torch.distributed.run import parse_args

    from treetrain.cli.train import make_parser

    launcher, train = torchrun_words(text)
    args = parse_args([*launcher, "script.py"])
    assert args.rdzv_backend == "c10d" and args.rdzv_endpoint and args.shutdown_timeout < 300
    options = make_parser().parse_args([word for word in train if word not in ("$@", "&")])
    assert options.resume_from_checkpoint == "true"


def test_the_commands_of_the_files_have_options_that_exist() -> None:
    import yaml

    text = re.sub(r"\$\([^()]*(\([^()]*\))?[^()]*\)|\$\{[^}]*\}", "1", (FILES / "train.sbatch").read_text())
    start = text.index("torchrun \\\n")
    check_command(text[start : text.index(" &\n", start)].replace('"$@"', "rows.jsonl --model m --output_dir o"))
    sky = yaml.safe_load((FILES / "skypilot.yaml").read_text())
    check_command(re.sub(r"\$\([^()]*\)", "node1", sky["run"]).replace('"$SKYPILOT_NUM_NODES"', "2"))
    check_command(shlex.join(container()["command"]))


def container() -> dict:
    import yaml

    pods = yaml.safe_load((FILES / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    return pods["template"]["spec"]["containers"][0]


def test_skypilot_reads_its_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="skypilot is not installed: make test-hosts")
    task = sky.Task.from_yaml(str(FILES / "skypilot.yaml"))
    assert task.num_nodes == 2 and {"H100": 8} in [each.accelerators for each in task.resources]


def test_the_job_of_the_jobset_is_one_of_kubernetes_whose_name_the_ranks_meet_at() -> None:
    import yaml

    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing: make test-hosts")
    jobset = yaml.safe_load((FILES / "jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]
    described = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job["template"]["spec"]}
    validate.validate(described, validate.latest_version(), strict=True)
    name = jobset["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:29400" in container()["command"]
    assert job["template"]["spec"]["parallelism"] == 2 and "--nnodes=2" in container()["command"]
