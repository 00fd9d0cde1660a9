"""Two network namespaces, joined by a cable (a veth pair), as two hosts of a training job.

Run inside namespaces where this process is root: `unshare -rUnm python -m tests.cluster.two_hosts
FOLDER`. FOLDER holds `a/c.yml` and `b/c.yml`, the configs of the hosts. A torchrun on each host
starts two ranks. The cable is cut for less than `heartbeat_timeout`, then for longer; then host B
dies with all its processes, the cable is repaired, and B starts again.

Rank 0, on host A, prints into a pipe of one page, from which this process reads only a line in each
POLL until B starts again. So the run cannot end before its faults, however fast the machine is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.helpers.paths import ROOT

PATIENCE = 400
"""Seconds for each thing to happen, on a busy machine."""
POLL = 0.05
STEPS = 60
SHORT_CUT = 4
RENDEZVOUS = [
    "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
    "--rdzv-endpoint=host-a:29400", "--rdzv-id=rehearsal",
    "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1",
]  # fmt: skip


class Host:
    """A network namespace with an own host name, and the torchrun in it.

    Args:
        held: Whether stdout goes into a pipe that `hear` and `release` read.
    """

    def __init__(self, folder: Path, name: str, address: str, held: bool = False):
        self.folder, self.name, self.address, self.held = folder, name, address, held
        # It keeps the namespace, and ends with this process, whose end of the pipe then closes.
        keeper = subprocess.Popen(["unshare", "-n", "-u", "cat"], stdin=subprocess.PIPE)
        here = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{keeper.pid}/ns/net") == here:
            time.sleep(0.05)
        self.pid, self.keeper = keeper.pid, keeper
        self.enter = ["nsenter", "-t", str(keeper.pid), "-n", "-u"]
        self.torchrun: psutil.Popen | None = None

    def call(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True)

    def cable(self, state: str) -> None:
        self.call("ip", "link", "set", "eth0", state)

    def connect(self) -> None:
        self.call("hostname", self.name)
        self.call("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.call("ip", "link", "set", "lo", "up")
        self.cable("up")

    def start(self) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS]
        own = [f"--log-dir={self.folder / 'logs'}"]
        environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / "output").open("a") as output:
            self.torchrun = psutil.Popen(
                [*self.enter, *torchrun, *own, ROOT / "train.py", "c.yml"],
                cwd=self.folder, env=environ, stderr=output,
                stdout=subprocess.PIPE if self.held else output, pipesize=4096,
            )  # fmt: skip
        if self.held:
            os.set_blocking(self.torchrun.stdout.fileno(), False)

    def hear(self) -> None:
        """Let the torchrun print one more line."""
        if self.held and self.torchrun:
            with contextlib.suppress(BlockingIOError), (self.folder / "output").open("ab") as file:
                file.write(os.read(self.torchrun.stdout.fileno(), 160))

    def release(self) -> None:
        """Let the torchrun print without a limit."""
        assert self.torchrun
        self.held = False
        os.set_blocking(self.torchrun.stdout.fileno(), True)
        with (self.folder / "output").open("a") as output:
            subprocess.Popen(["cat"], stdin=self.torchrun.stdout, stdout=output)

    def ranks(self) -> list[psutil.Process]:
        return self.torchrun.children() if self.torchrun and self.torchrun.is_running() else []

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def die(self) -> None:
        """Kill all processes of the host; some may have ended."""
        for process in [self.torchrun, *self.ranks()] if self.torchrun else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_for(what: str, happens: Callable[[], object], hosts: list[Host]) -> None:
    begin = time.monotonic()
    while not happens():
        ended = [host.torchrun for host in hosts if host.torchrun and host.torchrun.poll()]
        if ended or time.monotonic() > begin + PATIENCE:
            texts = [f"--- {host.name}\n{host.output()}" for host in hosts]
            sys.exit("\n".join([f"waited {time.monotonic() - begin:.0f} s for {what}", *texts]))
        time.sleep(POLL)
        for host in hosts:
            host.hear()
    print(f"{what}: after {time.monotonic() - begin:.1f} s", flush=True)


def rehearse(folder: Path, a: Host, b: Host) -> None:
    run, hosts = folder / "run", [a, b]

    def step() -> int:
        path = run / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return json.loads(whole.splitlines()[-1])["step"] if whole else 0

    subprocess.run(
        ["ip", "link", "add", "eth0", "netns", str(a.pid), "type", "veth",
         "peer", "name", "eth0", "netns", str(b.pid)], check=True,
    )  # fmt: skip
    for host in hosts:
        host.connect()
        host.start()
    wait_for("the first checkpoint", (run / "latest").exists, hosts)
    b.cable("down")
    time.sleep(SHORT_CUT)
    before, ranks = step(), [rank.pid for host in hosts for rank in host.ranks()]
    b.cable("up")
    wait_for("steps after a short cut", lambda: step() > before + 5, hosts)
    assert [rank.pid for host in hosts for rank in host.ranks()] == ranks, "a rank was replaced"

    b.cable("down")
    said = "nothing heard for"
    wait_for("messages after a long cut", lambda: said in a.output() and said in b.output(), hosts)
    b.die()
    print(f"cut before step {before} and for good at step {step()}", flush=True)
    assert step() < STEPS, "too late: the run had ended"
    b.cable("up")
    b.start()
    a.release()
    wait_for(
        "the end", lambda: a.torchrun.poll() is not None and b.torchrun.poll() is not None, hosts
    )
    assert [a.torchrun.returncode, b.torchrun.returncode] == [0, 0], a.output() + b.output()


def main() -> None:
    folder = Path(sys.argv[1])
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n10.99.0.1 host-a\n10.99.0.2 host-b\n")
    subprocess.run(["mount", "--bind", names, "/etc/hosts"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    a = Host(folder / "a", "host-a", "10.99.0.1", held=True)
    b = Host(folder / "b", "host-b", "10.99.0.2")
    try:
        rehearse(folder, a, b)
    finally:
        a.die()
        b.die()


if __name__ == "__main__":
    main()
