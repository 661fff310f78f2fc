"""The retrieval server and its client, over HTTP on localhost.

A fake server in this process simulates other servers and their failures.
"""

import base64
import re
import signal
import socket
import time
import traceback
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from paw_min.base.errors import UserError
from paw_min.envs.search.env import SearchPool
from paw_min.envs.search.questions import Question
from paw_min.retrieval import client as search_client
from paw_min.retrieval import open_retriever
from paw_min.retrieval import server as search_server
from paw_min.retrieval.bm25 import LexicalRetriever
from paw_min.retrieval.client import SearchClient
from paw_min.retrieval.corpus import Corpus
from paw_min.retrieval.dense import Dense
from tests import pools
from tests.helpers import one_sentence
from tests.http_server import Server
from tests.retrieval import make_encoder, started, wait_for, write_corpus

QUERIES = ["Who wrote Hamlet?", "cities of Finland", "zzz", "origin of names"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(search_client, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(search_client, "START", 0.1)


# ---- our server ----


def test_the_protocol_of_search_r1(corpus):
    server = TestClient(search_server.make_app(LexicalRetriever(Corpus(corpus))))
    expected = open_retriever(corpus).search(QUERIES, 2)
    found = [[hit["document"]["id"] for hit in hits] for hits in expected]
    assert [ids[:1] for ids in found] == [["0"], ["1"], [], ["4"]]

    def ask(**request):
        answer = server.post("/retrieve", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    assert ask(queries=QUERIES, topk=2, return_scores=True) == expected
    assert ask(queries=QUERIES[:1], topk=2) == [[hit["document"] for hit in expected[0]]]
    many = ["Hamlet, Finland, water, towers"]
    assert [len(ask(queries=many, topk=k)[0]) for k in (1, 4, None)] == [1, 4, 3]
    assert ask(queries=[]) == [] and ask(queries=[""]) == [[]]
    for body in ({"queries": "a"}, {"query": "a"}, {"queries": ["a"], "topk": 0}):
        assert server.post("/retrieve", json=body).status_code == 422


@pytest.mark.parametrize("body, status", [
    (b'{"queries": ["%s"]}' % (b"a" * (33 << 20)), 413),
    ([b'{"queries": ["'] + [b"a" * (1 << 20)] * 33, 413),  # in chunks, without a length
    (b'{"queries": ["a"], "topk": NaN}', 422), (b'{"queries": ["\\ud800", ["\\ud800"]]}', 422),
    (b'{"queries": [%s1]}' % (b"1," * 1000), 422), (b"[" * 100_000, 400),
], ids=range(6))
def test_a_request_that_would_fill_the_memory_or_is_malformed(corpus, body, status):
    app = search_server.make_app(LexicalRetriever(Corpus(corpus)))
    server = TestClient(app, raise_server_exceptions=False)
    content = iter(body) if isinstance(body, list) else body
    answer = server.post("/retrieve", content=content, headers={"Content-Type": "application/json"})
    # It repeats nothing of the request.
    assert answer.status_code == status and len(answer.content) < 300


def test_a_dense_server_and_its_prefixes(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", ["a b c", "h g", "d e"])
    encoder = make_encoder(tmp_path / "encoder")
    flags = ["--corpus", str(corpus), "--retriever", "dense", "--encoder", encoder]
    plain = {"query_prefix": "", "passage_prefix": ""}
    no_prefixes = ["--query-prefix", "none", "--passage-prefix", "none"]
    for more, settings in (([], {}), (no_prefixes, plain)):
        found = search_server.load(search_server.parse_args(flags + more)).search(["h g"], 2)
        assert found == Dense(Corpus(corpus), encoder, **settings).search(["h g"], 2)


URL = "http://me:sec@ret@host/x"
DENSE = {"--retriever": "dense"}


@pytest.mark.parametrize("flags, sentence", [
    # It is missed before a corpus of 14 GB is read.
    (DENSE | {"--index": "none.index", "--corpus": "none"}, "none.index does not exist"),
    ({"--index": "none.index"}, "add --retriever dense"),  # BM25 would answer in silence
    ({"--encoder": "e5"}, "add --retriever dense"),
    ({"--port": "65536"}, "port 65536 of 127.0.0.1 cannot be opened"),
    ({"--host": "192.0.2.1"}, "of 192.0.2.1 cannot .* choose another --host or --port"),
    ({"--corpus": URL}, r"//\*\*\*@host/x is a URL: give a path"),
    (DENSE | {"--encoder": URL}, r"//\*\*\*@host/x is a URL: .* hub name"),
    ({"--corpsu": URL}, r"//\*\*\*@host/x"),
], ids=range(8))
def test_refused_flags(corpus, capsys, flags, sentence):
    flags = {"--corpus": str(corpus), "--port": "0"} | flags
    with pytest.raises((UserError, SystemExit)) as error:
        search_server.main([word for pair in flags.items() for word in pair])
    shown = f"{error.value} {capsys.readouterr()}"
    assert re.search(sentence, shown) and "sec" not in shown and "ret@" not in shown


@pytest.mark.slow
def test_a_client_waits_while_the_server_loads_and_ctrl_c_ends_it_quietly(tmp_path, caplog):
    corpus = write_corpus(tmp_path / "c.jsonl", [f"word{n} " * 20 for n in range(5_000)])
    with started("--corpus", corpus, "--port", 0) as process:
        url = wait_for(process, "loading").split()[0].rstrip(":")
        client = SearchClient(url)
        assert client.search(["word7"], 1)[0][0]["document"]["id"] == "7"
        assert not caplog.records  # the port was open: no second try
        # Headers without an end, of which no more than some KB are kept.
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            with pytest.raises(OSError):  # the server hangs up
                for _ in range(100):
                    stranger.sendall(b"X: " + b"a" * (1 << 20) + b"\r\n")
        assert client.search(["word8"], 1)[0][0]["document"]["id"] == "8"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in output


# ---- other servers ----


def hits_for(query, k) -> list[dict]:
    return [{"document": {"id": str(n), "contents": f"{query} {n}"}, "score": 1 / (n + 1)}
            for n in range(k)]


class Fake(Server):
    """Search-R1's server. bad: the answer to requests that have a query without a letter."""

    bad = None

    def answer(self, handler, request):
        if self.bad and not all(re.search(r"\w", query) for query in request["queries"]):
            return self.bad(handler, request)
        handler.reply(200, {"result": [hits_for(q, request["topk"]) for q in request["queries"]]})


def answers(status: int, content="", **headers):
    """The same answer to every request."""
    return lambda handler, request: handler.reply(status, content, **headers)


def result(hit: str) -> str:
    return '{"result": [[%s]]}' % hit


@pytest.fixture
def server():
    fake = Fake()
    yield fake
    fake.close()  # again, in one test


def test_many_queries_are_sent_in_parts(server):
    client = SearchClient(f"{server.url}/retrieve/")
    server.bodies.clear()
    assert client.search(QUERIES, 2) == [hits_for(query, 2) for query in QUERIES]
    assert client.search([], 2) == []
    assert server.bodies == [{"queries": QUERIES, "topk": 2, "return_scores": True}]
    assert len(client.search(["q"] * 130, 1)) == 130  # so that each is answered in time
    assert [len(body["queries"]) for body in server.bodies[1:]] == [64, 64, 2]


@pytest.mark.parametrize("hit", [
    '{"document": {"contents": "a"}}',  # online search
    '{"document": "a", "score": 2}',  # after reranking
    '{"document": {"id": 7, "contents": "a", "title": "t", "text": "a"}, "score": NaN}',
])
def test_hits_of_search_r1s_servers(server, hit):
    """They may ignore topk."""
    server.answer = answers(200, result(f"{hit}, {hit}, {hit}"))
    (found,) = SearchClient(server.url).search(["q"], 2)
    assert [hit["document"]["contents"] for hit in found] == ["a", "a"]


@pytest.mark.parametrize("url", [
    "http://", "http://[::1", "file:///corpus.jsonl", "HTTP://user:secret@host:99999",
])
def test_invalid_addresses(url):
    with one_sentence("is not the address of a server: give") as error:
        open_retriever(url)
    assert url.split("@")[-1] in str(error.value) and "sec" not in str(error.value)


def hang_up(handler, request):
    """Act like a server that is killed in the middle of its answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [[')
    handler.close_connection = True


def silent(handler, request):
    time.sleep(0.3)


GONE = "was not available for 0.1 s"
OTHER = "is not a retrieval server's"
BAD = [  # what a server answers, the words about it, and about a server that answers nothing else
    (answers(200, "<html><title>Bienvenue au caf\udce9"), "JSONDecodeError", OTHER),
    (answers(200, "[" * 100_000), "RecursionError", OTHER),
    (answers(200, '{"result": []}'), "ValueError", OTHER),
    (answers(200, result('{"document": {"contents": null}}')), "TypeError", OTHER),
    (answers(200, result(r'{"document": "\ud800"}')), "UnicodeEncodeError", OTHER),
    (answers(400, {"detail": "nope"}), "HTTP 400: .*nope", OTHER),
    (answers(302, Location="http://me:secret@other/x"), r"302: .http://\*\*\*@other/x", OTHER),
    (answers(429), "HTTP 429", GONE),
    (answers(500, "loading"), "HTTP 500: 'loading'", GONE),
    (hang_up, "IncompleteRead", GONE),
    (silent, "Read timed out", GONE),
]


@pytest.mark.parametrize("bad, words, verdict", BAD, ids=range(len(BAD)))
def test_a_bad_answer_costs_the_turn_of_one_query_or_time_or_the_run(
    server, bad, words, verdict, caplog
):
    client = SearchClient(server.url, timeout=0.2, patience=60)
    pool = SearchPool([Question("who?", ("me",), "nq")], client, n_envs=4)
    pools.reset(pool, ["0"] * 4)
    server.bad = bad
    queries = ["a", "", "b", "?"]
    steps = pools.step(pool, {n: f"<search>{query}</search>" for n, query in enumerate(queries)})
    assert [bool(steps[n].observation) for n in range(4)] == [True, False, True, False]
    assert not any(step.done for step in steps.values())
    lost = [message for message in caplog.messages if "finds nothing" in message]
    assert len(lost) == 2 and all(re.search(words, message) for message in lost)
    assert pools.step(pool, {1: "<answer>me</answer>"})[1].won  # the episode goes on
    # It passes.
    server.faults.extend([bad, answers(503), answers(503)])
    assert client.search(["q"], 1) == [hits_for("q", 1)]
    assert "HTTP 503: ''; next try in 0.04 s" in caplog.text
    # All queries are answered like that.
    server.answer = bad
    client.patience = 0.1
    for ask in (lambda: client.search(["q", "r"], 1), lambda: SearchClient(server.url, patience=1)):
        with one_sentence(rf"{server.url}/retrieve {verdict} .*({words})"):
            ask()


def test_no_proxy_of_the_environment_is_asked(server, monkeypatch):
    """It would not find a local server."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(search_client, "START", 0.1)
    assert SearchClient(server.url).search(["q"], 1) == [hits_for("q", 1)]


def test_a_start_waits_for_a_server_that_fails_at_first(server, monkeypatch):
    def late(handler, request):
        time.sleep(0.3)
        server.answer(handler, request)

    monkeypatch.setattr(search_client, "START", 60.0)
    server.faults.extend([answers(503), hang_up, late])
    client = SearchClient(server.url, timeout=0.1, patience=60)
    assert not server.faults and len(server.bodies) == 3  # its first answer may take minutes
    client.patience = 0.1
    server.close()
    client._http.close()  # An open connection is still answered.
    with one_sentence("was not available for 0.1 s .*Connection refused"):
        client.search(["q", "r"], 1)


def test_a_password_is_sent_but_not_shown(server, caplog):
    caplog.set_level("DEBUG")
    port = server.http.server_port
    password = f"pw{port}"
    client = SearchClient(server.url.replace("//", f"//me:{password}%2F@"), patience=0.5)
    assert client.search(["q"], 1) == [hits_for("q", 1)]
    expected = "Basic " + base64.b64encode(f"me:{password}/".encode()).decode()
    assert set(server.keys) == {expected}
    for answer in (answers(401, "who are you?"), answers(500), answers(200, "{}")):
        server.answer = answer
        with pytest.raises(UserError, match=rf"//\*\*\*@127.0.0.1:{port}/re") as raised:
            client.search(["q"], 1)
        assert password not in "".join(traceback.format_exception(raised.value))
    assert "***" in caplog.text and password not in caplog.text
