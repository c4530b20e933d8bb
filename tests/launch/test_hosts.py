"""Ranks on several hosts: network namespaces of this machine, each with a name and a /dev/shm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "jobs" / "hosts.py"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
IP = "/usr/sbin/ip"
TIMEOUT = 60
ENTER = f"""#!/bin/sh
# In place of ssh: enter.sh [FLAGS] ADDRESS COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=zmp${{1##*.}}
shift
exec {IP} netns exec $host unshare --uts --mount \\
    sh -c "hostname $host; mount -t tmpfs tmpfs /dev/shm; exec $*"
"""

pytestmark = pytest.mark.timeout(2 * TIMEOUT)


def ip(*words, check=True):
    return subprocess.run([IP, *words], capture_output=True, text=True, check=check)


@pytest.fixture(scope="module")
def enter(tmp_path_factory):
    """Three hosts 10.77.0.1 to 3 on one bridge; the script that runs a command on one of them."""
    if os.geteuid() != 0 or not Path(IP).exists():
        pytest.skip("network namespaces need root, and ip")
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False)
    if "HYDRA" not in version.stdout:
        pytest.skip("written for MPICH's launcher")
    hosts = ["zmp1", "zmp2", "zmp3"]
    for host in ["zmp0", *hosts]:  # of a test that was killed
        ip("netns", "delete", host, check=False)
    try:
        try:
            ip("netns", "add", "zmp0")
            ip("-n", "zmp0", "link", "add", "bridge", "type", "bridge")
            ip("-n", "zmp0", "link", "set", "bridge", "up")
            for i, host in enumerate(hosts, 1):
                ip("netns", "add", host)
                ip("-n", host, "link", "add", "eth", "type", "veth", "peer", f"port{i}",
                   "netns", "zmp0")  # fmt: skip
                ip("-n", "zmp0", "link", "set", f"port{i}", "master", "bridge", "up")
                ip("-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", "eth")
                ip("-n", host, "link", "set", "eth", "up")
                ip("-n", host, "link", "set", "lo", "up")
            script = tmp_path_factory.mktemp("hosts") / "enter.sh"
            script.write_text(ENTER)
            script.chmod(0o755)
            probe = [script, "10.77.0.3", "true"]
            subprocess.run(probe, capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield script
    finally:
        for host in ["zmp0", *hosts]:
            ip("netns", "delete", host, check=False)


def run(*command):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    }
    ended = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1, 1)])
def test_hosts_have_the_bits_of_nodes_that_are_played_on_one(enter, ranks):
    hosts = ",".join(f"10.77.0.{i}:{count}" for i, count in enumerate(ranks, 1))
    size = sum(ranks)
    launch = (MPIEXEC, "-launcher", "ssh", "-launcher-exec", enter, "-iface", "eth")
    found = run(enter, "10.77.0.1", *launch, "-hosts", hosts, "-n", size, sys.executable, JOB)
    nodes = [node for node, count in enumerate(ranks) for _ in range(count)]
    assert found["places"] == [[f"zmp{node + 1}", len(ranks)] for node in nodes]
    assert found["auto"] == "shared"

    played = run(MPIEXEC, "-n", size, sys.executable, JOB, ",".join(map(str, nodes)))
    assert len({name for name, _ in played["places"]}) == 1
    for way in ("shared", "ordered"):
        assert len(set(found[way])) == 1  # stages 1 and 3
        assert found[way] == played[way]
    assert found["crossed"] == played["crossed"]
    assert all(found["crossed"])
