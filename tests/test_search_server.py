"""The retrieval server and its client, over HTTP on localhost.

    python -m pytest tests/test_search_server.py

Our server runs in a process of its own. A fake server in this process simulates other servers and
their failures.
"""

import base64
import gzip
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from email.utils import formatdate
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import uvicorn

from paw_min.envs.search.env import SearchPool, information
from paw_min.envs.search.questions import Question
from paw_min.retrieval import client as search_client
from paw_min.retrieval import open_retriever
from paw_min.retrieval import server as search_server
from paw_min.retrieval.client import RetrieverError, SearchClient
from tests.http_server import Server
from tests.pools import reset, step
from tests.retrieval import (
    TEXTS,
    make_encoder,
    serving,
    start_server,
    wait_for,
    write_corpus,
)

ROOT = Path(__file__).parent.parent
QUERIES = ["Who wrote Hamlet?", "cities of Finland", "zzz", "origin of names"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture
def serving_here(monkeypatch):
    """Start our server in this process: uvicorn's Server and the URL."""
    servers = []  # the one server of a test, as soon as main has made it
    threads = []

    class Server(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    def start(retriever):
        # uvloop, which uvicorn prefers where it is installed, treats sockets differently.
        monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, loop="asyncio"))
        monkeypatch.setattr(uvicorn, "Server", Server)
        monkeypatch.setattr(search_server, "load", lambda args: retriever)
        arguments = ["--corpus", "", "--port", "0"]
        # A daemon: a thread that a failed test leaves behind would keep pytest from exiting.
        threads.append(threading.Thread(target=search_server.main, args=[arguments], daemon=True))
        threads[0].start()
        while not servers or not servers[0].started:
            assert threads[0].is_alive()
            time.sleep(0.01)
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        return servers[0], f"http://127.0.0.1:{port}/retrieve"

    yield start
    servers[0].should_exit = True
    threads[0].join(10)
    assert not threads[0].is_alive()


class SlowRetriever:
    """A retriever that records its calls and takes 50 ms for each, the first 0.5 s."""

    corpus = ()

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append(len(queries))
        time.sleep(0.05 if len(self.calls) > 1 else 0.5)
        return [[] for _ in queries]


@pytest.fixture(scope="module")
def server(corpus):
    with serving("--corpus", corpus) as (url, _):
        yield url


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(search_client, "FIRST_WAIT", 0.02)


# ---- the fake server ----


def hits_for(query, k) -> list[dict]:
    return [{"document": {"id": str(n), "contents": f"{query} {n}"}, "score": 1 / (n + 1)}
            for n in range(k)]  # fmt: skip


class Fake(Server):
    """A server with one protocol."""

    def __init__(self, key="queries"):
        super().__init__()
        self.key = key

    def answer(self, handler, request):
        if self.key not in request or handler.path != "/retrieve":
            handler.reply(422, {"detail": [{"msg": "Field required"}]})
        else:
            queries = request[self.key]
            queries = [queries] if self.key == "query" else queries
            handler.reply(200, {"result": [hits_for(q, request["topk"]) for q in queries]})


def answers(status: int, content="", **headers):
    """The same answer to every request."""
    return lambda handler, request: handler.reply(status, content, **headers)


def sleeps(seconds: float):
    return lambda handler, request: time.sleep(seconds)


@pytest.fixture
def fake():
    fakes = []

    def make(key="queries") -> Fake:
        fakes.append(Fake(key))
        return fakes[-1]

    yield make
    for one in fakes:
        one.close()


def one_sentence(raised) -> str:
    text = str(raised.value)
    assert "\n" not in text and ": " in text and text.endswith("."), text
    return text


# ---- our server ----


def test_both_protocols_and_bare_documents(server, corpus):
    expected = open_retriever(corpus).search(QUERIES, 2)

    def ask(**request):
        answer = requests.post(server, json=request, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    assert ask(queries=QUERIES, topk=2, return_scores=True) == expected
    for query, hits in zip(QUERIES, expected):
        assert ask(query=query, topk=2, return_scores=True) == [hits]
        assert ask(query=query, topk=2) == [[hit["document"] for hit in hits]]
    assert ask(queries=QUERIES[:1], return_scores=False)[0][0] == {"id": "0", "contents": TEXTS[0]}
    many = "Hamlet, Finland, water, towers"
    assert [len(ask(query=many, topk=k)[0]) for k in (1, 2, 4, None)] == [1, 2, 4, 3]
    assert ask(queries=[]) == []


@pytest.mark.parametrize("request_", [
    {}, {"query": "a", "queries": ["a"]}, {"query": ["a"]}, {"queries": "a"},
    {"query": "a", "topk": 0}, {"query": "a", "topk": "many"},
])  # fmt: skip
def test_requests_that_are_refused(server, request_):
    answer = requests.post(server, json=request_, timeout=60)
    assert answer.status_code == 422 and answer.json()["detail"]


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("body", [
    '{"query": "a", "topk": NaN}', '{"query": "a", "topk": Infinity}', '{"query": "a", "topk": 1e',
    '{"query": "a", "topk": 1e999}', '{"query": "a", "return_scores": NaN}', '{"query": NaN}', "",
    pytest.param(f'{{"query": {DEEP}}}', id="deep"), '{"query": "\xff"}', "[]", "NaN",
    pytest.param(f'{{"query": {DEEP[:900]}{DEEP[-900:]}}}', id="less deep"),
])  # fmt: skip
def test_damaged_requests_are_refused(server, body):
    answer = requests.post(
        server, body.encode("latin-1"), timeout=60, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (400, 422) and answer.json()["detail"]
    assert len(answer.text) < 1000  # does not repeat the request


def test_a_request_for_too_many_hits_is_refused(server):
    answer = requests.post(server, json={"queries": ["a"] * 21, "topk": 1000}, timeout=60)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("21 queries x topk 1000 exceed 20000 hits: send")
    answer = requests.post(server, json={"queries": ["a"] * 20, "topk": 1000}, timeout=60)
    assert answer.json() == {"result": [[]] * 20}


@pytest.mark.slow
def test_a_large_request_does_not_block_the_others(serving_here):
    retriever = SlowRetriever()
    _, url = serving_here(retriever)
    large = {"queries": ["large"] * 650, "topk": 1}
    thread = threading.Thread(target=requests.post, args=[url], kwargs={"json": large}, daemon=True)
    thread.start()
    while not retriever.calls:
        time.sleep(0.001)
    assert requests.post(url, json={"query": "small"}, timeout=60).json() == {"result": [[]]}
    thread.join()
    assert sorted(retriever.calls) == [1, 10, *[64] * 10]
    assert retriever.calls.index(1) < 4  # 1, unless this process is very slow


def test_a_body_without_end_is_not_read(serving_here, monkeypatch):
    monkeypatch.setattr(search_server, "MAX_BODY", 1000)
    retriever = SlowRetriever()
    _, url = serving_here(retriever)
    headers = {"Content-Type": "application/json"}
    for body in (b'{"query": "' + b"a" * 1000, iter([b'{"query": "', *[b"a" * 100] * 10])):
        answer = requests.post(url, body, headers=headers, timeout=60)
        assert answer.status_code == 413
        assert answer.json()["detail"].startswith("the request has more than 1000 bytes: send")
    assert requests.post(url, json={"query": "a" * 900}, timeout=60).json() == {"result": [[]]}


@pytest.mark.parametrize("key", ["query", "queries"])
def test_a_query_has_a_longest_length(serving_here, key):
    retriever = SlowRetriever()
    _, url = serving_here(retriever)
    text = "a" * search_server.MAX_QUERY
    for query, status in ((text, 200), (text + "a", 422)):
        content = {key: [query] if key == "queries" else query}
        answer = requests.post(url, json=content, timeout=60)
        assert answer.status_code == status and len(answer.text) < 300
    assert "at most 100000 characters" in answer.text and len(retriever.calls) == 1


def test_the_searches_of_clients_that_hung_up_are_dropped(serving_here):
    retriever = SlowRetriever()
    _, url = serving_here(retriever)
    for _ in range(10):
        with pytest.raises(requests.Timeout):
            requests.post(url, json={"query": "lost"}, timeout=(5, 0.03))
    assert requests.post(url, json={"query": "kept"}, timeout=60).json() == {"result": [[]]}
    assert retriever.calls == [1, 1]  # the first was under way


def test_answers_are_sent_without_delay(serving_here):
    """With Nagle's algorithm, each answer arrives 40 ms late."""
    server, url = serving_here(SlowRetriever())
    with requests.Session() as session:
        session.post(url, json={"query": "a"}, timeout=60)
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_health(server):
    answer = requests.get(server.replace("/retrieve", "/health"), timeout=60)
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "passages": 5})


def test_the_client_returns_what_the_retriever_returns(server, corpus):
    client = open_retriever(server)
    assert isinstance(client, SearchClient) and client.protocol == "queries"
    assert client.search(QUERIES, 2) == open_retriever(corpus).search(QUERIES, 2)
    assert client.search([], 2) == []
    plain = SearchClient(server.removesuffix("retrieve"))  # with a slash at the end
    assert plain.search(["Hamlet"], 1)[0][0]["document"] == {"id": "0", "contents": TEXTS[0]}


def test_the_flags_of_a_dense_server(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", ["a b c", "h g", "d e"])
    encoder = make_encoder(tmp_path / "encoder")
    flags = ["--corpus", str(corpus), "--retriever", "dense", "--encoder", encoder]
    (hits,) = search_server.load(search_server.parse_args(flags)).search(["h g"], 2)
    assert [hits] == open_retriever(corpus, encoder).search(["h g"], 2)
    flags += ["--query-prefix", "", "--passage-prefix", ""]
    (hits,) = search_server.load(search_server.parse_args(flags)).search(["h g"], 2)
    assert hits[0]["document"]["id"] == "1" and hits[0]["score"] == pytest.approx(1, abs=1e-4)
    flags += ["--index", str(tmp_path / "none.index")]
    with pytest.raises(FileNotFoundError, match="none.index does not exist"):
        search_server.load(search_server.parse_args(flags))


@pytest.mark.slow
def test_the_port_is_open_while_the_server_loads(tmp_path, caplog):
    corpus = write_corpus(tmp_path / "c.jsonl", [f"word{n} " * 20 for n in range(30_000)])
    process = start_server("--corpus", corpus, "--port", 0)
    try:
        url = wait_for(process, "loading").split()[0].rstrip(":")
        while True:
            try:
                health = requests.get(f"{url}/health", timeout=60)
                break
            except requests.ConnectionError:  # the port is not open yet
                time.sleep(0.01)
        retrieve = requests.post(f"{url}/retrieve", json={"query": "word7"}, timeout=60)
        assert (health.status_code, retrieve.status_code) == (503, 503)
        assert "loading" in health.json()["detail"]
        client = SearchClient(url)  # waits
        assert client.search(["word7"], 1)[0][0]["document"]["id"] == "7"
        assert "HTTP 503: " in caplog.text and "still loading" in caplog.text
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_server_that_cannot_start(tmp_path, server):
    for arguments, sentence in (
        (["--corpus", tmp_path / "none.jsonl", "--port", 0], "none.jsonl does not exist"),
        (["--corpus", write_corpus(tmp_path / "c.jsonl"), "--port", server.split(":")[2][:-9]],
         "cannot be opened"),
        (["--corpus", tmp_path / "c.jsonl", "--port", 99999], "port must be 0-65535"),
    ):  # fmt: skip
        process = start_server(*arguments)
        output, _ = process.communicate(timeout=60)
        error = [line for line in output.splitlines() if line.startswith("error: ")]
        assert process.returncode == 1 and sentence in error[0], output
        assert "Traceback" not in output


@pytest.mark.slow
def test_ctrl_c_ends_the_server_quietly(corpus):
    with serving("--corpus", corpus) as (_, process):
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and not output.strip()


@pytest.mark.slow
def test_ctrl_c_at_the_moment_it_is_ready(corpus):
    """The loading thread has printed "ready" but not ended; it must not undo the signal."""
    program = f"""
import os, signal, sys, time
from paw_min.retrieval import server as search_server

def say(line, **how):
    print(line, **how)
    if line.startswith("ready"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)  # seconds: uvicorn looks every 0.1

search_server.print = say
search_server.main(["--corpus", {str(corpus)!r}, "--port", "0"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, timeout=60, capture_output=True
    )
    assert done.returncode == 0 and "ready after" in done.stdout and not done.stderr


# ---- other servers ----


def test_search_r1_gets_one_batched_request(fake):
    server = fake("queries")
    client = SearchClient(f"{server.url}/retrieve")
    server.bodies.clear()
    assert client.search(QUERIES, 2) == [hits_for(query, 2) for query in QUERIES]
    assert server.bodies == [{"queries": QUERIES, "topk": 2, "return_scores": True}]


def test_verl_agent_gets_one_request_per_query(fake):
    server = fake("query")
    client = SearchClient(server.url)
    server.bodies.clear()
    queries = [f"q{n}" for n in range(70)]  # more than THREADS
    assert client.search(queries, 2) == [hits_for(query, 2) for query in queries]
    assert sorted(r["query"] for r in server.bodies) == sorted(queries)
    assert all(r["topk"] == 2 and r["return_scores"] is True for r in server.bodies)


@pytest.mark.parametrize("protocol", ["queries", "query"])
def test_a_server_that_ignores_topk(fake, protocol):
    server = fake(protocol)
    client = SearchClient(server.url)
    answer = server.answer

    def ten_hits(handler, body):
        answer(handler, body | {"topk": 10})

    server.answer = ten_hits
    assert client.search(["q"], 2) == [hits_for("q", 2)]
    assert SearchClient(server.url).protocol == protocol


def test_documents_without_an_id(fake):
    """Search-R1's BM25 server sends title, text and contents."""
    server = fake()
    document = {"title": "A", "text": "b", "contents": '"A"\nb'}
    server.answer = answers(200, {"result": [[{"document": document, "score": 3}]]})
    assert SearchClient(server.url).search(["q"], 1) == [
        [{"document": {"id": "", "contents": '"A"\nb'}, "score": 3.0}]]  # fmt: skip


# ---- servers that fail ----


def free_port() -> int:
    server = Fake()
    server.close()
    return server.http.server_port


def test_no_server_at_the_start():
    start = time.monotonic()
    with pytest.raises(RetrieverError, match="cannot be reached") as raised:
        SearchClient(f"http://127.0.0.1:{free_port()}")
    assert "connection refused" in one_sentence(raised) and "start it" in str(raised.value)
    assert time.monotonic() - start < 60  # not the whole patience
    with pytest.raises(RetrieverError, match="cannot be reached"):
        SearchClient("http://no.such.host.invalid:8000")


def test_a_server_that_loads_or_is_busy_at_the_start(fake):
    server = fake()
    handler, statuses = server.http.RequestHandlerClass, iter([503, 503, 503, 200])
    handler.do_GET = lambda self: self.reply(503, "still loading")
    with pytest.raises(RetrieverError, match="within 0.2 s .HTTP 503: 'still loading'") as raised:
        SearchClient(server.url, patience=0.2)
    one_sentence(raised)
    handler.do_GET = lambda self: self.reply(next(statuses))
    server.faults.extend([answers(429), answers(503)])
    assert SearchClient(server.url).search(["q"], 1) == [hits_for("q", 1)]
    assert not server.faults


GARBAGE = ["<html>Welcome</html>", "", "[]", "{}", '{"result": 3}', '{"result": [[{"id": "0"}]]}',
           '{"result": [[{"document": {"contents": null}, "score": 1}]]}', '{"result": [{"a": 1}]}',
           '{"result": [[{"document": {"contents": "a"}, "score": "x"}]]}',
           '{"result": [[{"document": "a", "score": 1}]]}', '{"error": "x"}',
           pytest.param('{"result": [[{"document": {"contents": "a"}, "score": %s}]]}' % 10**400,
                        id="large"),
           "<html><title>Bienvenue au caf\udce9",  # a byte that is not UTF-8
           pytest.param(f'{{"result": {DEEP}}}', id="deep"),
           '{"result": [[{"document": {"contents": "\\ud800"}, "score": 1}]]}']  # fmt: skip


@pytest.mark.parametrize("body", GARBAGE)
def test_garbage_instead_of_an_answer(fake, body):
    server = fake()
    client = SearchClient(server.url)
    server.answer = answers(200, body)
    for ask in (lambda: SearchClient(server.url), lambda: client.search(["q"], 1)):
        with pytest.raises(RetrieverError, match="not a retrieval server's") as raised:
            ask()
        assert server.url in one_sentence(raised) and body[:20] in str(raised.value)


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-1e999"])
def test_scores_that_are_not_finite(fake, score):
    server = fake()
    client = SearchClient(server.url)
    body = '{"result": [[{"document": {"contents": "a"}, "score": %s}]]}' % score
    server.answer = answers(200, body)
    with pytest.raises(RetrieverError, match="not a retrieval server's .ValueError: ") as raised:
        client.search(["q"], 1)
    one_sentence(raised)


def test_compression_that_nobody_asked_for(fake):
    """It is not decompressed: a small answer cannot fill the memory."""
    server = fake()
    client = SearchClient(server.url)
    server.answer = answers(200, gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")
    with pytest.raises(RetrieverError, match="not a retrieval server's") as raised:
        client.search(["q"], 1)
    one_sentence(raised)


def test_an_answer_that_is_too_long(fake, monkeypatch):
    server = fake()
    client = SearchClient(server.url)
    monkeypatch.setattr(search_client, "MAX_BYTES", 1000)
    assert len(client.search(["q"], 1)) == 1
    with pytest.raises(RetrieverError, match="has more than 1000 bytes") as raised:
        client.search(["q"], 100)
    one_sentence(raised)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_refused(fake, status):
    server, other = fake(), fake()
    target = other.url.replace("//", "//user:secret@") + "/retrieve"
    server.answer = answers(status, Location=target)
    location = other.url.replace("//", r"//\*\*\*@")
    with pytest.raises(RetrieverError, match=f"redirects to '{location}/retrieve'") as raised:
        SearchClient(server.url)
    assert f"HTTP {status}" in one_sentence(raised) and not other.bodies


@pytest.mark.parametrize("url", [
    "http://127.0.0.1:99999", "http://127.0.0.1:-1", "http://127.0.0.1:port", "http://", "http://:80",
    "http://[::1", "ftp://127.0.0.1", "file:///corpus.jsonl", "http://user:sec/ret@host",
    "HTTP://user:secret@host:99999",
])  # fmt: skip
def test_invalid_addresses(url):
    with pytest.raises(RetrieverError, match="is not the address of a server: give") as raised:
        open_retriever(url)
    assert url.split("@")[-1] in one_sentence(raised) and "sec" not in str(raised.value)


def test_a_host_name_that_cannot_exist():
    with pytest.raises(RetrieverError, match="cannot be used|cannot be reached") as raised:
        open_retriever("http://a..b:80")
    one_sentence(raised)


def test_the_scheme_may_be_in_upper_case(fake):
    client = open_retriever(fake().url.replace("http", "HTTP"))
    assert client.search(["q"], 1) == [hits_for("q", 1)]


@pytest.mark.slow
def test_a_password_is_sent_but_not_shown(fake, caplog):
    caplog.set_level("DEBUG")
    server = fake()
    port = server.http.server_port
    password = f"pw{port}"
    url = server.url.replace("//", f"//me:{password}%C3%A9@")
    client = SearchClient(url, timeout=0.2, patience=0.1)
    assert client.search(["q"], 1) == [hits_for("q", 1)]
    expected = "Basic " + base64.b64encode(f"me:{password}é".encode()).decode()
    assert set(server.keys) == {expected}

    def failure(answer, ask) -> str:
        server.answer = answer
        with pytest.raises(RetrieverError) as raised:
            ask()
        assert f"//***@127.0.0.1:{port}/retrieve" in one_sentence(raised)
        return "".join(traceback.format_exception(raised.value))

    for answer in (answers(401, "who are you?"), answers(500), answers(200, "{}"), sleeps(0.3)):
        for ask in (lambda: client.search(["q"], 1), lambda: SearchClient(url, timeout=0.2)):
            assert password not in failure(answer, ask)
    server.close()
    assert password not in failure(None, lambda: SearchClient(url))
    assert "***" in caplog.text and password not in caplog.text


def test_fewer_answers_than_questions(fake):
    server = fake()
    client = SearchClient(server.url)
    server.answer = answers(200, {"result": [[]]})
    with pytest.raises(RetrieverError, match="answered 1 queries of 2") as raised:
        client.search(["a", "b"], 1)
    one_sentence(raised)


@pytest.mark.parametrize("status, words", [
    (404, "answers HTTP 404 .*nope.*: look at its log"),
    (500, "answers HTTP 500"),
    (422, "takes neither `queries` nor `query`"),
])  # fmt: skip
def test_other_servers_at_the_start(fake, status, words):
    server = fake()
    server.answer = answers(status, {"detail": "nope"})
    with pytest.raises(RetrieverError, match=words) as raised:
        SearchClient(server.url)
    one_sentence(raised)


@pytest.mark.slow
def test_a_slow_server(fake, caplog):
    server = fake()
    server.faults.append(sleeps(1))
    with pytest.raises(RetrieverError, match="no answer within 0.5 s") as raised:
        SearchClient(server.url, timeout=0.5)
    one_sentence(raised)
    client = SearchClient(server.url, timeout=0.5, patience=60)
    server.faults.extend([sleeps(1)] * 2)
    assert client.search(["q"], 1) == [hits_for("q", 1)]  # at the third attempt
    assert [record.getMessage() for record in caplog.records] == [
        f"retrieval server {client.url}: no answer within 0.5 s; next attempt in {wait:g} s"
        for wait in (0.02, 0.04)]  # fmt: skip


def drip(handler, start: bytes) -> None:
    """Send `start`, then a byte every 50 ms."""
    handler.wfile.write(start)
    try:
        for _ in range(100):
            handler.wfile.write(b"x")
            time.sleep(0.05)
    except OSError:  # the client has closed the connection
        pass


@pytest.mark.parametrize("start", [
    b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n",
], ids=["length", "no length", "chunked"])  # fmt: skip
@pytest.mark.slow
def test_an_answer_that_drips(fake, start):
    server = fake()
    client = SearchClient(server.url, timeout=0.3, patience=0.1)
    server.answer = lambda handler, request: drip(handler, start)
    begin = time.monotonic()
    for ask in (lambda: SearchClient(server.url, timeout=0.3), lambda: client.search(["q"], 1)):
        with pytest.raises(RetrieverError, match="no answer within 0.3 s") as raised:
            ask()
        one_sentence(raised)
    assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_each_answer_has_the_whole_timeout(fake):
    """On one connection: the time that an answer took does not count for the next."""
    server = fake()
    client = SearchClient(server.url, timeout=3.0, patience=0)

    def dawdle(handler, request):
        time.sleep(0.8)
        handler.reply(200, {"result": [hits_for("q", 1)]})

    server.answer = dawdle
    for _ in range(4):
        assert client.search(["q"], 1) == [hits_for("q", 1)]


def hang_up(handler, request):
    """Act like a server that is killed in the middle of its answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [[')
    handler.close_connection = True


@pytest.mark.parametrize("failure, word", [
    (answers(500), "HTTP 500"),
    (answers(503, "Service Unavailable"), "HTTP 503: 'Service Unavailable'"),
    (answers(429, "slow down", Retry_After="0"), "HTTP 429: 'slow down'"),
    (answers(408), "HTTP 408"),
    (answers(425), "HTTP 425"),
    (hang_up, "connection lost"),
])  # fmt: skip
@pytest.mark.parametrize("key", ["queries", "query"])
@pytest.mark.slow
def test_temporary_failures_are_retried_for_a_while(fake, failure, word, key):
    server = fake(key)
    client = SearchClient(server.url, patience=1.0)
    server.faults.extend([failure] * 2)
    assert client.search(["q"], 1) == [hits_for("q", 1)]
    server.answer = failure
    start = time.monotonic()
    with pytest.raises(RetrieverError, match="did not come back within 1 s") as raised:
        client.search([f"q{n}" for n in range(50)], 1)
    assert word in one_sentence(raised) and "last checkpoint" in str(raised.value)
    assert time.monotonic() - start < 10  # not a second for each of the 50


def test_a_refusal_in_training_is_not_retried(fake):
    server = fake()
    client = SearchClient(server.url)
    server.answer = answers(400, {"detail": "nope"})
    server.bodies.clear()
    with pytest.raises(RetrieverError, match="HTTP 400"):
        client.search(["q"], 1)
    assert len(server.bodies) == 1


@pytest.fixture
def waits(monkeypatch) -> list:
    """The seconds that the client would have slept; its clock shows their sum."""
    slept = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: 5.0 + sum(slept))
    monkeypatch.setattr(search_client, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(search_client, "time", clock)
    return slept


def test_waits_double_up_to_a_limit_within_the_patience(fake, waits):
    server = fake()
    client = SearchClient(server.url, patience=100)
    server.answer = answers(500)
    with pytest.raises(RetrieverError, match="within 100 s"):
        client.search(["q"], 1)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 9]


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_says_when_to_ask_again(fake, waits, status):
    server = fake()
    client = SearchClient(server.url, patience=1000)
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    said = ["40", in_a_minute, "1", "-5", "soon", "inf", "9" * 5000]
    server.faults.extend(answers(status, Retry_After=value) for value in said)
    assert client.search(["q"], 1) == [hits_for("q", 1)]
    # The first two are longer than the client's own waits; the others are shorter, or unreadable.
    assert waits == [40, pytest.approx(58, abs=3), 4, 8, 16, 30, 30]


def test_a_wait_ends_with_the_patience(fake, waits):
    server = fake()
    client = SearchClient(server.url, patience=100)
    server.answer = answers(429, Retry_After="86400")
    with pytest.raises(RetrieverError, match="within 100 s .HTTP 429"):
        client.search(["q"], 1)
    assert waits == [100]


# ---- with a pool ----


@pytest.mark.slow
def test_a_server_that_dies_in_an_episode_and_returns(corpus):
    questions = [Question("who wrote Hamlet?", ("Shakespeare",), "nq")]
    search, answer = "<search>Hamlet</search>", "<answer>Shakespeare</answer>"
    expected = information(open_retriever(corpus).search(["Hamlet"], 3)[0])
    with serving("--corpus", corpus) as (url, process):
        pool = SearchPool(questions, SearchClient(url, patience=100), n_envs=2)
        reset(pool, ["0", "0"])
        assert step(pool, {0: search, 1: search})[0].observation == expected
        process.kill()
        process.wait()
        port = url.split(":")[2].split("/")[0]
        again = start_server("--corpus", corpus, "--port", port)
        try:
            results = step(pool, {0: search, 1: answer})  # before the server is back
            assert results[0].observation == expected and results[1].reward == 1.0
        finally:
            again.kill()
            again.communicate()
