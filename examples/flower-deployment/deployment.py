"""A SuperLink and SuperNodes on this machine, over TLS and with a key for each node.

Hides: certificates, keys, ports, processes and Flower's configuration. Promises: everything that it
starts is ended, and everything that it writes is under one folder.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
CONNECTION = "federation"


@dataclass
class Deployment:
    """A federation under one folder; nodes: their names."""

    folder: Path
    nodes: Sequence[str]
    port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = self.port or free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_certificate(self.folder / "server.pem", self.folder / "server.key")
        for name in self.nodes:
            write_key(self.folder / name)
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{HOST}:{self.port}"\nroot-certificates = "{self.folder}/server.pem"\n'
        )
        self.environment = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        """Start the server, let the nodes in, and start them."""
        self.start_server()
        for name in self.nodes:
            self.command("supernode", "register", str(self.folder / f"{name}.pub"), CONNECTION)
        for place, name in enumerate(self.nodes):
            self.start_node(name, place)

    def start_server(self) -> None:
        certificate = self.folder / "server.pem"
        self.spawn(
            "server",
            f"flower-superlink --host {HOST} --port {self.port} --enable-supernode-auth "
            f"--ssl-ca-certfile {certificate} --ssl-certfile {certificate} "
            f"--ssl-keyfile {self.folder}/server.key --database {self.folder}/state.db",
        )
        self.wait_for_server()

    def start_node(self, name: str, place: int) -> None:
        self.spawn(
            name,
            f"flower-supernode --superlink {HOST}:{self.port} --port {free_port()} "
            f"--root-certificates {self.folder}/server.pem "
            f"--auth-supernode-private-key {self.folder}/{name} "
            f"--node-config 'name=\"{name}\" partition-id={place}'",
        )

    def spawn(self, name: str, command: str) -> None:
        """Start a process of its own group, so that all it starts can be ended with it."""
        program, *arguments = shlex.split(command)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / program), *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """SIGKILL to a process and all that it started."""
        process = self.processes.pop(name)
        for group in [process.pid, *children(process.pid)]:
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        process.wait(timeout=30)

    def wait_for_server(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.processes["server"].poll() is not None:
                raise RuntimeError(f"the SuperLink ended:\n{self.tail('server')}")
            try:
                socket.create_connection((HOST, self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError(f"no SuperLink after {seconds:g} seconds:\n{self.tail('server')}")

    def command(self, *arguments: str) -> str:
        """Run `flwr` and return what it prints."""
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, app: Path, **settings: object) -> str:
        """Start a run; settings: of the app's configuration. Returns its number."""
        told = " ".join(f"nafi.{name}={json.dumps(value)}" for name, value in settings.items())
        options = ["--run-config", told] if told else []
        found = self.command("run", str(app), CONNECTION, "--format", "json", *options)
        return str(json.loads(found)["run-id"])

    def status(self, run: str) -> str:
        found = json.loads(self.command("ls", "--run-id", run, "--format", "json"))
        return str(found["runs"][0]["status"])

    def wait(
        self, run: str, seconds: float, result: Path, watch: Callable[[], None] = lambda: None
    ) -> str:
        """Wait until a run has ended; returns its status, as in finished:completed.

        result: a file that the run writes in the end. To ask Flower takes a process and a second
            of its time, so it is asked when the file is there, and else every twenty seconds.
        watch: called twice a second
        """
        begun = asked = time.monotonic()
        while (now := time.monotonic()) < begun + seconds:
            watch()
            if result.exists() or now > asked + 20:
                asked, status = now, self.status(run)
                if status.startswith("finished"):
                    return status
            time.sleep(0.5)
        raise TimeoutError(f"run {run} took more than {seconds:g} seconds:\n{self.tail('server')}")

    def tail(self, name: str, lines: int = 30) -> str:
        """The last lines of a process's log."""
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


@contextmanager
def deployed(folder: Path, nodes: Sequence[str]) -> Iterator[Deployment]:
    """A federation that is up; at the end all its processes are gone."""
    found = Deployment(folder, nodes)
    try:
        found.start()
        yield found
    finally:
        for name in list(found.processes):
            with suppress(subprocess.TimeoutExpired):  # the others are to be ended, too
                found.kill(name)


def children(parent: int) -> list[int]:
    """The process groups that a process started, and those that they did; Linux only."""
    pairs = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            # After the name in brackets: state, parent, process group.
            _, ppid, group, *_ = status.read_text().rpartition(")")[2].split()
            pairs.append((int(status.parent.name), int(ppid), int(group)))
    found: list[int] = []
    waiting = [parent]
    while waiting:
        above = waiting.pop()
        below = [(pid, group) for pid, ppid, group in pairs if ppid == above]
        found += [group for _, group in below]
        waiting += [pid for pid, _ in below]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def write_certificate(certificate: Path, key: Path) -> None:
    """A certificate that signs itself, for this machine."""
    private = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "federation")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ip_address(HOST))]
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=30))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    write_private(key, private, serialization.PrivateFormat.PKCS8)
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))


def write_key(path: Path) -> None:
    """A node's key pair, as ssh-keygen writes it."""
    private = ec.generate_private_key(ec.SECP384R1())
    write_private(path, private, serialization.PrivateFormat.OpenSSH)
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_name(f"{path.name}.pub").write_bytes(public)


def write_private(
    path: Path, key: ec.EllipticCurvePrivateKey, layout: serialization.PrivateFormat
) -> None:
    """A private key that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, layout, serialization.NoEncryption())
    )
