"""torchrun over two hosts: results, elastic restarts, other numbers of ranks, and what goes wrong between hosts.

The hosts are network namespaces of this machine, and share its folders: `make test-hosts`.
"""

import importlib.util
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_runs import Run, differences, saved_steps

from support.hosts import NAMES, PORT, Host, Hosts, wait_until, why_no_hosts
from treetrain.trainers.checkpoint_files import TornCheckpoint, check_files

REFUSED = why_no_hosts()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REFUSED is not None, reason=REFUSED or "")]
SCRIPT = "tests/trainers/train_on_hosts.py"
SECONDS = 900.0
"""The longest that a run, or a restart, may take here."""
ONE_HOST: dict[str, dict[str, Any]] = {
    "tree": {"tree": True, "fsdp": True},
    "shared": {"shared": True, "fsdp": True, "per_device_train_batch_size": 1},
}
"""The same runs in `safe_runs`, on one host."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with Hosts(tmp_path) as both:
        yield both


GONE = 12.0
"""Seconds after which a dead agent counts as dead: one that comes back before is taken for a third one."""
CONFIGURATION = {"keep_alive_interval": 1, "keep_alive_max_attempt": 8}


def launch(
    hosts: Sequence[Host],
    kind: str,
    folder: Path,
    *,
    nodes: str = "2",
    ranks: int = 1,
    restarts: int = 3,
    rendezvous: dict[str, int] | None = None,
    endpoint: str = f"{NAMES[0]}:{PORT}",
    forked: bool = False,
    **settings: Any,
) -> None:
    """Start torchrun on each of these hosts, `ranks` processes on each.

    Args:
        rendezvous: more of `--rdzv-conf`.
        forked: torchrun's agent with workers that are forked, not imported anew.
    """
    for host in hosts:
        options = CONFIGURATION | (rendezvous or {})
        arguments = [kind, str(folder), json.dumps(settings)]
        least, most = map(int, (nodes.split(":") * 2)[:2])
        config = {"min_nodes": least, "max_nodes": most, "nproc_per_node": ranks, "run_id": "run"}
        config |= {"rdzv_endpoint": endpoint, "rdzv_configs": options, "max_restarts": restarts}
        command = [
            *("-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "run"),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in options.items())),
            *("--max-restarts", str(restarts), SCRIPT),
        ]
        command = [SCRIPT, "agent", json.dumps(config)] if forked else command
        host.start([sys.executable, *command, *arguments], {"HOST": str(host.number)})


def come_back(host: Host, *arguments: Any, **options: Any) -> None:
    """Start a host's agent again when the others know that the one before is dead."""
    time.sleep(GONE)
    launch([host], *arguments, **options)


def codes(hosts: Sequence[Host], seconds: float = SECONDS) -> list[int]:
    """The exit codes of the agents."""
    end, found = time.monotonic() + seconds, []
    for host in hosts:
        assert host.agent is not None
        try:
            found.append(host.agent.wait(max(end - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            pytest.fail(f"host {host.number} has not ended in {seconds:g} s\n{said(hosts)}")
    return found


def said(hosts: Sequence[Host]) -> str:
    return "\n".join(f"---- host {host.number}\n{host.text[-8000:]}" for host in hosts)


def ended_well(hosts: Sequence[Host]) -> None:
    assert codes(hosts) == [0] * len(hosts), said(hosts)


def steps_of(folder: Path) -> list[tuple[int, int]]:
    """The steps that rank 0 did, each with the number of ranks."""
    path = folder.with_name(f"{folder.name}.steps")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), int(ranks)) for step, ranks in map(str.split, lines)]


def wait_for_step(step: int, folder: Path, hosts: Sequence[Host], ranks: int | None = None) -> None:
    def done() -> bool:
        return any(s >= step and ranks in (None, size) for s, size in steps_of(folder))

    wait_until(done, SECONDS, f"step {step} on {ranks or 'any number of'} ranks", hosts)


def result(folder: Path) -> dict[str, Any]:
    return torch.load(folder.with_name(f"{folder.name}.result"), weights_only=False)


def newest_whole(folder: Path) -> int:
    """The newest checkpoint's step; all that have the name of one must be whole. The run may go on meanwhile."""
    steps: dict[int, int] = {}
    while True:
        try:
            steps = saved_steps(folder)
            for step in steps:
                check_files(folder / f"checkpoint-{step}")
            return max(steps, default=0, key=lambda step: steps[step])
        except (OSError, TornCheckpoint):  # renamed and deleted while it was read, or torn
            if all((folder / f"checkpoint-{step}").exists() for step in steps) and saved_steps(folder) == steps:
                raise


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal by the numerics contract for float32: within 1e-5 of the largest."""
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() <= 1e-5 * other[name].abs().max(), name


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Outcomes of undisturbed runs on two processes of one host, by kind; filled on demand."""
    folder = tmp_path_factory.mktemp("one_host")

    class OnDemand(dict):
        def __missing__(self, kind: str) -> dict[str, Any]:
            run = Run(folder / kind, ranks=2, resume=None, **ONE_HOST[kind])
            assert run.wait() == [0, 0], run.text
            self[kind] = run.outcome
            return self[kind]

    return OnDemand()


# ---- Results


@pytest.mark.parametrize("kind", ["tree", "shared"])
def test_two_hosts_are_bit_identical_to_two_processes_of_one_host(kind, hosts, on_one_host, tmp_path) -> None:
    launch(hosts, kind, tmp_path / "out")
    ended_well(hosts)
    assert {ranks for _, ranks in steps_of(tmp_path / "out")} == {2}
    assert differences(result(tmp_path / "out"), on_one_host[kind]) == []


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-deepspeed"
)
def test_zero2_over_two_hosts_trains_as_without_shared_prefixes(hosts, tmp_path) -> None:
    for share in (True, False):
        launch(hosts, "zero2", tmp_path / f"{share}", share=share)
        ended_well(hosts)
    close(result(tmp_path / "True")["weights"], result(tmp_path / "False")["weights"])


# ---- Restarts


@pytest.mark.parametrize("kind", ["tree", "shared"])
def test_a_host_that_is_lost_in_a_step_comes_back_and_the_run_ends_as_if_it_had_not_been(
    kind, hosts, on_one_host, tmp_path
) -> None:
    launch(hosts, kind, tmp_path / "out", slow=0.2)
    wait_for_step(5, tmp_path / "out", hosts)
    hosts[1].lose()
    assert newest_whole(tmp_path / "out") >= 4
    come_back(hosts[1], kind, tmp_path / "out")
    ended_well(hosts)
    assert differences(result(tmp_path / "out"), on_one_host[kind]) == []
    assert max(step for step, _ in steps_of(tmp_path / "out")) == 12


def test_an_agent_that_is_killed_alone_leaves_workers_that_do_no_harm(hosts, on_one_host, tmp_path) -> None:
    launch(hosts, "tree", tmp_path / "out", slow=0.5)
    wait_for_step(3, tmp_path / "out", hosts)
    hosts[1].kill_agent()
    come_back(hosts[1], "tree", tmp_path / "out")
    assert codes(hosts)[0] == 0, said(hosts)
    assert differences(result(tmp_path / "out"), on_one_host["tree"]) == []


def test_nodes_1_to_2_go_on_with_the_host_that_is_left_and_take_the_other_back(hosts, on_one_host, tmp_path) -> None:
    elastic = {"nodes": "1:2", "rendezvous": {"last_call_timeout": 5}, "optim": "sgd", "learning_rate": 0.05}
    folder = tmp_path / "out"
    launch(hosts, "tree", folder, slow=1.0, slow_alone=10.0, **elastic)
    wait_for_step(3, folder, hosts, ranks=2)
    hosts[1].lose()
    wait_for_step(5, folder, hosts[:1], ranks=1)
    come_back(hosts[1], "tree", folder, **elastic)
    ended_well(hosts)
    assert [ranks for _, ranks in steps_of(folder)][-1] == 2
    whole = Run(tmp_path / "whole", ranks=2, resume=None, **ONE_HOST["tree"], optim="sgd", learning_rate=0.05)
    assert whole.wait() == [0, 0], whole.text
    close(result(folder)["weights"], whole.outcome["weights"])


def test_a_run_that_sigterm_stopped_goes_on_with_two_ranks_on_each_host(hosts, tmp_path) -> None:
    fixed, folder = {"optim": "sgd", "learning_rate": 0.05}, tmp_path / "out"
    launch(hosts, "tree", folder, slow=0.5, **fixed)
    wait_for_step(3, folder, hosts)
    for host in hosts:
        host.agent.send_signal(signal.SIGTERM)
    codes(hosts)
    step = newest_whole(folder)
    assert step >= 3 and f"stopped after step {step} of 12; all of it is saved" in said(hosts), said(hosts)
    launch(hosts, "tree", folder, ranks=2, **fixed)
    ended_well(hosts)
    assert (step + 1, 4) in steps_of(folder) and steps_of(folder)[-1] == (12, 4)
    whole = Run(tmp_path / "whole", ranks=2, resume=None, **ONE_HOST["tree"], **fixed)
    assert whole.wait() == [0, 0], whole.text
    close(result(folder)["weights"], whole.outcome["weights"])
    close(result(folder)["averages"], whole.outcome["averages"])


KILLS = 30


@pytest.mark.timeout(3600)
def test_thirty_kills_over_two_hosts_lose_nothing(tmp_path) -> None:
    draw, killed, runs = random.Random(30), {"host": 0, "agent": 0, "worker": 0}, 0
    how = {"slow": 3.0, "restarts": 40, "forked": True, "max_steps": 40}
    whole = Run(tmp_path / "whole", ranks=2, resume=None, **ONE_HOST["tree"], max_steps=40)
    assert whole.wait() == [0, 0], whole.text

    def done(folder: Path) -> int:
        return max((step for step, _ in steps_of(folder)), default=0)

    while sum(killed.values()) < KILLS:
        runs += 1
        (place := tmp_path / str(runs)).mkdir()
        folder = place / "out"
        with Hosts(place) as hosts:
            launch(hosts, "tree", folder, **how)
            while sum(killed.values()) < KILLS:
                before = len(steps_of(folder))
                wait_until(lambda at=folder, n=before: len(steps_of(at)) > n, SECONDS, "another step", hosts)
                if done(folder) > 25:  # an agent that comes back after the end waits for the others in vain
                    break
                time.sleep(draw.uniform(0, 4.0))
                what = draw.choice(["host", "agent", "worker", "worker"])
                if what == "worker":
                    kill_worker(draw.choice(hosts))
                else:
                    hosts[1].lose() if what == "host" else hosts[1].kill_agent()
                assert newest_whole(folder) >= (done(folder) - 1) // 2 * 2, said(hosts)
                if what != "worker":
                    come_back(hosts[1], "tree", folder, **how)
                killed[what] += 1
                print(f"run {runs}, step {done(folder)}: {killed}", file=sys.stderr, flush=True)
            assert codes(hosts)[0] == 0, said(hosts)
            assert differences(result(folder), whole.outcome) == []
        again = len(steps_of(folder)) - 40
        print(f"run {runs}: bit-identical; {again} of 40 steps were done again", file=sys.stderr, flush=True)


def kill_worker(host: Host) -> None:
    """Kill the process that trains on a host, not the agent."""
    newest = [pid for pid in host.pids if "multiprocessing" in command(pid)]
    subprocess.run(["kill", "-9", str(max(newest))], check=False)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# ---- What goes wrong between hosts


def fails_alike(hosts: Sequence[Host], *words: str) -> None:
    """Both end with an error, and each says these words."""
    assert all(codes(hosts)), said(hosts)
    for host in hosts:
        assert all(word in " ".join(host.text.split()) for word in words), said(hosts)


@pytest.mark.parametrize(
    ("of_host_1", "words"),
    [
        (
            {"learning_rate": 0.02},
            ["the ranks differ in learning_rate: rank 0 has 0.01, rank 1 0.02; all of them must be started with"],
        ),
        ({"version": "5.0.0"}, ["the ranks differ in", "5.0.0"]),
        ({"folder": "{tmp_path}/elsewhere"}, ["on node2 is not the folder of the first rank, which wrote 'process "]),
    ],
    ids=["settings", "versions", "folder"],
)
def test_hosts_that_differ_are_named_on_both_and_nothing_is_written(of_host_1, words, hosts, tmp_path) -> None:
    given = {
        name: str(value).format(tmp_path=tmp_path) if name == "folder" else value for name, value in of_host_1.items()
    }
    launch(hosts, "tree", tmp_path / "out", restarts=0, host1=given)
    fails_alike(hosts, *words)
    assert not list(tmp_path.rglob("checkpoint-*")) and not steps_of(tmp_path / "out")


def test_a_rank_that_never_arrives_is_named_in_time(hosts, tmp_path) -> None:
    began = time.monotonic()
    launch(hosts, "tree", tmp_path / "out", restarts=0, host1={"never_comes": True})
    assert all(codes(hosts)), said(hosts)
    assert "rank 0 of 2 has waited 60 s for rank 1: not started, or killed before it joined" in hosts[0].text
    assert time.monotonic() - began < 60 + SECONDS / 2 and not (tmp_path / "out").exists()


def test_a_rendezvous_that_nobody_serves_ends_both_agents_in_time(hosts, tmp_path) -> None:
    launch(hosts, "tree", tmp_path / "out", endpoint="10.213.7.9:1", rendezvous={"read_timeout": 5})
    fails_alike(hosts, "RendezvousConnectionError", "The connection to the C10d store has failed")
    assert not (tmp_path / "out").exists()


def test_a_host_that_is_not_started_ends_the_other_in_time(hosts, tmp_path) -> None:
    launch(hosts[:1], "tree", tmp_path / "out", rendezvous={"join_timeout": 5})
    assert codes(hosts[:1]) == [1] and "RendezvousTimeoutError" in hosts[0].text, said(hosts)
    assert not (tmp_path / "out").exists()


def test_a_cable_that_is_cut_ends_both_in_the_timeout_that_is_set_and_the_run_goes_on(
    hosts, on_one_host, tmp_path
) -> None:
    launch(hosts, "tree", tmp_path / "out", restarts=0, slow=0.5, ddp_timeout=15)
    wait_for_step(3, tmp_path / "out", hosts)
    hosts[1].cut()
    began = time.monotonic()
    assert all(codes(hosts)), said(hosts)
    assert time.monotonic() - began < 15 + 60  # of which torchrun's agents wait 25 for Linux to give up
    assert all(re.search("another rank has left this (pass|collective call)", host.text) for host in hosts), said(hosts)
    assert "no answer within 5 s from rank 1 of 2" in hosts[0].text, said(hosts)
    assert newest_whole(tmp_path / "out") >= 2
    hosts[1].join()
    launch(hosts, "tree", tmp_path / "out", ddp_timeout=15)
    ended_well(hosts)
    assert differences(result(tmp_path / "out"), on_one_host["tree"]) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A shared folder of 2 MB, room for a few checkpoints."""
    (place := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_shared_folder_is_said_by_both_hosts_and_the_last_checkpoint_stays(small_disk, hosts, tmp_path) -> None:
    launch(hosts, "tree", small_disk / "out", restarts=0, save_total_limit=None, max_steps=40)
    fails_alike(hosts, "could not be written", "MB are free there", "Make room or make the folder writable")
    assert (last := newest_whole(small_disk / "out")) >= 2
    assert f"the last good checkpoint is {small_disk}/out/checkpoint-{last}" in hosts[0].text
    assert not (small_disk / "out" / ".treetrain" / "working").exists()


def test_a_read_only_shared_folder_is_refused_by_both_before_the_first_step(small_disk, hosts) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    launch(hosts, "tree", small_disk / "out", restarts=0)
    fails_alike(hosts, "cannot be written: no right to write in")
