"""The launchers of `examples/cluster`, each run as its file says: `make test-hosts`."""

import json
import os
import re
import shutil
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
