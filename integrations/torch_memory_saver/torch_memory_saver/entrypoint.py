"""The object that programs use: regions, graphs, pause and resume over memsaver."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import memsaver
from memsaver import parts
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError
from memsaver.native import _C, Backup
from torch_memory_saver.backups import Backups, CpuBackupBackend, backup_for
from torch_memory_saver.binary_wrapper import BinaryWrapper, ThreadState
from torch_memory_saver.environment import Environment, read_environment
from torch_memory_saver.hooks.base import HookMode

__all__ = ["TorchMemorySaver"]


class TorchMemorySaver:
    """Pauses and resumes tensors tag by tag; every object of a process means the same tags.

    Errors are memsaver's: after one, nothing is lost and nothing is half-done. Pausing what is
    paused, resuming what is mapped, and tags that no region has named do nothing. Any thread; a
    region concerns the thread that entered it.
    """

    def __init__(self) -> None:
        self._hook_mode: HookMode = "preload"
        self._impl: _Process | None = None

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Tensors made inside belong to `tag`, and are paused and resumed with it.

        Regions of one tag may ask for different backups: each tensor has what its region asked for.

        Args:
            tag: the name to pause and resume by.
            enable_cpu_backup: contents come back from host memory; without a backup the memory
                reads as zero after a resume.
            enable_disk_backup: contents come back from a file, in the directory that
                `set_disk_backup_dir` or TMS_DISK_BACKUP_DIR names.
            cpu_backup_backend: "pinned" host memory, the fastest, or "mmap", which is ordinary
                memory. None is TMS_INIT_CPU_BACKUP_BACKEND, else "pinned".

        Raises:
            ConfigError: options that contradict each other, or an empty tag.
            InvalidStateError: the tag is paused.
            NotLoadedError: no GPU, or no torch that can use it.
        """
        impl = self._ensure_initialized()
        backup = impl.backup_for(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        name = parts.name_of(tag, backup)
        devices = impl.devices() if self._hook_mode == "preload" else None
        with memsaver.region(name, backup=backup, device=devices), impl.thread.scope():
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """`torch.cuda.graph`, with the graph's memory in `tag`. In either mode.

        Args:
            cuda_graph: a `torch.cuda.CUDAGraph` to capture into.
            pool: graphs captured here with the same one share their memory.
            stream: the stream to capture on.
            capture_error_mode: torch's.
            tag: as in `region`.
            enable_cpu_backup: as in `region`.
            cpu_backup_backend: as in `region`.

        Raises:
            ConfigError, InvalidStateError, NotLoadedError: as `region`.
        """
        impl = self._ensure_initialized()
        backup = impl.backup_for(enable_cpu_backup, False, cpu_backup_backend)
        name = parts.name_of(tag, backup)
        capture = memsaver.graph(
            cuda_graph,
            name,
            backup=backup,
            pool=pool,
            stream=stream,
            capture_error_mode=capture_error_mode,
        )
        with capture, impl.thread.scope():
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Tensors made inside belong to no tag; outside of any region it changes nothing."""
        impl = self._ensure_initialized()
        with memsaver.disabled(), impl.thread.scope():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Give the device memory of a tag, or of all, back; addresses stay.

        Raises:
            MemsaverError: what `memsaver.pause` raises; every tag is mapped with its contents then.
        """
        self._ensure_initialized()
        if not tag:
            memsaver.pause()
        elif names := parts.names_of(tag):
            memsaver.pause(*names)

    def resume(self, tag: str | None = None) -> None:
        """Map memory behind the addresses of a tag, or of all tags, and restore the saved contents.

        Then releases the host memory of "mmap" backups, and, if `retain_cpu_backup` was set to
        False, of all backups. Starts no thread.

        Raises:
            MemsaverError: an exception of `memsaver.resume`, such as `OutOfDeviceMemoryError`.
                Every tag is paused with its backup, and the call may be made again.
        """
        impl = self._ensure_initialized()
        if not tag:
            memsaver.resume()
            impl.backups.resumed([row.tag for row in memsaver.stats().tags])
        elif names := parts.names_of(tag):
            memsaver.resume(*names)
            impl.backups.resumed(names)

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """What was asked for, "preload" by default. Both work in every process.

        With "preload" a region is about all GPUs that the process uses, with "torch" about the
        current one. Cannot be set after the first use.

        Raises:
            ConfigError: on setting, there is no such mode.
            InvalidStateError: on setting, the object was used already.
        """
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise ConfigError(f"hook_mode {hook_mode!r} is not one of preload, torch")
        if self._impl is not None:
            raise InvalidStateError(
                "hook_mode cannot be set any more: set it before the first region, pause or resume"
            )
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """Device memory that allocations in regions leave free; 0 unless configured.

        One that would not is out of memory, upon which torch gives back what it caches.

        Raises:
            ConfigError: on setting, a number that is no size.
        """
        self._ensure_initialized()
        return int(_C.option("margin_bytes"))

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized().thread.set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether backups stay in host memory after a resume, for `get_cpu_backup`.

        A value set here or by TMS_RETAIN_CPU_BACKUP applies to later resumes: True keeps the host
        memory of backups with its contents, False releases it in each `resume`. If it was never
        set, this is False, and a resume keeps pinned memory, so that the next pause is fast, but
        not its contents, and releases "mmap" memory.
        """
        return self._ensure_initialized().backups.retain or False

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized().backups.retain = bool(value)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Return the copy of a tensor that the last pause saved, as a CPU tensor, or None.

        There is a copy if the tensor's tag is paused, or if it is mapped and was resumed under
        `retain_cpu_backup`. In the second case it has the contents of that pause, at the same host
        address from pause to pause.

        Args:
            x: a tensor.
            zero_copy: False copies. True makes a tensor over the backup itself, valid until the
                tag's next change. The resume of a paused tag restores what was written to it.

        Raises:
            ConfigError: `x` is not a tensor.
            InvalidStateError: the tensor's tag is paused without a backup or with one on disk.
        """
        impl = self._ensure_initialized()
        import torch

        if not isinstance(x, torch.Tensor):
            raise ConfigError(f"get_cpu_backup takes a torch tensor, not {type(x).__name__}")
        view = impl.backups.view(x, writable=zero_copy)
        return view if view is None or zero_copy else view.clone()

    def set_disk_backup_dir(self, path: str) -> None:
        """Set the directory for backups on disk, and make it if needed. Paused tags keep theirs.

        Raises:
            ConfigError: the directory cannot be made or written to.
        """
        self._ensure_initialized()
        _set_disk_dir(path)

    def _ensure_initialized(self) -> _Process:
        if self._impl is None:
            self._impl = _process(self._hook_mode)
        return self._impl


class _Process:
    """What all objects of a process share."""

    def __init__(self, environment: Environment) -> None:
        self.thread = ThreadState(environment.backend)
        self.backups = Backups(environment.retain)
        self._binary_wrapper = BinaryWrapper(self.thread)
        self._backend = environment.backend

    def backup_for(self, cpu: bool, disk: bool, backend: str | None) -> Backup:
        """Return memsaver's backup for a region's options."""
        return backup_for(cpu, disk, backend, self._backend)

    def devices(self) -> list[int] | None:
        """The GPUs that torch uses in this process, where there are several."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or torch.cuda.device_count() < 2:
            return None
        used = {torch.cuda.current_device()}
        used.update(filter(torch._C._cuda_hasPrimaryContext, range(torch.cuda.device_count())))
        return sorted(used)


def _process(hook_mode: HookMode) -> _Process:
    environment = read_environment()
    if environment.whole_process and hook_mode == "preload" and not memsaver.is_preloaded():
        raise NotLoadedError(
            "TMS_INIT_ENABLE makes the whole process a region, for which memsaver must be "
            "preloaded, and it is not: start the process in configure_subprocess(), or with "
            "LD_PRELOAD as torch_memory_saver.utils.get_binary_path_from_package says"
        )
    if not _shared:
        if environment.disk_dir is not None:
            _set_disk_dir(environment.disk_dir)
        _shared.append(_Process(environment))
    return _shared[0]


def _set_disk_dir(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the directory {path!r} for backups cannot be made: {error}") from error
    memsaver.configure(disk_dir=path)


# The first is the process's. No lock: a finalizer that allocates could come here in the middle.
_shared: list[_Process] = []
