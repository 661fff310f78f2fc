"""The retrieval server and its client, over HTTP on localhost.

A fake server in this process simulates other servers and their failures.
"""

import asyncio
import base64
import gzip
import re
import signal
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient

from paw_min.base.errors import UserError
from paw_min.retrieval import client as search_client
from paw_min.retrieval import open_retriever
from paw_min.retrieval import server as search_server
from paw_min.retrieval.bm25 import LexicalRetriever
from paw_min.retrieval.client import SearchClient
from paw_min.retrieval.corpus import Corpus
from paw_min.retrieval.dense import Dense
from tests.http_server import Server
from tests.retrieval import make_encoder, started, wait_for, write_corpus

QUERIES = ["Who wrote Hamlet?", "cities of Finland", "zzz", "origin of names"]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="module")
def server(corpus) -> TestClient:
    return TestClient(search_server.make_app(LexicalRetriever(Corpus(corpus))))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(search_client, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(search_client, "START", 0.1)


# ---- our server ----


def test_both_protocols_and_bare_documents(server, corpus):
    expected = open_retriever(corpus).search(QUERIES, 2)

    def ask(**request):
        answer = server.post("/retrieve", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    assert ask(queries=QUERIES, topk=2, return_scores=True) == expected
    assert ask(query=QUERIES[0], topk=2, return_scores=True) == expected[:1]
    assert ask(query=QUERIES[0], topk=2) == [[hit["document"] for hit in expected[0]]]
    many = "Hamlet, Finland, water, towers"
    assert [len(ask(query=many, topk=k)[0]) for k in (1, 4, None)] == [1, 4, 3]
    assert ask(queries=[]) == []
    assert server.get("/health").json() == {"status": "ready", "passages": 5}


@pytest.mark.parametrize("body, words", [
    ('{"query": "a", "queries": ["a"]}', "give either"),
    ('{"queries": "a"}', "valid list"),
    ('{"query": "a", "topk": 0}', "greater than"),
    ('{"query": "a", "topk": NaN}', "finite number"), ('{"query": ["\\ud800"]}', "valid string"),
    (f'{{"query": {DEEP}}}', ""), ('{"query": "' + "a" * (33 << 20) + '"}', "send less"),
], ids=range(7))
def test_requests_that_are_refused(server, body, words):
    headers = {"Content-Type": "application/json"}
    answer = server.post("/retrieve", content=body.encode("latin-1"), headers=headers)
    assert answer.status_code in (400, 413, 422) and words in str(answer.json()["detail"])


def test_a_dense_server(tmp_path, monkeypatch):
    """Its prefixes, and an index that is missed before a corpus of 14 GB is read."""
    corpus = write_corpus(tmp_path / "c.jsonl", ["a b c", "h g", "d e"])
    encoder = make_encoder(tmp_path / "encoder")
    flags = ["--corpus", str(corpus), "--retriever", "dense", "--encoder", encoder]
    found = search_server.load(search_server.parse_args(flags)).search(["h g"], 2)
    assert found == Dense(Corpus(corpus), encoder).search(["h g"], 2)
    flags += ["--query-prefix", "none", "--passage-prefix", "none"]
    found = search_server.load(search_server.parse_args(flags)).search(["h g"], 2)
    plain = Dense(Corpus(corpus), encoder, query_prefix="", passage_prefix="")
    assert found == plain.search(["h g"], 2)
    monkeypatch.setattr(search_server, "Corpus", None)
    index = ["--index", str(tmp_path / "none.index")]
    for wrong, sentence in (
        (flags + index, "none.index does not exist"),
        (flags[:2] + index, "add --retriever dense"),  # BM25 would answer in silence
        (flags[:2] + ["--encoder", encoder], "add --retriever dense"),
    ):
        with pytest.raises(UserError, match=sentence):
            search_server.load(search_server.parse_args(wrong))


def test_a_port_that_is_taken(corpus):
    with search_server.listen("127.0.0.1", 0) as other:
        taken = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {taken} of 127.0.0.1 cannot be opened"):
            search_server.main(["--corpus", str(corpus), "--port", str(taken)])
    with pytest.raises(UserError, match="of 192.0.2.1 cannot .* choose another --host or --port"):
        search_server.listen("192.0.2.1", 0)


def test_a_busy_server_says_that_it_is_alive():
    """FastAPI has 40 threads for searches."""
    go = threading.Event()

    def search(queries, k):
        go.wait(30)
        return [[] for _ in queries]

    app = search_server.make_app(SimpleNamespace(corpus=[], search=search))

    async def ask() -> dict:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = {"queries": ["a"], "topk": 1}
            searches = [asyncio.create_task(client.post("/retrieve", json=body)) for _ in range(50)]
            await asyncio.sleep(0.2)
            try:
                answer = await asyncio.wait_for(client.get("/health"), 5)
            finally:
                go.set()
            await asyncio.gather(*searches)
            return answer.json()

    assert asyncio.run(ask())["status"] == "ready"


@pytest.mark.parametrize("flag", ["--corpus", "--index", "--encoder", "--corpsu", "--port"])
def test_a_password_of_a_server_is_not_shown(corpus, capsys, flag):
    url = "http://me:sec@ret@host/x"
    flags = {"--corpus": str(corpus), "--retriever": "dense", "--port": "0"} | {flag: url}
    with pytest.raises((UserError, SystemExit)) as error:
        search_server.main([word for pair in flags.items() for word in pair])
    shown = f"{error.value} {capsys.readouterr()}"
    assert "//***@host/x" in shown and "sec" not in shown and "ret@" not in shown


@pytest.mark.slow
def test_a_client_waits_while_the_server_loads_and_ctrl_c_ends_it_quietly(tmp_path, caplog):
    corpus = write_corpus(tmp_path / "c.jsonl", [f"word{n} " * 20 for n in range(5_000)])
    with started("--corpus", corpus, "--port", 0) as process:
        url = wait_for(process, "loading").split()[0].rstrip(":")
        client = SearchClient(url)
        assert client.search(["word7"], 1)[0][0]["document"]["id"] == "7"
        assert not caplog.records  # the port was open: no second attempt
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in output


# ---- other servers ----


def hits_for(query, k) -> list[dict]:
    return [{"document": {"id": str(n), "contents": f"{query} {n}"}, "score": 1 / (n + 1)}
            for n in range(k)]


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


@pytest.fixture
def fake():
    fakes = []

    def make(key="queries") -> Fake:
        fakes.append(Fake(key))
        return fakes[-1]

    yield make
    for one in fakes:
        one.close()


def test_search_r1_gets_one_batched_request(fake):
    server = fake("queries")
    client = SearchClient(f"{server.url}/retrieve/")
    server.bodies.clear()
    assert client.search(QUERIES, 2) == [hits_for(query, 2) for query in QUERIES]
    assert client.search([], 2) == []
    assert server.bodies == [{"queries": QUERIES, "topk": 2, "return_scores": True}]
    assert len(client.search(["q"] * 130, 1)) == 130  # so that each is answered in time
    assert [len(body["queries"]) for body in server.bodies[1:]] == [64, 64, 2]


def test_verl_agent_gets_one_request_per_query(fake):
    server = fake("query")
    client = open_retriever(server.url.replace("http", "HTTP"))
    server.bodies.clear()
    queries = [f"q{n}" for n in range(70)]  # more than THREADS
    assert client.search(queries, 2) == [hits_for(query, 2) for query in queries]
    assert sorted(r["query"] for r in server.bodies) == sorted(queries)
    assert all(r["topk"] == 2 and r["return_scores"] is True for r in server.bodies)


# ---- servers that fail ----


def failure(ask) -> str:
    """The one sentence of the error that `ask` raises."""
    with pytest.raises(UserError) as raised:
        ask()
    text = str(raised.value)
    assert "\n" not in text and ": " in text and text.endswith("."), text
    return text


@pytest.mark.parametrize("url", [
    "http://", "http://[::1", "file:///corpus.jsonl", "HTTP://user:secret@host:99999",
])
def test_invalid_addresses(url):
    text = failure(lambda: open_retriever(url))
    assert "is not the address of a server: give" in text
    assert url.split("@")[-1] in text and "sec" not in text


def result(score="1", contents='"a"') -> str:
    return '{"result": [[{"document": {"contents": %s}, "score": %s}]]}' % (contents, score)


# What a server answers to one query -> the words about it.
KIND = "not a retrieval server's"
ANSWERS = [
    *((answers(200, body), KIND) for body in (
        "",
        "<html><title>Bienvenue au caf\udce9",  # a byte that is not UTF-8
        '{"result": []}',
        result(contents="null"),
        result("NaN"),
    )),
    # The client decompresses nothing: a small answer cannot fill the memory.
    (answers(200, gzip.compress(result().encode()), Content_Encoding="gzip"), KIND),
    (answers(400, {"detail": "nope"}), "HTTP 400 .*nope.*: look at its log"),
    (answers(422), "HTTP 422"),
    (answers(302, Location="http://me:secret@other/x"), r"302 .'http://\*\*\*@other/x'"),
]


@pytest.mark.parametrize("answer, words", ANSWERS, ids=range(len(ANSWERS)))
def test_answers_that_end_a_run_at_once(fake, answer, words):
    server = fake()
    client = SearchClient(server.url)
    server.answer = answer
    server.bodies.clear()
    for ask in (lambda: client.search(["q"], 1), lambda: SearchClient(server.url)):
        assert re.search(f"{server.url}/retrieve.*{words}", failure(ask))
    assert len(server.bodies) <= 3  # none was repeated, but for the other protocol


def hang_up(handler, request):
    """Act like a server that is killed in the middle of its answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [[')
    handler.close_connection = True


def drip(handler, request):
    """Send a byte now and then, each in time."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(8):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)
    handler.close_connection = True


@pytest.mark.parametrize("key, answer, words", [
    ("queries", answers(500), "HTTP 500"),
    ("queries", answers(429), "HTTP 429"),
    ("query", answers(503, "loading"), "HTTP 503: 'loading'"),
    ("query", hang_up, "IncompleteRead"),
    ("queries", lambda handler, request: time.sleep(0.5), "Read timed out"),
    ("queries", drip, "no end of the answer within 0.4 s"),
], ids=range(6))
def test_failures_that_may_pass(fake, caplog, monkeypatch, key, answer, words):
    monkeypatch.setattr(search_client, "START", 60.0)
    server = fake(key)
    server.faults.extend([answer] * 2)  # at the start ..
    client = SearchClient(server.url, timeout=0.4, patience=60)
    server.faults.extend([answer] * 2)  # .. and in training
    assert client.search(["q"], 1) == [hits_for("q", 1)]
    assert len(caplog.records) >= 4  # more on a machine that is very slow
    assert words in caplog.text and "next attempt in 0.04 s" in caplog.text
    client.patience = 0.1
    server.answer = answer
    text = failure(lambda: client.search(["a", "b"], 1))
    assert "was not available for 0.1 s" in text and words in text and "resumes from" in text


def test_an_answer_without_an_end_is_not_read(fake, monkeypatch):
    server = fake()
    client = SearchClient(server.url, patience=0.1)
    monkeypatch.setattr(search_client, "MAX_BYTES", 1000)
    assert len(client.search(["q"], 9)[0]) == 9
    assert "no end of the answer" in failure(lambda: client.search(["q"], 99))


def test_a_password_is_sent_but_not_shown(fake, caplog):
    caplog.set_level("DEBUG")
    server = fake()
    port = server.http.server_port
    password = f"pw{port}"
    url = server.url.replace("//", f"//me:{password}%C3%A9@")
    client = SearchClient(url, patience=0.5)
    assert client.search(["q"], 1) == [hits_for("q", 1)]
    expected = "Basic " + base64.b64encode(f"me:{password}é".encode()).decode()
    assert set(server.keys) == {expected}
    for answer in (answers(401, "who are you?"), answers(500), answers(200, "{}")):
        server.answer = answer
        with pytest.raises(UserError, match=rf"//\*\*\*@127.0.0.1:{port}/re") as raised:
            client.search(["q"], 1)
        assert password not in "".join(traceback.format_exception(raised.value))
    assert "***" in caplog.text and password not in caplog.text
