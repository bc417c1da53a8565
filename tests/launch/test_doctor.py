"""`tfdist-ext doctor` says what is, what is wrong, and the fix."""

import json
import socket

import pytest

from tfdist_ext import builds
from tfdist_ext.cluster import Task, addresses
from tfdist_ext.launch import connection, doctor

LOCAL = {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"], "chief": ["127.0.0.1:2221"]}
REMOTE = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}


@pytest.fixture
def visit(monkeypatch, capsys):
    def call(config, *flags, secret=""):
        monkeypatch.setenv("TFDIST_EXT_CLUSTER_SECRET", secret)
        if config is None:
            monkeypatch.delenv("TF_CONFIG", raising=False)
        else:
            monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))
        code = doctor.main(flags)
        return code, capsys.readouterr().out

    return call


def config(cluster, type_="worker", index=0):
    return {"cluster": cluster, "task": {"type": type_, "index": index}}


def test_unset_is_one_process_with_an_example(visit):
    code, text = visit(None)
    assert code == 0
    assert "TF_CONFIG is not set." in text and "rank 0 of 1" in text and '"cluster"' in text


def test_what_this_task_is(visit):
    code, text = visit(config(LOCAL))
    assert code == 0
    assert "worker:0: global rank 1 of 3, not the chief" in text
    assert "It will listen at 127.0.0.1:2222" in text
    assert "talk to chief:0 at 127.0.0.1:2221, worker:1 at 127.0.0.1:2223." in text
    assert "loopback" in text and "All is well." in text
    assert "Other users of this one can" in text
    assert "no other user of this one can" in visit(config(LOCAL), secret="correct horse battery")[1]


@pytest.mark.parametrize(
    ("cluster", "type_", "part"),
    [
        ({**LOCAL, "ps": ["127.0.0.1:9"]}, "ps", "ps:0: it serves variables"),
        (LOCAL, "evaluator", "evaluator:0: it runs alone"),
        (LOCAL, "chief", "chief:0: global rank 0 of 3, chief."),
    ],
)
def test_other_tasks(visit, cluster, type_, part):
    code, text = visit(config(cluster, type_))
    assert code == 0 and part in text


def test_beyond_loopback_a_secret_is_needed(visit):
    code, text = visit(config(REMOTE))
    assert code == 1 and "PROBLEM: The address 10.0.0.1:2222" in text and "openssl rand" in text
    assert visit(config(REMOTE), secret="correct horse battery")[0] == 0
    code, text = visit(config({**REMOTE, "ps": ["10.0.0.3:1"]}))
    assert code == 0 and "trusted network" in text


def test_h17_a_short_secret_is_a_problem(visit):
    code, text = visit(config(REMOTE), secret="s")
    assert code == 1 and "has 1 characters" in text and "openssl rand -hex 32" in text


def test_M11_the_problem_and_its_fix_are_told(visit):
    code, text = visit(config(REMOTE, "chief"))
    assert code == 1 and "PROBLEM: This task is chief:0" in text and "All is well" not in text


def test_the_flag_beats_the_environment_as_text_or_file(visit, tmp_path):
    text = json.dumps(config(LOCAL, index=1))
    path = tmp_path / "tf_config.json"
    path.write_text(text)
    for argument in (text, str(path)):
        assert "worker:1: global rank 2 of 3" in visit("broken", "--tf-config", argument)[1]
    code, text = visit(None, "--tf-config", str(tmp_path / "none.json"))
    assert code == 1 and "none.json" in text


def test_connect_tells_which_addresses_answer(visit):
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # Bound but not listening: it refuses.
        there, refusing = (f"127.0.0.1:{held.getsockname()[1]}" for held in (listening, silent))
        code, text = visit(config({"worker": ["127.0.0.1:1", there]}), "--connect")
        assert code == 0 and f"{there}  answers" in text
        code, text = visit(config({"worker": ["127.0.0.1:1", there, refusing]}), "--connect")
        assert code == 1
        assert f"PROBLEM: worker:2 at {refusing}: refused. Likely" in text


def test_outcomes_have_names(monkeypatch):
    errors = {
        "a": socket.gaierror(),
        "b": TimeoutError(),
        "c": ConnectionRefusedError(),
        "d": OSError(113, "No route to host"),
    }

    def fail(address, timeout):
        assert timeout == 0.5
        raise errors[address[0]]

    monkeypatch.setattr(connection.socket, "create_connection", fail)
    members = [(Task("worker", index), f"{host}:1") for index, host in enumerate("abcd")]
    outcomes = [probe.outcome for probe in connection.probe_all(members, timeout_seconds=0.5)]
    assert outcomes == ["name unknown", "timeout", "refused", "No route to host"]


def test_h16_all_faults_are_named(visit):
    cluster = {"worker": ["10.0.0.1", "10.0.0.2:2222", "10.0.0.2:2222", 7], "servers": ["10.0.0.3:1"]}
    code, text = visit(config(cluster, "worker", 9))
    problems = [line for line in text.splitlines() if line.startswith("PROBLEM: ")]
    assert code == 1 and len(problems) == 5
    for part in (
        "unknown job 'servers'. Did you mean 'ps'?",
        "Wrong address of worker:0",
        "worker:1 and worker:2 have the same address",
        "The address of worker:3 must be a text",
        "This task is worker:9, but the cluster has worker (4 tasks: 0, 1, 2, 3)",
    ):
        assert sum(part in problem for problem in problems) == 1, part


def test_g8_a_ps_on_loopback_is_said_to_listen_everywhere_with_the_fix(visit):
    code, text = visit(config({**LOCAL, "ps": ["127.0.0.1:9"]}, "ps"))
    assert code == 0 and "no other machine can join" not in text
    assert "listen on every interface" in text and "firewall" in text
    assert "every interface" not in visit(config(LOCAL))[1]


def test_g8_a_server_warns_once_at_its_start(monkeypatch):
    said = []
    monkeypatch.setattr(addresses.logging, "warning", lambda *arguments: said.append(arguments[-1]))
    addresses.warn_that_servers_listen_everywhere.cache_clear()
    for _ in range(2):
        addresses.warn_that_servers_listen_everywhere()
    assert said == [addresses.SERVERS_LISTEN_EVERYWHERE]


def install(folder, name, version):
    """Makes what pip leaves of a package that has the module `tensorflow`."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "top_level.txt").write_text("tensorflow\n")


@pytest.mark.parametrize("other", ["tensorflow-tpu", "tensorflow-cpu", "tf-nightly", "a-vendors-build"])
def test_g13_two_builds_of_tensorflow_are_named(visit, monkeypatch, tmp_path, other):
    (own,) = builds.installed_builds()
    if own == other:
        pytest.skip("that is the build here")
    install(tmp_path, other, "2.20.0")
    monkeypatch.syspath_prepend(tmp_path)
    code, text = visit(config(LOCAL))
    assert code == 1 and "2 builds of TensorFlow" in text and f"{other} 2.20.0" in text
    assert f"pip uninstall -y {' '.join(sorted([own, other]))}" in text


def test_h16_a_fault_of_the_cluster_hides_no_fault_of_the_task(visit):
    code, text = visit(config({"worker": ["10.0.0.1:1", "10.0.0.1:1"]}, "worker", 2))
    assert code == 1 and text.count("PROBLEM: ") == 2
    assert "have the same address" in text and "This task is worker:2" in text
