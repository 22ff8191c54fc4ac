"""Emulates several hosts on one machine: network namespaces with a link each, on one bridge.

``python tests/hosts.py torch`` (or ``jax``) runs jobs on 2 hosts with 2 ranks each and on 4 with
one each, over a good link, a slow one, one that drops packets, and one that is cut. It needs Linux,
root, and the programs ``ip`` and ``tc``; without them it says so and exits with 2. It exits with 1
if a result differs from dense attention, or if a cut link does not end all ranks in an error in
time. ``--json PATH`` adds the results to a file.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from processes import Started
from reliability import keep
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
PORT = 29511
PATIENCE = 240  # seconds for a job, including the start of Python
TIMEOUTS = {"torch": 5, "jax": 10}  # seconds, of the process group or heartbeat, if a link is cut
UNDISTURBED = 60  # the same timeouts in jobs whose links are not cut
ENDINGS = r"RuntimeError|DistNetworkError|JaxRuntimeError|Terminating process|ChildFailedError"
RINGS = ("all", "permuted", "subset", "two at once", "data x context")


def run(*command: str) -> str:
    """Run a program and return its output; an AssertionError says that it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def missing() -> str | None:
    """Return the reason why this machine cannot emulate hosts, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if lacking := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"not on the path: {', '.join(lacking)} (iproute2, util-linux)"
    probe = f"ring-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "del", probe)
    except AssertionError as error:
        return f"the kernel refuses namespaces: {error}"
    return None


@dataclass(frozen=True)
class Host:
    """Network namespace with one link, ``eth0``."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs on this host, whose host name is its address."""
        inside = f'hostname {self.address} && exec ip netns exec {self.name} "$@"'
        return ["unshare", "--uts", "sh", "-c", inside, "sh", *command]

    def link(self, *settings: str) -> str:
        """Run ``tc`` on the host's link."""
        return run("ip", "netns", "exec", self.name, "tc", *settings)

    def cut(self) -> None:
        """Take the host's link down."""
        run("ip", "netns", "exec", self.name, "ip", "link", "set", "eth0", "down")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Create hosts on a bridge in its own namespace; remove them and their processes at the end."""
    switch = f"ring-{os.getpid()}-switch"
    started_hosts = [Host(f"ring-{os.getpid()}-{n}", f"10.77.0.{n + 1}") for n in range(count)]
    try:
        run("ip", "netns", "add", switch)
        inside = ("ip", "-n", switch, "link")
        run(*inside, "add", "bridge0", "type", "bridge")
        run(*inside, "set", "bridge0", "up")
        for n, host in enumerate(started_hosts):
            run("ip", "netns", "add", host.name)
            run("ip", "-n", host.name, "link", "add", "eth0", "type", "veth", "peer", "name",
                f"port{n}", "netns", switch)  # fmt: skip
            run(*inside, "set", f"port{n}", "master", "bridge0", "up")
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", host.name, "link", "set", device, "up")
        yield started_hosts
    finally:
        for name in (switch, *(host.name for host in started_hosts)):
            with suppress(AssertionError, ProcessLookupError):
                for process in run("ip", "netns", "pids", name).split():
                    os.kill(int(process), signal.SIGKILL)
            with suppress(AssertionError):
                run("ip", "netns", "del", name)


@dataclass(frozen=True)
class Link:
    """Link quality: settings for ``tc qdisc add dev eth0 root``; the first accepted one is used."""

    name: str
    settings: tuple[str, ...]
    drops: bool = False


LINKS = (
    Link("good", ()),
    Link("slow", ("netem delay 20ms rate 20mbit", "tbf rate 20mbit burst 16kb latency 200ms")),
    Link("lossy", ("netem loss 3%", "tbf rate 60mbit burst 3kb limit 6kb"), drops=True),
)


def shape(host: Host, link: Link) -> str:
    """Shape a host's link, and return the setting that was taken: the first that is accepted."""
    for setting in link.settings:
        try:
            host.link("qdisc", "add", "dev", "eth0", "root", *setting.split())
        except AssertionError:
            if setting == link.settings[-1]:
                raise
        else:
            return setting
    return "as it is"


@dataclass(frozen=True)
class Job:
    """Job with ``each`` ranks on each of some hosts, started by torchrun or one by one."""

    backend: str
    hosts: int
    each: int
    link: Link
    torchrun: bool

    def __str__(self) -> str:
        how = ", torchrun" if self.torchrun else ""
        return f"{self.hosts} hosts x {self.each}, {self.link.name} link{how}"

    @property
    def is_cut(self) -> bool:
        """Return True if a link is cut during the job."""
        return self.link.name == "cut"

    def command(self, n: int, address: str, rank: int) -> list[str]:
        """Return the command that host ``n`` runs, once with torchrun, otherwise once per rank."""
        if self.backend == "jax":
            job, ranks = ROOT / "tests" / "processes_job.py", self.hosts * self.each
            check = "steps" if self.is_cut else "rings"
            return [sys.executable, str(job), f"{address}:{PORT}", str(ranks), str(rank), check]
        program = [str(ROOT / "tests" / "hosts_job.py")]
        program += ["cut"] if self.is_cut else []
        if not self.torchrun:
            return [sys.executable, *program]
        return [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.hosts}", f"--node-rank={n}",
            f"--nproc-per-node={self.each}", f"--master-port={PORT}", f"--master-addr={address}", *program,
        ]  # fmt: skip


@contextmanager
def started(job: Job, hosts_of_job: Sequence[Host]) -> Iterator[list[Started]]:
    """Start a job, and kill what still runs of it at the end."""
    running, address = list[Started](), hosts_of_job[0].address
    timeout = TIMEOUTS[job.backend] if job.is_cut else UNDISTURBED
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "MASTER_ADDR": address, "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(job.hosts * job.each), "RING_TIMEOUT": str(timeout),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        try:
            for n, local in product(range(job.hosts), range(1 if job.torchrun else job.each)):
                rank = n * job.each + local
                output = Path(folder) / f"{rank}.txt"
                with output.open("w") as file:
                    process = subprocess.Popen(
                        hosts_of_job[n].command(*job.command(n, address, rank)),
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(local)},
                        stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    )  # fmt: skip
                running.append(Started(process, output))
            yield running
        finally:
            for x in running:
                with suppress(ProcessLookupError):
                    os.killpg(x.process.pid, signal.SIGKILL)
                x.process.wait()


def finish(running: Sequence[Started], seconds: float) -> list[int]:
    """Wait for all programs and return their exit codes."""
    until = time.monotonic() + seconds
    while any(x.process.poll() is None for x in running):
        assert time.monotonic() < until, f"not done in {seconds:.0f} s\n{tails(running)}"
        time.sleep(0.1)
    return [x.process.returncode for x in running]


def tails(running: Sequence[Started]) -> str:
    """Return the end of each program's output."""
    return "\n".join(x.text[-1500:] for x in running)


def left(hosts_of_job: Sequence[Host]) -> list[str]:
    """Return processes that are still on the hosts after five seconds."""
    for _ in range(50):
        pids = [x for host in hosts_of_job for x in run("ip", "netns", "pids", host.name).split()]
        if not pids:
            break
        time.sleep(0.1)
    return pids


def undisturbed(job: Job, hosts_of_job: Sequence[Host]) -> str:
    """Run a job to its end, check its results, and return a summary."""
    shapes = {shape(host, job.link) for host in hosts_of_job}
    with started(job, hosts_of_job) as running:
        codes, lines = finish(running, PATIENCE), ("equal", *(f"ring {x}" for x in RINGS))
        texts = "".join(x.text for x in running)
        is_right = all(texts.count(f"{x}\n") == job.hosts * job.each for x in lines)
        assert is_right and not any(codes), f"exit codes {codes}\n{tails(running)}"
    counts = "".join(host.link("-s", "qdisc", "show", "dev", "eth0") for host in hosts_of_job)
    dropped = sum(map(int, re.findall(r"dropped (\d+)", counts)))
    assert dropped or not job.link.drops, "the link dropped nothing: nothing was tested"
    return f"{len(RINGS)} kinds of rings equal on all ranks, link {', '.join(shapes)}, {dropped} packets dropped"


def with_a_link_cut(job: Job, hosts_of_job: Sequence[Host]) -> str:
    """Start a job, cut a link during it, check that all ranks end in an error; return a summary."""
    with started(job, hosts_of_job) as running:
        until = time.monotonic() + PATIENCE
        while not all("step 3\n" in x.text for x in running):
            is_over = any(x.process.poll() is not None for x in running)
            assert not is_over and time.monotonic() < until, f"no steps were made\n{tails(running)}"
            time.sleep(0.1)
        hosts_of_job[-1].cut()
        began = time.monotonic()
        codes = finish(running, 12 * TIMEOUTS[job.backend])
        seconds, texts = time.monotonic() - began, [x.text for x in running]
        assert all(codes), f"exit codes {codes}: a rank ended well without the others"
        is_wrong = any("AssertionError" in text for text in texts)
        assert not is_wrong, f"a wrong result\n{tails(running)}"
        says_why = all(re.search(ENDINGS, text) for text in texts)
        assert says_why, f"a rank does not say why it ended\n{tails(running)}"
    ends = sorted({"an error" if n == 1 else signal.Signals(-n).name for n in codes})
    return f"all ranks ended in {seconds:.0f} s, in {' or '.join(ends)}"


def main() -> int:
    """Run all jobs, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=("torch", "jax"))
    parser.add_argument("--only", default="", help="of a job's name")
    parser.add_argument("--json", type=Path, help="add what ran to this file, too")
    options = parser.parse_args()
    if (reason := missing()) is not None:
        sys.stderr.write(f"cannot test several hosts here: {reason}\n")
        return 2
    is_torch = options.backend == "torch"
    jobs = [
        Job(options.backend, count, each, link, torchrun)
        for count, each in ((2, 2), (4, 1))
        for link in (*LINKS, Link("cut", ()))
        for torchrun in ((True, False) if is_torch and link.name == "cut" else (is_torch,))
    ]
    chosen = [job for job in jobs if options.only in str(job)]
    reports = [report(job) for job in tqdm(chosen, unit="job", disable=None)]
    if options.json is not None:
        keep(options.json, "backends", {options.backend: reports}, options.backend, "numpy")
    return 0 if all(x["ok"] for x in reports) else 1


def report(job: Job) -> dict[str, object]:
    """Run a job, and print and return its outcome."""
    began = time.monotonic()
    try:
        with hosts(job.hosts) as started_hosts:
            ok, text = True, (with_a_link_cut if job.is_cut else undisturbed)(job, started_hosts)
            assert not (processes := left(started_hosts)), f"processes stayed: {processes}"
    except AssertionError as error:
        ok, text = False, str(error)
    seconds = round(time.monotonic() - began)
    print(f"{job.backend}, {job}: {'' if ok else 'FAILED: '}{text}; {seconds} s", flush=True)
    return {"name": str(job), "ok": ok, "words": text, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
