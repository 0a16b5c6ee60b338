"""Run the example on several machines as Ray actors: trainer ranks and SGLang servers.

    python ray_workers.py --ranks 2                          a local Ray
    python ray_workers.py --ranks 16 --tp 8 --address auto   a cluster, an engine for each 8 GPUs
    python ray_workers.py --ranks 16 --nodes 2 --address auto      one engine on two machines
    python ray_workers.py --ranks 2 --engine model --model tiny      no GPU

Each group of `tp` ranks is on one machine with its engine. An actor starts this engine, an SGLang
server, on the GPUs of the group's ranks. With --nodes, a group and its engine are divided among
several machines, and an actor on each machine starts that machine's part of the engine. memsaver
needs no variables in the actors' environment, because SGLang loads it as a plugin. With --preload,
the environment of the engines' actors contains `memsaver.preload_env()`, so that allocations by
other libraries inside regions also belong to the regions. Preloading requires a new process, and
Ray starts a new process for an actor that has its own environment.
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
    """An actor that runs an SGLang server, or a part of one, in separate processes.

    `stop` ends these processes. These processes exit with the actor's process, even if that process
    is killed: the kernel then kills the server, and SGLang's processes exit with their server.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="grpo-engine-")

    def start(
        self, settings: Settings, tp: int, gpus: Sequence[str], part: Mapping[str, Any]
    ) -> str:
        """Start a server on some of this machine's GPUs, and return its URL when it responds.

        Args:
            settings: the run's settings.
            tp: the number of the engine's ranks, on all machines.
            gpus: the GPUs on this machine, for CUDA_VISIBLE_DEVICES.
            part: SGLang's arguments for this part of an engine on several machines. The first part
                receives all requests; each part responds once all parts have started.

        Raises:
            RuntimeError: the server exited or did not respond in time; the message contains the
                end of its log.
        """
        from engines import ENVIRONMENT, sglang_arguments
        from policy_model import SHAPES
        from vocabulary import Vocabulary

        own = settings.model in SHAPES
        vocabulary = Vocabulary.own() if own else Vocabulary.of_model(Path(settings.model))
        arguments = sglang_arguments(settings, vocabulary, Path(self._folder.name))
        arguments |= {"tp_size": tp, "skip_tokenizer_init": True, **part}
        environment = {
            **ENVIRONMENT,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            # /health would generate, which crashes a sleeping server. The server's ranks may start
            # with different amounts of free memory if trainers use the GPUs.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        }
        return self.serve(["-m", "sglang.launch_server"], arguments, environment)

    def serve(
        self, program: Sequence[str], arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> str:
        """Run a Python server that serves `/health`, and return the server's URL when it is ready.

        When the server is ready, SGLang has finished its warm-up generation. Without this wait, the
        warm-up could run on a sleeping engine and crash it.
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
        """Kill the server's processes. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(END_SECONDS)


class TrainerRank:
    """An actor for a rank of the trainer, with its own GPU unless the run uses no GPUs."""

    def gpus(self) -> list[str]:
        """Return the names of the actor's GPUs for CUDA_VISIBLE_DEVICES."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def meeting_place(self) -> tuple[str, int]:
        """Return this machine's address and a free port on it."""
        return ray.util.get_node_ip_address(), _free_port()

    def run(
        self, settings: Settings, rank: int, ranks: int, master: tuple[str, int], urls: list[str]
    ) -> Any:
        """Run this rank's part of the training, and return the results on rank 0."""
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": "0",  # among the GPUs that Ray makes visible to this process
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
        }
        from train import start

        return start(settings, urls)


def run_on_ray(settings: Settings, ranks: int, preload: bool, nodes: int = 1) -> Any:
    """Run the example on the Ray cluster to which this process is connected; return the results.

    Args:
        settings: the run's settings.
        ranks: the number of the trainer's ranks. Each rank has a GPU if the engine is SGLang.
        preload: whether to add `memsaver.preload_env()` to the environment of the engines' actors.
        nodes: the number of parts into which each engine is divided. Each part is on one machine,
            together with the trainer ranks whose GPUs it uses.

    Raises:
        SettingsError: the run cannot be divided among the ranks, or Ray has too few GPUs or CPUs.
    """
    settings.check(ranks)
    tp = settings.tp or ranks
    if ranks % tp:
        raise SettingsError(f"{ranks} ranks cannot be divided into engines of {tp}")
    if tp % nodes:
        raise SettingsError(f"an engine of {tp} ranks cannot be divided among {nodes} machines")
    settings = dataclasses.replace(settings, tp=tp)
    served = settings.engine == "sglang"
    # A bundle is on one machine, and contains a part of a group of ranks and of its engine.
    each, parts = tp // nodes, ranks // tp * nodes
    bundle = {"CPU": each + int(served), **({"GPU": each} if served else {})}
    has = ray.cluster_resources()
    for kind, number in bundle.items():
        if number * parts > has.get(kind, 0):
            raise SettingsError(
                f"{ranks} ranks in engines of {tp} need {number * parts} {kind}s,"
                f" and Ray has {has.get(kind, 0):g}"
            )
    bundles = placement_group([bundle] * parts, strategy="PACK")
    ray.get(bundles.ready(), timeout=START_SECONDS)

    def placed(part: int, kind: type, **options: Any) -> Any:
        where = PlacementGroupSchedulingStrategy(bundles, part)
        return ray.remote(kind).options(num_cpus=1, scheduling_strategy=where, **options).remote()

    workers: list[Any] = []
    try:
        trainers = [placed(n // each, TrainerRank, num_gpus=int(served)) for n in range(ranks)]
        urls: list[str] = []
        if served:
            gpus = ray.get([trainer.gpus.remote() for trainer in trainers])
            workers = [placed(n, EngineWorker, **worker_options(preload)) for n in range(parts)]
            firsts = [trainer.meeting_place.remote() for trainer in trainers[::tp]]
            shared = [part for place in ray.get(firsts) for part in parts_of_engine(nodes, place)]
            starts = [
                worker.start.remote(
                    settings, tp, [*chain(*gpus[n * each : (n + 1) * each])], shared[n]
                )
                for n, worker in enumerate(workers)
            ]
            urls = first_failure_or_all(starts, START_SECONDS + 4 * END_SECONDS)[::nodes]
        master = ray.get(trainers[0].meeting_place.remote())
        runs = [t.run.remote(settings, n, ranks, master, urls) for n, t in enumerate(trainers)]
        return ray.get(runs)[0]
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get([worker.stop.remote() for worker in workers], timeout=2 * END_SECONDS)
        remove_placement_group(bundles)


def parts_of_engine(nodes: int, place: tuple[str, int]) -> list[dict[str, Any]]:
    """Return SGLang's arguments for each part of an engine; {} for an engine on one machine.

    Args:
        nodes: the number of parts.
        place: the address and a free port of the first part's machine.
    """
    if nodes == 1:
        return [{}]
    shared = {"nnodes": nodes, "dist_init_addr": f"{place[0]}:{place[1]}"}
    return [{**shared, "node_rank": number} for number in range(nodes)]


def first_failure_or_all(calls: Sequence[Any], seconds: float) -> list[Any]:
    """Return the results of all calls, or raise an error as soon as one call fails.

    If a part of an engine does not start, the calls to the other parts wait for it until they time
    out.

    Raises:
        RayError: a call failed, or did not return in time.
    """
    waiting, deadline = list(calls), time.monotonic() + seconds
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise ray.exceptions.GetTimeoutError(f"{len(waiting)} servers did not start in time")
        ray.get(done)
    return list(ray.get(list(calls)))


def worker_options(preload: bool) -> dict[str, Any]:
    """Return the Ray options that define the environment of an engine's actor."""
    if not preload:
        return {}
    import memsaver

    # Contains this machine's paths, so memsaver must be in the same folder on all machines.
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
    from memsaver.integrations.engine.http.client import HttpClient
    from memsaver.integrations.sglang import EngineError

    try:
        HttpClient(url).get("/health", timeout=5)
    except EngineError:
        return False
    return True


def main(
    ranks: Annotated[
        int, typer.Option(min=1, help="The number of the trainer's ranks, one for each GPU.")
    ] = 1,
    tp: Annotated[
        int, typer.Option(min=0, help="The number of ranks of an engine; 0 means all.")
    ] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="The number of an engine's machines.")] = 1,
    address: Annotated[
        str, typer.Option(help="The address of a Ray cluster, or local to start one.")
    ] = "local",
    preload: Annotated[
        bool, typer.Option("--preload", help="Preload memsaver's library into the engines.")
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            callback=one_of("sglang", "model"), help="See train.py; vllm is not supported."
        ),
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
        publish(run_on_ray(settings, ranks, preload, nodes), out, picture)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    finally:
        ray.shutdown()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
