"""A fake of a vLLM server in development mode, which serves a fake `LLM`."""

from __future__ import annotations

import http.server
import json
import threading
from urllib.parse import parse_qs, urlsplit

from memsaver.integrations.vllm.local import has_plugin


class Server:
    """Serves a fake `vllm.LLM` that runs in this process.

    Attributes:
        url: the server's address.
        requests: the paths of the requests, in order.
        routes: whether the server is in development mode.
    """

    def __init__(self, llm, routes: bool = True) -> None:
        self.llm, self.routes = llm, routes
        self.requests: list[str] = []
        self._lock = threading.Lock()  # an `LLM` is used by one thread at a time
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                self._answer(json.loads(self.rfile.read(length) or b"{}"))

            def _answer(self, body) -> None:
                server.requests.append(self.path)
                try:
                    status, answer = server.answer(self.path, body)
                except Exception as error:
                    status, answer = 500, {"error": {"message": str(error)}}
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def answer(self, path: str, body):
        """Return an answer's status and JSON."""
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        if parts.path == "/version":
            return 200, {"version": "0.26.0"}
        if parts.path == "/v1/completions":
            with self._lock:
                return 200, self._complete(body)
        call = getattr(self, f"on_{parts.path[1:]}", None) if self.routes else None
        if call is None or (parts.path == "/memsaver" and not has_plugin()):
            return 404, {"detail": "Not Found"}
        return 200, call(query, body)

    def _complete(self, body):
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=body["max_tokens"], logprobs=body["logprobs"])
        model = self.llm.llm_engine.vllm_config.model_config
        if model.skip_tokenizer_init and not body.get("return_tokens_as_token_ids"):
            raise ValueError("Unable to get tokenizer because `skip_tokenizer_init=True`")
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            self.llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            tokens = []
            while self.llm.llm_engine.has_unfinished_requests():
                for output in self.llm.llm_engine.step():
                    tokens += output.outputs[0].token_ids
            choices.append(
                {
                    "index": index,
                    "token_ids": tokens,
                    "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
                    "finish_reason": "length",
                }
            )
        return {"choices": choices[::-1]}

    def on_memsaver(self, query, body):
        return {"memsaver": "0"}

    def on_is_sleeping(self, query, body):
        return {"is_sleeping": self.llm.llm_engine.is_sleeping()}

    def on_sleep(self, query, body):
        self.llm.sleep(int(query["level"][0]), query["mode"][0])

    def on_wake_up(self, query, body):
        self.llm.wake_up(query.get("tags"))

    def on_reset_prefix_cache(self, query, body):
        return {"success": self.llm.reset_prefix_cache()}

    def on_reset_mm_cache(self, query, body):
        self.llm.reset_mm_cache()

    def on_pause(self, query, body):
        self.llm.sleep(0, query["mode"][0])

    def on_resume(self, query, body):
        self.llm.wake_up(["scheduling"])

    def on_abort_requests(self, query, body):
        return {"aborted": 0}

    def on_collective_rpc(self, query, body):
        results = self.llm.collective_rpc(body["method"], body["timeout"], tuple(body["args"]))
        return {"results": results}

    def on_server_info(self, query, body):
        assert query["config_format"] == ["json"]
        ranks = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        config = self.llm.llm_engine.vllm_config.model_config
        model = {
            name: getattr(config, name) for name in ("enable_sleep_mode", "skip_tokenizer_init")
        }
        return {"vllm_config": {"parallel_config": ranks, "model_config": model}}
