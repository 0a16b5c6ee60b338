"""Run the example as Ray actors, for several machines: ranks of a trainer, and SGLang servers.

    python ray_workers.py --ranks 2                          a local Ray
    python ray_workers.py --ranks 16 --tp 8 --address auto   a cluster, an engine for each 8 GPUs
    python ray_workers.py --ranks 2 --engine model --model tiny      no GPU

Each group of `tp` ranks is on one machine with its engine: an actor that starts an SGLang server on
the GPUs of the group's ranks. memsaver needs no variables in the actors' environment, because
SGLang loads it as a plugin. With --preload the engines' actors have `memsaver.preload_env()`, so
that allocations of other libraries inside regions belong to the regions too. Ray starts an actor
that has its own environment in a new process, which preloading requires.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError:
    sys.exit("not installed: ray (pip install ray)")
from requirements import check_installed
from settings import Settings, SettingsError
from train import one_of, publish, results_name

START_SECONDS = 300
END_SECONDS = 15
# Servers need no key and accept pickles, so only ranks on their own machine may reach them.
HOST = "127.0.0.1"


class EngineWorker:
    """An actor that runs an SGLang server in separate processes.

    They end with `stop`, and with the actor's process, even if it is killed: the kernel then kills
    the server, and SGLang's processes end with their server.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="grpo-engine-")

    def start(self, settings: Settings, tp: int, gpus: Sequence[str]) -> str:
        """Start a server on some of this machine's GPUs, and return its URL when it answers.

        Raises:
            RuntimeError: the server ended, or did not answer in time; the message has the end of
                its log.
        """
        from engines import ENVIRONMENT, sglang_arguments
        from policy_model import SHAPES
        from vocabulary import Vocabulary

        own = settings.model in SHAPES
        vocabulary = Vocabulary.own() if own else Vocabulary.of_model(Path(settings.model))
        arguments = sglang_arguments(settings, vocabulary, Path(self._folder.name))
        arguments |= {"tp_size": tp, "skip_tokenizer_init": True}
        environment = {
            **ENVIRONMENT,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            # /health would generate, which ends a sleeping server. The server's ranks may start
            # with different amounts of free memory if trainers use the GPUs.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        }
        return self.serve(["-m", "sglang.launch_server"], arguments, environment)

    def serve(
        self, program: Sequence[str], arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> str:
        """Run a Python server that has `/health`, and return its URL when it is ready.

        By then, SGLang has finished its warm-up generation. Otherwise that generation could run on
        an engine that is already asleep, and end it.
        """
        import with_parent

        port = _free_port()
        words = command_line({**arguments, "host": HOST, "port": port})
        atexit.register(self.stop)
        log = Path(self._folder.name) / "log"
        with log.open("wb") as output:
            self._server = subprocess.Popen(
                [sys.executable, with_parent.__file__, str(os.getpid()), *program, *words],
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        url = f"http://{HOST}:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            ended = self._server.poll()
            if ended is not None or time.monotonic() > deadline:
                self.stop()
                end = log.read_bytes()[-4000:].decode(errors="replace")
                raise RuntimeError(f"the server did not start (status {ended}):\n{end}")
            time.sleep(0.5)
        return url

    def environment(self) -> dict[str, str]:
        """Return the environment of this actor's process."""
        return dict(os.environ)

    def stop(self) -> None:
        """End the server's processes. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(END_SECONDS)


class TrainerRank:
    """An actor that is a rank of the trainer, with its own GPU unless the run uses no GPUs."""

    def gpus(self) -> list[str]:
        """Return the names of the actor's GPUs for CUDA_VISIBLE_DEVICES."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def meeting_place(self) -> tuple[str, int]:
        """Return an address and a free port of this machine."""
        return ray.util.get_node_ip_address(), _free_port()

    def run(
        self, settings: Settings, rank: int, ranks: int, master: tuple[str, int], urls: list[str]
    ) -> Any:
        """Run this rank's part, and return the results on rank 0."""
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": "0",  # among the GPUs that Ray makes visible to this process
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
        }
        from train import start

        return start(settings, urls)


def run_on_ray(settings: Settings, ranks: int, preload: bool) -> Any:
    """Run on the Ray cluster that this process is connected to, and return the results.

    Args:
        settings: the run's settings.
        ranks: the number of the trainer's ranks. Each has a GPU if the engine is SGLang.
        preload: whether to add `memsaver.preload_env()` to the environment of the engines' actors.

    Raises:
        SettingsError: the ranks cannot divide the run, or Ray has too few GPUs or CPUs.
    """
    settings.check(ranks)
    tp = settings.tp or ranks
    if ranks % tp:
        raise SettingsError(f"{ranks} ranks cannot be divided into engines of {tp}")
    settings = dataclasses.replace(settings, tp=tp)
    served = settings.engine == "sglang"
    # A bundle is on one machine, and contains a group of ranks and its engine.
    bundle = {"CPU": tp + int(served), **({"GPU": tp} if served else {})}
    has = ray.cluster_resources()
    for kind, each in bundle.items():
        if each * (ranks // tp) > has.get(kind, 0):
            raise SettingsError(
                f"{ranks} ranks in engines of {tp} need {each * (ranks // tp)} {kind}s,"
                f" and Ray has {has.get(kind, 0):g}"
            )
    bundles = placement_group([bundle] * (ranks // tp), strategy="PACK")
    ray.get(bundles.ready(), timeout=START_SECONDS)

    def placed(group: int, kind: type, **options: Any) -> Any:
        where = PlacementGroupSchedulingStrategy(bundles, group)
        return ray.remote(kind).options(num_cpus=1, scheduling_strategy=where, **options).remote()

    workers: list[Any] = []
    try:
        trainers = [placed(n // tp, TrainerRank, num_gpus=int(served)) for n in range(ranks)]
        urls: list[str] = []
        if served:
            gpus = ray.get([trainer.gpus.remote() for trainer in trainers])
            groups = range(ranks // tp)
            workers = [placed(n, EngineWorker, **worker_options(preload)) for n in groups]
            starts = [
                worker.start.remote(settings, tp, [*chain(*gpus[n * tp : (n + 1) * tp])])
                for n, worker in enumerate(workers)
            ]
            urls = ray.get(starts, timeout=START_SECONDS + 4 * END_SECONDS)
        master = ray.get(trainers[0].meeting_place.remote())
        runs = [t.run.remote(settings, n, ranks, master, urls) for n, t in enumerate(trainers)]
        return ray.get(runs)[0]
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get([worker.stop.remote() for worker in workers], timeout=2 * END_SECONDS)
        remove_placement_group(bundles)


def worker_options(preload: bool) -> dict[str, Any]:
    """Return Ray's options for the environment of an engine's actor."""
    if not preload:
        return {}
    import memsaver

    # With this machine's paths, so memsaver must be installed in the same folder on all machines.
    return {"runtime_env": {"env_vars": memsaver.preload_env()}}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Convert arguments of `sglang.Engine` to command-line arguments of SGLang's server."""
    words = []
    for name, value in arguments.items():
        if value is not False:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    from memsaver.integrations.sglang import EngineError
    from memsaver.integrations.sglang.engines import ServedEngine

    try:
        ServedEngine(url).get("/health", timeout=5)
    except EngineError:
        return False
    return True


def main(
    ranks: Annotated[int, typer.Option(min=1, help="The trainer's ranks: one for each GPU.")] = 1,
    tp: Annotated[int, typer.Option(min=0, help="The ranks of an engine; 0: all.")] = 0,
    address: Annotated[str, typer.Option(help="The address of a cluster, or local.")] = "local",
    preload: Annotated[bool, typer.Option("--preload", help="Preload the engines.")] = False,
    engine: Annotated[
        str, typer.Option(callback=one_of("sglang", "model"), help="See train.py; not vllm.")
    ] = "sglang",
    model: Annotated[str, typer.Option(help="See train.py.")] = "small",
    steps: Annotated[int, typer.Option(min=1)] = Settings.steps,
    sleep: Annotated[bool, typer.Option("--sleep/--no-sleep")] = True,
    out: Annotated[Path, typer.Option(callback=results_name, help="See train.py.")] = Path(
        "grpo-ray"
    ),
    picture: Annotated[bool, typer.Option("--picture/--no-picture", help="See train.py.")] = True,
) -> None:
    """Train with GRPO in Ray actors."""
    settings = Settings(engine=engine, model=model, steps=steps, sleep=sleep, tp=tp)
    try:
        # The engines' machines may have GPUs even if this machine has none.
        check_installed(settings, picture=picture, started=address != "local")
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    # The actors' processes import this folder's modules.
    here = {"working_dir": str(Path(__file__).parent)}
    ray.init(address=address, runtime_env=here)
    try:
        publish(run_on_ray(settings, ranks, preload), out, picture)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    finally:
        ray.shutdown()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
