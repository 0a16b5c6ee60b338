"""A fake of SGLang's HTTP server in front of a tokenizer manager."""

from __future__ import annotations

import asyncio
import json
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fake_sglang.main_process import TokenizerManager
from fake_sglang.messages import (
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    GenerateReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)


class Server:
    """The endpoints of SGLang's HTTP server that a controller uses."""

    def __init__(self, manager: TokenizerManager, api_key: str | None = None) -> None:
        self.manager, self.api_key, self.swallow_errors = manager, api_key, False
        self.failing_infos = 0  # the number of /server_info requests that fail next
        self.loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=self.loop.run_forever, daemon=True)]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_) -> None:
                pass

            def do_GET(self) -> None:
                outer._handle(self)

            do_POST = do_GET

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._threads.append(threading.Thread(target=self._http.serve_forever, args=(0.01,)))
        for thread in self._threads:
            thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def shutdown(self) -> None:
        self._http.shutdown()
        self._http.server_close()

        def stop() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_soon(self.loop.stop)

        self.loop.call_soon_threadsafe(stop)
        for thread in self._threads:
            thread.join(10)
        self.loop.close()

    def _handle(self, http) -> None:
        key = http.headers.get("Authorization")
        if self.api_key is not None and key != f"Bearer {self.api_key}":
            return self._answer(http, 401, json.dumps({"error": "Unauthorized"}))
        body = http.rfile.read(int(http.headers.get("Content-Length", 0)))
        future = asyncio.run_coroutine_threadsafe(
            self._route(http.command, http.path, json.loads(body or b"null")), self.loop
        )
        try:
            status, text = future.result()
        except BaseException:  # the loop ends while the schedulers are dead
            return http.close_connection
        return self._answer(http, status, text)

    def _answer(self, http, status: int, text: str):
        try:
            http.send_response(status)
            http.send_header("Content-Length", str(len(text)))
            http.end_headers()
            http.wfile.write(text.encode())
        except OSError:
            pass

    async def _route(self, method: str, path: str, body) -> tuple[int, str]:
        manager = self.manager
        if method == "GET":
            if path == "/server_info" and self.failing_infos:
                self.failing_infos -= 1
                return 500, "Internal Server Error"
            if path == "/server_info":
                states = await manager.get_internal_state()
                info = {**vars(manager.server_args), "version": manager.version}
                return 200, json.dumps({**info, "internal_states": states})
            return 404, "{}"
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            release = path.startswith("/release")
            kind = ReleaseMemoryOccupationReqInput if release else ResumeMemoryOccupationReqInput
            try:
                await getattr(manager, path[1:])(kind(tags=body["tags"], rid=body.get("rid")), None)
            except Exception as error:
                if not self.swallow_errors:
                    return 400, json.dumps({"error": {"message": str(error)}})
            return 200, "null"
        if path == "/flush_cache":
            flushed = (await manager.flush_cache()).success
            return (200, "Cache flushed.") if flushed else (400, "Flush cache failed.")
        if path == "/abort_request":
            manager.abort_request(**body)
            return 200, ""
        if path == "/generate" and ("input_ids" in body or isinstance(body.get("text"), list)):
            try:
                return 200, json.dumps(
                    await manager.generate_request(GenerateReqInput(**body)).__anext__()
                )
            except ValueError as error:
                return 400, json.dumps({"error": {"message": str(error)}})
        if path == CHECKER:
            success, message, ranks, _ = await manager.check_weights(types.SimpleNamespace(**body))
            answer = {"success": success, "message": message, "ranks": ranks}
            return 200, json.dumps(answer)
        if path in CALLS:
            answer = await getattr(manager, path[1:])(CALLS[path](**body))
            success, message = answer or (True, "")
            answer = {"success": success, "message": message}
            return (200 if success else 400), json.dumps(answer)
        if path == "/generate":
            return 200, json.dumps(await manager.generate(body["text"]))
        return 404, "{}"


CHECKER = ""  # the path for checksums, which tests set; older versions lack it
CALLS = {
    "/pause_generation": PauseGenerationReqInput,
    "/continue_generation": ContinueGenerationReqInput,
    "/update_weights_from_tensor": UpdateWeightsFromTensorReqInput,
    "/update_weights_from_distributed": UpdateWeightsFromDistributedReqInput,
    "/init_weights_update_group": InitWeightsUpdateGroupReqInput,
    "/destroy_weights_update_group": DestroyWeightsUpdateGroupReqInput,
}
