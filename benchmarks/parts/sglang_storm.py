"""Send requests of all kinds to a server that sleeps and wakes up repeatedly.

The server holds requests while its memory is released (MEMSAVER_SGLANG_ASLEEP=wait). In each cycle,
some requests arrive before or during the release, and the others arrive while the memory is
released. The server must answer each request like an awake server: generations must return the same
tokens, and all other requests must return the same status. The updates alternate between two sets
of weights, so a skipped update changes later tokens. A generation that overlaps no update must
return the tokens of the current weights. A generation that overlaps updates may return the tokens
of the weights before or after the updates.

The server runs one generation at a time, because batching changes the arithmetic and thus the
tokens. The clients' requests overlap.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import results
from children import Failed
from engine_model import SMALL, save_checkpoint, write_config
from engine_process import say, wait_until_free
from sglang_engine import BENCH
from sglang_server import Server, serving

METRIC = "sglang_storm_answered_requests"
PEER = "requests whose clients wait"
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,
    "cuda_graph_bs_decode": [1, 2],
    "disable_prefill_cuda_graph": True,
    "disable_radix_cache": True,  # a cached prefix changes the arithmetic, too
    "max_running_requests": 1,
    "random_seed": 1,
    "log_level": "info",
}
HELD_SECONDS = 60  # longer than any sleep here
WAIT = {"MEMSAVER_SGLANG_ASLEEP": "wait", "MEMSAVER_SGLANG_ASLEEP_WAIT": str(HELD_SECONDS)}
PROMPTS = ([5, 6, 7, 8, 901, 44], [9, 10, 11], list(range(3000, 3100)), [77] * 9)
TOKENS = 8
CLIENTS = 24
UPDATE_ATTEMPTS = 10
MOST_WAITING = 16  # maximum number of unanswered requests when a cycle begins
ASLEEP_SECONDS = 0.05

Outcome = str  # "answered", "disconnected", "lost: ..." or "wrong: ..."


# Requests whose status is always the same: the path, the payload, and the possible statuses.
# Without a tokenizer, the server cannot answer a completion in text. Its model has no embeddings.
_COMPLETION = {"model": "model", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0}
FIXED: dict[str, tuple[str, Any, tuple[int, ...]]] = {
    "completion": ("/v1/completions", _COMPLETION, (200, 400, 500)),
    "embedding": ("/encode", {"input_ids": PROMPTS[0]}, (400,)),
    "adapter": ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, (400,)),
    "unknown": ("/no_such_request", {}, (404,)),
    "incomplete": ("/generate", {"sampling_params": {}}, (400, 422)),
}


class Storm:
    """A client that sends requests to a server and evaluates the answers.

    Args:
        server: the server, which is awake.
        models: the directories of two models of one shape; the server has loaded the first.

    Attributes:
        certain: the number of generations that overlapped no update.
    """

    def __init__(self, server: Server, models: tuple[Path, Path]) -> None:
        self._server, self._models = server, models
        self._random = random.Random(1)
        self._updating, self._counting = threading.Lock(), threading.Lock()
        self._begun = self._done = 0  # update numbers; after update k, the server has models[k % 2]
        self.certain = 0
        self._statuses: dict[str, int] = {}
        self.expected: list[list[list[int]]] = []  # the tokens of each model
        # The kinds of requests, each with its relative frequency.
        self.kinds: dict[str, tuple[int, Callable[[int], Outcome]]] = {
            "generation": (24, self._generate),
            "batch": (8, self._batch),
            "stream": (12, self._stream),
            **{
                kind: (weight, functools.partial(self._fixed, kind))
                for kind, weight in (("completion", 6), ("embedding", 4), ("adapter", 3))
            },
            "health": (8, self._health),
            "flush": (6, self._flush),
            "update": (3, self._update),
            "unknown": (2, functools.partial(self._fixed, "unknown")),
            "incomplete": (2, functools.partial(self._fixed, "incomplete")),
            "disconnect": (6, self._disconnect),
        }

    def learn(self) -> None:
        """Record the server's responses while it is awake.

        Raises Failed if the responses are not usable.
        """
        self._tokens()  # compiles kernels
        found = []
        for _ in range(4):
            found.append(self._tokens())
            if (outcome := self._update(0)) != "answered":
                raise Failed(f"the server does not update its weights: {outcome}")
        first, second = found[:2]
        different = {tuple(tokens) for tokens in (*first, *second)}
        if found[2:] != [first, second] or len(different) < 2 * len(PROMPTS):
            raise Failed(f"the server's tokens are not usable: {found}")
        self.expected = [first, second]
        for kind, (path, payload, statuses) in FIXED.items():
            status, text = self._server.request(path, payload)
            if status not in statuses:
                raise Failed(f"{kind}: the server's response was {status}: {text[:300]}")
            self._statuses[kind] = status

    def plan(self, count: int) -> list[str]:
        """Return the kinds of `count` requests, with each kind at least once if possible."""
        weights = [weight for weight, _ in self.kinds.values()]
        drawn = self._random.choices([*self.kinds], weights, k=max(0, count - len(self.kinds)))
        found = [*self.kinds, *drawn][:count]
        self._random.shuffle(found)
        return found

    def send(self, kind: str, number: int) -> Outcome:
        """Send a request, and evaluate the answer."""
        try:
            return self.kinds[kind][1](number)
        except (OSError, LookupError, TypeError, ValueError) as error:
            return f"wrong: {type(error).__name__}: {error}"

    def check_end(self) -> None:
        """Raise Failed if the server does not generate as before."""
        if not self._server.is_alive():
            raise Failed("the server ended")
        expected = self.expected[self._done % 2]
        if (tokens := self._tokens()) != expected:
            raise Failed(f"after the storm, the server generates {tokens}, not {expected}")
        status, text = self._server.request("/flush_cache", {})
        if status != 200:
            raise Failed(f"after the storm, a flush fails with status {status}: {text[:300]}")

    def _tokens(self) -> list[list[int]]:
        replies = [self._server.request("/generate", _prompt(ids)) for ids in PROMPTS]
        for status, text in replies:
            if status != 200:
                raise Failed(f"the server's response to a generation was {status}: {text[:300]}")
        return [json.loads(text)["output_ids"] for _, text in replies]

    def _send(self, path: str, payload: Any = None) -> tuple[int, str]:
        return self._server.request(path, payload, within=HELD_SECONDS + 60)

    def _generate(self, number: int) -> Outcome:
        which = number % len(PROMPTS)
        expected = self._expecting()
        status, text = self._send("/generate", _prompt(PROMPTS[which]))
        if status != 200:
            return _judged(status, (), text)
        return _among(json.loads(text)["output_ids"], [one[which] for one in expected()])

    def _batch(self, _: int) -> Outcome:
        expected = self._expecting()
        status, text = self._send("/generate", _prompt(list(PROMPTS)))
        if status != 200:
            return _judged(status, (), text)
        return _among([reply["output_ids"] for reply in json.loads(text)], expected())

    def _stream(self, number: int) -> Outcome:
        which = number % len(PROMPTS)
        expected = self._expecting()
        status, text = self._send("/generate", {**_prompt(PROMPTS[which]), "stream": True})
        if status != 200:
            return _judged(status, (), text)
        chunks = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not chunks or chunks[-1] != "[DONE]":
            return f"lost: the stream ended early: {text[-200:]}"
        last = json.loads(chunks[-2])
        if "output_ids" not in last:
            return f"lost: {chunks[-2][:300]}"
        return _among(last["output_ids"], [one[which] for one in expected()])

    def _expecting(self) -> Callable[[], list[list[list[int]]]]:
        """Begin a generation. Returns a function that ends it and returns possible tokens."""
        done = self._done

        def expected() -> list[list[list[int]]]:
            begun = self._begun
            with self._counting:
                self.certain += begun == done
            return [self.expected[number % 2] for number in range(done, begun + 1)]

        return expected

    def _fixed(self, kind: str, _: int) -> Outcome:
        path, payload, _ = FIXED[kind]
        return _judged(*self._accepted(path, payload, (self._statuses[kind],)))

    def _health(self, number: int) -> Outcome:
        path = ("/health", "/health_generate", "/ping")[number % 3]
        return _judged(*self._accepted(path, None, (200,)))

    def _flush(self, _: int) -> Outcome:
        status, text = self._send("/flush_cache", {})
        if status == 400 and "Flush cache failed" in text:  # requests are running
            return "answered"
        return _judged(status, (200,), text)

    def _update(self, _: int) -> Outcome:
        with self._updating:
            self._begun = number = self._begun + 1
            body = {"model_path": str(self._models[number % 2])}
            for _ in range(UPDATE_ATTEMPTS):
                status, text = self._send("/update_weights_from_disk", body)
                # SGLang cannot flush its cache while it aborts a disconnected client's request.
                if not (status == 400 and "Cache flush failed" in text):
                    break
            if status == 200:
                self._done = number
            return _judged(status, (200,), text)

    def _disconnect(self, number: int) -> Outcome:
        body = _prompt(PROMPTS[number % len(PROMPTS)], tokens=32)
        self._server.disconnect("/generate", body, after=number % 10 / 100)
        return "disconnected"

    def _accepted(
        self, path: str, payload: Any, statuses: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...], str]:
        status, text = self._send(path, payload)
        return status, statuses, text


def _prompt(ids: Any, tokens: int = TOKENS) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling}


def _judged(status: int, statuses: tuple[int, ...], text: str) -> Outcome:
    """Evaluate a response by its status. Unanswered and refused requests count as lost."""
    if status in statuses:
        return "answered"
    return f"{'lost' if status in (0, 503) else 'wrong'}: status {status}: {text[:300]}"


def _among(tokens: Any, expected: list[Any]) -> Outcome:
    return "answered" if tokens in expected else f"wrong: {tokens}, not one of {expected}"


def nap(
    url: str,
    send: Callable[[int], None],
    catch_up: Callable[[], None],
    before_waking: Callable[[], None],
    naps: int,
    requests: int,
    seconds: float,
) -> int:
    """Put the server to sleep and wake it `naps` times while requests are sent.

    Returns the number of completed cycles, which is smaller if the cycles take longer than
    `seconds`.

    Args:
        url: the server's URL.
        send: a function that starts the next requests; its argument is their number.
        catch_up: a function that waits for answers until few requests are unanswered.
        before_waking: a function that is called at the end of each sleep.
        naps: the number of cycles.
        requests: the number of requests.
    """
    from memsaver.integrations.sglang import EngineBusyError, SleepController

    controller = SleepController(url)
    end = time.monotonic() + seconds
    for number in range(naps):
        if time.monotonic() > end:
            return number
        share = requests * (number + 1) // naps - requests * number // naps
        catch_up()
        send(share - share // 2)
        while True:
            try:
                controller.sleep(wait_idle=True)
                break
            except EngineBusyError:  # a request arrived between the wait and the release
                continue
        send(share // 2)
        time.sleep(ASLEEP_SECONDS)
        before_waking()
        controller.wake_up()
    return naps


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row for METRIC."""
    wait_until_free(options.idle_mib)
    models = (options.model / "storm", options.model / "storm-other")
    for seed, model in enumerate(models, 1):
        model.mkdir()
        write_config(SMALL, model)
        save_checkpoint(SMALL, model, seed=seed)
    log = options.output.with_name("sglang_storm.log")
    with serving(models[0], ARGUMENTS, WAIT, log) as server:
        storm = Storm(server, models)
        storm.learn()
        begin = time.monotonic()
        cycles, outcomes, held = run(storm, server.url, options)
        seconds = round(time.monotonic() - begin, 1)
        storm.check_end()
    count = Counter(outcome.partition(":")[0] for _, outcome in outcomes)
    say(f"storm: {dict(count)} in {seconds} s")
    for kind, outcome in [found for found in outcomes if ":" in found[1]][:10]:
        failures.append(f"storm, {kind}: {outcome}")
    if cycles < options.naps:
        raise Failed(f"storm: only {cycles} of {options.naps} cycles in time")
    waiting = len(outcomes) - count["disconnected"]
    row = results.measurement(
        METRIC, [count["answered"]], PEER, [waiting], bench=BENCH, higher_is_better=True
    )
    row["detail"] |= {
        "lost": count["lost"],
        "wrong": count["wrong"],
        "disconnected": count["disconnected"],
        "held": held,
        "without_an_update_meanwhile": storm.certain,
        "cycles": cycles,
        "seconds": seconds,
        "kinds": dict(sorted(Counter(kind for kind, _ in outcomes).items())),
    }
    yield row


def run(
    storm: Storm, url: str, options: argparse.Namespace
) -> tuple[int, list[tuple[str, Outcome]], int]:
    """Send all requests during the cycles.

    Returns the number of cycles; the kind and the outcome of each request; and the number of
    requests that were unanswered at the end of a sleep, except those whose clients disconnect.
    """
    plan = storm.plan(options.requests)
    sent: list[tuple[str, Future[Outcome]]] = []
    held: set[int] = set()
    with ThreadPoolExecutor(CLIENTS) as clients:

        def catch_up() -> None:
            waiting = [future for _, future in sent if not future.done()]
            wait(waiting[:-MOST_WAITING], timeout=HELD_SECONDS)

        def send(count: int) -> None:
            for _ in range(count):
                number = len(sent)
                sent.append((plan[number], clients.submit(storm.send, plan[number], number)))

        def count_held() -> None:
            running = [kind != "disconnect" and future.running() for kind, future in sent]
            held.update(number for number, is_held in enumerate(running) if is_held)

        limits = (options.naps, options.requests, options.storm_seconds)
        cycles = nap(url, send, catch_up, count_held, *limits)
        return cycles, [(kind, future.result()) for kind, future in sent], len(held)
