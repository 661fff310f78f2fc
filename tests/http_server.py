"""A server in this process that records what it is asked; a test may replace its answers."""

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Listener(ThreadingHTTPServer):
    request_queue_size = 128  # with the default of 5, further connections wait for a second


class Server:
    """Subclasses have `answer(handler, body)`, which sends the answer to a POST request.

    faults: functions like it, each of which answers one request in its place.
    """

    def __init__(self):
        self.faults = deque()
        self.bodies = []
        self.paths = []
        self.keys = []
        server = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.bodies.append(body)
                    server.paths.append(self.path)
                    server.keys.append(self.headers["Authorization"])
                    answer = server.faults.popleft() if server.faults else server.answer
                answer(self, body)

            def reply(self, status: int, content="", **headers):
                """Send bytes or a text as they are, all else as JSON."""
                if isinstance(content, str):
                    content = content.encode("utf-8", "surrogateescape")
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
