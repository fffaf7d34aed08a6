"""Containers on this machine, started by runc: each has an address, limits and a disk of its own.

    with Network() as network:
        container = Container(spec, unpacked(folder), network, temporary)
        container.run("ray", "status")
        container.kill()

Debian's packages: runc iproute2 iptables tini; it needs root. All of it ends with the process.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ceph import end_with_parent
from image import checked
from patience import PATIENCE_S

COMMANDS = ("runc", "ip", "iptables", "nsenter", "tini-static")
INIT = "/usr/bin/tini-static"
MEMORY = Path("/sys/fs/cgroup/memory/rayapp")
ULIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "stack": resource.RLIMIT_STACK,
}


def missing() -> list[str]:
    """Return the commands that this machine lacks."""
    return [command for command in COMMANDS if shutil.which(command) is None]


@dataclass(frozen=True)
class Spec:
    """What a platform is told of a container."""

    name: str
    command: list[str]
    environment: dict[str, str]
    memory_mib: int
    shared_memory_mib: int
    stop_s: int
    """Seconds from SIGTERM to SIGKILL."""
    health: list[list[str]]
    """Commands that all succeed where it is healthy."""
    volumes: tuple[str, ...] = ()
    """Folders with a disk of their own, which start as the image has them."""
    ulimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    init: bool = False
    """Whether its first process is one that passes on signals and buries the dead."""
    before: list[str] = field(default_factory=list)
    """A command that has to succeed before it starts, in a container of its own."""


class Network:
    """A switch, and this machine on it, which has the first address."""

    def __init__(self) -> None:
        self.switch = f"rayapp-{os.getpid()}"
        self.subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 256}"
        self.address = f"{self.subnet}.1"
        self._count = 1
        self._link, self._spaces = f"ra{os.getpid()}", [self.switch]

    def __enter__(self) -> Network:
        self._ip("netns", "add", self.switch)
        self._inside(self.switch, "link", "add", "bridge", "type", "bridge")
        self._inside(self.switch, "link", "set", "bridge", "up")
        self._plug(self._link)
        self._ip("address", "add", f"{self.address}/24", "dev", self._link)
        self._ip("link", "set", self._link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for space in self._spaces:
            self._ip("netns", "delete", space)

    def join(self) -> tuple[str, str]:
        """Return the name of a new network namespace on the switch, and its address."""
        self._count += 1
        space, address = f"{self.switch}-{self._count}", f"{self.subnet}.{self._count}"
        link = f"{self._link}n{self._count}"
        self._ip("netns", "add", space)
        self._spaces.append(space)
        self._plug(link)
        self._ip("link", "set", link, "netns", space, "name", "eth0")
        self._inside(space, "address", "add", f"{address}/24", "dev", "eth0")
        for each in ("lo", "eth0"):
            self._inside(space, "link", "set", each, "up")
        self._inside(space, "route", "add", "default", "via", self.address)
        return space, address

    def set(self, space: str, state: str) -> None:
        """Unplug a container (down): nobody hears from it, as if its cable were cut; or plug it."""
        number = space.rpartition("-")[2]
        self._inside(self.switch, "link", "set", f"s{self._link}n{number}", state)

    def _plug(self, link: str) -> None:
        """Make a cable: one end here, the other in the switch under a name with an s before it."""
        other = ("type", "veth", "peer", "name", f"s{link}", "netns", self.switch)
        self._ip("link", "add", link, *other)
        self._inside(self.switch, "link", "set", f"s{link}", "master", "bridge", "up")

    def _inside(self, space: str, *arguments: str) -> None:
        self._ip("-n", space, *arguments)

    @staticmethod
    def _ip(*arguments: str) -> None:
        checked(["ip", *arguments])


class Container:
    """A running container; `image` is a folder as `image.unpacked` returns it."""

    def __init__(
        self,
        spec: Spec,
        image: Path,
        network: Network,
        hosts: Path,
        disk_mib: int | None = None,
    ) -> None:
        """Start it; `hosts` is its /etc/hosts, in which it writes itself down as platforms do.

        Its disk is as large as asked, or unlimited.
        """
        self.spec, self._image, self._hosts = spec, image, hosts
        self.network, (self.space, self.address) = network, network.join()
        self.id, self.name = self.space, self.address.replace(".", "-")
        with hosts.open("a") as lines:  # else gloo takes the loopback address for its own
            lines.write(f"{self.address} {self.name}\n")
        self.folder = Path(tempfile.mkdtemp(prefix=f"{spec.name}-"))
        self.log = self.folder / "log"
        # Nobody listens there, so that what is not in /etc/hosts is refused at once.
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        self._size = "" if disk_mib is None else f"-o size={disk_mib}m"
        if spec.before:
            before = self._start(f"{self.id}-before", spec.before)
            assert before.wait(PATIENCE_S) == 0, self.said()
        command = [*(["/init", "--"] if spec.init else []), *spec.command]
        self.process = self._start(self.id, command)

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def becomes_healthy(self) -> bool:
        """Wait until it is healthy, and `ray start` done; say no if it ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not ("Ray runtime started" in self.log.read_text() and self.healthy()):
            assert time.monotonic() < deadline, self.said()
            if self.process.poll() is not None:
                return False
            time.sleep(0.5)
        return True

    def healthy(self) -> bool:
        """Run the health checks."""
        checks = [[word.format(address=self.address) for word in each] for each in self.spec.health]
        return all(self._runc("exec", self.id, *check).returncode == 0 for check in checks)

    def run(self, *command: str) -> str:
        """Return what a command in the container prints."""
        done = self._runc("exec", self.id, *command)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def popen(self, output: IO[str], *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the container; it ends with it."""
        whole = ["runc", "--root", str(self.folder / "runc"), "exec", self.id, *command]
        return subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def outside(self, *command: str) -> list[str]:
        """Return a command that runs on this machine and has the container's loopback.

        That is where the platforms' port forwarding ends.
        """
        return ["nsenter", f"--net=/run/netns/{self.space}", *command]

    def kill(self) -> None:
        """SIGKILL all of its processes; its host lives on."""
        self._runc("kill", self.id, "KILL")
        self.process.wait(PATIENCE_S)

    def lose(self) -> None:
        """End it as a host's loss of power does: nobody is told."""
        self.cut()
        self.kill()

    def stop(self) -> float:
        """SIGTERM, then SIGKILL once its time is over; return the seconds that it took."""
        begun = time.monotonic()
        self._runc("kill", self.id, "TERM")
        try:
            self.process.wait(self.spec.stop_s)
        except subprocess.TimeoutExpired:
            self.kill()
        return time.monotonic() - begun

    def cut(self) -> None:
        """Pull its cable: it lives on, and nothing reaches it or leaves it."""
        self.network.set(self.space, "down")

    def plug(self) -> None:
        """Put its cable back."""
        self.network.set(self.space, "up")

    def drop(self, share: float) -> None:
        """Let a share of the packets that come to it be lost."""
        random = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        checked(
            ["ip", "netns", "exec", self.space, "iptables", "-A", "INPUT", *random, "-j", "DROP"]
        )

    def exhaust_memory(self, room_mib: int = 100) -> None:
        """Take more memory than its limit has, in a process beside its own.

        The limit is first lowered to what is in use and some room, so that little has to be taken.
        The kernel ends a worker of Ray, which asks to be ended first (oom_score_adj 1000).
        """
        group = MEMORY / self.id
        in_use = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(in_use + room_mib * 2**20))

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        code = f"import time; kept = b'x' * {2 * room_mib * 2**20}; time.sleep(5)"
        subprocess.run([sys.executable, "-c", code], preexec_fn=join, check=True)

    def fill_disk(self) -> None:
        """Write to its disk until it is full."""
        self._runc("exec", self.id, "sh", "-c", "cat /dev/zero > /tmp/filler")

    def end(self) -> None:
        """Kill it, unless it has ended, and delete its disk."""
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """Run a command on the container's disk, mounted where only runc sees it."""
        bundle = self.folder / name
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._config(bundle, command)))
        (bundle / "root").mkdir()
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)
        layers = f"lowerdir={self._image / 'files'},upperdir={disk}/upper,workdir={disk}/work"
        lines = [
            f"mount -t tmpfs {self._size} disk {disk}" if self._size else "true",
            f"mkdir -p {disk}/upper {disk}/work",
            f"mount -t overlay overlay -o {layers} {bundle}/root",
        ]
        for number, path in enumerate(self.spec.volumes):
            lines.append(f"test -d {disk}/{number} || cp -a {bundle}/root{path} {disk}/{number}")
        lines.append(f"exec runc --root {self.folder}/runc run --bundle {bundle} {name}")
        with self.log.open("ab") as output:
            return subprocess.Popen(
                ["unshare", "--mount", "sh", "-ec", "\n".join(lines)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # which runc passes on
            )

    def _runc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["runc", "--root", str(self.folder / "runc"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _config(self, bundle: Path, command: list[str]) -> dict[str, Any]:
        """Return runc's configuration, as the OCI's specification has it."""
        spec, image = self.spec, json.loads((self._image / "config.json").read_text())
        environment = {**dict(one.split("=", 1) for one in image["Env"]), **spec.environment}
        user = int(image["User"])
        process = {
            "user": {"uid": user, "gid": user},
            "args": command,
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": image["WorkingDir"],
            "rlimits": [
                {"type": f"RLIMIT_{name.upper()}", **allowed(name, *values)}
                for name, values in spec.ulimits.items()
            ],
            "noNewPrivileges": True,
        }
        kinds = ("pid", "ipc", "uts", "mount")
        return {
            "ociVersion": "1.0.2",
            "process": process,
            "root": {"path": str(bundle / "root")},
            "hostname": self.name,
            "mounts": self._mounts(),
            "linux": {
                "cgroupsPath": f"/rayapp/{bundle.name}",
                "resources": {"memory": {"limit": spec.memory_mib * 2**20}},
                "namespaces": [
                    *({"type": kind} for kind in kinds),
                    {"type": "network", "path": f"/run/netns/{self.space}"},
                ],
            },
        }

    def _mounts(self) -> list[dict[str, Any]]:
        shared = f"size={self.spec.shared_memory_mib}m"
        mounts = [
            mount("proc", "/proc"),
            mount("tmpfs", "/dev", "nosuid", "mode=755"),
            mount("devpts", "/dev/pts", "newinstance", "ptmxmode=0666", "mode=0620"),
            mount("tmpfs", "/dev/shm", "nosuid", "nodev", "mode=1777", shared),
            mount("sysfs", "/sys", "nosuid", "noexec", "nodev", "ro"),
            mount("cgroup", "/sys/fs/cgroup", "nosuid", "noexec", "nodev", "ro"),
            bind(self._hosts, "/etc/hosts"),
            bind(self.folder / "resolv.conf", "/etc/resolv.conf"),
            bind(Path(INIT), "/init"),
        ]
        disk = self.folder / "disk"
        return mounts + [
            bind(disk / str(n), path, "rw") for n, path in enumerate(self.spec.volumes)
        ]


def mount(kind: str, path: str, *options: str) -> dict[str, Any]:
    return {"type": kind, "source": kind, "destination": path, "options": list(options)}


def bind(source: Path, path: str, mode: str = "ro") -> dict[str, Any]:
    return {"source": str(source), "destination": path, "options": ["rbind", mode]}


def allowed(name: str, soft: int, hard: int) -> dict[str, int]:
    """Return a limit as asked, or the most that this machine allows where that is less."""
    most = resource.getrlimit(ULIMITS[name])[1]
    soft, hard = (2**64 - 1 if value < 0 else value for value in (soft, hard))
    most = 2**64 - 1 if most < 0 else most
    return {"soft": min(soft, most), "hard": min(hard, most)}
