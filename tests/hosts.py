"""Several hosts on one machine: network namespaces with a link each, joined by a bridge.

``python tests/hosts.py torch`` (or ``jax``) runs rings on 2 hosts with 2 ranks each and on 4 with
one each, over a good link, a slow one, one that drops packets, and one that is cut. It needs Linux,
root, and the programs ``ip`` and ``tc``; without, it says so and its exit code is 2. It is 1 if a
result differs from dense attention, or a cut link does not end all ranks in an error in time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PORT = 29511
TIMEOUT = 5  # seconds of the process group whose link is cut
PATIENCE = 180  # seconds for a job, start of Python and all

TORCH = f"""
import os, sys
from datetime import timedelta
import numpy as np
import torch
import torch.distributed as dist
from ring_core import reference
from ring_torch import ContextParallel

cut = len(sys.argv) > 1
dist.init_process_group("gloo", timeout=timedelta(seconds={TIMEOUT} if cut else 60))
rank = dist.get_rank()
whole = np.random.default_rng(0).standard_normal((3, 1, 512, 2, 16))
expected, _ = reference.attention(*whole, causal=True)
grads = reference.attention_grads(2 * expected, *whole, causal=True)
across = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]
rings = [None] if cut else [None, across[rank % 2], dist.new_group([3, 1, 0, 2])]
for step in range(10_000 if cut else len(rings)):
    cp = ContextParallel(rings[step % len(rings)])
    q, k, v = (cp.shard(torch.tensor(x)).requires_grad_() for x in whole)
    out = cp.unshard(cp.attention(q, k, v, causal=True))
    (out * out).sum().backward()
    np.testing.assert_allclose(out.detach(), expected, rtol=1e-10, atol=1e-10)
    for x, grad in zip((q, k, v), grads):
        wanted = cp.shard(torch.tensor(grad))
        torch.testing.assert_close(x.grad, wanted, rtol=1e-10, atol=1e-10)
    print("step", step, flush=True)
dist.barrier()
print("equal", flush=True)
os._exit(0)
"""

JAX = """
import os, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ring_core import reference
from ring_jax import ContextParallel

cut, address = len(sys.argv) > 1, os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
jax.distributed.initialize(
    address, num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"]),
    heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10,
)
mesh = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,))
cp = ContextParallel(mesh, "cp")
whole = np.random.default_rng(0).standard_normal((3, 1, 512, 2, 16)).astype(np.float32)
everywhere = NamedSharding(mesh, P())
q, k, v = (jax.make_array_from_callback(x.shape, everywhere, lambda at, x=x: x[at]) for x in whole)

@jax.jit
def out_and_grad(q, k, v):
    def loss(q):
        out = cp.unshard(cp.attention(*(cp.shard(x) for x in (q, k, v)), causal=True))
        return (out * out).sum(), out
    return jax.grad(loss, has_aux=True)(q)

expected, _ = reference.attention(*whole, causal=True)
dq = reference.attention_grads(2 * expected, *whole, causal=True).dq
for step in range(10_000 if cut else 2):
    grad, out = (np.asarray(process_allgather(x, tiled=True)) for x in out_and_grad(q, k, v))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(grad, dq, rtol=2e-4, atol=2e-4)
    print("step", step, flush=True)
print("equal", flush=True)
"""


def run(*command: str) -> str:
    """Run a program to its end; what it printed.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def missing() -> str | None:
    """Why this machine cannot have such hosts, if it cannot."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if lacking := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"not on the path: {', '.join(lacking)} (iproute2, util-linux)"
    probe = f"ring-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "del", probe)
    except RuntimeError as error:
        return f"the kernel refuses namespaces: {error}"
    return None


@dataclass(frozen=True)
class Host:
    """A namespace with one link, ``eth0``."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """A command that runs there, with its address for a host name."""
        inside = f'hostname {self.address} && exec ip netns exec {self.name} "$@"'
        return ["unshare", "--uts", "sh", "-c", inside, "sh", *command]

    def link(self, *settings: str) -> str:
        """Run ``tc qdisc`` on its link."""
        return run("ip", "netns", "exec", self.name, "tc", *settings)

    def cut(self) -> None:
        """Take the link down."""
        run("ip", "netns", "exec", self.name, "ip", "link", "set", "eth0", "down")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts on a bridge, itself in a namespace; gone afterwards."""
    switch = f"ring-{os.getpid()}-switch"
    made = [Host(f"ring-{os.getpid()}-{n}", f"10.77.0.{n + 1}") for n in range(count)]
    try:
        run("ip", "netns", "add", switch)
        inside = ("ip", "-n", switch, "link")
        run(*inside, "add", "bridge0", "type", "bridge")
        run(*inside, "set", "bridge0", "up")
        for n, host in enumerate(made):
            run("ip", "netns", "add", host.name)
            run("ip", "-n", host.name, "link", "add", "eth0", "type", "veth", "peer", "name",
                f"port{n}", "netns", switch)  # fmt: skip
            run(*inside, "set", f"port{n}", "master", "bridge0", "up")
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", host.name, "link", "set", device, "up")
        yield made
    finally:
        for name in (switch, *(host.name for host in made)):
            with suppress(RuntimeError):
                run("ip", "netns", "del", name)


@dataclass(frozen=True)
class Link:
    """What ``tc qdisc add dev eth0 root`` is given; of several, the first the kernel has."""

    name: str
    settings: tuple[str, ...]
    drops: bool = False


LINKS = (
    Link("good", ()),
    Link("slow", ("netem delay 20ms rate 20mbit", "tbf rate 20mbit burst 16kb latency 200ms")),
    Link("lossy", ("netem loss 3%", "tbf rate 60mbit burst 3kb limit 6kb"), drops=True),
)


def shape(host: Host, link: Link) -> str:
    """Make a host's link like this; the setting that was taken.

    Raises:
        RuntimeError: The kernel has none of them.
    """
    refused = []
    for setting in link.settings:
        try:
            host.link("qdisc", "add", "dev", "eth0", "root", *setting.split())
        except RuntimeError as error:
            refused.append(str(error))
        else:
            return setting
    if refused:
        raise RuntimeError("; ".join(refused))
    return "as it is"


def start(
    made: Sequence[Host], each: int, program: Path, folder: Path, *, elastic: bool, cut: bool
) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Start a job: with torchrun on each host, or every rank by itself."""
    world = len(made) * each
    base = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
        "MASTER_ADDR": made[0].address, "MASTER_PORT": str(PORT), "WORLD_SIZE": str(world),
    }  # fmt: skip
    running = []
    for n, host in enumerate(made):
        for local in range(1 if elastic else each):
            rank = n if elastic else n * each + local
            command = [sys.executable, str(program), *(["cut"] if cut else [])]
            if elastic:
                command[1:1] = [
                    "-m", "torch.distributed.run", f"--nnodes={len(made)}", f"--node-rank={n}",
                    f"--nproc-per-node={each}", f"--master-addr={made[0].address}",
                    f"--master-port={PORT}",
                ]  # fmt: skip
            output = folder / f"{rank}.txt"
            with output.open("w") as file:
                process = subprocess.Popen(
                    host.command(*command), env=base | {"RANK": str(rank), "LOCAL_RANK": str(local)},
                    stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            running.append((process, output))
    return running


def finish(running: Sequence[tuple[subprocess.Popen[bytes], Path]], seconds: float) -> list[int]:
    """Wait for all; exit codes.

    Raises:
        RuntimeError: Some are not done in time.
    """
    until = time.monotonic() + seconds
    try:
        return [process.wait(max(0.1, until - time.monotonic())) for process, _ in running]
    except subprocess.TimeoutExpired as error:
        texts = "\n".join(file.read_text()[-1500:] for _, file in running)
        raise RuntimeError(f"not done in {seconds:.0f} s\n{texts}") from error
    finally:
        for process, _ in running:
            process.kill()
            process.wait()


def job(backend: str, count: int, each: int, link: Link) -> str:
    """Run a job to its end over links of a kind; a line about it.

    Raises:
        RuntimeError: It did not give the right results.
    """
    with tempfile.TemporaryDirectory() as name, hosts(count) as made:
        folder = Path(name)
        program = folder / "ring.py"
        program.write_text(TORCH if backend == "torch" else JAX)
        taken = {shape(host, link) for host in made}
        started = time.monotonic()
        elastic = backend == "torch"
        running = start(made, each, program, folder, elastic=elastic, cut=False)
        codes = finish(running, PATIENCE)
        texts = [file.read_text() for _, file in running]
        equal = sum(text.count("equal\n") for text in texts)
        if any(codes) or equal != count * each:
            raise RuntimeError(f"exit codes {codes}\n" + "\n".join(x[-1500:] for x in texts))
        dropped = [
            int(n)
            for host in made
            for n in re.findall(r"dropped (\d+)", host.link("-s", "qdisc", "show", "dev", "eth0"))
        ]
        if link.drops and not sum(dropped):
            raise RuntimeError("the link dropped nothing: nothing was tested")
        return f"equal on all ranks, link {', '.join(taken)}, {sum(dropped)} packets dropped, {time.monotonic() - started:.0f} s"


def job_with_a_link_cut(backend: str, count: int, each: int) -> str:
    """Run a job, cut a link in its midst, and see all ranks end in an error; a line about it.

    Raises:
        RuntimeError: A rank ended well, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as name, hosts(count) as made:
        folder = Path(name)
        program = folder / "ring.py"
        program.write_text(TORCH if backend == "torch" else JAX)
        running = start(made, each, program, folder, elastic=False, cut=True)
        until = time.monotonic() + PATIENCE
        while not all("step 3\n" in file.read_text() for _, file in running):
            if time.monotonic() > until or any(p.poll() is not None for p, _ in running):
                finish(running, 0)
            time.sleep(0.1)
        made[-1].cut()
        started = time.monotonic()
        codes = finish(running, 12 * TIMEOUT)
        if not all(codes):
            raise RuntimeError(f"exit codes {codes}: a rank ended well without the others")
        return f"all ranks ended in {time.monotonic() - started:.0f} s, exit codes {codes}"


def main() -> int:
    """Run all jobs; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=("torch", "jax"))
    parser.add_argument("--only", default="", help="of a job's name")
    asked = parser.parse_args()
    if (reason := missing()) is not None:
        sys.stderr.write(f"cannot test several hosts here: {reason}\n")
        return 2
    jobs = {
        f"{count} hosts x {each}, {link.name} link": (count, each, link)
        for count, each in ((2, 2), (4, 1))
        for link in (*LINKS, Link("cut", ()))
    }
    failed = 0
    for name, (count, each, link) in jobs.items():
        if asked.only not in name:
            continue
        try:
            if link.name == "cut":
                text = job_with_a_link_cut(asked.backend, count, each)
            else:
                text = job(asked.backend, count, each, link)
        except RuntimeError as error:
            failed, text = failed + 1, f"FAILED: {error}"
        sys.stdout.write(f"{asked.backend}, {name}: {text}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
