"""A fake of `sglang.Engine` that starts processes, for tests of `RolloutEngine.launch`."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import types

import fake_sglang
from idle_process import idle


class SGLang:
    """A fake of `sglang.Engine`'s startup: its processes, signals, environment and event loop."""

    def __init__(self, classes) -> None:
        self.classes = classes
        self.seen: list[types.SimpleNamespace] = []
        self.start_seconds = 0.0
        self.error: Exception | None = None
        self.failures = 0  # the number of starts that fail

    def __call__(self, **arguments):
        multiprocessing.set_start_method("spawn", force=True)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, arguments["custom_sigquit_handler"])
        os.environ["NCCL_CUMEM_ENABLE"], os.environ["SGLANG_RUN_ID"] = "0", "sglang-run-1"
        begun = [multiprocessing.Event() for _ in range(2)]
        processes = [multiprocessing.Process(target=idle, args=(600, one)) for one in begun]
        for process in processes:
            process.start()
        self.seen.append(
            types.SimpleNamespace(
                arguments=arguments, environment=dict(os.environ), processes=processes
            )
        )
        end = time.monotonic() + self.start_seconds
        while time.monotonic() < end:
            if not all(process.is_alive() for process in processes):
                raise RuntimeError("Rank 0 scheduler died during initialization")
            time.sleep(0.02)
        for process, one in zip(processes, begun, strict=True):
            while process.is_alive() and not one.wait(0.02):
                pass
        if self.error is not None:
            raise self.error
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        if arguments.get("node_rank"):
            return types.SimpleNamespace(tokenizer_manager=None, shutdown=lambda: None)
        manager = self.classes.Tokenizer([self.classes.Scheduler(self.classes.Updater)])
        manager.server_args.tp_size = arguments.get("tp_size", 1)
        engine = fake_sglang.Engine(manager)
        manager.auto_create_handle_loop = lambda: self.handle_signals(manager)
        manager._subprocess_watchdog = types.SimpleNamespace(
            _processes=processes, stop=lambda: None
        )
        return engine

    @staticmethod
    def handle_signals(manager) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = manager.signal_handler_class(manager)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, handler.sigterm_handler)
        loop.add_signal_handler(signal.SIGQUIT, handler.running_phase_sigquit_handler)


@contextlib.contextmanager
def launchable(patch):
    """Make the fake importable as `sglang` in the block; its processes must end in the block."""
    with fake_sglang.modules(patch) as classes:
        made = SGLang(classes)
        patch.setattr(sys.modules["sglang"], "Engine", made, raising=False)
        yield made
        for seen in made.seen:
            assert not any(process.is_alive() for process in seen.processes)
