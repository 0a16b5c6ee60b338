"""A user's program over all of memsaver's public names, as mypy --strict has to accept it."""

import asyncio

import memsaver
from memsaver import (
    Backup,
    Change,
    DeviceProcess,
    Explanation,
    Holder,
    Range,
    State,
    Stats,
    TagStats,
    Timeline,
    Transition,
    Trim,
)
from memsaver.metrics import register


@memsaver.region("weights", backup=Backup.HOST)
def make(nbytes: int) -> object:
    from memsaver import simulator

    with memsaver.region("kv_cache", device=0), memsaver.disabled(), memsaver.region("kv_cache"):
        cache: object = simulator.buffer(nbytes)
    return [simulator.buffer(nbytes), cache]


def told(done: int, total: int) -> None:
    assert done <= total


def capture(cuda_graph: object) -> None:
    with memsaver.graph(cuda_graph, tag="cuda_graph", backup="none"):
        pass


def look(address: int) -> tuple[str, bool]:
    figures: Stats = memsaver.stats()
    row: TagStats = figures["weights"][0]
    where: Range = memsaver.ranges(row.tag, device=0)[0]
    free, total = memsaver.device_memory()
    said: Explanation = memsaver.explain(where.address + 1)
    mark: str = memsaver.fingerprint("weights")
    return f"{said} {free / total:.2f} {mark}", memsaver.is_preloaded()


def cycle() -> int:
    report: memsaver.Report = memsaver.pause("weights", backup="pageable", progress=told)
    change: Change = report.changes[0]
    state: State = memsaver.state(change.tag)
    under_way: Transition = memsaver.resume("weights", wait=False)
    done: memsaver.Report = under_way.wait(timeout=60.0)
    with memsaver.paused("kv_cache") as given:
        swapped = memsaver.swap(out="weights", into=["kv_cache"])
    memsaver.resume()
    trimmed: Trim = memsaver.trim()
    return given.bytes + done.copied_bytes + swapped.bytes + trimmed.wait() + len(state)


def saved(tensor: object) -> object:
    return memsaver.backup_view(tensor, writable=True)


def start() -> dict[str, str]:
    memsaver.configure(host_bytes="1GiB", fingerprints=True, disk_dir="")
    with memsaver.preload("trainer"):
        return memsaver.preload_env("trainer", backup="disk", env={})


@memsaver.paused("kv_cache")
async def asleep(nbytes: int) -> State:
    return memsaver.state("kv_cache")


@memsaver.disabled()
def outside(nbytes: int) -> int:
    return nbytes


def pool_of(tag: str) -> object:
    try:
        return memsaver.torch_pool(tag, backup=Backup.HOST, device=0)
    except memsaver.NotLoadedError:
        return None  # no GPU


def who_holds(error: memsaver.OutOfDeviceMemoryError) -> int:
    holders: tuple[Holder, ...] = error.holders
    others: tuple[DeviceProcess, ...] = error.processes
    held = sum(row.bytes for row in holders if row.pausable and row.state is State.MAPPED)
    return held + sum(row.bytes or 0 for row in others) + error.device


def kind_of(error: memsaver.MemsaverError) -> int:
    if isinstance(error, (memsaver.OutOfDeviceMemoryError, memsaver.OutOfHostMemoryError)):
        return error.needed - error.free
    if isinstance(error, memsaver.BackupError):
        return error.needed + error.os_error
    if isinstance(error, memsaver.DriverError):
        return len(error.call) + error.cuda_error
    if isinstance(error, (memsaver.ConfigError, memsaver.UnknownTagError)):
        return len(error.tag)
    kinds = (memsaver.InvalidStateError, memsaver.NotLoadedError)
    return len(error.status) if isinstance(error, kinds) else -1


def main() -> None:
    seen: list[str] = []
    recording: Timeline = memsaver.timeline(events=1000, interval=0.5)
    recording.start()
    before = memsaver.on_pause(seen.append)
    after = memsaver.on_resume(seen.append, tag="weights")
    kept = make(1 << 20)
    try:
        memsaver.pause("no such tag")
    except memsaver.UnknownTagError as error:
        print(kind_of(error))
    print(asyncio.run(asleep(1)), outside(2) + 1, pool_of("graphs"))
    print(look(0)[1], cycle() > 0, sorted(set(seen)), sorted(start()))
    before.remove()
    after.remove()
    recording.stop()
    assert recording.transitions and register is memsaver.metrics.register
    del kept


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("error", memsaver.MemsaverWarning)
    warnings.simplefilter("ignore", memsaver.PerformanceWarning)
    main()
