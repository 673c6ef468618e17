"""`status --url` on the text that SGLang's metrics endpoint really serves."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from inkling_mtp_staging.cli import main
from inkling_mtp_staging.metrics import COUNTER, steps_in

WHY = 'batch of 9 fits no "captured" graph, a\\b\nin {2} lines'


def exposition(counts: dict[tuple[str, str, str], int]) -> str:
    registry = CollectorRegistry()
    Gauge("sglang:num_running_reqs", "Running.", ["tp_rank"], registry=registry).labels(
        "0"
    ).set(3)
    steps = Counter(
        COUNTER, "Steps.", ["tp_rank", "fence", "reason"], registry=registry
    )
    near = Counter(f"{COUNTER[:-6]}_other_total", "Others.", registry=registry)
    near.inc(1000)
    for labels, count in counts.items():
        steps.labels(*labels).inc(count)
    return generate_latest(registry).decode()


COUNTED = exposition(
    {
        ("0", "target", ""): 900,
        ("1", "target", ""): 1_234_567_890,
        ("0", "draft", WHY): 90,
        ("0", "coarse", "eager target"): 10,
        ("1", "draft", WHY): 5,
    }
)


@pytest.fixture
def server():
    """Serve what the test puts into `answer`: a status and a text, or a redirect."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            status, text = self.server.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answer = [], (200, COUNTED)
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_table(server, capsys):
    assert main(["status", "--url", server.url]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert server.asked == ["/metrics"]
    for part in (
        "all 1234568895 100.0%",
        "staged before verify 1234568790 100.0%",
        "fence target 1234568790",
        "fence draft 95",
        "fence coarse 10",
        "not staged: eager target 10 0.0%",
        "not staged: batch of 9 fits no",
    ):
        assert part in out


def test_json(server, capsys):
    assert main(["status", "--json", "--url", f"{server.url}/"]) == 0
    assert server.asked == ["/metrics"]
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "url": f"{server.url}/",
        "steps": 1_234_568_895,
        "staged": 1_234_568_790,
        "share_staged": found["staged"] / found["steps"],
        "fences": {"target": 1_234_568_790, "draft": 95, "coarse": 10},
        "reasons": {WHY: 95, "eager target": 10},
    }


def test_no_step_staged(server, capsys):
    server.answer = 200, exposition({("0", "draft", "eager target"): 7})
    assert main(["status", "--url", server.url]) == 1
    assert "staged before verify 0 0.0%" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "answer",
    [(200, exposition({})), (200, ""), (404, "Not Found"), (200, "<html>x</html>")],
)
@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_no_counter(server, capsys, answer, json_option):
    server.answer = answer
    assert main(["status", "--url", server.url, *json_option]) == 1
    out = capsys.readouterr().out
    for part in ("unpatched", "no decode step yet", "without --enable-metrics"):
        assert part in " ".join(out.split())
    if json_option:
        assert json.loads(out)["steps"] == 0


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:CLOSED",
        "http://127.0.0.1:port",
        "http://127.0.0.1:99999",
        "http://no.such.host.invalid",
        "http://[::1",
        "http://",
        "localhost:30000",
        "file:///etc",
        "",
        "http://a b\n/",
        "http://" + "x" * 70 + ".invalid",
    ],
)
def test_no_server_is_one_line(capsys, url):
    # Chosen here and not in the list: every worker must collect the same names.
    url = url.replace("CLOSED", str(closed_port()))
    assert main(["status", "--url", url]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)


def test_files_are_not_read(tmp_path, capsys):
    (tmp_path / "metrics").write_text(COUNTED)
    assert main(["status", "--url", f"file://{tmp_path}"]) == 2
    assert "--url takes http://host:port" in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 500, 503])
def test_refusing_server_is_one_line(server, capsys, status):
    server.answer = status, "no\n" * 9
    assert main(["status", "--url", server.url]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"status {status}" in error


@pytest.mark.parametrize("answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_other_protocols_are_one_line(capsys, answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(answer)
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["status", "--url", url]) in (1, 2)
        out, error = capsys.readouterr()
        assert (out + error).count("\n") == 1


def test_silent_server_times_out(capsys, monkeypatch):
    monkeypatch.setattr("inkling_mtp_staging.metrics._TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["status", "--url", url]) == 2
    assert "timed out" in capsys.readouterr().err


def test_a_proxy_is_not_asked(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert main(["status", "--url", server.url]) == 0


def test_no_sglang_is_needed(server, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["status", "--url", server.url]) == 0


def test_url_and_root_exclude_each_other(server, tmp_path, capsys):
    arguments = ["status", "--url", server.url, "--root", str(tmp_path)]
    assert main(arguments) == 2
    assert "give one" in capsys.readouterr().err


def test_timestamps_and_big_numbers():
    steps = steps_in(
        f'{COUNTER}{{fence="target",reason=""}} 1.5e+06 1700000000000\n'
        f"{COUNTER} 2\n"
        f'{COUNTER}{{fence="draft",reason="x"}} NaN\n'
    )
    assert (steps.total, steps.staged) == (1_500_002, 1_500_002)
