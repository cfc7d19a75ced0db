"""Two hosts on one machine: network namespaces with a pair of virtual Ethernet devices between them.

Each has a name, by which the other finds it. They share the files of the machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES, ADDRESSES = ("node1", "node2"), ("10.213.7.1", "10.213.7.2")
"""Each pair of namespaces has a network of its own, so these may be the same for all."""
PORT = 29400
CGROUPS = "mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null"
"""`ip netns exec` gives a new /sys, without them."""
ROOT = Path(__file__).parents[2]


def why_no_hosts() -> str | None:
    """Why this machine cannot make namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "there is no `ip`: apt-get install iproute2"
    name = f"tt{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are refused here ({made.stderr.strip()}); run as root"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


class Host:
    """A network namespace and the processes in it.

    Args:
        number: 0 or 1.
        said: the file that its processes write to.
    """

    def __init__(self, number: int, said: Path) -> None:
        self.number, self.address, self.said = number, ADDRESSES[number], said
        self.name, self.device = f"tt{os.getpid()}h{number}", f"tt{os.getpid() % 10**6}v{number}"
        self.names = Path("/etc/netns", self.name)
        self.agent: subprocess.Popen[Any] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Run a command on this host, without waiting for its end."""
        with self.said.open("ab") as file:
            self.agent = subprocess.Popen(
                **self._call(command, environment), stdout=file, stderr=file, start_new_session=True
            )

    def run(self, *command: str, **environment: str) -> str:
        """Run a command to its end. Returns its output. Raises AssertionError if it fails."""
        done = subprocess.run(**self._call(command, environment), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _call(self, command: Sequence[str], more: Mapping[str, str] | None) -> dict[str, Any]:
        """Arguments of `subprocess` for a command on this host."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname "$0"; {CGROUPS}; exec "$@"', NAMES[self.number]]
        path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "tests/trainers", "."))
        given = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return {
            "args": ["ip", "netns", "exec", self.name, *named, *command],
            "env": os.environ | given | dict(more or {}),
            "cwd": ROOT,
        }

    @property
    def pids(self) -> list[int]:
        """All processes on this host, the agent first."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        pids = [int(pid) for pid in found.stdout.split()]
        return sorted(pids, key=lambda pid: self.agent is None or pid != self.agent.pid)

    def lose(self) -> None:
        """End all processes on this host at once, as a loss of power does."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()

    def kill_agent(self) -> None:
        """End torchrun alone; its workers stay."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    def cut(self) -> None:
        """Take this host off the network; nothing tells the other."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def join(self) -> None:
        """Put it back."""
        _ip("-n", self.name, "link", "set", self.device, "up")

    @property
    def text(self) -> str:
        """What its processes have written."""
        return self.said.read_text(errors="replace") if self.said.exists() else ""


class Hosts:
    """Two hosts that reach each other; a context manager that takes them away again."""

    def __init__(self, folder: Path) -> None:
        self.both = [Host(number, folder / f"host{number}.said") for number in (0, 1)]

    def __enter__(self) -> list[Host]:
        first, second = self.both
        for host in self.both:
            _ip("netns", "add", host.name)
            host.names.mkdir(parents=True)  # `ip netns exec` puts what is there in the place of what is in /etc
            lines = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES)]
            (host.names / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _ip(
            "-n",
            first.name,
            "link",
            "add",
            first.device,
            "type",
            "veth",
            "peer",
            "name",
            second.device,
            "netns",
            second.name,
        )
        for host in self.both:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.run("sh", "-c", "echo 6 > /proc/sys/net/ipv4/tcp_retries2")
            host.join()
        return self.both

    def __exit__(self, *_: object) -> None:
        for host in self.both:
            host.lose()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
            shutil.rmtree(host.names, ignore_errors=True)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def wait_until(condition, seconds: float, what: str, hosts: Sequence[Host]) -> None:
    """Wait for a condition. Raises AssertionError with what the hosts said."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}\n" + "\n".join(
            each.text[-6000:] for each in hosts
        )
        time.sleep(0.02)
